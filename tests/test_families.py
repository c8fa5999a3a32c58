"""The family table, and the decoders that configurations make of it, against the models themselves."""

import pytest
import torch
import transformers

import tiny
from otf_llm.decoder import (
    Geometry,
    check_tensors,
    decoder_inputs,
    decoder_linears,
    input_name,
    read_config,
    tensor_role,
    unknown_tensors,
)
from otf_llm.families import FAMILIES, Axis, Kind, find_family
from tiny import build_model, separate_experts

NAMES = [family.name for family in FAMILIES]
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def described(name, **overrides):
    """(family, geometry, shapes of all stored tensors, model) of a tiny model; an odd MLP and unequal head counts."""
    model = separate_experts(build_model(name, intermediate_size=130, **overrides))
    family, geometry = read_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    return family, geometry, shapes, model


def test_every_family_has_a_tiny_model():
    assert NAMES == list(tiny.FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_names_every_tensor_of_the_model(name):
    family, _, shapes, _ = described(name)
    assert family.name == name
    assert hasattr(transformers, family.architecture)
    kinds = {key: tensor_role(family, key).kind for key in shapes}
    assert Kind.UNKNOWN not in kinds.values()
    assert unknown_tensors(family, shapes) == []
    layers = {"qwen3_moe": 3, "qwen3_5": 4}.get(name, 2)
    special = {
        "qwen2": {Kind.BIAS: 3 * 2},
        "qwen3": {Kind.HEAD_NORM: 2 * 2},
        "gemma3": {Kind.HEAD_NORM: 2 * 2, Kind.NORM: 4 * 2 + 1},
        "mixtral": {Kind.LINEAR: 2 * (4 + 4 * 3), Kind.GATE: 2},
        "qwen3_moe": {Kind.LINEAR: 2 * (4 + 4 * 3) + 7, Kind.GATE: 2, Kind.HEAD_NORM: 2 * 3},
        "qwen3_5": {Kind.LINEAR: 3 * 6 + 7, Kind.GATE: 3 * 2, Kind.STATE: 3 * 3, Kind.HEAD_NORM: 3 + 2},
    }
    usual = {Kind.LINEAR: 7 * layers, Kind.EMBEDDING: 1, Kind.HEAD: 1, Kind.NORM: 2 * layers + 1}
    counts = {kind: list(kinds.values()).count(kind) for kind in Kind}
    assert counts == dict.fromkeys(Kind, 0) | usual | special.get(name, {})
    for key, kind in kinds.items():
        if kind is Kind.NORM:
            assert shapes[key] == (64,), "a norm over the residual stream"
        if kind is Kind.HEAD_NORM:
            assert shapes[key] == ((20,) if "linear_attn" in key else (16,)), "a norm over a head's dimensions"


@pytest.mark.parametrize("name", NAMES)
def test_shapes_follow_from_the_configuration(name):
    family, geometry, shapes, _ = described(name, num_hidden_layers=4, head_dim=24, num_key_value_heads=1)
    linears = list(decoder_linears(family, geometry))
    assert [layer for _, layer, _ in linears] == sorted(layer for _, layer, _ in linears)
    if name in PLAIN:
        assert [module for module, *_ in linears] == [
            f"model.layers.{layer}.{path}" for layer in range(4) for path in LINEARS
        ]
    for module, layer, linear in linears:
        assert module == f"model.layers.{layer}.{linear.path}"
        assert shapes[f"{module}.weight"] == geometry.linear_shape(linear), module
    assert check_tensors(family, geometry, shapes) == []
    assert [geometry.sizes[name] for name in ("hidden", "intermediate", "query")] == [64, 130, 4 * 24]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_linears_that_share_an_input_do_and_others_do_not(name, tokens):
    family, geometry, _, model = described(name)
    seen = {}

    def watch(module, place):
        def note(_module, arguments):
            seen.setdefault(place, {})[module] = arguments[0]

        model.get_submodule(module).register_forward_pre_hook(note)

    for module, layer, linear in decoder_linears(family, geometry):
        place = input_name(family, layer, linear.reads)
        # An expert reads its share of the tokens.
        watch(module, place if linear.expert is None or linear.reads.expert is not None else f"{place} {linear.expert}")
    for name, layer, linear_input in decoder_inputs(family, geometry):
        if linear_input.seen_by != "mlp":
            watch(f"{family.layers}.{layer}.{linear_input.seen_by}", name)
    watch("lm_head", "head_input")
    model(input_ids=tokens, use_cache=False)
    if family.name in PLAIN:
        assert list(seen) == [
            f"model.layers.{layer}.{name}"
            for layer in (0, 1)
            for name in ("attention_input", "attention_output", "mlp_input", "mlp_hidden")
        ] + ["head_input"]
        assert [len(readers) for readers in seen.values()] == [3, 1, 2, 1] * 2 + [1]
    firsts = []
    for readers in seen.values():
        first, *rest = readers.values()
        assert all(torch.equal(first, other) for other in rest)
        assert not any(first.shape == other.shape and torch.equal(first, other) for other in firsts)
        firsts.append(first)


def test_axes_of_the_linears():
    def axes(name):
        family = next(family for family in FAMILIES if family.name == name)
        return {linear.path.rpartition(".")[2]: (linear.reads.axis, linear.rows) for linear in family.templates}

    plain = {
        "q_proj": (Axis.RESIDUAL, Axis.FIXED),
        "k_proj": (Axis.RESIDUAL, Axis.FIXED),
        "v_proj": (Axis.RESIDUAL, Axis.VALUE),
        "o_proj": (Axis.VALUE, Axis.RESIDUAL),
        "gate_proj": (Axis.RESIDUAL, Axis.INTERMEDIATE),
        "up_proj": (Axis.RESIDUAL, Axis.INTERMEDIATE),
        "down_proj": (Axis.INTERMEDIATE, Axis.RESIDUAL),
    }
    assert all(axes(name) == plain for name in NAMES if name != "qwen3_5")
    # A gate multiplies the channels of an attention's output, so none of them may move.
    assert axes("qwen3_5") == plain | {
        "v_proj": (Axis.RESIDUAL, Axis.FIXED),
        "o_proj": (Axis.FIXED, Axis.RESIDUAL),
        "in_proj_qkv": (Axis.RESIDUAL, Axis.FIXED),
        "in_proj_z": (Axis.RESIDUAL, Axis.FIXED),
        "out_proj": (Axis.FIXED, Axis.RESIDUAL),
    }


# Roles


@pytest.mark.parametrize(
    ("name", "kind", "layer", "path"),
    [
        ("model.embed_tokens.weight", Kind.EMBEDDING, None, None),
        ("lm_head.weight", Kind.HEAD, None, None),
        ("model.norm.weight", Kind.NORM, None, None),
        ("model.layers.0.self_attn.q_proj.weight", Kind.LINEAR, 0, "self_attn.q_proj"),
        ("model.layers.12.mlp.down_proj.weight", Kind.LINEAR, 12, "mlp.down_proj"),
        ("model.layers.3.self_attn.v_proj.bias", Kind.BIAS, 3, "self_attn.v_proj"),
        ("model.layers.3.input_layernorm.weight", Kind.NORM, 3, None),
        ("model.layers.3.self_attn.q_norm.weight", Kind.HEAD_NORM, 3, None),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", Kind.BUFFER, None, None),
        ("model.layers.3.input_layernorm.bias", Kind.UNKNOWN, 3, None),
        ("model.layers.3.pre_feedforward_layernorm.weight", Kind.UNKNOWN, 3, None),
        ("model.layers.3.mlp.experts.0.gate_proj.weight", Kind.UNKNOWN, 3, None),
        ("model.layers.3.self_attn.q_proj.lora_A.weight", Kind.UNKNOWN, 3, None),
        ("model.layers.x.mlp.up_proj.weight", Kind.UNKNOWN, None, None),
        ("model.layers.-1.mlp.up_proj.weight", Kind.UNKNOWN, None, None),
        ("language_model.model.layers.0.mlp.up_proj.weight", Kind.UNKNOWN, None, None),
        ("modelxlayers.0.mlp.up_proj.weight", Kind.UNKNOWN, None, None),
        ("model.layers.0.mlp.up_proj.weight.extra", Kind.UNKNOWN, 0, None),
        ("lm_head.bias", Kind.UNKNOWN, None, None),
        ("mtp.norm.weight", Kind.UNKNOWN, None, None),
    ],
)
def test_roles_of_tensors(name, kind, layer, path):
    role = tensor_role(find_family({"architectures": ["Qwen3ForCausalLM"]}), name)
    assert (role.kind, role.layer, role.linear and role.linear.path) == (kind, layer, path)


def test_norms_differ_between_families():
    gemma, llama = (find_family({"architectures": [f"{name}ForCausalLM"]}) for name in ("Gemma3", "Llama"))
    name = "model.layers.1.post_feedforward_layernorm.weight"
    assert tensor_role(gemma, name).kind is Kind.NORM
    assert tensor_role(llama, name).kind is Kind.UNKNOWN
    assert tensor_role(llama, "model.layers.1.self_attn.k_norm.weight").kind is Kind.UNKNOWN


# Checkpoints that do not fit


def refusal(*arguments):
    """What ``check_tensors`` says against a table of tensors, "" if it passes."""
    try:
        check_tensors(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_not_there_is_named_whichever_it_is(name):
    """Without it the model would run on values that nobody gave, so every tensor counts, norms and biases too."""
    family, geometry, shapes, _ = described(name)
    missed = []
    for key in shapes:
        said = refusal(family, geometry, {other: shape for other, shape in shapes.items() if other != key})
        # Biases are optional in the table: whether a model has them is decided by its class and configuration.
        if not said.startswith(f"checkpoint lacks tensor {key}") and tensor_role(family, key).kind is not Kind.BIAS:
            missed.append(key)
    assert missed == []


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_shape_is_named_whichever_it_is(name):
    family, geometry, shapes, _ = described(name)
    missed = []
    for key, shape in shapes.items():
        wrong = (shape[0] + 16, *shape[1:])
        said = refusal(family, geometry, shapes | {key: wrong})
        if said != f"{key} has shape {list(wrong)}, config.json demands {list(shape)}":
            missed.append(key)
    assert missed == []


def test_a_transposed_linear_is_refused():
    family, geometry, shapes, _ = described("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=rf"^{name} has shape \[130, 64\], config\.json demands \[64, 130\]$"):
        check_tensors(family, geometry, shapes | {name: (130, 64)})


def test_a_head_must_be_stored_or_tied():
    family, geometry, shapes, _ = described("llama")
    del shapes["lm_head.weight"]
    with pytest.raises(ValueError, match=r"^checkpoint lacks tensor lm_head\.weight \(tie_word_embeddings is false"):
        check_tensors(family, geometry, shapes)
    _, tied, _, _ = described("llama", tie_word_embeddings=True)
    assert check_tensors(family, tied, shapes) == []
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[259, 64\]"):
        check_tensors(family, tied, shapes | {"lm_head.weight": (259, 64)})


def test_tensors_outside_the_table_are_listed():
    family, geometry, shapes, _ = described("llama")
    extra = {"mtp.fc.weight": (64, 128), "adapter.weight": (3,), "model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    assert check_tensors(family, geometry, shapes | extra) == ["adapter.weight", "mtp.fc.weight"]


def test_layers_beyond_the_configured_number_are_refused_or_outside_the_table():
    """No statistics and no order exist for them; they must not pass for ordinary layers."""
    family, _, shapes, _ = described("llama", num_hidden_layers=3)
    _, shallow, _, _ = described("llama", num_hidden_layers=2)
    surplus = sorted(name for name in shapes if name.startswith("model.layers.2."))
    assert len(surplus) == 9
    said = refusal(family, shallow, shapes)
    assert "model.layers.2." in said if said else check_tensors(family, shallow, shapes) == surplus


def test_biases_are_where_the_configuration_says():
    """transformers passes over a bias that its module does not have, so one more is no ordinary tensor."""
    for name in NAMES:
        family, geometry, shapes, _ = described(name)
        for path in ("self_attn.o_proj", "mlp.up_proj") if name != "mixtral" else ("self_attn.o_proj",):
            extra = f"model.layers.3.{path}.bias" if name == "qwen3_5" else f"model.layers.1.{path}.bias"
            said = refusal(family, geometry, shapes | {extra: (64,)})
            assert said == f"checkpoint holds {extra}, but by config.json its layer has no such part", name
    family, geometry, shapes, _ = described("llama", attention_bias=True, mlp_bias=True)
    assert sum(key.endswith(".bias") for key in shapes) == 2 * 7
    assert check_tensors(family, geometry, shapes) == []
    del shapes["model.layers.1.self_attn.o_proj.bias"]
    assert "lacks tensor model.layers.1.self_attn.o_proj.bias" in refusal(family, geometry, shapes)


# Configurations


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM"),
        ({"architectures": [None]}, "None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": [], "model_type": "llama"}, r"none given \(model_type 'llama'\)"),
        ({"architectures": None}, r"none given \(model_type None\)"),
        ({}, r"none given \(model_type None\)"),
    ],
)
def test_unsupported_architectures(config, found):
    supported = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM, "
    supported += "Gemma3ForConditionalGeneration, MixtralForCausalLM, Qwen3MoeForCausalLM, Qwen3_5ForCausalLM, "
    supported += "Qwen3_5ForConditionalGeneration"
    with pytest.raises(ValueError, match=f"^unsupported architecture: {found}; supported: {supported}$"):
        find_family(config)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 260,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", [{}, {"tie_word_embeddings": None}])
def test_an_absent_tie_means_what_the_familys_class_says(name, given):
    class_name, _ = tiny.FAMILIES[name]
    default = getattr(transformers, class_name)().tie_word_embeddings
    family = next(family for family in FAMILIES if family.name == name)
    sizes = SIZES | {"num_key_value_heads": 2}
    assert Geometry.of(sizes | given, family).tied is default is (name == "gemma3")
    for tied in (True, False):
        assert Geometry.of(sizes | {"tie_word_embeddings": tied}, family).tied is tied


@pytest.mark.parametrize("name", NAMES)
def test_absent_sizes_mean_what_the_familys_class_says(name):
    class_name, _ = tiny.FAMILIES[name]
    sizes = SIZES | {"num_attention_heads": 32, "hidden_size": 64}
    config = getattr(transformers, class_name)(**sizes)
    family = next(family for family in FAMILIES if family.name == name)
    geometry = Geometry.of(sizes, family)
    assert geometry.num_kv_heads == config.num_key_value_heads
    assert geometry.head_dim == (getattr(config, "head_dim", None) or 2)


@pytest.mark.parametrize("name", NAMES)
def test_every_default_is_that_of_the_familys_class(name):
    class_name, _ = tiny.FAMILIES[name]
    family = next(family for family in FAMILIES if family.name == name)
    config = getattr(transformers, class_name)
    assert family.model_type == config.model_type
    values = config().to_dict()
    for alias, key in family.aliases:
        values.setdefault(key, values.get(alias))
    for key, value in family.defaults:
        assert values[key] == value, key


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be from 1 to 4, found 9"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok must be from 1 to 4, found 0"),
        ("qwen3_moe", {"num_experts_per_tok": "2"}, "num_experts_per_tok must be from 1 to 4, found '2'"),
        ("mixtral", {"num_experts": 2}, "num_local_experts is 4, but num_experts is 2"),
        ("qwen3_moe", {"mlp_only_layers": [1.0]}, r"mlp_only_layers \[1.0\] or decoder_sparse_step 1 is not valid"),
        ("qwen3_5", {"layer_types": [["full_attention"]] * 4}, "layer_types must name one of"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, found 'false'"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false, found 1"),
        ("llama", {"model_type": "mistral"}, "LlamaForCausalLM has model_type llama, found 'mistral'"),
    ],
)
def test_values_that_contradict_the_model(name, changes, message):
    model = build_model(name)
    with pytest.raises(ValueError, match=rf"^config\.json: {message}"):
        read_config(model.config.to_dict() | {"architectures": [type(model).__name__]} | changes)


