"""Convert a group of source shards into one output shard."""

import json
import logging
from pathlib import Path

from otf_llm.conversion import Recipe, convert_shard, converted_size
from otf_llm.files import check_space, write_json
from otf_llm.inspection import open_verified
from otf_llm.settings import SchemeSettings
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import pick_device, stage

with stage(log=snakemake.log[0], threads=1):
    checkpoint = open_verified(locate_checkpoint(snakemake.params.location), Path(snakemake.input.manifest))
    scheme = SchemeSettings.from_dict(json.loads(snakemake.params.scheme))
    calibrated = [Path(path) for path in snakemake.input.calibrated]
    shards = snakemake.params.shards
    recipe = Recipe.load(checkpoint, scheme, calibrated, shards[snakemake.wildcards.shard])
    weights = Path(snakemake.output.weights)
    sizes = {f"{name}.safetensors": converted_size(checkpoint, group, recipe) for name, group in shards.items()}
    needed, free = check_space(weights.parent, sizes)
    logging.info("%s: %.1f MB still to be written, %.1f MB free", weights.parent, needed / 1e6, free / 1e6)
    workers = snakemake.threads * snakemake.resources.processors
    report = convert_shard(
        checkpoint,
        shards[snakemake.wildcards.shard],
        recipe,
        weights,
        device=pick_device(snakemake.params.device),
        workers=workers,
    )
    write_json(Path(snakemake.output.report), report)
    source_bytes = checkpoint.shard_bytes(shards[snakemake.wildcards.shard])
    write_json(Path(snakemake.output.work), {"cores": workers, "source_bytes": source_bytes})
