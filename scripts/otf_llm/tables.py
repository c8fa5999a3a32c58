"""The result tables: one row per model and scheme, bytes by category, error per layer, time and memory per job.

Everything is checked before anything is written: a failed kernel, a missing or non-finite number, or results that were
made from different sources or tokens stop the tables. Cells that do not apply are empty; equal results, equal bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from otf_llm.accounting import (
    StoredTensor,
    bits_per_weight,
    byte_categories,
    manifest_family,
    stored_tensors,
    weight_file_sizes,
)
from otf_llm.files import atomic_path, read_json_object
from otf_llm.settings import CHANNEL, OTF, SOURCE_SCHEME, PermutationSettings

# Columns that are rounded, with their formats; all other values are written as they are.
FORMATS = {
    "bits_per_weight": "{:.4f}",
    "perplexity": "{:.4f}",
    "perplexity_rise": "{:.6f}",
    "kld": "{:.6f}",
    "top1_agreement": "{:.6f}",
    "relative_error": "{:.6e}",
    "bits": "{:.4f}",
    "seconds": "{:.2f}",
    "max_rss_mb": "{:.1f}",
    "source_mb": "{:.1f}",
    "source_mb_per_s_per_core": "{:.1f}",
}
SUMMARY_COLUMNS = (
    "model", "scheme", "bits_per_weight", "size_bytes", "perplexity", "perplexity_rise", "kld", "top1_agreement",
    "backend", "seed", "commit", "source_digest", "weights", "embedding", "lm_head", "keep", "export", "group_size",
    "scale_search", "outlier_fraction", "permutation", "num_tokens", "kernels_passed", "kernel_backend", "torch",
    "transformers", "triton", "otf_llm", "device", "dtype",
)  # fmt: skip
BYTE_COLUMNS = ("model", "scheme", "category", "bytes")
LAYER_COLUMNS = ("model", "scheme", "module", "layer", "linear", "relative_error", "bits")
STAGE_COLUMNS = ("rule", "job", "seconds", "max_rss_mb", "cores", "source_mb", "source_mb_per_s_per_core")
TENSOR_COLUMNS = (
    "model", "scheme", "tensor", "action", "reason", "shape", "bits", "size_bytes", "relative_error", "file",
)  # fmt: skip
TOTAL = "total"

MEASURES = ("perplexity", "kld", "top1_agreement")
COUNTS = ("num_tokens", "scored_tokens")
FIDELITY_KEYS = (
    "model", "scheme", "fidelity", "samples", "backend", "device", "dtype", "source_digest", "versions", "commit",
    "tokens",
)  # fmt: skip
VERSIONS = ("torch", "transformers", "triton", "otf_llm")
MEBIBYTE = 1 << 20  # Snakemake's "MB" of memory; ours are 10⁶ bytes


@dataclass(frozen=True)
class Result:
    """All that is known of one model in one scheme (``source`` for the model itself); ``kernels`` are check rows."""

    model: str
    scheme: str
    manifest: dict
    fidelity: dict
    kernels: tuple[dict, ...] = ()


def load_results(
    models: Sequence[str],
    schemes: Sequence[str],
    *,
    sources: Sequence[Path],
    manifests: Sequence[Path],
    fidelities: Sequence[Path],
    kernels: Sequence[Path],
) -> list[Result]:
    """Read and check what the stages reported: for each model its source, then every scheme, in the given order.

    Args:
        sources: a manifest per model; manifests, kernels: a file per model and scheme, schemes running fastest;
        fidelities: the same with the source before each model's schemes.

    Raises ValueError naming the file for one that is malformed, holds a missing or non-finite measure, or was made from
    another source or other tokens than the rest of its model; and naming kernel and layer for a kernel that failed.
    """
    pairs = list(itertools.product(models, schemes))
    converted = dict(zip(pairs, zip(manifests, kernels, strict=True), strict=True))
    evaluated = dict(zip(itertools.product(models, [SOURCE_SCHEME, *schemes]), fidelities, strict=True))
    results = []
    for model, path in zip(models, sources, strict=True):
        source = _read(path, ("digest", "family", "files", "shards", "tensors"))
        reference = _read_fidelity(evaluated[model, SOURCE_SCHEME], model, SOURCE_SCHEME, source["digest"])
        results.append(Result(model, SOURCE_SCHEME, source, reference))
        for scheme in schemes:
            manifest_path, kernels_path = converted[model, scheme]
            manifest = _read(manifest_path, ("source", "scheme", "lm_head", "files", "weight_files", "tensors"))
            _check_digest(manifest_path, manifest["source"]["digest"], source["digest"])
            fidelity = _read_fidelity(evaluated[model, scheme], model, scheme, source["digest"])
            _check_same_tokens(evaluated[model, scheme], fidelity, reference)
            rows = _read_kernels(kernels_path)
            results.append(Result(model, scheme, manifest, fidelity, rows))
    return results


def summary_table(results: Sequence[Result], seed: int) -> pd.DataFrame:
    """One row per result, with SUMMARY_COLUMNS; None where a column does not apply.

    ``bits_per_weight`` is of the decoder's linears, ``size_bytes`` of all weight files, ``perplexity_rise`` a fraction
    of the model's own source, ``kld`` in nats. ``kernels_passed`` reads "passed/checked".
    """
    references = {r.model: r.fidelity["fidelity"]["perplexity"] for r in results if r.scheme == SOURCE_SCHEME}
    rows = []
    for result in results:
        fidelity, measures = result.fidelity, result.fidelity["fidelity"]
        versions = {name: fidelity["versions"].get(name) for name in VERSIONS}
        rows.append(
            {
                "model": result.model,
                "scheme": result.scheme,
                "bits_per_weight": bits_per_weight(result.manifest),
                "size_bytes": sum(weight_file_sizes(result.manifest).values()),
                **{name: measures[name] for name in MEASURES},
                "perplexity_rise": measures["perplexity"] / references[result.model] - 1,
                "seed": seed,
                "num_tokens": measures["num_tokens"],
                **{name: fidelity[name] for name in ("backend", "commit", "source_digest", "device", "dtype")},
                **versions,
                **_scheme_cells(result),
                **_kernel_cells(result.kernels),
            }
        )
    return _frame(rows, SUMMARY_COLUMNS)


def byte_table(results: Sequence[Result]) -> pd.DataFrame:
    """Bytes of every result's weight files by category, with BYTE_COLUMNS; they sum to its ``size_bytes``."""
    rows = [
        {"model": result.model, "scheme": result.scheme, "category": category, "bytes": size}
        for result in results
        for category, size in byte_categories(result.manifest).items()
    ]
    return _frame(rows, BYTE_COLUMNS)


