"""Decide which channels stay FP16 and in which order the rest are grouped."""

import json
from pathlib import Path

from otf_llm.calibration_profile import load_statistics
from otf_llm.decoder import read_config
from otf_llm.files import read_json_object
from otf_llm.permutation import channel_statistics, plan_permutation
from otf_llm.settings import PermutationSettings
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import stage
from otf_llm.weight_statistics import load_weight_statistics

with stage(log=snakemake.log[0]):
    config = read_json_object(locate_checkpoint(snakemake.params.location) / "config.json")
    family, geometry = read_config(config)
    activations = load_statistics(Path(snakemake.input.activations))
    weights = load_weight_statistics(Path(snakemake.input.weights))
    settings = PermutationSettings.from_dict(json.loads(snakemake.params.settings))
    statistics = channel_statistics(activations, weights)
    permutation = plan_permutation(family, geometry, statistics, settings)
    permutation.save(Path(snakemake.output[0]))
