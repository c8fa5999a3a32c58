"""The real Snakefile on a tiny random model: results, caching to the letter, kills, bad input."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from imports import EVERY_STAGE, REPOSITORY, closure
from tiny import build_model, byte_tokenizer, save_checkpoint

NOTHING = "Nothing to be done"
HUB_TEXT = {"dataset": "org/name", "split": "train", "revision": "0" * 40}
COLUMNS = [
    "model",
    "scheme",
    "bits_per_weight",
    "size_bytes",
    "perplexity",
    "perplexity_rise",
    "kld",
    "top1_agreement",
    "backend",
    "seed",
    "commit",
]


class Workspace:
    """A copy of the repository beside a configuration, and a Snakemake working directory."""

    def __init__(self, folder: Path):
        self.repository = folder / "repository"
        self.inputs = folder / "inputs"
        self.work = folder / "work"
        self.config = self.inputs / "tiny.yaml"
        for name in ("rules", "scripts", "kernels", "envs"):
            shutil.copytree(REPOSITORY / name, self.repository / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("Snakefile", "config.yaml"):
            shutil.copy(REPOSITORY / name, self.repository / name)
        self.inputs.mkdir()
        self.work.mkdir()
        shutil.copy(REPOSITORY / "tests" / "tiny.yaml", self.config)
        model = build_model("llama", tie_word_embeddings=True)
        save_checkpoint(self.inputs / "model", model, max_shard_size="90KB")
        words = random.Random(0).choices(["alpha", "beta", "gamma", "delta", "omega"], k=400)
        (self.inputs / "calibration.txt").write_text(" ".join(words[:200]))
        (self.inputs / "evaluation.txt").write_text(" ".join(words[200:]))

    def command(self, *arguments, work: Path | None = None, config: Path | None = None) -> list[str]:
        return [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(self.repository / "Snakefile")),
            *("--configfile", str(config or self.config), "--directory", str(work or self.work), "--cores", "2"),
            *arguments,
        ]

    def run(self, *arguments, **places) -> subprocess.CompletedProcess:
        command = self.command(*arguments, **places)
        return subprocess.run(command, capture_output=True, text=True, cwd=self.inputs, env=environment())

    def start(self, **places) -> subprocess.Popen:
        """A run in the background, the head of its own process group."""
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(
            self.command(**places), cwd=self.inputs, env=environment(), start_new_session=True, **silent
        )

    def planned(self, *arguments, **places) -> set[str]:
        """Rules that a dry run would execute."""
        done = self.run("--dry-run", *arguments, **places)
        assert done.returncode == 0, done.stdout + done.stderr
        text = done.stdout + done.stderr
        if NOTHING in text:
            return set()
        table = text.split("Job stats:")[1].split("total")[0]
        return set(re.findall(r"^(\w+) +\d+$", table, flags=re.M)) - {"all"}

    def edited(self, changes: dict) -> Path:
        """A copy of the configuration with some sections changed."""
        values = yaml.safe_load(self.config.read_text())
        for key, value in changes.items():
            values[key] = values[key] | value if isinstance(value, dict) and key in values else value
        path = self.inputs / "edited.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return path


def environment() -> dict[str, str]:
    """This environment without what would let the installed library or an outer configuration in."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run, whose scripts wrote down which modules of ours they had loaded."""
    workspace = Workspace(tmp_path_factory.mktemp("workflow"))
    trace = workspace.inputs / "trace"
    trace.mkdir()
    (workspace.inputs / "sitecustomize.py").write_text(
        "import atexit, json, os, sys\n"
        "def write():\n"
        "    if '/.snakemake/scripts/' in sys.argv[0]:\n"
        "        names = [n for n in sys.modules if n.split('.')[0] in ('otf_llm', 'otf_kernels')]\n"
        f"        path = os.path.join({str(trace)!r}, os.path.basename(sys.argv[0]))\n"
        "        json.dump(sorted(names), open(path, 'w'))\n"
        "atexit.register(write)\n"
    )
    command = workspace.command()
    traced = environment() | {"PYTHONPATH": str(workspace.inputs)}
    finished = subprocess.run(command, capture_output=True, text=True, cwd=workspace.inputs, env=traced)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return workspace


def artifacts(folder: Path) -> dict[str, bytes]:
    """Every result but logs and timings."""
    measured = ("logs", "benchmarks")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "results").rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[1] not in measured and path.name != "stages.csv"
    }


