"""Model families as tables: what each linear reads, what its rows are, and which axes may be permuted.

A decoder layer has four linear *inputs*; linears that read the same input share one channel order and one outlier set.
An *axis* names the channels that a tensor dimension runs over. Three axes can be reordered offline without changing the
model's function, because every producer and consumer of their channels is a plain weight:

- ``residual``: the hidden size, one order for the whole model (embedding and head columns, norm weights, o/down rows);
- ``intermediate``: the MLP's hidden channels, one order per layer (gate and up rows, down columns);
- ``value``: the value heads' channels, one order inside each key/value head (v rows, o columns of every query head
  that attends to it).

Query and key rows are rotated in pairs by RoPE and stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Axis(StrEnum):
    """The channels that a dimension of a weight runs over."""

    RESIDUAL = "residual"
    INTERMEDIATE = "intermediate"
    VALUE = "value"
    FIXED = "fixed"


FOLDABLE_AXES = (Axis.RESIDUAL, Axis.INTERMEDIATE, Axis.VALUE)


@dataclass(frozen=True)
class LinearInput:
    """An activation that one or more linears of a decoder layer read, with the axis of its channels."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Linear:
    """A linear of a decoder layer: module path inside the layer, the input it reads, the axis of its output rows."""

    path: str
    reads: LinearInput
    rows: Axis


ATTENTION_INPUT = LinearInput("attention_input", Axis.RESIDUAL)
ATTENTION_OUTPUT = LinearInput("attention_output", Axis.VALUE)
MLP_INPUT = LinearInput("mlp_input", Axis.RESIDUAL)
MLP_HIDDEN = LinearInput("mlp_hidden", Axis.INTERMEDIATE)
HEAD_INPUT = "head_input"

DECODER_LINEARS = (
    Linear("self_attn.q_proj", ATTENTION_INPUT, Axis.FIXED),
    Linear("self_attn.k_proj", ATTENTION_INPUT, Axis.FIXED),
    Linear("self_attn.v_proj", ATTENTION_INPUT, Axis.VALUE),
    Linear("self_attn.o_proj", ATTENTION_OUTPUT, Axis.RESIDUAL),
    Linear("mlp.gate_proj", MLP_INPUT, Axis.INTERMEDIATE),
    Linear("mlp.up_proj", MLP_INPUT, Axis.INTERMEDIATE),
    Linear("mlp.down_proj", MLP_HIDDEN, Axis.RESIDUAL),
)
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Family:
    """One row of the family table.

    ``norms`` are the per-layer vectors over the residual axis, ``head_norms`` vectors over a head's dimensions (never
    permuted), ``tied_by_default`` what an absent ``tie_word_embeddings`` means in that family's configuration
    class, ``defaults`` what other absent sizes are there.
    """

    name: str
    architecture: str
    linears: tuple[Linear, ...] = DECODER_LINEARS
    norms: tuple[str, ...] = PRE_NORMS
    head_norms: tuple[str, ...] = ()
    tied_by_default: bool = False
    defaults: tuple[tuple[str, int], ...] = ()
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    @property
    def inputs(self) -> tuple[LinearInput, ...]:
        """The distinct inputs of a decoder layer, in the order of the linears that read them."""
        return tuple(dict.fromkeys(linear.reads for linear in self.linears))

    def readers(self, linear_input: LinearInput) -> tuple[Linear, ...]:
        """The linears that read ``linear_input``."""
        return tuple(linear for linear in self.linears if linear.reads == linear_input)


FAMILIES = (
    Family("llama", "LlamaForCausalLM"),
    Family("mistral", "MistralForCausalLM", defaults=(("num_key_value_heads", 8),)),
    Family("qwen2", "Qwen2ForCausalLM", defaults=(("num_key_value_heads", 32),)),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        head_norms=HEAD_NORMS,
        defaults=(("num_key_value_heads", 32), ("head_dim", 128)),
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        norms=(*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        head_norms=HEAD_NORMS,
        tied_by_default=True,
        defaults=(("num_key_value_heads", 4), ("head_dim", 256)),
    ),
)


