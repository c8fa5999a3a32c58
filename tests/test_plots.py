import os
import warnings
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otf_llm.plots import (
    CATEGORY_LABELS,
    draw_bytes,
    draw_layer_error,
    draw_plots,
    draw_size_perplexity,
    overlap,
    place_labels,
    spread,
)

COLORS = ["#30638e", "#d1495b", "#edae49", "#00798c", "#8d6b94", "#6c757d"]
PLOTS = ("size_perplexity", "bytes", "layer_error")
SIZES_MB = {"source": 269.1, "int8-embedding": 240.9, "NA": 86.5, "int4": 86.5, "int4-g128": 84.8}
PERPLEXITIES = {"source": 21.97, "int8-embedding": 21.98, "NA": 28.9, "int4": 25.38, "int4-g128": 26.22}
LINEARS = ("self_attn.q_proj", "mlp.down_proj")


def summary_frame(models=("one",)):
    return pd.DataFrame(
        [(model, scheme, int(SIZES_MB[scheme] * 1e6), PERPLEXITIES[scheme]) for model in models for scheme in SIZES_MB],
        columns=["model", "scheme", "size_bytes", "perplexity"],
    )


def byte_frame(models=("one",)):
    """A sixth of each size in the first five categories, what is left in the last."""
    rows = []
    for model in models:
        for scheme, size in SIZES_MB.items():
            parts = [int(size * 1e6 / 6)] * 5
            parts.append(int(size * 1e6) - sum(parts))
            rows += [(model, scheme, name, part) for name, part in zip(CATEGORY_LABELS, parts, strict=True)]
    return pd.DataFrame(rows, columns=["model", "scheme", "category", "bytes"])


def layer_frame(models=("one",), schemes=("NA", "int4"), num_layers=3):
    rows = []
    for model in models:
        for scheme in ("int8-embedding", *schemes):
            rows.append((model, scheme, "model.embed_tokens", None, None, 1e-5))
        for scheme in schemes:
            for layer in reversed(range(num_layers)):
                rows += [(model, scheme, f"{layer}.{name}", layer, name, 0.001 * (layer + 1)) for name in LINEARS]
    frame = pd.DataFrame(rows, columns=["model", "scheme", "module", "layer", "linear", "relative_error"])
    return frame.astype({"layer": "Int64"})


def draw(folder, models=("one",), summary=None, layers=None, colors=COLORS, endings=("png", "svg")):
    """Write the tables and draw them; returns the plots' bytes by file name."""
    folder.mkdir(exist_ok=True)
    tables = {
        "summary": summary_frame(models) if summary is None else summary,
        "bytes": byte_frame(models),
        "layers": layer_frame(models) if layers is None else layers,
    }
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    outputs = {name: [folder / f"{name}.{ending}" for ending in endings] for name in PLOTS}
    draw_plots(*(folder / f"{name}.csv" for name in tables), outputs, colors=colors, dpi=60)
    return {path.name: path.read_bytes() for paths in outputs.values() for path in paths}


def test_plots_have_equal_bytes_whatever_the_user_s_settings(tmp_path):
    first = draw(tmp_path / "a")
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.hashsalt": None, "axes.grid": False}):
        assert draw(tmp_path / "b") == first
        assert matplotlib.rcParams["font.size"] == 30
    assert sorted(first) == sorted(f"{name}.{ending}" for name in PLOTS for ending in ("png", "svg"))
    for name, content in first.items():
        if name.endswith("png"):
            assert content.startswith(b"\x89PNG")
        else:
            assert content.startswith(b"<?xml")
            assert b"<dc:date>" not in content
        assert matplotlib.__version__.encode() not in content
    leftover = set(os.listdir(tmp_path / "a")) - set(first) - {"summary.csv", "bytes.csv", "layers.csv"}
    assert leftover == set()


def test_every_scheme_is_named_also_one_that_is_called_na(tmp_path):
    files = draw(tmp_path)
    for scheme in SIZES_MB:
        for plot in ("size_perplexity", "bytes"):
            assert f"<!-- {scheme} -->".encode() in files[f"{plot}.svg"]


def test_several_models_stand_one_below_another():
    models = ("one", "two", "three")
    figures = [
        draw_size_perplexity(summary_frame(models), models, COLORS, 60),
        draw_bytes(byte_frame(models), models, COLORS, 60),
        draw_layer_error(layer_frame(models), models, COLORS, 60),
    ]
    for figure in figures:
        assert [axes.get_title().removesuffix(", int4") for axes in figure.axes] == list(models)
        tops = [axes.get_position().y1 for axes in figure.axes]
        assert tops == sorted(tops, reverse=True)


def test_points_are_where_the_summary_says_and_labels_do_not_overlap():
    figure = draw_size_perplexity(summary_frame(), ["one"], COLORS, 100)
    (axes,) = figure.axes
    points = {tuple(point) for collection in axes.collections for point in collection.get_offsets().tolist()}
    assert points == {(size, PERPLEXITIES[scheme]) for scheme, size in SIZES_MB.items()}
    figure.draw_without_rendering()
    assert [text.get_text() for text in axes.texts] == list(SIZES_MB)
    boxes = [text.get_window_extent() for text in axes.texts]
    area = axes.get_window_extent()
    for index, box in enumerate(boxes):
        assert area.x0 <= box.x0
        assert box.x1 <= area.x1 + 1  # pixels are rounded
        assert not any(box.overlaps(other) for other in boxes[:index])
    assert axes.get_yscale() == "linear"


