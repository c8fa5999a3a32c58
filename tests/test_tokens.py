import hashlib
import itertools
import json
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from otf_llm.text import load_texts
from otf_llm.tokens import (
    Tokens,
    calibration_tokens,
    evaluation_tokens,
    load_tokens,
    pack,
    save_tokens,
    split_single_text,
)


def byte_tokenizer(document):
    """One token per UTF-8 byte, no special tokens."""
    return {"input_ids": list(document.encode())}


def as_lists(tokens):
    return [sequence.tolist() for sequence in tokens.sequences()]


@pytest.fixture(autouse=True)
def _notes(caplog):
    caplog.set_level(logging.INFO, logger="otf_llm.tokens")


# Packing

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=8)


@given(DOCUMENTS, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 12)))
def test_pack_cuts_the_documents_laid_end_to_end(documents, length, wanted):
    stream = list(itertools.chain(*documents))
    windows = [stream[i : i + length] for i in range(0, len(stream), length)]
    assert as_lists(pack(documents, length, wanted, keep_remainder=True)) == windows[:wanted]
    assert as_lists(pack(documents, length, wanted)) == [w for w in windows[:wanted] if len(w) == length]


@given(DOCUMENTS, st.integers(1, 5))
def test_spread_keeps_every_token_once(documents, length):
    numbered, counter = [], itertools.count()
    for document in documents:
        numbered.append([next(counter) for _ in document])
    tokens = pack(numbered, length, None, keep_remainder=True, spread=True)
    assert sorted(tokens.ids.tolist()) == list(range(sum(map(len, documents))))
    assert (tokens.lengths[:-1] == length).all()


def test_spread_deals_round_robin_with_short_documents_as_one_stream():
    documents = [[10, 11, 12, 13, 14], [20, 21, 22], [1], [30, 31, 32, 33, 34, 35], [2]]
    expected = [[10, 11], [20, 21], [30, 31], [14, 22], [12, 13], [32, 33], [1, 2], [34, 35]]
    assert as_lists(pack(documents, 2, None, spread=True)) == expected
    assert as_lists(pack(documents, 2, 5, spread=True)) == expected[:5]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("document", "read"), [([7] * 8, 4), ([7], 16)], ids=["long documents", "short documents"])
def test_no_more_documents_are_read_than_needed(document, read, spread):
    """4 windows of 4 tokens, out of far more documents than that."""
    documents = iter([document] * 100)
    assert len(pack(documents, 4, 4, spread=spread)) == 4
    assert len(list(documents)) >= 100 - read


@pytest.mark.parametrize(("length", "wanted"), [(0, 1), (-1, None), (1, 0)])
def test_pack_refuses_sizes_below_one(length, wanted):
    with pytest.raises(ValueError, match="must be at least 1, got"):
        pack([[1]], length, wanted)


def test_tokens_are_checked():
    ids = torch.arange(3, dtype=torch.int32)
    tokens = Tokens(ids, torch.tensor([1, 2]))
    assert (len(tokens), as_lists(tokens)) == (2, [[0], [1, 2]])
    assert as_lists(Tokens(ids[:0], torch.empty(0, dtype=torch.int64))) == []
    with pytest.raises(ValueError, match=r"lengths must be positive and sum to 3, got \[1, 1\]"):
        Tokens(ids, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"lengths must be positive and sum to 3, got \[3, 0\]"):
        Tokens(ids, torch.tensor([3, 0]))
    with pytest.raises(ValueError, match=r"ids must be 1-D torch.int32, got 1-D torch\.int64"):
        Tokens(ids.long(), torch.tensor([3]))


# Calibration


def calibrate(path, *, length=128, wanted=512, **options):
    texts = load_texts([path])
    return calibration_tokens(
        texts, byte_tokenizer, sequence_length=length, num_sequences=wanted, source_name=str(path), **options
    )


