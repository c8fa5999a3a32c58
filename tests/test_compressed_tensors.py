"""Folders in compressed-tensors' layout: loaded by that package in transformers, they compute what ours do."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from otf_llm.accounting import bits_per_weight, byte_categories
from otf_llm.checkpoint import Checkpoint
from otf_llm.decoder import read_config
from otf_llm.evaluation import final_states, load_model
from otf_llm.scheme_fit import check_scheme
from otf_llm.settings import PermutationSettings, SchemeSettings
from test_conversion import convert, dense_logits
from tiny import build_model, logits_of, save_checkpoint

NO_OUTLIERS = PermutationSettings(outlier_fraction=0)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_5")


def exported(**settings):
    values = {"group_size": 32, "embedding": "keep", "permutation": NO_OUTLIERS, "export": "compressed-tensors"}
    return SchemeSettings(**(values | settings))


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def sizes(family):
    """Widths that words of eight codes and groups of 32 divide."""
    return {"linear_value_head_dim": 16} if family == "qwen3_5" else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_it_computes_what_our_own_layout_does(tmp_path, tokens, family, tied):
    """The same scales, stored in FP16 by both since the source is: the same codes, so the same logits."""
    model = build_model(family, tie_word_embeddings=tied, **sizes(family))
    source = save_checkpoint(tmp_path / "source", model, torch.float16)
    recipe, _ = convert(source, tmp_path / "theirs", exported())
    ours, _ = convert(
        source,
        tmp_path / "ours",
        SchemeSettings(group_size=32, embedding="keep", lm_head="keep", permutation=NO_OUTLIERS),
    )
    theirs = logits_of(load(tmp_path / "theirs"), tokens)
    expected = logits_of(load(tmp_path / "ours"), tokens)
    assert expected.abs().max() > 0.1
    assert (theirs - expected).abs().max() <= 1e-3 * expected.abs().max()
    dense = dense_logits(source, tmp_path / "ours", ours, tokens)
    assert (theirs - dense).abs().max() <= 1e-3 * dense.abs().max()
    assert recipe.head == ("tied" if tied else "keep")


@pytest.mark.parametrize("group_size", [0, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_have_the_dtype_of_the_source(tmp_path, tokens, group_size, dtype):
    source = save_checkpoint(tmp_path / "source", build_model("llama"), dtype)
    _, manifest = convert(source, tmp_path / "out", exported(group_size=group_size))
    stored = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    name = "model.layers.0.mlp.down_proj"
    scales = stored[f"{name}.weight_scale"]
    assert scales.dtype == dtype
    assert scales.shape == (64, 128 // group_size if group_size else 1)
    assert stored[f"{name}.weight_packed"].shape == (64, 16)
    assert stored[f"{name}.weight_shape"].tolist() == [64, 128]
    words = stored[f"{name}.weight_packed"]
    codes = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=2).reshape(64, 128) - 8
    weight = codes * scales.float().repeat_interleave(128 // scales.shape[1], dim=1)
    model = load(tmp_path / "out")
    logits_of(model, tokens)  # the package decompresses a model's weights as it first runs
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = model.model.layers[0].mlp.down_proj(x)
    assert (y - x @ weight.T).abs().max() <= 1e-3 * y.abs().max()
    assert sum(byte_categories(manifest, tmp_path / "out").values()) == sum(
        path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")
    )
    assert bits_per_weight(manifest) > 4


def test_what_stays_dense_is_named_and_loads(tmp_path, tokens):
    source = save_checkpoint(tmp_path / "source", build_model("qwen3_5", **sizes("qwen3_5")), torch.float16)
    recipe, _ = convert(source, tmp_path / "out", exported(keep=["*.1.mlp.*"]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = set(config["quantization_config"]["ignore"])
    assert ignored == {
        "lm_head",
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"model.layers.{layer}.linear_attn.in_proj_{name}" for layer in (0, 1, 2) for name in "ab"),
    }
    assert torch.isfinite(logits_of(load(tmp_path / "out"), tokens)).all()
    assert recipe.kept.keys() == {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "keep"}, "export: compressed-tensors needs weights: int4, not keep"),
        ({"embedding": "int8"}, "export: compressed-tensors needs embedding: keep, not int8"),
        ({"lm_head": "int4"}, "export: compressed-tensors needs lm_head: auto, tied or keep, not int4"),
        (
            {"permutation": PermutationSettings()},
            r"export: compressed-tensors needs permutation\.outlier_fraction: 0, not 0\.01",
        ),
        (
            {"permutation": PermutationSettings(outlier_fraction=0, order="max_abs_weight")},
            r"export: compressed-tensors needs permutation\.order: natural, not max_abs_weight",
        ),
        ({"export": "gguf"}, "export: 'gguf' is not one of otf, compressed-tensors"),
    ],
)
def test_settings_that_the_layout_has_no_place_for(settings, message):
    with pytest.raises(ValueError, match=message):
        exported(**settings)


def refused(source, scheme):
    check_scheme(scheme, *read_config(Checkpoint.open(source).config))


def test_models_that_the_layout_has_no_place_for(tmp_path):
    source = save_checkpoint(tmp_path / "a", build_model("llama", intermediate_size=96))
    with pytest.raises(ValueError, match=r"multiples of 64: model\.layers\.0\.mlp\.down_proj \(96\), .*layers\.1\.mlp"):
        refused(source, exported(group_size=64))
    refused(source, exported(group_size=64, keep=["*.down_proj"]))
    source = save_checkpoint(tmp_path / "b", build_model("mixtral"))
    for scheme in (exported(), exported(keep=["*.experts.*"])):
        with pytest.raises(
            ValueError, match=r"of models with experts is not supported: model\.layers\.0\.mlp\.experts\.0"
        ):
            refused(source, scheme)


def test_its_decoder_alone_runs_after_it_was_loaded_for_evaluation(tmp_path, tokens):
    source = save_checkpoint(tmp_path / "source", build_model("llama"), torch.float16)
    convert(source, tmp_path / "out", exported())
    model = load_model(tmp_path / "out", torch.float32, "cpu")
    states = torch.stack(list(final_states(model, list(tokens))))
    assert (model.lm_head(states) - logits_of(load(tmp_path / "out"), tokens)).abs().max() <= 1e-4
