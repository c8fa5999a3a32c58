"""Sum the second moments of every linear input, one decoder layer at a time."""

from pathlib import Path

from otf_llm.calibration import write_second_moments
from otf_llm.decoder import read_config
from otf_llm.inspection import open_verified
from otf_llm.layerwise import LayerwiseModel
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import pick_device, stage
from otf_llm.tokens import load_tokens

with stage(log=snakemake.log[0], threads=snakemake.resources.processors):
    checkpoint = open_verified(locate_checkpoint(snakemake.params.location), Path(snakemake.input.manifest))
    family, geometry = read_config(checkpoint.config)
    tokens, _ = load_tokens(Path(snakemake.input.tokens))
    model = LayerwiseModel(checkpoint, family, device=pick_device(snakemake.params.device))
    batch_size, destination = snakemake.params.batch_size, Path(snakemake.output[0])
    write_second_moments(model, geometry, tokens.sequences(), batch_size, destination)
