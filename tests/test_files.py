import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from otf_llm.files import (
    atomic_folder,
    atomic_path,
    check_space,
    check_writable,
    parse_json_object,
    sha256,
    stored_metadata,
    write_json,
)
from otf_llm.streaming import save_tensors


def test_write_json_is_deterministic_and_leaves_one_file(tmp_path):
    write_json(tmp_path / "a.json", {"b": 1, "a": ["é", 2.5]})
    write_json(tmp_path / "b.json", {"a": ["é", 2.5], "b": 1})
    text = (tmp_path / "a.json").read_bytes()
    assert text == (tmp_path / "b.json").read_bytes()
    assert text.endswith(b"\n")
    assert json.loads(text) == {"a": ["é", 2.5], "b": 1}
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]


@pytest.mark.parametrize(("value", "error"), [(float("nan"), ValueError), ({1, 2}, TypeError)])
def test_write_json_refuses_values_without_touching_the_old_file(tmp_path, value, error):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(error):
        write_json(tmp_path / "a.json", {"x": value})
    assert (tmp_path / "a.json").read_text() == "1\n"
    assert os.listdir(tmp_path) == ["a.json"]


def half_a_file(folder):
    with atomic_path(folder / "file") as partial:
        partial.write_text("half")
        raise RuntimeError("broke")


def half_a_folder(folder):
    with atomic_folder(folder / "folder") as partial:
        (partial / "half").write_text("half")
        raise RuntimeError("broke")


def test_an_error_keeps_the_old_file_and_folder(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("old")
    for fails in (half_a_file, half_a_folder):
        with pytest.raises(RuntimeError, match="broke"):
            fails(tmp_path)
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path / "folder") == ["kept"]
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_atomic_folder_replaces_the_old_folder_and_a_killed_run_s_leftover(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (tmp_path / f".folder.{dead.stdout.strip()}.partial").mkdir()
    (tmp_path / f".folder.{dead.stdout.strip()}.partial" / "leftover").touch()
    with atomic_folder(tmp_path / "folder") as partial:
        (partial / "new").touch()
    assert os.listdir(tmp_path / "folder") == ["new"]
    assert os.listdir(tmp_path) == ["folder"]


def test_an_unrelated_os_error_keeps_its_own_file_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, atomic_path(tmp_path / "out"):
        (tmp_path / "absent").read_bytes()
    assert caught.value.filename == str(tmp_path / "absent")


@pytest.mark.parametrize(
    "action",
    [
        "write_json(path, 'x' * 5000)",
        "with atomic_path(path) as partial: partial.write_bytes(bytes(5000))",
        "with atomic_folder(path) as partial: (partial / 'big').write_bytes(bytes(5000))",
        # A Rust library's error carries the system's error number in words only.
        "import numpy, safetensors.numpy\n"
        "with atomic_path(path) as partial: safetensors.numpy.save_file({'x': numpy.zeros(5000)}, partial)",
    ],
)
def test_a_full_disk_leaves_nothing_and_names_the_path(tmp_path, action):
    # A file size limit stands in for a full disk (EFBIG for ENOSPC); it holds for the subprocess alone.
    program = f"from pathlib import Path\nfrom otf_llm.files import *\npath = Path({str(tmp_path / 'out')!r})\n{action}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode != 0
    assert f"OSError: [Errno 27] File too large while writing: '{tmp_path / 'out'}'" in done.stderr
    assert os.listdir(tmp_path) == []


def test_sha256_of_known_bytes(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")  # FIPS 180-2, appendix B.1
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "the key a is there twice"),
        (b'{"a": ' * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_parse_json_object_refuses(text, message):
    with pytest.raises(ValueError, match=f"^that file.*{message}"):
        parse_json_object(text, "that file")


def test_the_partial_file_of_a_living_process_is_left_alone(tmp_path):
    other = tmp_path / f".file.{os.getppid()}.partial"
    other.touch()
    with atomic_path(tmp_path / "file") as partial:
        partial.write_text("mine")
    assert other.exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_stored_metadata_needs_no_torch_and_no_sound_file(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"w": torch.zeros(2)}, {"hub": "org/name", "n": 3})
    assert stored_metadata(tmp_path / "x.safetensors") == {"hub": "org/name", "n": 3}
    (tmp_path / "bad").write_bytes(b"\xff" * 20)
    (tmp_path / "short").write_bytes(b"\x00")
    assert [stored_metadata(tmp_path / name) for name in ("bad", "short", "absent")] == [{}, {}, {}]


def test_space_is_checked_against_what_is_still_to_be_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    (tmp_path / "done.bin").write_bytes(b"x" * 900)
    assert check_space(tmp_path, {"done.bin": 900, "next.bin": 1000}) == (1000, 1000)
    with pytest.raises(OSError, match=r"0\.0 MB are still to be written, 0\.0 MB are free") as caught:
        check_space(tmp_path, {"next.bin": 1001})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    (tmp_path / ".next.bin.123.partial").write_bytes(b"x" * 5000)  # another job's file, under way
    assert check_space(tmp_path, {"next.bin": 4000})[1] >= 5000


def test_what_stands_in_the_way_of_the_results_is_named(tmp_path, monkeypatch):
    """CNV-51: before anything is calibrated."""
    check_writable(tmp_path / "absent" / "results")
    (tmp_path / "results").write_text("")
    for path in (tmp_path / "results", tmp_path / "results" / "deeper"):
        with pytest.raises(NotADirectoryError, match=r"it is no folder: '.*/results'$"):
            check_writable(path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match=r"it is no folder: '.*/dangling'$"):
        check_writable(tmp_path / "dangling")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(PermissionError, match="the folder is read-only"):
        check_writable(tmp_path / "absent")