def test_a_broken_scheme_makes_the_perplexity_axis_logarithmic():
    frame = summary_frame()
    frame.loc[3, "perplexity"] = 9000.0
    assert draw_size_perplexity(frame, ["one"], COLORS, 60).axes[0].get_yscale() == "log"


def test_bars_stack_up_to_the_file_sizes():
    (axes,) = draw_bytes(byte_frame(), ["one"], COLORS, 60).axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx(list(SIZES_MB.values()))
    assert [text.get_text() for text in axes.texts] == [f"{size:,.1f}" for size in SIZES_MB.values()]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(SIZES_MB)
    assert axes.yaxis_inverted()
    assert [container.get_label() for container in axes.containers] == list(CATEGORY_LABELS.values())


def test_layer_errors_are_those_of_the_default_scheme_by_layer():
    layers = layer_frame()
    layers.loc[layers["scheme"] == "NA", "relative_error"] = 0.5
    (axes,) = draw_layer_error(layers, ["one"], COLORS, 60).axes
    assert [line.get_label() for line in axes.lines] == ["q_proj", "down_proj"]
    for line in axes.lines:
        assert list(line.get_xdata()) == [0, 1, 2]
        assert list(line.get_ydata()) == pytest.approx([0.001, 0.002, 0.003])
    assert axes.get_yscale() == "log"


def test_without_the_default_scheme_the_first_with_int4_linears_is_drawn(tmp_path):
    layers = layer_frame(schemes=("NA", "int4-g128"))
    (axes,) = draw_layer_error(layers, ["one"], COLORS, 60).axes
    assert axes.get_title() == "one, NA"
    files = draw(tmp_path, layers=layer_frame(schemes=()))
    assert b"<!-- no scheme with INT4 linears -->" in files["layer_error.svg"]


def test_exact_layers_and_equal_schemes_are_no_trouble(tmp_path):
    layers = layer_frame(num_layers=1)
    layers["relative_error"] = 0.0
    summary = summary_frame().assign(size_bytes=1000, perplexity=260.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = draw(tmp_path, summary=summary, layers=layers)
    assert b"<!-- int4-g128 -->" in files["size_perplexity.svg"]


def test_what_cannot_be_drawn_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="plots need 6 colours, got 5"):
        draw(tmp_path, colors=COLORS[:5])
    with pytest.raises(ValueError, match=r"size_perplexity\.pdf: plots end in \.png or \.svg"):
        draw(tmp_path, endings=("png", "pdf"))
    with pytest.raises(ValueError, match=r"absent\.csv: no such file"):
        draw_plots(tmp_path / "absent.csv", Path(), Path(), {}, colors=COLORS, dpi=60)
    assert sorted(os.listdir(tmp_path)) == ["bytes.csv", "layers.csv", "summary.csv"]


def test_spread_moves_values_apart_and_no_further():
    assert spread([1.0, 5.0, 9.0], 2, 0, 10) == [1, 5, 9]
    assert spread([5.0, 5.0, 5.0], 2, 0, 10) == [3, 5, 7]
    assert spread([5.0, 5.5], 2, 0, 10) == [4.25, 6.25]
    assert spread([0.0, 0.0, 0.0], 2, 0, 10) == [0, 2, 4]
    assert spread([9.0, 10.0], 2, 0, 10) == [8, 10]
    assert spread([], 2, 0, 10) == []


def test_a_lone_label_stands_right_of_its_point_unless_that_is_taken():
    (place,) = place_labels([(50.0, 60.0)], [(40.0, 10.0)], (400, 200))
    assert (place.x, place.y, place.box) == (55, 60, (55, 55, 95, 65))
    # The second point, 60 to the right, would be covered by the first one's label of 80.
    first, second = place_labels([(100.0, 60.0), (160.0, 60.0)], [(80.0, 10.0), (40.0, 10.0)], (400, 200))
    assert first.box == (15, 55, 95, 65)
    assert second.box == (165, 55, 205, 65)


coordinates = st.tuples(st.floats(0, 420), st.floats(0, 250))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(coordinates, st.floats(20, 90)), min_size=1, max_size=16))
def test_labels_never_cover_each_other_or_a_point(drawn):
    points = [point for point, _ in drawn]
    places = place_labels(points, [(width, 11.0) for _, width in drawn], (530, 250))
    for index, place in enumerate(places):
        left, bottom, right, top = place.box
        assert left >= 0
        assert bottom >= -1e-9
        assert right <= 530
        assert top <= 250 + 1e-9
        shrunk = (left, bottom + 1e-6, right, top - 1e-6)
        assert not any(overlap(shrunk, other.box) for other in places[:index])
        assert not any(left < x < right and bottom < y < top for x, y in points)
