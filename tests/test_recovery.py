import base64
import subprocess
import sys

from otf_llm.recovery import claim_directory


def mark(folder, name, width=20):
    """An incomplete mark as Snakemake writes it."""
    encoded = base64.urlsafe_b64encode(name.encode()).decode()
    parts = [encoded[start : start + width] for start in range(0, len(encoded), width)]
    path = folder.joinpath(".snakemake", "incomplete", *(f"@{part}" for part in parts[:-1]), parts[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


def test_locks_and_unfinished_outputs_of_a_dead_run_are_cleared(tmp_path):
    unfinished = tmp_path / "results" / "convert" / "a.safetensors"
    folder = tmp_path / "results" / "source" / "m" / "checkpoint"
    finished = tmp_path / "results" / "convert" / "b.safetensors"
    outside = tmp_path.parent / "outside.txt"
    for path in (unfinished, folder / "config.json", finished, outside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    marks = [
        mark(tmp_path, name)
        for name in (
            "results/convert/a.safetensors",
            "results/source/m/checkpoint",
            "results/never/made.json",
            "../outside.txt",
            str(outside),
        )
    ]
    lock = tmp_path / ".snakemake" / "locks" / "0.input.lock"
    lock.parent.mkdir()
    lock.touch()
    claim = claim_directory(tmp_path)
    assert claim is not None
    assert not lock.exists()
    assert not any(path.exists() for path in marks)
    assert not unfinished.exists()
    assert not folder.exists()
    assert finished.exists()
    assert outside.exists()
    claim.close()


def test_a_living_run_keeps_its_locks(tmp_path):
    first = claim_directory(tmp_path)
    lock = tmp_path / ".snakemake" / "locks" / "0.output.lock"
    lock.parent.mkdir()
    lock.touch()
    program = f"from otf_llm.recovery import claim_directory; print(claim_directory({str(tmp_path)!r}))"
    second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert second.stdout == "None\n"
    assert lock.exists()
    first.close()
    third = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "claim" in third.stdout
    assert not lock.exists()
