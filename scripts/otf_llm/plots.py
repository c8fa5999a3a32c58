"""The plots, drawn from the tables alone: size against perplexity, bytes by category, error by layer.

Figures are made without pyplot and with matplotlib's own defaults under ours, so that neither a display nor a user's
matplotlibrc matters, and equal tables give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from otf_llm.files import atomic_path
from otf_llm.settings import SOURCE_SCHEME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

DEFAULT_SCHEME = "int4"
MEGABYTE = 1e6
POINTS_PER_INCH = 72
INK, FAINT = "#333333", "#b8b8b8"
LABEL_GAP, MARK_RADIUS, NEIGHBOURHOOD = 5, 3, 45  # in points of 1/72 inch
LOG_RANGE = 4  # perplexities further apart than this factor get a logarithmic axis

STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "text.color": INK,
    "svg.hashsalt": "otf-llm-pipeline",  # element ids would be random
}
# What a file says of its making, left out: dates and versions.
# Marker and line of each block of linears: with the colours, enough to tell all of them apart.
BLOCK_STYLES = {
    "self_attn": ("o", "-"),
    "mlp": ("s", "--"),
    "linear_attn": ("^", "-."),
    "mlp.experts": ("D", ":"),
}
METADATA = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}

CATEGORY_LABELS = {
    "codes": "INT4 codes",
    "scales": "scales",
    "fp16_columns": "FP16 columns",
    "dense": "dense linears and head",
    "embedding": "embedding",
    "other": "norms, tables, headers",
}


def draw_plots(
    summary: Path,
    sizes: Path,
    layers: Path,
    outputs: Mapping[str, Sequence[Path]],
    *,
    colors: Sequence[str],
    dpi: int,
) -> None:
    """Draw the tables ``summary``, ``sizes`` (bytes by category) and ``layers``, one panel per model.

    Args:
        outputs: files to write for ``size_perplexity``, ``bytes`` and ``layer_error``; endings .png and .svg.
        colors: at least six "#rrggbb", one per byte category.

    Nothing is written unless every figure could be drawn. Raises ValueError for fewer colours and for other endings.
    """
    if len(colors) < len(CATEGORY_LABELS):
        raise ValueError(f"plots need {len(CATEGORY_LABELS)} colours, got {len(colors)}")
    for path in (Path(path) for paths in outputs.values() for path in paths):
        if path.suffix not in METADATA:
            raise ValueError(f"{path}: plots end in {' or '.join(METADATA)}")
    frame = _read_table(summary)
    models = list(dict.fromkeys(frame["model"]))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figures = {
            "size_perplexity": draw_size_perplexity(frame, models, colors, dpi),
            "bytes": draw_bytes(_read_table(sizes), models, colors, dpi),
            "layer_error": draw_layer_error(_read_table(layers), models, colors, dpi),
        }
        for name, paths in outputs.items():
            for path in map(Path, paths):
                save_figure(figures[name], path)


def draw_size_perplexity(summary: pd.DataFrame, models: Sequence[str], colors: Sequence[str], dpi: int) -> Figure:
    """A point per scheme: size of the weight files in MB and perplexity; the source and ``int4`` stand out."""
    most = summary.groupby("model").size().max()
    figure, panels = _panels(models, dpi, width=8, heights=[max(3.6, 1.2 + 0.24 * most)] * len(models))
    points = {}
    for model, axes in zip(models, panels, strict=True):
        rows = summary[summary["model"] == model]
        x, y = rows["size_bytes"].astype(float) / MEGABYTE, rows["perplexity"].astype(float)
        special = {SOURCE_SCHEME: colors[1], DEFAULT_SCHEME: colors[2]}
        for layer, chosen in enumerate((~rows["scheme"].isin(special), rows["scheme"].isin(special))):
            shades = [special.get(scheme, colors[0]) for scheme in rows["scheme"][chosen]]
            axes.scatter(x[chosen], y[chosen], s=34, c=shades, edgecolors="white", linewidths=0.8, zorder=3 + layer)
        axes.axhline(y.iloc[0], color=colors[1], linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        if y.max() > LOG_RANGE * y.min():
            _use_log_scale(axes)
        axes.margins(x=0.08, y=0.12)
        axes.set(title=model, xlabel="weight files (MB)", ylabel="perplexity")
        points[axes] = x, y, rows["scheme"]
    figure.draw_without_rendering()
    labels = {axes: _write_labels(axes, x, names) for axes, (x, _, names) in points.items()}
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what is placed by hand from here on stays where it was put
    for axes, (x, y, _) in points.items():
        _place_labels(axes, x, y, labels[axes])
    return figure


def draw_bytes(sizes: pd.DataFrame, models: Sequence[str], colors: Sequence[str], dpi: int) -> Figure:
    """A stacked bar per scheme: MB of the weight files by category, the sum at its end."""
    counts = [sizes[sizes["model"] == model]["scheme"].nunique() for model in models]
    figure, panels = _panels(models, dpi, width=8, heights=[0.9 + 0.27 * count for count in counts])
    for model, axes in zip(models, panels, strict=True):
        table = sizes[sizes["model"] == model].pivot(index="scheme", columns="category", values="bytes") / MEGABYTE
        table = table.loc[list(dict.fromkeys(sizes[sizes["model"] == model]["scheme"])), list(CATEGORY_LABELS)]
        left = pd.Series(0.0, index=table.index)
        for color, (category, label) in zip(colors, CATEGORY_LABELS.items(), strict=False):
            axes.barh(table.index, table[category], left=left, height=0.72, color=color, label=label)
            left += table[category]
        for position, total in enumerate(left):
            axes.annotate(
                f"{total:,.1f}" if total >= 10 else f"{total:.3g}",
                (total, position),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set(title=model, xlabel="weight files (MB)", xlim=(0, 1.09 * left.max()))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def draw_layer_error(layers: pd.DataFrame, models: Sequence[str], colors: Sequence[str], dpi: int) -> Figure:
    """A line per kind of linear: relative error by layer, of ``int4`` or else the first scheme with INT4 linears.

    Experts of a layer share a line, which is their mean.
    """
    linears = layers[layers["layer"].notna()]
    figure, panels = _panels(models, dpi, width=8, heights=[3.6] * len(models))
    for model, axes in zip(models, panels, strict=True):
        rows = linears[linears["model"] == model]
        schemes = list(dict.fromkeys(rows["scheme"]))
        if not schemes:
            axes.set(title=model, xticks=[], yticks=[])
            axes.text(0.5, 0.5, "no scheme with INT4 linears", ha="center", transform=axes.transAxes)
            continue
        scheme = DEFAULT_SCHEME if DEFAULT_SCHEME in schemes else schemes[0]
        rows = rows[rows["scheme"] == scheme]
        kinds = rows["linear"].str.replace(r"\.\d+\.", ".", regex=True)
        layers_there = range(int(rows["layer"].max()) + 1)
        for index, kind in enumerate(dict.fromkeys(kinds)):
            block, _, name = kind.rpartition(".")
            # A gap where a layer has no such linear; an exact one has no place on a log axis.
            errors = rows[kinds == kind].groupby("layer")["relative_error"].mean().reindex(layers_there)
            marker, linestyle = BLOCK_STYLES.get(block, BLOCK_STYLES["self_attn"])
            axes.plot(
                errors.index,
                errors.where(errors > 0),
                color=colors[index % len(colors)],
                linestyle=linestyle,
                marker=marker,
                markersize=3,
                linewidth=1.2,
                label=name if block in ("self_attn", "mlp") else f"{block.removeprefix('mlp.')}.{name}",
            )
        axes.set(title=f"{model}, {scheme}", xlabel="layer", ylabel="weighted squared error, relative")
        _use_log_scale(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the ending, without date or version: equal figures give equal bytes."""
    with atomic_path(path) as partial:
        ending = path.suffix
        figure.savefig(partial, format=ending.removeprefix("."), dpi=figure.dpi, metadata=METADATA[ending])


