"""Kernels that pick the next token, against PyTorch and against the distribution that they draw from."""

import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from otf_kernels import tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 8192, 8193, 30000])
def test_argmax(dtype, vocabulary):
    logits = random(2, 3, vocabulary, dtype=dtype)
    # Half precision has equal logits: the first of them is meant.
    expected = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    picked = tokens.argmax(logits)
    assert picked.dtype is torch.int64
    assert torch.equal(picked, expected)


def test_argmax_of_values_that_are_no_numbers():
    logits = random(4, 9000)
    logits[0, 8500] = math.nan
    logits[1, 17] = math.inf
    logits[2] = -math.inf
    logits[3] = -math.inf
    logits[3, 8999] = -1e30
    assert tokens.argmax(logits).tolist() == [8500, 17, 0, 8999]


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_sample_draws_from_the_softmax(temperature):
    draws = 1500
    logits = torch.tensor([2.0, 0.5, 0.0, -1.0, -math.inf], device=DEVICE)
    seeds = torch.arange(draws, device=DEVICE)
    picked = tokens.sample(
        logits.expand(draws, -1).contiguous(), torch.full((draws,), temperature, device=DEVICE), seeds
    )
    expected = (logits / temperature).softmax(0).cpu() * draws
    counts = torch.bincount(picked.cpu(), minlength=5)
    assert counts[4] == 0
    chi_squared = float(((counts - expected)[:4] ** 2 / expected[:4]).sum())
    assert chi_squared < 16.3  # exceeded once in a thousand for three degrees of freedom; seeds are fixed


def test_sample_repeats_itself_and_knows_temperature_zero():
    logits = random(4, 20000)
    heat = torch.tensor([0.0, 1.0, 1.0, -1.0], device=DEVICE)
    seeds = torch.tensor([1, 2, 2**40, 4], device=DEVICE)
    first = tokens.sample(logits, heat, seeds)
    assert torch.equal(first, tokens.sample(logits, heat, seeds))
    assert torch.equal(first[[0, 3]], logits[[0, 3]].argmax(-1))
    others = [tokens.sample(logits, heat, seeds + step) for step in range(1, 6)]
    assert any(not torch.equal(first[1:3], other[1:3]) for other in others)


@pytest.mark.parametrize("temperature", [3e38, math.inf])
def test_any_temperature_above_zero_draws(temperature):
    """All tokens are as likely as another, but for those without a chance."""
    draws = 400
    logits = torch.tensor([2.0, 0.5, -math.inf, -1.0], device=DEVICE).expand(draws, -1).contiguous()
    heat = torch.full((draws,), temperature, device=DEVICE)
    counts = torch.bincount(tokens.sample(logits, heat, torch.arange(draws, device=DEVICE)).cpu(), minlength=4)
    assert counts[2] == 0
    assert (counts[[0, 1, 3]] > 95).all()  # 133 expected, standard deviation 9


def test_equal_logits_are_all_drawn():
    """No token of a large vocabulary is out of reach, and none is drawn too often."""
    rows = 64
    logits = torch.zeros(rows, 8200, device=DEVICE)
    picked = tokens.sample(logits, torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE))
    assert len(set(picked.tolist())) > rows - 5
    assert 8200 * 0.35 < picked.double().mean() < 8200 * 0.65


def test_no_rows():
    assert tokens.argmax(torch.zeros(0, 5, device=DEVICE)).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, t, s: tokens.argmax(x[:, :0]), r"logits must have shape \[\.\.\., V\]"),
        (lambda x, t, s: tokens.argmax(None), "logits must be a tensor, not None"),
        (lambda x, t, s: tokens.sample(x, 1.0, s), "temperature must be a tensor, not a float"),
        (lambda x, t, s: tokens.argmax(x.double()), "logits must be float16"),
        (lambda x, t, s: tokens.argmax(x[:, ::2]), "logits must be contiguous"),
        (lambda x, t, s: tokens.sample(x, t[:1], s), r"temperature must have shape \[2\], not \[1\]"),
        (lambda x, t, s: tokens.sample(x, t, s.int()), "seeds must be int64"),
        (lambda x, t, s: tokens.sample(x, t.half(), s), "temperature must be float32"),
    ],
)
def test_misfits_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(2, 8), torch.ones(2, device=DEVICE), torch.arange(2, device=DEVICE))
