"""Folding is exact on every family; orders, outlier counts and ties are as documented."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from otf_llm.calibration import calibrate
from otf_llm.checkpoint import Checkpoint
from otf_llm.conversion import Recipe, check_foldable, fold_tensor
from otf_llm.decoder import read_config, tensor_role
from otf_llm.families import HEAD_INPUT
from otf_llm.inspection import language_model
from otf_llm.layerwise import LayerwiseModel
from otf_llm.permutation import (
    ChannelStatistics,
    Permutation,
    channel_order,
    channel_statistics,
    outlier_count,
    plan_permutation,
)
from otf_llm.settings import PermutationSettings, SchemeSettings
from otf_llm.weight_statistics import weight_statistics
from tiny import build_model, logits_of, save_checkpoint, separate_experts

ALL_FOLDS = ("residual", "intermediate", "value")


def plan(folder, settings, seed=0):
    checkpoint = language_model(Checkpoint.open(folder))
    family, geometry = read_config(checkpoint.config)
    ids = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(seed))
    activations = calibrate(LayerwiseModel(checkpoint, family), geometry, list(ids), batch_size=2)
    statistics = channel_statistics(activations, weight_statistics(checkpoint, family, geometry))
    permutation = plan_permutation(family, geometry, statistics, settings)
    return checkpoint, Recipe(family, geometry, SchemeSettings(permutation=settings), permutation, activations)


def folded_logits(folder, settings, tokens):
    """Logits of the source and of the same FP32 model with folded tensors reordered and runtime gathers applied."""
    from transformers import AutoModelForCausalLM

    _, recipe = plan(folder, settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = logits_of(model, tokens)
    model = separate_experts(model)
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = fold_tensor(recipe.permutation, recipe, name, tensor.clone())
    moved = sum(not torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    model.load_state_dict(state)
    for name, module in model.named_modules():
        role = tensor_role(recipe.family, f"{name}.weight")
        if role.linear is not None:
            order = recipe.permutation.inputs[recipe.input_of(role)]
            if order.runtime is not None:
                runtime = recipe.permutation.orders[order.runtime]
                module.weight.data = module.weight.data[:, runtime]
                module.register_forward_pre_hook(lambda _m, args, runtime=runtime: (args[0][..., runtime],))
    return expected, logits_of(model, tokens), moved


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("tied", [False, True])
def test_folding_every_axis_keeps_the_logits(tmp_path, tokens, family, tied):
    model = build_model(family, tie_word_embeddings=tied)
    save_checkpoint(tmp_path, model, torch.float32)
    settings = PermutationSettings(fold=ALL_FOLDS, order="max_abs_weight", outlier_fraction=0.05)
    expected, folded, moved = folded_logits(tmp_path, settings, tokens)
    assert moved > 10
    assert expected.abs().max() > 0.5
    assert (expected - folded).abs().max() <= 1e-4


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 2), (6, 3), (4, 1)])
def test_folding_keeps_the_logits_for_every_head_ratio(tmp_path, tokens, heads, kv_heads):
    model = build_model("llama", hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    save_checkpoint(tmp_path, model, torch.float32)
    settings = PermutationSettings(fold=ALL_FOLDS, order="max_abs_weight", outlier_fraction=0.05)
    expected, folded, _ = folded_logits(tmp_path, settings, tokens)
    assert (expected - folded).abs().max() <= 1e-4


def test_biases_move_with_their_rows(tmp_path, tokens):
    model = build_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.copy_(torch.linspace(-3, 3, len(projection.bias)))
    save_checkpoint(tmp_path, model, torch.float32)
    settings = PermutationSettings(fold=ALL_FOLDS, order="max_abs_weight")
    expected, folded, _ = folded_logits(tmp_path, settings, tokens)
    assert (expected - folded).abs().max() <= 1e-4


def test_explicit_head_dim_wins_over_hidden_size_by_heads(tmp_path, tokens):
    model = build_model("qwen3", hidden_size=40, num_attention_heads=4, head_dim=16)
    save_checkpoint(tmp_path, model, torch.float32)
    settings = PermutationSettings(fold=ALL_FOLDS, order="max_abs_weight")
    expected, folded, _ = folded_logits(tmp_path, settings, tokens)
    assert (expected - folded).abs().max() <= 1e-4


def test_query_and_key_rows_never_move(tmp_path):
    save_checkpoint(tmp_path, build_model("llama"), torch.float32)
    _, recipe = plan(tmp_path, PermutationSettings(fold=ALL_FOLDS, order="max_abs_weight"))
    for layer in range(2):
        for projection in ("q_proj", "k_proj"):
            role = tensor_role(recipe.family, f"model.layers.{layer}.self_attn.{projection}.weight")
            assert recipe.permutation.rows(role) is None
    value = tensor_role(recipe.family, "model.layers.0.self_attn.v_proj.weight")
    heads = recipe.permutation.rows(value).view(2, 16)
    assert torch.equal(heads.sort(-1).values, torch.arange(32).view(2, 16)), "value rows stay inside their head"


def test_a_rotation_pair_broken_on_purpose_is_noticed(tmp_path, tokens):
    """The check above can fail: moving single dimensions inside a query/key head changes the logits."""
    from transformers import AutoModelForCausalLM

    save_checkpoint(tmp_path, build_model("llama"), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = logits_of(model, tokens)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    attention = model.model.layers[0].self_attn
    for projection, heads in ((attention.q_proj, 4), (attention.k_proj, 2)):
        projection.weight.data = projection.weight.data.view(heads, 16, -1)[:, order].reshape(heads * 16, -1)
    assert (expected - logits_of(model, tokens)).abs().max() > 1e-3


def test_unknown_tensors_refuse_a_residual_fold_and_pass_otherwise(tmp_path):
    save_checkpoint(tmp_path, build_model("llama"))
    _, recipe = plan(tmp_path, PermutationSettings(fold=("residual",)))
    unknown = ["adapter.weight", "mtp.fc.weight", "mtp.norm.weight"]
    with pytest.raises(ValueError, match=r"residual is not possible.*adapter\.weight, mtp\.fc\.weight"):
        check_foldable(recipe, unknown)
    _, other = plan(tmp_path, PermutationSettings(fold=("intermediate",)))
    check_foldable(other, unknown)


def test_permutation_survives_saving_and_is_one_table(tmp_path):
    save_checkpoint(tmp_path / "model", build_model("llama"))
    _, recipe = plan(tmp_path / "model", PermutationSettings(fold=ALL_FOLDS))
    for name in ("a", "b"):
        recipe.permutation.save(tmp_path / f"{name}.safetensors")
    loaded = Permutation.load(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert loaded.inputs == recipe.permutation.inputs
    assert loaded.orders.keys() == recipe.permutation.orders.keys()
    assert all(torch.equal(loaded.orders[name].long(), order) for name, order in recipe.permutation.orders.items())
    table, offsets = loaded.runtime_table(loaded.inputs)
    assert table.dtype == torch.int16
    for name, order in loaded.inputs.items():
        if order.runtime is not None:
            start = offsets[order.runtime]
            assert torch.equal(table[start : start + order.in_features].long(), loaded.orders[order.runtime].long()), (
                name
            )


@pytest.mark.parametrize("value", [0, 999])
def test_a_table_that_is_no_permutation_is_refused(tmp_path, value):
    """One channel twice and another lost would give a wrong model without a word."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    save_checkpoint(tmp_path / "model", build_model("llama"), torch.float32)
    _, recipe = plan(tmp_path / "model", PermutationSettings(fold=ALL_FOLDS, order="max_abs_weight"))
    path = tmp_path / "permutation.safetensors"
    recipe.permutation.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    table = tensors["global_perm_idx"]
    table[1] = table[0] if value == 0 else value
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(
        ValueError, match=r"permutation\.safetensors: the order intermediate\.0 is no permutation of 128"
    ):
        Permutation.load(path)