def _read_table(path: Path) -> pd.DataFrame:
    """A table as it was written: names stay text (a scheme may be called "NA"), empty cells of numbers become NaN."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    text = pd.read_csv(path, dtype=str, keep_default_na=False)
    numbers = [name for name in ("size_bytes", "perplexity", "bytes", "layer", "relative_error") if name in text]
    return text.assign(**{name: pd.to_numeric(text[name].replace("", None)) for name in numbers})


def _panels(models: Sequence[str], dpi: int, width: float, heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """A figure with a panel per model, one below another; sizes in inches."""
    figure = Figure(figsize=(width, sum(heights) + 0.4), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, list(panels[:, 0])


def _use_log_scale(axes: Axes) -> None:
    """A logarithmic y axis that names values also where it spans less than a decade."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _write_labels(axes: Axes, x: Sequence[float], names: Sequence[str]) -> list[Text]:
    """Labels for points at ``x``, not in place yet, and room in the axes for any of them beside the last point."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    style = {"xycoords": "axes points", "fontsize": 8, "va": "center", "bbox": paper, "zorder": 2.5}
    texts = [axes.annotate(name, (0, 0), **style) for name in names]
    for text in texts:
        text.set_in_layout(False)
    width = max(_size(text)[0] for text in texts) + 3 * LABEL_GAP
    room = 1 - width / (axes.get_window_extent().width * _points_per_pixel(axes))
    low, high = axes.get_xlim()
    axes.set(xlim=(low, max(high, low + (max(x) - low) / room)), ylim=axes.get_ylim())
    return texts


def _place_labels(axes: Axes, x: Sequence[float], y: Sequence[float], texts: Sequence[Text]) -> None:
    """Move every label beside its point, with a line to it where it had to move away."""
    scale, area = _points_per_pixel(axes), axes.get_window_extent()
    points = (axes.transData.transform(list(zip(x, y, strict=True))) - area.p0) * scale
    places = place_labels(points.tolist(), [_size(text) for text in texts], (area.width * scale, area.height * scale))
    for text, place, point in zip(texts, places, points, strict=True):
        text.set_position((place.x, place.y))
        text.set_horizontalalignment("left" if place.x > point[0] else "right")
        if math.dist((place.x, place.y), point) > 1.5 * LABEL_GAP:
            ends = axes.transData.inverted().transform(np.array([(place.x, place.y), point]) / scale + area.p0)
            axes.plot(*ends.T, color=FAINT, linewidth=0.7, zorder=2)


def _points_per_pixel(axes: Axes) -> float:
    return POINTS_PER_INCH / axes.figure.dpi


def _size(text: Text) -> tuple[float, float]:
    """Width and height of a label in points; a little more, so that its background clips no other label."""
    extent = text.get_window_extent(text.figure.canvas.get_renderer())
    return extent.width * _points_per_pixel(text.axes), extent.height * _points_per_pixel(text.axes) + 2


@dataclass(frozen=True)
class Place:
    """Where a label goes: the middle of the edge that faces its point, and its box (left, bottom, right, top)."""

    x: float
    y: float
    box: tuple[float, float, float, float]


def place_labels(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], area: tuple[float, float]
) -> list[Place]:
    """Places for labels of ``sizes`` (width, height) beside ``points``, in an ``area`` from (0, 0), all in one unit.

    Points that are near each other in x share a column of labels, sorted like the points, on the side where nothing is
    in the way. Where both sides are taken the column joins its neighbour's, at worst into one column at the right.
    No labels overlap, given an area that is high enough for one column and wide enough for the widest label beside it.
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and points[i][0] - points[groups[-1][-1]][0] < NEIGHBOURHOOD:
            groups[-1].append(i)
        else:
            groups.append([i])
    while True:
        chosen: dict[int, Place] = {}
        blocked = None
        for position, group in enumerate(groups):
            columns = [_column(group, side, points, sizes, area) for side in (1, -1)]
            column = min(columns, key=lambda column: _obstacles(column, chosen, points, area))
            if _obstacles(column, chosen, points, area) and len(groups) > 1:
                blocked = position
                break
            chosen |= column
        if blocked is None:
            return [chosen[i] for i in range(len(points))]
        left = max(0, blocked - 1)
        groups[left : left + 2] = [groups[left] + groups[left + 1]]


