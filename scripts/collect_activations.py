"""Profile the activations of every linear input, one decoder layer at a time."""

from pathlib import Path

from otf_llm.calibration import calibrate
from otf_llm.calibration_profile import save_statistics
from otf_llm.decoder import read_config
from otf_llm.inspection import open_verified
from otf_llm.layerwise import LayerwiseModel
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import pick_device, stage
from otf_llm.tokens import load_tokens

with stage(log=snakemake.log[0], threads=snakemake.resources.processors):
    checkpoint = open_verified(locate_checkpoint(snakemake.params.location), Path(snakemake.input.manifest))
    family, geometry = read_config(checkpoint.config)
    tokens, metadata = load_tokens(Path(snakemake.input.tokens))
    model = LayerwiseModel(checkpoint, family, device=pick_device(snakemake.params.device))
    statistics = calibrate(model, geometry, tokens.sequences(), snakemake.params.batch_size)
    save_statistics(Path(snakemake.output[0]), statistics, {"tokens": metadata})
