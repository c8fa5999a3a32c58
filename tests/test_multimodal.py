"""The language model of a multimodal checkpoint: converted by itself, the rest listed as left out or carried."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from otf_llm.checkpoint import Checkpoint, build_manifest
from otf_llm.conversion import check_foldable
from otf_llm.decoder import read_config
from otf_llm.evaluation import load_model, source_head
from otf_llm.inspection import inspect_checkpoint, language_model
from otf_llm.layerwise import LayerwiseModel
from otf_llm.settings import PermutationSettings, SchemeSettings
from test_conversion import SCHEMES, convert, dense_weight
from tiny import VOCAB, build_model, byte_tokenizer, logits_of

VISION = {"hidden_size": 32, "intermediate_size": 64}
WHOLE = {
    "qwen3_5": (
        "Qwen3_5Config",
        {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
        {},
    ),
    "gemma3": (
        "Gemma3Config",
        {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        {"mm_tokens_per_image": 4},
    ),
}


def multimodal(folder, family, *, tied=True, mtp=False, prefix=None):
    """A checkpoint of the whole model around the tiny language model; returns the language model itself."""
    name, vision, more = WHOLE[family]
    text = build_model(family, tie_word_embeddings=tied)
    config = getattr(transformers, name)(
        text_config=text.config.to_dict(), vision_config=VISION | vision, tie_word_embeddings=tied, **more
    )
    torch.manual_seed(1)
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if mtp:
        tensors |= {"mtp.fc.weight": torch.ones(64, 128).bfloat16(), "mtp.norm.weight": torch.ones(64).bfloat16()}
    if prefix:
        tensors = {key.replace(*prefix): tensor for key, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    for parameter in text.parameters():  # not the rotary frequencies
        parameter.data = parameter.data.bfloat16().float()
    return text


def edit_config(folder, edit):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def dense_logits(model, folder, recipe, tokens):
    """Logits of the language model with its weights replaced by a dequantisation of the stored ones."""
    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    for name, module in model.named_modules():
        weight = dense_weight(name, stored, recipe)
        if weight is not None:
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    if recipe.head == "tied":
        model.lm_head.weight = model.get_input_embeddings().weight
    return logits_of(model, tokens)


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["default", "folded", "embedding-only", "nothing"])
def test_its_language_model_converts_and_loads(tmp_path, tokens, family, tied, name):
    text = multimodal(tmp_path / "source", family, tied=tied)
    recipe, manifest = convert(tmp_path / "source", tmp_path / "out", SCHEMES[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(model).__name__ == recipe.family.architecture
    expected = dense_logits(text, tmp_path / "out", recipe, tokens)
    assert (logits_of(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()
    dropped = [row for row in manifest["tensors"] if row.get("reason") == "not of the language model"]
    source = load_file(tmp_path / "source" / "model.safetensors")
    outside = {key for key in source if "visual" in key or "vision" in key or "projector" in key}
    assert len(outside) > 10
    assert {row["tensor"] for row in dropped} == outside
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == f"{family}_text"
    assert "vision_config" not in config
    assert config["vocab_size"] == VOCAB


@pytest.mark.parametrize("family", WHOLE)
def test_the_source_is_evaluated_as_its_language_model(tmp_path, tokens, family):
    """Where the whole model says that the two are tied, its language model's head is the embedding, not noise."""
    text = multimodal(tmp_path, family)
    edit_config(tmp_path, lambda config: config["text_config"].pop("tie_word_embeddings", None))
    model = load_model(tmp_path, torch.float32, "cpu")
    expected = logits_of(text, tokens)
    assert (logits_of(model, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    checkpoint = language_model(Checkpoint.open(tmp_path))
    assert torch.equal(source_head(checkpoint, torch.float32, "cpu").weight, text.lm_head.weight)
    layerwise = LayerwiseModel(checkpoint, read_config(checkpoint.config)[0])
    batches = layerwise.prepare(list(tokens), 2)
    layerwise.run(batches)
    with torch.no_grad():
        states = text.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert (batches[0].hidden - states).abs().max() <= 1e-5 * states.abs().max()


def test_older_names_of_the_same_tensors(tmp_path, tokens):
    """transformers 5 saves Gemma's as language_model.model…, in memory they are model.language_model…"""
    text = multimodal(tmp_path / "a", "gemma3", prefix=("language_model.model.", "model.language_model."))
    convert(tmp_path / "a", tmp_path / "a" / "out", SCHEMES["nothing"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "out", dtype=torch.float32).eval()
    assert torch.equal(logits_of(model, tokens), logits_of(text, tokens))


def test_multi_token_prediction_is_carried(tmp_path, caplog):
    """No statistics exist for those tensors: they stay bit for bit, are listed, and forbid a residual fold."""
    multimodal(tmp_path / "source", "qwen3_5", mtp=True)
    inspect_checkpoint(Checkpoint.open(tmp_path / "source"))
    assert "2 tensors are not in the qwen3_5 table and will be carried as they are: mtp.fc.weight" in caplog.text
    recipe, manifest = convert(tmp_path / "source", tmp_path / "out", SchemeSettings())
    stored = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert torch.equal(stored["mtp.fc.weight"], torch.ones(64, 128).bfloat16())
    rows = {row["tensor"]: row for row in manifest["tensors"] if "tensor" in row}
    assert (rows["mtp.norm.weight"]["action"], rows["mtp.norm.weight"]["reason"]) == (
        "copied",
        "not in the family's table",
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    folded = dataclasses.replace(recipe.permutation, settings=PermutationSettings(fold=("residual",)))
    with pytest.raises(ValueError, match=r"residual is not possible.*mtp\.fc\.weight"):
        check_foldable(dataclasses.replace(recipe, permutation=folded), ["mtp.fc.weight"])


@pytest.mark.parametrize(
    ("inner", "outer", "tied"),
    [(True, None, True), (None, True, True), (False, True, True), (True, False, True), (False, None, False)],
)
def test_where_the_flag_of_tied_embeddings_may_stand(tmp_path, inner, outer, tied):
    """CNV-31: under text_config or above; the part that does not decide holds its class's default."""
    multimodal(tmp_path, "qwen3_5")

    def edit(config):
        for part, value in ((config["text_config"], inner), (config, outer)):
            part.pop("tie_word_embeddings", None)
            if value is not None:
                part["tie_word_embeddings"] = value

    edit_config(tmp_path, edit)
    checkpoint = Checkpoint.open(tmp_path)
    assert read_config(checkpoint.config)[1].tied is tied
    if not tied:
        with pytest.raises(ValueError, match=r"lacks tensor lm_head\.weight \(tie_word_embeddings is false"):
            inspect_checkpoint(checkpoint)


def test_a_manifest_describes_the_whole_checkpoint(tmp_path):
    multimodal(tmp_path, "qwen3_5")
    manifest = build_manifest(Checkpoint.open(tmp_path), "qwen3_5", progress=False)
    assert manifest["tensors"].keys() == load_file(tmp_path / "model.safetensors").keys()


def test_a_configuration_without_its_text_part_is_refused(tmp_path):
    multimodal(tmp_path, "qwen3_5")
    edit_config(tmp_path, lambda config: config.pop("text_config"))
    with pytest.raises(ValueError, match="Qwen3_5ForConditionalGeneration without a text_config, found None"):
        inspect_checkpoint(Checkpoint.open(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must name one of full_attention, linear_attention"),
        ({"layer_types": ["mamba"] * 4}, "layer_types must name one of"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval 0 is not valid"),
        ({"linear_num_value_heads": 0}, "linear_num_value_heads must be a positive integer, found 0"),
    ],
)
def test_layers_of_no_known_kind(tmp_path, values, message):
    multimodal(tmp_path, "qwen3_5")
    edit_config(tmp_path, lambda config: config["text_config"].update(values))
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        inspect_checkpoint(Checkpoint.open(tmp_path))


@pytest.mark.parametrize("family", WHOLE)
def test_what_a_configuration_leaves_to_its_class(tmp_path, tokens, family):
    """Published ones give only what differs from the class's defaults, and may leave out the inner model type."""
    text = multimodal(tmp_path / "source", family)
    edit_config(tmp_path / "source", lambda config: config["text_config"].pop("model_type"))
    convert(tmp_path / "source", tmp_path / "out", SCHEMES["nothing"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert torch.equal(logits_of(model, tokens), logits_of(text, tokens))
    edit_config(tmp_path / "source", lambda config: config["text_config"].update(model_type="llama"))
    with pytest.raises(ValueError, match=r"ForCausalLM has model_type \w+_text, found 'llama'"):
        inspect_checkpoint(Checkpoint.open(tmp_path / "source"))


def test_the_configuration_of_the_4b_gemma():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    _, geometry = read_config(config)
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.vocab_size) == (8, 4, 256, 262208)
    assert geometry.tied
