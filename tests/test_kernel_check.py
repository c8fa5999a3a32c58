"""The check of a converted model's kernels: it passes right kernels, notices wrong ones, and keeps to its limits."""

import dataclasses
import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from gpu_kernels import random_layer, random_table
from otf_kernels import int4_linear, int8_embedding
from otf_llm import kernel_check, reference
from otf_llm.kernel_check import check_kernels, max_relative_error, tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "triton-cuda" if torch.cuda.is_available() else "triton-interpreter"


def layers(count, **options):
    return [
        dataclasses.replace(random_layer(20, 64, 1, 32, seed=seed, **options), name=f"layer{seed}")
        for seed in range(count)
    ]


def dense(layer):
    """The weight of a stored layer, [N, in_features], by what it does to the unit vectors."""
    unit = torch.eye(layer.in_features, dtype=torch.float64)
    return reference.int4_linear(
        unit, layer.codes, layer.scales, layer.outliers,
        in_features=layer.in_features, group_size=layer.group_size, perm=layer.perm,
    ).T  # fmt: skip


def test_rows_of_right_kernels():
    rows = check_kernels([*layers(1), random_table(30, 16)], device=DEVICE, max_tokens=5)
    assert [(row["kernel"], row["layer"], row["shape"], row["tokens"]) for row in rows] == [
        ("int4_linear", "layer0", "20x64", 1),
        ("int4_linear", "layer0", "20x64", 5),
        ("int8_embedding", "30x16", "30x16", 1),
        ("int8_linear", "30x16", "30x16", 1),
        ("int8_embedding", "30x16", "30x16", 5),
        ("int8_linear", "30x16", "30x16", 5),
    ]
    for row in rows:
        assert row["backend"] == BACKEND
        assert row["dtype"] == "float16"
        assert row["max_relative_error"] <= row["tolerance"] < 2e-3
        assert row["passed"] is True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    rows = check_kernels([*layers(1), random_table(30, 16)], device=DEVICE, max_tokens=1, dtype=dtype)
    assert {row["dtype"] for row in rows} == {str(dtype).removeprefix("torch.")}
    assert all(row["passed"] for row in rows)


def test_activations_follow_the_outliers_dtype():
    rows = check_kernels(layers(1, outlier_dtype=torch.bfloat16), device=DEVICE, max_tokens=1)
    assert [row["dtype"] for row in rows] == ["bfloat16"]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda y: y * 1.01, pytest.approx(0.01, rel=0.2)),
        (lambda y: y.roll(1, dims=-1), pytest.approx(1, rel=0.9)),
        (lambda y: y * float("nan"), None),
    ],
    ids=["scaled", "shifted", "nan"],
)
def test_wrong_kernel_is_a_row_that_did_not_pass(monkeypatch, spoil, error):
    right = int4_linear.int4_linear
    monkeypatch.setattr(int4_linear, "int4_linear", lambda *args, **options: spoil(right(*args, **options)))
    (row,) = check_kernels(layers(1), device=DEVICE, max_tokens=1)
    assert row["passed"] is False
    assert row["max_relative_error"] == error


def test_wrong_table_kernels_do_not_pass(monkeypatch):
    for name in ("int8_linear", "int8_embedding"):
        right = getattr(int8_embedding, name)
        monkeypatch.setattr(int8_embedding, name, lambda *args, right=right: right(*args).roll(1, dims=-1))
    rows = check_kernels([random_table(30, 16)], device=DEVICE, max_tokens=3)
    assert [row["passed"] for row in rows] == [False] * 4


def test_limits():
    model = [random_table(300, 100), *layers(9)]
    rows = check_kernels(model, device=DEVICE, max_layers=3, max_rows=7, max_columns=40, max_tokens=1)
    assert [(row["layer"], row["shape"]) for row in rows] == [
        ("300x100", "7x40"),
        ("300x100", "7x40"),
        # One outlier column, and the last groups of 32 that fit: 63 columns less 32.
        ("layer0", "7x32"),
        ("layer4", "7x32"),
        ("layer8", "7x32"),
    ]
    assert all(row["passed"] for row in rows)


