"""Packed linears, embedding and head as torch modules, and their installation in a transformers model.

On a GPU a module calls the Triton kernel, elsewhere the PyTorch reference; both compute the same function.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from otf_llm import reference
from otf_llm.artifact_format import PERMUTATION_TABLE
from otf_llm.experts import split_experts
from otf_llm.packing import is_permutation
from otf_llm.quantization import num_groups


class _Packed(nn.Module):
    """A module whose stored tensors keep their dtypes when the model is cast; moving it to a device moves them."""

    stored: tuple[str, ...]

    def _apply(self, fn, recurse=True):
        kept = {name: self._buffers.pop(name) for name in self.stored}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            # Seen as integers of the same width, floating tensors are moved but not cast.
            integers = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
            self._buffers[name] = fn(tensor.view(integers)).view(tensor.dtype)
        return self


class Int4Linear(_Packed):
    """y = x[..., perm][..., :n] · outliersᵀ + x[..., perm][..., n:] · dequantised(codes, scales)ᵀ (+ bias).

    Buffers: codes uint8 [N, ceil((K - n) / 2)], scales float16 [N, G], outliers float16 or bfloat16 [N, n],
    perm int16/int32 [K] or None. ``group_size`` 0 means one scale per output channel.
    """

    stored = ("codes", "scales", "outliers")

    def __init__(self, in_features, out_features, num_outliers, group_size, outlier_dtype=torch.float16, bias=False):
        super().__init__()
        background = in_features - num_outliers
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        groups = num_groups(background, group_size)
        self.register_buffer("codes", torch.empty(out_features, (background + 1) // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(out_features, groups, dtype=torch.float16))
        self.register_buffer("outliers", torch.empty(out_features, num_outliers, dtype=outlier_dtype))
        self.register_buffer("perm", None, persistent=False)
        self._packed = None  # the layer in the kernels' order, made at the first call on a GPU
        self._order = None  # of the activations that it reads
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float [..., K] → [..., N] in x's dtype."""
        if x.is_cuda:
            from otf_kernels.activations import arrange
            from otf_kernels.int4_linear import int4_linear, wants_arranged

            if self._packed is None or self._packed.words.device != x.device:
                self._pack(x.device)
            if wants_arranged(x, self._packed) and not torch.compiler.is_compiling():
                return int4_linear(arrange(x.contiguous(), self._order), self._packed)
            return int4_linear(x, self._packed, perm=self.perm)
        return reference.int4_linear(x, perm=self.perm, **self._stored_layer())

    def _pack(self, device: torch.device) -> None:
        """Bring the layer into the kernels' order on ``device``; the stored tensors stay in the host's memory."""
        from otf_kernels.int4_layout import kernel_order, pack_layer

        stored = self._stored_layer()
        moved = {name: value.to(device) for name, value in stored.items() if isinstance(value, torch.Tensor)}
        self._packed = pack_layer(**{**stored, **moved})
        self._order = kernel_order(self._packed, self.perm)
        for name in self.stored:
            self._buffers[name] = self._buffers[name].cpu()

    def _stored_layer(self) -> dict:
        """Arguments of ``reference.int4_linear`` and ``pack_layer`` that say what is stored."""
        return {
            "codes": self.codes,
            "scales": self.scales,
            "outliers": self.outliers,
            "in_features": self.in_features,
            "group_size": self.group_size,
            "bias": self.bias,
        }

    def _apply(self, fn, recurse=True):
        self._packed = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments):
        self._packed = None
        super()._load_from_state_dict(*arguments)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_bits=4, "
            f"group_size={self.group_size}, num_outliers={self.outliers.shape[1]}"
        )


