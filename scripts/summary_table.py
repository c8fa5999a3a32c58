"""Write the summary as CSV and Markdown, bytes by category, errors per layer and what became of every tensor."""

from pathlib import Path

from otf_llm.stage import stage
from otf_llm.tables import load_results, write_summary

with stage(log=snakemake.log[0]):
    results = load_results(
        snakemake.params.models,
        snakemake.params.schemes,
        sources=snakemake.input.sources,
        manifests=snakemake.input.manifests,
        fidelities=snakemake.input.fidelities,
        kernels=snakemake.input.kernels,
    )
    write_summary(
        results,
        seed=snakemake.params.seed,
        gguf_models=snakemake.params.gguf_models,
        summary=Path(snakemake.output.summary),
        markdown=Path(snakemake.output.markdown),
        bytes_by_category=Path(snakemake.output.bytes),
        layers=Path(snakemake.output.layers),
        tensors=Path(snakemake.output.tensors),
    )
