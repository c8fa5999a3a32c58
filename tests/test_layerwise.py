"""One layer at a time: the same states as transformers' own forward, with one layer in memory."""

import json

import pytest
import torch
from torch import nn

from otf_llm.checkpoint import Checkpoint
from otf_llm.families import find_family
from otf_llm.inspection import language_model
from otf_llm.layerwise import LayerwiseModel
from tiny import FAMILIES, VOCAB, build_model, save_checkpoint

LENGTH = 40  # tokens, more than any sliding window here

# Float32 sums taken in another order; states after the final norm are of the order of 1.
TOLERANCE = 1e-5


def open_layerwise(folder, **options):
    checkpoint = language_model(Checkpoint.open(folder))
    return LayerwiseModel(checkpoint, find_family(checkpoint.config), **options)


def saved(folder, family="llama", **overrides):
    return save_checkpoint(folder, build_model(family, **overrides), torch.float32, tokenizer=False)


def edit_config(folder, remove=(), **values):
    config = json.loads((folder / "config.json").read_text())
    for key in remove:
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | values))


@torch.no_grad()
def expected_states(folder, ids, **options):
    """Last hidden states [B, T, H] of the folder as transformers loads and runs it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state


def layerwise_states(folder, ids, batch_size=2, **options):
    model = open_layerwise(folder, **options)
    batches = model.prepare(list(ids), batch_size)
    model.run(batches)
    return torch.cat([batch.hidden for batch in batches])


def assert_same_states(folder, ids):
    expected = expected_states(folder, ids)
    assert expected.abs().max() > 0.5
    assert (layerwise_states(folder, ids) - expected).abs().max() <= TOLERANCE
    return expected


@pytest.mark.parametrize("family", FAMILIES)
def test_states_equal_transformers_for_every_family(tmp_path, tokens, family):
    assert_same_states(saved(tmp_path, family), tokens)


def test_gemma3_with_sliding_and_full_layers(tmp_path, tokens):
    """Its two kinds of layers have masks and rotary bases of their own, and its embedding is scaled."""
    states = {}
    for kinds in (["sliding_attention", "full_attention"], ["full_attention"] * 2):
        folder = saved(tmp_path / kinds[0], "gemma3", layer_types=kinds, sliding_window=16)
        states[kinds[0]] = assert_same_states(folder, tokens)
    assert (states["sliding_attention"] - states["full_attention"]).abs().max() > 1e-2, "the window matters here"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_slides_where_transformers_says(tmp_path, tokens, family):
    """CNV-47: a window is declared throughout; the flag and max_window_layers decide which layers obey it."""
    folder = saved(tmp_path, family)
    states = {}
    for flag in (True, False, None):
        for first in (0, 1, 2):
            layers = {"sliding_window": 8, "max_window_layers": first}
            edit_config(folder, ["layer_types", "use_sliding_window"], **layers)
            if flag is not None:
                edit_config(folder, use_sliding_window=flag)
            states[flag, first] = assert_same_states(folder, tokens)
    full = states[False, 0]
    for case in ((False, 1), (False, 2), (None, 0), (None, 1), (None, 2), (True, 2)):
        assert torch.equal(states[case], full), f"{case} slides nowhere"
    for one, other in (((True, 0), (False, 0)), ((True, 1), (False, 0)), ((True, 0), (True, 1))):
        assert (states[one] - states[other]).abs().max() > 1e-2, f"{one} and {other} differ"


def test_mistral_slides_in_every_layer(tmp_path, tokens):
    windowed = assert_same_states(saved(tmp_path / "windowed", "mistral", sliding_window=8), tokens)
    full = assert_same_states(saved(tmp_path / "full", "mistral", sliding_window=None), tokens)
    assert torch.allclose(windowed[:, :8], full[:, :8], atol=TOLERANCE)
    assert (windowed[:, 20:] - full[:, 20:]).abs().max() > 1e-2


ROPE = {
    "top-level-theta": {"rope_theta": 500000.0},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "older-name": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 10000.0},
}


@pytest.mark.parametrize("variant", ROPE)
def test_rope_variants_at_position_100(tmp_path, variant):
    """CNV-46: the base and the scaling of the rotary embedding reach the layers wherever config.json keeps them."""
    ids = torch.randint(0, 256, (1, 104), generator=torch.Generator().manual_seed(3))
    folder = saved(tmp_path)
    plain = expected_states(folder, ids)[0, 100]
    edit_config(folder, ["rope_parameters", "rope_theta", "rope_scaling"], **ROPE[variant])
    expected = assert_same_states(folder, ids)[0, 100]
    assert (expected - plain).abs().max() > 1e-3, "the variant is not the default"


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_and_batches_leave_every_state_as_it_was(tmp_path, family, padding_side):
    folder = saved(tmp_path, family)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 256, (length,), generator=generator) for length in (9, 31, 1, 24, 20)]
    model = open_layerwise(folder)
    batches = model.prepare(sequences, 3, padding_side)
    assert [tuple(batch.real.shape) for batch in batches] == [(3, 31), (2, 24)]
    short = batches[0].real[0].tolist()
    assert short == ([False] * 22 + [True] * 9 if padding_side == "left" else [True] * 9 + [False] * 22)
    model.run(batches)
    rows = [states[real] for batch in batches for states, real in zip(batch.hidden, batch.real, strict=True)]
    for sequence, states in zip(sequences, rows, strict=True):
        assert (states - expected_states(folder, sequence[None])[0]).abs().max() <= TOLERANCE


def test_states_do_not_depend_on_shards_or_stored_dtype(tmp_path, tokens):
    model = build_model("llama").to(torch.bfloat16)
    one = save_checkpoint(tmp_path / "one", model, tokenizer=False)
    many = save_checkpoint(tmp_path / "many", model, tokenizer=False, max_shard_size="40KB")
    wide = save_checkpoint(tmp_path / "wide", model, torch.float32, tokenizer=False)
    assert len(Checkpoint.open(many).shards) > 3
    states = [layerwise_states(folder, tokens) for folder in (one, many, wide)]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def placed(module):
    """Names of the parameters of a module that hold data."""
    return {name for name, parameter in module.named_parameters() if not parameter.is_meta}


def test_a_value_that_transformers_cannot_use_is_told_with_the_file(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, hidden_act="nonsense")
    with pytest.raises(ValueError, match=r"config\.json: transformers makes no model of it: KeyError: 'nonsense'"):
        open_layerwise(tmp_path)


def test_one_layer_is_in_memory_at_a_time(tmp_path, tokens):
    model = open_layerwise(saved(tmp_path, num_hidden_layers=3))
    assert placed(model.model) == set(), "building the model allocates no weight"
    batches = model.prepare(list(tokens), 1)
    assert placed(model.model) == {"model.embed_tokens.weight"}
    assert len(model.model.get_input_embeddings().weight) == len(tokens.unique()), "only the rows in use"
    seen = []

    def watch(index, layer, batch):
        assert layer is model.layers[index]
        seen.append((index, next(i for i, b in enumerate(batches) if b is batch)))
        elsewhere = placed(model.model) - {f"model.layers.{index}.{name}" for name, _ in layer.named_parameters()}
        assert elsewhere == {"model.embed_tokens.weight"}
        assert len(placed(layer)) == 9
        return torch.no_grad()

    model.run(batches, watch)
    assert seen == [(layer, batch) for layer in range(3) for batch in range(2)], "each layer is read once"
    assert placed(model.model) == {"model.embed_tokens.weight", "model.norm.weight"}


def test_the_decoder_is_whole_again_after_preparing(tmp_path, tokens):
    model = open_layerwise(saved(tmp_path))
    batches = model.prepare(list(tokens), 2)
    assert model.decoder.layers is model.layers
    assert isinstance(model.layers, nn.ModuleList)
    assert type(model.decoder.norm).__name__ == "LlamaRMSNorm"
    assert len(batches[0].arguments) == 2
    first = layerwise_states(tmp_path, tokens)
    for batch in (batches, model.prepare(list(tokens), 2)):  # a model may be used again
        model.run(batch)
        assert torch.equal(batch[0].hidden, first)


def overflowing_checkpoint(folder):
    """CAL-12: every weight is far below FP16's 65504, the states after layer 0 are beyond it."""
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(100)
        model.model.layers[0].mlp.down_proj.weight.mul_(1e4)
    assert max(parameter.abs().max() for parameter in model.parameters()) < 30000
    return save_checkpoint(folder, model, tokenizer=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_dtypes_hold_states_beyond_fp16(tmp_path, tokens, dtype):
    folder = overflowing_checkpoint(tmp_path)
    largest = []

    def watch(index, layer, batch):
        largest.append(batch.hidden[batch.real].abs().max().item())
        return torch.no_grad()

    model = open_layerwise(folder, dtype=dtype)
    batches = model.prepare(list(tokens), 2)
    model.run(batches, watch)
    assert largest[0] < 1 < 65504 < largest[1]
    assert torch.isfinite(batches[0].hidden).all()
    assert batches[0].hidden.dtype == dtype


def test_fp16_overflow_stops_at_the_layer_by_name(tmp_path, tokens):
    with pytest.raises(
        ValueError, match=r"^model\.layers\.0 gives \d+ values that are NaN or Inf in torch\.float16"
    ) as e:
        layerwise_states(overflowing_checkpoint(tmp_path), tokens, dtype=torch.float16)
    count = int(str(e.value).split()[2])
    assert 0 < count < tokens.numel() * 64
    assert "largest finite magnitude 6" in str(e.value), "just below 65504"


def test_a_layer_without_one_finite_value_is_named_too(tmp_path, tokens):
    """A norm weight of 1e6 is Inf in FP16, so that every state of the layer is NaN."""
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight.fill_(1e6)
    folder = save_checkpoint(tmp_path, model, tokenizer=False)
    with pytest.raises(ValueError, match=r"^model\.layers\.1 gives 5120 values that are NaN or Inf in torch\.float16"):
        layerwise_states(folder, tokens, dtype=torch.float16)


@pytest.mark.parametrize(("ids", "bad"), [([1, VOCAB, 2], VOCAB), ([-1, 5], -1), ([3, 9999], 9999)])
def test_token_ids_outside_the_vocabulary_are_refused(tmp_path, ids, bad):
    model = open_layerwise(saved(tmp_path))
    with pytest.raises(ValueError, match=rf"token id {bad} is outside the embedding's {VOCAB} rows"):
        model.prepare([torch.tensor([0, 1]), torch.tensor(ids)], 1)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(tmp_path, tokens):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.input_layernorm\.weight"):
        layerwise_states(folder, tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_states(tmp_path, tokens):
    folder = saved(tmp_path)
    states = layerwise_states(folder, tokens, device="cuda")
    assert states.is_cuda
    assert (states.cpu() - expected_states(folder, tokens)).abs().max() <= 1e-4