def test_width_scope_keeps_one_order_per_width(tmp_path):
    save_checkpoint(tmp_path, build_model("llama"))
    _, recipe = plan(tmp_path, PermutationSettings(scope="width", fold=()))
    assert sorted(recipe.permutation.orders) == ["width.128", "width.64"]


@pytest.mark.parametrize(
    ("width", "expected"), [(1, 1), (7, 1), (50, 1), (64, 1), (99, 1), (100, 1), (129, 2), (260, 3), (4096, 41)]
)
def test_one_percent_is_rounded_up(width, expected):
    assert outlier_count(width, PermutationSettings()) == expected


def test_outlier_counts_at_the_ends():
    assert outlier_count(64, PermutationSettings(outlier_fraction=0)) == 0
    assert outlier_count(64, PermutationSettings(outlier_fraction=1)) == 64
    assert outlier_count(64, PermutationSettings(minimum_outliers=16)) == 16
    assert outlier_count(7, PermutationSettings(minimum_outliers=16)) == 7
    assert outlier_count(100, PermutationSettings(outlier_fraction=0.07)) == 7, "0.07 * 100 is 7.000000000000001"


@given(
    st.integers(1, 80).flatmap(
        lambda size: st.tuples(
            st.lists(st.integers(0, 5), min_size=size, max_size=size),
            st.lists(st.integers(0, 5), min_size=size, max_size=size),
            st.integers(0, size),
            st.sampled_from(["natural", "max_abs_weight", "importance"]),
        )
    )
)
def test_channel_order_is_a_permutation_with_the_most_important_first(case):
    importance, largest, count, order = case
    importance, largest = torch.tensor(importance, dtype=torch.float64), torch.tensor(largest, dtype=torch.float32)
    result = channel_order(importance, largest, count, order)
    assert sorted(result.tolist()) == list(range(len(importance)))
    chosen, rest = result[:count], result[count:]
    if 0 < count < len(result):
        assert importance[chosen].min() >= importance[rest].max()
    keys = {"natural": -rest, "max_abs_weight": largest[rest], "importance": importance[rest]}[order]
    pairs = list(zip((-keys).tolist(), rest.tolist(), strict=True))
    assert pairs == sorted(pairs), "falling key, lower index first among equals"


