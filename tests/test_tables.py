import json
import logging
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from otf_llm.settings import PermutationSettings, SchemeSettings
from otf_llm.tables import (
    SUMMARY_COLUMNS,
    byte_table,
    layer_table,
    load_results,
    stage_table,
    summary_markdown,
    summary_table,
    tensor_table,
    write_summary,
    write_table,
)

SCRIPTS = Path(__file__).parent.parent / "scripts"
LAYERS = "model.layers"
MODELS, SCHEMES = ["tiny", "NA"], ["int8-embedding", "int4"]
PERPLEXITIES = {
    ("tiny", "source"): 20.0,
    ("tiny", "int8-embedding"): 20.0,
    ("tiny", "int4"): 22.5,
    ("NA", "source"): 8.0,
    ("NA", "int8-embedding"): 7.96,
    ("NA", "int4"): 10.0,
}
SHARD = "model-00001-of-00001.safetensors"


def source_manifest(model):
    tensors = {"model.embed_tokens.weight": [10, 64]}
    tensors |= {f"{LAYERS}.{layer}.mlp.{name}.weight": [4, 64] for layer in (0, 1) for name in ("gate_proj", "up_proj")}
    size = 1280 + 4 * 512 + 72
    return {
        "digest": model.encode().hex().ljust(64, "0"),
        "family": "llama",
        "shards": ["model.safetensors"],
        "files": {"model.safetensors": {"size_bytes": size}},
        "tensors": {
            name: {"dtype": "BF16", "shape": shape, "shard": "model.safetensors"} for name, shape in tensors.items()
        },
    }


def converted_manifest(model, scheme):
    """Two layers of two linears [4, 64]: 63 codes, a scale and an FP16 column a row, or as they were."""
    int4 = scheme == "int4"
    rows = [
        {
            "action": "int8", "module": "model.embed_tokens", "shape": [10, 64], "relative_error": 1.25e-5,
            "outputs": {"model.embed_tokens.codes": 640, "model.embed_tokens.scales": 20},
        }
    ]  # fmt: skip
    for layer in (1, 0):  # files hold tensors in any order
        for name in ("up_proj", "gate_proj"):
            module = f"{LAYERS}.{layer}.mlp.{name}"
            packed = {f"{module}.codes": 128, f"{module}.scales": 8, f"{module}.outliers": 8}
            error = {"module": module, "relative_error": (1 + layer) / 1000 + (name == "up_proj") / 10_000}
            outputs = packed if int4 else {f"{module}.weight": 512}
            rows.append({"action": "int4" if int4 else "copied", "shape": [4, 64], "outputs": outputs})
            rows[-1] |= error if int4 else {}
    tensor_bytes = 660 + 4 * (144 if int4 else 512)
    permutation = PermutationSettings(outlier_fraction=0.01)
    settings = SchemeSettings(weights="int4" if int4 else "keep", group_size=64, permutation=permutation)
    return {
        "source": {"digest": source_manifest(model)["digest"], "family": "llama"},
        "scheme": settings.to_dict(),
        "lm_head": "tied",
        "weight_files": [SHARD],
        "files": [{"name": SHARD, "size_bytes": tensor_bytes + 400}],
        "tensors": [row | {"shard": SHARD} for row in rows],
    }


def fidelity(model, scheme):
    source = scheme == "source"
    return {
        "model": model,
        "scheme": scheme,
        "fidelity": {
            "perplexity": PERPLEXITIES[model, scheme],
            "kld": 0.0 if source else 0.0123456789,
            "top1_agreement": 1.0 if source else 0.9375,
            "num_tokens": 2048,
            "scored_tokens": 2046,
        },
        "samples": [{"prompt": "The capital is", "text": f" {scheme}`s\nown | *text*", "logits": {}}],
        "backend": "torch-cuda" if source else "triton-cuda",
        "device": "cuda",
        "dtype": "float32",
        "source_digest": source_manifest(model)["digest"],
        "versions": {"torch": "2.13.0", "transformers": "5.24.0", "triton": "3.7.1", "otf_llm": "0.1.0"},
        "commit": "c0ffee",
        "tokens": {"tokenizer": "t", "num_sequences": 2},
    }