def layer_table(results: Sequence[Result]) -> pd.DataFrame:
    """Relative error and stored bits per weight of every quantised tensor, with LAYER_COLUMNS.

    Embedding first, then decoder linears by layer (0 based), then the head; the two ends have no layer and no linear.
    """
    rows = []
    for result in results:
        family = manifest_family(result.manifest)

        def place(tensor: StoredTensor, family=family) -> tuple:
            role = tensor.role
            if role.linear is None:
                return (math.inf if tensor.module == family.head else -1, (0, 0))
            return (role.layer, family.position(role.linear))

        quantised = [tensor for tensor in stored_tensors(result.manifest) if tensor.relative_error is not None]
        for tensor in sorted(quantised, key=place):
            rows.append(
                {
                    "model": result.model,
                    "scheme": result.scheme,
                    "module": tensor.module,
                    "layer": tensor.role.layer,
                    "linear": tensor.role.linear and tensor.role.linear.path,
                    "relative_error": tensor.relative_error,
                    "bits": tensor.bits,
                }
            )
    return _frame(rows, LAYER_COLUMNS)


def tensor_table(results: Sequence[Result]) -> pd.DataFrame:
    """What became of every tensor of every converted model, with TENSOR_COLUMNS; a file's rows sum to its size.

    ``action`` is int4, int8, copied, reordered or dropped, with the ``reason`` where a tensor was not quantised;
    ``permutation`` is the table of orders, ``header`` what a file has beside tensors.
    """
    rows = []
    for result in results:
        if result.scheme == SOURCE_SCHEME:
            continue
        common = {"model": result.model, "scheme": result.scheme}
        headers = weight_file_sizes(result.manifest)
        for row in result.manifest["tensors"]:
            size = sum(row["outputs"].values())
            headers[row["shard"]] -= size
            shape = row.get("shape", [])
            weights = math.prod(shape) if shape else 0
            cells = {key: row.get(key) for key in ("tensor", "action", "reason", "relative_error")}
            cells |= {"shape": "x".join(map(str, shape)), "bits": 8 * size / weights if weights else None}
            rows.append(common | cells | {"size_bytes": size, "file": row["shard"]})
        for file, size in headers.items():
            rows.append(common | {"action": "header", "size_bytes": size, "file": file})
    return _frame(rows, TENSOR_COLUMNS)