def test_equal_importance_takes_the_lowest_channels():
    assert channel_order(torch.ones(8), torch.ones(8), 3, "natural").tolist() == list(range(8))


def test_unseen_inputs_are_ranked_by_weight_alone():
    stats = ChannelStatistics(torch.zeros(4).double(), torch.tensor([1.0, 3.0, 2.0, 2.0]).double(), torch.ones(4))
    assert stats.importance().argsort(descending=True, stable=True).tolist() == [1, 2, 3, 0]
    nothing = ChannelStatistics(torch.zeros(4).double(), torch.zeros(4).double(), torch.zeros(4))
    assert torch.isfinite(nothing.importance()).all()


def test_a_profile_with_nan_is_refused_by_name(tmp_path):
    save_checkpoint(tmp_path, build_model("llama"))
    checkpoint, recipe = plan(tmp_path, PermutationSettings())
    weights = weight_statistics(checkpoint, recipe.family, recipe.geometry)
    statistics = channel_statistics(recipe.statistics, weights)
    bad = statistics["model.layers.1.mlp_hidden"]
    correct = bad.abs_activation[3].item()
    bad.abs_activation[3] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp_hidden holds NaN"):
        plan_permutation(recipe.family, recipe.geometry, statistics, PermutationSettings())
    bad.abs_activation[3] = correct
    del statistics[HEAD_INPUT]
    with pytest.raises(ValueError, match="no statistics for head_input"):
        plan_permutation(recipe.family, recipe.geometry, statistics, PermutationSettings())