def kernels(scheme):
    names = ["int8_embedding", "int8_linear"] + (["int4_linear"] if scheme == "int4" else [])
    rows = [
        {
            "kernel": name, "layer": "model.embed_tokens" if "int8" in name else f"{LAYERS}.0.mlp.up_proj",
            "backend": "triton-interpreter", "shape": "4x64", "tokens": 4, "max_relative_error": 0.0002,
            "tolerance": 0.001, "passed": True,
        }
        for name in names
    ]  # fmt: skip
    return {"rows": rows, "commit": "c0ffee"}


@pytest.fixture
def files(tmp_path):
    """A results folder for two models and two schemes; the arguments of load_results."""

    def write(path, value):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
        return str(path)

    pairs = [(model, scheme) for model in MODELS for scheme in SCHEMES]
    evaluated = [(model, scheme) for model in MODELS for scheme in ["source", *SCHEMES]]
    return {
        "sources": [write(f"source/{model}/manifest.json", source_manifest(model)) for model in MODELS],
        "manifests": [write(f"convert/{m}/{s}/manifest.json", converted_manifest(m, s)) for m, s in pairs],
        "fidelities": [write(f"validate/{m}/{s}/fidelity.json", fidelity(m, s)) for m, s in evaluated],
        "kernels": [write(f"validate/{m}/{s}/kernels.json", kernels(s)) for m, s in pairs],
    }


def load(files):
    return load_results(MODELS, SCHEMES, **files)


def change(path, edit):
    value = json.loads(Path(path).read_text())
    edit(value)
    Path(path).write_text(json.dumps(value))


def test_the_summary_has_a_row_per_model_and_scheme_against_its_own_source(files):
    table = summary_table(load(files), seed=3)
    assert list(table.columns[:11]) == [
        "model", "scheme", "bits_per_weight", "size_bytes", "perplexity", "perplexity_rise", "kld", "top1_agreement",
        "backend", "seed", "commit",
    ]  # fmt: skip
    assert list(zip(table["model"], table["scheme"], strict=True)) == list(PERPLEXITIES)
    assert list(table["perplexity_rise"]) == pytest.approx([0, 0, 0.125, 0, -0.005, 0.25], abs=1e-12)
    # 63 codes and a padding nibble, a scale and an FP16 column: 36 bytes for 64 weights.
    assert list(table["bits_per_weight"]) == [16, 16, 4.5] * 2
    assert list(table["size_bytes"]) == [3400, 660 + 2048 + 400, 660 + 576 + 400] * 2
    assert list(table["kernels_passed"]) == [None, "2/2", "3/3"] * 2
    assert set(table["seed"]) == {3}


def test_columns_that_do_not_apply_are_empty_and_none_is_nan(files, tmp_path):
    table = summary_table(load(files), seed=0)
    assert not any(isinstance(value, float) and value != value for row in table.itertuples() for value in row)
    source, dense, int4 = table.iloc[:3].to_dict("records")
    settings = ["embedding", "lm_head", "group_size", "scale_search", "outlier_fraction", "permutation"]
    assert [source[name] for name in settings] == [None] * 6
    assert [dense[name] for name in settings] == ["int8", "tied", None, None, None, None]
    slug = "input-intermediate-natural-0.01-1"
    assert [int4[name] for name in settings] == ["int8", "tied", 64, True, 0.01, slug]
    write_table(table, tmp_path / "summary.csv")
    cells = pd.read_csv(tmp_path / "summary.csv", dtype=str, keep_default_na=False).to_numpy().ravel().tolist()
    assert not {"nan", "NaN", "None", "<NA>"} & set(cells)


def test_a_channel_scale_reads_channel_and_an_int4_head_alone_has_settings(files):
    def edit(manifest):
        manifest["scheme"] |= {"group_size": 0}
        manifest["lm_head"] = "int4"

    change(files["manifests"][0], edit)
    row = summary_table(load(files), seed=0).iloc[1]
    assert (row["group_size"], row["lm_head"], row["scale_search"]) == ("channel", "int4", True)


