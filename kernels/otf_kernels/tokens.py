"""The next token from a model's logits, in one launch that waits for nothing on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from otf_kernels import ACTIVATION_DTYPES, check_is_tensor, check_tensor, early_launch, interpreter_dtype, launch_device

BLOCK = 8192  # logits that a program looks at together


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token, the first of equals; a NaN counts as infinity.

    Args:
        logits: float16, bfloat16 or float32 [..., V], contiguous, V at least 1.

    Returns:
        int64 [...].

    Raises ValueError naming what does not fit.
    """
    return _pick(logits, None, None)


def sample(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """A token drawn with probability softmax(logits / temperature), the same one for the same seed.

    The largest of logits / temperature + Gumbel noise is such a draw (Maddison et al. 2014, arXiv:1411.0030). Noise
    comes from Philox, by seed and token. Give every row and every step a seed of its own. Seeds and temperatures are
    tensors, so that a CUDA graph can be replayed with others.

    Args:
        logits: float16, bfloat16 or float32 [..., V], contiguous, V at least 1.
        temperature: float32 [...]; 0 takes the most likely token. Values are not looked at: negative ones count as 0.
        seeds: int64 [...].

    Returns:
        int64 [...].

    Raises ValueError naming what does not fit.
    """
    check_is_tensor("logits", logits)
    check_tensor("temperature", temperature, (torch.float32,), logits.shape[:-1], logits.device)
    check_tensor("seeds", seeds, (torch.int64,), logits.shape[:-1], logits.device)
    return _pick(logits, temperature, seeds)


def _pick(logits: torch.Tensor, temperature: torch.Tensor | None, seeds: torch.Tensor | None) -> torch.Tensor:
    check_is_tensor("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., V] with V of at least 1, not {list(logits.shape)}")
    check_tensor("logits", logits, ACTIVATION_DTYPES, logits.shape, logits.device)
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if tokens.numel() == 0:
        return tokens
    working = logits.to(interpreter_dtype(pick_kernel, logits.dtype))
    with launch_device(pick_kernel, logits.device):
        pick_kernel[(tokens.numel(),)](
            working, tokens if temperature is None else temperature, tokens if seeds is None else seeds, tokens,
            logits.shape[-1], SAMPLE=seeds is not None, BLOCK=BLOCK, num_warps=16,
            **early_launch(pick_kernel, logits.device),
        )  # fmt: skip
    return tokens


@triton.jit
def pick_kernel(
    logits, temperature, seeds, tokens, vocabulary, SAMPLE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """One row."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = lanes
    if SAMPLE:
        heat = tl.load(temperature + row)
        seed = tl.load(seeds + row)
    for begin in range(0, vocabulary, BLOCK):
        columns = begin + lanes
        value = tl.load(logits + row * vocabulary + columns, mask=columns < vocabulary, other=float("-inf"))
        value = value.to(tl.float32)
        value = tl.where(value == value, value, float("inf"))
        if SAMPLE:
            # -log(1 - u) is exponential; where it is small, and the noise large, the series keeps all bits of u.
            u = tl.maximum(tl.rand(seed, columns), 1.1641532182693481e-10)  # 2^-33: never 0
            exponential = tl.where(u < 0.0078125, u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25))), -tl.log(1 - u))
            # Divided by a temperature above 1, so that no noise is beyond float32.
            noise = tl.log(exponential)
            value = tl.where(heat > 1, value / heat - noise, tl.where(heat > 0, value - heat * noise, value))
        better = value > best
        best = tl.where(better, value, best)
        place = tl.where(better, columns, place)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, place, vocabulary - 1), 0)
    tl.store(tokens + row, token.to(tl.int64))
