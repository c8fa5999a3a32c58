"""Kernels between linear layers, against PyTorch in float64."""

import math
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

from gpu_kernels import pack, random_layer
from otf_kernels import activations, int4_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def guarded(tensor):
    """A copy inside a buffer of NaN."""
    buffer = torch.full((tensor.numel() + 128,), math.nan, dtype=tensor.dtype, device=tensor.device)
    inside = buffer[64:-64].view(tensor.shape)
    return inside.copy_(tensor)


def random(*shape, dtype, seed=0):
    return guarded(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype))


def random_order(width, out_width, seed=0):
    """Every channel at most once, among -1s."""
    channels = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:out_width]
    order = torch.full((out_width,), -1)
    order[torch.randperm(out_width)[: len(channels)]] = channels
    return order.to(DEVICE, torch.int32)


def pick(y, order):
    return y if order is None else torch.where(order < 0, 0, y[..., order.clamp(min=0).long()])


def assert_rounded_once(y, expected, steps=1):
    """Within the rounding of y's dtype; ``steps`` of it where that is float32, in which the work itself is done.

    The sum of squares, its root and two products cost rms_norm up to two roundings; exp, whose argument is multiplied
    by log2(e) and loses bits as it grows, costs silu_mul up to eight.
    """
    assert y.dtype in DTYPES
    torch.testing.assert_close(y.double(), expected, rtol=steps * torch.finfo(y.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 65, 1000])
@pytest.mark.parametrize("out_width", [None, 8, 1024])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype, width, out_width, with_residual):
    x = random(2, 3, width, dtype=dtype)
    residual = random(2, 3, width, dtype=dtype, seed=1) if with_residual else None
    weight = random(width, dtype=torch.float32, seed=2)
    order = None if out_width is None else random_order(width, out_width)
    y, total = activations.rms_norm(x, weight, 1e-5, residual=residual, offset=1.0, order=order)
    h = x if residual is None else (x.float() + residual.float()).to(dtype)
    assert torch.equal(total, h)
    exact = h.double()
    normalised = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight.double())
    assert y.dtype is dtype
    assert_rounded_once(y, pick(normalised, order), 2 if dtype is torch.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 1000, 1500])