def test_the_csv_files_have_fixed_formats_and_equal_bytes(files, tmp_path):
    results = load(files)
    texts = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        names = ("summary", "markdown", "bytes_by_category", "layers", "tensors")
        write_summary(results, seed=0, gguf_models=["tiny"], **{name: folder / name for name in names})
        texts.append({name: (folder / name).read_bytes() for name in names})
        assert sorted(os.listdir(folder)) == sorted(names)
    assert texts[0] == texts[1]
    assert not any(b"\r" in text for text in texts[0].values())
    summary = texts[0]["summary"].decode().splitlines()
    assert summary[0] == ",".join(SUMMARY_COLUMNS)
    assert summary[3] == (
        "tiny,int4,4.5000,1636,22.5000,0.125000,0.012346,0.937500,triton-cuda,0,c0ffee,"
        f"{b'tiny'.hex().ljust(64, '0')},int4,int8,tied,,otf,64,true,0.01,input-intermediate-natural-0.01-1,2048,3/3,"
        "triton-interpreter,2.13.0,5.24.0,3.7.1,0.1.0,cuda,float32"
    )
    assert summary[1].startswith("tiny,source,16.0000,3400,20.0000,0.000000,0.000000,1.000000,torch-cuda,0,c0ffee,")
    assert ",,,,,,2048,,,2.13.0" in summary[1]
    assert "tiny,int4,codes,512" in texts[0]["bytes_by_category"].decode().splitlines()
    assert texts[0]["layers"].decode().splitlines()[3] == (
        "tiny,int4,model.layers.0.mlp.gate_proj,0,mlp.gate_proj,1.000000e-03,4.5000"
    )


def test_every_tensor_has_a_row_and_a_file_s_rows_sum_to_its_size(files):
    results = load(files)
    table = tensor_table(results)
    for result in results[1:3]:
        rows = table[(table["model"] == result.model) & (table["scheme"] == result.scheme)]
        assert list(rows["tensor"].dropna()) == [row["tensor"] for row in result.manifest["tensors"] if "tensor" in row]
        assert rows["size_bytes"].sum() == sum(file["size_bytes"] for file in result.manifest["files"])
        assert list(rows["action"])[-1] == "header"
    linear = table[table["action"] == "int4"].iloc[0]
    assert (linear["shape"], linear["bits"], linear["size_bytes"]) == ("4x64", 4.5, 144)


def test_bytes_sum_to_the_summary_s_sizes(files):
    results = load(files)
    table, summary = byte_table(results), summary_table(results, seed=0)
    sums = table.groupby(["model", "scheme"], sort=False)["bytes"].sum()
    assert list(sums) == list(summary["size_bytes"])
    int4 = table[(table["model"] == "tiny") & (table["scheme"] == "int4")]
    assert dict(zip(int4["category"], int4["bytes"], strict=True)) == {
        "codes": 512, "scales": 32, "fp16_columns": 32, "dense": 0, "embedding": 660, "other": 400,
    }  # fmt: skip


def test_layers_stand_in_the_model_s_order(files):
    table = layer_table(load(files))
    int4 = table[(table["model"] == "tiny") & (table["scheme"] == "int4")]
    assert list(int4["module"]) == ["model.embed_tokens"] + [
        f"{LAYERS}.{layer}.mlp.{name}" for layer in (0, 1) for name in ("gate_proj", "up_proj")
    ]
    assert list(int4["layer"]) == [None, 0, 0, 1, 1]
    assert list(int4["linear"]) == [None, *["mlp.gate_proj", "mlp.up_proj"] * 2]
    assert list(int4["relative_error"]) == pytest.approx([1.25e-5, 0.001, 0.0011, 0.002, 0.0021])
    assert list(int4["bits"]) == [8 * 660 / 640, 4.5, 4.5, 4.5, 4.5]
    # What was kept has no error, the source none at all.
    assert list(table[table["scheme"] == "int8-embedding"]["module"]) == ["model.embed_tokens"] * 2
    assert "source" not in set(table["scheme"])


