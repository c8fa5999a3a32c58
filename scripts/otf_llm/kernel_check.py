"""The kernels on a model's own layers, against a float64 reference: the "kernels" rows of the validation report."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from otf_llm import reference


@dataclass(frozen=True)
class Int4Layer:
    """A stored linear layer; fields as the arguments of ``reference.int4_linear``."""

    name: str
    codes: torch.Tensor
    scales: torch.Tensor
    outliers: torch.Tensor
    perm: torch.Tensor | None
    in_features: int
    group_size: int
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Int8Table:
    """A stored embedding: codes int8 [V, H] and scales float16 [V]."""

    name: str
    codes: torch.Tensor
    scales: torch.Tensor


def check_kernels(
    layers: Iterable[Int4Layer | Int8Table],
    *,
    device: torch.device | str,
    max_layers: int | None = None,
    max_rows: int | None = None,
    max_columns: int | None = None,
    max_tokens: int = 16,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> list[dict]:
    """Run each layer's kernels on random activations and compare with the reference in float64.

    Args:
        layers: layers and tables of a converted model. Memory-mapped tensors keep memory low: each layer is copied to
            ``device`` in turn.
        device: a CUDA device, or "cpu" in Triton's interpreter, which takes milliseconds per tile: there, set limits.
        max_layers: INT4 layers to check, evenly spaced over the model, first and last included; tables always are.
        max_rows: output rows to check in each layer, evenly spaced, first and last included.
        max_columns: INT4 columns to check in each layer and channels of each table: the last ones, so that odd counts
            and short last groups stay, and at least a whole scale group.
        max_tokens: activations are drawn for 1 token and for this many.
        dtype: of the activations; None takes that of the layer's outlier columns, and float16 for a table.
        seed: activations depend on this and on the layer's name alone, not on which other layers are checked.

    A limit of None checks everything.

    Returns:
        One row per layer, kernel and number of tokens: kernel, layer, backend ("triton-cuda" or "triton-interpreter"),
        dtype, shape ("NxK", as checked), tokens, max_relative_error (max |y - reference| over max |reference|;
        None if any y is not finite), tolerance, passed. A kernel that computes wrong numbers is a row with passed
        false: what to do about it is the caller's decision.

    Raises ValueError when a limit is below 1, and, naming the layer, when its tensors do not fit together, its perm is
    no permutation, or ``device`` is a CPU and Triton's interpreter is off.
    """
    from tqdm import tqdm

    for name, limit in (
        ("max_layers", max_layers), ("max_rows", max_rows), ("max_columns", max_columns), ("max_tokens", max_tokens)
    ):  # fmt: skip
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, not {limit}")
    token_counts = sorted({1, max_tokens})
    rows = []
    for layer in tqdm(_choose_layers(list(layers), max_layers), desc="kernels", unit="layer"):
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(layer.name.encode()))
        try:
            if isinstance(layer, Int4Layer):
                cropped = _on_device(_crop_layer(layer, max_rows, max_columns), torch.device(device))
                rows.extend(_check_layer(cropped, token_counts, dtype or layer.outliers.dtype, generator))
            else:
                cropped = _on_device(_crop_table(layer, max_rows, max_columns), torch.device(device))
                rows.extend(_check_table(cropped, token_counts, dtype or torch.float16, generator))
        except ValueError as error:
            raise ValueError(f"{layer.name}: {error}") from error
    return rows


def tolerance(dtype: torch.dtype, num_terms: int, largest: float = math.inf) -> float:
    """Largest relative error (max |y - reference| over max |reference|) that rounding alone explains.

    Rounding y to ``dtype`` costs at most half its epsilon. The other half is headroom for tensor cores, which truncate
    instead of rounding as they sum, in float32. Other float32 sums round: over K terms the errors add up like a random
    walk, √K of float32's epsilon. Where even the ``largest`` reference value is close to the smallest numbers of
    ``dtype``, their spacing counts too: vanishing weights give outputs that only subnormal numbers can hold.
    """
    info = torch.finfo(dtype)
    spacing = info.smallest_normal * info.eps
    rounding = info.eps + math.sqrt(max(1, num_terms)) * torch.finfo(torch.float32).eps
    return rounding + (spacing / largest if largest > 0 else 0.0)


def _choose_layers(layers: list, max_layers: int | None) -> list:
    """At most ``max_layers`` of the INT4 layers, evenly spaced, and every table, in the model's order."""
    linear = [index for index, layer in enumerate(layers) if isinstance(layer, Int4Layer)]
    kept = {linear[position] for position in _evenly_spaced(len(linear), max_layers).tolist()}
    return [layer for index, layer in enumerate(layers) if index in kept or isinstance(layer, Int8Table)]


def _evenly_spaced(count: int, limit: int | None) -> torch.Tensor:
    """At most ``limit`` of the indices below count, first and last included (only the last when limit is 1)."""
    if limit is None or limit >= count:
        return torch.arange(count)
    if limit == 1:
        return torch.tensor([count - 1])
    return torch.arange(limit) * (count - 1) // (limit - 1)


