"""What the kernels must compute, in slow and obvious PyTorch: the yardstick, and the way models run without a GPU.

A linear layer W [N, K] is stored with its input channels reordered: the first ``num_outliers`` of the order as FP16
columns, the K_b = K - num_outliers others as INT4 codes with FP16 scales. An embedding is stored as INT8 rows with one
scale each. Float16 and bfloat16 activations are multiplied and summed in float32 and rounded once; float32 and float64
activations are computed as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from otf_llm.packing import packed_width, unpack_int4
from otf_llm.quantization import num_groups

DEQUANTIZED_ELEMENTS = 1 << 20  # weights held dequantised at a time: 4 MB in float32, however large the table


def dequantize_int4(
    codes: torch.Tensor, scales: torch.Tensor, num_columns: int, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Background weights as numbers: code times the scale of its group, rounded once to ``dtype``.

    Args:
        codes: uint8 [N, ceil(num_columns / 2)], two INT4 codes a byte (see ``packing``).
        scales: float [N, G], G = ceil(num_columns / group_size), or 1 with group_size 0; the last group may be short.
        num_columns: K_b, the number of INT4 columns.
        group_size: columns that share a scale, at least 1; 0 for one scale per row.
        dtype: floating-point type of the result.

    Returns:
        dtype [N, num_columns].

    Raises ValueError when a shape or group_size does not fit.
    """
    if group_size < 0:
        raise ValueError(f"group_size must be 0 (per channel) or positive, not {group_size}")
    expected = (codes.shape[0], num_groups(num_columns, group_size))
    if tuple(scales.shape) != expected:
        raise ValueError(f"scales must have shape {list(expected)}, not {list(scales.shape)}")
    q = unpack_int4(codes, num_columns)
    width = min(group_size, num_columns) if group_size else num_columns
    exact = torch.promote_types(dtype, torch.float32)
    column_scales = scales.to(exact).repeat_interleave(width, dim=1)[:, :num_columns]
    return (q.to(exact) * column_scales).to(dtype)


def int4_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    outliers: torch.Tensor,
    *,
    in_features: int,
    group_size: int,
    perm: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear layer over INT4 background and FP16 outlier columns: x[..., perm] @ [outliers | q·scale].T + bias.

    Args:
        x: float [..., in_features].
        codes: uint8 [N, ceil(K_b / 2)], K_b = in_features - num_outliers.
        scales: float16 [N, G] (see ``dequantize_int4``).
        outliers: float16 or bfloat16 [N, num_outliers], possibly without columns.
        in_features: K.
        group_size: columns that share a scale; 0 for one scale per row.
        perm: int [in_features] or None: position i of the stored order is input channel perm[i]; None when x already
            arrives in the stored order.
        bias: float [N] or None.

    Returns:
        [..., N] in x.dtype.

    Raises ValueError naming the argument whose shape does not fit, IndexError when perm points outside x.
    """
    num_rows, num_outliers = outliers.shape
    num_columns = in_features - num_outliers
    if x.shape[-1] != in_features:
        raise ValueError(f"x has {x.shape[-1]} input channels, but in_features is {in_features}")
    if tuple(codes.shape) != (num_rows, packed_width(num_columns)) or num_columns < 0:
        raise ValueError(
            f"codes has shape {list(codes.shape)}, which does not hold {num_rows} rows of the {num_columns} columns "
            f"that {in_features} input channels and {num_outliers} outliers leave"
        )
    if perm is not None and tuple(perm.shape) != (in_features,):
        raise ValueError(f"perm must have shape [{in_features}], not {list(perm.shape)}")
    compute = torch.promote_types(x.dtype, torch.float32)
    ordered = x.to(compute)
    if perm is not None:
        ordered = ordered[..., perm.long()]
    blocks = []
    for rows in _row_blocks(num_rows, in_features):
        background = dequantize_int4(codes[rows], scales[rows], num_columns, group_size, compute)
        weight = torch.cat((outliers[rows].to(compute), background), dim=1)
        blocks.append(ordered @ weight.T)
    y = torch.cat(blocks, dim=-1)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(x.dtype)


def dequantize_int8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Embedding rows as numbers: codes int8 [V, H] times scales float [V], rounded once to ``dtype`` [V, H].

    Raises ValueError when codes is not int8 [V, H] or scales not [V].
    """
    if codes.dtype is not torch.int8 or codes.dim() != 2:
        raise ValueError(f"codes must be int8 with 2 dimensions, not {codes.dtype} with {codes.dim()}")
    if tuple(scales.shape) != codes.shape[:1]:
        raise ValueError(f"scales must have shape [{codes.shape[0]}], not {list(scales.shape)}")
    exact = torch.promote_types(dtype, torch.float32)
    return (codes.to(exact) * scales.to(exact)[:, None]).to(dtype)


def int8_embedding(ids: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of an INT8 embedding: ids int32 or int64 [...] → dtype [..., H], from codes int8 [V, H] and scales [V].

    Raises ValueError naming the first id outside the vocabulary and the vocabulary's size.
    """
    vocabulary = codes.shape[0]
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if outside.numel():
        raise ValueError(f"token id {int(outside[0])} is outside the vocabulary of {vocabulary} rows")
    flat = ids.reshape(-1).long()
    return dequantize_int8(codes[flat], scales[flat], dtype).reshape(*ids.shape, codes.shape[1])


def int8_linear(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Tied output head: logits x @ (codes · scales).T straight from the INT8 embedding, a block of rows at a time.

    Args:
        x: float [..., H].
        codes: int8 [V, H].
        scales: float16 [V].

    Returns:
        [..., V] in x.dtype, exactly V columns.

    Raises ValueError when x does not have H channels, or as ``dequantize_int8`` does.
    """
    if x.shape[-1] != codes.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} channels, but the rows of codes have {codes.shape[1]}")
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    blocks = [
        (wide @ dequantize_int8(codes[rows], scales[rows], compute).T).to(x.dtype)
        for rows in _row_blocks(codes.shape[0], codes.shape[1])
    ]
    return torch.cat(blocks, dim=-1)


def _row_blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Slices that cover the rows, each of bounded size; one empty slice when there are no rows."""
    height = max(1, DEQUANTIZED_ELEMENTS // max(1, num_columns))
    for start in range(0, max(1, num_rows), height):
        yield slice(start, min(start + height, num_rows))
