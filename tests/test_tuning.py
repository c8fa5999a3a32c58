"""Configurations as data: what is chosen, what is measured, and how measurements are kept."""

import json

import pytest

from gpu_kernels import pack, random_layer
from otf_kernels import hopper_config, tuning

SHAPES = [(8192, 28672), (28672, 8192), (18944, 3584), (3584, 18944), (8192, 3072), (3072, 8192), (3072, 3072), (1, 9)]
GPU = "A GPU of the future"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path))
    tuning._measured.cache_clear()
    yield
    tuning._measured.cache_clear()


def sizes(num_rows, in_features):
    """Rows and steps of a layer with one percent of outlier columns."""
    return num_rows, hopper_config.num_steps(in_features, round(in_features / 100))


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 33, 64, 65, 128, 129, 2048])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_choice_fits(shape, tokens):
    config = hopper_config.choose_config(*sizes(*shape), tokens, 132)
    hopper_config.check_config(config, tokens)
    assert config.block_m >= min(tokens, 8)
    assert -1 <= config.split <= sizes(*shape)[1]


@pytest.mark.parametrize("tokens", [1, 16, 64, 128, 300, 2048])
def test_candidates_fit_and_differ(tokens):
    for shape in SHAPES:
        num_rows, steps = sizes(*shape)
        configs = tuning.candidates(num_rows, steps, tokens, 132)
        assert configs[0] == hopper_config.choose_config(num_rows, steps, tokens, 132)
        assert len(set(configs)) == len(configs) > 10
        for config in configs:
            hopper_config.check_config(config, tokens)
            if config.split > 1:
                assert (config.split - 1) * -(-steps // config.split) < steps  # no program without a step


@pytest.mark.parametrize(
    ("tokens", "measured"), [(1, 8), (8, 8), (9, 16), (33, 64), (128, 128), (129, 256), (9999, 2048)]
)
def test_tokens_share_configurations(tokens, measured):
    assert tuning.tokens_measured_for(tokens) == measured


def test_measurements_are_kept_and_found(tmp_path):
    packed = pack(random_layer(70, 300, 3, 64))
    assert tuning.tuned_config(GPU, packed, 1) is None
    first, second = (hopper_config.Config(8, 64, 4, stages, 2, 3, True) for stages in (2, 3))
    tuning._keep(GPU, packed, 8, first)
    tuning._keep(GPU, packed, 16, second)
    assert tuning.tuned_config(GPU, packed, 5) == first
    assert tuning.tuned_config(GPU, packed, 16) == second
    assert tuning.tuned_config(GPU, packed, 17) is None
    assert tuning.tuned_config(GPU, pack(random_layer(71, 300, 3, 64)), 5) is None
    tuning._keep(GPU, packed, 8, second)
    assert tuning.tuned_config(GPU, packed, 5) == second
    assert [path.name for path in tmp_path.iterdir()] == ["a_gpu_of_the_future.json"]
    assert len(json.loads((tmp_path / "a_gpu_of_the_future.json").read_text())) == 2


CONFIG = '"block_n": 64, "num_warps": 4, "num_stages": 2, "programs_per_sm": 2, "split": 3, "early": true'
ROW = '[{"n": 1, "k": 1, "m": 8, "config": {%s}}]'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[" * 100_000,
        '[{"n": 1}]',
        ROW % '"block_m": 8',
        ROW.replace("1", "[1]") % f'"block_m": 8, {CONFIG}',
        ROW % f'"block_m": "8", {CONFIG}',
        ROW % f'"block_m": 7, {CONFIG}',
        ROW % f'"block_m": 8, {CONFIG.replace("true", "1")}',
        ROW % f'"block_m": 8, {CONFIG.replace("3", "-9")}',
    ],
)
def test_a_broken_file_is_named(tmp_path, text):
    path = tmp_path / "a_gpu_of_the_future.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} does not hold configurations.*delete it to measure again"):
        tuning.tuned_config(GPU, pack(random_layer(7, 30, 3, 64)), 1)
    with pytest.raises(ValueError, match=f"{path} does not hold configurations"):
        tuning._keep(GPU, pack(random_layer(7, 30, 3, 64)), 8, hopper_config.Config(8, 64, 4, 2, 2, 3, True))
    assert path.read_text() == text


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "a_gpu_of_the_future.json"
    path.mkdir()
    with pytest.raises(ValueError, match=rf"{path} cannot be read: Is a directory; .OTF_KERNELS_CACHE sets another"):
        tuning.tuned_config(GPU, pack(random_layer(7, 30, 3, 64)), 1)


