"""Convert one source shard."""

import json
import logging
from pathlib import Path

from otf_llm.conversion import Recipe, convert_shard, converted_sizes
from otf_llm.files import check_space, write_json
from otf_llm.inspection import open_verified
from otf_llm.settings import SchemeSettings
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import stage

with stage(log=snakemake.log[0], threads=1):
    checkpoint = open_verified(locate_checkpoint(snakemake.params.location), Path(snakemake.input.manifest))
    scheme = SchemeSettings.from_dict(json.loads(snakemake.params.scheme))
    calibrated = [Path(path) for path in snakemake.input.calibrated]
    recipe = Recipe.load(checkpoint, scheme, calibrated, [snakemake.params.shard])
    weights = Path(snakemake.output.weights)
    sizes = converted_sizes(checkpoint, recipe)
    files = {f"{name}.safetensors": sizes[shard] for name, shard in snakemake.params.shards.items()}
    needed, free = check_space(weights.parent, files)
    logging.info("%s: %.1f MB still to be written, %.1f MB free", weights.parent, needed / 1e6, free / 1e6)
    report = convert_shard(checkpoint, snakemake.params.shard, recipe, weights, workers=snakemake.resources.processors)
    write_json(Path(snakemake.output.report), report)