@pytest.mark.parametrize("data", [b"", b"\n\n \n"])
def test_empty_calibration_text_stops_at_once(write, data):  # CAL-01
    path = write("empty.txt", data)
    with pytest.raises(ValueError, match=r"calibration text has 0 usable tokens: .*empty\.txt"):
        calibrate(path)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        (b"nine char\n" * 5, [50]),
        (b"x" * 127, [127]),
        (b"x" * 128, [128]),
        (b"x" * 129, [128, 1]),
    ],
)
def test_short_calibration_text_is_used_and_counted(write, caplog, data, lengths, spread):  # CAL-02
    tokens = calibrate(write("short.txt", data), spread=spread)
    assert tokens.lengths.tolist() == lengths
    assert tokens.ids.tolist() == list(data)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"uses {len(lengths)} of the 512 sequences of 128 tokens asked ({len(data)} tokens; " in warning
    assert f"the last sequence has {lengths[-1]})" in warning


def test_enough_calibration_text_warns_of_nothing(write, caplog):
    assert calibrate(write("enough.txt", b"x" * 129), wanted=1).lengths.tolist() == [128]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_more_sequences_asked_than_there_are(write, tmp_path, caplog):  # CAL-03
    rows = b"".join(json.dumps({"text": letter * 16}).encode() + b"\n" for letter in "abc")
    tokens = calibrate(write("three.jsonl", rows), length=16, wanted=512)
    assert as_lists(tokens) == [[ord(letter)] * 16 for letter in "abc"]
    assert "uses 3 of the 512 sequences of 16 tokens asked" in caplog.text
    save_tokens(tmp_path / "tokens.safetensors", tokens, {"source": "three.jsonl"})
    _, metadata = load_tokens(tmp_path / "tokens.safetensors")
    assert metadata == {"source": "three.jsonl", "num_sequences": 3, "num_tokens": 48}


def test_documents_are_tokenised_whole_and_white_space_is_dropped():
    seen = []

    def tokenizer(document):
        seen.append(document)
        return {"input_ids": [256, *document.encode()]}  # a beginning-of-text token per document

    texts = ["ab", " \n", "", "c"]
    tokens = calibration_tokens(texts, tokenizer, sequence_length=3, num_sequences=9, source_name="x")
    assert seen == ["ab", "c"]
    assert as_lists(tokens) == [[256, 97, 98], [256, 99]]


