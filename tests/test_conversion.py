"""Converted folders: what is stored, that they load, and that they compute what an independent dequantisation does."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import otf_llm
from otf_llm import conversion
from otf_llm.artifact import merge
from otf_llm.artifact_format import load_manifest, shard_name, verify_files
from otf_llm.calibration import calibrate
from otf_llm.checkpoint import Checkpoint, build_manifest
from otf_llm.conversion import Recipe, convert_shard
from otf_llm.decoder import read_config, tensor_role
from otf_llm.families import find_family
from otf_llm.inspection import inspect_checkpoint, language_model
from otf_llm.layerwise import LayerwiseModel
from otf_llm.modules import Int4Linear, Int8Embedding, Int8TiedHead
from otf_llm.permutation import channel_statistics, plan_permutation
from otf_llm.settings import PermutationSettings, SchemeSettings
from otf_llm.weight_statistics import weight_statistics
from test_layerwise import ROPE, edit_config
from tiny import build_model, logits_of, save_checkpoint

assert otf_llm.__version__


def convert(source, folder, scheme):
    """The convert stage on a small checkpoint; returns the recipe and the manifest."""
    opened = Checkpoint.open(source)
    inspect_checkpoint(opened)
    checkpoint = language_model(opened)
    family, geometry = read_config(checkpoint.config)
    permutation = statistics = None
    if scheme.needs_calibration:
        ids = list(torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1)))
        statistics = calibrate(LayerwiseModel(checkpoint, family), geometry, ids, 2)
        channels = channel_statistics(statistics, weight_statistics(checkpoint, family, geometry))
        permutation = plan_permutation(family, geometry, channels, scheme.permutation)
    recipe = Recipe(family, geometry, scheme, permutation, statistics)
    names = [shard_name(index, len(checkpoint.shards)) for index in range(len(checkpoint.shards))]
    reports = [
        convert_shard(checkpoint, [shard], recipe, folder / name)
        for shard, name in zip(checkpoint.shards, names, strict=True)
    ]
    return recipe, merge(checkpoint, recipe, folder, names, reports, build_manifest(opened, family.name, False))


def dense_logits(source, folder, recipe, tokens):
    """Logits of the source model with its weights replaced by an independent dequantisation of the stored tensors."""
    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if recipe.head == "int4":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, module in model.named_modules():
        weight = dense_weight(name, stored, recipe)
        if weight is not None:
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if name.endswith(".experts"):  # transformers' own module: gate above up of every expert, and down
            for expert in range(module.num_experts):
                parts = [
                    dense_weight(f"{name}.{expert}.{part}_proj", stored, recipe) for part in ("gate", "up", "down")
                ]
                if parts[0] is not None:
                    module.gate_up_proj.data[expert] = torch.cat(parts[:2])
                    module.down_proj.data[expert] = parts[2]
    if recipe.head == "tied":
        model.lm_head.weight = model.get_input_embeddings().weight
    return logits_of(model, tokens)


def dense_weight(name, stored, recipe):
    """A source-ordered float32 weight from stored codes, written as loops over nibbles and groups."""
    if f"{name}.codes" not in stored:
        return None
    codes, scales = stored[f"{name}.codes"], stored[f"{name}.scales"].float()
    if codes.dtype == torch.int8:
        weight = codes.float() * scales[:, None]
        order = recipe.permutation.residual() if recipe.permutation else None
        rows = None
    else:
        role = tensor_role(recipe.family, f"{name}.weight")
        input_order = recipe.permutation.inputs[recipe.input_of(role)]
        columns = input_order.in_features - input_order.num_outliers
        background = torch.empty(codes.shape[0], columns)
        for column in range(columns):
            nibble = (codes[:, column // 2] >> (4 * (column % 2))) & 15
            group = column // recipe.scheme.group_size if recipe.scheme.group_size else 0
            background[:, column] = (nibble.float() - 8) * scales[:, group]
        weight = torch.cat([stored[f"{name}.outliers"].float(), background], dim=1)
        order, rows = recipe.permutation.columns(recipe.input_of(role)), recipe.permutation.rows(role)
    if order is not None:
        weight = weight[:, torch.argsort(order)]
    return weight if rows is None else weight[torch.argsort(rows)]


UP = "model.layers.1.mlp.up_proj"
FOLDS = ("residual", "intermediate", "value")
LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
SCHEMES = {
    "default": SchemeSettings(),
    "naive": SchemeSettings(group_size=0, scale_search=False),
    "folded": SchemeSettings(
        group_size=32, permutation=PermutationSettings(fold=("residual", "intermediate", "value"))
    ),
    "per-width": SchemeSettings(permutation=PermutationSettings(scope="width", fold=())),
    "no-outliers": SchemeSettings(permutation=PermutationSettings(outlier_fraction=0)),
    "head": SchemeSettings(lm_head="int4"),
    "embedding-only": SchemeSettings(weights="keep"),
    "nothing": SchemeSettings(weights="keep", embedding="keep"),
    "head-only": SchemeSettings(weights="keep", embedding="keep", lm_head="int4"),
    "head-kept": SchemeSettings(lm_head="keep"),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_loaded_folder_computes_what_its_stored_tensors_say(tmp_path, tokens, name, tied):
    source = save_checkpoint(tmp_path / "source", build_model("llama", tie_word_embeddings=tied))
    recipe, manifest = convert(source, tmp_path / "out", SCHEMES[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    if name != "folded":  # a folded residual stream stays permuted, its logits do not
        assert model.get_input_embeddings()(tokens).shape == (2, 40, 64)
    # Relative to the largest logit: sums of 128 float32 products in another order.
    assert (logits_of(model, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    verify_files(tmp_path / "out")
    assert sum(e["size_bytes"] for e in manifest["files"] if e["name"] in manifest["weight_files"]) == sum(
        path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")
    )


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "qwen3_5"])
def test_every_family_converts_and_loads(tmp_path, tokens, family):
    source = save_checkpoint(tmp_path / "source", build_model(family, tie_word_embeddings=family == "gemma3"))
    recipe, _ = convert(source, tmp_path / "out", SCHEMES["folded"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits_of(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_modules_and_dtypes_of_a_loaded_folder(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama", tie_word_embeddings=True))
    convert(source, tmp_path / "out", SchemeSettings())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    linear = model.model.layers[0].mlp.down_proj
    assert isinstance(linear, Int4Linear)
    assert linear.perm is None, "the intermediate axis is folded"
    assert model.model.layers[0].mlp.up_proj.perm.dtype == torch.int16
    assert (linear.codes.dtype, linear.scales.dtype, linear.outliers.dtype) == (
        torch.uint8,
        torch.float16,
        torch.float16,
    )
    assert isinstance(model.get_input_embeddings(), Int8Embedding)
    assert isinstance(model.lm_head, Int8TiedHead)
    ids = torch.tensor([[1, 2, 3]])
    assert model(input_ids=ids).logits.dtype == torch.bfloat16
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > 3


def test_shards_and_single_file_give_the_same_tensors(tmp_path, tokens):
    model = build_model("llama", tie_word_embeddings=False)
    one = save_checkpoint(tmp_path / "one", model)
    many = save_checkpoint(tmp_path / "many", model, max_shard_size="60KB")
    assert len(Checkpoint.open(many).shards) > 2
    logits = []
    for source in (one, many):
        convert(source, source / "out", SchemeSettings())
        loaded = AutoModelForCausalLM.from_pretrained(source / "out", dtype=torch.float32).eval()
        logits.append(logits_of(loaded, tokens))
    assert torch.equal(*logits)


def test_two_conversions_are_byte_identical(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    for name in ("a", "b"):
        convert(source, tmp_path / name, SchemeSettings())
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "manifest.json" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("name", ["default", "folded", "naive", "embedding-only"])
def test_neither_threads_nor_shards_together_change_what_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setattr(conversion, "BLOCK_ELEMENTS", 500)  # many blocks of every tensor
    source = save_checkpoint(tmp_path / "source", build_model("llama"), max_shard_size="60KB")
    recipe, _ = convert(source, tmp_path / "one-by-one", SCHEMES[name])
    checkpoint = Checkpoint.open(source)
    reports = [
        convert_shard(checkpoint, checkpoint.shards, recipe, tmp_path / f"{workers}.safetensors", workers=workers)
        for workers in (1, 4)
    ]
    assert reports[0] == reports[1]
    together, expected = load_file(tmp_path / "4.safetensors"), {}
    for path in (tmp_path / "one-by-one").glob("model-*.safetensors"):
        expected |= load_file(path)
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[key], expected[key]) for key in expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_quantises_as_well_as_a_cpu(tmp_path):
    """Sums come in another order there, so that a scale between two candidates may fall to the other one."""
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    recipe, _ = convert(source, tmp_path / "out", SchemeSettings())
    checkpoint = Checkpoint.open(source)
    reports = {
        device: convert_shard(checkpoint, checkpoint.shards, recipe, tmp_path / device, device=device, workers=2)
        for device in ("cpu", "cuda")
    }
    for on_cpu, on_gpu in zip(reports["cpu"]["tensors"], reports["cuda"]["tensors"], strict=True):
        assert on_gpu.get("relative_error") == pytest.approx(on_cpu.get("relative_error"), rel=1e-4), on_cpu["tensor"]
        assert on_gpu["outputs"] == on_cpu["outputs"]


def test_untouched_tensors_keep_their_bits(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("qwen2"))
    convert(source, tmp_path / "out", SchemeSettings())
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / shard_name(0, 1))
    kept = [name for name in before if name.endswith(("norm.weight", "bias"))]
    assert len(kept) == 5 + 6
    for name in kept:
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(before[name], after[name]), name


def test_side_files_are_carried_and_missing_ones_listed(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "special_tokens_map.json").write_text("{}")
    (source / "modeling_custom.py").write_text("# custom")
    (source / "generation_config.json").unlink()
    _, manifest = convert(source, tmp_path / "out", SchemeSettings())
    for name in ("chat_template.jinja", "special_tokens_map.json", "modeling_custom.py", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert manifest["missing_side_files"] == ["generation_config.json"]


def test_config_states_the_method_and_keeps_the_rest(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
    source = save_checkpoint(tmp_path / "source", build_model("llama", tie_word_embeddings=True, rope_parameters=rope))
    convert(source, tmp_path / "out", SchemeSettings())
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after.pop("quantization_config")["quant_method"] == "otf"
    assert after.pop("tie_word_embeddings") is False
    assert before.pop("tie_word_embeddings") is True
    assert before == after


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.scales", "global_perm_idx", "model.embed_tokens.codes", "model.norm.weight"]
)
def test_an_artifact_without_a_tensor_is_refused_by_name(tmp_path, name):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    convert(source, tmp_path / "out", SchemeSettings())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    path = tmp_path / "out" / index["weight_map"][name]
    tensors = load_file(path)
    tensors[f"{name}.renamed"] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks 1 tensors: {name}"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match=f"changed since conversion: {path.name}"):
        verify_files(tmp_path / "out")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda entry: entry.update(group_size=34), "group_size is 34, but the scheme's is 64"),
        (lambda entry: entry["linears"].update({UP: [60, 1, 0]}), f"says of {UP}: 60 input channels"),
        (lambda entry: entry["linears"].update({UP: [64, 65, 0]}), f"says of {UP}: 64 input channels, 65 of them"),
        (lambda entry: entry["linears"].update({UP: [64, 1, 1]}), f"no permutation of {UP}'s 64 channels at 1"),
        (lambda entry: entry["linears"].update({UP: [64, 1, -70]}), f"no permutation of {UP}'s 64 channels at -70"),
    ],
)
def test_an_artifact_whose_configuration_was_edited_is_refused(tmp_path, edit, message):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    convert(source, tmp_path / "out", SchemeSettings())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    edit(config["quantization_config"])
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.extra", "model.norm.scales", "lm_head.zeros", "adapter.a"]
)
def test_an_artifact_with_a_tensor_of_no_module_is_refused_by_name(tmp_path, name):
    """LOD-01: what a loader has no slot for is not passed over."""
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    convert(source, tmp_path / "out", SchemeSettings())
    path = tmp_path / "out" / shard_name(0, 1)
    save_file(load_file(path) | {name: torch.zeros(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"holds 1 tensors of no module: {name}"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("variant", ROPE)
def test_rotary_embeddings_of_an_artifact_at_position_100(tmp_path, variant):
    """CNV-46: its configuration says of the rotary embedding all that the source's does."""
    ids = torch.randint(0, 256, (1, 104), generator=torch.Generator().manual_seed(3))
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    edit_config(source, ["rope_parameters", "rope_theta", "rope_scaling"], **ROPE[variant])
    recipe, _ = convert(source, tmp_path / "out", SchemeSettings())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, ids)
    assert (logits_of(loaded, ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    edit_config(tmp_path / "out", ["rope_parameters", "rope_theta", "rope_scaling"], rope_theta=10000.0)
    lost = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert (logits_of(lost, ids) - expected)[0, 100].abs().max() > 1e-3, "losing it would be noticed"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("first", [0, 1, 28])
def test_sliding_windows_of_an_artifact(tmp_path, tokens, family, flag, first):
    """CNV-47: window 8, sequences of 40; flag and max_window_layers decide in every combination as in the source."""
    source = save_checkpoint(tmp_path / "source", build_model(family))
    settings = {"sliding_window": 8, "max_window_layers": first} | (
        {} if flag is None else {"use_sliding_window": flag}
    )
    edit_config(source, ["layer_types", "use_sliding_window"], **settings)
    recipe, _ = convert(source, tmp_path / "out", SchemeSettings())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits_of(loaded, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_an_artifact_of_another_format_is_refused(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    convert(source, tmp_path / "out", SchemeSettings())
    for name, place in (("config.json", "quantization_config"), ("manifest.json", None)):
        values = json.loads((tmp_path / "out" / name).read_text())
        (values if place is None else values[place])["format_version"] = 99
        (tmp_path / "out" / name).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="format version 99"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="format version 99"):
        load_manifest(tmp_path / "out")


def test_values_beyond_fp16_stay_finite(tmp_path, tokens):
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 5] = 70144.0  # in BF16's range, beyond FP16's
        model.model.layers[0].mlp.down_proj.weight[1:, 5] = 1000.0  # so that column 5 is an outlier
    source = save_checkpoint(tmp_path / "source", model)
    convert(source, tmp_path / "out", SchemeSettings())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["bf16_outliers"] == ["model.layers.0.mlp.down_proj"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert loaded.model.layers[0].mlp.down_proj.outliers.max() == 70144.0
    assert torch.isfinite(logits_of(loaded, tokens)).all()


def test_norms_and_biases_beyond_fp16_are_carried_as_they_are(tmp_path):
    """CNV-12: neither is stored in FP16."""
    model = build_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 70144.0
        model.model.layers[1].self_attn.q_proj.bias[2] = 1e5
    source = save_checkpoint(tmp_path / "source", model)
    convert(source, tmp_path / "out", SchemeSettings())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name in ("layers.0.input_layernorm.weight", "layers.1.self_attn.q_proj.bias"):
        stored = loaded.model.get_parameter(name)
        assert torch.equal(stored, before.model.get_parameter(name))
        assert stored.max() > torch.finfo(torch.float16).max


def test_tying_a_head_that_is_not_tied_is_refused(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    with pytest.raises(ValueError, match="not tied to its embedding"):
        convert(source, tmp_path / "out", SchemeSettings(lm_head="tied"))


def test_a_head_that_contradicts_the_tie_is_refused(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama", tie_word_embeddings=True))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="both are stored and differ"):
        inspect_checkpoint(Checkpoint.open(source))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    _, manifest = convert(source, tmp_path / "out", SchemeSettings())
    assert [row["action"] for row in manifest["tensors"] if row.get("tensor") == "lm_head.weight"] == ["dropped"]


def test_tensors_outside_the_table_are_carried_and_said_so(tmp_path, caplog):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    tensors = load_file(source / "model.safetensors")
    tensors |= {
        "mtp.fc.weight": torch.randn(64, 128),
        "mtp.norm.weight": torch.randn(64),
        "adapter.weight": torch.ones(64),
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    _, manifest = convert(source, tmp_path / "out", SchemeSettings())
    assert "3 tensors are not in the llama table" in caplog.text
    after = load_file(tmp_path / "out" / shard_name(0, 1))
    for name in ("mtp.fc.weight", "mtp.norm.weight", "adapter.weight"):
        assert torch.equal(after[name], tensors[name])
    reasons = {row["tensor"]: row.get("reason") for row in manifest["tensors"] if row.get("tensor")}
    assert reasons["adapter.weight"] == "not in the family's table"


def test_the_default_head_of_an_untied_model_is_int4(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    recipe, _ = convert(source, tmp_path / "out", SchemeSettings())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model.lm_head, Int4Linear)
    assert model.lm_head.out_features == 260
    assert find_family(json.loads((tmp_path / "out" / "config.json").read_text())) == recipe.family


KEEPS = {
    "a-name": (["model.layers.1.mlp.down_proj"], {"model.layers.1.mlp.down_proj"}),
    "one-layer-of-twelve": (["model.layers.1.*"], {f"model.layers.1.{path}" for path in LINEARS}),
    "an-expression": (["re:.*mlp.*"], {f"model.layers.{i}.{path}" for i in range(12) for path in LINEARS[4:]}),
    "the-head": (["lm_head"], {"lm_head"}),
    "two": (["lm_head", "*.3.self_attn.[qk]_proj"], {"lm_head", *(f"model.layers.3.{path}" for path in LINEARS[:2])}),
}


@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("tied", [False, True])
def test_linears_that_are_to_be_kept_are_kept(tmp_path, tokens, name, tied):
    """CNV-24: patterns match whole names, so that layer 1 is not also 10 and 11."""
    patterns, kept = KEEPS[name]
    source = save_checkpoint(tmp_path / "source", build_model("llama", num_hidden_layers=12, tie_word_embeddings=tied))
    scheme = SchemeSettings(keep=patterns, permutation=PermutationSettings(fold=FOLDS, order="max_abs_weight"))
    recipe, manifest = convert(source, tmp_path / "out", scheme)
    rows = [row for row in manifest["tensors"] if (row.get("reason") or "").startswith("keep: ")]
    assert {next(iter(row["outputs"])).removesuffix(".weight") for row in rows} == kept
    assert {row["reason"].removeprefix("keep: ") for row in rows} == set(patterns)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert not kept & set(config["linears"])
    assert len(config["linears"]) == 12 * 7 + (not tied) - len(kept - ({"lm_head"} if tied else set()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits_of(loaded, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layers.1."], r"keep: 'layers\.1\.' matches no linear; names are whole, such as model\.layers\.0\.self_attn"),
        (["re:mlp"], "keep: 're:mlp' matches no linear"),
        (["lm_head", "model.norm"], "keep: 'model.norm' matches no linear"),
        (["re:["], r"keep: 're:\[' is no regular expression"),
        (["re:a{99999999999999999999}"], r"keep: 're:a\{9+\}' is no regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(tmp_path, patterns, message):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    with pytest.raises(ValueError, match=message):
        Recipe.load(Checkpoint.open(source), SchemeSettings(weights="keep", keep=patterns), [])


def test_a_head_that_is_to_be_kept_and_not_is_refused(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    scheme = SchemeSettings(keep=["lm_*"], lm_head="int4")
    with pytest.raises(ValueError, match="keep: 'lm_\\*' matches the head, but lm_head is int4"):
        convert(source, tmp_path / "out", scheme)


@pytest.mark.parametrize(("hidden", "intermediate"), [(48, 96), (40, 72), (64, 129), (260, 7)])
def test_widths_that_no_group_divides(tmp_path, tokens, hidden, intermediate):
    model = build_model("llama", hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=4)
    source = save_checkpoint(tmp_path / "source", model)
    recipe, _ = convert(source, tmp_path / "out", SchemeSettings(group_size=64))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits_of(loaded, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [257, 260])
def test_logits_have_a_column_per_token_and_no_more(tmp_path, tokens, vocabulary, tied):
    """CNV-26: no padding row of a head may win."""
    model = build_model("llama", vocab_size=vocabulary, tie_word_embeddings=tied, pad_token_id=None, eos_token_id=255)
    source = save_checkpoint(tmp_path / "source", model)
    recipe, _ = convert(source, tmp_path / "out", SchemeSettings(lm_head="int4"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    logits = logits_of(loaded, tokens)
    assert logits.shape[-1] == vocabulary
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_tied_matrix_that_both_ends_keep_stays_tied(tmp_path, tokens):
    source = save_checkpoint(tmp_path / "source", build_model("llama", tie_word_embeddings=True))
    scheme = SchemeSettings(embedding="keep", lm_head="keep")
    recipe, _ = convert(source, tmp_path / "out", scheme)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32) for _ in range(2))
    expected = dense_logits(source, tmp_path / "out", recipe, tokens)
    assert (logits_of(first, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_shards_of_two_recipes_are_never_put_together(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    recipe, _ = convert(source, tmp_path / "out", SchemeSettings())
    checkpoint = Checkpoint.open(source)
    report = convert_shard(checkpoint, ["model.safetensors"], recipe, tmp_path / "out" / shard_name(0, 1))
    manifest = build_manifest(checkpoint, "llama", False)
    other = dataclasses.replace(recipe, digest="another")
    with pytest.raises(ValueError, match=r"was converted with other settings"):
        merge(checkpoint, other, tmp_path / "out", [shard_name(0, 1)], [report], manifest)
    (tmp_path / "out" / shard_name(0, 1)).write_bytes(b"half")
    with pytest.raises(ValueError, match=r"has changed since it was converted"):
        merge(checkpoint, recipe, tmp_path / "out", [shard_name(0, 1)], [report], manifest)


def test_side_files_of_another_time_go_and_named_templates_come(tmp_path):
    source = save_checkpoint(tmp_path / "source", build_model("llama"))
    (source / "manifest.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").write_text("stale")
    _, manifest = convert(source, tmp_path / "out", SchemeSettings())
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").read_text() == "{{ tools }}"
    assert load_manifest(tmp_path / "out") == manifest
    verify_files(tmp_path / "out")
