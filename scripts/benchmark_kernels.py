"""Measure the INT4 kernel beside cuBLAS FP16 and other 4-bit kernels."""

from pathlib import Path

from otf_llm.kernel_benchmark import benchmark_kernels, write_plot, write_table
from otf_llm.stage import stage

with stage(log=snakemake.log[0]):
    table = benchmark_kernels(seed=snakemake.params.seed)
    write_table(table, Path(snakemake.output.table))
    write_plot(table, Path(snakemake.output.plot), dpi=snakemake.params.dpi)
