"""INT4 linear layers on any GPU that Triton compiles for, and in its interpreter, in one launch.

Codes become exact numbers of the activations' dtype in registers and are multiplied by tensor cores; each group's sum
is scaled in float32, so the only rounding beyond float32 summation is that of y. Takes what ``hopper`` cannot:
bfloat16 and float32 activations, any group size, any strides, and channels that a permutation picks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from otf_kernels import interpreter_dtype, is_interpreted, launch_device
from otf_kernels.int4_layout import MOST_TOKEN_TILES, PackedInt4, scales_per_block

MOST_SPLIT = 16
PROGRAMS_PER_SM = 2  # that the split aims at
# block_m, block_n, num_warps, num_stages, from few tokens to many. Output features are the rows of the tile and tokens
# its columns, since tensor cores take 64 rows but as few as 8 columns: one token wastes 15/16 of 16 columns, not 63/64.
HALF_TILES = ((16, 64, 4, 3), (32, 64, 4, 3), (64, 128, 8, 2))
FLOAT32_TILE = (16, 32, 4, 2)  # ordinary cores hold every operand in registers: small tiles do not spill
BLOCK_OUTLIERS = 16  # the smallest depth of a product: 1 % of 3,072 input channels is 31 columns

_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Config:
    """How a launch is cut up: ``block_n`` output features by ``block_m`` tokens a tile, both powers of two from 16.

    ``split`` programs share a tile's channels; 1 when tokens take more than MOST_TOKEN_TILES tiles.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: int = 1

    def __post_init__(self):
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"config.{name} must be a power of two of at least 16, not {size}")
        if self.split < 1:
            raise ValueError(f"config.split must be at least 1, not {self.split}")


