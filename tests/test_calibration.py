"""The calibration profile: what plain forward hooks measure, whatever the batches; what a damaged profile says."""

import re
from contextlib import ExitStack

import pytest
import torch

from otf_llm.calibration import calibrate, write_second_moments
from otf_llm.calibration_profile import ActivationStatistics, load_statistics, save_statistics
from otf_llm.checkpoint import Checkpoint
from otf_llm.decoder import decoder_linears, input_name, read_config
from otf_llm.families import HEAD_INPUT
from otf_llm.inspection import language_model
from otf_llm.layerwise import LayerwiseModel
from otf_llm.permutation import channel_statistics, plan_permutation
from otf_llm.settings import PermutationSettings, SchemeSettings
from otf_llm.streaming import load_tensors, save_tensors
from otf_llm.weight_statistics import weight_statistics
from test_conversion import convert
from tiny import BOS, EOS, FAMILIES, build_model, byte_tokenizer, logits_of, save_checkpoint, separate_experts

# Activations agree to 1e-5 of their own size (see test_layerwise); sums over tokens add no more.
RELATIVE = 1e-4


def texts(*lengths, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def opened(folder, **options):
    checkpoint = language_model(Checkpoint.open(folder))
    family, geometry = read_config(checkpoint.config)
    return LayerwiseModel(checkpoint, family, **options), geometry


def profile(folder, sequences, batch_size=1, **options):
    return calibrate(*opened(folder), sequences, batch_size, **options)


def saved(folder, family="llama", model=None, **overrides):
    return save_checkpoint(folder, model or build_model(family, **overrides), torch.float32, tokenizer=False)


@torch.no_grad()
def hooked(folder, sequences):
    """Rows that enter every linear, float64 [n, K] by module name, from transformers' own forward."""
    from transformers import AutoModelForCausalLM

    model = separate_experts(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    rows = {}

    def note(name):
        return lambda _module, arguments: rows.setdefault(name, []).append(arguments[0].flatten(0, -2).double())

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            experts_block = hasattr(module, "experts")
            if isinstance(module, torch.nn.Linear) or experts_block:
                hooks.callback(module.register_forward_pre_hook(note(name)).remove)
        for sequence in sequences:
            logits_of(model, sequence[None])
    return {name: torch.cat(parts) for name, parts in rows.items()}


def rows_by_input(folder, sequences):
    """The same, keyed by the input that each linear reads."""
    model, geometry = opened(folder)
    rows = hooked(folder, sequences)
    by_input = {HEAD_INPUT: rows.pop("lm_head")}
    for module, layer, linear in decoder_linears(model.family, geometry):
        name = input_name(model.family, layer, linear.reads)
        if linear.expert is not None and linear.reads.expert is None:  # its share of what the layer's MLP reads
            rows.pop(module, None)
            continue
        if linear.expert is not None:  # without tokens where none was routed to it
            rows.setdefault(module, torch.zeros(0, geometry.sizes[linear.reads.width]).double())
        x = rows.pop(module)
        assert torch.equal(by_input.setdefault(name, x), x), f"{linear.path} reads {name} as the others do"
    for module in list(rows):
        gate = re.fullmatch(r"model\.layers\.(\d+)\.(linear_attn\.in_proj_[ab]|mlp)", module)
        assert gate, module
        kind = "mlp_input" if gate[2] == "mlp" else "attention_input"
        x = rows.pop(module)
        assert torch.equal(by_input.setdefault(f"model.layers.{gate[1]}.{kind}", x), x)
    return by_input


def assert_close(statistics, others):
    assert statistics.keys() == others.keys()
    for name, stats in statistics.items():
        other = others[name]
        assert stats.token_count == other.token_count, name
        for mine, theirs in ((stats.abs_sum, other.abs_sum), (stats.square_sum, other.square_sum)):
            assert mine.dtype == torch.float64
            assert (mine - theirs).abs().max() <= RELATIVE * theirs.max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_what_forward_hooks_measure(tmp_path, family):
    saved(tmp_path, family)
    sequences = texts(20, 33)
    expected = {
        name: ActivationStatistics(x.abs().sum(0), x.square().sum(0), len(x))
        for name, x in rows_by_input(tmp_path, sequences).items()
    }
    statistics = profile(tmp_path, sequences, 2)
    layers = {"qwen3_moe": 3, "qwen3_5": 4}.get(family, 2)
    experts = {"mixtral": 2, "qwen3_moe": 2}.get(family, 0)  # layers with four experts in the place of one MLP
    assert len(statistics) == layers * 4 + 1 + experts * 3
    routed = {name for name in statistics if ".experts." in name}
    assert {stats.token_count for name, stats in statistics.items() if name not in routed} == {53}
    assert sum(statistics[name].token_count for name in routed) == experts * 2 * 53, "two experts for every token"
    assert_close(statistics, expected)
    for name, stats in statistics.items():
        assert torch.allclose(stats.mean_abs() * stats.token_count, expected[name].abs_sum, rtol=1e-3), name
        assert (stats.mean_square() >= stats.mean_abs() ** 2 * (1 - 1e-9)).all(), "E[x²] is at least E[|x|]²"


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "qwen3_moe", "qwen3_5"])
def test_batches_and_padding_change_nothing(tmp_path, family):
    """CAL-05: two texts of 8 and 64 tokens count 72, not 128, and padding joins neither attention nor a sum."""
    saved(tmp_path, family)
    sequences = texts(8, 64)
    alone = profile(tmp_path, sequences)
    assert {stats.token_count for name, stats in alone.items() if ".experts." not in name} == {72}
    for side in ("left", "right"):
        assert_close(profile(tmp_path, sequences, 2, padding_side=side), alone)


