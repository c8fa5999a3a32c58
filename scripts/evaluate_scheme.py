"""Compare a converted model with its source: perplexity, KL divergence, top-1 agreement, samples."""

from pathlib import Path

from otf_llm.evaluation import EvaluationSettings, evaluate_scheme
from otf_llm.sources import locate_checkpoint
from otf_llm.stage import pick_device, provenance, stage
from otf_llm.tokens import load_tokens

with stage(log=snakemake.log[0], threads=snakemake.resources.processors):
    tokens, metadata = load_tokens(Path(snakemake.input.tokens))
    settings = EvaluationSettings(
        model=snakemake.wildcards.model,
        scheme=snakemake.wildcards.scheme,
        prompts=tuple(snakemake.params.prompts),
        max_new_tokens=snakemake.params.max_new_tokens,
        dtype=snakemake.params.dtype,
        device=pick_device(snakemake.params.device),
        record={"tokens": metadata, **provenance(Path(snakemake.scriptdir))},
    )
    evaluate_scheme(
        Path(snakemake.input.converted[0]).parent,
        locate_checkpoint(snakemake.params.location),
        Path(snakemake.input.manifest),
        tokens.sequences(),
        settings,
        states=Path(snakemake.input.states),
        destination=Path(snakemake.output[0]),
    )
