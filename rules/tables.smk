rule tables:
    input:
        "results/tables/summary.csv",
        "results/tables/summary.md",
        "results/tables/bytes.csv",
        "results/tables/layers.csv",
        "results/tables/tensors.csv",
        "results/tables/stages.csv",
        expand(
            "results/tables/{plot}.{ending}",
            plot=["size_perplexity", "bytes", "layer_error"],
            ending=["png", "svg"],
        ),


rule summary_table:
    input:
        sources=expand("results/source/{model}/manifest.json", model=CONFIG.models),
        manifests=expand(
            "results/convert/{model}/{scheme}/manifest.json",
            model=CONFIG.models,
            scheme=CONFIG.schemes,
        ),
        fidelities=expand(
            "results/validate/{model}/{scheme}/fidelity.json",
            model=CONFIG.models,
            scheme=["source", *CONFIG.schemes],
        ),
        kernels=expand(
            "results/validate/{model}/{scheme}/kernels.json",
            model=CONFIG.models,
            scheme=CONFIG.schemes,
        ),
        code=code(
            "accounting",
            "blocks",
            "checkpoint",
            "decoder",
            "families",
            "files",
            "settings",
            "shards",
            "streaming",
            "tables",
            "written_hash",
        ),
    output:
        summary="results/tables/summary.csv",
        markdown="results/tables/summary.md",
        bytes="results/tables/bytes.csv",
        layers="results/tables/layers.csv",
        tensors="results/tables/tensors.csv",
    log:
        "results/logs/summary_table.log",
    benchmark:
        "results/benchmarks/summary_table.tsv"
    conda:
        "../envs/pipeline.yaml"
    params:
        models=list(CONFIG.models),
        schemes=list(CONFIG.schemes),
        seed=CONFIG.seed,
        gguf_models=GGUF_MODELS,
    message:
        "Writing the summary, byte, layer and tensor tables"
    script:
        "../scripts/summary_table.py"


rule stage_table:
    input:
        benchmarks=stage_benchmarks,
        work=convert_work,
        code=code(
            "accounting",
            "blocks",
            "checkpoint",
            "decoder",
            "families",
            "files",
            "settings",
            "shards",
            "streaming",
            "tables",
            "written_hash",
        ),
    output:
        "results/tables/stages.csv",
    log:
        "results/logs/stage_table.log",
    conda:
        "../envs/pipeline.yaml"
    message:
        "Writing time and peak memory of every stage"
    script:
        "../scripts/stage_table.py"


rule draw_plots:
    input:
        summary="results/tables/summary.csv",
        bytes="results/tables/bytes.csv",
        layers="results/tables/layers.csv",
        code=code("files", "plots", "settings"),
    output:
        size_perplexity=expand("results/tables/size_perplexity.{ending}", ending=["png", "svg"]),
        bytes=expand("results/tables/bytes.{ending}", ending=["png", "svg"]),
        layer_error=expand("results/tables/layer_error.{ending}", ending=["png", "svg"]),
    log:
        "results/logs/draw_plots.log",
    conda:
        "../envs/pipeline.yaml"
    params:
        dpi=CONFIG.sections["plots"]["dpi"],
        colors=CONFIG.sections["plots"]["colors"],
    message:
        "Drawing the plots"
    script:
        "../scripts/draw_plots.py"