@pytest.mark.parametrize("batch_size", [2, 4, 9])
def test_any_batch_size_gives_the_same_statistics(tmp_path, batch_size):
    saved(tmp_path)
    sequences = texts(5, 17, 1, 17, 30)
    assert_close(profile(tmp_path, sequences, batch_size), profile(tmp_path, sequences))


def test_dropping_the_mask_would_be_noticed(tmp_path):
    """The comparison above can fail: padding that counts as text moves the statistics well beyond the tolerance."""
    saved(tmp_path)
    sequences = texts(8, 64)
    padded = [torch.cat([sequences[0], sequences[0][:1].expand(56)]), sequences[1]]
    alone, wrong = profile(tmp_path, sequences), profile(tmp_path, padded)
    for name in (HEAD_INPUT, "model.layers.0.attention_output"):
        difference = (alone[name].abs_sum - wrong[name].abs_sum).abs().max()
        assert difference > 100 * RELATIVE * alone[name].abs_sum.max()


@pytest.mark.parametrize("pad", [EOS, None, 0])
def test_real_tokens_that_look_like_padding_count(tmp_path, pad):
    """CAL-06 and CAL-07: the mask comes from lengths, never from ids, so any pad id serves, or none."""
    saved(tmp_path, pad_token_id=pad)
    sequences = texts(12, 30)
    for sequence in sequences:
        sequence[[0, 5, 11]] = torch.tensor([BOS, 0, EOS])
    expected = {
        name: ActivationStatistics(x.abs().sum(0), x.square().sum(0), len(x))
        for name, x in rows_by_input(tmp_path, sequences).items()
    }
    for side in ("left", "right"):
        assert_close(profile(tmp_path, sequences, 2, padding_side=side), expected)


def test_a_tokenizer_without_a_pad_token_is_left_as_it_is(tmp_path):
    """CAL-07: texts of unequal length go through a batch, and the saved tokenizer is not edited."""
    saved(tmp_path, pad_token_id=None)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer.pad_token_id is None
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sequences = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("short", "a longer text")]
    assert_close(profile(tmp_path, sequences, 2), profile(tmp_path, sequences, 1))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def silent_model():
    """CAL-10: layer 0 attends to nothing and its MLP is silent, so two of its inputs are zero on every channel."""
    model = build_model("llama")
    with torch.no_grad():
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        for weight in (attention.v_proj.weight, attention.o_proj.weight, mlp.gate_proj.weight):
            weight.zero_()
    return model


