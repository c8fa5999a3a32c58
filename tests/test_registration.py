"""How transformers comes to know converted folders: what an import costs, and what loads, in whichever order."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from otf_llm.artifact_format import FORMAT_VERSION
from otf_llm.modules import packed_modules
from otf_llm.registration import OtfConfig
from otf_llm.settings import SchemeSettings
from test_conversion import SCHEMES, convert
from tiny import build_model, logits_of, save_checkpoint

IDS = torch.arange(3, 27)[None]


def converted(folder, scheme=SCHEMES["default"], family="llama", **overrides):
    convert(save_checkpoint(folder / "source", build_model(family, **overrides)), folder / "out", scheme)
    return folder / "out"


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


# Imports


def test_importing_the_library_alone_imports_nothing_heavy():
    done = python(
        "import sys, otf_llm\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'huggingface_hub', 'triton', 'safetensors'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


ORDERS = {
    "library-first": "import otf_llm; from transformers import AutoModelForCausalLM",
    "transformers-first": "from transformers import AutoModelForCausalLM; import otf_llm",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_folder_loads_after_the_one_import_in_any_order(tmp_path, order):
    folder = converted(tmp_path)
    code = (
        f"{ORDERS[order]}\n"
        "import sys, torch\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype=torch.float32).eval()\n"
        "with torch.no_grad():\n"
        "    logits = model(input_ids=torch.arange(3, 27)[None], use_cache=False).logits\n"
        "print(type(model).__name__, logits.double().abs().sum().item())\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    name, total = done.stdout.split()
    expected = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), IDS)
    assert name == "LlamaForCausalLM"
    assert float(total) == pytest.approx(expected.double().abs().sum().item(), rel=1e-6)


# What loads


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_a_bare_decoder_loads_and_gives_the_same_states(tmp_path, name, tied):
    folder = converted(tmp_path, SCHEMES[name], tie_word_embeddings=tied)
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bare = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(bare).__name__ == "LlamaModel"
    expected = causal.base_model(input_ids=IDS).last_hidden_state
    assert torch.equal(bare(input_ids=IDS).last_hidden_state, expected)
    inner = {f"model.{module_name}" for module_name, _ in packed_modules(bare)}
    assert inner == {module_name for module_name, _ in packed_modules(causal)} - {"lm_head"}


@torch.no_grad()
def test_a_scaled_embedding_loads_bare_too(tmp_path):
    folder = converted(tmp_path, family="gemma3")
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bare = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(bare(input_ids=IDS).last_hidden_state, causal.base_model(input_ids=IDS).last_hidden_state)


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"dtype": "auto"}, {"attn_implementation": "eager"}])
def test_common_options_of_from_pretrained(tmp_path, options):
    folder = converted(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, **({"dtype": torch.float32} | options)).eval()
    expected = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), IDS)
    tolerance = 0.05 if options.get("dtype") == "auto" else 1e-5  # auto is BF16, 8 bits of mantissa
    assert (logits_of(model, IDS) - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_loaded_model_says_that_it_is_quantised_and_not_for_training(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted(tmp_path))
    assert model.is_quantized
    assert model.config.quantization_config.quant_method == "otf"
    assert not model.hf_quantizer.is_trainable
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "proj" in name)
    packed = sum(buffer.nbytes for _, module in packed_modules(model) for buffer in module.buffers(recurse=False))
    dense = sum(parameter.nbytes for parameter in build_model().to(torch.bfloat16).parameters())
    assert packed < 0.5 * dense


# Saving


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel])
def test_saving_a_packed_model_is_refused_and_leaves_nothing(tmp_path, kind):
    model = kind.from_pretrained(converted(tmp_path))
    with pytest.raises(ValueError, match="quantized with otf and is not serializable"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_model_with_nothing_packed_saves_as_any_other(tmp_path):
    folder = converted(tmp_path, SCHEMES["nothing"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_a_packed_model_keeps_what_is_stored(tmp_path, dtype):
    """Scales and FP16 columns are part of the format: a cast of the model must not round them to another dtype."""
    folder = converted(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.to(dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    compared = 0
    for (name, cast), (_, expected) in zip(packed_modules(model), packed_modules(loaded), strict=True):
        for key in getattr(cast, "stored", ()):
            assert getattr(cast, key).dtype == getattr(expected, key).dtype, name
            assert torch.equal(getattr(cast, key), getattr(expected, key)), name
            compared += 1
    assert compared > 10
    assert model.get_input_embeddings()(IDS).dtype == dtype
    assert torch.equal(model.get_input_embeddings()(IDS), loaded.get_input_embeddings()(IDS))
    assert model(input_ids=IDS).logits.dtype == dtype


# The configuration's entry


def test_the_entry_survives_a_round_trip(tmp_path):
    folder = converted(tmp_path, SCHEMES["folded"])
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = AutoConfig.from_pretrained(folder)
    entry = config.quantization_config
    entry = entry if isinstance(entry, dict) else entry.to_dict()
    assert {key: entry[key] for key in stored} == stored
    assert OtfConfig(**stored).to_dict() == stored
    assert SchemeSettings.from_dict(stored["scheme"]) == SCHEMES["folded"]


def test_defaults_of_the_entry():
    entry = OtfConfig()
    assert (entry.quant_method, entry.format_version) == ("otf", FORMAT_VERSION)
    assert (entry.linears, entry.bf16_outliers, entry.permutation_length) == ({}, [], 0)
    for version in (0, FORMAT_VERSION + 1, "1", None):
        with pytest.raises(ValueError, match=rf"version {version}, this otf_llm reads version {FORMAT_VERSION}"):
            OtfConfig(format_version=version)


def test_a_configuration_that_lists_a_module_the_model_lacks(tmp_path):
    folder = converted(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["linears"]["model.layers.7.mlp.up_proj"] = [64, 1, None]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.layers\.7\.mlp\.up_proj, which this LlamaForCausalLM does not have"):
        AutoModelForCausalLM.from_pretrained(folder)
