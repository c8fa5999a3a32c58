"""Memory and speed of the convert stage on weights of a model's true geometry; pytest does not collect this.

    python tests/streaming_benchmark.py --work DIR [--csv FILE] geometry [--name NAME] [--layers 1 2 …] [--peer PYTHON]
    python tests/streaming_benchmark.py --work DIR [--csv FILE] model FOLDER [--peer PYTHON]
    python tests/streaming_benchmark.py --work DIR [--csv FILE] scaling
    python tests/streaming_benchmark.py --work DIR [--csv FILE] gpu [--name NAME] [--layers 2] [--memory FOLDER]
    python tests/streaming_benchmark.py --csv FILE plot

``geometry`` writes a random BF16 checkpoint under DIR (kept, and found again); ``model`` takes a Hugging Face folder.
Both run the pipeline on it as far as ``permute``, and then time ``snakemake convert`` for each scheme. A row's
``seconds`` and ``source_mb_per_s`` are those of the convert jobs, imports included; ``command_seconds`` is the whole
Snakemake command, its start and the merge included. ``peak_rss_mb`` is the largest job's. ``--peer`` names a Python
that has llm-compressor, whose model-free W4A16 converts the same folder; ``sha256sum`` is timed beside it. Rows of a
scheme, of a peer and of ``sha256sum`` are medians of ``--runs`` runs, three unless told.

``scaling`` converts a checkpoint of eight equal shards, each a job of its own, on one core and on as many as there are;
``seconds`` is from the first job's start to the last one's end.

``gpu`` converts one random checkpoint on a GPU with orders and importances that are random, too, always from a cold
disk, as the two rows read that tell what the disk allows: reading alone, and reading while as much is written as the
output has.
``seconds`` run from the opened checkpoint to the output's last synced byte, ``command_seconds`` over the whole process.
With ``--memory``, a folder that is on no disk, the schemes are measured once more with their output there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import torch
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "scripts"), str(REPOSITORY / "kernels"), str(Path(__file__).parent)]

from otf_llm.blocks import row_blocks  # noqa: E402
from otf_llm.decoder import expected_shapes, read_config  # noqa: E402
from otf_llm.files import write_json  # noqa: E402
from otf_llm.stage import provenance  # noqa: E402
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
COLUMNS = (
    "geometry", "scheme", "source_bytes", "peak_rss_mb", "seconds", "source_mb_per_s", "tool", "command_seconds",
    "cores", "commit",
)  # fmt: skip
OURS = "otf-llm-pipeline"
LIBRARY = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_WAIT_POLICY": "PASSIVE"}
SCHEMES = ("int4-no-search", "int4")
PEER = """
import sys
from llmcompressor import model_free_ptq
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme="W4A16",
               ignore=["lm_head", "model.embed_tokens"], max_workers=int(sys.argv[3]), device="cpu")
