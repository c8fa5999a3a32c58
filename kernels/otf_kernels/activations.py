"""What stands between two linear layers when a model decodes, each in one launch, written in the next layer's order.

On Hopper GPUs and later ones each launch lets the next kernel start beside it, so that a linear layer's first weights
are on their way before its activations are there.

With an ``order`` (``int4_layout.kernel_order``) the result has a column for each of its entries: the channel that it
names, or 0 where it is -1. So no gather and no padding is left for the linear layer. An order's values are not looked
at, since reading them would wait for the GPU at every call. Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from otf_kernels import ACTIVATION_DTYPES, check_is_tensor, check_tensor, early_launch, interpreter_dtype, launch_device

MOST_CHANNELS = 1 << 17  # a program holds a token's channels in registers


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    order: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual, rounded to x's dtype, and h / sqrt(mean(h²) + eps) · (offset + weight) (Zhang & Sennrich 2019).

    Args:
        x: float16, bfloat16 or float32 [..., H], contiguous.
        weight: float [H].
        eps: added to the mean square.
        residual: like x, or None for h = x.
        offset: added to the weight; Gemma stores its weights less 1.
        order: int32 [O], or None for the order of x.

    Returns:
        (normalised [..., O or H], h [..., H]) in x.dtype; h is x itself without a residual.

    Raises ValueError naming the argument whose shape, dtype, device or stride does not fit.
    """
    width = _check(x, order)
    for name, value in (("eps", eps), ("offset", offset)):
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a number, not a {type(value).__name__}")
    check_tensor("weight", weight, ACTIVATION_DTYPES, (width,), x.device)
    if residual is not None:
        check_tensor("residual", residual, (x.dtype,), x.shape, x.device)
    out_width = width if order is None else order.numel()
    normalised = torch.empty(*x.shape[:-1], out_width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    if normalised.numel() == 0:
        return normalised, x if residual is None else (x.float() + residual.float()).to(x.dtype)
    dtype = interpreter_dtype(rms_norm_kernel, x.dtype)
    working = [tensor.to(dtype) for tensor in (x, x if residual is None else residual, normalised, total)]
    with launch_device(rms_norm_kernel, x.device):
        rms_norm_kernel[(x.numel() // width,)](
            *working, weight, weight if order is None else order, width, out_width, eps, offset,
            HAS_RESIDUAL=residual is not None, HAS_ORDER=order is not None, ROUND_TO_BF16=dtype is not x.dtype,
            BLOCK=triton.next_power_of_2(width), BLOCK_OUT=triton.next_power_of_2(out_width),
            num_warps=_num_warps(max(width, out_width)), **early_launch(rms_norm_kernel, x.device),
        )  # fmt: skip
    if dtype is not x.dtype:
        normalised.copy_(working[2])
        if residual is not None:
            total.copy_(working[3])
    return normalised, total


def silu_mul(gate_up: torch.Tensor, *, order: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up, the input of a gated MLP's last layer (Shazeer 2020).

    Args:
        gate_up: float16, bfloat16 or float32 [..., 2 I], contiguous: the gate's I channels, then the other I.
        order: int32 [O] over the I channels, or None for their own order.

    Returns:
        [..., O or I] in gate_up's dtype.

    Raises ValueError naming the argument whose shape, dtype, device or stride does not fit.
    """
    width = _check(gate_up, order, "gate_up")
    if width % 2:
        raise ValueError(f"gate_up must have an even number of channels, not {width}")
    out_width = width // 2 if order is None else order.numel()
    out = torch.empty(*gate_up.shape[:-1], out_width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0 or gate_up.numel() == 0:
        return out
    dtype = interpreter_dtype(silu_mul_kernel, gate_up.dtype)
    y = out if dtype is out.dtype else out.to(dtype)
    block = min(1024, triton.next_power_of_2(out_width))
    with launch_device(silu_mul_kernel, gate_up.device):
        silu_mul_kernel[(gate_up.numel() // width, triton.cdiv(out_width, block))](
            gate_up.to(dtype), y, gate_up if order is None else order, width // 2, out_width,
            HAS_ORDER=order is not None, BLOCK=block, num_warps=4, **early_launch(silu_mul_kernel, out.device),
        )  # fmt: skip
    return out if y is out else out.copy_(y)


def rope(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of the first heads, in place: x cos + rotate(x) sin.

    rotate(x) is (-x₂, x₁) for the two halves of a head's first R channels, as transformers' models have it; channels
    beyond R stay as they are.

    Args:
        qkv: float16, bfloat16 or float32 [..., W], contiguous: the rotated heads of query and key first, the rest
            (the values) untouched.
        cos, sin: float [..., R] for the same tokens, R even and at most head_dim.
        num_heads: of query and key together.
        head_dim: channels of a head.

    Returns:
        qkv.

    Raises ValueError naming the argument whose shape, dtype, device or stride does not fit.
    """
    width = _check(qkv, None, "qkv")
    for name, value in (("num_heads", num_heads), ("head_dim", head_dim)):
        if not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, not {value!r}")
    if num_heads < 1 or head_dim < 1 or num_heads * head_dim > width:
        raise ValueError(f"num_heads x head_dim must be 1 to {width} channels, not {num_heads} x {head_dim}")
    check_is_tensor("cos", cos)
    rotary = cos.shape[-1] if cos.dim() else 0
    if rotary % 2 or not 2 <= rotary <= head_dim:
        raise ValueError(f"cos must have an even number of channels from 2 to {head_dim}, not shape {list(cos.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, ACTIVATION_DTYPES, (*qkv.shape[:-1], rotary), qkv.device)
    if qkv.numel() == 0:
        return qkv
    dtype = interpreter_dtype(rope_kernel, qkv.dtype)
    working = [tensor if tensor.dtype is not torch.bfloat16 else tensor.to(dtype) for tensor in (qkv, cos, sin)]
    with launch_device(rope_kernel, qkv.device):
        rope_kernel[(qkv.numel() // width, num_heads)](
            *working, width, head_dim, rotary // 2,
            BLOCK=triton.next_power_of_2(rotary // 2), num_warps=1, **early_launch(rope_kernel, qkv.device),
        )  # fmt: skip
    return qkv if working[0] is qkv else qkv.copy_(working[0])


def arrange(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x[..., order], 0 where the order is -1, in one launch.

    Args:
        x: float16, bfloat16 or float32 [..., K], contiguous.
        order: int32 [O].

    Returns:
        [..., O] in x.dtype.

    Raises ValueError naming the argument whose shape, dtype, device or stride does not fit.
    """
    check_is_tensor("order", order)
    width = _check(x, order)
    out = torch.empty(*x.shape[:-1], order.numel(), dtype=x.dtype, device=x.device)
    if out.numel() == 0 or x.numel() == 0:
        return out
    dtype = interpreter_dtype(arrange_kernel, x.dtype)
    y = out if dtype is out.dtype else out.to(dtype)
    block = min(1024, triton.next_power_of_2(order.numel()))
    with launch_device(arrange_kernel, x.device):
        arrange_kernel[(x.numel() // width, triton.cdiv(order.numel(), block))](
            x.to(dtype), y, order, width, order.numel(), BLOCK=block, num_warps=4,
            **early_launch(arrange_kernel, x.device),
        )  # fmt: skip
    return out if y is out else out.copy_(y)


def _check(x: torch.Tensor, order: torch.Tensor | None, name: str = "x") -> int:
    """Refuse activations or an order that do not fit; return the number of channels."""
    check_is_tensor(name, x)
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MOST_CHANNELS:
        raise ValueError(f"{name} must have 1 to {MOST_CHANNELS} channels, not shape {list(x.shape)}")
    check_tensor(name, x, ACTIVATION_DTYPES, x.shape, x.device)
    if order is not None:
        check_is_tensor("order", order)
        check_tensor("order", order, (torch.int32,), (order.numel(),), x.device)
    return x.shape[-1]


def _num_warps(channels: int) -> int:
    return 4 if channels <= 2048 else 8 if channels <= 8192 else 16


@triton.jit(do_not_specialize=("eps", "offset"))
def rms_norm_kernel(
    x, residual, normalised, total, weight, order, width, out_width, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_ORDER: tl.constexpr, ROUND_TO_BF16: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token. Channels are read again in the new order, from the cache, rather than exchanged between threads."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    h = _sum(x, residual, token * width + lanes, inside, HAS_RESIDUAL, ROUND_TO_BF16)
    if HAS_RESIDUAL:
        tl.store(total + token * width + lanes, h.to(total.dtype.element_ty), mask=inside)
    inverse = tl.rsqrt(tl.sum(h * h, 0) / width + eps)
    if HAS_ORDER:
        places = tl.arange(0, BLOCK_OUT)
        written = places < out_width
        channels = tl.load(order + places, mask=written, other=-1)
        wanted = channels >= 0
        channels = tl.maximum(channels, 0)
        h = _sum(x, residual, token * width + channels, wanted, HAS_RESIDUAL, ROUND_TO_BF16)
    else:
        places, written, channels, wanted = lanes, inside, lanes, inside
    scale = offset + tl.load(weight + channels, mask=wanted, other=0.0).to(tl.float32)
    y = tl.where(wanted, h * inverse * scale, 0.0)
    tl.store(normalised + token * out_width + places, y.to(normalised.dtype.element_ty), mask=written)


@triton.jit
def _sum(x, residual, places, wanted, HAS_RESIDUAL: tl.constexpr, ROUND_TO_BF16: tl.constexpr):
    """x + residual in float32, after rounding to the activations' dtype."""
    h = tl.load(x + places, mask=wanted, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + places, mask=wanted, other=0.0).to(tl.float32)
        if ROUND_TO_BF16:  # the interpreter's stand-in for bfloat16 is float32
            bits = h.to(tl.int32, bitcast=True)
            h = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        else:
            h = h.to(x.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def silu_mul_kernel(
    gate_up, y, order, width, out_width, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """BLOCK channels of one token."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = places < out_width
    if HAS_ORDER:
        channels = tl.load(order + places, mask=written, other=-1)
    else:
        channels = places
    wanted = written & (channels >= 0)
    gate = tl.load(gate_up + token * 2 * width + channels, mask=wanted, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + channels, mask=wanted, other=0.0).to(tl.float32)
    tl.store(y + token * out_width + places, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=written)


@triton.jit
def arrange_kernel(x, y, order, width, out_width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """BLOCK places of one token."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = places < out_width
    channels = tl.load(order + places, mask=written, other=-1)
    value = tl.load(x + token * width + channels, mask=written & (channels >= 0), other=0.0)
    tl.store(y + token * out_width + places, value, mask=written)


@triton.jit
def rope_kernel(qkv, cos, sin, width, head_dim, half, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One head of one token."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < half
    first = qkv + token * width + tl.program_id(1) * head_dim + lanes
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    place = token * 2 * half + lanes
    cos1 = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + place + half, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (x1 * cos1 - x2 * sin1).to(qkv.dtype.element_ty), mask=inside)
    tl.store(first + half, (x2 * cos2 + x1 * sin2).to(qkv.dtype.element_ty), mask=inside)
