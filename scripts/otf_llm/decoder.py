"""A decoder as its configuration describes it: sizes, layers, and what each tensor of a checkpoint is to it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from otf_llm.families import (
    EXPERT,
    FUSED_EXPERTS,
    Dense,
    Family,
    Kind,
    Linear,
    LinearInput,
    check_flag,
    find_family,
    language_model_config,
)

MOST_PARTS = 50_000  # decoder layers times experts: a damaged number must not fill memory with names of tensors


def read_config(config: dict) -> tuple[Family, Geometry]:
    """Family and sizes of the language model that a ``config.json`` describes; raises ValueError as the two do."""
    family = find_family(config)
    return family, Geometry.of(language_model_config(config), family)


@dataclass(frozen=True)
class Layer:
    """What a decoder layer is made of, every expert spelt out."""

    linears: tuple[Linear, ...]
    dense: tuple[Dense, ...]

    @cached_property
    def inputs(self) -> tuple[LinearInput, ...]:
        """The distinct inputs, in the order of the linears that read them."""
        return tuple(dict.fromkeys(linear.reads for linear in self.linears))


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder, read from ``config.json``; an explicit ``head_dim`` wins over hidden_size / heads.

    ``sizes`` has every size that the family table names, ``layers`` what each layer is made of, ``biases`` the paths of
    linears that have one.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    sizes: Mapping[str, int]
    layers: tuple[Layer, ...]
    biases: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: dict, family: Family) -> Geometry:
        """Read the sizes; raises ValueError naming a missing key or head counts that do not divide."""
        config = dict(config)
        for alias, key in family.aliases:
            if config.get(alias) is not None and config.setdefault(key, config[alias]) != config[alias]:
                raise ValueError(f"config.json: {key} is {config[key]!r}, but {alias} is {config[alias]!r}")
        config = dict(family.defaults) | config
        needed = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
        needed += [key for _, key in family.sizes if key not in needed]
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
        tied = check_flag("tie_word_embeddings", config.get("tie_word_embeddings"))
        biases = [path for path, key in family.biases if key is None or check_flag(key, config.get(key))]
        sizes = {
            "one": 1,
            "hidden": hidden,
            "intermediate": config["intermediate_size"],
            "head_dim": head_dim,
            "query": heads * head_dim,
            "gated_query": 2 * heads * head_dim,
            "key_value": kv_heads * head_dim,
        }
        sizes |= {name: config[key] for name, key in family.sizes}
        if "delta_heads" in sizes:
            sizes["delta_value"] = sizes["delta_heads"] * sizes["delta_value_head"]
            sizes["delta_qkv"] = 2 * sizes["delta_key_heads"] * sizes["delta_key_head"] + sizes["delta_value"]
        num_experts = sizes.get("num_experts", 0)
        if config["num_hidden_layers"] * max(1, num_experts) > MOST_PARTS:
            told = f"num_hidden_layers {config['num_hidden_layers']}"
            told += f" with {num_experts} experts each" if num_experts else ""
            raise ValueError(f"config.json: {told} is beyond any model ({MOST_PARTS} layers or experts)")
        chosen = config.get("num_experts_per_tok")
        if num_experts and (type(chosen) is not int or not 1 <= chosen <= num_experts):
            raise ValueError(f"config.json: num_experts_per_tok must be from 1 to {num_experts}, found {chosen!r}")
        kinds = [family.kinds(config, layer) for layer in range(config["num_hidden_layers"])]
        made = {kind: _make_layer(family, kind, num_experts) for kind in dict.fromkeys(kinds)}
        return cls(
            hidden_size=hidden,
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            tied=family.tied_by_default if tied is None else tied,
            sizes=sizes,
            layers=tuple(made[kind] for kind in kinds),
            biases=frozenset(biases),
        )

    def linear_shape(self, linear: Linear) -> tuple[int, int]:
        """[out_features, in_features] that the configuration demands of a decoder linear."""
        return self.sizes[linear.height], self.sizes[linear.reads.width]


def _make_layer(family: Family, kind: tuple[str, str], num_experts: int) -> Layer:
    blocks = [family.blocks[name] for name in kind]
    linears = [linear for block in blocks for linear in block.linears]
    for block in blocks:
        linears += [_of_expert(linear, expert) for expert in range(num_experts) for linear in block.experts]
    norms = tuple(Dense(f"{norm}.weight", Kind.NORM, ("hidden",)) for norm in family.norms)
    return Layer(tuple(linears), (*norms, *(dense for block in blocks for dense in block.dense)))


@lru_cache(maxsize=1 << 16)
def _of_expert(linear: Linear, expert: int) -> Linear:
    """A linear of an expert with the expert's number in the place of {expert}."""
    reads = linear.reads
    if EXPERT in reads.name:
        number = str(expert)
        name, seen_by = reads.name.replace(EXPERT, number), reads.seen_by.replace(EXPERT, number)
        reads = replace(reads, name=name, seen_by=seen_by, expert=expert)
    return replace(linear, path=linear.path.replace(EXPERT, str(expert)), reads=reads, expert=expert)