"""


def write_checkpoint(folder: Path, config: dict, shard_bytes: int = SHARD_BYTES) -> None:
    """Random BF16 weights, normal with deviation 0.02, in shards as transformers cuts them."""
    family, geometry = read_config(config)
    shapes = dict(expected_shapes(family, geometry))
    if geometry.tied:
        del shapes[f"{family.head}.weight"]
    order = sorted(shapes, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])
    shards: list[list[TensorSpec]] = [[]]
    for name in order:
        spec = TensorSpec(name, torch.bfloat16, shapes[name])
        if shards[-1] and sum(s.size_bytes for s in shards[-1]) + spec.size_bytes > shard_bytes:
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


def snakemake(work: Path, config: Path, cores: int, *arguments: str) -> float:
    """Seconds that a Snakemake command took."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile"), "--cores", str(cores)]
    command += ["--configfile", str(config), "--directory", str(work), *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - start


def row(name: str, scheme: str, source_bytes: int, peak: float, seconds: float, tool: str, **more: object) -> dict:
    """One row of the table."""
    rate = source_bytes / 1e6 / seconds
    values = dict.fromkeys(COLUMNS, "") | more
    values |= {"geometry": name, "scheme": scheme, "source_bytes": source_bytes, "tool": tool}
    return values | {"peak_rss_mb": f"{peak:.0f}", "seconds": f"{seconds:.1f}", "source_mb_per_s": f"{rate:.1f}"}


def measure(name: str, checkpoint: Path, work: Path, cores: int, runs: int) -> list[dict]:
    """Rows of our own: calibration, then every scheme."""
    (work / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    config = work / f"{name}.yaml"
    settings = {
        "models": {name: {"source": str(checkpoint)}},
        "text": str(work / "text.txt"),
        "schemes": list(SCHEMES),
        "calibrate": {"num_sequences": 2, "sequence_length": 128},
        "validate": {"num_windows": 1, "window_length": 128},
    }
    config.write_text(yaml.safe_dump(settings))
    results = work / "results"
    snakemake(work, config, cores, "permute")
    source_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    commit = provenance(REPOSITORY)["commit"]

    def peak(logs: Path) -> float:
        return max(float(PEAK.search(log.read_text())[1]) for log in logs.parent.glob(logs.name))

    def seconds_of(benchmarks: Path) -> list[float]:
        return [float(pd.read_csv(path, sep="\t")["s"].iloc[0]) for path in benchmarks.parent.glob(benchmarks.name)]

    common = {"cores": cores, "commit": commit}
    rows = []
    for rule in ("source_manifest", "collect_activations", "weight_statistics"):
        (seconds,) = seconds_of(results / "benchmarks" / rule / f"{name}.tsv")
        largest = peak(results / "logs" / rule / f"{name}.log")
        rows.append(row(name, rule, source_bytes, largest, seconds, OURS, **common))
    for scheme in SCHEMES:
        folder = results / "convert" / name / scheme
        found = []
        for _ in range(runs):
            shutil.rmtree(folder, ignore_errors=True)
            command_seconds = snakemake(work, config, cores, str(folder.relative_to(work) / "manifest.json"))
            jobs = seconds_of(results / "benchmarks" / "convert_shard" / name / scheme / "*.tsv")
            seconds = max(max(jobs), sum(jobs) / min(cores, len(jobs)))
            found.append((seconds, peak(results / "logs" / "convert_shard" / name / scheme / "*.log"), command_seconds))
        print(scheme, *(f"{seconds:.1f}" for seconds, *_ in found), "seconds", flush=True)
        seconds, largest, command_seconds = sorted(found)[runs // 2]
        more = common | {"command_seconds": f"{command_seconds:.1f}"}
        rows.append(row(name, scheme, source_bytes, largest, seconds, OURS, **more))
    return rows


def measure_scaling(work: Path, cores: int) -> list[dict]:
    """Rows of one core and of all: the shards of a small model, one job each, as many at once as there are cores."""
    config = GEOMETRIES["llama-3.2-1b"] | {"num_hidden_layers": 32, "vocab_size": 1024}
    name, checkpoint = "llama-3.2-1b-32-layers", work / "checkpoints" / "eight-shards"
    if not (checkpoint / "config.json").exists():
        shutil.rmtree(checkpoint, ignore_errors=True)
        write_checkpoint(checkpoint, config, shard_bytes=500_000_000)
    source_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    shards = len(list(checkpoint.glob("*.safetensors")))
    rows = []
    for count in (1, cores):
        folder = work / f"cores-{count}"
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
        settings = {
            "models": {name: {"source": str(checkpoint)}},
            "text": str(folder / "text.txt"),
            "schemes": ["int4"],
            "calibrate": {"num_sequences": 2, "sequence_length": 128},
            "validate": {"num_windows": 1, "window_length": 128},
            "convert": {"job_mb": 0},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        snakemake(folder, folder / "config.yaml", cores, "permute")
        shutil.rmtree(folder / "results" / "convert", ignore_errors=True)
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(allowed)[:count])
        targets = [f"results/convert/{name}/int4/model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        command_seconds = snakemake(folder, folder / "config.yaml", count, *targets)
        os.sched_setaffinity(0, allowed)
        ended, started = [], []
        for path in (folder / "results" / "benchmarks" / "convert_shard" / name / "int4").glob("*.tsv"):
            ended.append(path.stat().st_mtime)
            started.append(path.stat().st_mtime - float(pd.read_csv(path, sep="\t")["s"].iloc[0]))
        logs = (folder / "results" / "logs" / "convert_shard" / name / "int4").glob("*.log")
        largest = max(float(PEAK.search(log.read_text())[1]) for log in logs)
        more = {"cores": count, "commit": provenance(REPOSITORY)["commit"], "command_seconds": f"{command_seconds:.1f}"}
        span = max(ended) - min(started)
        rows.append(row(f"{name}-{shards}-shards", "int4", source_bytes, largest, span, OURS, **more))
    return rows


CONVERT = """
import json, sys, time
from pathlib import Path
import torch
from otf_llm.calibration_profile import ActivationStatistics
from otf_llm.checkpoint import Checkpoint
from otf_llm.conversion import Recipe, convert_shard
from otf_llm.decoder import decoder_inputs, read_config
from otf_llm.families import HEAD_INPUT
from otf_llm.memory import keep_freed_memory, peak_memory
from otf_llm.permutation import ChannelStatistics, plan_permutation
from otf_llm.settings import SchemeSettings

keep_freed_memory()
torch.set_num_threads(1)
checkpoint = Checkpoint.open(Path(sys.argv[1]))
family, geometry = read_config(checkpoint.config)
widths = {name: geometry.sizes[i.width] for name, _, i in decoder_inputs(family, geometry)}
widths[HEAD_INPUT] = geometry.hidden_size
generator = torch.Generator().manual_seed(0)
sums = {name: torch.rand(width, generator=generator, dtype=torch.float64) for name, width in widths.items()}
statistics = {name: ActivationStatistics(vector, vector, 1) for name, vector in sums.items()}
channels = {name: ChannelStatistics(vector, vector, vector.float()) for name, vector in sums.items()}
scheme = SchemeSettings(scale_search=sys.argv[4] == "int4")
recipe = Recipe(family, geometry, scheme, plan_permutation(family, geometry, channels, scheme.permutation), statistics)
torch.zeros(1, device=sys.argv[3])
start = time.perf_counter()
for index, group in enumerate(json.loads(sys.argv[6])):
    convert_shard(checkpoint, group, recipe, Path(sys.argv[2], f"{index}.safetensors"), device=sys.argv[3],
                  workers=int(sys.argv[5]))
print(json.dumps([time.perf_counter() - start, peak_memory() / 1e6]))
"""


def forget(files: list[Path]) -> None:
    """Have the system forget what it holds of these files, so that they are read from the disk again."""
    os.sync()
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(files: list[Path], threads: int, beside: Path | None = None, beside_bytes: int = 0) -> float:
    """Seconds to read files from a cold disk, as so many threads with blocks of 64 MB do.

    With ``beside``, so many bytes are written there and synced meanwhile, as a conversion does with its output.
    """
    blocks = [(file, start) for file in files for start in range(0, file.stat().st_size, 1 << 26)]
    buffers = threading.local()

    def read(block: tuple[Path, int]) -> None:
        file, start = block
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(1 << 26))
        with open(file, "rb", buffering=0) as opened:
            opened.seek(start)
            opened.readinto(buffers.view)

    def write() -> None:
        block = os.urandom(1 << 26)
        with open(beside, "wb", buffering=0) as opened:
            for _ in range(0, beside_bytes, len(block)):
                opened.write(block)
                os.fdatasync(opened.fileno())

    forget(files)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads + 1) as pool:
        written = None if beside is None else pool.submit(write)
        list(pool.map(read, blocks))
        if written is not None:
            written.result()
    return time.perf_counter() - start


def measure_gpu(name: str, checkpoint: Path, work: Path, memory: Path | None, workers: int, runs: int) -> list[dict]:
    """Rows of the GPU, of reading alone, and of reading while as much is written: medians of some runs each.

    The two that only read and write are those of the faster of 4 and 8 threads.
    """
    outputs = {"": work / "out"} | ({} if memory is None else {", output in memory": memory / "out"})
    files = sorted(checkpoint.glob("*.safetensors"))
    source_bytes = sum(file.stat().st_size for file in files)
    common = {"cores": workers, "commit": provenance(REPOSITORY)["commit"]}
    rows = []
    groups = json.dumps([[file.name] for file in files])
    for (where, output), scheme in itertools.product(outputs.items(), SCHEMES):
        found = []
        for _ in range(runs):
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir(parents=True)
            forget(files)
            command = [sys.executable, "-c", CONVERT, checkpoint, output, "cuda", scheme, str(workers), groups]
            start = time.perf_counter()
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=LIBRARY)
            whole = time.perf_counter() - start
            if done.returncode != 0:
                sys.exit(done.stderr)
            found.append((*json.loads(done.stdout), whole))
        print(scheme + where, *(f"{seconds:.2f}" for seconds, *_ in found), "seconds", flush=True)
        seconds, peak, whole = sorted(found)[runs // 2]
        more = common | {"command_seconds": f"{whole:.1f}"}
        tool = f"{OURS}, {torch.cuda.get_device_name()}{where}"
        rows.append(row(name, scheme, source_bytes, peak, seconds, tool, **more))
    output_bytes = sum(file.stat().st_size for file in output.iterdir())
    for folder in outputs.values():
        shutil.rmtree(folder)
    beside = work / "beside"
    for tool, arguments in (("read", ()), ("read and write", (beside, output_bytes))):
        medians = {}
        for threads in (4, 8):
            medians[threads] = sorted(read_seconds(files, threads, *arguments) for _ in range(runs))[runs // 2]
        threads = min(medians, key=medians.get)
        fastest = row(name, f"{threads} threads", source_bytes, 0, medians[threads], tool, **common)
        rows.append(fastest | {"peak_rss_mb": ""})
    return rows


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds and the largest process's peak resident memory in MB of a command."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(errors)
    return time.perf_counter() - start, usage.ru_maxrss * 1024 / 1e6


def measure_others(name: str, checkpoint: Path, work: Path, cores: int, runs: int, peer: Path | None) -> list[dict]:
    """Rows of sha256sum and, where it is installed, llm-compressor: medians."""
    files = sorted(map(str, checkpoint.glob("*.safetensors")))
    source_bytes = sum(Path(file).stat().st_size for file in files)
    commands = {"sha256sum": ["sha256sum", *files]}
    if peer is not None:
        output = work / "peer"
        commands["llm-compressor"] = [str(peer), "-c", PEER, str(checkpoint), str(output), str(cores)]
    rows = []
    for tool, command in commands.items():
        found = []
        for _ in range(runs):
            shutil.rmtree(work / "peer", ignore_errors=True)
            found.append(timed(command))
        shutil.rmtree(work / "peer", ignore_errors=True)
        print(tool, *(f"{seconds:.1f}" for seconds, _ in found), "seconds", flush=True)
        seconds, peak = sorted(found)[runs // 2]
        scheme = "W4A16 model-free" if tool == "llm-compressor" else ""
        rows.append(row(name, scheme, source_bytes, peak, seconds, tool, cores=cores))
        if tool == "sha256sum":
            rows[-1] |= {"peak_rss_mb": "", "cores": 1}  # ru_maxrss tells of this script, which is larger
    return rows


def plot(table: pd.DataFrame, path: Path) -> None:
    """Peak memory of conversion against the size of the source."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    ours = table[(table["tool"] == OURS) & table["scheme"].isin(SCHEMES)]
    for scheme, rows in ours.groupby("scheme"):
        rows = rows.sort_values("source_bytes")
        axes.plot(rows["source_bytes"] / 1e9, rows["peak_rss_mb"].astype(float), "o", label=scheme)
    axes.axhline(500, color="#888888", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="source (GB)", ylabel="peak memory (MB)", ylim=(0, 550))
    axes.legend()
    figure.savefig(path, dpi=200)


def main() -> None:
    """Measure, print, and extend the table; or draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=3)
    what = parser.add_subparsers(dest="what", required=True)
    geometry = what.add_parser("geometry")
    geometry.add_argument("--name", choices=GEOMETRIES, default="llama-3.1-70b")
    geometry.add_argument("--layers", type=int, nargs="+", default=[2])
    geometry.add_argument("--peer", type=Path)
    what.add_parser("scaling")
    gpu = what.add_parser("gpu")
    gpu.add_argument("--name", choices=GEOMETRIES, default="llama-3.1-70b")
    gpu.add_argument("--layers", type=int, nargs="+", default=[2])
    gpu.add_argument("--memory", type=Path)
    model = what.add_parser("model")
    model.add_argument("folder", type=Path)
    model.add_argument("--peer", type=Path)
    what.add_parser("plot")
    options = parser.parse_args()
    if options.what == "plot":
        plot(pd.read_csv(options.csv), options.csv.with_suffix(".png"))
        return
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    if options.what in ("geometry", "gpu"):
        for layers in options.layers:
            name = f"{options.name}-{layers}-layers"
            checkpoint = work / "checkpoints" / name
            if not (checkpoint / "config.json").exists():
                shutil.rmtree(checkpoint, ignore_errors=True)
                write_checkpoint(checkpoint, GEOMETRIES[options.name] | {"num_hidden_layers": layers})
            if options.what == "gpu":
                rows += measure_gpu(name, checkpoint, work, options.memory, options.cores, options.runs)
                continue
            rows += measure(name, checkpoint, work, options.cores, options.runs)
            if options.peer:
                rows += measure_others(name, checkpoint, work, options.cores, options.runs, options.peer)
    elif options.what == "scaling":
        rows += measure_scaling(work, options.cores)
    else:
        folder = options.folder.resolve()
        rows += measure(folder.name, folder, work, options.cores, options.runs)
        rows += measure_others(folder.name, folder, work, options.cores, options.runs, options.peer)
    table = pd.DataFrame(rows, columns=COLUMNS)
    print(table.to_string(index=False))
    if options.csv:
        table.to_csv(options.csv, index=False, mode="a", header=not options.csv.exists())


if __name__ == "__main__":
    main()