def test_the_markdown_tells_results_conditions_and_samples(files):
    results = load(files)
    text = summary_markdown(results, summary_table(results, seed=0), ["tiny"])
    lines = text.splitlines()
    assert "| int4           |        4.50 |      0.00 |      22.50 | +12.5 % | 0.0123 |  93.8 % |     3/3 |" in lines
    assert "| source         |       16.00 |      0.00 |      20.00 |         | 0.0000 | 100.0 % |         |" in lines
    conditions = next(line for line in lines if "2,048 tokens" in line)
    assert "(2,046 predictions scored), evaluated in float32, backend torch-cuda and triton-cuda" in conditions
    assert "torch 2.13.0, transformers 5.24.0, triton 3.7.1, otf_llm 0.1.0; commit c0ffee" in conditions
    assert "BF16 weights (dequantised from a GGUF file), digest 74696e790000" in conditions
    assert text.count("dequantised from a GGUF") == 1
    assert text.index("## tiny") < text.index("## NA")
    assert "Prompt: ` The capital is `" in lines
    assert "- **int4**: ``  int4`s ↵ own | *text* ``" in lines
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "21", True, "absent"])
@pytest.mark.parametrize(("index", "where"), [(0, "tiny in source"), (5, "NA in int4")])
def test_a_missing_or_non_finite_perplexity_is_named(files, value, index, where):
    def edit(report):
        report["fidelity"]["perplexity"] = value
        if value == "absent":
            del report["fidelity"]["perplexity"]

    change(files["fidelities"][index], edit)
    with pytest.raises(ValueError, match=f"perplexity of {where} is .*no finite number"):
        load(files)


def test_a_perplexity_of_zero_is_no_perplexity(files):
    change(files["fidelities"][0], lambda report: report["fidelity"].update(perplexity=0.0))
    with pytest.raises(ValueError, match=r"perplexity of tiny in source is 0\.0"):
        load(files)


def test_a_layer_error_that_is_no_number_stops_the_tables(files):
    change(files["manifests"][1], lambda manifest: manifest["tensors"][1].update(relative_error=float("nan")))
    results = load(files)
    with pytest.raises(ValueError, match=r"relative_error of tiny int4 model\.layers\.1\.mlp\.up_proj is nan"):
        layer_table(results)


def test_results_of_something_else_are_refused(files):
    swapped = {**files, "fidelities": [files["fidelities"][i] for i in (0, 2, 1, 3, 4, 5)]}
    with pytest.raises(ValueError, match="is of tiny in int4, expected tiny in int8-embedding"):
        load(swapped)
    manifests = [files["manifests"][i] for i in (2, 1, 0, 3)]
    with pytest.raises(ValueError, match=r"manifest\.json was made from source 4e4100000000, .* of 74696e790000"):
        load({**files, "manifests": manifests})
    with pytest.raises(ValueError, match="shorter"):
        load({**files, "kernels": files["kernels"][:3]})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.update(source_digest="f" * 64), "was made from source ffffffffffff"),
        (lambda r: r["fidelity"].update(num_tokens=1024), "num_tokens is 1024, but its source was evaluated with 2048"),
        (lambda r: r["tokens"].update(tokenizer="other"), "tokens is .*other.*, but its source's is"),
        (lambda r: r.update(dtype="bfloat16"), "dtype is bfloat16, but its source's is float32"),
        (lambda r: r.pop("backend"), "has no backend"),
    ],
)
def test_a_report_that_cannot_be_compared_with_its_source_is_refused(files, edit, message):
    change(files["fidelities"][2], edit)
    with pytest.raises(ValueError, match=message):
        load(files)


def test_a_failed_kernel_is_one_message_with_kernel_and_layer(files):
    def edit(report):
        for row in report["rows"][1:]:
            row |= {"passed": False, "max_relative_error": 0.25}

    change(files["kernels"][1], edit)
    with pytest.raises(ValueError, match=r"int8_linear failed on model\.embed_tokens") as caught:
        load(files)
    assert "0.25, tolerance 0.001 (and 1 more of 3 checks)" in str(caught.value)
    assert "\n" not in str(caught.value)


class Named(list):
    """Files as Snakemake passes them: a list, some by name."""

    def __init__(self, files=(), **named):
        super().__init__([*files, *named.values()])
        self.__dict__.update(named)


def run_script(name, tmp_path, **parts):
    """Run a script as Snakemake does, and take away the log handlers that it leaves to its process."""
    snakemake = SimpleNamespace(log=[str(tmp_path / "log")], **parts)
    root = logging.getLogger()
    before = root.handlers[:]
    try:
        runpy.run_path(str(SCRIPTS / name), init_globals={"snakemake": snakemake})
    finally:
        for handler in set(root.handlers) - set(before):
            handler.close()
        root.handlers[:] = before


