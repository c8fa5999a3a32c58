"""Loading documents, packing them into token windows, and storing those."""

import gzip
import hashlib
import http.server
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from otf_llm import text
from otf_llm.text import Tokens, calibration_tokens, evaluation_tokens, load_texts, pack, split_single_text

GOOD_LINES = "".join(f"line {i}\n" for i in range(1000)).encode()


def byte_tokenizer(document):
    """One token per UTF-8 byte, no special tokens."""
    return {"input_ids": list(document.encode())}


def as_lists(tokens):
    return [sequence.tolist() for sequence in tokens.sequences()]


@pytest.fixture
def write(tmp_path):
    def write(name, data):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return write


@pytest.fixture(autouse=True)
def _notes(caplog):
    caplog.set_level(logging.INFO, logger="otf_llm.text")


def write_parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


# Files and folders


def test_one_document_per_text_file_and_per_row_in_the_order_given(write, tmp_path):
    files = [
        write("b.txt", b"bee\n\nbee\n"),
        write("a.md", b"# A"),
        write("c.jsonl", b'{"text":"c1"}\n\n{"text":"c2"}'),
    ]
    files.append(write_parquet(tmp_path / "d.parquet", text=["d1", "d2"]))
    files.append(write("e.TXT", b"e"))
    assert load_texts(files) == ["bee\n\nbee\n", "# A", "c1", "c2", "d1", "d2", "e"]


def test_folder_is_read_recursively_by_name_and_other_kinds_are_noted(write, tmp_path, caplog):
    for i in (10, 9, 2, 1):
        write(f"f/{i:02}.txt", f"doc {i}".encode())
    write("f/05/x.md", b"deep")
    write("f/notes.pdf", b"%PDF")
    assert load_texts([tmp_path / "f"]) == ["doc 1", "doc 2", "deep", "doc 9", "doc 10"]
    assert re.search(r"notes\.pdf is ignored: its kind is not one of \.txt", caplog.text)


def test_unsupported_kind_given_explicitly(write):
    with pytest.raises(ValueError, match=r"a\.pdf is of no supported kind \(\.txt, \.md, \.jsonl, .*\.parquet\)"):
        load_texts([write("a.pdf", b"%PDF")])


def test_missing_path_and_folder_without_text(write, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.txt does not exist"):
        load_texts([tmp_path / "nothing.txt"])
    write("f/a.bin", b"x")
    with pytest.raises(ValueError, match=r"f holds no text files \(.*\) among its 1 files"):
        load_texts([tmp_path / "f"])


def test_names_that_look_like_patterns(write, tmp_path):
    names = ["[ab]*.txt", "a?.jsonl", "{x}.parquet"]
    files = [
        write(names[0], b"one"),
        write(names[1], b'{"text":"two"}'),
        write_parquet(tmp_path / names[2], text=["3"]),
    ]
    assert load_texts(files) == ["one", "two", "3"]


def test_content_that_looks_like_something_else_stays_text(write):
    """Magic numbers of archives, dates, a leading guard character and JSON line ends that are none in JSON."""
    documents = ["BZh9 is bzip2's magic", "PK\x03\x04", "|guard", "2024-01-31"]
    assert load_texts([write(f"{i}.txt", d.encode()) for i, d in enumerate(documents)]) == documents
    rows = ["2024-01-31", "2024-02-01T10:00:00", "a\u2028b\x85c", "12", "x\r\ny"]
    lines = "\n".join(json.dumps({"text": row, "n": i}, ensure_ascii=False) for i, row in enumerate(rows))
    assert load_texts([write("dates.jsonl", lines.encode())]) == rows
    assert load_texts([write("date.jsonl", b'{"text": "2024-01-31"}\n')]) == ["2024-01-31"]


def test_column_can_be_chosen(write, tmp_path):
    files = [write("a.jsonl", b'{"body":"a","text":1}\n'), write_parquet(tmp_path / "b.parquet", id=[1], body=["b"])]
    assert load_texts(files, column="body") == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"title":"x","body":"y"}', r"a\.jsonl line 2 has no column 'text'; its columns are title, body"),
        (b"{}", r"a\.jsonl line 2 has no column 'text'; its columns are none"),
        (b'{"text":null}', r"a\.jsonl line 2 column 'text' is null, not a string"),
        (b'{"text":3}', r"a\.jsonl line 2 column 'text' is int, not a string"),
        (rb'{"text":"a\ud800"}', r"a\.jsonl line 2 column 'text' is not text at character 2"),
        (b'["x"]', r"a\.jsonl line 2 holds a list: need one object per line"),
        (b'{"text":', r"a\.jsonl line 2 is not JSON"),
    ],
)
def test_bad_json_row_names_file_and_line(write, line, message):
    with pytest.raises(ValueError, match=message):
        load_texts([write("a.jsonl", b'{"text":"good"}\n' + line + b"\n")])


