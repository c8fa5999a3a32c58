"""INT4 linear layers on Hopper GPUs (compute capability 9.x), in one launch: tensor cores fed from packed words.

A program computes a tile of y.T, ``block_n`` output features by ``block_m`` tokens, over its share of the channels. One
warp has the copy engine fetch a stage of words and activations into shared memory, several stages ahead; the other
warps read words from there, turn them into scaled half-precision weights in registers and give those to the tensor
cores as their left operand, whose right operand is the activations in shared memory. While one plane is multiplied the
next is made. Outlier columns are further steps of the same loop. Where tiles are too few for the GPU, ``split``
programs share a tile's channels: each writes its float32 part and the last to arrive adds them, always in the same
order, so the result is the same bits in every run.

Layout: ``int4_layout``. Weights have the activations' dtype. As bits of a bfloat16 number, u and 16 u are themselves
times 2^-133, the smallest one, as they are times 2^-24 in float16. Scales rounded to bfloat16 cost a relative 2^-9.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from otf_kernels.int4_layout import BLOCK, MOST_TOKEN_TILES, PLANE, PackedInt4, scales_per_block
from otf_kernels.tuning import tuned_config

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it

REGISTERS = 65536  # of a multiprocessor
MOST_REGISTERS = 240  # a thread may have 255; the compiler keeps some
PRODUCER_REGISTERS = gl.constexpr(24)
PRODUCER_WARPS = 4  # one works, and registers are handed out to four at a time
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that programs may use
RESERVED_SHARED_MEMORY = 1280  # of each program: barriers, and what CUDA takes
MOST_SPLIT = 16
MOST_BLOCK_M = 128


@dataclass(frozen=True)
class Config:
    """How a launch is cut up.

    block_m: tokens of a tile, 8, 16, 32, 64 or 128.
    block_n: output features of a tile, 64 for every four warps or a multiple of that.
    num_warps: warps that multiply, 4 or 8.
    num_stages: stages of 256 channels in shared memory.
    programs_per_sm: programs that shall fit a multiprocessor at a time.
    split: programs that share a tile's channels, 1 when tokens take more than MOST_TOKEN_TILES tiles; or 0 for
        programs_per_sm programs a multiprocessor, of which each takes whole tiles and an equal share of what is left
        over (data-parallel with a two-tile stream-K wave: Osama et al. 2023, arXiv:2301.03598).
    early: fetch the first stages' weights before the preceding kernel has finished (programmatic dependent launch).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    split: int
    early: bool

    @property
    def shared_memory(self) -> int:
        stages = self.num_stages * 2 * (PLANE * self.block_n + BLOCK * self.block_m)
        rearranged = self.num_warps * 2 * 16 * min(16, self.block_m)  # part of y on its way to memory
        return stages + rearranged + RESERVED_SHARED_MEMORY

    @property
    def fits(self) -> bool:
        """Whether as many programs as wanted fit a multiprocessor's shared memory."""
        return self.shared_memory * self.programs_per_sm <= SHARED_MEMORY

    @property
    def registers(self) -> int:
        """Of a thread at the launch; the multiplying warps then take the producer's."""
        threads = 32 * (self.num_warps + PRODUCER_WARPS) * self.programs_per_sm
        return min(MOST_REGISTERS, REGISTERS // threads // 8 * 8)


def choose_config(packed: PackedInt4, num_tokens: int, num_sms: int) -> Config:
    """A configuration that needs no tuning."""
    num_rows = packed.out_features
    block_m = min(MOST_BLOCK_M, max(8, 1 << (num_tokens - 1).bit_length()))
    weights = num_rows * packed.in_features
    if block_m <= 16:
        # Long rows of work keep memory busy by themselves; short ones start while the preceding kernel ends.
        large = weights >= 60_000_000
        shape = (128, 4, 3, 2, False) if large else (64, 4, 3, 3, True)
    elif block_m <= 64:
        if weights >= 60_000_000:
            shape = (256, 8, 3, 1, True) if num_rows >= 8192 else (128, 8, 3, 1, True)
        else:
            shape = (128, 8, 3, 1, True) if weights >= 20_000_000 else (64, 4, 3, 1, True)
    else:
        shape = (256, 8, 2, 1, True) if num_rows >= 8192 and weights >= 60_000_000 else (64, 4, 3, 1, True)
    block_n, num_warps, num_stages, programs_per_sm, early = shape
    steps = num_steps(packed)
    tiles = -(-num_rows // block_n) * -(-num_tokens // block_m)
    split = 1
    if -(-num_tokens // block_m) <= MOST_TOKEN_TILES:
        split = max(1, min(programs_per_sm * num_sms // tiles, steps, MOST_SPLIT))
        split = -(-steps // -(-steps // split))  # no program without a step
    return Config(block_m, block_n, num_warps, num_stages, programs_per_sm, split, early)


def num_steps(packed: PackedInt4) -> int:
    """Steps of the main loop: 256 background channels each, then 64 outlier columns each."""
    return packed.words.shape[0] + -(-packed.aligned_outliers // PLANE)


@functools.cache
def _properties(index: int) -> tuple[str, int]:
    """Name and multiprocessors of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.multi_processor_count


def launch(x: torch.Tensor, packed: PackedInt4, out: torch.Tensor, config: Config | None = None) -> torch.Tensor:
    """Write x · Wᵀ (+ bias) to ``out``, [..., N] in x.dtype without gaps; ``int4_linear`` has checked that they fit.

    Args:
        x: float16 or bfloat16 [..., packed.aligned_features] on a Hopper GPU, in the kernels' order
            (``int4_layout.arrange``), its channels side by side and its tokens 16-byte aligned.
        packed: the layer, with groups that planes of 64 columns make up, and float16 outliers if x is float16.
        out: where to write.
        config: how to cut the work up, or None to choose.

    Raises ValueError when the configuration does not fit.
    """
    width, num_rows = packed.aligned_features, packed.out_features
    tokens = x.reshape(-1, width)
    num_tokens = tokens.shape[0]
    stride = tokens.stride(0) if num_tokens > 1 else width
    if config is None:
        name, num_sms = _properties(x.device.index)
        config = tuned_config(name, packed, num_tokens) if num_tokens <= MOST_BLOCK_M else None
        config = config or choose_config(packed, num_tokens, num_sms)
    _check_config(config, num_tokens)
    blocks = packed.words.shape[0]
    has_outliers = packed.aligned_outliers > 0
    steps = num_steps(packed)
    token_tiles = -(-num_tokens // config.block_m)
    tiles = token_tiles * -(-num_rows // config.block_n)
    split = config.split
    shared = split == 0
    if shared:
        # Whole waves of tiles need no sharing; the last wave that is full is shared with the rest beyond it.
        programs = min(config.programs_per_sm * _properties(x.device.index)[1], tiles * steps, packed.arrivals.numel())
        waves = max(0, tiles // programs - (tiles % programs > 0))
        shared_tiles = tiles - waves * programs
        per_share, longer = divmod(shared_tiles * steps, programs)
        num_parts = 2 * programs
    else:
        waves = shared_tiles = 0
        per_share, longer = -(-steps // config.split), 0
        split = -(-steps // per_share)  # no program without a step
        programs = num_parts = tiles * split
    parts = packed.row_factors  # some float32 must stand there, unread without a split
    if split != 1:
        parts = torch.empty(num_parts * config.block_n * config.block_m, dtype=torch.float32, device=x.device)
    groups = scales_per_block(packed.group_size)
    words = packed.words.view(-1, PLANE)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * PLANE, element_bitwidth=16, rank=2)
    outliers = packed.outliers if has_outliers else words.view(x.dtype)
    with torch.cuda.device(x.device):
        int4_linear_kernel[(programs,)](
            TensorDescriptor(tokens, [num_tokens, width], [stride, 1], [config.block_m, PLANE], layout),
            TensorDescriptor(words, list(words.shape), [PLANE, 1], [config.block_n, PLANE], layout),
            TensorDescriptor(outliers, list(outliers.shape), [outliers.shape[1], 1], [config.block_n, PLANE], layout),
            packed.scales.view({0: torch.int16, 1: torch.int16, 2: torch.int32, 4: torch.int64}[groups]),
            packed.row_factors,
            packed.row_factors if packed.bias is None else packed.bias,
            out,
            parts,
            packed.arrivals,
            num_tokens, num_rows, packed.aligned_outliers, blocks, steps,
            split, per_share, longer, shared_tiles, waves, token_tiles,
            HAS_BIAS=packed.bias is not None,
            GROUPS=groups,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.num_stages,
            EARLY=config.early,
            SHARED=shared,
            num_warps=config.num_warps,
            maxnreg=config.registers,
            launch_pdl=True,
        )  # fmt: skip
    return out


def _check_config(config: Config, num_tokens: int) -> None:
    if config.block_m not in (8, 16, 32, 64, 128):
        raise ValueError(f"config.block_m must be 8, 16, 32, 64 or 128, not {config.block_m}")
    if config.num_warps not in (4, 8) or config.block_n not in (16 * config.num_warps, 32 * config.num_warps):
        raise ValueError(
            f"config must have 4 or 8 warps and 16 or 32 output features a warp, not num_warps {config.num_warps} and "
            f"block_n {config.block_n}"
        )
    if config.num_stages < 2 or not config.fits:
        raise ValueError(
            f"config.num_stages must be at least 2 and fit {SHARED_MEMORY} bytes of shared memory, not "
            f"{config.num_stages} ({config.programs_per_sm} x {config.shared_memory} bytes)"
        )
    if config.split < 0 or (config.split > 1 and num_tokens > MOST_TOKEN_TILES * config.block_m):
        raise ValueError(
            f"config.split must not be negative, and 0 or 1 when tokens take over {MOST_TOKEN_TILES} tiles, not "
            f"{config.split}"
        )


@gluon.jit
def _low_plane(words, scale, offset):
    """Weights of the codes at bits 3..0, u times the dtype's smallest number: times scale plus offset, rounded once."""
    if scale.dtype == gl.float16:
        weights = gl.inline_asm_elementwise(
            "{.reg .b32 u; and.b32 u, $1, 0x000F000F; fma.rn.f16x2 $0, u, $2, $3;}", "=r,r,r,r",
            [words, scale[:, None], offset[:, None]], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        weights = gl.inline_asm_elementwise(
            "{.reg .b32 u; and.b32 u, $1, 0x000F000F; fma.rn.bf16x2 $0, u, $2, $3;}", "=r,r,r,r",
            [words, scale[:, None], offset[:, None]], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return weights


@gluon.jit
def _high_plane(words, scale, offset):
    """The same of the codes at bits 7..4, which are 16 u times the smallest number where they stand."""
    if scale.dtype == gl.float16:
        weights = gl.inline_asm_elementwise(
            "{.reg .b32 u; and.b32 u, $1, 0x00F000F0; fma.rn.f16x2 $0, u, $2, $3;}", "=r,r,r,r",
            [words, (scale * 0.0625)[:, None], offset[:, None]], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        weights = gl.inline_asm_elementwise(
            "{.reg .b32 u; and.b32 u, $1, 0x00F000F0; fma.rn.bf16x2 $0, u, $2, $3;}", "=r,r,r,r",
            [words, (scale * 0.0625)[:, None], offset[:, None]], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return weights


@gluon.jit
def _upper_codes(words):
    """Words whose bits 7..0 are the bits 15..8; what comes from the neighbour above is masked out later."""
    return gl.inline_asm_elementwise("shr.b32 $0, $1, 8;", "=r,r", [words], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def _scale(bits, group: gl.constexpr, GROUPS: gl.constexpr, DTYPE: gl.constexpr):
    """Scale of plane ``group`` of 4, and what 8 of the code's unit come to, from the bits of a row's GROUPS scales."""
    index: gl.constexpr = group * GROUPS // 4 if GROUPS > 1 else 0
    scale = (bits >> (16 * index)).to(gl.int16).to(gl.float16, bitcast=True)
    offset = scale * -4.76837158203125e-07  # -8 * 2^-24
    if DTYPE == gl.bfloat16:
        # A unit of 2^-133 wants a scale that is larger by 2^112, and leaves weights 8 times as large as in float16.
        exact = scale.to(gl.float32)
        offset = (exact * -3.814697265625e-06).to(gl.bfloat16)  # -8 * 2^-133 * 2^112
        scale = (exact * 5.192296858534828e33).to(gl.bfloat16)
    return scale, offset


@gluon.jit
def _fetch(
    x_tokens, words_rows, scales, stages, ready, slot, block, num_rows, row, token, first, PART: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a background step's stage: words, and the activations of the four planes."""
    x0, x1, x2, x3, tiles = stages
    if PART != "activations":
        mbarrier.expect(ready, words_rows.block_type.nbytes + 4 * x_tokens.block_type.nbytes)
        tma.async_copy_global_to_shared(words_rows, [block * num_rows + row, 0], ready, tiles.index(slot))
        if GROUPS > 0:
            # The multiplying warps load scales one step ahead, less than memory takes: L2 shall have them by then.
            BLOCK_N: gl.constexpr = words_rows.block_type.shape[0]
            SECTOR: gl.constexpr = 16 // GROUPS  # rows whose scales take 32 bytes
            lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
            for begin in gl.static_range(0, BLOCK_N, 32 * SECTOR):
                rows = gl.minimum(row + gl.minimum(begin + lanes * SECTOR, BLOCK_N - 1), num_rows - 1)
                gl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
                    [(scales + block * num_rows + rows).to(gl.int64, bitcast=True)],
                    dtype=gl.int32, is_pure=False, pack=1,
                )  # fmt: skip
    if PART != "words":
        channel = first + block * 256
        tma.async_copy_global_to_shared(x_tokens, [token, channel], ready, x0.index(slot))
        tma.async_copy_global_to_shared(x_tokens, [token, channel + 64], ready, x1.index(slot))
        tma.async_copy_global_to_shared(x_tokens, [token, channel + 128], ready, x2.index(slot))
        tma.async_copy_global_to_shared(x_tokens, [token, channel + 192], ready, x3.index(slot))


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    slot += 1
    phase = gl.where(slot == STAGES, phase ^ 1, phase)
    return gl.where(slot == STAGES, 0, slot), phase


@gluon.jit
def _segment(segment, work, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SHARED: gl.constexpr):
    """Tile of a program's ``segment``-th piece of work, its first row and token, and the steps from begin to end."""
    first_step, last_step, steps, token_tiles, shared_segments, _, shared_tiles = work
    tile = first_step // steps + segment
    if SHARED:
        whole = shared_tiles + (segment - shared_segments) * gl.num_programs(0) + gl.program_id(0)
        tile = gl.where(segment < shared_segments, tile, whole)
    begin = gl.maximum(first_step - tile * steps, 0)
    end = gl.minimum(last_step - tile * steps, steps)
    if SHARED:
        begin = gl.where(segment < shared_segments, begin, 0)
        end = gl.where(segment < shared_segments, end, steps)
    return tile, tile // token_tiles * BLOCK_N, tile % token_tiles * BLOCK_M, begin, end


@gluon.jit
def _produce(
    sources, stages, barriers, sizes, work, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """The copying warp: fill stages as they become free."""
    x_tokens, words_rows, outlier_rows, scales = sources
    x0, _, _, _, tiles = stages
    ready, free = barriers
    num_rows, _, blocks, first = sizes
    segments = work[5]
    ahead = 0
    if EARLY:
        # Weights do not depend on the preceding kernel; activations do.
        _, row, token, begin, end = _segment(0, work, BLOCK_M, BLOCK_N, SHARED)
        ahead = gl.maximum(gl.minimum(gl.minimum(end, blocks) - begin, STAGES), 0)
        for i in range(ahead):
            _fetch(
                x_tokens, words_rows, scales, stages, ready.index(i), i, begin + i, num_rows, row, token, first,
                "words", GROUPS,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        for i in range(ahead):
            _fetch(
                x_tokens, words_rows, scales, stages, ready.index(i), i, begin + i, num_rows, row, token, first,
                "activations", GROUPS,
            )  # fmt: skip
    else:
        tl.extra.cuda.gdc_wait()
    slot = gl.where(ahead == STAGES, 0, ahead)
    phase = gl.where(ahead == STAGES, 0, 1)
    for segment in range(segments if SHARED else 1):
        _, row, token, begin, end = _segment(segment, work, BLOCK_M, BLOCK_N, SHARED)
        next_block = begin
        if EARLY:
            next_block += gl.where(segment == 0, ahead, 0)
        for block in range(next_block, gl.minimum(end, blocks)):
            mbarrier.wait(free.index(slot), phase)
            _fetch(
                x_tokens, words_rows, scales, stages, ready.index(slot), slot, block, num_rows, row, token, first,
                "both", GROUPS,
            )  # fmt: skip
            slot, phase = _advance(slot, phase, STAGES)
        for step in range(gl.maximum(begin, blocks), end):
            mbarrier.wait(free.index(slot), phase)
            channel = (step - blocks) * 64
            columns = tiles.index(slot)._reinterpret(
                outlier_rows.dtype, outlier_rows.block_type.shape, outlier_rows.layout
            )
            mbarrier.expect(ready.index(slot), outlier_rows.block_type.nbytes + x_tokens.block_type.nbytes)
            tma.async_copy_global_to_shared(outlier_rows, [row, channel], ready.index(slot), columns)
            tma.async_copy_global_to_shared(x_tokens, [token, channel], ready.index(slot), x0.index(slot))
            slot, phase = _advance(slot, phase, STAGES)
    tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _consume(
    stages, barriers, pointers, sizes, work, shares, HAS_BIAS: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, layout: gl.constexpr,
    OUTLIER_DTYPE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: words to weights to sums, then the tile's epilogue."""
    _, row_factors, bias, _, _, _ = pointers
    num_rows = sizes[0]
    steps = work[2]
    segments = work[5]
    slot = 0
    phase = 0
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    for segment in range(segments if SHARED else 1):
        tile, row, token, begin, end = _segment(segment, work, BLOCK_M, BLOCK_N, SHARED)
        # Asked for before the main loop, which hides how long they take.
        rows = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma)), num_rows - 1)
        factors = gl.load(row_factors + rows)
        row_bias = factors
        if HAS_BIAS:
            row_bias = gl.load(bias + rows)
        total, slot, phase = _multiply(
            stages, barriers, pointers, sizes, begin, end, row, slot, phase, factors, GROUPS, BLOCK_M, BLOCK_N, STAGES,
            layout, OUTLIER_DTYPE, NUM_WARPS,
        )  # fmt: skip
        tl.extra.cuda.gdc_wait()  # nothing is written while the preceding kernel may still read it
        _finish(
            total, pointers, sizes, begin, end, row, token, tile, steps, shares, row_bias, HAS_BIAS, BLOCK_M, BLOCK_N,
            SHARED, NUM_WARPS,
        )  # fmt: skip


@gluon.jit
def _multiply(
    stages, barriers, pointers, sizes, begin, end, row, slot, phase, factors, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
    OUTLIER_DTYPE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Sum of a tile's steps from ``begin`` to ``end``, and where the ring of stages stands after them."""
    x0, x1, x2, x3, tiles = stages
    ready, free = barriers
    scales = pointers[0]
    num_rows, _, blocks, _ = sizes
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    DTYPE: gl.constexpr = x0.dtype
    middle = gl.minimum(end, blocks)

    scale_rows = scales + gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, left)), num_rows - 1)
    bits = gl.load(scale_rows + (gl.minimum(begin, blocks - 1) * num_rows if GROUPS > 0 else 0))
    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma))
    before = 0
    for block in range(begin, middle):
        s0, offset0 = _scale(bits, 0, GROUPS, DTYPE)
        s1, offset1 = _scale(bits, 1, GROUPS, DTYPE)
        s2, offset2 = _scale(bits, 2, GROUPS, DTYPE)
        s3, offset3 = _scale(bits, 3, GROUPS, DTYPE)
        if GROUPS > 0:
            bits = gl.load(scale_rows + gl.minimum(block + 1, middle - 1) * num_rows)
        mbarrier.wait(ready.index(slot), phase)
        words = tiles.index(slot).load(left)
        weights = _low_plane(words, s0, offset0)
        acc = warpgroup_mma(weights, x0.index(slot).permute([1, 0]), acc, is_async=True)
        # At most one plane in flight keeps large tiles within their registers; two hide more latency for small ones.
        # Either way the preceding stage has been multiplied by the time it is handed back.
        if BLOCK_M > 16:
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
            mbarrier.arrive(free.index(before), pred=block > begin)
        weights = _high_plane(words, s1, offset1)
        acc = warpgroup_mma(weights, x1.index(slot).permute([1, 0]), acc, is_async=True)
        if BLOCK_M > 16:
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
        else:
            acc = warpgroup_mma_init(warpgroup_mma_wait(2, [acc]))
            mbarrier.arrive(free.index(before), pred=block > begin)
        words = _upper_codes(words)
        weights = _low_plane(words, s2, offset2)
        acc = warpgroup_mma(weights, x2.index(slot).permute([1, 0]), acc, is_async=True)
        if BLOCK_M > 16:
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
        weights = _high_plane(words, s3, offset3)
        acc = warpgroup_mma(weights, x3.index(slot).permute([1, 0]), acc, is_async=True)
        if BLOCK_M > 16:
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
        before = slot
        slot, phase = _advance(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index(before), pred=begin < middle)

    if DTYPE == gl.bfloat16:
        factors *= 0.125
    acc = warpgroup_mma_init(acc * factors[:, None])
    for _ in range(gl.maximum(begin, blocks), end):
        mbarrier.wait(ready.index(slot), phase)
        columns = tiles.index(slot)._reinterpret(OUTLIER_DTYPE, [BLOCK_N, 64], layout)
        if OUTLIER_DTYPE != DTYPE:
            columns = columns.load(left).to(DTYPE)
        acc = warpgroup_mma(columns, x0.index(slot).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(0, [acc]))
        mbarrier.arrive(free.index(slot))
        slot, phase = _advance(slot, phase, STAGES)
    return warpgroup_mma_wait(0, [acc]), slot, phase


@gluon.jit
def _share_begin(share, shares):
    """First step of equal shares: the first ``longer`` of them have one step more than the others."""
    _, per_share, longer = shares
    return share * per_share + gl.minimum(share, longer)


@gluon.jit
def _share_of(step, shares):
    """Which share holds a step."""
    _, per_share, longer = shares
    boundary = longer * (per_share + 1)
    return gl.where(step < boundary, step // (per_share + 1), longer + (step - boundary) // gl.maximum(per_share, 1))


@gluon.constexpr_function
def _row_layout(block_n, block_m, num_warps):
    """Where ``wgmma`` leaves a tile, rearranged within each warp so that a thread holds up to 8 rows of one token."""
    if block_m == 8:
        few, lanes = [[1, 0], [2, 0]], [[4, 0], [8, 0], [0, 1], [0, 2], [0, 4]]
    else:
        few, lanes = [[1, 0], [2, 0], [4, 0]], [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]]
    warps = [[16 << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    tokens = [[0, 1 << bit] for bit in range(4, block_m.bit_length() - 1)]
    repeated = [[16 * num_warps << bit, 0] for bit in range((block_n // (16 * num_warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout(few + tokens + repeated, lanes, warps, [], [block_n, block_m])


@gluon.jit
def _finish(
    total, pointers, sizes, begin, end, row, token, tile, steps, shares, row_bias, HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SHARED: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Write a tile, or a part of it, and the tile if all its other parts are there."""
    _, _, _, y, parts, arrivals = pointers
    num_rows, num_tokens, _, _ = sizes
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    SIZE: gl.constexpr = BLOCK_N * BLOCK_M
    tile_rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
    tile_tokens = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))
    split, _, _ = shares
    program = gl.program_id(0)
    # Parts of a tile lie ``distance`` slots apart from ``first_slot`` on; ``count`` of them.
    if SHARED:
        # A program leaves at most two parts: one of a tile that it enters in the middle, one of a tile that it leaves.
        first = _share_of(tile * steps, shares)
        count = gl.where(end - begin == steps, 1, _share_of(tile * steps + steps - 1, shares) - first + 1)
        own = 2 * program + gl.where(_share_begin(program, shares) < tile * steps, 1, 0)
        first_slot = 2 * first + gl.where(_share_begin(first, shares) < tile * steps, 1, 0)
        rest_slot = 2 * first + 2
        distance = 2
        counter = arrivals + first  # of all tiles that begin in a share only the last can go on beyond it
    else:
        count = split
        own = program
        first_slot = tile * split
        rest_slot = first_slot + 1
        distance = 1
        counter = arrivals + tile
    last = count == 1
    if count > 1:
        # Whole tiles, without a mask, in blocks of 8 x 8 that a warp stores and loads without gaps.
        place = ((tile_rows // 8 * (BLOCK_M // 8))[:, None] + (tile_tokens // 8)[None, :]) * 64
        place += (tile_rows % 8 * 8)[:, None] + (tile_tokens % 8)[None, :]
        gl.store(parts + own * SIZE + place, total)
        barrier()
        last = gl.atomic_add(counter, 1, sem="acq_rel") == count - 1
        if last:
            # The same sum whoever is last: of two parts in either order, of more always in theirs.
            if count == 2:
                other = gl.where(own == first_slot, rest_slot, first_slot)
                total += gl.load(parts + other * SIZE + place, cache_modifier=".cg")
            else:
                total = gl.load(parts + first_slot * SIZE + place, cache_modifier=".cg")
                # As many parts at once as registers allow: their loads wait together.
                AT_ONCE: gl.constexpr = max(1, min(4, 2048 * NUM_WARPS // SIZE))
                for i in range(1, count, AT_ONCE):
                    for j in gl.static_range(AT_ONCE):
                        source = parts + (rest_slot + (i + j - 1) * distance) * SIZE + place
                        if AT_ONCE == 1:
                            total += gl.load(source, cache_modifier=".cg")
                        else:
                            total += gl.load(source, mask=i + j < count, other=0.0, cache_modifier=".cg")
            gl.store(counter, 0)
    if last:
        if HAS_BIAS:
            total += row_bias[:, None]
        layout: gl.constexpr = _row_layout(BLOCK_N, BLOCK_M, NUM_WARPS)
        rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
        tokens = token + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
        inside = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
        place = tokens.to(gl.int64)[None, :] * num_rows + rows[:, None]
        gl.store(y + place, gl.convert_layout(total.to(y.dtype.element_ty), layout), mask=inside)


# Compiling again for these arguments when they are 1 or divisible by 16 would not make faster code, only more of it.
_UNSPECIALIZED = (
    "num_tokens", "blocks", "steps", "split", "per_share", "longer", "shared_tiles", "waves", "token_tiles"
)  # fmt: skip


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def int4_linear_kernel(
    x_tokens, words_rows, outlier_rows, scales, row_factors, bias, y, parts, arrivals,
    num_tokens, num_rows, first, blocks, steps, split, per_share, longer, shared_tiles, waves, token_tiles,
    HAS_BIAS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """A program's share of the steps of y.T's tiles; token tiles vary fastest, so that weights stay in L2.

    With SHARED a program takes its equal share of the first ``shared_tiles`` tiles' steps, then ``waves`` whole tiles;
    otherwise part ``program % split`` of tile ``program // split``.
    """
    program = gl.program_id(0)
    shares = (split, per_share, longer)
    if SHARED:
        first_step = _share_begin(program, shares)
        last_step = _share_begin(program + 1, shares)
        shared_segments = gl.where(last_step > first_step, (last_step - 1) // steps - first_step // steps + 1, 0)
        segments = shared_segments + waves
    else:
        end_of_tile = (program // split + 1) * steps
        first_step = end_of_tile - steps + program % split * per_share
        last_step = gl.minimum(first_step + per_share, end_of_tile)
        shared_segments = 1
        segments = 1
    work = (first_step, last_step, steps, token_tiles, shared_segments, segments, shared_tiles)
    sizes = (num_rows, num_tokens, blocks, first)

    tiles = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, 64], words_rows.layout)
    x0 = gl.allocate_shared_memory(x_tokens.dtype, [STAGES, BLOCK_M, 64], x_tokens.layout)
    x1 = gl.allocate_shared_memory(x_tokens.dtype, [STAGES, BLOCK_M, 64], x_tokens.layout)
    x2 = gl.allocate_shared_memory(x_tokens.dtype, [STAGES, BLOCK_M, 64], x_tokens.layout)
    x3 = gl.allocate_shared_memory(x_tokens.dtype, [STAGES, BLOCK_M, 64], x_tokens.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    stages = (x0, x1, x2, x3, tiles)
    barriers = (ready, free)
    pointers = (scales, row_factors, bias, y, parts, arrivals)
    layout: gl.constexpr = outlier_rows.layout
    OUTLIER_DTYPE: gl.constexpr = outlier_rows.dtype
    NUM_WARPS: gl.constexpr = gl.num_warps()
    gl.warp_specialize(
        [
            (
                _consume,
                (stages, barriers, pointers, sizes, work, shares, HAS_BIAS, GROUPS, BLOCK_M, BLOCK_N, STAGES, SHARED,
                 layout, OUTLIER_DTYPE, NUM_WARPS),
            ),
            (
                _produce,
                ((x_tokens, words_rows, outlier_rows, scales), stages, barriers, sizes, work, GROUPS, BLOCK_M, BLOCK_N,
                 STAGES, EARLY, SHARED),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
