"""Write time and peak memory of every job, from Snakemake's benchmark files."""

from pathlib import Path

from otf_llm.stage import stage
from otf_llm.tables import stage_table, write_table

with stage(log=snakemake.log[0]):
    write_table(stage_table(snakemake.input.benchmarks, snakemake.input.work), Path(snakemake.output[0]))
