rule permute:
    input:
        expand(
            "results/permute/{model}/{permutation}.safetensors",
            model=CONFIG.models,
            permutation=PERMUTATIONS,
        ),


rule weight_statistics:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        code=code(
            "blocks",
            "checkpoint",
            "decoder",
            "families",
            "files",
            "inspection",
            "shards",
            "sources",
            "streaming",
            "weight_statistics",
            "written_hash",
        ),
    output:
        "results/permute/{model}/weights.safetensors",
    log:
        "results/logs/weight_statistics/{model}.log",
    benchmark:
        "results/benchmarks/weight_statistics/{model}.tsv"
    conda:
        "../envs/pipeline.yaml"
    resources:
        processors=processors,
    params:
        location=checkpoint_location,
    message:
        "Summing |W| per input channel of {wildcards.model}"
    script:
        "../scripts/weight_statistics.py"


rule order_channels:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        activations="results/calibrate/{model}/activations.safetensors",
        weights="results/permute/{model}/weights.safetensors",
        code=code(
            "blocks",
            "calibration_profile",
            "checkpoint",
            "decoder",
            "families",
            "files",
            "packing",
            "permutation",
            "quantization",
            "settings",
            "shards",
            "sources",
            "streaming",
            "weight_statistics",
            "written_hash",
        ),
    output:
        "results/permute/{model}/{permutation}.safetensors",
    log:
        "results/logs/order_channels/{model}/{permutation}.log",
    benchmark:
        "results/benchmarks/order_channels/{model}/{permutation}.tsv"
    conda:
        "../envs/pipeline.yaml"
    params:
        location=checkpoint_location,
        settings=permutation_settings,
    message:
        "Ordering channels of {wildcards.model}: {wildcards.permutation}"
    script:
        "../scripts/order_channels.py"
