"""INT4 linear layers over many tokens: weights of some output features at a time, then a product by PyTorch.

A matrix product over a thousand tokens reads each weight so often that writing it out once in the activations' dtype
costs a tenth of the product's own time, less than what a kernel of ours loses against cuBLAS there. A slab of the
weights exists at a time, of at most SLAB_BYTES, and no more memory than that is taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from otf_kernels import interpreter_dtype, is_interpreted, launch_device
from otf_kernels.int4_layout import ALIGNMENT, BLOCK, PackedInt4, scales_per_block
from otf_kernels.int4_portable import codes_of_plane

SLAB_BYTES = 64 << 20
ROW_STEP = 256  # output features: what a program of cuBLAS's takes
DEQUANTIZED_ROWS = 64  # of one program of ours


def launch(x: torch.Tensor, packed: PackedInt4, out: torch.Tensor, slab_bytes: int = SLAB_BYTES) -> torch.Tensor:
    """Write x · Wᵀ (+ bias) to ``out``; ``int4_linear`` has checked that they fit.

    Args:
        x: float16, bfloat16 or float32 [..., packed.aligned_features] in the kernels' order (``int4_layout.arrange``).
        packed: the layer, with groups that planes of 64 columns make up.
        out: [..., N] in x.dtype, without gaps.
        slab_bytes: of weights that exist at a time, at least ROW_STEP output features.
    """
    tokens = x.reshape(-1, packed.aligned_features)
    y = out.view(-1, packed.out_features)
    row_bytes = tokens.shape[1] * x.element_size()
    rows = min(packed.out_features, max(1, slab_bytes // (ROW_STEP * row_bytes)) * ROW_STEP)
    slab = torch.empty(rows, tokens.shape[1], dtype=x.dtype, device=x.device)
    with torch.no_grad():  # as in every kernel here; PyTorch refuses out= otherwise
        for begin in range(0, packed.out_features, rows):
            end = min(begin + rows, packed.out_features)
            weights = dequantize(packed, begin, slab[: end - begin])
            if packed.bias is None:
                torch.mm(tokens, weights.T, out=y[:, begin:end])
            else:
                torch.addmm(packed.bias[begin:end].to(x.dtype), tokens, weights.T, out=y[:, begin:end])
    return out


def dequantize(packed: PackedInt4, begin: int, weights: torch.Tensor) -> torch.Tensor:
    """Write the weights of output features from ``begin`` on, as many as ``weights`` has rows, each rounded once.

    Args:
        packed: the layer, with groups that planes of 64 columns make up.
        begin: the first output feature.
        weights: contiguous float16, bfloat16 or float32 [rows, packed.aligned_features], in the kernels' order.
    """
    run_dtype = interpreter_dtype(dequantize_kernel, weights.dtype)
    target = weights if run_dtype is weights.dtype else torch.empty_like(weights, dtype=run_dtype)
    blocks = packed.words.shape[0]
    grid = (blocks + triton.cdiv(packed.aligned_outliers, BLOCK), triton.cdiv(len(weights), DEQUANTIZED_ROWS))
    with launch_device(dequantize_kernel, weights.device):
        dequantize_kernel[grid](
            packed.words, packed.scales, packed.row_factors, packed.outliers, target,
            begin, len(weights), packed.out_features,
            packed.aligned_outliers // ALIGNMENT, packed.aligned_features // ALIGNMENT, blocks,
            GROUPS=scales_per_block(packed.group_size),
            INLINE_PTX=not is_interpreted(dequantize_kernel) and torch.version.hip is None,
            BLOCK_N=DEQUANTIZED_ROWS,
        )  # fmt: skip
    return weights if target is weights else weights.copy_(target)


@triton.jit(do_not_specialize=("begin", "num_rows", "blocks"))
def dequantize_kernel(
    words, scales, row_factors, outliers, weights,
    begin, num_rows, all_rows, first_pieces, pieces, blocks,
    GROUPS: tl.constexpr, INLINE_PTX: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of one block of 256 columns, or of 256 outlier columns; rows consist of pieces of 8 columns."""
    block_rows = tl.cast(all_rows, tl.int64)
    scale_rows = (block_rows + 7) // 8 * 8
    first = first_pieces * 8
    width = pieces * 8
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None]
    read_rows = begin + tl.minimum(rows, num_rows - 1).to(tl.int64)
    row_weights = weights + rows.to(tl.int64)[:, None] * width
    if block < blocks:
        lanes = tl.arange(0, 64)
        packed = tl.load(words + (block * block_rows + read_rows)[:, None] * 64 + lanes[None, :])
        factors = tl.load(row_factors + read_rows) * 5.960464477539063e-08  # 2^-24, which row_factors make up for
        for plane in tl.static_range(4):
            if GROUPS == 0:
                scale = tl.full([BLOCK_N], 16384.0, tl.float16)
            else:
                scale = tl.load(scales + (block * scale_rows + read_rows) * GROUPS + (plane * GROUPS) // 4)
            q = codes_of_plane(packed, plane, tl.float16, INLINE_PTX).to(tl.float32)
            columns = first + block * 256 + plane * 64 + lanes
            tl.store(
                row_weights + columns[None, :],
                (q * (scale.to(tl.float32) * factors)[:, None]).to(weights.dtype.element_ty),
                mask=inside & (columns < width)[None, :],
            )
    else:
        positions = (block - blocks) * 256 + tl.arange(0, 256)
        wanted = inside & (positions < first)[None, :]
        value = tl.load(outliers + read_rows[:, None] * first + positions[None, :], mask=wanted, other=0.0)
        tl.store(row_weights + positions[None, :], value.to(weights.dtype.element_ty), mask=wanted)
