"""The Triton kernels against the float64 reference: in Triton's interpreter on a CPU, compiled where there is a GPU.

Tolerances are ``kernel_check.tolerance``: one epsilon of the activations' dtype, and float32's for the sums.
"""

import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from gpu_kernels import (
    apply_layer,
    pack,
    random_activations,
    random_layer,
    random_table,
    reference_layer,
    relative_error,
)
from otf_kernels import int4_linear as int4_linear_module
from otf_kernels import int4_portable, int4_prefill, int8_embedding, is_interpreted
from otf_kernels.int4_layout import arrange, pack_layer, pack_layers
from otf_kernels.int4_linear import int4_linear
from otf_llm import reference
from otf_llm.kernel_check import Int4Layer, tolerance
from otf_llm.modules import Int4Linear
from otf_llm.packing import pack_int4

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 64  # elements of foreign memory on either side of a guarded tensor


def guarded(tensor, fill):
    """A copy of the tensor inside a larger buffer full of ``fill``, and that buffer."""
    buffer = torch.full((tensor.numel() + 2 * MARGIN,), fill, dtype=tensor.dtype, device=tensor.device)
    inside = buffer[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside, buffer


def guarded_packed(layer):
    """The layer in the kernels' order, with NaN around every float and 1s in every bit around the words."""
    packed = pack(layer)
    fills = {"words": -1, "scales": math.nan, "row_factors": math.nan, "outliers": math.nan, "bias": math.nan}
    tensors = {name: getattr(packed, name) for name in fills}
    return dataclasses.replace(
        packed, **{name: guarded(value, fills[name])[0] for name, value in tensors.items() if value is not None}
    )


def guarded_perm(layer):
    return None if layer.perm is None else guarded(layer.perm, -1)[0]


def assert_matches(y, expected, num_terms):
    assert relative_error(y, expected) <= tolerance(y.dtype, num_terms)


def check_layer(layer, x, out=None):
    y = int4_linear(x, guarded_packed(layer), perm=guarded_perm(layer), out=out)
    assert y.dtype is x.dtype
    assert_matches(y, reference_layer(x.double(), layer), layer.in_features)
    return y


def test_interpreter_is_on_without_a_gpu():
    assert is_interpreted(int4_portable.int4_portable_kernel) is (DEVICE == "cpu")


@pytest.mark.parametrize("in_features", [1, 7, 63, 64, 65, 127, 257])
@pytest.mark.parametrize("num_rows", [1, 7, 16, 48, 260])
def test_shape_grid(num_rows, in_features):
    """Odd sizes in every dimension, foreign memory around every tensor; float32, which shows the smallest slip."""
    group_size = (0, 64, 32)[(num_rows + in_features) % 3]
    num_outliers = round(in_features / 100)
    permuted = num_rows % 3 != 0
    layer = random_layer(
        num_rows, in_features, num_outliers, group_size, permuted=permuted, biased=permuted, device=DEVICE
    )
    for tokens in (1, 2, 3, 7, 16, 17):
        x, _ = guarded(random_activations(tokens, in_features, torch.float32, DEVICE), float("nan"))
        out, around = guarded(torch.full((tokens, num_rows), float("nan"), device=DEVICE), 777.0)
        check_layer(layer, x, out=out)
        assert (around[:MARGIN] == 777).all()
        assert (around[-MARGIN:] == 777).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outlier_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group_size", [0, 64])
@pytest.mark.parametrize("permuted", [False, True])
def test_dtype_grid(dtype, outlier_dtype, group_size, permuted):
    layer = random_layer(
        48, 129, 2, group_size, permuted=permuted, biased=permuted, outlier_dtype=outlier_dtype, device=DEVICE
    )
    check_layer(layer, random_activations(7, 129, dtype, DEVICE))


@pytest.mark.parametrize("tokens", [1, 17, 33, 129])
def test_each_tile_of_the_table(tokens):
    layer = random_layer(130, 127, 1, 64, device=DEVICE)
    check_layer(layer, random_activations(tokens, 127, torch.float16, DEVICE))


def test_bias_dtypes():
    layer = random_layer(7, 64, 1, 64, device=DEVICE)
    x = random_activations(2, 64, torch.float32, DEVICE)
    for dtype in (torch.float16, torch.bfloat16):
        bias = layer.bias.to(dtype)
        packed = pack_layer(layer.codes, layer.scales, layer.outliers, in_features=64, group_size=64, bias=bias)
        y = int4_linear(x, packed, perm=layer.perm)
        expected = reference.int4_linear(
            x.double(), layer.codes, layer.scales, layer.outliers, in_features=64, group_size=64, perm=layer.perm
        )
        assert_matches(y, expected + bias.double(), 64)


@pytest.mark.parametrize("group_size", [1, 3, 5, 37, 96, 1000])
def test_group_sizes_that_no_tile_divides(group_size):
    """Odd groups begin inside a byte; the last is short, or the only one."""
    layer = random_layer(17, 129, 2, group_size, device=DEVICE)
    check_layer(layer, random_activations(3, 129, torch.float32, DEVICE))


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.parametrize("group_size", [0, 16, 32, 64, 128, 256])
def test_any_tile_with_any_group(block_n, group_size, split):
    """288 weights of 1, stored as 1 · 1, 2 · 1/2 or 4 · 1/4 by turns, so that a wrong scale changes the sum."""
    power = torch.arange(288, device=DEVICE) // (group_size or 288) % 3
    codes = pack_int4((2**power).to(torch.int8).expand(16, -1))
    scales = (0.5 ** power[:: group_size or 288]).half().repeat(16, 1)
    packed = pack(Int4Layer("ones", codes, scales, scales[:, :0].contiguous(), None, 288, group_size))
    config = int4_portable.Config(16, block_n, 4, 2, split)
    y = int4_portable.launch(torch.ones(2, 288, device=DEVICE), packed, None, torch.empty(2, 16, device=DEVICE), config)
    assert (y == 288).all()


@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_split_is_the_same_in_every_run(tokens):
    """Parts of the channels are summed in one order; the counters are back at zero for the next launch."""
    layer = random_layer(70, 1100, 21, 64, device=DEVICE)
    packed = guarded_packed(layer)
    x = random_activations(tokens, 1100, torch.float32, DEVICE)
    results = []
    for split in (1, 3, 5, 5):
        config = int4_portable.Config(16, 32, 4, 2, split)
        y = torch.full((tokens, 70), 777.0, device=DEVICE)
        results.append(int4_portable.launch(x, packed, layer.perm, y, config))
        assert_matches(y, reference_layer(x.double(), layer), 1100)
        assert not packed.arrivals.any()
    assert torch.equal(results[2], results[3])


@pytest.mark.parametrize("shape", [(20, 70, 3), (20, 64, 8), (20, 40, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_activations_in_the_kernels_order(shape, dtype):
    """The same bits as from the stored order, whatever the padding between outliers and background."""
    layer = random_layer(*shape, 64, device=DEVICE)
    packed = guarded_packed(layer)
    x = random_activations(3, layer.in_features, dtype, DEVICE)
    arranged = guarded(arrange(x, packed, layer.perm), math.nan)[0]
    assert torch.equal(int4_linear(arranged, packed), int4_linear(x, packed, perm=layer.perm))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group_size", [0, 64, 128, 256])
@pytest.mark.parametrize("permuted", [False, True])
def test_many_tokens_by_slabs(monkeypatch, dtype, group_size, permuted):
    """From PREFILL_TOKENS tokens on weights are written out; here three output features of 257 channels at a time."""
    monkeypatch.setattr(int4_linear_module, "PREFILL_TOKENS", 5)
    monkeypatch.setattr(int4_prefill, "ROW_STEP", 3)
    slabs = []
    dequantize = int4_prefill.dequantize
    monkeypatch.setattr(int4_prefill, "dequantize", lambda *arguments: slabs.append(0) or dequantize(*arguments))
    monkeypatch.setattr(int4_prefill.launch, "__defaults__", (1,))
    layer = random_layer(67, 257, 3, group_size, permuted=permuted, biased=permuted, device=DEVICE)
    for tokens, expected in ((5, 23), (4, 0)):
        slabs.clear()
        check_layer(layer, random_activations(tokens, 257, dtype, DEVICE))
        assert len(slabs) == expected


@pytest.mark.parametrize("group_size", [64, 96])
def test_many_tokens_where_slabs_do_not_fit(monkeypatch, group_size):
    """Groups that cut planes, and float16 activations beside outliers past 65504, stay with the fused kernel."""
    monkeypatch.setattr(int4_linear_module, "PREFILL_TOKENS", 5)
    outlier_dtype = torch.bfloat16 if group_size == 64 else torch.float16
    monkeypatch.setattr(int4_prefill, "launch", None)
    layer = random_layer(20, 257, 3, group_size, outlier_dtype=outlier_dtype, device=DEVICE)
    check_layer(layer, random_activations(6, 257, torch.float16, DEVICE))


@pytest.mark.parametrize("num_rows", [32, 96, 260])
def test_every_output_is_written(num_rows):
    """Fewer rows than a tile, and a last tile that is not full: nothing of the prefilled output is left."""
    layer = random_layer(num_rows, 64, 1, 0, device=DEVICE)
    out = torch.full((3, num_rows), 777.0, device=DEVICE)
    x = random_activations(3, 64, torch.float32, DEVICE)
    assert check_layer(layer, x, out=out) is out
    assert not (out == 777).any()
    table = random_table(num_rows, 64, device=DEVICE)
    out.fill_(777)
    assert int8_embedding.int8_linear(x, table.codes, table.scales, out=out) is out
    assert_matches(out, reference.int8_linear(x.double(), table.codes, table.scales), 64)
    assert not (out == 777).any()
    rows = torch.full((num_rows, 64), 777.0, device=DEVICE)
    ids = torch.arange(num_rows, device=DEVICE)
    int8_embedding.int8_embedding(ids, table.codes, table.scales, torch.float32, out=rows)
    assert_matches(rows, reference.dequantize_int8(table.codes, table.scales, torch.float64), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leading", [(3, 1), (2, 5), (), (2, 0, 3)])
def test_leading_shapes(leading, dtype):
    """Equal rows at any batch position give the result of one row alone."""
    layer = random_layer(48, 127, 1, 64, device=DEVICE)
    table = random_table(48, 127, device=DEVICE)
    row = random_activations(1, 127, dtype, DEVICE)
    x = row[0].expand(*leading, 127)
    for function in (
        lambda x: apply_layer(x, layer),
        lambda x: int8_embedding.int8_linear(x, table.codes, table.scales),
    ):
        y = function(x)
        assert y.shape == (*leading, 48)
        assert torch.equal(y, function(row)[0].expand(*leading, 48))


def test_strided_activations():
    layer = random_layer(17, 65, 1, 64, device=DEVICE)
    wide = random_activations(6, 130, torch.float32, DEVICE)
    for x in (wide[:, ::2], wide[::2, 1:66], wide[:, :65].T.contiguous().T, wide.view(2, 3, 130)[:, :, 65:]):
        assert not x.is_contiguous()
        check_layer(layer, x)


def test_outliers_past_float16():
    """Columns that FP16 cannot hold are stored as bfloat16, and stay finite beside bfloat16 activations."""
    layer = random_layer(17, 65, 2, 64, outlier_dtype=torch.bfloat16, device=DEVICE)
    layer.outliers[0] = 70000
    for dtype in (torch.bfloat16, torch.float32):
        check_layer(layer, random_activations(3, 65, dtype, DEVICE))


def test_layer_of_outliers_only():
    check_layer(random_layer(17, 20, 20, 64, device=DEVICE), random_activations(3, 20, torch.float16, DEVICE))


@pytest.mark.parametrize("scale", [0.0, 6e-8, 65504.0])
def test_extreme_scales(scale):
    layer = random_layer(17, 64, 0, 64, device=DEVICE)
    layer.scales[::2] = scale
    check_layer(layer, random_activations(3, 64, torch.float32, DEVICE))


def test_nothing_to_compute():
    layer = random_layer(5, 64, 1, 64, device=DEVICE)
    table = random_table(5, 64, device=DEVICE)
    x = torch.zeros(0, 64, device=DEVICE)
    assert apply_layer(x, layer).shape == (0, 5)
    assert int8_embedding.int8_linear(x, table.codes, table.scales).shape == (0, 5)
    ids = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    assert int8_embedding.int8_embedding(ids, table.codes, table.scales, torch.float16).shape == (0, 3, 64)
    no_rows = random_layer(0, 64, 1, 64, device=DEVICE)
    assert apply_layer(x.new_zeros(2, 64), no_rows).shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "width"), [(1, 1), (260, 63), (7, 1025)])
def test_int8_table(vocabulary, width, dtype):
    table = random_table(vocabulary, width, device=DEVICE)
    codes, _ = guarded(table.codes, 127)
    scales, _ = guarded(table.scales, float("nan"))
    ids = torch.tensor([[0, vocabulary - 1, vocabulary // 2]], device=DEVICE)
    rows = int8_embedding.int8_embedding(ids, codes, scales, dtype)
    assert rows.dtype is dtype
    assert_matches(rows, reference.int8_embedding(ids, codes, scales, torch.float64), 1)
    assert torch.equal(int8_embedding.int8_embedding(ids.int(), codes, scales, dtype), rows)
    for tokens in (1, 17):
        x, _ = guarded(random_activations(tokens, width, dtype, DEVICE), float("nan"))
        logits = int8_embedding.int8_linear(x, codes, scales)
        assert logits.shape == (tokens, vocabulary)
        assert_matches(logits, reference.int8_linear(x.double(), codes, scales), width)


@pytest.mark.parametrize("outside", [-1, 5, 2**40])
def test_id_outside_the_vocabulary(outside):
    table = random_table(5, 63, device=DEVICE)
    ids = torch.tensor([4, outside], device=DEVICE)
    with pytest.raises(ValueError, match=f"token id {outside} is outside the vocabulary of 5 rows"):
        int8_embedding.int8_embedding(ids, table.codes, table.scales, torch.float32)
    rows = int8_embedding.int8_embedding(ids, table.codes, table.scales, torch.float32, check_ids=False)
    assert torch.isfinite(rows[0]).all()
    assert torch.isnan(rows[1]).all()


@pytest.mark.parametrize("permuted", [False, True])
def test_torch_compile_takes_it_whole(permuted):
    """One operator, no graph break, whose fake result has the right shape and dtype."""
    layer = random_layer(20, 70, 3, 64, permuted=permuted, biased=permuted, device=DEVICE)
    packed = pack(layer)
    x = random_activations(6, 70, torch.float32, DEVICE).view(2, 3, 70)

    def model(x):
        return int4_linear(x * 1, packed, perm=layer.perm).relu()

    expected = int4_linear(x, packed, perm=layer.perm).relu()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    stored = (packed.words, packed.scales, packed.row_factors, packed.outliers, packed.bias, packed.arrivals)
    arguments = (x, *stored, layer.perm, packed.in_features, packed.num_outliers, packed.group_size)
    torch.library.opcheck(torch.ops.otf.int4_linear.default, arguments)

    def into(x, out):
        return int4_linear(x * 1, packed, perm=layer.perm, out=out)

    out = torch.full((2, 3, 20), torch.nan, device=DEVICE)
    torch.compile(into, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(out.relu(), expected)


def stored(layer):
    return {name: getattr(layer, name) for name in STORED}


STORED = ("codes", "scales", "outliers", "in_features", "group_size", "bias")


def test_layers_that_share_an_input_are_one():
    """q, k and v: the same numbers as one by one, with a bias that only some have."""
    options = {"permuted": False, "device": DEVICE}
    layers = [random_layer(rows, 70, 3, 32, biased=rows == 5, seed=rows, **options) for rows in (20, 5, 5)]
    x = random_activations(3, 70, torch.float32, DEVICE)
    together = int4_linear(x, pack_layers([stored(layer) for layer in layers]))
    assert torch.equal(together, torch.cat([int4_linear(x, pack(layer)) for layer in layers], -1))


def test_a_module_packs_what_it_stores_and_forgets_it_when_that_changes():
    layer = random_layer(20, 70, 3, 64)
    module = Int4Linear(70, 20, 3, 64, bias=True)
    module.load_state_dict({name: getattr(layer, name) for name in ("codes", "scales", "outliers", "bias")})
    module.perm = layer.perm
    x = random_activations(3, 70, torch.float32)
    expected = module(x)
    module._pack(torch.device(DEVICE))
    perm = layer.perm.to(DEVICE)
    assert_matches(int4_linear(x.to(DEVICE), module._packed, perm=perm).cpu(), expected.double(), 70)
    assert torch.equal(module(x), expected)  # the stored tensors stay, in the host's memory
    for change in (module.half, lambda: module.load_state_dict(module.state_dict())):
        module._pack(torch.device(DEVICE))
        change()
        assert module._packed is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 71}, "has in_features 71, but layers[0] has 70"),
        ({"group_size": 64}, "has group_size 64, but layers[0] has 32"),
        ({"num_outliers": 4}, "has outliers float16 [N, 4], but layers[0] has float16 [N, 3]"),
        ({"outlier_dtype": torch.bfloat16}, "has outliers bfloat16 [N, 3], but layers[0] has float16 [N, 3]"),
        ({"device": "meta"}, "is on meta, but layers[0] is on cpu"),
    ],
)
def test_layers_that_do_not_belong_together_are_named(changes, message):
    kind = {"num_rows": 5, "in_features": 70, "num_outliers": 3, "group_size": 32, "permuted": False}
    layers = [stored(random_layer(**kind)), stored(random_layer(**kind | changes))]
    with pytest.raises(ValueError, match=re.escape(f"layers[1] {message}")):
        pack_layers(layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": torch.zeros(6)}, "bias must have shape [5], not [6]"),
        ({"codes": None}, "codes must be a tensor, not None"),
        ({"scales": torch.tensor(1.0).half()}, "scales must have shape [5, 3], not []"),
        ({"permutation": 1}, "got an unexpected keyword argument 'permutation'"),
    ],
)
def test_layers_are_checked_one_by_one(changes, message):
    layer = stored(random_layer(5, 70, 3, 32, permuted=False))
    with pytest.raises(ValueError, match=re.escape(f"layers[1]: {message}")):
        pack_layers([layer, layer | changes])
    with pytest.raises(ValueError, match=r"layers\[0\]: missing .* 'scales'"):
        pack_layers([{name: value for name, value in layer.items() if name != "scales"}])
    with pytest.raises(ValueError, match="layers must hold at least one layer"):
        pack_layers([])


STORED_MISFITS = {
    "codes must be uint8": {"codes": torch.zeros(5, 32, dtype=torch.int8)},
    "codes must have shape": {"codes": torch.zeros(5, 31, dtype=torch.uint8)},
    "codes must be contiguous": {"codes": torch.zeros(32, 5, dtype=torch.uint8).T},
    "scales must be float16": {"scales": torch.zeros(5, 2)},
    "scales must have shape": {"scales": torch.zeros(5, 1, dtype=torch.float16)},
    "scales is on meta": {"scales": torch.zeros(5, 2, dtype=torch.float16, device="meta")},
    "outliers must be float16 or bfloat16": {"outliers": torch.zeros(5, 1)},
    "outliers must have shape": {"outliers": torch.zeros(5, 65, dtype=torch.float16)},
    "bias must have shape": {"bias": torch.zeros(6)},
    "group_size must be 0": {"group_size": -1},
    "group_size must be .* not 32.0": {"group_size": 32.0},
    "in_features must be a positive whole number, not 0": {"in_features": 0},
    "codes must be a tensor, not None": {"codes": None},
}
CALL_MISFITS = {
    "x must be float16, bfloat16 or float32, not float64": {"x": torch.zeros(2, 64, dtype=torch.float64)},
    r"x must have shape \[..., 64\], not": {"x": torch.zeros(2, 63)},
    "x is on meta": {"x": torch.zeros(2, 64, device="meta")},
    "x must be a tensor, not a list": {"x": [1.0]},
    "perm must be a tensor, not a list": {"perm": [0, 1]},
    "perm must be int16 or int32": {"perm": torch.arange(64)},
    "perm must have shape": {"perm": torch.arange(63, dtype=torch.int16)},
    "out must have shape": {"out": torch.zeros(2, 6)},
    "out must be float32": {"out": torch.zeros(2, 5, dtype=torch.float16)},
    "out must be contiguous": {"out": torch.zeros(5, 2).T},
    "packed must be a PackedInt4": {"packed": torch.zeros(5, 64)},
}


def on_device(arguments):
    return {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("message", STORED_MISFITS)
def test_misfits_of_a_stored_layer_are_named(message):
    layer = random_layer(5, 64, 1, 32, device=DEVICE)
    arguments = stored(layer) | STORED_MISFITS[message]
    with pytest.raises(ValueError, match=message):
        pack_layer(**on_device(arguments))


@pytest.mark.parametrize("message", CALL_MISFITS)
def test_misfits_of_a_call_are_named(message):
    layer = random_layer(5, 64, 1, 32, device=DEVICE)
    arguments = {"x": torch.zeros(2, 64), "packed": pack(layer), "perm": layer.perm} | CALL_MISFITS[message]
    with pytest.raises(ValueError, match=message):
        int4_linear(**on_device(arguments))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((8, 16, 4, 2), "config.block_m must be a power of two"),
        ((16, 48, 4, 2), "config.block_n must be a power of two"),
        ((16, 16, 4, 2, 0), "config.split must be at least 1, not 0"),
    ],
)
def test_config_misfits_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        int4_portable.Config(*values)


def test_a_result_may_lie_beside_its_input_but_not_on_it():
    layer = random_layer(64, 64, 1, 32, device=DEVICE)
    table = random_table(64, 64, device=DEVICE)
    packed = pack(layer)
    for multiply in (
        lambda x, out: int4_linear(x, packed, perm=layer.perm, out=out),
        lambda x, out: int8_embedding.int8_linear(x, table.codes, table.scales, out=out),
    ):
        workspace = torch.zeros(4, 64, device=DEVICE)
        workspace[:2] = random_activations(2, 64, torch.float32, DEVICE)
        expected = multiply(workspace[:2].clone(), None)
        assert torch.equal(multiply(workspace[:2], workspace[2:]), expected)
        for out in (workspace[:2], workspace[1:3]):
            with pytest.raises(ValueError, match="out must not overlap x in memory"):
                multiply(workspace[:2], out)


def test_table_misfits_are_named():
    table = random_table(5, 64, device=DEVICE)
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    x = torch.zeros(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="scales must have shape"):
        int8_embedding.int8_linear(x, table.codes, table.scales[1:])
    with pytest.raises(ValueError, match="x must have shape"):
        int8_embedding.int8_linear(x[:, 1:], table.codes, table.scales)
    with pytest.raises(ValueError, match="tile must be a Tile or None, not a tuple"):
        int8_embedding.int8_linear(x, table.codes, table.scales, tile=(16, 16, 32))
    with pytest.raises(ValueError, match="codes must be int8"):
        int8_embedding.int8_linear(x, table.codes.float(), table.scales)
    with pytest.raises(ValueError, match="ids must be int32 or int64"):
        int8_embedding.int8_embedding(ids.float(), table.codes, table.scales, torch.float32)
    with pytest.raises(ValueError, match="dtype must be"):
        int8_embedding.int8_embedding(ids, table.codes, table.scales, torch.float64)


@pytest.mark.parametrize("sizes", [(8, 16, 32), (16, 16.0, 32), (16, 48, 32), (16, 16, 8)])
def test_tile_must_fill_a_dot(sizes):
    with pytest.raises(ValueError, match="must be a power of two"):
        int8_embedding.Tile(*sizes)


def run_python(*arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(ROOT / "scripts"), str(ROOT / "kernels")))
    return subprocess.run(
        [sys.executable, *arguments], env=inherited | {"PYTHONPATH": path} | environment, capture_output=True, text=True
    )


