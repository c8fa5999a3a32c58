"""Readers of what users bring (config, index, header): any damage is one ValueError, soon and within bounds."""

import contextlib
import json
import shutil
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otf_llm.checkpoint import Checkpoint
from otf_llm.inspection import inspect_checkpoint
from otf_llm.memory import peak_memory
from tiny import build_model, save_checkpoint

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
FUZZ = settings(max_examples=150, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A sound checkpoint in several shards."""
    folder = tmp_path_factory.mktemp("source") / "model"
    return save_checkpoint(folder, build_model(), tokenizer=False, max_shard_size="90KB")


@pytest.fixture
def folder(source, tmp_path):
    """A copy that the test may damage."""
    return shutil.copytree(source, tmp_path / "copy")


def inspect(folder):
    """Open and inspect as the source stage does; damage may show as ValueError, nothing else."""
    with contextlib.suppress(ValueError):
        inspect_checkpoint(Checkpoint.open(folder))


def test_the_undamaged_folder_is_accepted(folder):
    inspect_checkpoint(Checkpoint.open(folder))


@given(data=st.data())
@FUZZ
def test_config_json(folder, source, data):
    config = json.loads((source / "config.json").read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(JSON)
    (folder / "config.json").write_text(json.dumps(config))
    inspect(folder)


@pytest.mark.parametrize("size", [10**4, 10**5, 10**7, 10**12, 2**70])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "qwen3_5"])
def test_no_number_takes_much_time_or_memory(tmp_path, family, size):
    """Layers or experts beyond any model's are refused before they are listed."""
    folder = save_checkpoint(tmp_path / "model", build_model(family), tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    before = peak_memory()
    for changed in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in list(changed.items()):
            changed[key] = size
            (folder / "config.json").write_text(json.dumps(config))
            begin = time.monotonic()
            inspect(folder)
            assert time.monotonic() - begin < 5, key
            changed[key] = value
    assert peak_memory() - before < 1e9


@given(data=st.data())
@FUZZ
def test_index(folder, source, data):
    index = json.loads((source / "model.safetensors.index.json").read_text())
    names = sorted(index["weight_map"])
    shard = index["weight_map"][names[0]]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        change = data.draw(st.sampled_from(["drop", "value", "name"]))
        if change == "value":
            index["weight_map"][name] = data.draw(JSON | st.sampled_from(["../x.safetensors", "/x.safetensors", ".."]))
        elif change == "name":
            index["weight_map"][data.draw(st.text(max_size=20))] = shard
        else:
            index["weight_map"].pop(name, None)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    inspect(folder)


@given(data=st.data())
@FUZZ
def test_header(folder, source, data):
    shard = sorted(source.glob("*.safetensors"))[0]
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), min_size=1, max_size=3)):
        if isinstance(header[name], dict) and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(header[name]) or ["dtype"]))
            header[name][key] = data.draw(JSON | st.lists(st.integers(0, 2**64), max_size=3))
        else:
            header[name] = data.draw(JSON)
    text = json.dumps(header).encode()
    (folder / shard.name).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    inspect(folder)


@given(data=st.data())
@FUZZ
def test_bytes(folder, source, data):
    shard = sorted(source.glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 4000) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(raw)))
    (folder / shard.name).write_bytes(bytes(raw[:cut]))
    inspect(folder)
