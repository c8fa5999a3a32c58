"""Tokens for calibration and evaluation: documents' ids cut into sequences of equal length, and their file."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from otf_llm.streaming import load_tensors, save_tensors

_log = logging.getLogger(__name__)

# What tokenising needs of a tokenizer: tokenizer(text)["input_ids"] is a flat list of ints.
Tokenizer = Callable[[str], Mapping[str, Sequence[int]]]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token sequences of possibly different lengths, laid end to end.

    ids: int32 [sum of lengths]. lengths: int64 [number of sequences], all positive.
    Raises ValueError if dtypes, dimensions or the sum of lengths do not fit.
    """

    ids: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self):
        for name, tensor, dtype in (("ids", self.ids, torch.int32), ("lengths", self.lengths, torch.int64)):
            if tensor.dtype != dtype or tensor.ndim != 1:
                raise ValueError(f"{name} must be 1-D {dtype}, got {tensor.ndim}-D {tensor.dtype}")
        if (self.lengths <= 0).any() or int(self.lengths.sum()) != self.ids.numel():
            raise ValueError(f"lengths must be positive and sum to {self.ids.numel()}, got {self.lengths.tolist()}")

    def __len__(self) -> int:
        return self.lengths.numel()

    def sequences(self) -> list[torch.Tensor]:
        """One int32 view per sequence."""
        return list(self.ids.split(self.lengths.tolist()))


def pack(
    documents_ids: Iterable[Sequence[int]],
    sequence_length: int,
    num_sequences: int | None,
    *,
    keep_remainder: bool = False,
    spread: bool = False,
) -> Tokens:
    """Cut documents' token ids into at most `num_sequences` (None: all) windows of exactly `sequence_length` tokens.

    By default the documents are laid end to end, with nothing between them, and cut in order. With `spread` the windows
    are dealt round-robin so that every document is represented: window 0 of each document, then window 1 of each, ...
    What is left of each document after its last full window (all of it, if shorter than one) goes into one shared
    stream, which takes part as the last document. No more documents are read than these windows need; with `spread`
    reading stops once `num_sequences` documents have a window, or the shared stream alone has that many.

    If the windows run out, `keep_remainder` adds the tokens left over, however few, as a last shorter sequence.
    Raises ValueError if a length or count is not positive.
    """
    _require_positive(sequence_length=sequence_length, num_sequences=num_sequences)
    windows = (_deal if spread else _cut_in_order)(documents_ids, sequence_length, num_sequences)
    chosen = list(itertools.islice(windows, num_sequences))
    if chosen and len(chosen[-1]) < sequence_length and not keep_remainder:
        chosen.pop()
    ids = torch.tensor(list(itertools.chain.from_iterable(chosen)), dtype=torch.int32)
    return Tokens(ids, torch.tensor([len(window) for window in chosen], dtype=torch.int64))


def calibration_tokens(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    num_sequences: int,
    source_name: str,
    spread: bool = False,
) -> Tokens:
    """Up to `num_sequences` calibration sequences of `sequence_length` tokens (see `pack`), the last possibly shorter.

    Each document is tokenised whole, with the tokenizer's default special tokens; documents of white space only are
    dropped. Short text is used, never padded: 127 tokens at length 128 give one sequence of 127, and 129 give 128 + 1.
    Too few sequences are logged as a warning with the counts. `source_name` names the text in messages.

    Raises ValueError if there is no token at all.
    """
    documents = _encode(texts, tokenizer)
    return _calibration(documents, sequence_length, num_sequences, source_name, spread)


def evaluation_tokens(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    num_windows: int | None = None,
    source_name: str,
    spread: bool = False,
) -> Tokens:
    """Up to `num_windows` (None: all) full windows of `sequence_length` tokens; a shorter rest is not used.

    Tokenising is as in `calibration_tokens`. Fewer windows than asked are logged as a warning with the counts.
    Raises ValueError if the text is shorter than one window, or a window has fewer than the 2 tokens a loss needs.
    """
    _require_loss(sequence_length)
    tokens = pack(_encode(texts, tokenizer), sequence_length, num_windows, keep_remainder=True, spread=spread)
    full = int((tokens.lengths == sequence_length).sum())
    if full == 0:
        found = tokens.ids.numel()
        raise ValueError(
            f"evaluation text is too short: have {found} tokens, need at least {sequence_length}: {source_name}"
        )
    if num_windows is not None and full < num_windows:
        _log.warning(
            "evaluation text %s: %d windows of %d tokens, %d asked", source_name, full, sequence_length, num_windows
        )
    return Tokens(tokens.ids[: full * sequence_length], tokens.lengths[:full])


