"""What is found out about a checkpoint folder before any stage works on it, and when it is opened again."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from otf_llm.artifact_format import shard_name
from otf_llm.checkpoint import Checkpoint, build_manifest
from otf_llm.files import write_json
from otf_llm.inspection import inspect_checkpoint, open_verified
from otf_llm.settings import SchemeSettings
from test_conversion import convert
from tiny import FAMILIES, build_model, save_checkpoint

WEIGHTS = "model.safetensors"


def inspect(folder):
    return inspect_checkpoint(Checkpoint.open(folder))


def edit_tensors(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def edit_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tmp_path / "model", build_model("llama"), tokenizer=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_recognised_without_a_warning(tmp_path, caplog, family, tied):
    folder = save_checkpoint(tmp_path, build_model(family, tie_word_embeddings=tied), tokenizer=False)
    assert inspect(folder).name == family
    assert [record for record in caplog.records if record.name.startswith("otf_llm")] == []


@pytest.mark.parametrize("architectures", [["GptOssForCausalLM"], ["LlamaModel"], [None], [], None])
def test_other_architectures_are_refused(folder, architectures):
    edit_config(folder, lambda config: config.update(architectures=architectures))
    with pytest.raises(ValueError, match=r"^unsupported architecture: .*; supported: LlamaForCausalLM, "):
        inspect(folder)


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head", "model.layers.1.mlp.up_proj", "model.norm"])
def test_a_missing_tensor_is_named(folder, name):
    edit_tensors(folder, lambda tensors: tensors.pop(f"{name}.weight"))
    with pytest.raises(ValueError, match=rf"^checkpoint lacks tensor {name}\.weight"):
        inspect(folder)


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.self_attn.k_proj", "model.layers.1.input_layernorm"])
def test_a_wrong_shape_is_named_with_both(folder, name):
    edit_tensors(folder, lambda tensors: tensors.update({f"{name}.weight": tensors[f"{name}.weight"][:-1]}))
    with pytest.raises(ValueError, match=rf"^{name}\.weight has shape \[\d+.*\], config\.json demands \[\d+.*\]$"):
        inspect(folder)


def test_more_layers_configured_than_stored(folder):
    edit_config(folder, lambda config: config.update(num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"^checkpoint lacks tensor model\.layers\.2\.self_attn\.q_proj\.weight$"):
        inspect(folder)


def test_more_layers_stored_than_configured(folder, tmp_path):
    """Such a checkpoint is refused, or its surplus layer is carried bit for bit; it is no cause for a crash."""
    edit_config(folder, lambda config: config.update(num_hidden_layers=1))
    before = load_file(folder / WEIGHTS)
    surplus = [name for name in before if name.startswith("model.layers.1.")]
    assert len(surplus) == 9
    said = ""
    try:
        convert(folder, tmp_path / "out", SchemeSettings())
    except ValueError as error:
        said = str(error)
    if said:
        assert "model.layers.1." in said
    else:
        after = load_file(tmp_path / "out" / shard_name(0, 1))
        assert all(torch.equal(before[name], after[name]) for name in surplus)


def test_tensors_outside_the_table_are_logged_by_name(folder, caplog):
    names = [f"extra.{index:02}.weight" for index in range(12)]
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(3) for name in names}))
    with caplog.at_level(logging.WARNING, logger="otf_llm.inspection"):
        assert inspect(folder).name == "llama"
    (record,) = [record for record in caplog.records if record.name == "otf_llm.inspection"]
    assert record.getMessage().startswith("12 tensors are not in the llama table and will be carried as they are: ")
    assert "extra.09.weight" in record.getMessage()
    assert "extra.10.weight" not in record.getMessage(), "ten names tell enough"


# Heads


def test_without_a_stored_head_the_model_must_be_tied(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"^checkpoint lacks tensor lm_head\.weight \(tie_word_embeddings is false"):
        inspect(folder)
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    assert inspect(folder).name == "llama"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_tie_is_read_as_the_familys_own_default(tmp_path, family):
    """Gemma ties unless told otherwise, the others do not; a folder without head and flag is only whole for Gemma."""
    folder = save_checkpoint(tmp_path, build_model(family, tie_word_embeddings=True), tokenizer=False)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    edit_config(folder, lambda config: config.pop("tie_word_embeddings", None))
    if family == "gemma3":
        assert inspect(folder).name == "gemma3"
    else:
        with pytest.raises(ValueError, match=r"^checkpoint lacks tensor lm_head\.weight"):
            inspect(folder)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(folder):
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.* in rows 0 to 260"):
        inspect(folder)
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    assert inspect(folder).name == "llama"
    edit_config(folder, lambda config: config.update(tie_word_embeddings=False))
    assert inspect(folder).name == "llama", "an untied head may be equal to the embedding"


def test_one_different_value_in_the_last_row_is_found(folder, monkeypatch):
    from otf_llm import inspection

    monkeypatch.setattr(inspection, "row_blocks", lambda shape: ((start, start + 26) for start in range(0, 260, 26)))
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))

    def tie_but_one(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[259, 63] += 1
        tensors["lm_head.weight"] = head

    edit_tensors(folder, tie_but_one)
    with pytest.raises(ValueError, match="differ in rows 234 to 260; set tie_word_embeddings to false to keep both"):
        inspect(folder)


# Opened again


@pytest.fixture
def manifest(folder, tmp_path):
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    write_json(tmp_path / "manifest.json", build_manifest(Checkpoint.open(folder), "llama", False))
    return tmp_path / "manifest.json"


def test_an_unchanged_folder_opens(folder, manifest, tmp_path):
    assert open_verified(folder, manifest).tensors.keys() == Checkpoint.open(folder).tensors.keys()
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert open_verified(moved, manifest).folder == moved, "where it lies does not matter"


def test_a_side_file_that_grew_is_named(folder, manifest):
    (folder / "generation_config.json").write_text('{"eos_token_id": 2570}')
    with pytest.raises(ValueError, match=r"generation_config\.json: has 22 bytes, the manifest says 21; the source"):
        open_verified(folder, manifest)


def test_a_file_that_came_or_went_is_named(folder, manifest):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not in the manifest; the source changed"):
        open_verified(folder, manifest)
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"generation_config\.json: gone; the source changed"):
        open_verified(folder, manifest)


def test_other_weights_are_named(folder, manifest):
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].half()}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is .*'F16'.*, the manifest says .*'BF16'"):
        open_verified(folder, manifest)


def test_a_manifest_that_is_none(folder, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.json: no such file"):
        open_verified(folder, tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bad\.json is not a JSON object"):
        open_verified(folder, tmp_path / "bad.json")
