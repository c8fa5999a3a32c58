"""Loading documents, packing them into token windows, and storing those."""

import gzip
import hashlib
import http.server
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
from hypothesis import given
from hypothesis import strategies as st

from otf_llm import text
from otf_llm.text import fingerprint_texts, list_files, load_texts

GOOD_LINES = "".join(f"line {i}\n" for i in range(1000)).encode()


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
    "data",
    [b"plain", gzip.compress(b"words" * 99, mtime=0)[:-9], gzip.compress(b"words", mtime=0)[:20] + b"\xff" * 9],
    ids=["plain", "short", "garbled"],  # compressed bytes hold the time unless told otherwise
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


def test_import_stays_light():
    code = "import sys, otf_llm.text; print([m for m in ('datasets', 'transformers', 'pyarrow') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert Path(text.__file__).name == "text.py"


def test_fingerprint_of_texts_sees_content_and_names_and_not_time(tmp_path):
    (tmp_path / "texts").mkdir()
    file = tmp_path / "texts" / "a.txt"
    file.write_text("one")
    first = fingerprint_texts([tmp_path / "texts"])
    os.utime(file, (1, 1))
    assert fingerprint_texts([tmp_path / "texts"]) == first
    file.write_text("two")
    second = fingerprint_texts([tmp_path / "texts"])
    file.rename(file.with_name("b.txt"))
    third = fingerprint_texts([tmp_path / "texts"])
    assert len({first, second, third}) == 3
    assert fingerprint_texts([]) == fingerprint_texts([])


def test_hidden_and_unsupported_files_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = fingerprint_texts([tmp_path])
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "b.txt").write_text("two")
    (tmp_path / "model.bin").write_text("x")
    assert fingerprint_texts([tmp_path]) == before
    assert [path.name for path in list_files(tmp_path)] == ["a.txt"]


def test_json_beyond_the_parsers_limits_names_the_line(write):
    for line in ("[" * 100_000, '{"text": ' + "1" * 5000 + "}"):
        with pytest.raises(ValueError, match=r"deep\.jsonl line 2 is not readable JSON"):
            load_texts([write("deep.jsonl", f'{{"text": "a"}}\n{line}\n'.encode())])
