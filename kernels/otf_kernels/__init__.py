"""otf_kernels: Triton kernels that multiply by INT4 and INT8 weights without a dequantised copy in memory.

``int4_linear`` multiplies by a layer that ``int4_layout`` has packed, through ``hopper``, ``int4_portable`` or
``int4_prefill``; ``int8_embedding`` has the embedding and the tied head, ``activations`` what stands between linear
layers, ``tokens`` what picks the next token; ``tuning`` and ``timing`` measure. ``otf_llm.reference`` says what they
must compute. Importing this package does nothing and needs no Triton: import the modules for the kernels.

Without a GPU the kernels run on CPU tensors in Triton's interpreter, slowly. Triton reads ``TRITON_INTERPRET=1`` when a
kernel is decorated, that is when its module is imported: set it in the environment before anything imports Triton. Set
later, it changes nothing, and the launchers refuse CPU tensors.
"""

from __future__ import annotations

import contextlib

import torch

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_is_tensor(name: str, value) -> None:
    """Raise ValueError naming the argument unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, not {'None' if value is None else f'a {type(value).__name__}'}")


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise ValueError naming the argument unless it has one of the dtypes, the shape and the device, and no gaps."""
    check_is_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed}, not {str(tensor.dtype).removeprefix('torch.')}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but the other tensors are on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, but has strides {list(tensor.stride())}")


def check_apart(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError naming two tensors that share memory, where a kernel writes one while it reads the other."""
    if tensor.device != other.device or not tensor.numel() or not other.numel():
        return
    if tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return
    (begin, end), (other_begin, other_end) = _extent(tensor), _extent(other)
    if begin < other_end and other_begin < end:
        raise ValueError(f"{name} must not overlap {other_name} in memory")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of what lies behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def is_interpreted(kernel) -> bool:
    """Whether a ``@triton.jit`` kernel runs in Triton's interpreter (TRITON_INTERPRET=1 when it was imported)."""
    from triton.runtime.jit import JITFunction

    return not isinstance(kernel, JITFunction)


def launch_device(kernel, device: torch.device) -> contextlib.AbstractContextManager:
    """Context to launch a kernel in, so that it runs on the GPU that holds its tensors and not on the current one.

    Raises ValueError for CPU tensors and a compiled kernel.
    """
    if device.type == "cuda":
        return torch.cuda.device(device)
    if not is_interpreted(kernel):
        raise ValueError(
            f"the tensors are on {device}, but Triton kernels need a CUDA device, or TRITON_INTERPRET=1 set before "
            "Triton is imported"
        )
    return contextlib.nullcontext()


def early_launch(kernel, device: torch.device) -> dict:
    """Launch options of a kernel with an EARLY argument, which then may start before the preceding one has ended.

    That is programmatic dependent launch, of Hopper GPUs and later ones. The kernel waits by itself for what it reads.
    """
    able = device.type == "cuda" and not is_interpreted(kernel) and torch.cuda.get_device_capability(device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if able and torch.version.hip is None else {"EARLY": False}


def interpreter_dtype(kernel, dtype: torch.dtype) -> torch.dtype:
    """The dtype to run a kernel in: float32 in place of bfloat16 in the interpreter, whose NumPy has no bfloat16."""
    return torch.float32 if dtype is torch.bfloat16 and is_interpreted(kernel) else dtype
