"""Folders of pytorch_model*.bin: the same tensors as safetensors, or one message; nothing in them is run (CNV-44)."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from otf_llm.checkpoint import Checkpoint
from otf_llm.inspection import inspect_checkpoint
from otf_llm.pickled import write_safetensors
from otf_llm.sources import FolderSource, PickleSource, fingerprint, parse_source, shard_names
from tiny import build_model, save_checkpoint

INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def safe(tmp_path):
    return save_checkpoint(tmp_path / "safe", build_model(tie_word_embeddings=True))


def pickled_copy(safe, folder, shards=1, **save_options):
    """The same model as one or several pickles, side files included."""
    folder.mkdir()
    for path in safe.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(safe / "model.safetensors")
    names = sorted(tensors)
    files = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)] if shards > 1 else []
    files = files or ["pytorch_model.bin"]
    weight_map = {}
    for index, file in enumerate(files):
        part = {name: tensors[name] for name in names[index::shards]}
        torch.save(part, folder / file, **save_options)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_the_tensors_and_side_files_are_those_of_the_safetensors(safe, tmp_path, shards):
    source = pickled_copy(safe, tmp_path / "pickled", shards)
    assert parse_source(str(source), tmp_path) == PickleSource(source)
    assert shard_names(PickleSource(source)) == ["model.safetensors"]
    write_safetensors(source, tmp_path / "written")
    expected, written = (load_file(folder / "model.safetensors") for folder in (safe, tmp_path / "written"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    names = {path.name for path in safe.iterdir()}
    assert {path.name for path in (tmp_path / "written").iterdir()} == names
    inspect_checkpoint(Checkpoint.open(tmp_path / "written"))


def test_views_of_one_storage_are_written_each(safe, tmp_path):  # CNV-35
    source = pickled_copy(safe, tmp_path / "pickled")
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.contiguous().T
    torch.save(tensors, source / "pytorch_model.bin")
    write_safetensors(source, tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_safetensors_beside_pickles_are_used(safe, tmp_path):
    torch.save({}, safe / "pytorch_model.bin")
    assert parse_source(str(safe), tmp_path) == FolderSource(safe)


def test_the_fingerprint_follows_the_content(safe, tmp_path):
    source = PickleSource(pickled_copy(safe, tmp_path / "pickled"))
    before = fingerprint(source)
    (source.path / "pytorch_model.bin").touch()
    assert fingerprint(source) == before
    torch.save({"w": torch.zeros(3)}, source.path / "pytorch_model.bin")
    assert fingerprint(source) != before


class Harmless:
    """Unpickling an instance leaves a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def spoil(source, kind, trace):
    file = source / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    if kind == "object":
        torch.save(tensors | {"x": Harmless(trace)}, file)
    elif kind == "plain pickle":
        file.write_bytes(pickle.dumps(Harmless(trace)))
    elif kind == "old format":
        torch.save(tensors, file, _use_new_zipfile_serialization=False)
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif kind == "list":
        torch.save(list(tensors.values()), file)
    elif kind == "nested":
        torch.save({"state_dict": tensors}, file)
    elif kind == "sparse":
        torch.save(tensors | {"x": torch.eye(3).to_sparse()}, file)
    elif kind == "complex":
        torch.save(tensors | {"x": torch.zeros(3, dtype=torch.complex64)}, file)
    elif kind == "index":
        (source / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, "more"], file.name)}))
    elif kind == "no index":
        torch.save({"more": torch.zeros(2)}, source / "pytorch_model-2.bin")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("object", r"pytorch_model\.bin: refused, it holds more than tensors; convert to safetensors first"),
        ("plain pickle", r"pytorch_model\.bin: .*convert to safetensors first"),
        ("old format", r"pytorch_model\.bin: damaged, or saved by torch before 1\.6; convert to safetensors first"),
        ("truncated", r"pytorch_model\.bin: damaged"),
        ("list", r"pytorch_model\.bin: not a table of named tensors"),
        ("nested", r"pytorch_model\.bin: not a table of named tensors"),
        ("sparse", r"x is torch\.float32 torch\.sparse_coo, which is not supported"),
        ("complex", r"x is torch\.complex64 torch\.strided, which is not supported"),
        ("index", r"index\.json: files and index do not hold the same tensors: more"),
        ("no index", r"several pytorch_model\*\.bin, but no pytorch_model\.bin\.index\.json"),
    ],
)
def test_what_is_not_plain_tensors_is_refused_unrun(safe, tmp_path, kind, message):
    source = pickled_copy(safe, tmp_path / "pickled")
    trace = tmp_path / "unpickled"
    spoil(source, kind, trace)
    with pytest.raises(ValueError, match=message):
        write_safetensors(source, tmp_path / "written")
    assert not trace.exists()
    assert not (tmp_path / "written").exists()