def test_without_a_home_nothing_is_kept(monkeypatch):
    packed = pack(random_layer(7, 30, 3, 64))
    for name in (tuning.CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tuning.os.path, "expanduser", lambda path: path)  # a user without an entry
    assert tuning.cache_folder() is None
    assert tuning.tuned_config(GPU, packed, 1) is None
    with pytest.raises(ValueError, match=r"there is no home for measurements; set .OTF_KERNELS_CACHE to a folder"):
        tuning.tune(packed, 1)


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    packed = pack(random_layer(7, 30, 3, 64))
    assert tuning.tuned_config(GPU, packed, 1) is None
    with pytest.raises(ValueError, match=r"cache cannot hold measurements: Not a directory; set .OTF_KERNELS_CACHE"):
        tuning.tune(packed, 1)


def test_published_files_fit():
    for path in tuning.FOLDER.glob("*.json"):
        for row in json.loads(path.read_text()):
            config = hopper_config.Config(**row["config"])
            hopper_config.check_config(config, row["m"])


def test_tuning_needs_a_hopper_gpu():
    with pytest.raises(ValueError, match="tuning needs a Hopper GPU"):
        tuning.tune(pack(random_layer(7, 30, 3, 64)), 1)
    with pytest.raises(ValueError, match="num_tokens must be at least 1, not 0"):
        tuning.tune(pack(random_layer(7, 30, 3, 64)), 0)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 33, 64, 65, 4096])
def test_a_table_s_choice_fits(tokens):
    config = hopper_config.choose_int8_config(tokens)
    hopper_config.check_config(config, tokens)
    assert config.split == hopper_config.WHOLE_TILES
    assert config.block_m >= min(tokens, 64)


def test_estimates_grow_with_work():
    """More rows, channels or tokens never are estimated to take less time."""
    config = hopper_config.Config(16, 128, 4, 3, 2, 1, True)
    sizes = [1 << power for power in range(6, 15)]
    for times in (
        [hopper_config.estimated_time(config, size, 32, 16, 132) for size in sizes],
        [hopper_config.estimated_time(config, 4096, size, 16, 132) for size in sizes],
        [hopper_config.estimated_time(config, 4096, 32, size, 132) for size in sizes],
    ):
        assert times == sorted(times)
        assert times[0] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 24}, "config.block_m must be 8, 16, 32, 64 or 128, not 24"),
        ({"block_n": 64, "num_warps": 8}, "16 or 32 output features a warp, not num_warps 8 and block_n 64"),
        ({"programs_per_sm": 0}, "config.programs_per_sm must be at least 1, not 0"),
        ({"split": 1.0}, "config.split must be of type int, not 1.0"),
        ({"num_stages": 1}, "config.num_stages must be at least 2"),
        ({"programs_per_sm": 4, "num_stages": 4}, "config.num_stages must be at least 2 and fit"),
        ({"split": -2}, "config.split must be at least -1"),
        ({"split": 2, "block_m": 8}, "at most 1 when tokens take over 4 tiles, not 2"),
    ],
)
def test_configurations_that_cannot_be_launched_are_refused(change, message):
    values = {
        "block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 3, "programs_per_sm": 1, "split": 1, "early": True
    }  # fmt: skip
    hopper_config.check_config(hopper_config.Config(**values), 40)
    with pytest.raises(ValueError, match=message):
        hopper_config.check_config(hopper_config.Config(**(values | change)), 40)


def test_the_shipped_measurements_can_be_launched():
    rows = json.loads((tuning.FOLDER / "nvidia_h200.json").read_text())
    assert len({(row["n"], row["k"], row["m"]) for row in rows}) == len(rows) > 50
    for row in rows:
        hopper_config.check_config(hopper_config.Config(**row["config"]), row["m"])
