"""The packed layers read from a folder are those of the model that transformers loads from it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from otf_llm.artifact_format import INDEX_FILE
from otf_llm.kernel_check import Int4Layer, Int8Table
from otf_llm.modules import Int4Linear, Int8Embedding, Int8TiedHead, packed_modules
from otf_llm.settings import SchemeSettings
from otf_llm.stored_layers import stored_layers
from test_conversion import SCHEMES, convert
from tiny import build_model, save_checkpoint


def converted(tmp_path, scheme, family="llama", max_shard_size="5GB", **overrides):
    source = save_checkpoint(
        tmp_path / "source", build_model(family, **overrides), tokenizer=False, max_shard_size=max_shard_size
    )
    convert(source, tmp_path / "out", scheme)
    return tmp_path / "out"


def assert_same(stored, loaded):
    assert (stored is None) == (loaded is None)
    if stored is not None:
        assert (stored.dtype, stored.shape) == (loaded.dtype, loaded.shape)
        assert torch.equal(stored, loaded)


def check(folder):
    """Compare every layer with its module; returns the layers by name."""
    layers = {layer.name: layer for layer in stored_layers(folder)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    modules = {name: module for name, module in packed_modules(model) if not isinstance(module, Int8TiedHead)}
    assert layers.keys() == modules.keys()
    for name, layer in layers.items():
        module = modules[name]
        assert_same(layer.codes, module.codes)
        assert_same(layer.scales, module.scales)
        if isinstance(layer, Int8Table):
            assert isinstance(module, Int8Embedding)
            continue
        assert isinstance(module, Int4Linear)
        assert_same(layer.outliers, module.outliers)
        assert_same(layer.perm, module.perm)
        assert_same(layer.bias, module.bias)
        assert (layer.in_features, layer.group_size) == (module.in_features, module.group_size)
    return layers


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_layers_equal_the_loaded_modules(tmp_path, name, tied):
    scheme = SCHEMES[name]
    layers = check(converted(tmp_path, scheme, tie_word_embeddings=tied))
    int4 = [layer for layer in layers.values() if isinstance(layer, Int4Layer)]
    head = scheme.head_for(tied) == "int4"
    assert len(int4) == 14 * (scheme.weights == "int4") + head
    assert len(layers) - len(int4) == (scheme.embedding == "int8")
    assert ("lm_head" in layers) == head


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_biases_and_scaled_embeddings(tmp_path, family):
    layers = check(converted(tmp_path, SchemeSettings(), family))
    biased = [name for name, layer in layers.items() if getattr(layer, "bias", None) is not None]
    assert len(biased) == (6 if family == "qwen2" else 0)
    assert all(name.endswith(("q_proj", "k_proj", "v_proj")) for name in biased)


def test_shapes_and_slices(tmp_path):
    """One table serves all; linears that read the same input share a slice, a folded order needs none."""
    layers = check(converted(tmp_path, SchemeSettings(group_size=32), num_hidden_layers=1))
    assert list(layers) == [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.embed_tokens",
    ]
    up, down = layers["model.layers.0.mlp.up_proj"], layers["model.layers.0.mlp.down_proj"]
    assert (up.codes.shape, up.scales.shape, up.outliers.shape) == ((128, 32), (128, 2), (128, 1))
    assert (down.codes.shape, down.scales.shape, down.outliers.shape) == ((64, 63), (64, 4), (64, 2))
    assert (up.codes.dtype, up.scales.dtype, up.outliers.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert down.perm is None, "folded into gate and up"
    table = layers["model.embed_tokens"]
    assert (table.codes.shape, table.codes.dtype, table.scales.shape) == ((260, 64), torch.int8, (260,))
    for name, layer in layers.items():
        if isinstance(layer, Int4Layer) and layer is not down:
            assert torch.equal(layer.perm.long().sort().values, torch.arange(layer.in_features)), name
            assert layer.perm.dtype == torch.int16
    perms = {name.rpartition(".")[2]: layer.perm for name, layer in layers.items() if isinstance(layer, Int4Layer)}
    shared = [("q_proj", "k_proj"), ("q_proj", "v_proj"), ("gate_proj", "up_proj")]
    assert all(perms[one].data_ptr() == perms[other].data_ptr() for one, other in shared)
    assert not torch.equal(perms["q_proj"], perms["gate_proj"])


def test_order_is_that_of_the_configuration(tmp_path):
    folder = converted(tmp_path, SchemeSettings(), num_hidden_layers=3)
    listed = json.loads((folder / "config.json").read_text())["quantization_config"]["linears"]
    assert [layer.name for layer in stored_layers(folder)] == [*listed, "model.embed_tokens"]


def test_layers_may_lie_in_several_files(tmp_path):
    folder = converted(tmp_path, SchemeSettings(), max_shard_size="50KB")
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 3
    assert len(check(folder)) == 16


def test_a_folder_with_nothing_packed_has_no_layers(tmp_path):
    assert stored_layers(converted(tmp_path, SCHEMES["nothing"])) == []


def test_a_damaged_folder_is_refused_by_file(tmp_path):
    folder = converted(tmp_path, SchemeSettings())
    data = bytearray((folder / "permutation.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "permutation.safetensors").write_bytes(data)
    with pytest.raises(
        ValueError, match=r"changed since conversion: permutation\.safetensors; remove its manifest\.json"
    ):
        stored_layers(folder)
    (folder / "permutation.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing or changed since conversion: permutation\.safetensors;"):
        stored_layers(folder)
    with pytest.raises(ValueError, match=r"source is not a converted folder: it has no manifest\.json"):
        stored_layers(tmp_path / "source")
