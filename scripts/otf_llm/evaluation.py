"""Fidelity of a model against its source on the same tokens: perplexity, KL divergence, top-1 agreement, samples.

The source is run once; what is kept of it is the final hidden state of every token, from which its logits are
recomputed with its own head whenever a compressed model is compared (a [V] row of logits per token would take a hundred
times the space).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from otf_llm.artifact_format import verify_files
from otf_llm.checkpoint import Checkpoint
from otf_llm.decoder import read_config
from otf_llm.files import read_json_object, write_json
from otf_llm.inspection import open_verified
from otf_llm.modules import packed_modules
from otf_llm.settings import COMPRESSED_TENSORS, SOURCE_SCHEME
from otf_llm.streaming import load_tensors, save_tensors

LOGITS_ELEMENTS = 1 << 26  # logits held at a time, per model: 256 MB in FP32
LARGEST_LOSS = 700.0  # nats; exp of much more does not fit a float
BATCH_TOKENS = 4096  # tokens run at once, so that a packed model's weights are dequantised once for them all


@dataclass(frozen=True)
class Fidelity:
    """Measures over ``scored_tokens`` predictions and ``num_tokens`` positions.

    perplexity: exp of the mean negative log-likelihood of the next token, inside windows. kld: mean over positions of
    KL(source ‖ model) in nats. top1_agreement: share of positions at which both rank the same token first.
    """

    perplexity: float
    kld: float
    top1_agreement: float
    num_tokens: int
    scored_tokens: int

    def to_dict(self) -> dict:
        """Plain values, JSON-ready."""
        return asdict(self)


def load_model(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    """The language model of a source or converted folder in evaluation mode.

    Raises ValueError naming weights that the folder lacks: transformers would give them random values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    import otf_llm  # noqa: F401  (its import makes converted folders loadable)

    stored, options = read_json_object(folder / "config.json"), {}
    family, geometry = read_config(stored)
    if stored["architectures"] == [family.multimodal]:
        options["config"] = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
        options["config"].tie_word_embeddings = geometry.tied  # it may be said of the whole model only
        options["key_mapping"] = dict(family.renames)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    if info["missing_keys"]:
        raise ValueError(f"{folder} lacks weights: {', '.join(sorted(info['missing_keys'])[:5])}")
    model = model.to(device).eval().requires_grad_(False)
    if stored.get("quantization_config", {}).get("quant_method") == COMPRESSED_TENSORS:
        # That package unpacks the weights when the whole model first runs; evaluation runs the decoder alone.
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    return model


