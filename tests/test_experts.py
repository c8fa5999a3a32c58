"""Mixtures of experts: taken apart without a change, in whichever way they are stored, also where no token goes."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from otf_llm.checkpoint import Checkpoint, build_manifest
from otf_llm.experts import Experts
from otf_llm.inspection import inspect_checkpoint, language_model
from otf_llm.settings import PermutationSettings, SchemeSettings
from test_conversion import SCHEMES, convert, dense_logits
from tiny import build_model, logits_of, save_checkpoint, separate_experts

FAMILIES = ("mixtral", "qwen3_moe")
EXPERT_NAMES = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.3.w1.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.3.gate_proj.weight",
}


def one_by_one(folder, family, **overrides):
    """Saved as the family's checkpoints are: a matrix per projection of every expert."""
    source = save_checkpoint(folder, build_model(family, **overrides))
    assert EXPERT_NAMES[family] in load_file(source / "model.safetensors")
    return source


def fused(folder, family, **overrides):
    """Saved as transformers holds it: two 3-D tensors per layer."""
    model = build_model(family, **overrides).to(torch.bfloat16)
    save_checkpoint(folder, model)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


LAYOUTS = {"one-by-one": one_by_one, "fused": fused}


@pytest.mark.parametrize("family", FAMILIES)
def test_separate_experts_compute_what_fused_ones_do(tokens, family):
    model = build_model(family)
    expected = logits_of(model, tokens)
    separate_experts(model)
    assert any(isinstance(module, Experts) for module in model.modules())
    assert (logits_of(model, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_number_of_experts_stands_for_none():
    model = separate_experts(build_model("mixtral"))
    experts = model.model.layers[0].mlp.experts
    x, index, weights = torch.ones(2, 64), torch.tensor([[0, 1], [4, 4]]), torch.full((2, 2), 0.5)
    y = experts(x, index, weights)
    assert y[0].any()
    assert not y[1].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["default", "folded", "naive", "embedding-only", "head-only", "nothing"])
def test_both_layouts_convert_and_load(tmp_path, tokens, family, layout, name):
    """CNV-22: every expert is converted, or kept and listed, however they are stored."""
    source = LAYOUTS[layout](tmp_path / "source", family, tie_word_embeddings=False)
    recipe, manifest = convert(source, tmp_path / "out", SCHEMES[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits_of(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()
    rows = {row["tensor"]: row for row in manifest["tensors"] if "tensor" in row}
    action = "int4" if SCHEMES[name].weights == "int4" else "copied"
    if name == "head-only":
        action = "reordered"  # the intermediate axis is folded wherever there is a permutation
    for expert in range(4):
        for projection in ("gate_proj", "up_proj"):
            assert rows[f"model.layers.0.mlp.experts.{expert}.{projection}.weight"]["action"] == action
    router = rows["model.layers.0.mlp.gate.weight"]
    assert router["reason"] == "a gate or router, small and sensitive"
    assert sum(row["source_bytes"] for row in rows.values()) == sum(
        tensor.numel() * tensor.element_size() for tensor in load_file(source / "model.safetensors").values()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_changes_no_weight(tmp_path, family):
    stored = []
    for layout, save in LAYOUTS.items():
        convert(save(tmp_path / layout, family), tmp_path / layout / "out", SCHEMES["default"])
        stored.append(load_file(tmp_path / layout / "out" / "model-00001-of-00001.safetensors"))
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])


def test_a_bare_decoder_with_experts_loads(tmp_path, tokens):
    from transformers import AutoModel

    convert(one_by_one(tmp_path / "source", "qwen3_moe"), tmp_path / "out", SCHEMES["default"])
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    bare = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = causal.base_model(input_ids=tokens).last_hidden_state
        assert torch.equal(bare(input_ids=tokens).last_hidden_state, expected)


def lonely(folder, family="qwen3_moe"):
    """Top 1 of eight experts, and a router that sends every token to expert 0."""
    sizes = {"qwen3_moe": {"num_experts": 8}, "mixtral": {"num_local_experts": 8}}[family]
    model = build_model(family, num_experts_per_tok=1, **sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.post_attention_layernorm.weight.fill_(1.0)
                layer.mlp.gate.weight.zero_()
                layer.mlp.gate.weight[0] = 1e-3  # a tie goes to the lowest index, whatever the sign of the sum
    return save_checkpoint(folder, model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fold", [(), ("intermediate",), ("residual", "intermediate")])
def test_experts_without_tokens_are_ranked_by_weight_and_listed(tmp_path, tokens, caplog, family, fold):
    """CAL-09: nothing is NaN, the unseen are named, and their scales are searched without weights."""
    source = lonely(tmp_path / "source", family)
    scheme = SchemeSettings(group_size=32, permutation=PermutationSettings(fold=fold))
    with caplog.at_level(logging.WARNING):
        recipe, manifest = convert(source, tmp_path / "out", scheme)
    layers = (0, 2) if family == "qwen3_moe" else (0, 1)
    seen = {name for name in recipe.statistics if ".experts." in name and recipe.statistics[name].token_count}
    unseen = {f"model.layers.{i}.experts.{e}.mlp_hidden" for i in layers for e in range(8)} - seen
    assert len(unseen) >= 2 * 6
    assert set(manifest["unseen_inputs"]) == unseen
    assert "saw no calibration token" in caplog.text
    assert all(name in caplog.text for name in unseen)
    for row in manifest["tensors"]:
        assert row.get("relative_error", 0.0) == row.get("relative_error", 0.0), "no NaN"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert torch.isfinite(expected).all()
    assert (logits_of(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()
    name = min(unseen)
    ranked = recipe.permutation.columns(name)
    weight = dict(AutoModelForCausalLM.from_pretrained(source).named_parameters())
    layer, expert = name.split(".")[2], int(name.split(".")[4])
    down = weight[f"model.layers.{layer}.mlp.experts.down_proj"][expert].float()
    assert ranked[0] == down.abs().sum(0).argmax(), "the outlier is the column with the largest weights"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_that_is_none_is_found_in_any_expert(tmp_path, layout):
    """CNV-11: the scan covers experts, too."""
    source = LAYOUTS[layout](tmp_path, "qwen3_moe", num_experts=8)
    path = source / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    if layout == "fused":
        name = "model.layers.2.mlp.experts.gate_up_proj"
        tensors[name][5, 48 + 3, 7] = float("nan")
    else:
        tensors[name][3, 7] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"weights are not finite: {name}: 1 NaN, 0 Inf"):
        build_manifest(Checkpoint.open(source), "qwen3_moe", progress=False)


def edited(source, edit):
    path = source / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return Checkpoint.open(source)


def test_damaged_experts_are_named(tmp_path):
    """A missing expert, one too many, a fused tensor of another shape, an expert stored twice."""
    source = one_by_one(tmp_path / "a", "mixtral")
    gone = edited(source, lambda tensors: tensors.pop(EXPERT_NAMES["mixtral"]))
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.0\.mlp\.experts\.3\.gate_proj\.weight"):
        inspect_checkpoint(gone)
    source = one_by_one(tmp_path / "b", "mixtral")
    extra = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    more = edited(source, lambda tensors: tensors.update({extra: torch.zeros(64, 128)}))
    with pytest.raises(ValueError, match=r"holds model\.layers\.1\.mlp\.experts\.4\.down_proj\.weight, but by config"):
        inspect_checkpoint(more)
    source = fused(tmp_path / "c", "qwen3_moe")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    turned = edited(source, lambda tensors: tensors.update({name: tensors[name].mT.contiguous()}))
    with pytest.raises(ValueError, match=rf"{name} has shape \[4, 64, 96\], config\.json demands \[4, 96, 64\]"):
        inspect_checkpoint(turned)
    source = fused(tmp_path / "d", "qwen3_moe")
    again = "model.layers.0.mlp.experts.1.up_proj.weight"
    twice = edited(source, lambda tensors: tensors.update({again: torch.zeros(48, 64)}))
    with pytest.raises(ValueError, match=rf"{again} is stored twice"):
        language_model(twice)


def test_a_dense_layer_among_experts_must_be_where_the_configuration_says(tmp_path):
    source = one_by_one(tmp_path, "qwen3_moe")
    config = json.loads((source / "config.json").read_text())
    assert config["mlp_only_layers"] == [1]
    (source / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    with pytest.raises(ValueError, match=r"holds model\.layers\.0\.mlp\..*by config\.json its layer has no such part"):
        inspect_checkpoint(Checkpoint.open(source))
    (source / "config.json").write_text(json.dumps(config | {"decoder_sparse_step": 0}))
    with pytest.raises(ValueError, match=r"decoder_sparse_step 0 is not valid"):
        inspect_checkpoint(Checkpoint.open(source))
    (source / "config.json").write_text(json.dumps(config | {"num_experts": 3, "num_local_experts": 4}))
    with pytest.raises(ValueError, match=r"num_experts is 3, but num_local_experts is 4"):
        inspect_checkpoint(Checkpoint.open(source))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_experts_of_one_layer_can_be_kept_all_together(tmp_path, tokens, family, layout):
    source = LAYOUTS[layout](tmp_path / "source", family, tie_word_embeddings=False)
    scheme = SchemeSettings(keep=["model.layers.0.mlp.experts.*"], permutation=PermutationSettings(fold=("residual",)))
    recipe, _ = convert(source, tmp_path / "out", scheme)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert not isinstance(model.model.layers[0].mlp.experts, Experts)
    assert isinstance(model.model.layers[1 if family == "mixtral" else 2].mlp.experts, Experts)
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits_of(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()
    some = SchemeSettings(keep=["model.layers.0.mlp.experts.1.*"])
    with pytest.raises(ValueError, match=r"match 3 of 12 linears of the experts of model\.layers\.0; all or none"):
        convert(source, tmp_path / "some", some)


def rename(folder, old, new):
    path = next(folder.glob("model-*.safetensors"))
    tensors = load_file(path)
    tensors[new] = tensors.pop(old)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_kept_expert_of_another_number_is_refused_by_name(tmp_path):
    scheme = SchemeSettings(keep=["model.layers.0.mlp.experts.*"])
    convert(one_by_one(tmp_path / "source", "qwen3_moe"), tmp_path / "out", scheme)
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    rename(tmp_path / "out", name, name.replace(".2.", ".7."))
    with pytest.raises(ValueError, match=rf"lacks 1 tensors: {name}"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rename(tmp_path / "out", name.replace(".2.", ".7."), name)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_carried_tensors_may_be_called_experts(tmp_path):
    source = one_by_one(tmp_path / "source", "qwen3_moe")
    edited(source, lambda tensors: tensors.update({"mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.ones(4, 4)}))
    convert(source, tmp_path / "out", SCHEMES["default"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
