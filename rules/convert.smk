rule convert:
    input:
        expand(
            "results/convert/{model}/{scheme}/{file}",
            model=CONFIG.models,
            scheme=CONFIG.schemes,
            file=["manifest.json", "config.json", "model.safetensors.index.json"],
        ),
        [shard for model in CONFIG.models for scheme in CONFIG.schemes for shard in shard_files_of(model, scheme)],


rule convert_shard:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        calibrated=calibrated_inputs,
        code=code(
            "blocks",
            "calibration_profile",
            "checkpoint",
            "conversion",
            "decoder",
            "families",
            "files",
            "inspection",
            "packing",
            "permutation",
            "quantization",
            "scheme_fit",
            "settings",
            "shards",
            "sources",
            "streaming",
            "written_hash",
        ),
    output:
        weights="results/convert/{model}/{scheme}/{shard}.safetensors",
        report="results/convert/{model}/{scheme}/reports/{shard}.json",
        work="results/benchmarks/convert_shard/{model}/{scheme}/{shard}.json",
    log:
        "results/logs/convert_shard/{model}/{scheme}/{shard}.log",
    benchmark:
        "results/benchmarks/convert_shard/{model}/{scheme}/{shard}.tsv"
    conda:
        "../envs/pipeline.yaml"
    threads: convert_threads
    resources:
        gpu=1,
        processors=processors,
    params:
        device=CONFIG.device,
        location=checkpoint_location,
        shards=source_shards,
        scheme=scheme_settings,
    message:
        "Converting {wildcards.model} to {wildcards.scheme}, {wildcards.shard}"
    script:
        "../scripts/convert_shard.py"


rule merge_shards:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        calibrated=calibrated_inputs,
        shards=shard_files,
        reports=shard_reports,
        code=code(
            "artifact",
            "artifact_format",
            "blocks",
            "calibration_profile",
            "checkpoint",
            "conversion",
            "decoder",
            "families",
            "files",
            "inspection",
            "packing",
            "permutation",
            "quantization",
            "scheme_fit",
            "settings",
            "shards",
            "sources",
            "streaming",
            "written_hash",
        ),
    output:
        manifest="results/convert/{model}/{scheme}/manifest.json",
        config="results/convert/{model}/{scheme}/config.json",
        index="results/convert/{model}/{scheme}/model.safetensors.index.json",
    log:
        "results/logs/merge_shards/{model}/{scheme}.log",
    benchmark:
        "results/benchmarks/merge_shards/{model}/{scheme}.tsv"
    conda:
        "../envs/pipeline.yaml"
    params:
        location=checkpoint_location,
        scheme=scheme_settings,
    message:
        "Completing {wildcards.model} in {wildcards.scheme}: index, config, tokenizer, checksums"
    script:
        "../scripts/merge_shards.py"