def find_family(config: dict) -> Family:
    """The family of a checkpoint, from the ``architectures`` entry of its ``config.json``.

    Raises ValueError, naming the architecture and the supported ones, for any other.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config.json: architectures must be a list, found {architectures!r}")
    for family in FAMILIES:
        if architectures == [family.architecture]:
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    found = ", ".join(map(str, architectures)) or f"none given (model_type {config.get('model_type')!r})"
    raise ValueError(f"unsupported architecture: {found}; supported: {supported}")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder, read from ``config.json``; an explicit ``head_dim`` wins over hidden_size / heads."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @classmethod
    def of(cls, config: dict, family: Family) -> Geometry:
        """Read the sizes; raises ValueError naming a missing key or head counts that do not divide."""
        config = dict(family.defaults) | config
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        optional = [key for key in ("head_dim", "num_key_value_heads") if config.get(key) is not None]
        for key in (*needed, *optional):
            if type(config.get(key)) is not int or config[key] < 1:
                raise ValueError(f"config.json: {key} must be a positive integer, found {config.get(key)!r}")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"config.json: {heads} attention heads cannot be shared by {kv_heads} key/value heads")
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise ValueError(f"config.json: head_dim is absent and hidden_size {hidden} is no multiple of {heads}")
            head_dim = hidden // heads
        tied = config.get("tie_word_embeddings")
        return cls(
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            tied=family.tied_by_default if tied is None else bool(tied),
        )

    def in_features(self, axis: Axis) -> int:
        """Number of channels of a linear input on ``axis``."""
        return {
            Axis.RESIDUAL: self.hidden_size,
            Axis.INTERMEDIATE: self.intermediate_size,
            Axis.VALUE: self.num_heads * self.head_dim,
        }[axis]

    def linear_shape(self, linear: Linear) -> tuple[int, int]:
        """[out_features, in_features] that the configuration demands of a decoder linear."""
        rows = {
            "self_attn.q_proj": self.num_heads * self.head_dim,
            "self_attn.k_proj": self.num_kv_heads * self.head_dim,
            "self_attn.v_proj": self.num_kv_heads * self.head_dim,
        }
        out_features = rows.get(linear.path) or self.in_features(linear.rows)
        return out_features, self.in_features(linear.reads.axis)


class Kind(StrEnum):
    """What a checkpoint tensor is to the pipeline."""

    LINEAR = "linear"
    BIAS = "bias"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    HEAD_NORM = "head_norm"
    BUFFER = "buffer"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Role:
    """Kind of a tensor, the decoder layer that it belongs to (or None) and, for weights and biases, its linear."""

    kind: Kind
    layer: int | None = None
    linear: Linear | None = None


def input_name(family: Family, layer: int, linear_input: LinearInput) -> str:
    """Global name of a linear input, e.g. ``model.layers.3.mlp_input``."""
    return f"{family.layers}.{layer}.{linear_input.name}"


def tensor_role(family: Family, name: str) -> Role:
    """What the checkpoint tensor ``name`` is; Kind.UNKNOWN for a tensor that the family table does not list."""
    fixed = {
        f"{family.embedding}.weight": Kind.EMBEDDING,
        f"{family.head}.weight": Kind.HEAD,
        f"{family.final_norm}.weight": Kind.NORM,
    }
    if name in fixed:
        return Role(fixed[name])
    if name.endswith("rotary_emb.inv_freq"):
        return Role(Kind.BUFFER)
    match = re.fullmatch(re.escape(family.layers) + r"\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return Role(Kind.UNKNOWN)
    layer, path, leaf = int(match[1]), match[2], match[3]
    for linear in family.linears:
        if path == linear.path:
            return Role(Kind.LINEAR if leaf == "weight" else Kind.BIAS, layer, linear)
    if leaf == "weight" and path in family.norms:
        return Role(Kind.NORM, layer)
    if leaf == "weight" and path in family.head_norms:
        return Role(Kind.HEAD_NORM, layer)
    return Role(Kind.UNKNOWN, layer)


def decoder_linears(family: Family, geometry: Geometry) -> Iterator[tuple[str, int, Linear]]:
    """(module name, layer, linear) of every decoder linear, in layer order."""
    for layer in range(geometry.num_layers):
        for linear in family.linears:
            yield f"{family.layers}.{layer}.{linear.path}", layer, linear


def check_tensors(family: Family, geometry: Geometry, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Check a checkpoint's tensor table against the family; returns the names of unknown tensors.

    Raises ValueError naming the first missing tensor or wrong shape, a head that is neither stored nor tied, or a layer
    beyond the configured number.
    """
    for name in sorted(shapes):
        layer = tensor_role(family, name).layer
        if layer is not None and layer >= geometry.num_layers:
            raise ValueError(f"checkpoint holds {name}, but config.json has num_hidden_layers {geometry.num_layers}")
    expected = expected_shapes(family, geometry)
    if geometry.tied and f"{family.head}.weight" not in shapes:
        del expected[f"{family.head}.weight"]
    for name, _, linear in decoder_linears(family, geometry):
        if f"{name}.bias" in shapes:
            expected[f"{name}.bias"] = geometry.linear_shape(linear)[:1]
    for name, shape in expected.items():
        if name not in shapes:
            hint = " (tie_word_embeddings is false, so a head must be stored)" if name.startswith(family.head) else ""
            raise ValueError(f"checkpoint lacks tensor {name}{hint}")
        if tuple(shapes[name]) != shape:
            raise ValueError(f"{name} has shape {list(shapes[name])}, config.json demands {list(shape)}")
    return unknown_tensors(family, shapes)


def expected_shapes(family: Family, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of the family must hold, biases aside."""
    hidden = geometry.hidden_size
    expected: dict[str, tuple[int, ...]] = {
        f"{name}.weight": geometry.linear_shape(linear) for name, _, linear in decoder_linears(family, geometry)
    }
    for layer in range(geometry.num_layers):
        expected |= {f"{family.layers}.{layer}.{norm}.weight": (hidden,) for norm in family.norms}
        expected |= {f"{family.layers}.{layer}.{norm}.weight": (geometry.head_dim,) for norm in family.head_norms}
    expected[f"{family.final_norm}.weight"] = (hidden,)
    expected[f"{family.embedding}.weight"] = (geometry.vocab_size, hidden)
    expected[f"{family.head}.weight"] = (geometry.vocab_size, hidden)
    return expected


def unknown_tensors(family: Family, names: Iterable[str]) -> list[str]:
    """Names that the family table does not list; they are carried bit for bit and never permuted."""
    return sorted(name for name in names if tensor_role(family, name).kind is Kind.UNKNOWN)