def _column(group: list[int], side: int, points, sizes, area: tuple[float, float]) -> dict[int, Place]:
    """Labels of a group one above another, right (1) or left (-1) of all its points, each as near its own as can be."""
    edge = max(side * points[i][0] for i in group) * side + side * LABEL_GAP * (1 if len(group) == 1 else 2)
    pitch = max(sizes[i][1] for i in group)
    rising = sorted(group, key=lambda i: (points[i][1], points[i][0]))
    middles = spread([points[i][1] for i in rising], pitch, pitch / 2, area[1] - pitch / 2)
    column = {}
    for i, middle in zip(rising, middles, strict=True):
        far = edge + side * sizes[i][0]
        column[i] = Place(edge, middle, (min(edge, far), middle - pitch / 2, max(edge, far), middle + pitch / 2))
    return column


def spread(values: Sequence[float], pitch: float, low: float, high: float) -> list[float]:
    """Positions at least ``pitch`` apart, between ``low`` and ``high``, nearest in squares to the rising ``values``.

    Pools adjacent violators: values that are too close together move to where their mean stays.
    """
    pools: list[list[float]] = []  # [sum, count] of values less the room that the positions below take
    for index, value in enumerate(values):
        pools.append([value - index * pitch, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    means = [total / count for total, count in pools for _ in range(int(count))]
    highest = high - (len(values) - 1) * pitch
    return [max(low, min(highest, mean)) + index * pitch for index, mean in enumerate(means)]


def _obstacles(column: dict[int, Place], chosen: dict[int, Place], points, area: tuple[float, float]) -> int:
    """How many labels, marks of points and borders a column of labels would cover."""
    marks = [(x - MARK_RADIUS, y - MARK_RADIUS, x + MARK_RADIUS, y + MARK_RADIUS) for x, y in points]
    taken = [place.box for place in chosen.values()] + marks
    count = 0
    for box in (place.box for place in column.values()):
        count += box[0] < 0 or box[2] > area[0]
        count += sum(overlap(box, other) for other in taken)
    return count


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Whether two boxes (left, bottom, right, top) share an area."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
