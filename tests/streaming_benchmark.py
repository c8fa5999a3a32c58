"""Memory and speed of the convert stage on random weights of a model's true geometry; pytest does not collect this.

    python tests/streaming_benchmark.py --work DIR [--geometry llama-3.1-70b] [--layers 2] [--schemes int4 …]
        [--cores 2] [--limit-mb 500] [--csv FILE]

writes a BF16 checkpoint under DIR (kept, and found again), runs the pipeline on it as far as ``permute``, then times
``snakemake convert`` for each scheme. A row holds the whole command's seconds and the largest job's peak resident
memory; with ``--limit-mb`` the jobs also run under that hard limit on private memory (RLIMIT_DATA).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import torch
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "kernels"), str(Path(__file__).parent)]

from otf_llm.blocks import row_blocks  # noqa: E402
from otf_llm.families import FAMILIES, Geometry, expected_shapes  # noqa: E402
from otf_llm.files import write_json  # noqa: E402
from otf_llm.streaming import SafetensorsWriter, TensorSpec  # noqa: E402
from tiny import byte_tokenizer  # noqa: E402

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
GEOMETRIES = {
    "llama-3.1-70b": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}
SHARD_BYTES = 5_000_000_000  # where transformers cuts
PEAK = re.compile(r"peak resident memory ([\d.]+) MB")
COLUMNS = ("geometry", "scheme", "source_bytes", "peak_rss_mb", "seconds", "source_mb_per_s", "tool")


def write_checkpoint(folder: Path, config: dict) -> None:
    """Random BF16 weights, normal with deviation 0.02, in shards as transformers cuts them."""
    family = next(family for family in FAMILIES if family.architecture == config["architectures"][0])
    geometry = Geometry.of(config, family)
    shapes = dict(expected_shapes(family, geometry))
    if geometry.tied:
        del shapes[f"{family.head}.weight"]
    order = sorted(shapes, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])
    shards: list[list[TensorSpec]] = [[]]
    for name in order:
        spec = TensorSpec(name, torch.bfloat16, shapes[name])
        if shards[-1] and sum(s.size_bytes for s in shards[-1]) + spec.size_bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(spec)
    values = (torch.randn(1 << 25, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    folder.mkdir(parents=True)
    for name, specs in zip(names, shards, strict=True):
        with SafetensorsWriter(folder / name, specs) as writer:
            for spec in specs:
                for start, stop in row_blocks(spec.shape, 1 << 24):
                    count = (stop - start) * torch.Size(spec.shape[1:]).numel()
                    first = (start * 7919) % (len(values) - count + 1)
                    writer.write_rows(spec.name, values[first : first + count].reshape(-1, *spec.shape[1:]), start)
    weight_map = {spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    byte_tokenizer().save_pretrained(folder)
    write_json(folder / "config.json", config)


def snakemake(work: Path, config: Path, cores: int, *arguments: str, limit_mb: int | None = None) -> float:
    """Seconds that a Snakemake command took; its output goes to this one's."""

    def limit() -> None:
        if limit_mb is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_mb * 10**6,) * 2)

    command = [sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile"), "--cores", str(cores)]
    command += ["--configfile", str(config), "--directory", str(work), *arguments]
    start = time.perf_counter()
    subprocess.run(command, check=True, preexec_fn=limit)
    return time.perf_counter() - start


def measure(geometry: str, layers: int, schemes: list[str], work: Path, cores: int, limit_mb: int | None) -> list[dict]:
    """One row per scheme."""
    name = f"{geometry}-{layers}-layers"
    checkpoint = work / "checkpoints" / name
    if not (checkpoint / "config.json").exists():
        shutil.rmtree(checkpoint, ignore_errors=True)
        write_checkpoint(checkpoint, GEOMETRIES[geometry] | {"num_hidden_layers": layers})
    (work / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    config = work / f"{name}.yaml"
    settings = {
        "models": {name: {"source": str(checkpoint)}},
        "text": str(work / "text.txt"),
        "schemes": schemes,
        "calibrate": {"num_sequences": 2, "sequence_length": 128},
        "validate": {"num_windows": 1, "window_length": 128},
    }
    config.write_text(yaml.safe_dump(settings))
    snakemake(work, config, cores, "permute")
    source_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    rows = []
    for scheme in schemes:
        folder = work / "results" / "convert" / name / scheme
        shutil.rmtree(folder, ignore_errors=True)
        seconds = snakemake(work, config, cores, str(folder.relative_to(work) / "manifest.json"), limit_mb=limit_mb)
        logs = (work / "results" / "logs" / "convert_shard" / name / scheme).glob("*.log")
        peak = max(float(PEAK.search(log.read_text())[1]) for log in logs)
        rate = source_bytes / 1e6 / seconds
        values = (name, scheme, source_bytes, f"{peak:.0f}", f"{seconds:.1f}", f"{rate:.1f}", "otf-llm-pipeline")
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        manifest = json.loads((folder / "manifest.json").read_text())
        assert sum(file["size_bytes"] for file in manifest["files"]) > 0
    return rows


def main() -> None:
    """Measure, print, and write or extend the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-70b")
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--schemes", nargs="+", default=["int4", "int4-no-search"])
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-mb", type=int)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for layers in options.layers:
        rows += measure(options.geometry, layers, options.schemes, work, options.cores, options.limit_mb)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    if options.csv:
        table.to_csv(options.csv, index=False, mode="a", header=not options.csv.exists())


if __name__ == "__main__":
    main()
