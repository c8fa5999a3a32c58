"""What stage scripts run inside: the log, the one-line error, the device, and what a row says of its making."""

import logging
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

import otf_llm
from otf_llm.memory import peak_memory
from otf_llm.stage import pick_device, provenance, stage


@pytest.fixture(autouse=True)
def _restore_logging():
    """``stage`` sets up the root logger for a whole process; other tests in this one need theirs back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []  # so that pytest's own are not closed
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


@pytest.fixture
def log(tmp_path):
    return tmp_path / "stage.log"


@pytest.mark.parametrize("kind", [ValueError, OSError, FileNotFoundError])
def test_a_users_error_is_one_line_and_status_1(log, capfd, kind):
    with pytest.raises(SystemExit) as leaving, stage(str(log)):
        raise kind("weights.safetensors: truncated")
    assert leaving.value.code == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "error: weights.safetensors: truncated\n"
    written = log.read_text()
    assert "Traceback (most recent call last)" in written
    assert f"{kind.__name__}: weights.safetensors: truncated" in written


def test_the_cause_of_an_error_is_in_the_log_alone(log, capfd):
    with pytest.raises(SystemExit), stage(str(log)):
        raise ValueError("the outer sentence") from KeyError("inner")
    assert capfd.readouterr().err == "error: the outer sentence\n"
    assert "KeyError: 'inner'" in log.read_text()


def test_an_error_of_several_lines_is_told_in_one(log, capfd):
    with pytest.raises(SystemExit), stage(str(log)):
        raise ValueError("a library's message\n  goes on here")
    err = capfd.readouterr().err
    assert err.startswith("error: a library's message")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("kind", [RuntimeError, KeyError, TypeError, AssertionError, KeyboardInterrupt])
def test_any_other_exception_passes_whole(log, capfd, kind):
    with pytest.raises(kind, match="a fault of ours"), stage(str(log)):
        raise kind("a fault of ours")
    assert "error:" not in capfd.readouterr().err


def test_a_stage_that_ends_well_logs_to_both_places(log, capfd):
    log.write_text("of an earlier run")
    with stage(str(log)):
        logging.getLogger("otf_llm.text").info("12 documents")
        logging.getLogger("otf_llm.text").warning("café is short")
        logging.getLogger("httpx").info("GET / 200")
        logging.getLogger("httpx").warning("slow")
    shown = capfd.readouterr().err
    peak = re.fullmatch(
        r"INFO: 12 documents\nWARNING: café is short\nWARNING: slow\nINFO: peak resident memory ([\d.]+) MB\n", shown
    )
    assert float(peak[1]) == pytest.approx(peak_memory() / 1e6, abs=1)
    assert log.read_text(encoding="utf-8") == shown


def test_threads_are_set(log):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            with stage(str(log), threads=threads):
                assert torch.get_num_threads() == threads
        with stage(str(log)):
            assert torch.get_num_threads() == 2, "left alone without a number"
    finally:
        torch.set_num_threads(before)


def test_a_process_ends_with_status_1_and_imports_nothing_heavy(log):
    code = (
        "import sys\n"
        "from otf_llm.stage import stage\n"
        f"with stage({str(log)!r}, threads=1):\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "    raise ValueError('calibration text has 0 usable tokens')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: calibration text has 0 usable tokens\n"
    assert "Traceback" in log.read_text()


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("cpu") == pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match=r"^device: cuda was asked for, but torch sees no CUDA device$"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [pick_device(setting) for setting in ("cpu", "auto", "cuda")] == ["cpu", "cuda", "cuda"]


# Provenance


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "code.py").write_text("1")
    git(folder, "add", "code.py")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_the_commit_is_named_and_changes_are_said(repository):
    head = git(repository, "rev-parse", "HEAD")
    assert len(head) == 40
    assert provenance(repository)["commit"] == head
    (repository / "scripts").mkdir()
    assert provenance(repository / "scripts")["commit"] == head, "from a folder inside"
    (repository / "results.csv").write_text("an untracked file is no change")
    assert provenance(repository)["commit"] == head
    (repository / "code.py").write_text("2")
    assert provenance(repository)["commit"] == f"{head}+changes"
    git(repository, "add", "code.py")
    assert provenance(repository)["commit"] == f"{head}+changes"
    git(repository, "commit", "--quiet", "--message", "second")
    assert provenance(repository)["commit"] == git(repository, "rev-parse", "HEAD") != head


def test_a_commit_is_unknown_outside_git_before_one_or_without_git(tmp_path, repository, monkeypatch):
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert provenance(tmp_path / "plain")["commit"] == "unknown"
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "--quiet")
    assert provenance(tmp_path / "empty")["commit"] == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(repository)["commit"] == "unknown"


def test_versions(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "GIT_CEILING_DIRECTORIES", str(tmp_path))
    versions = provenance(tmp_path)["versions"]
    assert versions.keys() == {"otf_llm", "torch", "transformers", "triton"}
    assert versions["otf_llm"] == otf_llm.__version__
    assert versions["torch"] == version("torch")
    assert versions["transformers"] == version("transformers")


def test_a_package_that_is_not_there_is_said_to_be_absent(tmp_path, monkeypatch):
    import importlib.metadata

    def found(package):
        if package == "triton":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert provenance(tmp_path)["versions"] == {
        "otf_llm": otf_llm.__version__,
        "torch": "1.0",
        "transformers": "1.0",
        "triton": "absent",
    }