def choose_config(packed: PackedInt4, num_tokens: int, dtype: torch.dtype, num_sms: int) -> Config:
    """A configuration that needs no tuning."""
    tile = next((tile for tile in HALF_TILES if num_tokens <= tile[0]), HALF_TILES[-1])
    block_m, block_n, num_warps, num_stages = FLOAT32_TILE if dtype is torch.float32 else tile
    token_tiles = -(-num_tokens // block_m)
    split = 1
    if token_tiles <= MOST_TOKEN_TILES:
        tiles = token_tiles * -(-packed.out_features // block_n)
        blocks = packed.words.shape[0]
        split = max(1, min(PROGRAMS_PER_SM * num_sms // tiles, blocks, MOST_SPLIT))
        split = -(-blocks // -(-blocks // split))  # no program without a block
    return Config(block_m, block_n, num_warps, num_stages, split)


def launch(
    x: torch.Tensor,
    packed: PackedInt4,
    perm: torch.Tensor | None,
    out: torch.Tensor,
    config: Config | None = None,
) -> torch.Tensor:
    """Write x · Wᵀ (+ bias) to ``out``; ``int4_linear.int4_linear`` has checked the arguments."""
    tokens = x.reshape(-1, x.shape[-1]).to(interpreter_dtype(int4_portable_kernel, x.dtype))
    y = out if tokens.dtype is out.dtype else torch.empty(out.shape, dtype=tokens.dtype, device=out.device)
    num_tokens, num_rows = tokens.shape[0], packed.out_features
    interpreted = is_interpreted(int4_portable_kernel)
    context = launch_device(int4_portable_kernel, x.device)
    if config is None:
        sms = 1 if interpreted else torch.cuda.get_device_properties(x.device).multi_processor_count
        config = choose_config(packed, num_tokens, tokens.dtype, sms)
    token_tiles = triton.cdiv(num_tokens, config.block_m)
    if config.split > 1 and token_tiles > MOST_TOKEN_TILES:
        raise ValueError(
            f"config.split must be 1 when tokens take more than {MOST_TOKEN_TILES} tiles, not {config.split}"
        )
    tiles = token_tiles * triton.cdiv(num_rows, config.block_n)
    parts = y  # some pointer must stand there, unread without a split
    if config.split > 1:
        size = tiles * config.split * config.block_n * config.block_m
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    arranged = x.shape[-1] != packed.in_features
    blocks = packed.words.shape[0]
    groups = scales_per_block(packed.group_size)
    # Outliers meet activations of their own dtype as they are. Otherwise both widen to float32, and TF32, with 8 bits
    # of exponent and 10 of mantissa, still holds every float16 and bfloat16 number exactly.
    outlier_dtype = packed.outliers.dtype if packed.outliers.dtype is tokens.dtype else torch.float32
    with context:
        int4_portable_kernel[(tiles * config.split,)](
            tokens,
            tokens if perm is None else perm,
            packed.words,
            packed.scales,
            packed.row_factors,
            packed.outliers,
            packed.row_factors if packed.bias is None else packed.bias,
            y,
            parts,
            packed.arrivals,
            num_tokens, num_rows, packed.in_features - packed.num_outliers, packed.num_outliers,
            packed.aligned_outliers, packed.aligned_outliers if arranged else packed.num_outliers,
            blocks, triton.cdiv(blocks, config.split), packed.group_size, packed.scales.shape[-1],
            tokens.stride(0), tokens.stride(1),
            HAS_PERM=perm is not None,
            HAS_BIAS=packed.bias is not None,
            GROUPS=-1 if groups is None else groups,
            OUTLIER_DTYPE=_TRITON_DTYPES[outlier_dtype],
            OUTLIER_PRECISION="ieee" if tokens.dtype is torch.float32 else "tf32",
            INLINE_PTX=not interpreted and torch.version.hip is None,
            SPLIT=config.split,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_OUTLIERS=BLOCK_OUTLIERS,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )  # fmt: skip
    return out if y is out else out.copy_(y)


@triton.jit
def codes_of_plane(words, PLANE: tl.constexpr, DTYPE: tl.constexpr, INLINE_PTX: tl.constexpr):
    """Codes of a plane, exact in DTYPE; in PTX two at a time: u under the exponent of 2^10 or 2^7, less that and 8."""
    if INLINE_PTX and DTYPE == tl.float16:
        q = tl.inline_asm_elementwise(
            "{.reg .b32 u, c; and.b32 u, $1, 0x000F000F; or.b32 u, u, 0x64006400; mov.b32 c, 0x64086408;"
            " sub.f16x2 $0, u, c;}",
            "=r,r", [_shifted(words, PLANE)], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif INLINE_PTX and DTYPE == tl.bfloat16:
        q = tl.inline_asm_elementwise(
            "{.reg .b32 u, a, c; and.b32 u, $1, 0x000F000F; or.b32 u, u, 0x43004300; mov.b32 a, 0x3F803F80;"
            " mov.b32 c, 0xC308C308; fma.rn.bf16x2 $0, u, a, c;}",
            "=r,r", [_shifted(words, PLANE)], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        q = (((words >> (4 * PLANE)) & 0xF) - 8).to(DTYPE)
    return q


@triton.jit
def _shifted(words, PLANE: tl.constexpr):
    """Two words at a time with the plane's codes at bits 3..0; what comes from the neighbour is masked out later."""
    if PLANE == 0:
        return words
    elif PLANE == 1:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 4;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    elif PLANE == 2:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 8;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 12;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _activations(x, perm, tokens, positions, wanted, stride_xm, stride_xk, HAS_PERM: tl.constexpr):
    """Activations at the given positions of the stored order, [positions, tokens]; 0 where not wanted."""
    if HAS_PERM:
        channels = tl.load(perm + positions, mask=wanted, other=0).to(tl.int64)
    else:
        channels = positions.to(tl.int64)
    return tl.load(x + channels[:, None] * stride_xk + tokens[None, :] * stride_xm, mask=wanted[:, None], other=0.0)


# Compiling again for these arguments when they are 1 or divisible by 16 would not make faster code, only more of it.
@triton.jit(do_not_specialize=("num_tokens", "num_columns", "num_outliers", "blocks", "blocks_per_part", "group_size"))
def int4_portable_kernel(
    x, perm, words, scales, row_factors, outliers, bias, y, parts, arrivals,
    num_tokens, num_rows, num_columns, num_outliers,
    outlier_stride, first, blocks, blocks_per_part, group_size, num_groups, stride_xm, stride_xk,
    HAS_PERM: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr,
    OUTLIER_DTYPE: tl.constexpr, OUTLIER_PRECISION: tl.constexpr, INLINE_PTX: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_OUTLIERS: tl.constexpr,
):  # fmt: skip
    """Part ``program % SPLIT`` of a tile of y.T: BLOCK_N output features by BLOCK_M tokens.

    GROUPS scales a block of 256 columns, 0 for one a row, -1 for groups that planes of 64 columns do not make up.
    64-bit offsets, as products of sizes pass 2^31. Token tiles vary fastest, so that neighbouring programs find the
    same weights in the L2 cache.
    """
    program = tl.program_id(0)
    tile = program // SPLIT
    part = program % SPLIT
    token_tiles = tl.cdiv(num_tokens, BLOCK_M)
    tokens = ((tile % token_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    rows = ((tile // token_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # Tokens and rows past the end repeat the last one, and only the store leaves them out.
    read_tokens = tl.minimum(tokens, num_tokens - 1)
    read_rows = tl.minimum(rows, num_rows - 1)
    dtype: tl.constexpr = x.dtype.element_ty
    lanes = tl.arange(0, 64)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    block_rows = tl.cast(num_rows, tl.int64)
    scale_rows = (block_rows + 7) // 8 * 8
    begin = part * blocks_per_part
    for block in range(begin, tl.minimum(begin + blocks_per_part, blocks)):
        packed = tl.load(words + (block * block_rows + read_rows)[:, None] * 64 + lanes[None, :])
        group = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for plane in tl.static_range(4):
            positions = block * 256 + plane * 64 + lanes
            wanted = positions < num_columns
            q = codes_of_plane(packed, plane, dtype, INLINE_PTX)
            value = _activations(x, perm, read_tokens, first + positions, wanted, stride_xm, stride_xk, HAS_PERM)
            if GROUPS == -1:
                # Columns of the plane's other groups meet activations of 0.
                for index in range(
                    (block * 256 + plane * 64) // group_size,
                    tl.minimum((block * 256 + plane * 64 + 63) // group_size + 1, num_groups),
                ):
                    own = tl.where((positions // group_size == index)[:, None], value, 0.0)
                    scale = tl.load(scales + read_rows * num_groups + index).to(tl.float32)
                    acc += tl.dot(q, own, input_precision="ieee") * scale[:, None]
            elif GROUPS == 0:
                acc = tl.dot(q, value, acc, input_precision="ieee")
            else:
                group = tl.dot(q, value, group, input_precision="ieee")
                if (plane + 1) * GROUPS % 4 == 0:
                    place = (block * scale_rows + read_rows) * GROUPS + (plane * GROUPS) // 4
                    acc += group * tl.load(scales + place).to(tl.float32)[:, None]
                    group = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    factors = tl.load(row_factors + read_rows) * 5.960464477539063e-08  # 2^-24, which row_factors make up for
    if GROUPS == 0:
        factors *= 16384.0  # the scale that they make up for, with the row's own
    acc *= factors[:, None]

    # Outlier columns, dealt out among the parts.
    chunks = tl.cdiv(num_outliers, BLOCK_OUTLIERS)
    for chunk in range(part * chunks // SPLIT, (part + 1) * chunks // SPLIT):
        positions = chunk * BLOCK_OUTLIERS + tl.arange(0, BLOCK_OUTLIERS)
        wanted = positions < num_outliers
        weight = tl.load(
            outliers + read_rows[:, None] * outlier_stride + positions[None, :], mask=wanted[None, :], other=0.0
        )
        value = _activations(x, perm, read_tokens, positions, wanted, stride_xm, stride_xk, HAS_PERM)
        acc = tl.dot(weight.to(OUTLIER_DTYPE), value.to(OUTLIER_DTYPE), acc, input_precision=OUTLIER_PRECISION)

    inside = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    if SPLIT == 1:
        _store(acc, y, bias, tokens, rows, read_rows, num_rows, inside, HAS_BIAS)
    else:
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tile_parts = parts + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M)
        tl.store(tile_parts + part * (BLOCK_N * BLOCK_M) + place, acc)
        tl.debug_barrier()
        # The last to arrive adds the parts, always in the same order.
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for index in range(SPLIT):
                total += tl.load(tile_parts + index * (BLOCK_N * BLOCK_M) + place, cache_modifier=".cg")
            _store(total, y, bias, tokens, rows, read_rows, num_rows, inside, HAS_BIAS)
            tl.store(arrivals + tile, 0)


@triton.jit
def _store(total, y, bias, tokens, rows, read_rows, num_rows, inside, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + read_rows)[:, None]
    tl.store(y + tokens[None, :] * num_rows + rows[:, None], total.to(y.dtype.element_ty), mask=inside)