def _crop_layer(layer: Int4Layer, max_rows: int | None, max_columns: int | None) -> Int4Layer:
    """A smaller layer with some of the rows and the last columns of this one, stored the same way."""
    _check_perm(layer.perm, layer.in_features)
    _check_same_rows(codes=layer.codes, scales=layer.scales, outliers=layer.outliers, bias=layer.bias)
    rows = _evenly_spaced(layer.codes.shape[0], max_rows)
    num_outliers = layer.outliers.shape[1]
    num_columns = layer.in_features - num_outliers
    # Only whole groups can go, and only whole bytes.
    step = math.lcm(2, layer.group_size or 1)
    dropped = 0
    if max_columns is not None and num_columns > max_columns:
        dropped = min(-(-(num_columns - max_columns) // step), (num_columns - 1) // step) * step
    perm = layer.perm
    if perm is not None and dropped:
        # The kept positions keep their order: channel number = rank of the old one among those kept.
        kept = torch.cat((perm[:num_outliers], perm[num_outliers + dropped :]))
        perm = kept.argsort().argsort().to(perm.dtype)
    first_group = dropped // layer.group_size if layer.group_size else 0
    return dataclasses.replace(
        layer,
        codes=layer.codes[rows][:, dropped // 2 :].contiguous(),
        scales=layer.scales[rows][:, first_group:].contiguous(),
        outliers=layer.outliers[rows],
        perm=perm,
        in_features=layer.in_features - dropped,
        bias=None if layer.bias is None else layer.bias[rows],
    )


def _check_perm(perm: torch.Tensor | None, in_features: int) -> None:
    """Refuse, before a kernel reads through it, a perm that is not a permutation of the input channels."""
    if perm is None:
        return
    channels = torch.arange(in_features)
    if perm.shape != channels.shape or not torch.equal(perm.long().cpu().sort().values, channels):
        raise ValueError(f"perm of shape {list(perm.shape)} is not a permutation of {in_features} input channels")


def _check_same_rows(codes: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.shape[0] != codes.shape[0]:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, but codes has {codes.shape[0]}")


def _crop_table(table: Int8Table, max_rows: int | None, max_columns: int | None) -> Int8Table:
    _check_same_rows(codes=table.codes, scales=table.scales)
    rows = _evenly_spaced(table.codes.shape[0], max_rows)
    width = table.codes.shape[1]
    columns = slice(width - min(width, max_columns or width), width)
    return dataclasses.replace(table, codes=table.codes[rows][:, columns].contiguous(), scales=table.scales[rows])


def _on_device(layer: Int4Layer | Int8Table, device: torch.device) -> Int4Layer | Int8Table:
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(layer)
        if isinstance(value := getattr(layer, field.name), torch.Tensor)
    }
    return dataclasses.replace(layer, **moved)


def _check_layer(
    layer: Int4Layer, token_counts: list[int], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[dict]:
    from otf_kernels.int4_layout import pack_layer
    from otf_kernels.int4_linear import int4_linear
    from otf_kernels.int4_portable import int4_portable_kernel

    stored = {
        "codes": layer.codes, "scales": layer.scales, "outliers": layer.outliers,
        "in_features": layer.in_features, "group_size": layer.group_size, "bias": layer.bias,
    }  # fmt: skip
    packed = pack_layer(**stored)
    shape = (layer.codes.shape[0], layer.in_features)
    for tokens in token_counts:
        x = torch.randn(tokens, layer.in_features, generator=generator).to(layer.codes.device, dtype)
        y = int4_linear(x, packed, perm=layer.perm)
        expected = reference.int4_linear(x.double(), perm=layer.perm, **stored)
        yield _row("int4_linear", layer.name, int4_portable_kernel, shape, tokens, y, expected)


def _check_table(
    table: Int8Table, token_counts: list[int], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[dict]:
    from otf_kernels.int8_embedding import int8_embedding, int8_embedding_kernel, int8_linear, int8_linear_kernel

    vocabulary, width = table.codes.shape
    device = table.codes.device
    for tokens in token_counts:
        ids = torch.randint(vocabulary, (tokens,), generator=generator)
        ids[-1] = vocabulary - 1
        ids = ids.to(device)
        y = int8_embedding(ids, table.codes, table.scales, dtype)
        expected = reference.int8_embedding(ids, table.codes, table.scales, torch.float64)
        yield _row("int8_embedding", table.name, int8_embedding_kernel, (vocabulary, width), tokens, y, expected)

        x = torch.randn(tokens, width, generator=generator).to(device, dtype)
        y = int8_linear(x, table.codes, table.scales)
        expected = reference.int8_linear(x.double(), table.codes, table.scales)
        yield _row("int8_linear", table.name, int8_linear_kernel, (vocabulary, width), tokens, y, expected)


def _row(
    name: str, layer: str, kernel, shape: tuple[int, int], tokens: int, y: torch.Tensor, expected: torch.Tensor
) -> dict:
    from otf_kernels import is_interpreted

    error = max_relative_error(y, expected)
    allowed = tolerance(y.dtype, 1 if name == "int8_embedding" else shape[1], expected.abs().max().item())
    return {
        "kernel": name,
        "layer": layer,
        "backend": "triton-interpreter" if is_interpreted(kernel) else "triton-cuda",
        "dtype": str(y.dtype).removeprefix("torch."),
        "shape": f"{shape[0]}x{shape[1]}",
        "tokens": tokens,
        "max_relative_error": error if math.isfinite(error) else None,
        "tolerance": allowed,
        "passed": error <= allowed,
    }


def max_relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """max |y - expected| over max |expected|; max |y| where expected is all zero, infinite where y is not finite."""
    if y.shape != expected.shape:
        raise ValueError(f"y must have shape {list(expected.shape)}, not {list(y.shape)}")
    if y.numel() == 0:
        return 0.0
    if not torch.isfinite(y).all():
        return math.inf
    difference = float((y.double() - expected.double()).abs().max())
    return difference / (float(expected.abs().max()) or 1.0)
