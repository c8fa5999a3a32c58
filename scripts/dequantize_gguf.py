"""Write a GGUF model as a Hugging Face folder of BF16 safetensors."""

import json
from pathlib import Path

from otf_llm.gguf import gguf_source, materialise
from otf_llm.stage import stage

with stage(log=snakemake.log[0], threads=snakemake.resources.processors):
    source = gguf_source(json.loads(snakemake.params.source))
    wheel = Path(snakemake.input.wheel[0]) if snakemake.input.wheel else None
    materialise(source, Path(snakemake.output[0]), wheel)
