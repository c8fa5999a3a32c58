"""Model families as tables: what each linear reads, what its rows are, and which axes may be permuted.

A decoder layer is a *mixer* (attention of some kind) and an *MLP* (dense, or experts behind a router). Their linears
read a few *inputs*; linears that read the same input share one channel order and one outlier set. An *axis* names the
channels that a tensor dimension runs over. Three axes can be reordered offline without changing the model's function,
because every producer and consumer of their channels is a plain weight:

- ``residual``: the hidden size, one order for the whole model (embedding and head columns, norm weights, o/down rows);
- ``intermediate``: an MLP's hidden channels, one order per MLP or expert (gate and up rows, down columns);
- ``value``: the value heads' channels, one order inside each key/value head (v rows, o columns of every query head
  that attends to it).

Query and key rows are rotated in pairs by RoPE and stay where they are, as does all that passes a gate or a
convolution.

Names are those of transformers' own modules, with every expert a module of its own; ``Family.renames`` brings the names
that checkpoints use to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class Axis(StrEnum):
    """The channels that a dimension of a weight runs over."""

    RESIDUAL = "residual"
    INTERMEDIATE = "intermediate"
    VALUE = "value"
    FIXED = "fixed"


FOLDABLE_AXES = (Axis.RESIDUAL, Axis.INTERMEDIATE, Axis.VALUE)


class Kind(StrEnum):
    """What a checkpoint tensor is to the pipeline."""

    LINEAR = "linear"
    BIAS = "bias"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    HEAD_NORM = "head_norm"
    GATE = "gate"
    STATE = "state"
    EXPERTS = "experts"
    BUFFER = "buffer"
    LEFT_OUT = "left_out"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LinearInput:
    """An activation that one or more linears of a decoder layer read.

    ``axis`` is that of its channels, ``width`` names their number (`Geometry.sizes`), ``seen_by`` is a module of the
    layer whose first argument it is. An expert's own input is of the tokens that are routed to that expert.
    """

    name: str
    axis: Axis
    width: str
    seen_by: str
    expert: int | None = None


@dataclass(frozen=True)
class Linear:
    """A linear of a decoder layer: module path inside the layer, the input it reads, axis and number of output rows."""

    path: str
    reads: LinearInput
    rows: Axis
    height: str
    expert: int | None = None


@dataclass(frozen=True)
class Dense:
    """A tensor of a decoder layer that is never quantised: its name inside the layer, its kind, its sizes by name."""

    name: str
    kind: Kind
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """A mixer or an MLP. ``experts`` are the linears of one expert, with {expert} for its number."""

    linears: tuple[Linear, ...] = ()
    dense: tuple[Dense, ...] = ()
    experts: tuple[Linear, ...] = ()


EXPERT = "{expert}"
HEAD_INPUT = "head_input"


def attention(*, head_norms: bool = False, gated: bool = False) -> Block:
    """Softmax attention; ``head_norms``: queries and keys are normed; ``gated``: q_proj also holds an output gate.

    A gated output is multiplied channel by channel by rows of q_proj, so its channels stay where they are.
    """
    reads = LinearInput("attention_input", Axis.RESIDUAL, "hidden", "self_attn.q_proj")
    value = Axis.FIXED if gated else Axis.VALUE
    output = LinearInput("attention_output", value, "query", "self_attn.o_proj")
    return Block(
        linears=(
            Linear("self_attn.q_proj", reads, Axis.FIXED, "gated_query" if gated else "query"),
            Linear("self_attn.k_proj", reads, Axis.FIXED, "key_value"),
            Linear("self_attn.v_proj", reads, value, "key_value"),
            Linear("self_attn.o_proj", output, Axis.RESIDUAL, "hidden"),
        ),
        dense=tuple(
            Dense(f"self_attn.{norm}.weight", Kind.HEAD_NORM, ("head_dim",))
            for norm in ("q_norm", "k_norm")
            if head_norms
        ),
    )


def gated_mlp() -> Block:
    """down(act(gate(x)) * up(x))."""
    reads = LinearInput("mlp_input", Axis.RESIDUAL, "hidden", "mlp.gate_proj")
    hidden = LinearInput("mlp_hidden", Axis.INTERMEDIATE, "intermediate", "mlp.down_proj")
    return Block(
        linears=(
            Linear("mlp.gate_proj", reads, Axis.INTERMEDIATE, "intermediate"),
            Linear("mlp.up_proj", reads, Axis.INTERMEDIATE, "intermediate"),
            Linear("mlp.down_proj", hidden, Axis.RESIDUAL, "hidden"),
        )
    )


def routed_experts() -> Block:
    """A router and experts, each a gated MLP. All of them read one input, so they share its order and outliers."""
    expert = f"mlp.experts.{EXPERT}"
    reads = LinearInput("mlp_input", Axis.RESIDUAL, "hidden", "mlp")
    hidden = LinearInput(
        f"experts.{EXPERT}.mlp_hidden", Axis.INTERMEDIATE, "expert_intermediate", f"{expert}.down_proj"
    )
    return Block(
        dense=(Dense("mlp.gate.weight", Kind.GATE, ("num_experts", "hidden")),),
        experts=(
            Linear(f"{expert}.gate_proj", reads, Axis.INTERMEDIATE, "expert_intermediate"),
            Linear(f"{expert}.up_proj", reads, Axis.INTERMEDIATE, "expert_intermediate"),
            Linear(f"{expert}.down_proj", hidden, Axis.RESIDUAL, "hidden"),
        ),
    )


def gated_delta_net() -> Block:
    """Linear attention by the gated delta rule (Yang et al. 2024, "Gated Delta Networks").

    Its two small projections, which decide what a state keeps and forgets, stay dense, as do convolution and decays.
    """
    reads = LinearInput("attention_input", Axis.RESIDUAL, "hidden", "linear_attn.in_proj_qkv")
    output = LinearInput("attention_output", Axis.FIXED, "delta_value", "linear_attn.out_proj")
    return Block(
        linears=(
            Linear("linear_attn.in_proj_qkv", reads, Axis.FIXED, "delta_qkv"),
            Linear("linear_attn.in_proj_z", reads, Axis.FIXED, "delta_value"),
            Linear("linear_attn.out_proj", output, Axis.RESIDUAL, "hidden"),
        ),
        dense=(
            Dense("linear_attn.in_proj_b.weight", Kind.GATE, ("delta_heads", "hidden")),
            Dense("linear_attn.in_proj_a.weight", Kind.GATE, ("delta_heads", "hidden")),
            Dense("linear_attn.conv1d.weight", Kind.STATE, ("delta_qkv", "one", "delta_kernel")),
            Dense("linear_attn.dt_bias", Kind.STATE, ("delta_heads",)),
            Dense("linear_attn.A_log", Kind.STATE, ("delta_heads",)),
            Dense("linear_attn.norm.weight", Kind.HEAD_NORM, ("delta_value_head",)),
        ),
    )


ATTENTION, MLP, EXPERTS, LINEAR_ATTENTION = "attention", "mlp", "experts", "linear_attention"
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
ATTENTION_BIAS = tuple((f"self_attn.{name}_proj", "attention_bias") for name in "qkvo")
DENSE_DECODER = {ATTENTION: attention(), MLP: gated_mlp()}
NORMED_DECODER = {ATTENTION: attention(head_norms=True), MLP: gated_mlp()}


def _plain_layers(config: dict, layer: int) -> tuple[str, str]:
    return ATTENTION, MLP


def _mixtral_layers(config: dict, layer: int) -> tuple[str, str]:
    return ATTENTION, EXPERTS


def _qwen3_moe_layers(config: dict, layer: int) -> tuple[str, str]:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    integers = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    if not integers or type(step) is not int or step < 1:
        raise ValueError(f"config.json: mlp_only_layers {dense!r} or decoder_sparse_step {step!r} is not valid")
    return ATTENTION, EXPERTS if layer not in dense and (layer + 1) % step == 0 else MLP


def _qwen3_5_layers(config: dict, layer: int) -> tuple[str, str]:
    kinds, interval = config.get("layer_types"), config.get("full_attention_interval", 4)
    if kinds is None:
        if type(interval) is not int or interval < 1:
            raise ValueError(f"config.json: full_attention_interval {interval!r} is not valid")
        return ATTENTION if (layer + 1) % interval == 0 else LINEAR_ATTENTION, MLP
    known = {"full_attention": ATTENTION, "linear_attention": LINEAR_ATTENTION}
    listed = isinstance(kinds, list) and all(isinstance(kind, str) and kind in known for kind in kinds)
    if not listed or len(kinds) != config["num_hidden_layers"]:
        raise ValueError(f"config.json: layer_types must name one of {', '.join(known)} per layer, found {kinds!r}")
    return known[kinds[layer]], MLP


@dataclass(frozen=True)
class Family:
    """One row of the family table.

    ``blocks`` are the mixers and MLPs that its layers are made of, ``kinds(config, layer)`` names the two of a layer.
    ``norms`` are the per-layer vectors over the residual axis, ``biases`` the linears that have one and the key that
    says so (None for always), ``tied_by_default`` what an absent
    ``tie_word_embeddings`` means in that family's configuration class, ``defaults`` what other absent sizes are there,
    ``sizes`` further sizes and their keys in the configuration, ``aliases`` other names of such keys. ``multimodal`` is
    an architecture whose language model this is, ``left_out`` what of it does not belong to that. ``renames`` are
    (pattern, replacement) from stored names to the modules', and ``saved_as`` from the modules' to those under which
    transformers finds weights that stay dense.
    """

    name: str
    architecture: str
    model_type: str
    blocks: Mapping[str, Block] = field(default_factory=lambda: DENSE_DECODER)
    kinds: Callable[[dict, int], tuple[str, str]] = _plain_layers
    norms: tuple[str, ...] = PRE_NORMS
    biases: tuple[tuple[str, str | None], ...] = ATTENTION_BIAS
    tied_by_default: bool = False
    defaults: tuple[tuple[str, int], ...] = ()
    sizes: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    multimodal: str | None = None
    left_out: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    saved_as: tuple[tuple[str, str], ...] = ()
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names under which ``config.json`` may call it."""
        return (self.architecture,) if self.multimodal is None else (self.architecture, self.multimodal)

    def module_name(self, stored: str) -> str:
        """The name of a stored tensor in the module tree."""
        for pattern, replacement in self.renames:
            stored = re.sub(pattern, replacement, stored)
        return stored

    def saved_name(self, name: str) -> str:
        """The name under which transformers finds a weight of the module tree that stays dense."""
        for pattern, replacement in self.saved_as:
            name = re.sub(pattern, replacement, name)
        return name

    @cached_property
    def templates(self) -> tuple[Linear, ...]:
        """The linears of all blocks, an expert's with {expert} for its number."""
        return tuple(linear for block in self.blocks.values() for linear in (*block.linears, *block.experts))

    def position(self, linear: Linear) -> tuple[int, int]:
        """Where a linear stands in its layer: experts by number, their projections as in the table."""
        if linear.expert is None:
            return -1, self.templates.index(linear)
        paths = [template.path for template in self.templates]
        return linear.expert, paths.index(linear.path.replace(f".{linear.expert}.", f".{EXPERT}."))

    @cached_property
    def in_layer(self) -> dict[str, tuple[Kind, Linear | None]]:
        """What a tensor of a layer is, by its name inside the layer."""
        found: dict[str, tuple[Kind, Linear | None]] = {
            dense.name: (dense.kind, None) for block in self.blocks.values() for dense in block.dense
        }
        found |= {f"{norm}.weight": (Kind.NORM, None) for norm in self.norms}
        for linear in self.templates:
            found |= {f"{linear.path}.weight": (Kind.LINEAR, linear), f"{linear.path}.bias": (Kind.BIAS, linear)}
        if any(block.experts for block in self.blocks.values()):
            found |= dict.fromkeys(FUSED_EXPERTS, (Kind.EXPERTS, None))
        return found