# Results


def test_tables_and_plots(done):
    tables = done.work / "results" / "tables"
    summary = pd.read_csv(tables / "summary.csv")
    assert list(summary.columns[: len(COLUMNS)]) == COLUMNS
    assert list(summary.scheme) == ["source", "int8-embedding", "int4-naive", "int4"]
    assert not summary[COLUMNS].isna().any().any()
    source = summary.iloc[0]
    assert (source.perplexity_rise, source.kld, source.top1_agreement) == (0, 0, 1)
    assert (summary.perplexity > 1).all()
    by_category = pd.read_csv(tables / "bytes.csv").groupby(["model", "scheme"]).bytes.sum()
    assert by_category["tiny", "int4"] == summary.set_index("scheme").size_bytes["int4"]
    stored = (done.work / "results" / "convert" / "tiny" / "int4").glob("*.safetensors")
    assert by_category["tiny", "int4"] == sum(path.stat().st_size for path in stored)
    for plot in ("size_perplexity", "bytes", "layer_error"):
        assert (tables / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tables / f"{plot}.svg").read_text()
    assert "int4-naive" in (tables / "summary.md").read_text()
    stages = pd.read_csv(tables / "stages.csv")
    assert {"collect_activations", "convert_shard", "evaluate_scheme"} <= set(stages.rule)


def test_the_loaded_folder_gives_the_validated_logits(done):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from otf_llm.evaluation import logits_digest

    folder = done.work / "results" / "convert" / "tiny" / "int4"
    report = json.loads((done.work / "results" / "validate" / "tiny" / "int4" / "fidelity.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("abc", return_tensors="pt")["input_ids"]
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))  # as the job had
    try:
        assert logits_digest(model, ids) == report["samples"][0]["logits"]
    finally:
        torch.set_num_threads(threads)


