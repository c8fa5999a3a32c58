rule benchmark_kernels:
    input:
        code=code(
            "files",
            "kernel_benchmark",
            "otf_kernels/__init__",
            "otf_kernels/hopper",
            "otf_kernels/packed_int4",
            "packing",
            "quantization",
        ),
    output:
        table="results/tables/kernels.csv",
        plot="results/tables/kernels.png",
    log:
        "results/logs/benchmark_kernels.log",
    conda:
        "../envs/pipeline.yaml"
    resources:
        gpu=1,
    params:
        seed=CONFIG.seed,
        dpi=CONFIG.sections["plots"]["dpi"],
    message:
        "Measuring the INT4 kernel"
    script:
        "../scripts/benchmark_kernels.py"