# Experts of a layer in one tensor, as transformers holds them in memory: name -> parts of [E, parts * rows, columns].
FUSED_EXPERTS = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        "llama",
        biases=(*ATTENTION_BIAS, *((f"mlp.{name}_proj", "mlp_bias") for name in ("gate", "up", "down"))),
    ),
    Family("mistral", "MistralForCausalLM", "mistral", biases=(), defaults=(("num_key_value_heads", 8),)),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        "qwen2",
        biases=tuple((f"self_attn.{name}_proj", None) for name in "qkv"),
        defaults=(("num_key_value_heads", 32),),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        blocks=NORMED_DECODER,
        defaults=(("num_key_value_heads", 32), ("head_dim", 128)),
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        blocks=NORMED_DECODER,
        norms=(*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        tied_by_default=True,
        defaults=(
            ("vocab_size", 262208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
        ),
        multimodal="Gemma3ForConditionalGeneration",
        left_out=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
        renames=(
            (r"^language_model\.lm_head\.", "lm_head."),
            (r"^language_model\.model\.", "model."),
            (r"^model\.language_model\.", "model."),
        ),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        "mixtral",
        biases=(),
        blocks={ATTENTION: attention(), EXPERTS: routed_experts()},
        kinds=_mixtral_layers,
        defaults=(("num_key_value_heads", 8), ("num_local_experts", 8), ("num_experts_per_tok", 2)),
        sizes=(("num_experts", "num_local_experts"), ("expert_intermediate", "intermediate_size")),
        aliases=(("num_experts", "num_local_experts"),),
        renames=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"(\.mlp\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
            (r"(\.mlp\.experts\.\d+)\.w3\.", r"\1.up_proj."),
            (r"(\.mlp\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        ),
        saved_as=(
            (r"\.mlp\.(experts\.\d+)\.gate_proj\.", r".block_sparse_moe.\1.w1."),
            (r"\.mlp\.(experts\.\d+)\.up_proj\.", r".block_sparse_moe.\1.w3."),
            (r"\.mlp\.(experts\.\d+)\.down_proj\.", r".block_sparse_moe.\1.w2."),
        ),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        blocks={ATTENTION: attention(head_norms=True), MLP: gated_mlp(), EXPERTS: routed_experts()},
        kinds=_qwen3_moe_layers,
        defaults=(
            ("num_key_value_heads", 4),
            ("num_experts", 128),
            ("num_experts_per_tok", 8),
            ("moe_intermediate_size", 768),
        ),
        sizes=(("num_experts", "num_experts"), ("expert_intermediate", "moe_intermediate_size")),
        aliases=(("num_local_experts", "num_experts"),),
    ),
    Family(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        blocks={
            ATTENTION: attention(head_norms=True, gated=True),
            LINEAR_ATTENTION: gated_delta_net(),
            MLP: gated_mlp(),
        },
        kinds=_qwen3_5_layers,
        defaults=(
            ("vocab_size", 248320),
            ("hidden_size", 4096),
            ("intermediate_size", 12288),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 16),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("linear_num_key_heads", 16),
            ("linear_key_head_dim", 128),
            ("linear_num_value_heads", 32),
            ("linear_value_head_dim", 128),
            ("linear_conv_kernel_dim", 4),
        ),
        sizes=(
            ("delta_key_heads", "linear_num_key_heads"),
            ("delta_key_head", "linear_key_head_dim"),
            ("delta_heads", "linear_num_value_heads"),
            ("delta_value_head", "linear_value_head_dim"),
            ("delta_kernel", "linear_conv_kernel_dim"),
        ),
        multimodal="Qwen3_5ForConditionalGeneration",
        left_out=("model.visual.",),
        renames=((r"^model\.language_model\.", "model."),),
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
        if len(architectures) == 1 and architectures[0] in family.architectures:
            if architectures[0] == family.architecture:
                _check_model_type(config, family)
            return family
    names = [name for family in FAMILIES for name in family.architectures]
    found = ", ".join(map(str, architectures)) or f"none given (model_type {config.get('model_type')!r})"
    raise ValueError(f"unsupported architecture: {found}; supported: {', '.join(names)}")


def check_flag(key: str, value: object) -> bool | None:
    """A flag of the configuration, None where it is absent. Raises ValueError naming it for anything else."""
    if value is not None and type(value) is not bool:
        raise ValueError(f"config.json: {key} must be true or false, found {value!r}")
    return value


def _check_model_type(config: dict, family: Family) -> None:
    """transformers goes by the model type: another one would be loaded as another model."""
    if config.get("model_type") not in (None, family.model_type):
        raise ValueError(
            f"config.json: {family.architecture} has model_type {family.model_type}, found {config['model_type']!r}"
        )


def language_model_config(config: dict) -> dict:
    """The configuration of a multimodal checkpoint's language model by itself; any other configuration as it is.

    Raises ValueError where a multimodal configuration has no ``text_config``, or one of another model.
    """
    family = find_family(config)
    if config["architectures"] != [family.multimodal]:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"config.json: {family.multimodal} without a text_config, found {text!r}")
    _check_model_type(text, family)
    outer = {key: config[key] for key in ("dtype", "torch_dtype", "transformers_version") if key in config}
    # Each part may be the one that says it, and the other then holds its class's default.
    flags = [part["tie_word_embeddings"] for part in (text, config) if part.get("tie_word_embeddings") is not None]
    for flag in flags:
        check_flag("tie_word_embeddings", flag)
    tied = {"tie_word_embeddings": any(flags)} if flags else {}
    return outer | text | {"architectures": [family.architecture], "model_type": family.model_type} | tied