def test_the_script_writes_all_tables_or_none(files, tmp_path, capsys):
    out = tmp_path / "tables"
    out.mkdir()
    parts = {
        "input": SimpleNamespace(**files),
        "output": Named(**{name: str(out / name) for name in ("summary", "markdown", "bytes", "layers", "tensors")}),
        "params": SimpleNamespace(models=MODELS, schemes=SCHEMES, seed=0, gguf_models=[]),
    }
    run_script("summary_table.py", tmp_path, **parts)
    assert sorted(os.listdir(out)) == ["bytes", "layers", "markdown", "summary", "tensors"]
    table = pd.read_csv(out / "summary", keep_default_na=False)
    assert list(table["model"]) == ["tiny"] * 3 + ["NA"] * 3

    for file in out.iterdir():
        file.unlink()
    change(files["kernels"][3], lambda report: report["rows"][2].update(passed=False))
    with pytest.raises(SystemExit) as caught:
        run_script("summary_table.py", tmp_path, **parts)
    assert caught.value.code == 1
    assert os.listdir(out) == []
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert "kernel int4_linear failed on model.layers.0.mlp.up_proj" in error


HEADER = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"


@pytest.fixture
def benchmarks(tmp_path):
    root = tmp_path / "benchmarks"
    runs = {
        "convert_shard/m/int4/model-00001-of-00001": "12.3456\t0:00:12\t400.00\t1\t1\t1\t0\t0\t99\t11",
        "source_manifest/qwen2.5": "0.0312\t0:00:00\tNA\tNA\tNA\tNA\tNA\tNA\tNA\tNA",
        "tokenize_text/m": "1.5\t0:00:01\t-\t-\t-\t-\t-\t-\t0.00\t1.2",
    }
    for name, run in runs.items():
        path = root / f"{name}.tsv"
        path.parent.mkdir(parents=True)
        path.write_text(HEADER + run + "\n")
    return root, [root / f"{name}.tsv" for name in runs]


def test_stages_have_seconds_and_peaks_and_a_total(benchmarks, tmp_path):
    root, paths = benchmarks
    work = paths[0].with_suffix(".json")
    work.write_text(json.dumps({"cores": 2, "source_bytes": 987_648_000}))
    write_table(stage_table(paths, [work], root), tmp_path / "stages.csv")
    assert (tmp_path / "stages.csv").read_text().splitlines() == [
        "rule,job,seconds,max_rss_mb,cores,source_mb,source_mb_per_s_per_core",
        "convert_shard,m/int4/model-00001-of-00001,12.35,419.4,2,987.6,40.0",  # 400 MiB
        "source_manifest,qwen2.5,0.03,,,,",
        "tokenize_text,m,1.50,,,,",
        "total,,13.88,419.4,,,",
    ]


def test_unsampled_stages_have_an_empty_peak_in_the_total_too(benchmarks):
    root, paths = benchmarks
    total = stage_table(paths[1:], root=root).iloc[-1].to_dict()
    assert total.pop("seconds") == pytest.approx(1.5312)
    assert total.pop("rule") == "total"
    assert set(total.values()) == {None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 lines, expected 2"),
        (HEADER, "has 1 lines, expected 2"),
        (HEADER + "1\t0\t1\n" * 2, "has 3 lines, expected 2"),
        ("a\tb\n1\t2\n", "is no benchmark"),
        (HEADER + "soon\t0:00:01\t1\n", "s is 'soon', which is no number"),
    ],
)
def test_a_file_that_is_no_benchmark_is_named(benchmarks, text, message):
    root, paths = benchmarks
    paths[0].write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        stage_table(paths, root=root)
    assert str(paths[0]) in str(caught.value)


def test_a_benchmark_must_lie_where_its_name_says(benchmarks):
    root, paths = benchmarks
    with pytest.raises(ValueError, match=r"is not of the form results/benchmarks/<rule>/<job>\.tsv"):
        stage_table(paths)
    with pytest.raises(ValueError, match=r"absent\.tsv: no such file"):
        stage_table([root / "rule/absent.tsv"], root=root)


def test_the_stage_script_reads_the_pipeline_s_own_folder(benchmarks, tmp_path, monkeypatch):
    root, paths = benchmarks
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    root.rename("results/benchmarks")
    relative = [f"results/benchmarks/{path.relative_to(root)}" for path in paths]
    run_script("stage_table.py", tmp_path, input=SimpleNamespace(benchmarks=relative, work=[]), output=["stages.csv"])
    assert Path("stages.csv").read_text().splitlines()[-1] == "total,,13.88,419.4,,,"
