"""Turn the calibration and evaluation texts into tokens."""

import json
from pathlib import Path

from otf_llm.sources import locate_checkpoint
from otf_llm.stage import stage
from otf_llm.tokenization import tokenize_texts

with stage(log=snakemake.log[0]):
    tokenize_texts(
        json.loads(snakemake.params.texts),
        locate_checkpoint(snakemake.params.location),
        wheels=[Path(wheel) for wheel in snakemake.input.wheels],
        errors=snakemake.params.errors,
        num_sequences=snakemake.params.num_sequences,
        sequence_length=snakemake.params.sequence_length,
        num_windows=snakemake.params.num_windows,
        window_length=snakemake.params.window_length,
        calibration=Path(snakemake.output.calibration),
        evaluation=Path(snakemake.output.evaluation),
    )
