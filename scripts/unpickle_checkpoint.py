"""Write a folder of pytorch_model*.bin as safetensors."""

import json
from pathlib import Path

from otf_llm.pickled import write_safetensors
from otf_llm.stage import stage

with stage(log=snakemake.log[0], threads=1):
    write_safetensors(Path(json.loads(snakemake.params.source)["path"]), Path(snakemake.output[0]))