def test_head_sizes():
    (llama, *_) = FAMILIES
    plain = Geometry.of(SIZES, llama)
    assert (plain.head_dim, plain.num_kv_heads) == (16, 4), "as many key/value heads as heads, hidden / heads wide"
    explicit = Geometry.of(SIZES | {"head_dim": 24, "num_key_value_heads": 2}, llama)
    assert (explicit.head_dim, explicit.num_kv_heads) == (24, 2)
    assert Geometry.of(SIZES | {"head_dim": None, "num_key_value_heads": None}, llama) == plain
    assert Geometry.of(SIZES | {"hidden_size": 50, "head_dim": 16}, llama).head_dim == 16


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [None, 0, -4, "64", 64.0])
def test_a_size_that_is_no_positive_integer_is_named(key, value):
    with pytest.raises(ValueError, match=rf"^config\.json: {key} must be a positive integer, found {value!r}$"):
        Geometry.of(SIZES | {key: value}, FAMILIES[0])
    with pytest.raises(ValueError, match=rf"^config\.json: {key} must be a positive integer, found None$"):
        Geometry.of({name: size for name, size in SIZES.items() if name != key}, FAMILIES[0])


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="4 attention heads cannot be shared by 3 key/value heads"):
        Geometry.of(SIZES | {"num_key_value_heads": 3}, FAMILIES[0])
    with pytest.raises(ValueError, match="head_dim is absent and hidden_size 66 is no multiple of 4"):
        Geometry.of(SIZES | {"hidden_size": 66}, FAMILIES[0])


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
@pytest.mark.parametrize("value", [-2, "2", 2.0])
def test_optional_sizes_are_checked_too(key, value):
    with pytest.raises(ValueError, match=rf"config\.json: {key}"):
        Geometry.of(SIZES | {key: value}, FAMILIES[0])