SILENT = ["model.layers.0.attention_output", "model.layers.0.mlp_hidden"]


def test_zero_statistics_give_a_plan_by_weight(tmp_path, tokens):
    model = silent_model()
    down = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        down[:, 77] *= 50
        down[:, 3] *= 40
    source = saved(tmp_path / "source", model=model)
    layerwise, geometry = opened(source)
    statistics = calibrate(layerwise, geometry, list(tokens), 2)
    for name, stats in statistics.items():
        assert stats.token_count == 80
        assert bool(stats.abs_sum.any()) == bool(stats.square_sum.any()) == (name not in SILENT), name
    family = layerwise.family
    channels = channel_statistics(statistics, weight_statistics(layerwise.checkpoint, family, geometry))
    plans = [plan_permutation(family, geometry, channels, PermutationSettings()) for _ in range(2)]
    assert plans[0].unseen == tuple(SILENT)
    assert plans[0].columns(SILENT[1])[:2].tolist() == [77, 3], "the largest |W|, since no activation tells"
    assert plans[0].columns(SILENT[0])[:1].tolist() == [0], "nothing at all tells, so the lowest channel"
    for name, order in plans[0].orders.items():
        assert torch.equal(order, plans[1].orders[name])
        assert torch.equal(order.sort().values, torch.arange(len(order)))


def test_zero_statistics_convert_to_finite_weights(tmp_path, tokens):
    from transformers import AutoModelForCausalLM

    source = saved(tmp_path / "source", model=silent_model())
    _, manifest = convert(source, tmp_path / "out", SchemeSettings())
    assert manifest["unseen_inputs"] == SILENT
    errors = [row["relative_error"] for row in manifest["tensors"] if row["action"] == "int4"]
    assert len(errors) == 2 * 7 + 1
    assert all(0 <= error < 0.1 for error in errors)
    logits = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval(), tokens)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), tokens)
    assert torch.isfinite(logits).all()
    assert (logits - expected).norm() < 0.3 * expected.norm()


def test_overflow_leaves_no_profile(tmp_path, tokens):
    """CAL-12: statistics hold no Inf; the run stops and names the layer."""
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(100)
        model.model.layers[0].mlp.down_proj.weight.mul_(1e4)
    saved(tmp_path, model=model)
    for stats in profile(tmp_path, list(tokens), 2).values():
        assert torch.isfinite(stats.abs_sum).all()
        assert torch.isfinite(stats.square_sum).all()
    with pytest.raises(ValueError, match=r"^model\.layers\.0 gives .* in torch\.float16"):
        calibrate(*opened(tmp_path, dtype=torch.float16), list(tokens), 2)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 3e3), (torch.float32, 1e20)])
def test_sums_hold_squares_that_the_models_dtype_cannot(tmp_path, tokens, dtype, factor):
    """x² overflows FP16 from 256 on, where x itself is far from it; the squares are FP64 as their sums are."""
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(factor)
        model.model.layers[1].mlp.down_proj.weight.div_(factor)
    statistics = calibrate(*opened(saved(tmp_path, model=model), dtype=dtype), list(tokens), 2)
    stats = statistics["model.layers.1.mlp_hidden"]
    x = rows_by_input(tmp_path, list(tokens))["model.layers.1.mlp_hidden"]
    assert x.abs().max() < torch.finfo(dtype).max < x.square().max()
    assert torch.allclose(stats.square_sum, x.square().sum(0), rtol=0.02), "0.02: two layers in FP16"


def test_no_text_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match="calibration needs at least one sequence of tokens"):
        profile(tmp_path, [])