class Int8Embedding(_Packed):
    """Row ``codes[id] * scales[id]``, times the family's embedding scale; codes int8 [V, H], scales float16 [V]."""

    stored = ("codes", "scales")

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype, embed_scale: float | None = None):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.embed_scale = embed_scale
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)  # follows casts of the model
        self.register_buffer("codes", torch.empty(num_embeddings, embedding_dim, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(num_embeddings, dtype=torch.float16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int [...] → [..., H] in the model's dtype; raises for an id outside the vocabulary."""
        if ids.is_cuda:
            from otf_kernels.int8_embedding import int8_embedding
        else:
            int8_embedding = reference.int8_embedding
        rows = int8_embedding(ids, self.codes, self.scales, self.like.dtype)
        return rows if self.embed_scale is None else rows * torch.tensor(self.embed_scale).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, num_bits=8"


class Int8TiedHead(nn.Module):
    """Logits straight from the embedding's INT8 table, which it shares: x · (codes * scales)ᵀ, [..., V]."""

    def __init__(self, embedding: Int8Embedding):
        super().__init__()
        self._table = (embedding,)  # in a tuple, so that the table is not registered twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float [..., H] → [..., V] in x's dtype."""
        if x.is_cuda:
            from otf_kernels.int8_embedding import int8_linear
        else:
            int8_linear = reference.int8_linear
        (embedding,) = self._table
        return int8_linear(x, embedding.codes, embedding.scales)


def install_modules(model: nn.Module, config) -> None:
    """Replace the modules that ``config`` (an ``OtfConfig``) lists; weights are loaded into them afterwards.

    Raises ValueError naming a module that the model lacks or that has another width.
    """
    packed_experts = {name.rsplit(".", 2)[0] for name in config.linears if ".experts." in name}
    prefix = f"{model.base_model_prefix}."
    split_experts(model, lambda name: name in packed_experts or prefix + name in packed_experts)
    for name, (in_features, num_outliers, _) in config.linears.items():
        if _is_absent_head(model, name):
            continue
        parent, leaf, linear = _locate(model, name)
        if in_features != linear.in_features or not 0 <= num_outliers <= in_features:
            told = f"{in_features} input channels, {num_outliers} of them in FP16"
            raise ValueError(f"config.json says of {name}: {told}; the model has {linear.in_features}")
        dtype = torch.bfloat16 if name in config.bf16_outliers else torch.float16
        with torch.device(linear.weight.device):
            packed = Int4Linear(
                linear.in_features, linear.out_features, num_outliers, config.group_size, dtype, linear.bias is not None
            )
        setattr(parent, leaf, packed)
    if config.embedding == "int8":
        embedding = model.get_input_embeddings()
        with torch.device(embedding.weight.device):
            packed = Int8Embedding(
                embedding.num_embeddings,
                embedding.embedding_dim,
                embedding.weight.dtype,
                getattr(embedding, "scalar_embed_scale", None),
            )
        model.set_input_embeddings(packed)
        if config.lm_head == "tied" and model.get_output_embeddings() is not None:
            model.set_output_embeddings(Int8TiedHead(packed))
    if config.permutation_length:
        dtype = getattr(torch, config.permutation_dtype)
        model.register_buffer(PERMUTATION_TABLE, torch.empty(config.permutation_length, dtype=dtype))


def bind_permutation(model: nn.Module, config) -> None:
    """Give every INT4 linear its slice of the model's one permutation table.

    Raises ValueError naming a linear whose slice is no permutation.
    """
    for name, (_, _, offset) in config.linears.items():
        if offset is None or _is_absent_head(model, name):
            continue
        _, _, linear = _locate(model, name)
        perm = getattr(model, PERMUTATION_TABLE)[max(0, offset) : offset + linear.in_features]
        if not is_permutation(perm.cpu(), linear.in_features):
            raise ValueError(
                f"{PERMUTATION_TABLE} holds no permutation of {name}'s {linear.in_features} channels at {offset}"
            )
        linear.perm = perm


def expected_tensors(model: nn.Module) -> set[str]:
    """Names that an artifact must hold for ``model``: everything that it stores but what is tied to something else."""
    return set(model.state_dict()) - set(getattr(model, "all_tied_weights_keys", {}))


def packed_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """(name, module) of every packed module."""
    kinds = Int4Linear | Int8Embedding | Int8TiedHead
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kinds))


def _is_absent_head(model: nn.Module, name: str) -> bool:
    return "." not in name and not hasattr(model, name)


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str, nn.Module]:
    """Parent, attribute and module of ``name``; a bare decoder lacks the causal model's prefix."""
    prefix = f"{model.base_model_prefix}."
    for candidate in (name, name.removeprefix(prefix)):
        parent_name, _, leaf = candidate.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
            return parent, leaf, getattr(parent, leaf)
        except AttributeError:
            continue
    raise ValueError(f"config.json lists {name}, which this {type(model).__name__} does not have")
