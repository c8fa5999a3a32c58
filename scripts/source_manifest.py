"""Check a checkpoint from end to end and describe it: files, checksums, tensor table, family."""

from pathlib import Path

from otf_llm.checkpoint import Checkpoint, build_manifest
from otf_llm.files import write_json
from otf_llm.inspection import inspect_checkpoint
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import stage

with stage(log=snakemake.log[0]):
    checkpoint = Checkpoint.open(locate_checkpoint(snakemake.params.location))
    family = inspect_checkpoint(checkpoint)
    write_json(Path(snakemake.output[0]), build_manifest(checkpoint, family.name))
