"""Linear layer over INT4 background columns and FP16 outlier columns.

y = x · [outliers | q · scale]ᵀ + bias over the channels of a packed layer (``int4_layout``), in one launch. On a Hopper
GPU, half-precision activations that arrive in the kernels' order go to ``hopper``, and from ARRANGED_TOKENS tokens on
others too, which are brought into that order first. All else goes to ``int4_portable``, and from PREFILL_TOKENS tokens
on, where weights are read so often that writing them out pays, to ``int4_prefill``.
"""

from __future__ import annotations

import torch

from otf_kernels import ACTIVATION_DTYPES, check_apart, check_is_tensor, check_tensor
from otf_kernels.int4_layout import ALIGNMENT, PackedInt4, arrange, scales_per_block

ARRANGED_TOKENS = 128
PREFILL_TOKENS = 1024


def int4_linear(
    x: torch.Tensor, packed: PackedInt4, *, perm: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply activations by a packed INT4 layer; see ``otf_llm.reference.int4_linear`` for the slow equivalent.

    Args:
        x: float16, bfloat16 or float32, any strides: [..., in_features] in the stored order (outliers first), or in any
            order with ``perm``; or [..., packed.aligned_features] in the kernels' order (``int4_layout.arrange``).
        packed: the layer.
        perm: int16 or int32 [in_features], position i of the stored order is channel perm[i] of x; None when x arrives
            in order. Its values are not looked at here, since reading them would wait for the GPU at every call:
            whoever loads a permutation checks it once.
        out: contiguous [..., N] in x.dtype to write to, apart from x, or None to allocate it.

    Returns:
        [..., N] in x.dtype, the same bits for the same arguments on the same GPU.

    Raises ValueError naming the argument whose shape, dtype, device or stride does not fit.

    ``torch.compile`` sees one operator, ``otf::int4_linear``, whose result is copied to a given ``out``.
    """
    if not isinstance(packed, PackedInt4):
        raise ValueError(f"packed must be a PackedInt4, as pack_layer makes it, not a {type(packed).__name__}")
    if torch.compiler.is_compiling():
        tensors = (packed.words, packed.scales, packed.row_factors, packed.outliers, packed.bias, packed.arrivals)
        y = _operator(x, *tensors, perm, packed.in_features, packed.num_outliers, packed.group_size)
        return y if out is None else out.copy_(y)
    check_is_tensor("x", x)
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, not {str(x.dtype).removeprefix('torch.')}")
    widths = {packed.in_features} if perm is not None else {packed.in_features, packed.aligned_features}
    if x.dim() == 0 or x.shape[-1] not in widths:
        wanted = " or ".join(f"[..., {width}]" for width in sorted(widths))
        raise ValueError(f"x must have shape {wanted}, not {list(x.shape)}")
    if x.device != packed.words.device:
        raise ValueError(f"x is on {x.device}, but the packed layer is on {packed.words.device}")
    if perm is not None:
        check_tensor("perm", perm, (torch.int16, torch.int32), (packed.in_features,), x.device)
    y_shape = (*x.shape[:-1], packed.out_features)
    if out is None:
        out = torch.empty(y_shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, (x.dtype,), y_shape, x.device)
        check_apart("out", out, "x", x)
    if out.numel() == 0:
        return out
    arranged = perm is None and x.shape[-1] == packed.aligned_features
    num_tokens = out.numel() // packed.out_features
    as_it_is = arranged and _suits_hopper(x)
    if wants_arranged(x, packed) and (as_it_is or num_tokens >= ARRANGED_TOKENS):
        from otf_kernels import hopper

        if not as_it_is:
            x = x.clone(memory_format=torch.contiguous_format) if arranged else arrange(x, packed, perm)
        return hopper.launch(x, packed, out)
    if num_tokens >= PREFILL_TOKENS and _suits_prefill(x, packed):
        from otf_kernels import int4_prefill

        return int4_prefill.launch(x if arranged else arrange(x, packed, perm), packed, out)
    from otf_kernels import int4_portable

    return int4_portable.launch(x, packed, perm, out)


def wants_arranged(x: torch.Tensor, packed: PackedInt4) -> bool:
    """Whether activations should be brought into the kernels' order first: the Hopper kernel can then read them."""
    return (
        x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and (x.dtype is torch.bfloat16 or x.dtype is packed.outliers.dtype is torch.float16)
        and scales_per_block(packed.group_size) is not None
    )


def _suits_prefill(x: torch.Tensor, packed: PackedInt4) -> bool:
    """Whether the layer's groups are ones that can be written out, and its outlier columns numbers of x's dtype."""
    fits = x.dtype is not torch.float16 or packed.outliers.dtype is torch.float16
    return fits and scales_per_block(packed.group_size) is not None


def _suits_hopper(x: torch.Tensor) -> bool:
    """Whether the copy engine can read activations where they lie."""
    return (
        x.stride(-1) == 1
        and all(stride > 0 and stride % ALIGNMENT == 0 for stride in x.stride()[:-1])
        and x.data_ptr() % 16 == 0
    )


@torch.library.custom_op("otf::int4_linear", mutates_args=())  # arrivals are zeros before and after
def _operator(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    row_factors: torch.Tensor,
    outliers: torch.Tensor,
    bias: torch.Tensor | None,
    arrivals: torch.Tensor,
    perm: torch.Tensor | None,
    in_features: int,
    num_outliers: int,
    group_size: int,
) -> torch.Tensor:
    packed = PackedInt4(words, scales, row_factors, outliers, bias, arrivals, in_features, num_outliers, group_size)
    return int4_linear(x, packed, perm=perm)


@_operator.register_fake
def _(x, words, scales, row_factors, outliers, bias, arrivals, perm, in_features, num_outliers, group_size):
    return x.new_empty(*x.shape[:-1], words.shape[1])
