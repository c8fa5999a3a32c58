"""Linear layer over INT4 background columns and FP16 outlier columns, in one launch.

y = x[..., perm][..., :n] @ outliers.T + x[..., perm][..., n:] @ (q · scale).T + bias, n outlier columns. Codes are
unpacked in registers, multiplied as integers (exact in half precision), and each group's partial sum is scaled in
float32, so the only rounding beyond float32 summation is that of y.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from otf_kernels import ACTIVATION_DTYPES, Tile, check_tensor, choose_tile, interpreter_dtype, launch_device

# Most tokens a tile is meant for, tile. Output features are the rows of the tile and tokens its columns, since tensor
# cores take 64 rows but as few as 8 columns: one token wastes 15/16 of 16 columns, not 63/64 of 64 rows.
TILES = (
    (16, Tile(block_m=16, block_n=64, block_k=128)),
    (32, Tile(block_m=32, block_n=64, block_k=128)),
    (128, Tile(block_m=64, block_n=64, block_k=128)),
    (1 << 62, Tile(block_m=128, block_n=128, block_k=64, num_warps=8)),
)
# Float32 products run on the ordinary cores, whose operands are all held in registers: small tiles do not spill.
FLOAT32_TILES = ((1 << 62, Tile(block_m=16, block_n=64, block_k=32, num_stages=2)),)
BLOCK_OUTLIERS = 16  # the smallest tl.dot depth: 1 % of 3,072 input channels is 31 columns

_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


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
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Multiply activations by a stored INT4 layer; see ``otf_llm.reference.int4_linear`` for the slow equivalent.

    Args:
        x: float16, bfloat16 or float32 [..., in_features], any strides.
        codes: uint8 [N, ceil(K_b / 2)], K_b = in_features - num_outliers: column j is nibble j % 2 (0 = low) of byte
            j // 2, stored as q + 8.
        scales: float16 [N, G], G = ceil(K_b / group_size), or 1 with group_size 0 (none without columns).
        outliers: float16 or bfloat16 [N, num_outliers], possibly without columns.
        in_features: K.
        group_size: columns that share a scale, any size from 1, the last group may be short; 0 for one scale per row.
        perm: int16 or int32 [in_features], position i of the stored order is input channel perm[i]; None when x arrives
            in the stored order. Its values are not looked at here, since reading them would wait for the GPU at every
            call: whoever loads a permutation checks it once.
        bias: float [N] or None.
        out: contiguous [..., N] in x.dtype to write to, or None to allocate it.
        tile: size of one program's work, for tests and tuning; any tile is right for any group_size.

    Returns:
        [..., N] in x.dtype.

    Raises ValueError naming the argument whose shape, dtype, device or stride does not fit.
    """
    num_rows, num_columns = _check_layer(x, codes, scales, outliers, in_features, group_size, perm, bias)
    y_shape = (*x.shape[:-1], num_rows)
    if out is None:
        out = torch.empty(y_shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, (x.dtype,), y_shape, x.device)
    if out.numel() == 0:
        return out

    tokens = x.reshape(out.numel() // num_rows, in_features).to(interpreter_dtype(int4_linear_kernel, x.dtype))
    y = out if tokens.dtype is x.dtype else torch.empty(y_shape, dtype=tokens.dtype, device=x.device)
    tile = tile or choose_tile(FLOAT32_TILES if x.dtype is torch.float32 else TILES, tokens.shape[0])
    # Outliers meet activations of their own dtype as they are. Otherwise both widen to float32, and TF32, with 8 bits
    # of exponent and 10 of mantissa, still holds every float16 and bfloat16 number exactly.
    outlier_dtype = outliers.dtype if outliers.dtype is tokens.dtype else torch.float32
    group = group_size if 0 < group_size < num_columns else max(1, num_columns)
    grid = (triton.cdiv(tokens.shape[0], tile.block_m) * triton.cdiv(num_rows, tile.block_n),)
    with launch_device(int4_linear_kernel, x.device):
        int4_linear_kernel[grid](
            tokens, codes, scales, outliers,
            tokens if perm is None else perm,  # some pointer must stand there, unread without HAS_PERM or HAS_BIAS
            tokens if bias is None else bias,
            y,
            tokens.shape[0], num_rows, num_columns, outliers.shape[1],
            codes.shape[1], group, scales.shape[1], triton.cdiv(group, tile.block_k),
            tokens.stride(0), tokens.stride(1),
            HAS_PERM=perm is not None,
            HAS_BIAS=bias is not None,
            OUTLIER_DTYPE=_TRITON_DTYPES[outlier_dtype],
            OUTLIER_PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_BYTES=tile.block_k // 2,
            BLOCK_OUTLIERS=BLOCK_OUTLIERS,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
    return out if y is out else out.copy_(y)


def _check_layer(x, codes, scales, outliers, in_features, group_size, perm, bias) -> tuple[int, int]:
    """Refuse arguments that do not belong together; return the layer's output features and background columns."""
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, not {str(x.dtype).removeprefix('torch.')}")
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x must have shape [..., {in_features}] for in_features {in_features}, not {list(x.shape)}")
    if group_size < 0:
        raise ValueError(f"group_size must be 0 (per channel) or positive, not {group_size}")
    if outliers.dim() != 2 or outliers.shape[1] > in_features:
        raise ValueError(f"outliers must have shape [N, at most {in_features}], not {list(outliers.shape)}")
    num_rows, num_outliers = outliers.shape
    num_columns = in_features - num_outliers
    groups = -(-num_columns // (group_size or max(1, num_columns)))
    check_tensor("outliers", outliers, (torch.float16, torch.bfloat16), (num_rows, num_outliers), x.device)
    check_tensor("codes", codes, (torch.uint8,), (num_rows, (num_columns + 1) // 2), x.device)
    check_tensor("scales", scales, (torch.float16,), (num_rows, groups), x.device)
    if perm is not None:
        check_tensor("perm", perm, (torch.int16, torch.int32), (in_features,), x.device)
    if bias is not None:
        check_tensor("bias", bias, ACTIVATION_DTYPES, (num_rows,), x.device)
    return num_rows, num_columns


@triton.jit
def _load_channels(x, perm, tokens, positions, wanted, stride_xm, stride_xk, HAS_PERM: tl.constexpr):
    """Activations of the given positions of the stored order, [positions, tokens]; 0 where not wanted."""
    if HAS_PERM:
        channels = tl.load(perm + positions, mask=wanted, other=0).to(tl.int64)
    else:
        channels = positions.to(tl.int64)
    return tl.load(x + channels[:, None] * stride_xk + tokens[None, :] * stride_xm, mask=wanted[:, None], other=0.0)


# Compiling again for these arguments when they are 1 or divisible by 16 would not make faster code, only more of it.
@triton.jit(
    do_not_specialize=("num_tokens", "num_columns", "num_outliers", "group_size", "num_groups", "blocks_per_group")
)
def int4_linear_kernel(
    x, codes, scales, outliers, perm, bias, y,
    num_tokens, num_rows, num_columns, num_outliers,
    row_bytes, group_size, num_groups, blocks_per_group,
    stride_xm, stride_xk,
    HAS_PERM: tl.constexpr, HAS_BIAS: tl.constexpr,
    OUTLIER_DTYPE: tl.constexpr, OUTLIER_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_OUTLIERS: tl.constexpr,
):  # fmt: skip
    """One tile of y.T: BLOCK_N output features by BLOCK_M tokens. 64-bit offsets, as products of sizes pass 2^31."""
    # Token tiles vary fastest, so that neighbouring programs find the same weights in the L2 cache.
    program = tl.program_id(0)
    token_tiles = tl.cdiv(num_tokens, BLOCK_M)
    tokens = ((program % token_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    rows = ((program // token_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # Tokens and rows past the end repeat the last one, and only the store leaves them out.
    read_tokens = tl.minimum(tokens, num_tokens - 1)
    read_rows = tl.minimum(rows, num_rows - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)

    # A step covers BLOCK_BYTES bytes of one scale group. A byte's nibbles are an even and an odd column, so a step is
    # two dots over half the columns each and nothing is interleaved. Columns of a neighbouring group that share a byte
    # or a block with this one meet activations of 0.
    for step in range(num_groups * blocks_per_group):
        group = step // blocks_per_group
        first = group * group_size
        end = tl.minimum(first + group_size, num_columns)
        positions = first // 2 + (step % blocks_per_group) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
        even = 2 * positions
        odd = even + 1
        packed = tl.load(
            codes + read_rows[:, None] * row_bytes + positions[None, :], mask=(positions < row_bytes)[None, :], other=0
        )
        x_even = _load_channels(
            x, perm, read_tokens, num_outliers + even, (even >= first) & (even < end), stride_xm, stride_xk, HAS_PERM
        )
        x_odd = _load_channels(x, perm, read_tokens, num_outliers + odd, odd < end, stride_xm, stride_xk, HAS_PERM)
        low = ((packed & 0xF).to(tl.int8) - 8).to(x_even.dtype)
        high = ((packed >> 4).to(tl.int8) - 8).to(x_odd.dtype)
        partial = tl.dot(low, x_even, input_precision="ieee")
        partial = tl.dot(high, x_odd, partial, input_precision="ieee")
        scale = tl.load(scales + read_rows * num_groups + group).to(tl.float32)
        acc += partial * scale[:, None]

    for start in range(0, num_outliers, BLOCK_OUTLIERS):
        positions = start + tl.arange(0, BLOCK_OUTLIERS)
        wanted = positions < num_outliers
        weight = tl.load(
            outliers + read_rows[:, None] * num_outliers + positions[None, :], mask=wanted[None, :], other=0.0
        )
        x_outlier = _load_channels(x, perm, read_tokens, positions, wanted, stride_xm, stride_xk, HAS_PERM)
        acc = tl.dot(weight.to(OUTLIER_DTYPE), x_outlier.to(OUTLIER_DTYPE), acc, input_precision=OUTLIER_PRECISION)

    if HAS_BIAS:
        acc += tl.load(bias + read_rows).to(tl.float32)[:, None]
    tl.store(
        y + tokens[None, :] * num_rows + rows[:, None],
        acc.to(y.dtype.element_ty),
        mask=(tokens < num_tokens)[None, :] & (rows < num_rows)[:, None],
    )