def stage_table(
    paths: Iterable[Path], work: Iterable[Path] = (), root: Path = Path("results/benchmarks")
) -> pd.DataFrame:
    """Seconds and peak memory (MB, 10⁶ bytes) of every job, from Snakemake's benchmark files ``root/<rule>/<job>.tsv``.

    ``work`` are files ``root/<rule>/<job>.json`` of jobs that say how many bytes of the source they converted, on how
    many cores: their throughput is by all the seconds of the job, imports included. Jobs too short to be sampled have
    no memory. The last row, ``total``, has the sum of seconds and the largest peak.

    Raises ValueError naming a file that is missing, lies elsewhere or is no benchmark of one run.
    """
    rows = []
    described = {path.with_suffix(".tsv"): _read(path, ("cores", "source_bytes")) for path in map(Path, work)}
    for path in map(Path, paths):
        if not path.is_relative_to(root) or len(path.relative_to(root).parts) < 2:
            raise ValueError(f"{path} is not of the form {root}/<rule>/<job>.tsv")
        rule, *job = path.relative_to(root).with_suffix("").parts
        seconds, memory = _read_benchmark(path)
        rows.append({"rule": rule, "job": "/".join(job), "seconds": seconds, "max_rss_mb": memory})
        if path in described:
            cores, source_mb = described[path]["cores"], described[path]["source_bytes"] / 1e6
            speed = source_mb / seconds / cores if seconds else None
            rows[-1] |= {"cores": cores, "source_mb": source_mb, "source_mb_per_s_per_core": speed}
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    peaks = [row["max_rss_mb"] for row in rows if row["max_rss_mb"] is not None]
    rows.append({"rule": TOTAL, "job": None, "seconds": sum(seconds), "max_rss_mb": max(peaks, default=None)})
    return _frame(rows, STAGE_COLUMNS)


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV: fixed numbers of decimals, empty cells for None, LF at line ends."""
    text = frame.astype(object).copy()
    for column in text.columns:
        text[column] = [_cell(column, value) for value in frame[column]]
    with atomic_path(path) as partial:
        text.to_csv(partial, index=False, lineterminator="\n", encoding="utf-8")


def write_summary(
    results: Sequence[Result],
    *,
    seed: int,
    gguf_models: Sequence[str],
    summary: Path,
    markdown: Path,
    bytes_by_category: Path,
    layers: Path,
    tensors: Path,
) -> None:
    """Write the five tables of ``results`` once all of them are made.

    ``gguf_models`` names the models whose source was dequantised from GGUF, which the Markdown says.
    """
    frame, sizes, errors = summary_table(results, seed), byte_table(results), layer_table(results)
    text = summary_markdown(results, frame, gguf_models)
    write_table(frame, summary)
    write_table(sizes, bytes_by_category)
    write_table(errors, layers)
    write_table(tensor_table(results), tensors)
    with atomic_path(markdown) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def summary_markdown(results: Sequence[Result], summary: pd.DataFrame, gguf_models: Sequence[str] = ()) -> str:
    """The main columns as a Markdown table per model, how they were measured, and what each scheme wrote."""
    parts = ["# Summary\n"]
    for model in dict.fromkeys(summary["model"]):
        mine = [result for result in results if result.model == model]
        rows = summary[summary["model"] == model]
        parts += [f"## {model}\n", _markdown_table(rows), _conditions(mine, rows, model in gguf_models)]
        parts += _samples(mine)
    return "\n".join(parts)


def _read(path: Path, keys: Iterable[str]) -> dict:
    values = read_json_object(Path(path))
    for key in keys:
        if key not in values:
            raise ValueError(f"{path} has no {key}")
    return values


def _read_fidelity(path: Path, model: str, scheme: str, digest: str) -> dict:
    """A fidelity report, checked to be this scheme's and to hold finite numbers."""
    report = _read(path, FIDELITY_KEYS)
    if (report["model"], report["scheme"]) != (model, scheme):
        raise ValueError(f"{path} is of {report['model']} in {report['scheme']}, expected {model} in {scheme}")
    _check_digest(path, report["source_digest"], digest)
    for name in (*MEASURES, *COUNTS):
        value = report["fidelity"].get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{path}: {name} of {model} in {scheme} is {value}, which is no finite number")
    if report["fidelity"]["perplexity"] <= 0:
        raise ValueError(f"{path}: perplexity of {model} in {scheme} is {report['fidelity']['perplexity']}")
    return report