def final_states(model: nn.Module, windows: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Hidden states after the final norm, float [T, H], of each window of token ids, int [T], all of one length."""
    size = max(1, BATCH_TOKENS // len(windows[0]))
    for start in range(0, len(windows), size):
        ids = torch.stack(windows[start : start + size]).long().to(model.device)
        yield from model.base_model(input_ids=ids, use_cache=False).last_hidden_state


@torch.no_grad()
def reference_states(model: nn.Module, windows: list[torch.Tensor], path: Path) -> None:
    """Write the source's final hidden states over ``windows`` (int [T] each) to ``path``."""
    bar = tqdm(final_states(model, windows), total=len(windows), unit="window", desc=SOURCE_SCHEME)
    save_tensors(path, {f"{index:06d}": hidden.cpu() for index, hidden in enumerate(bar)})


@torch.no_grad()
def evaluate(
    model: nn.Module,
    windows: list[torch.Tensor],
    reference: Path,
    reference_head: nn.Module,
    description: str = "model",
) -> Fidelity:
    """Compare ``model`` with the source whose states are in ``reference`` and whose head is ``reference_head``.

    Args:
        windows: token ids, int [T] each, the same that the reference was made from.

    Raises ValueError when a window is shorter than two tokens, the reference has other windows, or logits are not
    finite.
    """
    states = _load_states(reference, windows)
    bar = tqdm(final_states(model, windows), total=len(windows), unit="window", desc=description)
    heads = reference_head, model.get_output_embeddings()
    return _score(windows, states, bar, heads, getattr(model.config, "final_logit_softcapping", None), description)


def _load_states(reference: Path, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    tensors, _ = load_tensors(reference)
    states = [tensors[name] for name in sorted(tensors)]
    lengths = sorted({len(window) for window in windows})
    if len(lengths) != 1 or lengths[0] < 2:
        raise ValueError(f"evaluation needs windows of one length of at least two tokens, not of {lengths}")
    if len(states) != len(windows):
        raise ValueError(f"{reference.name} was made from {len(states)} windows, not {len(windows)}")
    if states[0].shape[0] != lengths[0]:
        raise ValueError(f"{reference.name} was made from windows of {states[0].shape[0]} tokens, not {lengths[0]}")
    return states


def _score(windows, source_states, states, heads, softcap, description) -> Fidelity:
    """Score hidden states [T, H] per window against the source's; ``heads`` are the source's and the model's."""
    device = heads[0].weight.device
    nll = kld = 0.0
    agreed = positions = scored = 0
    for window, source_hidden, hidden in zip(windows, source_states, states, strict=True):
        source_hidden, hidden = source_hidden.to(device, hidden.dtype), hidden.to(device)
        block = max(1, LOGITS_ELEMENTS // heads[0].weight.shape[0])
        for start in range(0, len(window), block):
            rows = slice(start, start + block)
            expected = _logits(heads[0], source_hidden[rows], softcap, SOURCE_SCHEME)
            logits = _logits(heads[1], hidden[rows], softcap, description)
            agreed += (expected.argmax(-1) == logits.argmax(-1)).sum().item()
            normaliser = logits.logsumexp(-1)
            targets = window[start + 1 : start + block + 1].long().to(logits.device)
            chosen = logits[: len(targets)].gather(1, targets[:, None])[:, 0]
            nll += (normaliser[: len(targets)] - chosen).sum(dtype=torch.float64).item()
            # KL(p ‖ q) = Σ p (logit_p - logit_q) - lse_p + lse_q
            offset = normaliser - expected.logsumexp(-1)
            difference = logits.neg_().add_(expected)
            divergence = torch.linalg.vecdot(expected.softmax(-1), difference) + offset
            kld += divergence.sum(dtype=torch.float64).item()
            positions, scored = positions + len(divergence), scored + len(targets)
    if nll / scored > LARGEST_LOSS:
        raise ValueError(f"{description}: the mean loss is {nll / scored:.4g}, too large for a perplexity")
    # A model compared with itself gives 0 but for rounding, which may fall on either side.
    return Fidelity(math.exp(nll / scored), max(0.0, kld / positions), agreed / positions, positions, scored)


def _logits(head: nn.Module, hidden: torch.Tensor, softcap: float | None, description: str) -> torch.Tensor:
    logits = head(hidden).float()
    if softcap is not None:  # Gemma's bound on logits, softcap * tanh(logits / softcap)
        logits = (logits / softcap).tanh() * softcap
    if not torch.isfinite(logits).all():
        raise ValueError(f"{description}: logits hold NaN or Inf")
    return logits


@torch.no_grad()
def generate_samples(model: nn.Module, tokenizer, prompts: list[str], max_new_tokens: int) -> list[dict]:
    """Greedy continuations of ``prompts``, each with the SHA-256 of the logits that follow its last token."""
    samples = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        text = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        samples.append({"prompt": prompt, "text": text, "logits": logits_digest(model, inputs["input_ids"])})
    return samples


@torch.no_grad()
def logits_digest(model: nn.Module, ids: torch.Tensor) -> dict:
    """SHA-256 of the float32 logits [V] after ``ids`` (int [1, T]), with the largest and where it stands."""
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].float().cpu().contiguous()
    digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    return {"sha256": digest, "argmax": int(logits.argmax()), "max": logits.max().item()}


@dataclass(frozen=True)
class EvaluationSettings:
    """What an evaluation report is made with: names for its row, samples to generate, dtype and device to compute in.

    ``record`` goes into the report as it is (tokens, commit, versions).
    """

    model: str
    scheme: str
    prompts: tuple[str, ...]
    max_new_tokens: int
    dtype: str
    device: str
    record: dict

    def load(self, folder: Path) -> nn.Module:
        """The model in ``folder``, in this dtype on this device."""
        return load_model(folder, getattr(torch, self.dtype), self.device)


def evaluate_source(
    checkpoint: Path,
    manifest: Path,
    windows: list[torch.Tensor],
    settings: EvaluationSettings,
    *,
    states: Path,
    destination: Path,
) -> None:
    """Evaluate a source: write its hidden ``states``, and its fidelity to itself and samples to ``destination``.

    Raises ValueError naming what has changed in the source since its ``manifest``.
    """
    open_verified(checkpoint, manifest)
    model = settings.load(checkpoint)
    reference_states(model, windows, states)
    kept = _load_states(states, windows)
    heads = model.get_output_embeddings(), model.get_output_embeddings()
    fidelity = _score(windows, kept, kept, heads, getattr(model.config, "final_logit_softcapping", None), SOURCE_SCHEME)
    _write_report(destination, settings, fidelity, model, checkpoint, manifest)


def evaluate_scheme(
    folder: Path,
    checkpoint: Path,
    manifest: Path,
    windows: list[torch.Tensor],
    settings: EvaluationSettings,
    *,
    states: Path,
    destination: Path,
) -> None:
    """Evaluate a converted ``folder`` against the source's ``states`` and write its report to ``destination``.

    Raises ValueError naming files of the folder that differ from its manifest, or what has changed in the source.
    """
    verify_files(folder)
    head = source_head(open_verified(checkpoint, manifest), getattr(torch, settings.dtype), settings.device)
    model = settings.load(folder)
    fidelity = evaluate(model, windows, states, head, settings.scheme)
    _write_report(destination, settings, fidelity, model, folder, manifest)


def _write_report(
    destination: Path,
    settings: EvaluationSettings,
    fidelity: Fidelity,
    model: nn.Module,
    folder: Path,
    manifest: Path,
) -> None:
    from transformers import AutoTokenizer

    packed = any(True for _ in packed_modules(model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    report = {
        "model": settings.model,
        "scheme": settings.scheme,
        "backend": backend_name(settings.device, packed),
        "device": settings.device,
        "dtype": settings.dtype,
        "source_digest": read_json_object(manifest)["digest"],
        "fidelity": fidelity.to_dict(),
        "samples": generate_samples(model, tokenizer, list(settings.prompts), settings.max_new_tokens),
    }
    write_json(destination, report | settings.record)


def source_head(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> nn.Linear:
    """The source's head alone: ``lm_head``, or the embedding matrix that it is tied to."""
    family, geometry = read_config(checkpoint.config)
    weight = checkpoint.read(f"{family.embedding if geometry.tied else family.head}.weight")
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
    return head


def backend_name(device: str, packed: bool) -> str:
    """What computed a row: ``triton-cuda`` for packed modules on a GPU, else ``torch-cuda`` or ``torch-cpu``."""
    kind = torch.device(device).type
    return "triton-cuda" if packed and kind == "cuda" else f"torch-{kind}"
