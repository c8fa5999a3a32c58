rule calibrate:
    input:
        expand("results/calibrate/{model}/activations.safetensors", model=CONFIG.models),


rule second_moments:
    input:
        expand("results/calibrate/{model}/second_moments.safetensors", model=CONFIG.models),


rule collect_activations:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        tokens="results/tokenize/{model}/calibration.safetensors",
        code=code(
            "artifact_format",
            "blocks",
            "calibration",
            "calibration_profile",
            "checkpoint",
            "decoder",
            "experts",
            "families",
            "files",
            "inspection",
            "layerwise",
            "registration",
            "shards",
            "sources",
            "streaming",
            "tokens",
            "written_hash",
        ),
    output:
        "results/calibrate/{model}/activations.safetensors",
    log:
        "results/logs/collect_activations/{model}.log",
    benchmark:
        "results/benchmarks/collect_activations/{model}.tsv"
    conda:
        "../envs/pipeline.yaml"
    resources:
        gpu=1,
        processors=processors,
    params:
        location=checkpoint_location,
        batch_size=CONFIG.sections["calibrate"]["batch_size"],
        device=CONFIG.device,
    message:
        "Profiling activations of {wildcards.model}, one decoder layer at a time"
    script:
        "../scripts/collect_activations.py"


rule collect_second_moments:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        tokens="results/tokenize/{model}/calibration.safetensors",
        code=code(
            "artifact_format",
            "blocks",
            "calibration",
            "calibration_profile",
            "checkpoint",
            "decoder",
            "experts",
            "families",
            "files",
            "inspection",
            "layerwise",
            "registration",
            "shards",
            "sources",
            "streaming",
            "tokens",
            "written_hash",
        ),
    output:
        "results/calibrate/{model}/second_moments.safetensors",
    log:
        "results/logs/collect_second_moments/{model}.log",
    benchmark:
        "results/benchmarks/collect_second_moments/{model}.tsv"
    conda:
        "../envs/pipeline.yaml"
    resources:
        gpu=1,
        processors=processors,
    params:
        location=checkpoint_location,
        batch_size=CONFIG.sections["calibrate"]["batch_size"],
        device=CONFIG.device,
    message:
        "Summing second moments of {wildcards.model}'s linear inputs"
    script:
        "../scripts/collect_second_moments.py"
