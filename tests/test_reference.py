"""The PyTorch reference against dense weights written out by hand, since everything else is compared with it."""

import pytest
import torch

from otf_llm import reference
from otf_llm.packing import pack_int4


def random_layer(num_rows, in_features, num_outliers, group_size, seed=0):
    """A stored layer and, beside it, its dense float64 weight in the input's own channel order."""
    generator = torch.Generator().manual_seed(seed)
    columns = in_features - num_outliers
    q = torch.randint(-7, 8, (num_rows, columns), dtype=torch.int8, generator=generator)
    groups = -(-columns // group_size) if group_size else min(1, columns)
    scales = (torch.rand(num_rows, groups, generator=generator) + 0.5).half() / 16
    outliers = torch.randn(num_rows, num_outliers, generator=generator).half()
    perm = torch.randperm(in_features, generator=generator)
    dense = torch.zeros(num_rows, in_features, dtype=torch.float64)
    for position, channel in enumerate(perm.tolist()):
        column = position - num_outliers
        if column < 0:
            dense[:, channel] = outliers[:, position].double()
        else:
            dense[:, channel] = q[:, column].double() * scales[:, column // (group_size or columns)].double()
    return (pack_int4(q), scales, outliers), perm.to(torch.int16), dense


@pytest.mark.parametrize("group_size", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize(("in_features", "num_outliers"), [(64, 1), (65, 0), (129, 2), (7, 7), (1, 0)])
def test_int4_linear_is_the_dense_product(in_features, num_outliers, group_size):
    weights, perm, dense = random_layer(5, in_features, num_outliers, group_size)
    x = torch.randn(3, in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(5.0)
    settings = {"in_features": in_features, "group_size": group_size}
    expected = x @ dense.T
    y = reference.int4_linear(x, *weights, perm=perm, **settings)
    torch.testing.assert_close(y, expected)
    y = reference.int4_linear(x, *weights, perm=perm, bias=bias, **settings)
    torch.testing.assert_close(y, expected + bias)
    # Without perm, x arrives in the stored order.
    y = reference.int4_linear(x[:, perm.long()], *weights, **settings)
    torch.testing.assert_close(y, expected)


def test_tail_of_a_short_last_group():
    """K = 96 in groups of 64: the last 32 columns are 1, the others 0."""
    q = torch.zeros(2, 96, dtype=torch.int8)
    q[:, 64:] = 7
    scales = torch.tensor([[1.0, 1 / 7], [1.0, 1 / 7]], dtype=torch.float16)
    weight = reference.dequantize_int4(pack_int4(q), scales, 96, 64, torch.float32)
    assert (weight[:, :64] == 0).all()
    # FP16 holds 1/7 to half a part in 2^10.
    torch.testing.assert_close(weight[:, 64:], torch.ones(2, 32), rtol=2**-11, atol=0)
    x = torch.ones(1, 96)
    y = reference.int4_linear(x, pack_int4(q), scales, torch.zeros(2, 0).half(), in_features=96, group_size=64)
    torch.testing.assert_close(y, torch.full((1, 2), 32.0), rtol=2**-11, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype):
    """1 + 1024 · 2^-12 = 1.25, but each small term would be lost beside a half-precision 1."""
    q = torch.ones(1, 1025, dtype=torch.int8)
    scales = torch.ones(1, 1, dtype=torch.float16)
    x = torch.full((1, 1025), 2.0**-12, dtype=dtype)
    x[0, 0] = 1
    y = reference.int4_linear(x, pack_int4(q), scales, torch.zeros(1, 0).half(), in_features=1025, group_size=0)
    assert y.dtype is dtype
    assert y.item() == 1.25


@pytest.mark.parametrize("shape", [(0, 64), (64,), (2, 0, 64), (2, 3, 1, 64)])
def test_leading_shapes(shape):
    weights, perm, dense = random_layer(3, 64, 1, 32)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    y = reference.int4_linear(x, *weights, in_features=64, group_size=32, perm=perm)
    assert y.shape == (*shape[:-1], 3)
    torch.testing.assert_close(y, x @ dense.float().T, rtol=1e-5, atol=1e-5)


def test_rows_are_computed_in_blocks(monkeypatch):
    weights, perm, dense = random_layer(11, 64, 1, 32)
    x = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    codes = torch.randint(-127, 128, (11, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    scales = torch.linspace(0.5, 1.5, 11).half()
    monkeypatch.setattr(reference, "DEQUANTIZED_ELEMENTS", 3 * 64)
    y = reference.int4_linear(x, *weights, in_features=64, group_size=32, perm=perm)
    torch.testing.assert_close(y, x @ dense.T)
    logits = reference.int8_linear(x, codes, scales)
    torch.testing.assert_close(logits, x @ (codes.double() * scales.double()[:, None]).T)


def test_layer_without_rows():
    weights, _, _ = random_layer(0, 64, 1, 32)
    assert reference.int4_linear(torch.ones(2, 64), *weights, in_features=64, group_size=32).shape == (2, 0)


def test_misfits_are_named():
    (codes, scales, outliers), perm, _ = random_layer(3, 64, 1, 32)
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="x has 63 input channels, but in_features is 64"):
        reference.int4_linear(x[:, 1:], codes, scales, outliers, in_features=64, group_size=32)
    with pytest.raises(ValueError, match="codes has shape"):
        reference.int4_linear(x, codes[:, 1:], scales, outliers, in_features=64, group_size=32)
    with pytest.raises(ValueError, match="scales must have shape"):
        reference.int4_linear(x, codes, scales, outliers, in_features=64, group_size=16)
    with pytest.raises(ValueError, match="group_size"):
        reference.int4_linear(x, codes, scales, outliers, in_features=64, group_size=-1)
    with pytest.raises(ValueError, match="perm must have shape"):
        reference.int4_linear(x, codes, scales, outliers, in_features=64, group_size=32, perm=perm[1:])


def test_int8_embedding_and_head():
    codes = torch.tensor([[1, -127], [127, 0], [5, 6]], dtype=torch.int8)
    scales = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float16)
    dense = torch.tensor([[0.5, -63.5], [31.75, 0.0], [10.0, 12.0]])
    assert torch.equal(reference.dequantize_int8(codes, scales, torch.float32), dense)
    ids = torch.tensor([[2, 0], [1, 1]])
    rows = reference.int8_embedding(ids, codes, scales, torch.bfloat16)
    assert rows.dtype is torch.bfloat16
    assert torch.equal(rows, dense[ids].bfloat16())
    assert torch.equal(reference.int8_linear(torch.eye(2), codes, scales), dense.T)
    assert reference.int8_embedding(ids[:0], codes, scales, torch.float32).shape == (0, 2, 2)


@pytest.mark.parametrize("outside", [-1, 3, 260])
def test_id_outside_the_vocabulary(outside):
    codes, scales = torch.zeros(3, 2, dtype=torch.int8), torch.ones(3).half()
    with pytest.raises(ValueError, match=f"token id {outside} is outside the vocabulary of 3 rows"):
        reference.int8_embedding(torch.tensor([0, outside]), codes, scales, torch.float32)


def test_int8_misfits_are_named():
    codes, scales = torch.zeros(3, 2, dtype=torch.int8), torch.ones(3).half()
    with pytest.raises(ValueError, match="x has 5 channels, but the rows of codes have 2"):
        reference.int8_linear(torch.ones(1, 5), codes, scales)
    with pytest.raises(ValueError, match="scales must have shape"):
        reference.int8_linear(torch.ones(1, 2), codes, scales[1:])
    with pytest.raises(ValueError, match="codes must be int8"):
        reference.dequantize_int8(codes.float(), scales, torch.float32)