def test_perplexity_equals_that_of_transformers_own_loss(done):
    from transformers import AutoModelForCausalLM

    ids = byte_tokenizer()((done.inputs / "evaluation.txt").read_text())["input_ids"]
    windows = torch.tensor(ids[: 2 * 64]).view(2, 64)
    model = AutoModelForCausalLM.from_pretrained(done.inputs / "model", dtype=torch.float32).eval()
    expected = torch.exp(model(input_ids=windows, labels=windows).loss).item()
    report = json.loads((done.work / "results" / "validate" / "tiny" / "source" / "fidelity.json").read_text())
    assert report["fidelity"]["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_second_moments_on_request(done):
    """E[x xᵀ] of every linear input; its diagonal is the profile's mean square."""
    from safetensors.torch import load_file

    from otf_llm.calibration_profile import load_statistics

    path = done.work / "results" / "calibrate" / "tiny" / "second_moments.safetensors"
    finished = done.run("second_moments")
    try:
        assert finished.returncode == 0, finished.stdout + finished.stderr
        moments = load_file(path)
    finally:
        path.unlink(missing_ok=True)
    profile = load_statistics(path.with_name("activations.safetensors"))
    assert moments.keys() == profile.keys()
    for name, moment in moments.items():
        assert torch.allclose(moment.diagonal().double(), profile[name].mean_square(), rtol=1e-5), name


# Caching


def test_a_second_run_has_nothing_to_do(done):
    finished = done.run()
    assert finished.returncode == 0
    assert NOTHING in finished.stdout + finished.stderr


def test_touching_reruns_nothing(done):
    for path in (
        *(done.repository / "scripts" / "otf_llm").glob("*.py"),
        *(done.repository / "kernels" / "otf_kernels").glob("*.py"),
        *(done.inputs / "model").iterdir(),
        done.inputs / "calibration.txt",
        done.config,
        done.repository / "config.yaml",
    ):
        path.touch()
    assert done.planned() == set()


TABLES = {"summary_table", "draw_plots"}
SCHEME = {"convert_shard", "merge_shards", "evaluate_scheme", "check_kernels", "stage_table", *TABLES}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"plots": {"colors": ["#000000"] * 6}}, {"draw_plots"}),
        (
            {"schemes": {"int4": {"group_size": 32, "permutation": {"outlier_fraction": 0.1}}}},
            {"order_channels", *SCHEME},
        ),
        ({"schemes": {"new": {"group_size": 64}}}, SCHEME),
        ({"validate": {"kernel_tokens": 3}}, {"check_kernels", "stage_table", *TABLES}),
        ({"calibrate": {"batch_size": 4}}, {"collect_activations", "order_channels", *SCHEME}),
        ({"seed": 1}, {"check_kernels", "stage_table", *TABLES}),
    ],
)
def test_a_changed_setting_reruns_what_depends_on_it(done, changes, expected):
    values = yaml.safe_load(done.config.read_text())
    merged = {
        key: {**values.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    assert done.planned(config=done.edited(merged)) == expected


def test_a_changed_text_reruns_from_the_tokens(done):
    path = done.inputs / "evaluation.txt"
    before = path.read_text()
    path.write_text(before.replace("omega", "sigma"))
    try:
        planned = done.planned()
    finally:
        path.write_text(before)
    assert planned >= {"tokenize_text", "evaluate_source", "evaluate_scheme"}
    assert "source_manifest" not in planned
    assert done.planned() == set()


def test_a_changed_source_reruns_everything_of_that_model(done):
    path = done.inputs / "model" / "generation_config.json"
    before = path.read_text()
    path.write_text(before + " ")
    try:
        assert "source_manifest" in done.planned()
    finally:
        path.write_text(before)


def rule_scripts() -> dict[str, Path]:
    """Script of every rule, read from the rules files."""
    found = {}
    for path in sorted((REPOSITORY / "rules").glob("*.smk")):
        for block in re.split(r"(?m)^(?=rule )", path.read_text()):
            script = re.search(r'"\.\./scripts/(\w+\.py)"', block)
            if script:
                found[re.match(r"rule (\w+)", block)[1]] = REPOSITORY / "scripts" / script[1]
    return found


def declared_modules() -> dict[str, set[str]]:
    """Modules that every rule declares as inputs, read from the rules files."""
    found = {}
    for path in sorted((REPOSITORY / "rules").glob("*.smk")):
        for block in re.split(r"(?m)^(?=rule )", path.read_text()):
            code = re.search(r"code=code\(([^)]*)\)", block)
            if code:
                names = re.findall(r'"([^"]+)"', code[1])
                qualified = {name if name.startswith("otf_kernels") else f"otf_llm/{name}" for name in names}
                found[re.match(r"rule (\w+)", block)[1]] = qualified | EVERY_STAGE
    return found


def test_every_rule_declares_what_its_script_imports():
    scripts = rule_scripts()
    declared = declared_modules()
    assert scripts.keys() == declared.keys()
    for rule, script in scripts.items():
        assert declared[rule] == closure(script), rule


def test_what_scripts_really_load_is_declared(done):
    declared = declared_modules()
    by_script = {script.name: rule for rule, script in rule_scripts().items()}
    traced = list((done.inputs / "trace").iterdir())
    seen = set()
    for path in traced:
        rule = by_script[re.search(r"tmp\w+\.(\w+\.py)$", path.name)[1]]
        seen.add(rule)
        loaded = set()
        for name in json.loads(path.read_text()):
            module = name.replace(".", "/")
            loaded.add(f"{module}/__init__" if "/" not in module else module)
        assert loaded - declared[rule] == set(), rule
    assert (seen == by_script.keys() and len(seen) > 8) or seen == set(declared) - NOT_RUN


NOT_RUN = {"fetch_wheel", "dequantize_gguf", "unpickle_checkpoint", "collect_second_moments", "benchmark_kernels"}


def test_editing_a_module_reruns_the_stages_that_import_it_and_what_follows(done):
    """An edit to one module plans exactly the rules that declare it, and their descendants."""
    declared = declared_modules()
    graph = done.run("--rulegraph", "dot").stdout
    names = dict(re.findall(r'(\d+)\[label = "(\w+)"', graph))
    edges = [(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", graph)]
    for module in sorted(set().union(*declared.values())):
        root = "kernels" if module.startswith("otf_kernels") else "scripts"
        path = done.repository / root / f"{module}.py"
        before = path.read_bytes()
        path.write_bytes(before + b"\n# edited\n")
        try:
            planned = done.planned()
        finally:
            path.write_bytes(before)
        expected = {rule for rule, modules in declared.items() if module in modules} - NOT_RUN
        while True:
            following = {b for a, b in edges if a in expected} - {"all"}
            if following <= expected:
                break
            expected |= following
        assert planned == expected, module
    assert done.planned() == set()


# Reproducibility and kills


def test_kills_leave_a_run_that_finishes_with_the_same_bytes(done, tmp_path):
    """kill -9 of the whole process group at eight moments; the same command then finishes the run."""
    clean = artifacts(done.work)
    configurations = [path.read_bytes() for path in (done.config, done.repository / "config.yaml")]
    moments = random.Random(1)
    for _ in range(8):
        process = done.start(work=tmp_path)
        try:
            process.wait(moments.uniform(3, 9))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finished = done.run(work=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert artifacts(tmp_path) == clean
    assert [path.read_bytes() for path in (done.config, done.repository / "config.yaml")] == configurations


def test_a_shard_that_finds_no_room_is_all_that_is_made_again(done, tmp_path):
    """CNV-50, SMK-01: a limit on file sizes stops the largest shard; kept outputs hold nothing half-written."""
    shutil.copytree(done.work, tmp_path, dirs_exist_ok=True)
    clean, source = artifacts(done.work), {path: path.read_bytes() for path in (done.inputs / "model").iterdir()}
    folder = tmp_path / "results" / "convert" / "tiny" / "int4"
    shards = sorted(folder.glob("model-*.safetensors"), key=lambda path: path.stat().st_size)
    limit = shards[-1].stat().st_size - 1
    assert limit > shards[-2].stat().st_size
    shutil.rmtree(folder)
    # Files of conversion jobs alone are limited, for Snakemake writes some, too.
    limiter = tmp_path / "limiter"
    limiter.mkdir()
    (limiter / "sitecustomize.py").write_text(
        "import resource, sys\n"
        "if any('convert_shard' in argument for argument in sys.orig_argv):\n"
        f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))\n"
    )
    command = done.command("--keep-incomplete", "--keep-going", "convert", work=tmp_path)
    limits = environment() | {"PYTHONPATH": str(limiter)}
    limited = subprocess.run(command, capture_output=True, text=True, cwd=done.inputs, env=limits)
    assert limited.returncode != 0
    assert f"File too large while writing: '{shards[-1].relative_to(tmp_path)}'" in limited.stdout + limited.stderr
    left = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    assert left.keys() == {path.name for path in shards[:-1]}
    assert {path: path.read_bytes() for path in source} == source
    assert done.planned("convert", work=tmp_path) == {"convert", "convert_shard", "merge_shards"}
    finished = done.run(work=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert artifacts(tmp_path) == clean
    assert left == {name: (folder / name).stat().st_mtime_ns for name in left}


def test_a_shard_that_was_spoilt_after_conversion_is_noticed(done, tmp_path):
    """Half a shard under its final name, newer than what was made of it, as a kept failure would leave it."""
    shutil.copytree(done.work / "results", tmp_path / "results")
    shutil.copytree(done.work / ".snakemake" / "metadata", tmp_path / ".snakemake" / "metadata")
    assert done.planned(work=tmp_path) == set()
    shard = sorted((tmp_path / "results" / "convert" / "tiny" / "int4").glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    later = time.time() + 10
    os.utime(shard, (later, later))
    finished = done.run(work=tmp_path)
    assert finished.returncode != 0
    assert f"{shard.name} has changed since it was converted" in finished.stdout + finished.stderr
    shard.unlink()
    finished = done.run(work=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert artifacts(tmp_path) == artifacts(done.work)


def test_a_second_run_beside_a_living_one_is_refused(done, tmp_path):
    first = done.start(work=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / ".snakemake" / "locks").glob("*.lock")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        second = done.run(work=tmp_path)
        assert second.returncode != 0
        assert "Another run is working in this directory" in second.stdout + second.stderr
        assert list((tmp_path / ".snakemake" / "locks").glob("*.lock")), "the living run keeps its locks"
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


def test_braces_in_prompts_and_paths_are_text(done, tmp_path):
    path = done.inputs / "cal{model}.txt"
    path.write_text((done.inputs / "calibration.txt").read_text())
    texts = {"calibration": "./cal{model}.txt", "evaluation": "./evaluation.txt"}
    changes = {"text": texts, "schemes": ["int8-embedding"], "validate": {"prompts": ["{model} {name}"]}}
    finished = done.run("validate", work=tmp_path, config=done.edited(changes))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = json.loads((tmp_path / "results" / "validate" / "tiny" / "source" / "fidelity.json").read_text())
    assert report["samples"][0]["prompt"] == "{model} {name}"


def test_a_scheme_in_the_layout_of_compressed_tensors_has_its_rows(done, tmp_path):
    theirs = {
        "base": "int4",
        "group_size": 32,
        "embedding": "keep",
        "export": "compressed-tensors",
        "permutation": {"outlier_fraction": 0},
    }
    shutil.copytree(done.work, tmp_path, dirs_exist_ok=True)
    config = done.edited({"schemes": {"theirs": theirs}})
    finished = done.run(work=tmp_path, config=config)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = pd.read_csv(tmp_path / "results" / "tables" / "summary.csv").set_index("scheme")
    assert summary.loc["theirs", "export"] == "compressed-tensors"
    assert 0 < summary.loc["theirs", "kld"] < 1.5 * summary.loc["int4", "kld"] + 0.1


def test_a_folder_of_pickles_becomes_safetensors(done, tmp_path):
    from safetensors.torch import load_file

    folder = done.inputs / "pickled"
    folder.mkdir()
    tensors = {}
    for path in (done.inputs / "model").iterdir():
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif not path.name.endswith(".index.json"):
            shutil.copy(path, folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    finished = done.run("source", work=tmp_path, config=done.edited({"models": {"tiny": {"source": "./pickled"}}}))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = load_file(tmp_path / "results" / "source" / "tiny" / "checkpoint" / "model.safetensors")
    assert written.keys() == tensors.keys()


# Bad input


def refused(workspace, tmp_path, changes=None, *arguments) -> str:
    """Output of a run that must fail and leave no results."""
    finished = workspace.run(*arguments, work=tmp_path, config=workspace.edited(changes or {}))
    assert finished.returncode != 0
    left = [path for path in tmp_path.rglob("*") if path.is_file() and ".snakemake" not in path.parts]
    assert [path for path in left if "logs" not in path.parts] == []
    return finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modells": {}}, "config: top level: unknown key 'modells'"),
        ({"schemes": {"int4": {"group_size": 7}}}, "config: schemes.int4.group_size: 7 is less than the minimum of 16"),
        ({"schemes": ["int5"]}, "config: schemes.0: no scheme is called 'int5'"),
        ({"schemes": {"int4": {"keep": ["layers.1."]}}}, "config: schemes.int4.keep: 'layers.1.' matches no linear"),
        (
            {"schemes": {"int4": {"lm_head": "tied", "keep": ["lm_head"]}}},
            "config: schemes.int4.keep: 'lm_head' matches",
        ),
        ({"validate": {"window_length": 300}}, "config: validate.window_length: 300 tokens are more than the model's"),
        ({"calibrate": {"batch_size": "two"}}, "config: calibrate.batch_size: 'two' is not of type 'integer'"),
        ({"models": {"tiny": {"source": "./nowhere"}}}, "nowhere does not exist"),
        ({"models": {"tiny": {"source": "org/name"}}}, "needs the 40 hex digits of a commit"),
        ({"models": {"tiny": {"source": "org/name", "revision": "0" * 40}}}, "org/name"),
        ({"text": "./nowhere.txt"}, "config: text: no such file or folder"),
        ({"text": {"calibration": HUB_TEXT}}, "cannot load the dataset org/name from the hub: HF_HUB_OFFLINE is set"),
    ],
)
def test_a_bad_configuration_is_one_message_and_nothing_written(done, tmp_path, changes, message):
    output = refused(done, tmp_path, changes)
    assert output.count(message) == 1, output
    assert "Traceback" not in output
    assert not (tmp_path / "results").exists()


def test_tokens_of_another_text_do_not_stand_in_for_a_hub_dataset(done, tmp_path):
    shutil.copytree(done.work / "results" / "tokenize", tmp_path / "results" / "tokenize")
    tokens = artifacts(tmp_path)
    finished = done.run(work=tmp_path, config=done.edited({"text": {"calibration": HUB_TEXT}}))
    assert finished.returncode != 0
    assert "cannot load the dataset org/name from the hub: HF_HUB_OFFLINE is set" in finished.stderr
    assert artifacts(tmp_path) == tokens


def test_a_target_that_does_not_exist(done, tmp_path):
    output = refused(done, tmp_path, None, "results/convert/tiny/int5/manifest.json")
    assert "results/convert/tiny/int5/manifest.json" in output


def damage(folder: Path, fault: str) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    if fault == "missing":
        shard.unlink()
    elif fault == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif fault == "pointer":
        shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    elif fault == "nan":
        from safetensors.torch import load_file, save_file

        tensors = load_file(shard)
        tensors[max(tensors, key=lambda name: tensors[name].numel())].view(-1)[5] = float("nan")
        save_file(tensors, shard, metadata={"format": "pt"})
    elif fault == "architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "not on disk: model-00001-of"),
        ("truncated", r"error: .*model-00001-of-\d+\.safetensors"),
        ("pointer", "Git LFS pointer"),
        ("nan", r"error: .*1 NaN"),
        ("architecture", "unsupported architecture: MambaForCausalLM; supported: LlamaForCausalLM"),
    ],
)
def test_a_bad_checkpoint_is_one_message_and_nothing_written(done, tmp_path, fault, message):
    folder = done.inputs / f"bad-{fault}"
    shutil.copytree(done.inputs / "model", folder)
    damage(folder, fault)
    output = refused(done, tmp_path, {"models": {"tiny": {"source": f"./bad-{fault}"}}})
    assert re.search(message, output), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("text", "message"),
    [("\n\n \n", "0 usable tokens"), ("ten letters", "evaluation text is too short: have 11 tokens")],
)
def test_a_bad_text_is_one_message_and_no_tokens(done, tmp_path, text, message):
    (done.inputs / "bad.txt").write_text(text)
    part = "calibration" if "usable" in message else "evaluation"
    texts = {"calibration": "./calibration.txt", "evaluation": "./evaluation.txt"} | {part: "./bad.txt"}
    finished = done.run(work=tmp_path, config=done.edited({"text": texts}))
    assert finished.returncode != 0
    assert message in finished.stdout + finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    assert not (tmp_path / "results" / "tokenize").exists() or not any((tmp_path / "results" / "tokenize").rglob("*.*"))


# The layout


def test_kernels_is_no_package_that_shadows_hugging_faces():
    import importlib.util

    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or "otf" not in spec.origin
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()


def reachable(nodes: dict[str, str], edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Pairs of rule names between which a path leads."""
    pairs = {(nodes[a], nodes[b]) for a, b in edges}
    while True:
        longer = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not longer:
            return pairs
        pairs |= longer


def test_the_picture_in_the_readme_is_the_rulegraph():
    """The picture (tred, then dot -Tsvg) leaves out edges that follow from others; what leads where is the same."""
    assert "(rules/rulegraph.svg)" in (REPOSITORY / "README.md").read_text()
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile"), "--rulegraph", "dot"]
    graph = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=environment(), check=True
    ).stdout
    nodes = dict(re.findall(r'(\d+)\[label = "(\w+)"', graph))
    edges = set(re.findall(r"(\d+) -> (\d+)", graph))
    picture = (REPOSITORY / "rules" / "rulegraph.svg").read_text()
    drawn_nodes = dict(re.findall(r"<title>(\d+)</title>.*?<text[^>]*>(\w+)</text>", picture, flags=re.S))
    drawn_edges = set(re.findall(r"<title>(\d+)&#45;&gt;(\d+)</title>", picture))
    assert edges
    assert reachable(drawn_nodes, drawn_edges) == reachable(nodes, edges)


@pytest.mark.parametrize(("place", "file"), [(0, "cpu/summary.csv"), (1, "h200/wikitext.csv")])
def test_the_readme_quotes_the_published_tables(place, file):
    readme = (REPOSITORY / "README.md").read_text()
    quoted = re.findall(r"\| scheme \| bits/weight.*?(?=\n\n)", readme, flags=re.S)[place].splitlines()[2:]
    published = pd.read_csv(REPOSITORY / "results" / "published" / file)
    assert len(quoted) == len(published)
    for line, row in zip(quoted, published.itertuples(), strict=True):
        name, bits, megabytes, perplexity, rise, kld, agreement = (cell.strip(" *`") for cell in line.split("|")[1:-1])
        assert name == row.scheme
        assert (bits, megabytes) == (f"{row.bits_per_weight:.2f}", f"{row.size_bytes / 1e6:.1f}"), name
        assert (perplexity, kld) == (f"{row.perplexity:.2f}", f"{row.kld:.4f}"), name
        assert rise == ("" if name == "source" else f"{100 * row.perplexity_rise:+.1f} %"), name
        assert agreement == f"{100 * row.top1_agreement:.1f} %", name
