rule tokenize:
    input:
        expand(
            "results/tokenize/{model}/{part}.safetensors",
            model=CONFIG.models,
            part=["calibration", "evaluation"],
        ),


rule tokenize_text:
    input:
        "results/source/{model}/manifest.json",
        checkpoint=checkpoint_folder,
        wheels=text_wheels,
        code=code(
            "artifact_format",
            "decoder",
            "families",
            "files",
            "registration",
            "shards",
            "sources",
            "streaming",
            "text",
            "tokenization",
            "tokens",
            "wheels",
            "written_hash",
        ),
    output:
        calibration="results/tokenize/{model}/calibration.safetensors",
        evaluation="results/tokenize/{model}/evaluation.safetensors",
    log:
        "results/logs/tokenize_text/{model}.log",
    benchmark:
        "results/benchmarks/tokenize_text/{model}.tsv"
    conda:
        "../envs/pipeline.yaml"
    params:
        location=checkpoint_location,
        texts=texts,
        errors=CONFIG.sections["tokenize"]["errors"],
        num_sequences=CONFIG.sections["calibrate"]["num_sequences"],
        sequence_length=CONFIG.sections["calibrate"]["sequence_length"],
        num_windows=CONFIG.sections["validate"]["num_windows"],
        window_length=CONFIG.sections["validate"]["window_length"],
    message:
        "Tokenising calibration and evaluation text for {wildcards.model}"
    script:
        "../scripts/tokenize_text.py"