@dataclass(frozen=True)
class Role:
    """Kind of a tensor, the decoder layer that it belongs to (or None) and, for weights and biases, its linear."""

    kind: Kind
    layer: int | None = None
    linear: Linear | None = None


def input_name(family: Family, layer: int, linear_input: LinearInput) -> str:
    """Global name of a linear input, e.g. ``model.layers.3.mlp_input``."""
    return f"{family.layers}.{layer}.{linear_input.name}"


def tensor_role(family: Family, stored: str) -> Role:
    """What the checkpoint tensor ``stored`` is; Kind.UNKNOWN for a tensor that the family table does not list."""
    name = family.module_name(stored)
    fixed = {
        f"{family.embedding}.weight": Kind.EMBEDDING,
        f"{family.head}.weight": Kind.HEAD,
        f"{family.final_norm}.weight": Kind.NORM,
    }
    if name in fixed:
        return Role(fixed[name])
    if name.endswith("rotary_emb.inv_freq"):
        return Role(Kind.BUFFER)
    if name.startswith(family.left_out):
        return Role(Kind.LEFT_OUT)
    match = re.fullmatch(re.escape(family.layers) + r"\.(\d+)\.(.+)", name)
    if match is None:
        return Role(Kind.UNKNOWN)
    layer, inside = int(match[1]), match[2]
    expert = re.match(r"mlp\.experts\.(0|[1-9]\d*)\.", inside)
    template = inside if expert is None else inside.replace(expert[0], f"mlp.experts.{EXPERT}.", 1)
    kind, linear = family.in_layer.get(template, (Kind.UNKNOWN, None))
    if linear is not None and expert is not None:
        linear = _of_expert(linear, int(expert[1]))
    return Role(kind, layer, linear)


def fused_experts(family: Family, geometry: Geometry, name: str) -> tuple[list[str], tuple[int, int, int]]:
    """The experts' weights that a fused tensor (Kind.EXPERTS) holds one after the other, by their module names.

    And its shape: [experts, rows of all parts, columns].
    """
    parts = FUSED_EXPERTS[re.sub(re.escape(family.layers) + r"\.\d+\.", "", name)]
    stem, sizes = name.rpartition(".")[0], geometry.sizes
    linear = next(linear for linear in family.templates if linear.path.endswith(f"{EXPERT}.{parts[0]}"))
    rows, columns = geometry.linear_shape(linear)
    names = [f"{stem}.{expert}.{part}.weight" for expert in range(sizes["num_experts"]) for part in parts]
    return names, (sizes["num_experts"], len(parts) * rows, columns)


def decoder_linears(family: Family, geometry: Geometry) -> Iterator[tuple[str, int, Linear]]:
    """(module name, layer, linear) of every decoder linear, in layer order."""
    for index, layer in enumerate(geometry.layers):
        for linear in layer.linears:
            yield f"{family.layers}.{index}.{linear.path}", index, linear


