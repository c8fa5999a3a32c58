"""INT4 linear layers and the tied INT8 head on Hopper GPUs (compute capability 9.x): tensor cores fed from words.

A program computes a tile of y.T, ``block_n`` output features by ``block_m`` tokens, over its share of the channels. One
warp has the copy engine fetch a stage of words, scales and activations into shared memory, several stages ahead; the
other warps read words from there, turn them into scaled half-precision weights in registers and give those to the
tensor cores as their left operand, whose right operand is the activations in shared memory. While one plane is
multiplied the next is made. Outlier columns are further steps of the same loop. Where tiles are too few for the GPU,
``split`` programs share a tile's channels: each writes its float32 part and the last to arrive adds them, always in the
same order, so the result is the same bits in every run.

The next launch may start as soon as all programs of this one have, and fetch its first weights where there is room for
it on a multiprocessor; it waits for the end of this one before it reads activations or writes anything.

Layout: ``int4_layout``. Weights have the activations' dtype. As bits of a bfloat16 number, u and 16 u are themselves
times 2^-133, the smallest one, as they are times 2^-24 in float16. Scales rounded to bfloat16 cost a relative 2^-9.
"""

from __future__ import annotations

import functools

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

from otf_kernels.hopper_config import (
    EQUAL_SHARES,
    WHOLE_TILES,
    Config,
    check_config,
    choose_config,
    choose_int8_config,
    num_steps,
)
from otf_kernels.int4_layout import PLANE, ROW_SCALE_EXPONENT, PackedInt4, scales_per_block
from otf_kernels.tuning import tuned_config

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it

PRODUCER_REGISTERS = gl.constexpr(24)
ROW_SCALE_BITS = gl.constexpr(ROW_SCALE_EXPONENT + 15 << 10)  # of float16


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
    tokens = x.reshape(-1, packed.aligned_features)
    num_tokens = tokens.shape[0]
    steps = num_steps(packed.in_features, packed.num_outliers)
    if config is None:
        name, num_sms = _properties(x.device.index)
        config = tuned_config(name, packed, num_tokens)
        config = config or choose_config(packed.out_features, steps, num_tokens, num_sms)
    groups = scales_per_block(packed.group_size)
    words = packed.words.view(-1, PLANE)
    # A number holds a row's scales of a block. What stands here without groups is not read.
    scales = packed.scales.view({1: torch.int16, 2: torch.int32, 4: torch.int64}[groups]) if groups else words
    return _start(
        config, out, tokens[:, packed.aligned_outliers :], tokens, words,
        packed.outliers if packed.aligned_outliers else words.view(x.dtype), scales.view(-1), packed.row_factors,
        packed.bias, packed.arrivals, blocks=packed.words.shape[0], steps=steps, groups=groups, bits=4,
    )  # fmt: skip


def launch_int8(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, config: Config | None = None
) -> torch.Tensor:
    """Write x · (codes · scales)ᵀ to ``out``, [..., V] in x.dtype without gaps; ``int8_linear`` has checked the rest.

    Args:
        x: float16 or bfloat16 [..., H] on a Hopper GPU, H a multiple of 16. Rearranged first, in a launch of its own.
        codes: int8 [V, H], 16-byte aligned.
        scales: float16 [V].
        out: where to write.
        config: how to cut the work up, with a split of 1 or WHOLE_TILES, or None to choose.

    Raises ValueError when the configuration does not fit.
    """
    width = codes.shape[1]
    tokens = x.reshape(-1, width)
    config = config or choose_int8_config(tokens.shape[0])
    if config.split not in (1, WHOLE_TILES):
        raise ValueError(f"config.split must be 1 or {WHOLE_TILES} for a table, not {config.split}")
    # A word holds two neighbouring columns; so a plane is every second column of 128.
    tokens = torch.nn.functional.pad(tokens, (0, -width % (2 * PLANE)))
    planes = tokens.view(len(tokens), -1, PLANE, 2).transpose(2, 3).reshape(len(tokens), -1)
    words = codes.view(torch.int16)
    steps = planes.shape[1] // (2 * PLANE)
    return _start(
        config, out, planes, planes, words, words.view(x.dtype), scales.view(torch.int16), scales, None, None,
        blocks=steps, steps=steps, groups=0, bits=8,
    )  # fmt: skip


