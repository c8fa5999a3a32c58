"""The kernels' order of an INT4 layer: packing loses nothing, and the kernels' arithmetic on it is exact enough."""

import pytest
import torch

from gpu_kernels import random_layer
from otf_kernels.int4_layout import BLOCK, PLANE, arrange, kernel_order, pack_layer, unpack_codes
from otf_llm import reference
from otf_llm.packing import unpack_int4


def packed_of(layer):
    return pack_layer(
        layer.codes,
        layer.scales,
        layer.outliers,
        in_features=layer.in_features,
        group_size=layer.group_size,
        bias=layer.bias,
    )


def kernel_weights(packed) -> torch.Tensor:
    """float64 [N, K_b]: what the kernels multiply by, computed as they do but for the order of operations."""
    blocks, num_rows, _ = packed.words.shape
    words = packed.words.int() & 0xFFFF
    scales = packed.scales.double()
    if scales.dim() == 2 and packed.group_size:  # groups that planes do not make up
        q = unpack_codes(packed).double()
        columns = scales.repeat_interleave(packed.group_size, 1)[:, : q.shape[1]]
        return q * 2.0**-24 * columns * packed.row_factors.double()[:, None]
    if packed.group_size == 0:
        scales = torch.full((1, num_rows, 1), 2.0**14, dtype=torch.float64)
    scales = scales[:, :num_rows].expand(blocks, -1, -1)
    planes = []
    for plane in range(4):
        nibble = (words >> 4 * plane) & 0xF
        u = nibble.double() * 2.0**-24
        scale = scales[:, :, plane * scales.shape[2] // 4, None]
        offset = (scale * -(2.0**-21)).half().double()
        planes.append((u * scale + offset).half().double())
    weights = torch.cat(planes, -1).transpose(0, 1).reshape(num_rows, blocks * BLOCK)
    return weights[:, : packed.in_features - packed.num_outliers] * packed.row_factors.double()[:, None]


SHAPES = [(1, 1, 0), (1, 9, 8), (7, 63, 1), (64, 256, 0), (65, 257, 3), (96, 520, 9), (3, 40, 40)]


@pytest.mark.parametrize("group_size", [0, 5, 32, 64, 96, 128, 256, 512, 1 << 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_keeps_every_code_and_weight(shape, group_size):
    layer = random_layer(*shape, group_size, permuted=False)
    packed = packed_of(layer)
    num_columns = layer.in_features - layer.outliers.shape[1]
    assert torch.equal(unpack_codes(packed), unpack_int4(layer.codes, num_columns))
    exact = reference.dequantize_int4(layer.codes, layer.scales, num_columns, group_size, torch.float64)
    # Half precision's rounding, and nothing else.
    torch.testing.assert_close(kernel_weights(packed), exact, rtol=2.0**-11, atol=0)
    assert packed.aligned_outliers % 8 == 0
    assert torch.equal(packed.outliers[:, : packed.num_outliers], layer.outliers)
    assert not packed.outliers[:, packed.num_outliers :].any()


def test_columns_beyond_the_last_weigh_nothing():
    layer = random_layer(5, 300, 0, 64, permuted=False)
    words = packed_of(layer).words.int() & 0xFFFF
    columns = torch.stack([(words >> 4 * plane) & 0xF for plane in range(4)], 2).transpose(0, 1).reshape(5, -1)
    assert (columns[:, 300:] == 8).all()  # u = 8 is q = 0


def test_word_layout():
    """Column 256 b + 64 p + i of row n is bits 4p..4p+3 of word (b, n, i)."""
    layer = random_layer(2, 512, 0, 128, permuted=False)
    q = unpack_int4(layer.codes, 512)
    word = int(packed_of(layer).words[1, 1, 5]) & 0xFFFF
    expected = sum((int(q[1, 256 + PLANE * plane + 5]) + 8) << 4 * plane for plane in range(4))
    assert word == expected


@pytest.mark.parametrize("factor", [2.0**-20, 1.0, 2.0**12])
def test_scales_of_any_size_stay_exact(factor):
    """FP16's smallest and largest scales side by side in a row, and rows of zeros."""
    layer = random_layer(8, 512, 0, 64, permuted=False)
    scales = (layer.scales.double() * factor).half()
    scales[0] = 0
    scales[1, 0], scales[1, 1] = 65504.0, 2.0**-14
    layer = type(layer)(**{**vars(layer), "scales": scales})
    packed = packed_of(layer)
    exact = reference.dequantize_int4(layer.codes, scales, 512, 64, torch.float64)
    row_largest = 7 * scales.double().amax(1, keepdim=True)
    error = (kernel_weights(packed) - exact).abs()
    assert torch.isfinite(packed.scales).all()
    assert torch.isfinite(packed.row_factors).all()
    assert (error <= exact.abs() * 2.0**-11 + row_largest * 2.0**-16).all()


def test_arrange():
    layer = random_layer(4, 30, 3, 64)
    packed = packed_of(layer)
    x = torch.randn(2, 5, 30)
    arranged = arrange(x, packed, layer.perm)
    stored = x[..., layer.perm.long()]
    assert arranged.shape == (2, 5, 8 + 64)
    assert torch.equal(arranged[..., :3], stored[..., :3])
    assert torch.equal(arranged[..., 8:35], stored[..., 3:])
    assert not arranged[..., 3:8].any()
    assert not arranged[..., 35:].any()
    aligned = packed_of(random_layer(4, 72, 8, 64, permuted=False))
    x = torch.randn(3, 72)
    assert torch.equal(arrange(x, aligned), x)
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., 30\], not \[2, 29\]"):
        arrange(torch.randn(2, 29), packed)
    with pytest.raises(ValueError, match=r"perm must have shape \[30\], not \[29\]"):
        arrange(torch.randn(2, 30), packed, layer.perm[1:])
    with pytest.raises(ValueError, match="perm must be int16 or int32 or int64, not float32"):
        kernel_order(packed, layer.perm.float())
    with pytest.raises(ValueError, match="perm must be a tensor, not a list"):
        kernel_order(packed, layer.perm.tolist())
    with pytest.raises(ValueError, match="x must be a tensor, not None"):
        arrange(None, packed)
