"""Rounding, scales and the scale search, with values worked out by hand where they can be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otf_llm.quantization import num_groups, quantize_int4, quantize_int8_rows


def dequantized(codes, scales, group_size):
    width = group_size or codes.shape[1]
    return codes * scales.float().repeat_interleave(width, dim=1)[:, : codes.shape[1]]


def test_values_on_the_grid_come_back_exactly():
    weight = torch.tensor([[-7, 7, 3, -1], [7, 0, -2, 5], [-7, 1, 1, 1]]) * 0.5
    codes, scales = quantize_int4(weight, 0)
    assert scales.tolist() == [[0.5]] * 3
    assert torch.equal(codes * 0.5, weight)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_quantising_a_quantised_weight_changes_nothing(sign):
    weight = sign * torch.tensor([[4.0, 3.5, 1.5, -0.5]])
    codes, scales = quantize_int4(weight, 0)
    assert codes.abs().max() == 7, "the peak is code 7 or -7, never -8"
    once = dequantized(codes, scales, 0)
    again, scales_again = quantize_int4(once, 0)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)


def test_a_scale_that_fp16_rounds_down_never_gives_code_8():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 16, generator=generator)
    codes, scales = quantize_int4(weight, 0)
    exact = weight.abs().amax(1) / 7
    assert (scales.squeeze(1).float() < exact).any(), "some scales are rounded down"
    assert codes.abs().max() == 7


def test_the_tail_of_a_short_last_group_has_its_own_scale():
    weight = torch.zeros(2, 96)
    weight[:, 64:] = 1.0
    codes, scales = quantize_int4(weight, 64)
    assert codes.shape == (2, 96)
    assert scales.shape == (2, 2)
    assert torch.allclose(dequantized(codes, scales, 64)[:, 64:], torch.ones(2, 32), rtol=1e-3)
    assert (dequantized(codes, scales, 64)[:, :64] == 0).all()


@pytest.mark.parametrize("columns", [1, 7, 63, 64, 65, 127, 257])
@pytest.mark.parametrize("group_size", [0, 16, 64])
def test_shapes_for_odd_widths(columns, group_size):
    codes, scales = quantize_int4(torch.randn(3, columns), group_size, torch.ones(columns))
    assert codes.shape == (3, columns)
    assert scales.shape == (3, num_groups(columns, group_size))
    assert scales.dtype == torch.float16


def test_no_columns_and_no_rows():
    codes, scales = quantize_int4(torch.zeros(3, 0), 64)
    assert codes.shape == (3, 0)
    assert scales.shape == (3, 0)
    assert quantize_int4(torch.zeros(0, 8), 64)[0].shape == (0, 8)


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-40, 9.2e-41, 2.0e-7, 2.1e-7])
def test_zero_and_tiny_rows_stay_finite_and_zero_stays_zero(value, searched):
    weight = torch.full((2, 32), value)
    weight[1] = 0
    codes, scales = quantize_int4(weight, 16, torch.ones(32) if searched else None)
    assert torch.isfinite(scales).all()
    assert (dequantized(codes, scales, 16)[1] == 0).all()
    assert (dequantized(codes, scales, 16)[0] - value).abs().max() <= max(value, 1e-7)
    codes8, scales8 = quantize_int8_rows(weight)
    assert torch.isfinite(scales8).all()
    assert (codes8[1] * scales8[1].float() == 0).all()


def test_a_scale_beyond_fp16_is_refused():
    with pytest.raises(ValueError, match="exceeds FP16"):
        quantize_int4(torch.full((1, 16), 7 * 7e4), 0)


@given(st.integers(0, 10_000), st.sampled_from([0, 16, 64]), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_the_search_never_does_worse_than_plain_rounding(seed, group_size, columns):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, columns, generator=generator)
    importance = torch.rand(columns, generator=generator) ** 4
    plain = dequantized(*quantize_int4(weight, group_size), group_size)
    searched = dequantized(*quantize_int4(weight, group_size, importance), group_size)

    def error(approximation):
        return ((weight - approximation).square() * importance).sum(1).double()

    # Equal candidates are kept, so only the float32 sum's own rounding can speak against the search.
    assert (error(searched) <= error(plain) * (1 + 1e-5) + 1e-12).all()


def test_the_search_finds_the_clipping_that_the_importance_asks_for():
    weight = torch.tensor([[7.0, 1.0, 1.0, 1.0] * 4])
    importance = torch.tensor([1e-6, 1.0, 1.0, 1.0] * 4)
    codes, scales = quantize_int4(weight * 0.93, 0, importance)
    approximation = dequantized(codes, scales, 0)
    assert (approximation[0, 1] - 0.93).abs() < 1e-3
    assert (dequantized(*quantize_int4(weight * 0.93, 0), 0)[0, 1] - 0.93).abs() < 1e-3


def test_int8_rows():
    weight = torch.tensor([[127.0, -64.0, 1.0], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.0]])
    codes, scales = quantize_int8_rows(weight)
    # FP16 stores 0.02 as 0.0200043, and 1.27 / 0.0200043 = 63.49: codes follow the stored scale.
    assert codes.tolist() == [[127, -64, 1], [0, 0, 0], [-127, 63, 0]]
    assert scales[0] == 1
    assert scales[1] == 0


def test_scales_that_fp16_would_round_to_zero_keep_the_weights():
    weight = torch.tensor([[1e-6, -5e-7, 0.0, 3e-7]])
    codes, scales = quantize_int8_rows(weight)
    assert scales.item() == 2.0**-24
    assert ((codes * scales.float()[:, None]) - weight).abs().max() <= 2.0**-25
    codes, scales = quantize_int4(weight * 0.1, 0)
    assert scales.item() == 2.0**-24
    assert (codes * scales.float() - weight * 0.1).abs().max() <= 2.0**-25
