"""Sum |W| per input channel over all linears that read an input."""

from pathlib import Path

from otf_llm.decoder import read_config
from otf_llm.inspection import open_verified
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import stage
from otf_llm.weight_statistics import save_weight_statistics, weight_statistics

with stage(log=snakemake.log[0], threads=1):
    checkpoint = open_verified(locate_checkpoint(snakemake.params.location), Path(snakemake.input.manifest))
    family, geometry = read_config(checkpoint.config)
    statistics = weight_statistics(checkpoint, family, geometry, workers=snakemake.resources.processors)
    save_weight_statistics(Path(snakemake.output[0]), statistics)