@pytest.fixture
def fast_tokenizer():
    """A real tokenizer of bytes that believes in a context of 16 tokens and has no pad token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=16)


def test_length_warning_is_silenced_and_the_tokenizer_stays_as_it_was(fast_tokenizer, tmp_path, caplog):
    name = "transformers.tokenization_utils_base"
    caplog.set_level(logging.WARNING, logger=name)
    logging.getLogger(name).addHandler(caplog.handler)  # transformers' loggers do not always propagate
    fast_tokenizer.save_pretrained(tmp_path / "before")
    document = "To be, or not to be: caf\u00e9. " * 20
    tokens = calibration_tokens([document], fast_tokenizer, sequence_length=64, num_sequences=99, source_name="x")
    assert fast_tokenizer.decode(tokens.ids.tolist()) == document
    assert "longer than" not in caplog.text
    fast_tokenizer.save_pretrained(tmp_path / "after")
    before, after = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("before", "after"))
    assert before == after
    assert before
    fast_tokenizer.deprecation_warnings.clear()
    fast_tokenizer(document)
    logging.getLogger(name).removeHandler(caplog.handler)
    assert "longer than" in caplog.text, "other calls still warn"


# Evaluation


@pytest.mark.parametrize("count", [10, 1, 0])
def test_evaluation_text_shorter_than_a_window(write, count):  # DAT-09
    path = write("bench.txt", b"x" * count)
    message = rf"evaluation text is too short: have {count} tokens, need at least 512: .*bench\.txt"
    with pytest.raises(ValueError, match=message):
        evaluation_tokens(load_texts([path]), byte_tokenizer, sequence_length=512, source_name=str(path))


def test_evaluation_uses_full_windows_only(caplog):
    options = {"sequence_length": 4, "source_name": "x"}
    assert as_lists(evaluation_tokens(["abcde", "fghij"], byte_tokenizer, **options)) == [list(b"abcd"), list(b"efgh")]
    assert as_lists(evaluation_tokens(["abcdefgh"], byte_tokenizer, num_windows=1, **options)) == [list(b"abcd")]
    assert caplog.records == []
    spread = evaluation_tokens(["abcdefgh", "ABCDEFGH"], byte_tokenizer, num_windows=2, spread=True, **options)
    assert as_lists(spread) == [list(b"abcd"), list(b"ABCD")]
    evaluation_tokens(["abcdefghi"], byte_tokenizer, num_windows=3, **options)
    assert "evaluation text x: 2 windows of 4 tokens, 3 asked" in caplog.text


def test_evaluation_window_of_one_token_has_no_loss():
    with pytest.raises(ValueError, match="must have at least 2 tokens, got 1"):
        evaluation_tokens(["abc"], byte_tokenizer, sequence_length=1, source_name="x")


def split(document, **options):
    sizes = {"window_length": 4, "num_windows": 2, "sequence_length": 3, "num_sequences": 2, **options}
    return split_single_text([document], byte_tokenizer, source_name="one.txt", **sizes)


def test_one_text_for_both_is_split_without_overlap(caplog):
    evaluation, calibration = split("abcdefghijklmnopq")
    assert as_lists(evaluation) == [list(b"abcd"), list(b"efgh")]
    assert as_lists(calibration) == [list(b"ijk"), list(b"lmn")]
    evaluation, calibration = split("abcdefghi")
    assert as_lists(calibration) == [list(b"i")]
    assert "calibration text one.txt: uses 1 of the 2 sequences of 3 tokens asked" in caplog.text


@pytest.mark.parametrize("document", ["abcdefgh", "abc", " "])
def test_nothing_left_for_calibration(document):
    count = len(document.strip())
    message = rf"one\.txt has {count} tokens and evaluation takes the first 8 \(2 windows of 4\), so 0 are left"
    with pytest.raises(ValueError, match=message):
        split(document)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("window_length", 1, 2), ("num_windows", 0, 1), ("sequence_length", 0, 1), ("num_sequences", -1, 1)],
)
def test_split_refuses_sizes_that_make_no_sense(name, value, least):
    with pytest.raises(ValueError, match=f"must (be|have) at least {least}.*got {value}"):
        split("abcdefghijkl", **{name: value})


# Storage


def test_saved_tokens_are_the_same_bytes_every_time(tmp_path):
    tokens = pack([list(range(10))], 4, None, keep_remainder=True)
    metadata = {"model": "tiny", "revision": "abc", "length": 4, "source": "caf\u00e9"}
    digests = set()
    for turn in range(8):  # safetensors shuffles several metadata keys, so one writing would prove little
        path = tmp_path / f"{turn}.safetensors"
        save_tokens(path, tokens, dict(reversed(metadata.items())) if turn % 2 else metadata)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    assert len(list(tmp_path.iterdir())) == 8, "no temporary file is left"
    loaded, found = load_tokens(path)
    assert torch.equal(loaded.ids, tokens.ids)
    assert torch.equal(loaded.lengths, tokens.lengths)
    assert found == {**metadata, "num_sequences": 3, "num_tokens": 10}


def test_views_can_be_saved(tmp_path):
    tokens = evaluation_tokens(["abcdef"], byte_tokenizer, sequence_length=4, source_name="x")
    save_tokens(tmp_path / "t", tokens, {})
    assert as_lists(load_tokens(tmp_path / "t")[0]) == [list(b"abcd")]


def test_file_that_holds_no_tokens(write, tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match=r"t\.bin is not a readable safetensors file"):
        load_tokens(write("t.bin", b"something else"))
    save_file({"weight": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"w\.safetensors is not a file of tokens"):
        load_tokens(tmp_path / "w.safetensors")