def split_single_text(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    window_length: int,
    num_windows: int,
    sequence_length: int,
    num_sequences: int,
    source_name: str,
) -> tuple[Tokens, Tokens]:
    """Evaluation and calibration tokens of one text without a token in common.

    Evaluation takes the first `num_windows` windows of `window_length` tokens of the documents laid end to end,
    calibration only what follows (`num_sequences` of `sequence_length`, as in `calibration_tokens`).
    Raises ValueError with the counts if evaluation leaves nothing for calibration, or for sizes that make no sense.
    """
    _require_loss(window_length)
    _require_positive(num_windows=num_windows, sequence_length=sequence_length, num_sequences=num_sequences)
    held_out = window_length * num_windows
    stream = itertools.chain.from_iterable(_encode(texts, tokenizer))
    first = list(itertools.islice(stream, held_out))
    rest = list(itertools.islice(stream, sequence_length * num_sequences))
    if not rest:
        raise ValueError(
            f"{source_name} has {len(first)} tokens and evaluation takes the first {held_out} ({num_windows} windows "
            f"of {window_length}), so 0 are left for calibration"
        )
    evaluation = pack([first], window_length, num_windows)
    return evaluation, _calibration([rest], sequence_length, num_sequences, source_name, spread=False)


def save_tokens(path: Path, tokens: Tokens, metadata: Mapping[str, str | int]) -> None:
    """Write tokens (`ids` int32, `lengths` int64) as safetensors, atomically; equal arguments give equal bytes.

    `num_sequences` and `num_tokens` are added to `metadata`, counted from `tokens`.
    """
    counted = {**metadata, "num_sequences": len(tokens), "num_tokens": tokens.ids.numel()}
    save_tensors(Path(path), {"ids": tokens.ids, "lengths": tokens.lengths}, counted)


def load_tokens(path: Path) -> tuple[Tokens, dict[str, str | int]]:
    """Tokens and metadata that `save_tokens` wrote. Raises ValueError if the file is something else."""
    tensors, metadata = load_tensors(Path(path))
    if tensors.keys() != {"ids", "lengths"}:
        raise ValueError(f"{path} is not a file of tokens: it holds {', '.join(tensors) or 'nothing'}")
    return Tokens(tensors["ids"], tensors["lengths"]), metadata


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """Token ids of each document that is more than white space, as they are asked for."""
    from tqdm import tqdm

    with tqdm(total=sum(map(len, texts)), desc="tokenize", unit="char", unit_scale=True, delay=10) as bar:
        for text in texts:
            if text and not text.isspace():
                with _without_length_warning():
                    ids = tokenizer(text)["input_ids"]
                yield ids
            bar.update(len(text))


@contextmanager
def _without_length_warning() -> Iterator[None]:
    """Hide transformers' note that a document is longer than the model's context: documents are cut up afterwards."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Token indices sequence length is longer")

    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _require_positive(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _require_loss(window_length: int) -> None:
    if window_length < 2:
        raise ValueError(f"an evaluation window must have at least 2 tokens, got {window_length}")


def _windows(ids: Sequence[int], length: int) -> list[Sequence[int]]:
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _cut_in_order(documents: Iterable[Sequence[int]], length: int, _wanted: int | None) -> Iterator[Sequence[int]]:
    """Windows of the documents laid end to end; only the last may be short."""
    rest: list[int] = []
    for document in documents:
        rest.extend(document)
        full = len(rest) // length * length
        yield from _windows(rest[:full], length)
        rest = rest[full:]
    if rest:
        yield rest


def _deal(documents: Iterable[Sequence[int]], length: int, wanted: int | None) -> Iterator[Sequence[int]]:
    """Windows dealt round-robin from the documents (see `pack`); only the last may be short."""
    streams: list[list[Sequence[int]]] = []
    shared: list[int] = []
    for document in documents:
        full = len(document) // length * length
        if full:
            streams.append(_windows(document[:full], length))
        shared.extend(document[full:])
        if wanted is not None and (len(streams) >= wanted or len(shared) >= wanted * length):
            break
    full = len(shared) // length * length
    streams.append(_windows(shared[:full], length))
    for turn in itertools.zip_longest(*streams):
        yield from (window for window in turn if window is not None)
    if shared[full:]:
        yield shared[full:]


def _calibration(
    documents: Iterable[Sequence[int]], sequence_length: int, num_sequences: int, source_name: str, spread: bool
) -> Tokens:
    tokens = pack(documents, sequence_length, num_sequences, keep_remainder=True, spread=spread)
    if len(tokens) == 0:
        raise ValueError(f"calibration text has 0 usable tokens: {source_name}")
    _log.log(
        logging.INFO if len(tokens) == num_sequences else logging.WARNING,
        "calibration text %s: uses %d of the %d sequences of %d tokens asked (%d tokens; the last sequence has %d)",
        source_name,
        len(tokens),
        num_sequences,
        sequence_length,
        tokens.ids.numel(),
        int(tokens.lengths[-1]),
    )
    return tokens
