"""Convert one source shard."""

import json
from pathlib import Path

from otf_llm.conversion import Recipe, convert_shard
from otf_llm.files import write_json
from otf_llm.inspection import open_verified
from otf_llm.settings import SchemeSettings
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import stage

with stage(log=snakemake.log[0], threads=snakemake.resources.processors):
    checkpoint = open_verified(locate_checkpoint(snakemake.params.location), Path(snakemake.input.manifest))
    scheme = SchemeSettings.from_dict(json.loads(snakemake.params.scheme))
    recipe = Recipe.load(checkpoint, scheme, [Path(path) for path in snakemake.input.calibrated])
    report = convert_shard(checkpoint, snakemake.params.shard, recipe, Path(snakemake.output.weights))
    write_json(Path(snakemake.output.report), report)