def decoder_inputs(family: Family, geometry: Geometry) -> Iterator[tuple[str, int, LinearInput]]:
    """(global name, layer, input) of every input of the decoder's linears, in layer order."""
    for index, layer in enumerate(geometry.layers):
        for linear_input in layer.inputs:
            yield input_name(family, index, linear_input), index, linear_input


def matched_linears(family: Family, geometry: Geometry, patterns: Iterable[str]) -> dict[str, str]:
    """The decoder linears and the head that ``patterns`` name, by module name, with the first pattern that does.

    A pattern is a whole module name in which * stands for any characters, or ``re:`` and a regular expression that must
    match the whole name.

    Raises ValueError naming a pattern that matches nothing or is no regular expression, and a layer of which some but
    not all experts' linears are matched.
    """
    names = [name for name, *_ in decoder_linears(family, geometry)] + [family.head]
    found: dict[str, str] = {}
    for pattern in patterns:
        try:
            expression = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"keep: {pattern[:100]!r} is no regular expression: {error}") from error
        matched = [name for name in names if expression.fullmatch(name)]
        if not matched:
            raise ValueError(
                f"keep: {pattern!r} matches no linear; names are whole, such as {names[0]}, with * for any characters"
            )
        found = dict.fromkeys(matched, pattern) | found
    for index, layer in enumerate(geometry.layers):
        experts = [f"{family.layers}.{index}.{linear.path}" for linear in layer.linears if linear.expert is not None]
        kept = [name for name in experts if name in found]
        if kept and len(kept) < len(experts):
            told = f"{len(kept)} of {len(experts)} linears of the experts of {family.layers}.{index}"
            raise ValueError(f"keep: {found[kept[0]]!r} and others match {told}; all or none of them can be kept")
    return found


def check_tensors(family: Family, geometry: Geometry, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Check a table of tensors, by their module names, against the family; returns the names of unknown tensors.

    Raises ValueError naming the first missing tensor or wrong shape, a head that is neither stored nor tied, or a
    tensor of a layer or an expert that the configuration does not have.
    """
    expected = expected_shapes(family, geometry)
    for name in sorted(shapes):
        role = tensor_role(family, name)
        if role.layer is not None and role.layer >= geometry.num_layers:
            raise ValueError(f"checkpoint holds {name}, but config.json has num_hidden_layers {geometry.num_layers}")
        if role.layer is not None and role.kind is not Kind.UNKNOWN and name not in expected:
            raise ValueError(f"checkpoint holds {name}, but by config.json its layer has no such part")
    if geometry.tied and f"{family.head}.weight" not in shapes:
        del expected[f"{family.head}.weight"]
    for name, shape in expected.items():
        if name not in shapes:
            hint = " (tie_word_embeddings is false, so a head must be stored)" if name.startswith(family.head) else ""
            raise ValueError(f"checkpoint lacks tensor {name}{hint}")
        if tuple(shapes[name]) != shape:
            raise ValueError(f"{name} has shape {list(shapes[name])}, config.json demands {list(shape)}")
    return unknown_tensors(family, shapes)


def expected_shapes(family: Family, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of the family must hold, by its module name."""
    hidden = geometry.hidden_size
    expected: dict[str, tuple[int, ...]] = {}
    for name, _, linear in decoder_linears(family, geometry):
        expected[f"{name}.weight"] = geometry.linear_shape(linear)
        if linear.path in geometry.biases:
            expected[f"{name}.bias"] = geometry.linear_shape(linear)[:1]
    for index, layer in enumerate(geometry.layers):
        for dense in layer.dense:
            expected[f"{family.layers}.{index}.{dense.name}"] = tuple(geometry.sizes[size] for size in dense.shape)
    expected[f"{family.final_norm}.weight"] = (hidden,)
    expected[f"{family.embedding}.weight"] = (geometry.vocab_size, hidden)
    expected[f"{family.head}.weight"] = (geometry.vocab_size, hidden)
    return expected


def unknown_tensors(family: Family, names: Iterable[str]) -> list[str]:
    """Names that the family table does not list; they are carried bit for bit and never permuted."""
    return sorted(name for name in names if tensor_role(family, name).kind is Kind.UNKNOWN)