def test_importing_the_package_imports_no_triton():
    run = run_python("-c", "import sys, otf_kernels; assert 'triton' not in sys.modules")
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    """The interpreter accepts what the compiler does not, so the compiler sees every kernel here too."""
    run = run_python(str(ROOT / "tests" / "gpu_kernels.py"), "--compile-only", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert re.match(r"compiled \d+ kernel variants", run.stdout)


def test_cpu_tensors_are_refused_without_the_interpreter():
    program = "import torch; from gpu_kernels import *\napply_layer(torch.zeros(2, 64), random_layer(5, 64, 1, 32))"
    run = run_python("-c", f"import sys; sys.path.append({str(ROOT / 'tests')!r}); {program}")
    assert "ValueError: the tensors are on cpu, but Triton kernels need a CUDA device" in run.stderr


def test_kernels_folder_hides_no_package():
    """Hugging Face has a package called kernels, which transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def test_an_empty_table_is_not_read():
    codes = torch.zeros(0, 4, dtype=torch.int8, device=DEVICE)
    scales = torch.zeros(0, dtype=torch.float16, device=DEVICE)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert int8_embedding.int8_embedding(ids, codes, scales, torch.float32, check_ids=False).isnan().all()


def test_negative_scales():
    layer = random_layer(3, 200, 2, 64, device=DEVICE)
    layer = dataclasses.replace(layer, scales=-5 * layer.scales)
    x = torch.randn(2, 200, device=DEVICE)
    assert_matches(int4_linear(x, pack(layer), perm=layer.perm), reference_layer(x.double(), layer), 200)


def test_activations_that_want_a_gradient_at_every_number_of_tokens(monkeypatch):
    """No gradient is computed, whichever kernel runs."""
    layer = random_layer(5, 64, 1, 64, device=DEVICE)
    x = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    few = int4_linear(x, pack(layer), perm=layer.perm)
    monkeypatch.setattr("otf_kernels.int4_linear.PREFILL_TOKENS", 1)
    many = int4_linear(x, pack(layer), perm=layer.perm)
    assert not few.requires_grad
    assert not many.requires_grad
    torch.testing.assert_close(few, many)
