"""Symmetric rounding of weights to INT4 and INT8: scales, the importance-weighted scale search, codes.

Codes are symmetric, [-7, 7] and [-127, 127], so a zero-point is never stored and requantising a quantised weight
changes nothing. Codes are always computed with the scale as it is stored (FP16), never with a more exact one.
"""

from __future__ import annotations

import torch

INT4_MAX = 7
INT8_MAX = 127
SCALE_DTYPE = torch.float16
SEARCH_RATIOS = 6  # clipping ratios tried per group, as fractions of absmax / 7 …
SEARCH_LOWEST = 0.62  # … from here to 1; lower ones lessen the weighted error, but the model gets worse


def num_groups(num_columns: int, group_size: int) -> int:
    """Scale groups of a row of ``num_columns`` codes; group_size 0 means one group per output channel."""
    if num_columns == 0:
        return 0
    return 1 if group_size == 0 else -(-num_columns // group_size)


def quantize_int4(
    weight: torch.Tensor,
    group_size: int,
    importance: torch.Tensor | None = None,
    scale_dtype: torch.dtype = SCALE_DTYPE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to symmetric INT4, one scale per group of columns.

    Args:
        weight: float32 [N, K].
        group_size: columns that share a scale, the last group may be short; 0 for one scale per row.
        importance: float32 [K], the weight h_j of column j in the squared error, usually E[x_j²]; with it the scale s
            of each group minimises Σ_j h_j (w_j - s·q_j)², q = clamp(round(w/s), -7, 7), as `_search_scale` tells. None
            takes s = absmax / 7 (plain round-to-nearest).
        scale_dtype: what the scales are stored in; codes are those of the stored scales.

    Returns:
        codes int8 [N, K] in [-7, 7] and scales [N, G] of ``scale_dtype``.

    Raises ValueError when a scale exceeds the range of ``scale_dtype``.
    """
    rows, columns = weight.shape
    groups = num_groups(columns, group_size)
    if rows == 0 or groups == 0:
        codes, scales = weight.new_zeros(rows, columns), weight.new_zeros(rows, groups)
        return codes.to(torch.int8), scales.to(scale_dtype)
    width = group_size or columns
    grouped = _grouped(weight, groups, width)
    scratch = torch.empty_like(grouped)
    largest = torch.abs(grouped, out=scratch).amax(-1, keepdim=True)
    scale = _stored(largest / INT4_MAX, scale_dtype)
    if importance is not None:
        weights = _grouped(importance[None].float(), groups, width)
        scale = _search_scale(grouped, weights, scale, scale_dtype, scratch)
    codes = _codes(grouped, scale, out=scratch).to(torch.int8).reshape(rows, -1)
    return codes if codes.shape[1] == columns else codes[:, :columns].contiguous(), scale.squeeze(-1).to(scale_dtype)


def dequantize_int4(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """What codes int8 [N, K] and scales [N, G] stand for: float32 [N, K], code times its group's scale."""
    values = codes.float()
    width = group_size or max(codes.shape[1], 1)
    whole = codes.shape[1] // width
    values[:, : whole * width].unflatten(1, (whole, width)).mul_(scales[:, :whole, None].float())
    if whole < scales.shape[1]:
        values[:, whole * width :].mul_(scales[:, whole:].float())
    return values


def _grouped(matrix: torch.Tensor, groups: int, width: int) -> torch.Tensor:
    padding = groups * width - matrix.shape[1]
    if padding:
        matrix = torch.nn.functional.pad(matrix, (0, padding))
    return matrix.reshape(matrix.shape[0], groups, width)


def _stored(scale: torch.Tensor, dtype: torch.dtype = SCALE_DTYPE) -> torch.Tensor:
    """The scale as ``dtype`` will hold it, in float32; what would round to zero becomes its smallest number."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    stored = torch.where(scale > 0, scale.clamp_min(smallest), scale).to(dtype).float()
    if not torch.isfinite(stored).all():
        name = "FP16" if dtype is torch.float16 else str(dtype).removeprefix("torch.")
        raise ValueError(f"a scale of {scale.max().item():.4g} exceeds {name}'s largest value, {info.max:g}")
    return stored


def _codes(
    grouped: torch.Tensor, scale: torch.Tensor, limit: int = INT4_MAX, out: torch.Tensor | None = None
) -> torch.Tensor:
    # A zero scale (zero or vanishing weights) divides by one instead: the codes are then 0, or multiply a zero scale.
    return torch.div(grouped, torch.where(scale > 0, scale, 1.0), out=out).round_().clamp_(-limit, limit)


def _search_scale(
    grouped: torch.Tensor,
    importance: torch.Tensor,
    absmax_scale: torch.Tensor,
    dtype: torch.dtype,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """The scale, float32 [N, G, 1] as ``dtype`` holds it, of the least weighted error found; not worse than absmax / 7.

    With Σ h w q = f and Σ h q² = n, a scale s takes 2 f s - n s² off the error Σ h w². The codes q of each clipping
    ratio have their own best scale, f / n, which takes f² / n; the ratio that takes most wins, and one more least
    squares step follows. ``scratch``, of the size of ``grouped``, is overwritten.
    """
    root = importance.sqrt()
    target = grouped * root
    product = torch.empty_like(grouped)  # large buffers are reused: new ones cost more than what is done in them

    def sums(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes.mul_(root)
        norm = torch.linalg.vector_norm(codes, dim=-1, keepdim=True).square_()
        return torch.mul(codes, target, out=product).sum(-1, keepdim=True), norm

    def fitted(fit: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return (fit / torch.where(norm > 0, norm, 1.0)).clamp_min_(0.0)

    inverse = torch.where(absmax_scale > 0, 1.0 / absmax_scale, 0.0)
    most = found = torch.zeros_like(absmax_scale)
    step = (1 - SEARCH_LOWEST) / (SEARCH_RATIOS - 1)
    for index in range(SEARCH_RATIOS):
        ratio = SEARCH_LOWEST + index * step
        codes = torch.mul(grouped, inverse / ratio, out=scratch).round_().clamp_(-INT4_MAX, INT4_MAX)
        fit, norm = sums(codes)
        scale = fitted(fit, norm)
        gain = fit * scale
        won = gain > most
        most, found = torch.where(won, gain, most), torch.where(won, scale, found)

    best = absmax_scale
    fit, norm = sums(_codes(grouped, best, out=scratch))
    gain = (2 * fit - norm * best) * best
    for refined in (False, True):
        candidate = _stored(fitted(fit, norm) if refined else found, dtype)
        candidate_fit, candidate_norm = sums(_codes(grouped, candidate, out=scratch))
        candidate_gain = (2 * candidate_fit - candidate_norm * candidate) * candidate
        won = candidate_gain > gain
        best, gain = torch.where(won, candidate, best), torch.where(won, candidate_gain, gain)
        fit, norm = torch.where(won, candidate_fit, fit), torch.where(won, candidate_norm, norm)
    return best


def quantize_int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to symmetric INT8 with one FP16 scale, absmax / 127.

    Args:
        weight: float32 [V, H].

    Returns:
        codes int8 [V, H] in [-127, 127] and scales float16 [V]; a zero row has scale 0 and stays exactly zero.

    Raises ValueError when a scale exceeds FP16's range.
    """
    scale = _stored(weight.abs().amax(-1, keepdim=True) / INT8_MAX)
    return _codes(weight, scale, INT8_MAX).to(torch.int8), scale.squeeze(-1).to(SCALE_DTYPE)