# Second moments


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_second_moments_are_the_mean_outer_products(tmp_path, family, batch_size):
    saved(tmp_path / "model", family)
    sequences = texts(20, 7, 33, 4)
    path = tmp_path / "deeper" / "moments.safetensors"
    write_second_moments(*opened(tmp_path / "model"), sequences, batch_size, path)
    moments, _ = load_tensors(path)
    rows = rows_by_input(tmp_path / "model", sequences)
    assert moments.keys() == rows.keys()
    for name, x in rows.items():
        expected = x.T @ x / len(x)
        assert moments[name].dtype == torch.float32
        assert moments[name].shape == (x.shape[1], x.shape[1])
        assert (moments[name] - expected).abs().max() <= RELATIVE * expected.abs().max(), name
    statistics = profile(tmp_path / "model", sequences)
    for name, stats in statistics.items():
        assert torch.allclose(moments[name].diagonal().double(), stats.mean_square(), rtol=1e-3, atol=1e-9), name


# Files


def test_profiles_are_the_same_bytes_every_time_and_survive_saving(tmp_path):
    saved(tmp_path / "model")
    for name in ("a", "b"):
        statistics = profile(tmp_path / "model", texts(20, 9), 2)
        save_statistics(tmp_path / name / "profile.safetensors", statistics, {"tokens": {"text": "x", "sha256": "y"}})
        write_second_moments(*opened(tmp_path / "model"), texts(20, 9), 2, tmp_path / name / "moments.safetensors")
    for file in ("profile.safetensors", "moments.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    loaded = load_statistics(tmp_path / "a" / "profile.safetensors")
    assert loaded.keys() == statistics.keys()
    for name, stats in statistics.items():
        assert torch.equal(loaded[name].abs_sum, stats.abs_sum)
        assert torch.equal(loaded[name].square_sum, stats.square_sum)
        assert loaded[name].token_count == stats.token_count == 29
    assert load_tensors(tmp_path / "a" / "profile.safetensors")[1]["tokens"] == {"text": "x", "sha256": "y"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("vector", ["abs_sum", "square_sum"])
def test_a_profile_that_is_not_finite_or_negative_is_refused_by_name(tmp_path, vector, value):
    """CAL-10: the input is named, before anything is planned from it."""
    good = ActivationStatistics(torch.ones(4).double(), torch.ones(4).double(), 3)
    bad = ActivationStatistics(torch.ones(4).double(), torch.ones(4).double(), 3)
    getattr(bad, vector)[2] = value
    path = tmp_path / "profile.safetensors"
    save_statistics(path, {"model.layers.0.mlp_input": good, "model.layers.1.mlp_hidden": bad}, {})
    with pytest.raises(
        ValueError, match=r"profile\.safetensors: the statistics of model\.layers\.1\.mlp_hidden hold NaN"
    ):
        load_statistics(path)
    save_statistics(path, {"model.layers.0.mlp_input": good}, {})
    assert load_statistics(path).keys() == {"model.layers.0.mlp_input"}


def test_files_that_hold_no_profile(tmp_path):
    path = tmp_path / "profile.safetensors"
    with pytest.raises(OSError, match="profile"):
        load_statistics(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"profile\.safetensors is not a readable safetensors file"):
        load_statistics(path)
    save_tensors(path, {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"profile\.safetensors is not a calibration profile"):
        load_statistics(path)
    stats = ActivationStatistics(torch.ones(4).double(), torch.ones(4).double(), 3)
    save_statistics(path, {"head_input": stats}, {})
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"profile\.safetensors is not a readable safetensors file"):
        load_statistics(path)


def test_means_of_nothing_are_zero():
    nothing = ActivationStatistics(torch.zeros(3).double(), torch.zeros(3).double(), 0)
    assert nothing.mean_abs().tolist() == nothing.mean_square().tolist() == [0, 0, 0]
    some = ActivationStatistics(torch.tensor([2.0, 0, 6]).double(), torch.tensor([4.0, 0, 36]).double(), 4)
    assert some.mean_abs().tolist() == [0.5, 0, 1.5]
    assert some.mean_square().tolist() == [1, 0, 9]