def _start(
    config, out, planes, tokens, words, outliers, scales, row_factors, bias, arrivals, *, blocks, steps, groups, bits
):
    """Launch the kernel over ``words``, whose rows of 64 are those of ``blocks`` blocks of all output features.

    planes [M, 64 P] are the background's activations, P = 16 / bits planes a block; tokens [M, W] begin with those of
    the outliers, which take the steps beyond ``blocks``. For 8 bits a row of words holds all of an output feature.
    """
    num_tokens, num_rows = len(planes), out.shape[-1]
    check_config(config, num_tokens)
    token_tiles = -(-num_tokens // config.block_m)
    tiles = token_tiles * -(-num_rows // config.block_n)
    split = config.split
    persistent = split in (EQUAL_SHARES, WHOLE_TILES)
    shared_tiles = num_parts = 0
    if persistent:
        programs = config.programs_per_sm * _properties(out.device.index)[1]
        if split == EQUAL_SHARES:
            # Full waves of tiles need no sharing. A last one that is not full is shared; where shares of it would be
            # small, the wave before it as well.
            programs = min(programs, tiles * steps, arrivals.numel())
            waves, rest = divmod(tiles, programs)
            shared_tiles = rest + programs * (waves > 0 and 0 < 2 * rest < programs)
            num_parts = 2 * programs
        programs = programs if shared_tiles else min(programs, tiles)
        per_share, longer = divmod(shared_tiles * steps, programs)
    else:
        per_share, longer = -(-steps // split), 0
        split = -(-steps // per_share)  # no program without a step
        programs = tiles * split
        num_parts = programs if split > 1 else 0
    parts = torch.empty(num_parts * config.block_n * config.block_m, dtype=torch.float32, device=out.device)
    swizzled = [gl.NVMMASharedLayout(swizzle_byte_width=2 * PLANE, element_bitwidth=16, rank=rank) for rank in (2, 3)]
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * scales.element_size(), rank=1)
    row_tile, token_tile = [config.block_n, PLANE], [config.block_m, PLANE]
    # A lone token's stride may be anything.
    stride = tokens.stride(0) if num_tokens > 1 else tokens.shape[1]
    plane_shape = [planes.shape[1] // PLANE, num_tokens, PLANE]
    with torch.cuda.device(out.device):
        linear_kernel[(programs,)](
            TensorDescriptor(planes, plane_shape, [PLANE, stride, 1], [16 // bits, *token_tile], swizzled[1]),
            TensorDescriptor(tokens, list(tokens.shape), [stride, 1], token_tile, swizzled[0]),
            TensorDescriptor(words, list(words.shape), [words.shape[1], 1], row_tile, swizzled[0]),
            TensorDescriptor(outliers, list(outliers.shape), [outliers.shape[1], 1], row_tile, swizzled[0]),
            TensorDescriptor(scales, list(scales.shape), [1], [config.block_n], flat),
            row_factors,
            row_factors if bias is None else bias,
            out,
            parts,
            parts.view(torch.int32) if arrivals is None else arrivals,
            num_tokens, num_rows, blocks, steps,
            split, per_share, longer, shared_tiles, tiles, token_tiles,
            HAS_BIAS=bias is not None,
            BITS=bits,
            GROUPS=groups,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.num_stages,
            EARLY=config.early,
            PERSISTENT=persistent,
            num_warps=config.num_warps,
            maxnreg=config.registers,
            launch_pdl=True,
        )  # fmt: skip
    return out


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
def _bytes(words, DTYPE: gl.constexpr):
    """The signed codes at bits 7..0, exactly."""
    if DTYPE == gl.float16:
        # 1024 + 128 + q has q + 128 for its last bits.
        codes = gl.inline_asm_elementwise(
            "{.reg .b32 u, c; and.b32 u, $1, 0x00FF00FF; xor.b32 u, u, 0x64806480; mov.b32 c, 0x64806480;"
            " sub.rn.f16x2 $0, u, c;}",
            "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # The last seven bits of q stand for 128 + q or, below zero, for 256 + q; bit 7 tells 128 from 256.
        codes = gl.inline_asm_elementwise(
            "{.reg .b32 u, v, c; and.b32 u, $1, 0x007F007F; or.b32 u, u, 0x43004300; and.b32 v, $1, 0x00800080;"
            " or.b32 v, v, 0x43004300; mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 $0, v, c, u;}",
            "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return codes


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
def _fetch(sources, stages, ready, slot, block, num_rows, row, token, PART: gl.constexpr, GROUPS: gl.constexpr):
    """Start the copies of a background step's stage: words and scales, and the activations of the four planes."""
    x_planes, _, words_rows, _, scale_rows = sources
    activations, tiles, scale_tiles = stages
    PLANES: gl.constexpr = activations.shape[1]
    SCALE_BYTES: gl.constexpr = scale_rows.block_type.nbytes if GROUPS > 0 else 0
    if PART != "activations":
        mbarrier.expect(ready, words_rows.block_type.nbytes + SCALE_BYTES + x_planes.block_type.nbytes)
        if PLANES == 2:
            tma.async_copy_global_to_shared(words_rows, [row, block * 64], ready, tiles.index(slot))
        else:
            tma.async_copy_global_to_shared(words_rows, [block * num_rows + row, 0], ready, tiles.index(slot))
        if GROUPS > 0:
            begin = block * ((num_rows + 7) // 8 * 8) + row
            tma.async_copy_global_to_shared(scale_rows, [begin], ready, scale_tiles.index(slot))
    if PART != "words":
        tma.async_copy_global_to_shared(x_planes, [block * PLANES, token, 0], ready, activations.index(slot))


@gluon.jit
def _plane(activations, slot, plane: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """A plane of a stage's activations, [BLOCK_M, 64] in shared memory."""
    PLANES: gl.constexpr = activations.shape[1]
    planes = activations.index(slot)._reinterpret(activations.dtype, [PLANES * BLOCK_M, 64], layout)
    return planes.slice(plane * BLOCK_M, BLOCK_M)


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    slot += 1
    phase = gl.where(slot == STAGES, phase ^ 1, phase)
    return gl.where(slot == STAGES, 0, slot), phase


@gluon.jit
def _segment(segment, work, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PERSISTENT: gl.constexpr):
    """Tile of a program's ``segment``-th piece of work, its first row and token, and the steps from begin to end."""
    first_step, last_step, steps, token_tiles, shared_segments, _, shared_tiles = work
    tile = first_step // steps + segment
    if PERSISTENT:
        whole = shared_tiles + (segment - shared_segments) * gl.num_programs(0) + gl.program_id(0)
        tile = gl.where(segment < shared_segments, tile, whole)
    begin = gl.maximum(first_step - tile * steps, 0)
    end = gl.minimum(last_step - tile * steps, steps)
    if PERSISTENT:
        begin = gl.where(segment < shared_segments, begin, 0)
        end = gl.where(segment < shared_segments, end, steps)
    return tile, tile // token_tiles * BLOCK_N, tile % token_tiles * BLOCK_M, begin, end


@gluon.jit
def _produce(
    sources, stages, barriers, sizes, work, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """The copying warp: fill stages as they become free."""
    _, x_tokens, _, outlier_rows, _ = sources
    activations, tiles, _ = stages
    ready, free = barriers
    num_rows, _, blocks = sizes
    layout: gl.constexpr = outlier_rows.layout
    segments = work[5]
    # The following kernel may take what room there is beside this one and fetch its first weights; it waits by itself.
    tl.extra.cuda.gdc_launch_dependents()
    ahead = 0
    if EARLY:
        # Weights do not depend on the preceding kernel; activations do.
        _, row, token, begin, end = _segment(0, work, BLOCK_M, BLOCK_N, PERSISTENT)
        ahead = gl.maximum(gl.minimum(gl.minimum(end, blocks) - begin, STAGES), 0)
        for i in range(ahead):
            _fetch(sources, stages, ready.index(i), i, begin + i, num_rows, row, token, "words", GROUPS)
        tl.extra.cuda.gdc_wait()
        for i in range(ahead):
            _fetch(sources, stages, ready.index(i), i, begin + i, num_rows, row, token, "activations", GROUPS)
    else:
        tl.extra.cuda.gdc_wait()
    slot = gl.where(ahead == STAGES, 0, ahead)
    phase = gl.where(ahead == STAGES, 0, 1)
    for segment in range(segments if PERSISTENT else 1):
        _, row, token, begin, end = _segment(segment, work, BLOCK_M, BLOCK_N, PERSISTENT)
        next_block = begin
        if EARLY:
            next_block += gl.where(segment == 0, ahead, 0)
        for block in range(next_block, gl.minimum(end, blocks)):
            mbarrier.wait(free.index(slot), phase)
            _fetch(sources, stages, ready.index(slot), slot, block, num_rows, row, token, "both", GROUPS)
            slot, phase = _advance(slot, phase, STAGES)
        for step in range(gl.maximum(begin, blocks), end):
            mbarrier.wait(free.index(slot), phase)
            channel = (step - blocks) * 64
            columns = tiles.index(slot)._reinterpret(
                outlier_rows.dtype, outlier_rows.block_type.shape, outlier_rows.layout
            )
            mbarrier.expect(ready.index(slot), outlier_rows.block_type.nbytes + x_tokens.block_type.nbytes)
            tma.async_copy_global_to_shared(outlier_rows, [row, channel], ready.index(slot), columns)
            plane = _plane(activations, slot, 0, BLOCK_M, layout)
            tma.async_copy_global_to_shared(x_tokens, [token, channel], ready.index(slot), plane)
            slot, phase = _advance(slot, phase, STAGES)


@gluon.jit
def _consume(
    stages, barriers, pointers, sizes, work, shares, HAS_BIAS: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PERSISTENT: gl.constexpr, layout: gl.constexpr,
    OUTLIER_DTYPE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: words to weights to sums, then the tile's epilogue."""
    row_factors, bias, _, _, _ = pointers
    num_rows = sizes[0]
    steps = work[2]
    segments = work[5]
    slot = 0
    phase = 0
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    for segment in range(segments if PERSISTENT else 1):
        tile, row, token, begin, end = _segment(segment, work, BLOCK_M, BLOCK_N, PERSISTENT)
        # Asked for before the main loop, which hides how long they take.
        rows = gl.minimum(row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma)), num_rows - 1)
        factors = gl.load(row_factors + rows).to(gl.float32)
        row_bias = factors
        if HAS_BIAS:
            row_bias = gl.load(bias + rows)
        total, slot, phase = _multiply(
            stages, barriers, sizes, begin, end, slot, phase, factors, GROUPS, BLOCK_M, BLOCK_N, STAGES, layout,
            OUTLIER_DTYPE, NUM_WARPS,
        )  # fmt: skip
        tl.extra.cuda.gdc_wait()  # nothing is written while the preceding kernel may still read it
        _finish(
            total, pointers, sizes, begin, end, row, token, tile, steps, shares, row_bias, HAS_BIAS, BLOCK_M, BLOCK_N,
            PERSISTENT, NUM_WARPS,
        )  # fmt: skip


@gluon.jit
def _multiply(
    stages, barriers, sizes, begin, end, slot, phase, factors, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
    OUTLIER_DTYPE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Sum of a tile's steps from ``begin`` to ``end``, and where the ring of stages stands after them."""
    activations, tiles, scale_tiles = stages
    ready, free = barriers
    blocks = sizes[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    rows: gl.constexpr = gl.SliceLayout(1, left)
    DTYPE: gl.constexpr = activations.dtype
    PLANES: gl.constexpr = activations.shape[1]
    middle = gl.minimum(end, blocks)

    acc = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma))
    before = 0
    for block in range(begin, middle):
        mbarrier.wait(ready.index(slot), phase)
        words = tiles.index(slot).load(left)
        if PLANES == 2:
            acc = warpgroup_mma(
                _bytes(words, DTYPE), _plane(activations, slot, 0, BLOCK_M, layout).permute([1, 0]), acc, is_async=True
            )
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
            mbarrier.arrive(free.index(before), pred=block > begin)
            weights = _bytes(_upper_codes(words), DTYPE)
            acc = warpgroup_mma(
                weights, _plane(activations, slot, 1, BLOCK_M, layout).permute([1, 0]), acc, is_async=True
            )
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
        else:
            if GROUPS > 0:
                flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
                bits = scale_tiles.index(slot)._reinterpret(scale_tiles.dtype, [BLOCK_N], flat).load(rows)
            else:
                bits = gl.full([BLOCK_N], ROW_SCALE_BITS, gl.int16, rows)
            s0, offset0 = _scale(bits, 0, GROUPS, DTYPE)
            s1, offset1 = _scale(bits, 1, GROUPS, DTYPE)
            s2, offset2 = _scale(bits, 2, GROUPS, DTYPE)
            s3, offset3 = _scale(bits, 3, GROUPS, DTYPE)
            weights = _low_plane(words, s0, offset0)
            acc = warpgroup_mma(
                weights, _plane(activations, slot, 0, BLOCK_M, layout).permute([1, 0]), acc, is_async=True
            )
            # At most one plane in flight keeps large tiles within their registers; two hide more latency for small
            # ones. Either way the preceding stage has been multiplied by the time it is handed back.
            if BLOCK_M > 16:
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
                mbarrier.arrive(free.index(before), pred=block > begin)
            weights = _high_plane(words, s1, offset1)
            acc = warpgroup_mma(
                weights, _plane(activations, slot, 1, BLOCK_M, layout).permute([1, 0]), acc, is_async=True
            )
            if BLOCK_M > 16:
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
            else:
                acc = warpgroup_mma_init(warpgroup_mma_wait(2, [acc]))
                mbarrier.arrive(free.index(before), pred=block > begin)
            words = _upper_codes(words)
            weights = _low_plane(words, s2, offset2)
            acc = warpgroup_mma(
                weights, _plane(activations, slot, 2, BLOCK_M, layout).permute([1, 0]), acc, is_async=True
            )
            if BLOCK_M > 16:
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
            weights = _high_plane(words, s3, offset3)
            acc = warpgroup_mma(
                weights, _plane(activations, slot, 3, BLOCK_M, layout).permute([1, 0]), acc, is_async=True
            )
            if BLOCK_M > 16:
                acc = warpgroup_mma_init(warpgroup_mma_wait(1, [acc]))
        before = slot
        slot, phase = _advance(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index(before), pred=begin < middle)

    if DTYPE == gl.bfloat16 and PLANES == 4:
        factors *= 0.125
    acc = warpgroup_mma_init(acc * factors[:, None])
    for _ in range(gl.maximum(begin, blocks), end):
        mbarrier.wait(ready.index(slot), phase)
        columns = tiles.index(slot)._reinterpret(OUTLIER_DTYPE, [BLOCK_N, 64], layout)
        if OUTLIER_DTYPE != DTYPE:
            columns = columns.load(left).to(DTYPE)
        acc = warpgroup_mma(columns, _plane(activations, slot, 0, BLOCK_M, layout).permute([1, 0]), acc, is_async=True)
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
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PERSISTENT: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Write a tile, or a part of it, and the tile if all its other parts are there."""
    _, _, y, parts, arrivals = pointers
    num_rows, num_tokens, _ = sizes
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    SIZE: gl.constexpr = BLOCK_N * BLOCK_M
    tile_rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
    tile_tokens = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))
    split, _, _ = shares
    program = gl.program_id(0)
    # Parts of a tile lie ``distance`` slots apart from ``first_slot`` on; ``count`` of them.
    if PERSISTENT:
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
    "num_tokens", "blocks", "steps", "split", "per_share", "longer", "shared_tiles", "num_tiles", "token_tiles"
)  # fmt: skip


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def linear_kernel(
    x_planes, x_tokens, words_rows, outlier_rows, scale_rows, row_factors, bias, y, parts, arrivals,
    num_tokens, num_rows, blocks, steps, split, per_share, longer, shared_tiles, num_tiles, token_tiles,
    HAS_BIAS: gl.constexpr, BITS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """A program's share of the steps of y.T's tiles; token tiles vary fastest, so that weights stay in L2.

    With PERSISTENT a program takes its equal share of the first ``shared_tiles`` tiles' steps, then every
    ``num_programs``-th of the other tiles; otherwise part ``program % split`` of tile ``program // split``.
    """
    program = gl.program_id(0)
    shares = (split, per_share, longer)
    if PERSISTENT:
        first_step = _share_begin(program, shares)
        last_step = _share_begin(program + 1, shares)
        shared_segments = gl.where(last_step > first_step, (last_step - 1) // steps - first_step // steps + 1, 0)
        segments = shared_segments + gl.maximum(gl.cdiv(num_tiles - shared_tiles - program, gl.num_programs(0)), 0)
    else:
        end_of_tile = (program // split + 1) * steps
        first_step = end_of_tile - steps + program % split * per_share
        last_step = gl.minimum(first_step + per_share, end_of_tile)
        shared_segments = 1
        segments = 1
    work = (first_step, last_step, steps, token_tiles, shared_segments, segments, shared_tiles)
    sizes = (num_rows, num_tokens, blocks)

    tiles = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, 64], words_rows.layout)
    activations = gl.allocate_shared_memory(x_planes.dtype, [STAGES, 16 // BITS, BLOCK_M, 64], x_planes.layout)
    scale_tiles = gl.allocate_shared_memory(scale_rows.dtype, [STAGES, BLOCK_N], scale_rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    stages = (activations, tiles, scale_tiles)
    barriers = (ready, free)
    pointers = (row_factors, bias, y, parts, arrivals)
    layout: gl.constexpr = outlier_rows.layout
    OUTLIER_DTYPE: gl.constexpr = outlier_rows.dtype
    NUM_WARPS: gl.constexpr = gl.num_warps()
    gl.warp_specialize(
        [
            (
                _consume,
                (stages, barriers, pointers, sizes, work, shares, HAS_BIAS, GROUPS, BLOCK_M, BLOCK_N, STAGES,
                 PERSISTENT, layout, OUTLIER_DTYPE, NUM_WARPS),
            ),
            (
                _produce,
                ((x_planes, x_tokens, words_rows, outlier_rows, scale_rows), stages, barriers, sizes, work, GROUPS,
                 BLOCK_M, BLOCK_N, STAGES, EARLY, PERSISTENT),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