@pytest.mark.parametrize("out_width", [None, 8, 1030])
def test_silu_mul(dtype, width, out_width):
    gate_up = random(3, 2 * width, dtype=dtype)
    order = None if out_width is None else random_order(width, out_width)
    y = activations.silu_mul(gate_up, order=order)
    gate, up = gate_up.double().split(width, -1)
    assert y.dtype is dtype
    assert_rounded_once(y, pick(torch.nn.functional.silu(gate) * up, order), 8 if dtype is torch.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrange_is_the_layout_s(dtype):
    layer = random_layer(4, 70, 3, 64, device=DEVICE)
    packed = pack(layer)
    x = random(2, 3, 70, dtype=dtype)
    order = int4_layout.kernel_order(packed, layer.perm)
    assert torch.equal(activations.arrange(x, order), int4_layout.arrange(x, packed, layer.perm))


def test_no_tokens():
    order = random_order(8, 16)
    x = torch.zeros(0, 8, device=DEVICE)
    assert activations.arrange(x, order).shape == (0, 16)
    assert activations.silu_mul(x).shape == (0, 4)
    assert activations.rms_norm(x, torch.ones(8, device=DEVICE), 1e-5)[0].shape == (0, 8)


def test_no_places():
    """An order without entries leaves nothing to write but the sum."""
    x = torch.ones(4, 8, device=DEVICE)
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    y, total = activations.rms_norm(x, torch.ones(8, device=DEVICE), 1e-5, residual=x, order=nothing)
    assert y.shape == (4, 0)
    assert torch.equal(total, 2 * x)


def test_large_values_do_not_overflow():
    """Squares of float16's largest numbers are summed in float32."""
    x = torch.full((1, 64), 60000.0, dtype=torch.float16, device=DEVICE)
    y, _ = activations.rms_norm(x, torch.ones(64, device=DEVICE), 1e-5)
    assert_rounded_once(y, torch.ones(1, 64, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, o: activations.rms_norm(x.double(), w, 1e-5), "x must be float16 or bfloat16 or float32"),
        (lambda x, w, o: activations.rms_norm(x.T, w, 1e-5), "x must be contiguous"),
        (lambda x, w, o: activations.rms_norm(x, w[1:], 1e-5), r"weight must have shape \[8\], not \[7\]"),
        (lambda x, w, o: activations.rms_norm(x, w, 1e-5, residual=x[:1]), "residual must have shape"),
        (lambda x, w, o: activations.rms_norm(x, w, 1e-5, residual=x.half()), "residual must be float32"),
        (lambda x, w, o: activations.rms_norm(x, w, 1e-5, order=o.long()), "order must be int32"),
        (lambda x, w, o: activations.rms_norm(x, w, "1e-5"), "eps must be a number, not a str"),
        (lambda x, w, o: activations.rms_norm(x, w, 1e-5, offset=None), "offset must be a number, not a NoneType"),
        (lambda x, w, o: activations.rms_norm(x, w, 1e-5, order=[0]), "order must be a tensor, not a list"),
        (lambda x, w, o: activations.arrange(x, None), "order must be a tensor, not None"),
        (lambda x, w, o: activations.silu_mul(x[:, :7].contiguous()), "gate_up must have an even number of channels"),
        (lambda x, w, o: activations.arrange(x, o.to("meta")), "order is on meta"),
        (lambda x, w, o: activations.arrange(x[0, 0], o), "x must have 1 to 131072 channels"),
    ],
)
def test_misfits_are_named(call, message):
    x, weight = torch.randn(8, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        call(x[:2] if "contiguous" not in message else x[:, :4], weight, random_order(8, 8))


def rotated(x, cos, sin, num_heads, head_dim):
    """transformers' formula, in float64."""
    half = cos.shape[-1] // 2
    y = x.double()
    heads = y[..., : num_heads * head_dim].unflatten(-1, (num_heads, head_dim))
    x1, x2 = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    cos, sin = cos.double()[..., None, :], sin.double()[..., None, :]
    heads[..., :half] = x1 * cos[..., :half] - x2 * sin[..., :half]
    heads[..., half : 2 * half] = x2 * cos[..., half:] + x1 * sin[..., half:]
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "rotary"), [(1, 2, 2), (3, 64, 64), (5, 96, 96), (4, 80, 20), (25, 8, 8)]
)
def test_rope(dtype, table_dtype, num_heads, head_dim, rotary):
    values = 10  # channels behind the rotated heads
    qkv = random(2, 3, num_heads * head_dim + values, dtype=dtype)
    angles = random(2, 3, rotary, dtype=torch.float32, seed=1) * 3
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    expected = rotated(qkv, cos, sin, num_heads, head_dim)
    before = qkv.clone()
    assert activations.rope(qkv, cos, sin, num_heads, head_dim) is qkv
    torch.testing.assert_close(qkv.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-6)
    rest = torch.ones(qkv.shape[-1], dtype=torch.bool, device=qkv.device)
    for head in range(num_heads):
        rest[head * head_dim : head * head_dim + rotary] = False
    assert torch.equal(qkv[..., rest], before[..., rest])


def test_rope_is_transformers_s():
    """Against the library's own function, on heads as its Llama models have them."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = random(2, 4, 5, 16, dtype=torch.float32), random(2, 2, 5, 16, dtype=torch.float32, seed=1)
    angles = random(2, 5, 8, dtype=torch.float32, seed=2).repeat(1, 1, 2)
    rotated_q, rotated_k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    qkv = torch.cat((q, k), 1).transpose(1, 2).reshape(2, 5, -1).contiguous()
    activations.rope(qkv, angles.cos().contiguous(), angles.sin().contiguous(), 6, 16)
    expected = torch.cat((rotated_q, rotated_k), 1).transpose(1, 2).reshape(2, 5, -1)
    torch.testing.assert_close(qkv, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "num_heads x head_dim must be 1 to 16 channels, not 5 x 4"),
        ({"num_heads": 0}, "num_heads x head_dim"),
        ({"num_heads": 2.0}, "num_heads must be a whole number, not 2.0"),
        ({"head_dim": "4"}, "head_dim must be a whole number, not '4'"),
        ({"cos": torch.ones(2, 6)}, r"cos must have an even number of channels from 2 to 4, not shape \[2, 6\]"),
        ({"cos": torch.ones(2, 3)}, "cos must have an even number"),
        ({"cos": torch.ones(3, 4)}, r"cos must have shape \[2, 4\], not \[3, 4\]"),
        ({"sin": torch.ones(2, 2)}, r"sin must have shape \[2, 4\], not \[2, 2\]"),
        ({"sin": torch.ones(2, 4).double()}, "sin must be float16"),
        ({"qkv": torch.ones(16, 2).T}, "qkv must be contiguous"),
    ],
)
def test_rope_names_misfits(change, message):
    given = {"qkv": torch.ones(2, 16), "cos": torch.ones(2, 4), "sin": torch.ones(2, 4), "num_heads": 4, "head_dim": 4}
    given |= change
    with pytest.raises(ValueError, match=message):
        activations.rope(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()})
