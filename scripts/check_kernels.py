"""Compare every kernel with its reference on the layers of a converted model."""

import os
from pathlib import Path

from otf_llm.files import write_json
from otf_llm.kernel_check import check_kernels
from otf_llm.stage import pick_device, provenance, stage
from otf_llm.stored_layers import stored_layers

with stage(log=snakemake.log[0], threads=snakemake.resources.processors):
    device = pick_device(snakemake.params.device)
    limits = {"max_tokens": snakemake.params.tokens}
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is first imported
        limits |= {"max_layers": snakemake.params.layers, "max_rows": snakemake.params.rows}
    layers = stored_layers(Path(snakemake.input.converted[0]).parent)
    rows = check_kernels(layers, device=device, seed=snakemake.params.seed, **limits)
    write_json(Path(snakemake.output[0]), {"rows": rows, **provenance(Path(snakemake.scriptdir))})