def _check_digest(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(f"{path} was made from source {found[:12]}, but the source's manifest is of {expected[:12]}")


def _check_same_tokens(path: Path, report: dict, reference: dict) -> None:
    """A rise in perplexity means something only on the source's own tokens."""
    for name in COUNTS:
        mine, theirs = report["fidelity"][name], reference["fidelity"][name]
        if mine != theirs:
            raise ValueError(f"{path}: {name} is {mine}, but its source was evaluated with {theirs}")
    for name in ("tokens", "dtype"):
        if report[name] != reference[name]:
            raise ValueError(f"{path}: {name} is {report[name]}, but its source's is {reference[name]}")


def _read_kernels(path: Path) -> tuple[dict, ...]:
    rows = _read(path, ("rows",))["rows"]
    failed = [row for row in rows if not row["passed"]]
    if failed:
        first, more = failed[0], f" (and {len(failed) - 1} more of {len(rows)} checks)" if len(failed) > 1 else ""
        raise ValueError(
            f"{path}: kernel {first['kernel']} failed on {first['layer']}: relative error "
            f"{first['max_relative_error']}, tolerance {first['tolerance']}{more}"
        )
    return tuple(rows)


def _scheme_cells(result: Result) -> dict:
    """A scheme's settings; those of INT4 linears only where there are any."""
    if result.scheme == SOURCE_SCHEME:
        return {}
    scheme, head = result.manifest["scheme"], result.manifest["lm_head"]
    cells = {"weights": scheme["weights"], "embedding": scheme["embedding"], "lm_head": head}
    cells |= {"keep": " ".join(scheme.get("keep", [])) or None, "export": scheme.get("export", OTF)}
    if scheme["weights"] != "int4" and head != "int4":
        return cells
    permutation = PermutationSettings.from_dict(scheme["permutation"])
    return cells | {
        "group_size": scheme["group_size"] or CHANNEL,
        "scale_search": scheme["scale_search"],
        "outlier_fraction": permutation.outlier_fraction,
        "permutation": permutation.slug,
    }


def _kernel_cells(rows: Sequence[dict]) -> dict:
    if not rows:
        return {}
    passed = sum(row["passed"] for row in rows)
    backends = dict.fromkeys(row["backend"] for row in rows)
    return {"kernels_passed": f"{passed}/{len(rows)}", "kernel_backend": "+".join(backends)}


def _frame(rows: list[dict], columns: Sequence[str]) -> pd.DataFrame:
    """A table of plain Python values, None where a row lacks a column; a number that is not finite is an error."""
    for row in rows:
        for column, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                where = " ".join(str(row[key]) for key in columns[:3] if key in row)
                raise ValueError(f"{column} of {where} is {value}, which is no finite number")
    cells = [[row.get(column) for column in columns] for row in rows]
    return pd.DataFrame(cells, columns=list(columns), dtype=object)


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return FORMATS[column].format(value) if column in FORMATS else str(value)


def _read_benchmark(path: Path) -> tuple[float | None, float | None]:
    """Seconds, and peak resident memory in MB, of a benchmark file's one run; None for what was not measured."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    if len(lines) != 2 or not {"s", "max_rss"} <= set(lines[0]):
        raise ValueError(f"{path} is no benchmark of one run: it has {len(lines)} lines, expected 2 with s and max_rss")
    run = dict(zip(*lines, strict=False))
    seconds, memory = (_measured(path, name, run.get(name, "")) for name in ("s", "max_rss"))
    return seconds, None if memory is None else memory * MEBIBYTE / 1e6


def _measured(path: Path, name: str, text: str) -> float | None:
    if text in ("", "-", "NA"):
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"{path}: {name} is {text!r}, which is no number") from error
    return value if math.isfinite(value) else None


def _markdown_table(rows: pd.DataFrame) -> str:
    """The main columns, padded so that the text reads as a table too."""
    header = ["scheme", "bits/weight", "size (MB)", "perplexity", "rise", "KLD", "top-1", "kernels"]
    lines = [
        [
            row["scheme"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['size_bytes'] / 1e6:.2f}",
            f"{row['perplexity']:.2f}",
            "" if row["scheme"] == SOURCE_SCHEME else f"{100 * row['perplexity_rise']:+.1f} %",
            f"{row['kld']:.4f}",
            f"{100 * row['top1_agreement']:.1f} %",
            row["kernels_passed"] or "",
        ]
        for row in rows.to_dict("records")
    ]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [header, *lines]]
    return "".join(f"| {' | '.join(line)} |\n" for line in [padded[0], rule, *padded[1:]])


def _conditions(results: Sequence[Result], rows: pd.DataFrame, is_gguf: bool) -> str:
    """One paragraph on how a model's rows were measured."""
    reference = results[0]
    counts = reference.fidelity["fidelity"]
    dtypes = "/".join(dict.fromkeys(entry["dtype"] for entry in reference.manifest["tensors"].values()))
    origin = " (dequantised from a GGUF file)" if is_gguf else ""
    versions = ", ".join(f"{name} {_several(rows[name])}" for name in VERSIONS)
    return (
        f"{counts['num_tokens']:,} tokens ({counts['scored_tokens']:,} predictions scored), evaluated in "
        f"{reference.fidelity['dtype']}, backend {_several(rows['backend'])}, seed {_several(rows['seed'])}; "
        f"{versions}; commit {_several(rows['commit'])}. Source: {dtypes} weights{origin}, digest "
        f"{reference.fidelity['source_digest'][:12]}. Bits per weight are of the decoder's linears, MB are 10⁶ bytes "
        f"of all weight files, KLD is in nats.\n"
    )


def _several(values: Iterable) -> str:
    """The distinct values of a column, in order."""
    return " and ".join(dict.fromkeys("unknown" if value is None else str(value) for value in values))


def _samples(results: Sequence[Result]) -> list[str]:
    """Greedy continuations, by prompt, of every scheme that has one."""
    prompts = dict.fromkeys(sample["prompt"] for result in results for sample in result.fidelity["samples"])
    parts = ["### Samples (greedy)\n"] if prompts else []
    for prompt in prompts:
        lines = [f"Prompt: {_code(prompt)}\n"]
        for result in results:
            texts = [sample["text"] for sample in result.fidelity["samples"] if sample["prompt"] == prompt]
            lines += [f"- **{result.scheme}**: {_code(text)}" for text in texts]
        parts.append("\n".join(lines) + "\n")
    return parts


def _code(text: str) -> str:
    """Text that a model wrote as one line of Markdown in which nothing is markup."""
    line = re.sub(r"[\x00-\x1f\x7f]", " ", " ↵ ".join(text.splitlines()))
    longest = max((len(list(run)) for is_tick, run in itertools.groupby(line, "`".__eq__) if is_tick), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}"