def test_activations_do_not_depend_on_the_other_layers():
    alone = check_kernels(layers(3)[2:], device=DEVICE, max_tokens=2)
    among = check_kernels(layers(3), device=DEVICE, max_tokens=2)
    assert among[-2:] == alone
    assert check_kernels(layers(3)[2:], device=DEVICE, max_tokens=2, seed=1) != alone


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("group_size", [0, 5, 32])
@pytest.mark.parametrize(("in_features", "max_columns"), [(129, 40), (129, 1), (64, 1000), (3, 1)])
def test_cropped_layer_is_part_of_the_layer(in_features, max_columns, group_size, permuted):
    """Outlier columns and the last background columns, in their old order, with their own scales."""
    num_outliers = 2
    layer = random_layer(6, in_features, num_outliers, group_size, permuted=permuted, biased=True)
    small = kernel_check._crop_layer(layer, 3, max_columns)
    dropped = layer.in_features - small.in_features
    channels = layer.perm.long() if permuted else torch.arange(in_features)
    kept = torch.cat((channels[:num_outliers], channels[num_outliers + dropped :])).sort().values
    rows = torch.tensor([0, 2, 5])
    assert torch.equal(dense(small), dense(layer)[rows][:, kept])
    assert torch.equal(small.bias, layer.bias[rows])
    columns, smallest = small.in_features - num_outliers, max(max_columns, math.lcm(2, group_size or 1))
    assert columns <= smallest
    assert columns % 2 == (in_features - num_outliers) % 2


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [(5, None, [0, 1, 2, 3, 4]), (5, 9, [0, 1, 2, 3, 4]), (10, 4, [0, 3, 6, 9]), (10, 1, [9]), (0, 3, [])],
)
def test_evenly_spaced(count, limit, expected):
    assert kernel_check._evenly_spaced(count, limit).tolist() == expected


def test_misfits_name_the_layer():
    (layer,) = layers(1)
    broken = {
        "perm": layer.perm.clone().index_fill_(0, torch.tensor([0]), 5).index_fill_(0, torch.tensor([1]), 5),
        "scales": layer.scales[:, 1:],
        "codes": layer.codes[1:],
        "bias": layer.bias[1:],
    }
    for name, tensor in broken.items():
        with pytest.raises(ValueError, match=rf"layer0: .*({name}|rows)"):
            check_kernels([dataclasses.replace(layer, **{name: tensor})], device=DEVICE)
    table = random_table(30, 16)
    with pytest.raises(ValueError, match="30x16: scales has 29 rows, but codes has 30"):
        check_kernels([dataclasses.replace(table, scales=table.scales[1:])], device=DEVICE)


@pytest.mark.parametrize("limit", ["max_layers", "max_rows", "max_columns", "max_tokens"])
def test_limits_are_positive(limit):
    with pytest.raises(ValueError, match=f"{limit} must be at least 1, not 0"):
        check_kernels([], device=DEVICE, **{limit: 0})


def test_relative_error():
    expected = torch.tensor([[2.0, -4.0]], dtype=torch.float64)
    assert max_relative_error(torch.tensor([[2.0, -3.0]]), expected) == 0.25
    assert max_relative_error(torch.tensor([[0.0, math.inf]]), expected) == math.inf
    assert max_relative_error(torch.tensor([[0.5]]), torch.zeros(1, 1)) == 0.5
    assert max_relative_error(torch.zeros(0, 2), torch.zeros(0, 2)) == 0
    with pytest.raises(ValueError, match="y must have shape"):
        max_relative_error(torch.zeros(2, 1), expected)


def test_tolerance_grows_with_the_number_of_terms():
    assert tolerance(torch.float16, 1) == pytest.approx(2**-10, rel=1e-3)
    assert tolerance(torch.float32, 10_000) == pytest.approx(101 * 2**-23)


def test_tolerance_knows_the_spacing_of_the_smallest_numbers():
    """Outputs around 6e-6 lie on FP16's subnormal grid of 6e-8, a hundredth of them."""
    assert tolerance(torch.float16, 1, 6e-6) == pytest.approx(2**-10 + 2**-24 / 6e-6, rel=1e-3)
    assert tolerance(torch.float16, 1, 1.0) == pytest.approx(tolerance(torch.float16, 1), rel=1e-3)
    assert tolerance(torch.float16, 1, 0.0) == tolerance(torch.float16, 1)
