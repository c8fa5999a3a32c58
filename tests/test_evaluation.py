"""Fidelity measures against sums over full logits in FP64, and the results that the evaluation stages write."""

import hashlib
import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from otf_llm import evaluation
from otf_llm.checkpoint import Checkpoint, build_manifest
from otf_llm.evaluation import (
    EvaluationSettings,
    backend_name,
    evaluate,
    evaluate_scheme,
    evaluate_source,
    final_states,
    generate_samples,
    load_model,
    logits_digest,
    reference_states,
    source_head,
)
from otf_llm.files import write_json
from otf_llm.settings import SchemeSettings
from otf_llm.streaming import load_tensors, save_tensors
from test_conversion import convert
from tiny import FAMILIES, build_model, byte_tokenizer, logits_of, save_checkpoint

COUNT, LENGTH = 3, 15  # 45 positions, 42 of which have a next token in their window


@pytest.fixture
def windows():
    generator = torch.Generator().manual_seed(11)
    return list(torch.randint(0, 256, (COUNT, LENGTH), generator=generator).int())


def by_hand(source, model, windows):
    """(perplexity, KLD, top-1 agreement) from whole logit matrices in FP64."""
    nll, kld, agreed = [], [], []
    for window in windows:
        log_p = logits_of(source, window[None].long())[0].double().log_softmax(-1)
        log_q = logits_of(model, window[None].long())[0].double().log_softmax(-1)
        for position in range(len(window)):
            kld.append(sum(p.exp() * (p - q) for p, q in zip(log_p[position], log_q[position], strict=True)).item())
            agreed.append(log_p[position].argmax() == log_q[position].argmax())
            if position + 1 < len(window):
                nll.append(-log_q[position, window[position + 1]].item())
    assert (len(nll), len(kld)) == (42, 45)
    return math.exp(sum(nll) / len(nll)), sum(kld) / len(kld), sum(agreed).item() / len(agreed)


def compare(source, model, windows, path):
    reference_states(source, windows, path)
    return evaluate(model, windows, path, source.get_output_embeddings())


def assert_as_by_hand(fidelity, expected):
    perplexity, kld, top1 = expected
    assert fidelity.perplexity == pytest.approx(perplexity, rel=1e-6)
    assert fidelity.kld == pytest.approx(kld, rel=1e-4)
    assert fidelity.top1_agreement == top1
    assert (fidelity.num_tokens, fidelity.scored_tokens) == (45, 42)


@pytest.mark.parametrize("family", FAMILIES)
def test_measures_equal_sums_over_full_logits(tmp_path, windows, family):
    source, model = build_model(family, seed=0), build_model(family, seed=0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1 * weight.std())
    expected = by_hand(source, model, windows)
    assert 0.0001 < expected[1] < 1
    assert 0.1 < expected[2] < 1, "neither equal nor as chance would have it"
    assert_as_by_hand(compare(source, model, windows, tmp_path / "states.safetensors"), expected)


@pytest.mark.parametrize("block", [1, 4, 15, 1000])
@pytest.mark.parametrize("batch", [1, 30, 44, 1000])
def test_blocks_of_logits_and_batches_of_windows_leave_no_seam(tmp_path, windows, monkeypatch, block, batch):
    monkeypatch.setattr(evaluation, "LOGITS_ELEMENTS", block * 260)
    monkeypatch.setattr(evaluation, "BATCH_TOKENS", batch)
    source, model = build_model(seed=0), build_model(seed=1)
    expected = by_hand(source, model, windows)
    assert_as_by_hand(compare(source, model, windows, tmp_path / "states.safetensors"), expected)


def test_capped_logits(tmp_path, windows):
    """Gemma bounds its logits after the head; the states know nothing of that, the measures must."""
    capped = [build_model("gemma3", seed=seed, final_logit_softcapping=1.0) for seed in (0, 1)]
    assert 0.9 < logits_of(capped[1], windows[2][None].long()).abs().max() < 1
    expected = by_hand(*capped, windows)
    assert_as_by_hand(compare(*capped, windows, tmp_path / "capped.safetensors"), expected)
    free = compare(*(build_model("gemma3", seed=seed) for seed in (0, 1)), windows, tmp_path / "free.safetensors")
    assert free.kld > 1.2 * expected[1], "the bound matters here"


