"""Perplexity and samples of the source model, and the hidden states that converted models are compared with."""

from pathlib import Path

from otf_llm.evaluation import EvaluationSettings, evaluate_source
from otf_llm.settings import SOURCE_SCHEME
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import pick_device, provenance, stage
from otf_llm.tokens import load_tokens

with stage(log=snakemake.log[0], threads=snakemake.resources.processors):
    tokens, metadata = load_tokens(Path(snakemake.input.tokens))
    settings = EvaluationSettings(
        model=snakemake.wildcards.model,
        scheme=SOURCE_SCHEME,
        prompts=tuple(snakemake.params.prompts),
        max_new_tokens=snakemake.params.max_new_tokens,
        dtype=snakemake.params.dtype,
        device=pick_device(snakemake.params.device),
        record={"tokens": metadata, **provenance(Path(snakemake.scriptdir))},
    )
    evaluate_source(
        locate_checkpoint(snakemake.params.location),
        Path(snakemake.input.manifest),
        tokens.sequences(),
        settings,
        states=Path(snakemake.output.states),
        destination=Path(snakemake.output.fidelity),
    )
