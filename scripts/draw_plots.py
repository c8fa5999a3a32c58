"""Draw size against perplexity, bytes by category and error by layer, each as PNG and SVG."""

from pathlib import Path

from otf_llm.plots import draw_plots
from otf_llm.stage import stage

with stage(log=snakemake.log[0]):
    draw_plots(
        Path(snakemake.input.summary),
        Path(snakemake.input.bytes),
        Path(snakemake.input.layers),
        {name: list(paths) for name, paths in snakemake.output.items()},
        colors=snakemake.params.colors,
        dpi=snakemake.params.dpi,
    )
