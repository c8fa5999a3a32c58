"""Complete a converted folder: permutation table, index, config, tokenizer files, manifest."""

import json
from pathlib import Path

from otf_llm.artifact import merge
from otf_llm.conversion import Recipe
from otf_llm.files import read_json_object
from otf_llm.inspection import open_verified
from otf_llm.settings import SchemeSettings
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import stage

with stage(log=snakemake.log[0]):
    source = read_json_object(Path(snakemake.input.manifest))
    checkpoint = open_verified(locate_checkpoint(snakemake.params.location), Path(snakemake.input.manifest))
    scheme = SchemeSettings.from_dict(json.loads(snakemake.params.scheme))
    recipe = Recipe.load(checkpoint, scheme, [Path(path) for path in snakemake.input.calibrated])
    shards = [Path(path).name for path in snakemake.input.shards]
    reports = [json.loads(Path(path).read_text()) for path in snakemake.input.reports]
    merge(checkpoint, recipe, Path(snakemake.output.manifest).parent, shards, reports, source)
