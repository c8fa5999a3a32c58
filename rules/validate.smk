rule validate:
    input:
        expand("results/validate/{model}/source/fidelity.json", model=CONFIG.models),
        expand(
            "results/validate/{model}/{scheme}/{check}.json",
            model=CONFIG.models,
            scheme=CONFIG.schemes,
            check=["fidelity", "kernels"],
        ),


rule evaluate_source:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        tokens="results/tokenize/{model}/evaluation.safetensors",
        code=code(
            "artifact_format",
            "blocks",
            "checkpoint",
            "decoder",
            "evaluation",
            "experts",
            "families",
            "files",
            "inspection",
            "modules",
            "otf_kernels/__init__",
            "otf_kernels/int4_linear",
            "otf_kernels/int8_embedding",
            "packing",
            "quantization",
            "reference",
            "registration",
            "settings",
            "shards",
            "sources",
            "streaming",
            "tokens",
            "written_hash",
        ),
    output:
        fidelity="results/validate/{model}/source/fidelity.json",
        states="results/validate/{model}/source/states.safetensors",
    log:
        "results/logs/evaluate_source/{model}.log",
    benchmark:
        "results/benchmarks/evaluate_source/{model}.tsv"
    conda:
        "../envs/pipeline.yaml"
    resources:
        gpu=1,
        processors=processors,
    params:
        location=checkpoint_location,
        prompts=prompts,
        max_new_tokens=CONFIG.sections["validate"]["max_new_tokens"],
        dtype=CONFIG.sections["validate"]["dtype"],
        device=CONFIG.device,
    message:
        "Evaluating the source of {wildcards.model}"
    script:
        "../scripts/evaluate_source.py"


rule evaluate_scheme:
    input:
        manifest="results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        tokens="results/tokenize/{model}/evaluation.safetensors",
        states="results/validate/{model}/source/states.safetensors",
        converted=converted_files,
        code=code(
            "artifact_format",
            "blocks",
            "checkpoint",
            "decoder",
            "evaluation",
            "experts",
            "families",
            "files",
            "inspection",
            "modules",
            "otf_kernels/__init__",
            "otf_kernels/int4_linear",
            "otf_kernels/int8_embedding",
            "packing",
            "quantization",
            "reference",
            "registration",
            "settings",
            "shards",
            "sources",
            "streaming",
            "tokens",
            "written_hash",
        ),
    output:
        "results/validate/{model}/{scheme}/fidelity.json",
    log:
        "results/logs/evaluate_scheme/{model}/{scheme}.log",
    benchmark:
        "results/benchmarks/evaluate_scheme/{model}/{scheme}.tsv"
    conda:
        "../envs/pipeline.yaml"
    resources:
        gpu=1,
        processors=processors,
    params:
        location=checkpoint_location,
        prompts=prompts,
        max_new_tokens=CONFIG.sections["validate"]["max_new_tokens"],
        dtype=CONFIG.sections["validate"]["dtype"],
        device=CONFIG.device,
    message:
        "Comparing {wildcards.scheme} with the source of {wildcards.model}"
    script:
        "../scripts/evaluate_scheme.py"


rule check_kernels:
    input:
        converted=converted_files,
        code=code(
            "artifact_format",
            "files",
            "kernel_check",
            "otf_kernels/__init__",
            "otf_kernels/int4_linear",
            "otf_kernels/int8_embedding",
            "packing",
            "quantization",
            "reference",
            "stored_layers",
        ),
    output:
        "results/validate/{model}/{scheme}/kernels.json",
    log:
        "results/logs/check_kernels/{model}/{scheme}.log",
    benchmark:
        "results/benchmarks/check_kernels/{model}/{scheme}.tsv"
    conda:
        "../envs/pipeline.yaml"
    resources:
        gpu=1,
        processors=processors,
    params:
        layers=CONFIG.sections["validate"]["kernel_layers"],
        rows=CONFIG.sections["validate"]["kernel_rows"],
        tokens=CONFIG.sections["validate"]["kernel_tokens"],
        device=CONFIG.device,
        seed=CONFIG.seed,
    message:
        "Checking kernels against their references on layers of {wildcards.model} in {wildcards.scheme}"
    script:
        "../scripts/check_kernels.py"