def test_a_model_that_is_certain_of_nothing_has_the_vocabularys_perplexity(tmp_path, windows):
    source, flat = build_model(), build_model()
    with torch.no_grad():
        flat.lm_head.weight.zero_()
    fidelity = compare(source, flat, windows, tmp_path / "states.safetensors")
    assert fidelity.perplexity == pytest.approx(260, rel=1e-6)


def assert_itself(fidelity):
    # Matrix products of states at differently aligned addresses round differently, by 1e-7 of a logit.
    assert abs(fidelity["kld"]) < 1e-7
    assert fidelity["top1_agreement"] == 1


def test_a_model_equals_itself(tmp_path, windows):
    model = build_model()
    fidelity = compare(model, model, windows, tmp_path / "states.safetensors")
    assert_itself(fidelity.to_dict())


def test_windows_do_not_see_each_other(tmp_path, windows):
    """Every window starts afresh, and its first token is never scored."""
    source, model = build_model(seed=0), build_model(seed=1)
    together = compare(source, model, windows, tmp_path / "all.safetensors")
    alone = [compare(source, model, [w], tmp_path / f"{i}.safetensors") for i, w in enumerate(windows)]
    nll = sum(math.log(each.perplexity) * each.scored_tokens for each in alone)
    assert math.log(together.perplexity) == pytest.approx(nll / 42, rel=1e-9)
    reordered = compare(source, model, windows[::-1], tmp_path / "reversed.safetensors")
    assert reordered.kld == pytest.approx(together.kld, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_are_measured_on_their_own_logits(tmp_path, windows, dtype):
    """Logits come in the model's dtype; everything after them is at least FP32."""
    source, model = build_model(seed=0).to(dtype), build_model(seed=1).to(dtype)
    expected = by_hand(source, model, windows)
    assert_as_by_hand(compare(source, model, windows, tmp_path / "states.safetensors"), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_reference_states_are_the_final_ones(tmp_path, windows, family):
    model = build_model(family)
    reference_states(model, windows, tmp_path / "states.safetensors")
    states, _ = load_tensors(tmp_path / "states.safetensors")
    assert list(states) == ["000000", "000001", "000002"]
    for window, kept in zip(windows, states.values(), strict=True):
        assert kept.shape == (LENGTH, 64)
        assert torch.allclose(model.lm_head(kept), logits_of(model, window[None].long())[0], atol=1e-5)
        assert torch.allclose(kept, next(final_states(model, [window])), atol=1e-5)
    reference_states(model, windows, tmp_path / "again.safetensors")
    assert (tmp_path / "states.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_a_reference_of_other_windows_is_refused(tmp_path, windows):
    model = build_model()
    path = tmp_path / "states.safetensors"
    reference_states(model, windows, path)
    with pytest.raises(ValueError, match=r"states\.safetensors was made from 3 windows, not 2"):
        evaluate(model, windows[:2], path, model.lm_head)
    with pytest.raises(ValueError, match=r"states\.safetensors was made from windows of 15 tokens, not 14"):
        evaluate(model, [window[:-1] for window in windows], path, model.lm_head)
    with pytest.raises(ValueError, match=r"states\.safetensors: window 2 has 15 tokens, not 14|windows .* one length"):
        evaluate(model, [*windows[:2], windows[2][:-1]], path, model.lm_head)


@pytest.mark.parametrize("lengths", [[1], [5, 1], [0], []])
def test_windows_too_short_to_score_are_an_error_not_a_number(tmp_path, lengths):
    """DAT-09: no measure is made up where there is nothing to measure."""
    model = build_model()
    path = tmp_path / "states.safetensors"
    save_tensors(path, {f"{i:06d}": torch.zeros(length, 64) for i, length in enumerate(lengths)})
    with pytest.raises(ValueError, match="windows of one length of at least two tokens"):
        evaluate(model, [torch.ones(length).int() for length in lengths], path, model.lm_head)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("whose", ["model", "source"])
def test_logits_that_are_not_finite_name_the_model(tmp_path, windows, whose, value):
    source, model = build_model(), build_model()
    head = {"model": model, "source": source}[whose].lm_head
    with torch.no_grad():
        head.weight[3, 4] = value
    reference_states(source, windows, tmp_path / "states.safetensors")
    name = {"model": "int4-g128", "source": "source"}[whose]
    with pytest.raises(ValueError, match=rf"^{name}: logits hold NaN or Inf$"):
        evaluate(model, windows, tmp_path / "states.safetensors", source.lm_head, "int4-g128")


def test_a_hopeless_model_gets_a_finite_result_or_a_plain_error(tmp_path, windows):
    """exp of a mean loss beyond 709 does not fit a float; that must not surface as an OverflowError."""
    source, model = build_model(), build_model(seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
    reference_states(source, windows, tmp_path / "states.safetensors")
    with pytest.raises(ValueError, match="perplexity"):
        evaluate(model, windows, tmp_path / "states.safetensors", source.lm_head, "int4-g128")


# Loaded models and samples


def test_source_head_is_the_one_the_model_uses(tmp_path):
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for tied in (True, False):
        model = build_model(tie_word_embeddings=tied)
        folder = save_checkpoint(tmp_path / str(tied), model)
        head = source_head(Checkpoint.open(folder), torch.float32, "cpu")
        loaded = load_model(folder, torch.float32, "cpu")
        assert isinstance(head, nn.Linear)
        assert torch.equal(head(hidden), loaded.lm_head(hidden))
        assert not torch.equal(loaded.model.embed_tokens.weight, head.weight) or tied


def test_models_load_in_the_dtype_asked_for_and_ready_to_evaluate(tmp_path):
    folder = save_checkpoint(tmp_path, build_model())
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(folder, dtype, "cpu")
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_samples_are_greedy_and_end_in_the_models_own_logits(tmp_path):
    """The digest is that of the logits after the prompt, as any reader of the folder can compute them."""
    source = save_checkpoint(tmp_path / "source", build_model())
    convert(source, tmp_path / "out", SchemeSettings())
    prompts = ["abc", "The capital of"]
    samples = generate_samples(load_model(tmp_path / "out", torch.float32, "cpu"), byte_tokenizer(), prompts, 5)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert [sample["prompt"] for sample in samples] == prompts
    for sample in samples:
        ids = list(sample["prompt"].encode())
        logits = logits_of(reloaded, torch.tensor([ids]))[0, -1]
        assert sample["logits"]["sha256"] == hashlib.sha256(logits.numpy().tobytes()).hexdigest()
        assert sample["logits"]["argmax"] == int(logits.argmax())
        assert sample["logits"]["max"] == logits.max().item()
        for _ in range(5):
            ids.append(int(logits_of(reloaded, torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == 257:
                break
        written = ids[len(sample["prompt"]) :]
        assert sample["text"] == byte_tokenizer().decode(written, skip_special_tokens=True)
    assert len({sample["logits"]["sha256"] for sample in samples}) == 2


def test_a_digest_tells_of_every_bit():
    model = build_model()
    ids = torch.tensor([[1, 2, 3]])
    before = logits_digest(model, ids)
    assert before == logits_digest(model, ids)
    with torch.no_grad():
        model.lm_head.weight[200, 0] = torch.nextafter(model.lm_head.weight[200, 0], torch.tensor(10.0))
        model.lm_head.weight[200] += 1e-5
    assert logits_digest(model, ids)["sha256"] != before["sha256"]


@pytest.mark.parametrize(
    ("device", "packed", "expected"),
    [
        ("cpu", True, "torch-cpu"),
        ("cpu", False, "torch-cpu"),
        ("cuda", True, "triton-cuda"),
        ("cuda:1", True, "triton-cuda"),
        ("cuda", False, "torch-cuda"),
    ],
)
def test_backend_names(device, packed, expected):
    assert backend_name(device, packed) == expected


# The two stages


def settings(scheme, **changes):
    values = {"model": "tiny", "scheme": scheme, "prompts": ("abc",), "max_new_tokens": 3, "dtype": "float32"}
    return EvaluationSettings(**(values | {"device": "cpu", "record": {"commit": "c0ffee"}} | changes))


def run_source(source, windows, tmp_path, **changes):
    checkpoint = Checkpoint.open(source)
    write_json(tmp_path / "source.json", build_manifest(checkpoint, "llama", False))
    places = {"states": tmp_path / "states.safetensors", "destination": tmp_path / "source-result.json"}
    evaluate_source(source, tmp_path / "source.json", windows, settings("source", **changes), **places)
    return json.loads((tmp_path / "source-result.json").read_text())


def run_scheme(source, folder, windows, tmp_path):
    places = {"states": tmp_path / "states.safetensors", "destination": tmp_path / "result.json"}
    evaluate_scheme(folder, source, tmp_path / "source.json", windows, settings("int4"), **places)
    return json.loads((tmp_path / "result.json").read_text())


@pytest.mark.parametrize("tied", [True, False])
def test_a_scheme_is_compared_with_its_source(tmp_path, windows, tied):
    source = save_checkpoint(tmp_path / "source", build_model(tie_word_embeddings=tied))
    convert(source, tmp_path / "out", SchemeSettings())
    of_source = run_source(source, windows, tmp_path)
    result = run_scheme(source, tmp_path / "out", windows, tmp_path)
    models = [load_model(folder, torch.float32, "cpu") for folder in (source, tmp_path / "out")]
    perplexity, kld, top1 = by_hand(*models, windows)
    assert result["fidelity"]["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert result["fidelity"]["kld"] == pytest.approx(kld, rel=1e-3)
    assert result["fidelity"]["top1_agreement"] == top1
    assert of_source["fidelity"]["perplexity"] == pytest.approx(by_hand(models[0], models[0], windows)[0], rel=1e-6)
    assert_itself(of_source["fidelity"])
    for row, scheme in ((of_source, "source"), (result, "int4")):
        assert (row["model"], row["scheme"], row["backend"]) == ("tiny", scheme, "torch-cpu")
        assert (row["dtype"], row["device"], row["commit"]) == ("float32", "cpu", "c0ffee")
        assert row["source_digest"] == json.loads((tmp_path / "source.json").read_text())["digest"]
        assert [sample["prompt"] for sample in row["samples"]] == ["abc"]
        assert (row["fidelity"]["num_tokens"], row["fidelity"]["scored_tokens"]) == (45, 42)


def test_a_result_is_the_same_bytes_every_time(tmp_path, windows):
    source = save_checkpoint(tmp_path / "source", build_model())
    run_source(source, windows, tmp_path)
    first = (tmp_path / "source-result.json").read_bytes()
    run_source(source, windows, tmp_path)
    assert (tmp_path / "source-result.json").read_bytes() == first


def test_a_folder_that_changed_since_conversion_is_not_evaluated(tmp_path, windows):
    source = save_checkpoint(tmp_path / "source", build_model())
    convert(source, tmp_path / "out", SchemeSettings())
    run_source(source, windows, tmp_path)
    shard = next((tmp_path / "out").glob("model-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=f"changed since conversion: {shard.name}"):
        run_scheme(source, tmp_path / "out", windows, tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_a_model_whose_logits_are_not_finite_leaves_no_result(tmp_path, windows):
    """DAT-09: NaN is never written down as a measure."""
    model = build_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
        model.lm_head.weight.mul_(1e3)
    source = save_checkpoint(tmp_path / "source", model, torch.float32)
    with pytest.raises(ValueError, match="source: logits hold NaN or Inf"):
        run_source(source, windows, tmp_path)
    assert not (tmp_path / "source-result.json").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_stages_on_a_gpu(tmp_path, windows):
    """States are kept on the host and heads live on the GPU; the kernels give what the references give."""
    source = save_checkpoint(tmp_path / "source", build_model(tie_word_embeddings=True))
    convert(source, tmp_path / "out", SchemeSettings())
    results = {}
    for device in ("cpu", "cuda"):
        run_source(source, windows, tmp_path, device=device)
        places = {"states": tmp_path / "states.safetensors", "destination": tmp_path / "result.json"}
        evaluate_scheme(
            tmp_path / "out", source, tmp_path / "source.json", windows, settings("int4", device=device), **places
        )
        results[device] = json.loads((tmp_path / "result.json").read_text())
    assert results["cuda"]["backend"] == "triton-cuda"
    for measure in ("perplexity", "kld"):
        assert results["cuda"]["fidelity"][measure] == pytest.approx(results["cpu"]["fidelity"][measure], rel=1e-3)