def test_two_json_objects_on_a_line(write):  # DAT-05
    with pytest.raises(ValueError, match=r"bad\.jsonl line 1 holds more than one JSON value, at character 13"):
        load_texts([write("bad.jsonl", b'{"text":"a"}{"text":"b"}\n')])


def test_empty_shard_among_several_is_skipped_with_a_note(write, tmp_path, caplog):  # DAT-03
    write("f/00.jsonl", b"")
    write("f/01.jsonl", b'{"text":"a"}\n{"text":"b"}\n')
    assert load_texts([tmp_path / "f"]) == ["a", "b"]
    assert re.search(r"00\.jsonl holds no text and is skipped", caplog.text)


def test_every_kind_of_empty_file_is_skipped(write, tmp_path, caplog):
    files = [write("a.txt", b""), write("b.txt", b"\xef\xbb\xbf"), write("c.txt.gz", gzip.compress(b""))]
    files += [write("d.jsonl", b"\n \n"), write("e.parquet", b"")]
    files.append(tmp_path / "f.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), files[-1])
    assert load_texts(files) == []
    assert caplog.text.count("holds no text and is skipped") == len(files)
    assert load_texts([*files, write("g.txt", b"g")]) == ["g"]


def test_parquet_column_missing_null_or_no_string(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", title=["x"], n=[1])
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text'; its columns are title, n"):
        load_texts([path])
    with pytest.raises(ValueError, match=r"a\.parquet row 0 column 'n' is int, not a string"):
        load_texts([path], column="n")
    write_parquet(path, text=["x", None])
    with pytest.raises(ValueError, match=r"a\.parquet row 1 column 'text' is null, not a string"):
        load_texts([path])


def test_parquet_with_other_columns_and_large_strings(tmp_path):
    one = write_parquet(tmp_path / "1.parquet", text=["a"], n=[1])
    two = write_parquet(tmp_path / "2.parquet", other=[2.5], text=pa.array(["b"], pa.large_string()))
    assert load_texts([one, two]) == ["a", "b"]


def test_parquet_that_is_none(write, tmp_path):
    with pytest.raises(ValueError, match=r"a\.parquet is damaged or not Parquet"):
        load_texts([write("a.parquet", b"PAR1 no, not really PAR1")])
    with pytest.raises(ValueError, match=r"b\.parquet is gzip, not Parquet"):
        load_texts([write("b.parquet", gzip.compress(b"x"))])
    invalid = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xac\xff")]
    )
    with pytest.raises(ValueError, match=r"c\.parquet is damaged or not Parquet \(from row 0\): .*UTF8"):
        load_texts([write_parquet(tmp_path / "c.parquet", text=invalid)], errors="replace")


# Encodings


def test_gzip_is_named_or_decompressed(write):  # DAT-01
    with pytest.raises(ValueError, match=r"calib\.txt is gzip, not plain text: .*calib\.txt\.gz"):
        load_texts([write("calib.txt", gzip.compress(b"words"))])
    assert load_texts([write("calib.txt.gz", gzip.compress(b"words"))]) == ["words"]
    assert load_texts([write("rows.jsonl.gz", gzip.compress(b'{"text":"row"}\n'))]) == ["row"]


@pytest.mark.parametrize(
    "data", [b"plain", gzip.compress(b"words" * 99)[:-9], gzip.compress(b"words")[:20] + b"\xff" * 9]
)
def test_damaged_gzip(write, data):
    with pytest.raises(ValueError, match=r"calib\.txt\.gz is not a whole gzip file"):
        load_texts([write("calib.txt.gz", data)])


def test_bad_byte_deep_in_the_file_is_an_error_with_offset(write):  # DAT-02
    with pytest.raises(ValueError, match=rf"deep\.txt is not UTF-8 at byte {len(GOOD_LINES)} \(0xac\)"):
        load_texts([write("deep.txt", GOOD_LINES + b"\xac\xff")])
    with pytest.raises(ValueError, match=rf"bom\.txt is not UTF-8 at byte {len(GOOD_LINES) + 3} \(0xac\)"):
        load_texts([write("bom.txt", b"\xef\xbb\xbf" + GOOD_LINES + b"\xac\xff")])
    with pytest.raises(ValueError, match=r"deep\.txt\.gz is not UTF-8 at byte 2 of the decompressed text"):
        load_texts([write("deep.txt.gz", gzip.compress(b"ab\xac"))])
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 at byte 3 \(0xe9\)"):
        load_texts([write("latin.txt", b"caf\xe9")])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_utf_16_is_refused_by_name(write, encoding, errors):  # DAT-02
    with pytest.raises(ValueError, match=r"wide\.txt starts with a UTF-16 or UTF-32 byte order mark"):
        load_texts([write("wide.txt", "words".encode(encoding))], errors=errors)


def test_utf_8_byte_order_mark_is_dropped(write):  # DAT-02
    assert load_texts([write("bom.txt", b"\xef\xbb\xbfwords \xef\xbb\xbf")]) == ["words \ufeff"]
    assert load_texts([write("bom.jsonl", b'\xef\xbb\xbf{"text":"row"}\n')]) == ["row"]


def test_lenient_mode_keeps_every_good_byte_and_counts_the_others(write, caplog):  # DAT-08
    (document,) = load_texts([write("deep.txt", GOOD_LINES + b"\xac\xff")], errors="replace")
    assert document == GOOD_LINES.decode() + "\ufffd\ufffd"
    assert re.search(r"deep\.txt: 2 bytes that are not UTF-8 were replaced", caplog.text)
    assert load_texts([write("latin.txt", b"caf\xe9\nol\xe9")], errors="replace") == ["caf\ufffd\nol\ufffd"]


def test_lenient_mode_keeps_rows(write, caplog):  # DAT-08
    rows = b"".join(b'{"text":"row %d \xac\xff"}\n' % i for i in range(1000))
    assert load_texts([write("rows.jsonl", rows)], errors="replace") == [f"row {i} \ufffd\ufffd" for i in range(1000)]
    assert "2000 bytes that are not UTF-8 were replaced" in caplog.text


@given(
    st.lists(st.sampled_from([b"a", "\u00e9".encode(), "\ufffd".encode(), b"\xac", b"\xe2\x82", b"\xf0\x9f", b"\n"]))
)
def test_number_of_replaced_bytes(pieces):
    data = b"".join(pieces)

    class File:  # a stand-in, so that no disk is involved
        suffix = ".txt"

        def read_bytes(self):
            return data

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("otf_llm.text").addHandler(handler)
    try:
        decoded = text._decode(File(), "replace")
    finally:
        logging.getLogger("otf_llm.text").removeHandler(handler)
    good = data.decode("utf-8", "ignore")
    # "\ufffd" stands both for what the data really holds and for what was replaced
    assert decoded.replace("\ufffd", "") == good.replace("\ufffd", "")
    replaced = records[0].args[1] if records else 0
    assert replaced == len(data) - len(good.encode())


def test_unknown_error_policy(tmp_path):
    with pytest.raises(ValueError, match='errors must be "strict" or "replace", got \'ignore\''):
        load_texts([], errors="ignore")


def test_nothing_is_written_at_home(write, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    files = [write("a.txt", b"a"), write("b.jsonl", b'{"text":"b"}'), write_parquet(tmp_path / "c.parquet", text=["c"])]
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    code = "import sys; from otf_llm.text import load_texts; print(load_texts(sys.argv[1:]))"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**keep, "HOME": str(home), "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=True)
    assert done.stdout == "['a', 'b', 'c']\n"
    assert list(home.iterdir()) == []
    assert list(scratch.iterdir()) == []


# The hub


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_hub_dataset_offline_is_an_error_at_once(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    start = time.monotonic()
    with pytest.raises(OSError, match=f"cannot load the dataset lab/tiny from the hub: {variable} is set"):
        text.load_hub_dataset("lab/tiny")
    assert time.monotonic() - start < 1


HUB_CODE = """
import sys, json
from otf_llm.text import load_hub_dataset
for options in json.loads(sys.argv[1]):
    try:
        print("got", load_hub_dataset(**options))
    except (OSError, ValueError) as error:
        print("OSError" if isinstance(error, OSError) else "ValueError", error)
"""


def ask_hub(endpoint, folder, *calls):
    """Results of load_hub_dataset in a new process, since the hub's address is read at import."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    environment = {
        **keep,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", HUB_CODE, json.dumps(calls)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


class TinyHub(http.server.BaseHTTPRequestHandler):
    """What the hub answers about one public dataset, lab/tiny: two commits of one file."""

    protocol_version = "HTTP/1.1"
    commits = {"main": "a" * 40, "old": "b" * 40}  # noqa: RUF012

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        revision = next((part for part in path.split("/") if part in {*self.commits, *self.commits.values()}), "main")
        commit = self.commits.get(revision, revision)
        data = json.dumps({"text": "new" if commit == self.commits["main"] else "old", "n": 1}).encode() + b"\n"
        entry = {"type": "file", "oid": "0" * 40, "size": len(data), "path": "train.jsonl"}
        if path.startswith("/api/datasets/lab/tiny/tree/"):
            self.answer(200, json.dumps([entry]).encode(), Content_Type="application/json")
        elif path.startswith("/api/datasets/lab/tiny/paths-info/"):
            found = [entry] if b"train.jsonl" in asked else []
            self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
        elif re.fullmatch(r"/api/datasets/lab/tiny(/revision/(main|old|a{40}|b{40}))?", path):
            info = {"id": "lab/tiny", "sha": commit, "siblings": [{"rfilename": "train.jsonl"}], "tags": []}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
        elif path == f"/datasets/lab/tiny/resolve/{commit}/train.jsonl":
            self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)
        elif path.startswith("/api/datasets/lab/tiny/"):
            self.answer(404, X_Error_Code="RevisionNotFound")
        else:
            self.answer(404, X_Error_Code="EntryNotFound" if "/resolve/" in path else "RepoNotFound")

    do_HEAD = do_POST = do_GET


@contextmanager
def tiny_hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TinyHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_hub_dataset_is_exactly_the_one_asked_for(tmp_path):
    """A folder of the same name is not taken, each revision gives its own text, and mistakes are named."""
    (tmp_path / "lab/tiny").mkdir(parents=True)
    (tmp_path / "lab/tiny/train.jsonl").write_text('{"text": "a local folder"}\n')
    wishes = [{}, {"revision": "old"}, {"revision": "a" * 40}, {"revision": "none"}, {"column": "x"}, {"column": "n"}]
    wishes += [{"split": "test"}, {"config": "nope"}, {"name": "lab/none"}, {"name": "a b/c"}]
    with tiny_hub() as endpoint:
        answers = ask_hub(endpoint, tmp_path, *({"name": "lab/tiny", **wish} for wish in wishes))
    assert answers[:3] == ["got ['new']", "got ['old']", "got ['new']"]
    for answer, part in zip(
        answers[3:],
        [
            "the hub has no dataset lab/tiny at revision none that can be read (HTTP 404)",
            "dataset lab/tiny has no column 'x'; its columns are text, n",
            "dataset lab/tiny row 0 column 'n' is int, not a string",
            "dataset lab/tiny, configuration None, split test: ",
            "dataset lab/tiny, configuration nope, split train: ",
            "the hub has no dataset lab/none that can be read (HTTP 404)",
            "'a b/c' is no name of a dataset on the hub",
        ],
        strict=True,
    ):
        assert answer.startswith(f"ValueError {part}")


def test_hub_that_cannot_be_reached_is_not_replaced_by_the_cache(tmp_path):
    with tiny_hub() as endpoint:
        assert ask_hub(endpoint, tmp_path, {"name": "lab/tiny"}) == ["got ['new']"]
    start = time.monotonic()
    (answer,) = ask_hub(endpoint, tmp_path, {"name": "lab/tiny"})
    assert answer.startswith("OSError cannot load the dataset lab/tiny: the hub cannot be reached")
    assert time.monotonic() - start < 30


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
    text.save_tokens(tmp_path / "tokens.safetensors", tokens, {"source": "three.jsonl"})
    _, metadata = text.load_tokens(tmp_path / "tokens.safetensors")
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
        text.save_tokens(path, tokens, dict(reversed(metadata.items())) if turn % 2 else metadata)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    assert len(list(tmp_path.iterdir())) == 8, "no temporary file is left"
    loaded, found = text.load_tokens(path)
    assert torch.equal(loaded.ids, tokens.ids)
    assert torch.equal(loaded.lengths, tokens.lengths)
    assert found == {**metadata, "num_sequences": 3, "num_tokens": 10}


def test_views_can_be_saved(tmp_path):
    tokens = evaluation_tokens(["abcdef"], byte_tokenizer, sequence_length=4, source_name="x")
    text.save_tokens(tmp_path / "t", tokens, {})
    assert as_lists(text.load_tokens(tmp_path / "t")[0]) == [list(b"abcd")]


def test_file_that_holds_no_tokens(write, tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match=r"t\.bin is not a file of tokens"):
        text.load_tokens(write("t.bin", b"something else"))
    save_file({"weight": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"w\.safetensors is not a file of tokens"):
        text.load_tokens(tmp_path / "w.safetensors")


def test_import_stays_light():
    code = "import sys, otf_llm.text; print([m for m in ('datasets', 'transformers', 'pyarrow') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert Path(text.__file__).name == "text.py"
