import hashlib
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import otf_llm.checkpoint
from otf_llm.checkpoint import Checkpoint, build_manifest, count_nonfinite, read_header, verify_against_manifest
from otf_llm.files import write_json
from otf_llm.shards import HEADER_LIMIT_BYTES, INDEX_NAME, SINGLE_SHARD

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def tiny_tensors():
    """A Llama of 2 layers, hidden 64, in BF16."""
    shapes = {"model.embed_tokens.weight": (260, 64), "lm_head.weight": (260, 64), NORM: (64,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.{name}_proj.weight": (rows, 64) for name, rows in (("q", 64), ("k", 32), ("v", 32))
        }
        shapes |= {f"{prefix}.self_attn.o_proj.weight": (64, 64), f"{prefix}.mlp.down_proj.weight": (64, 128)}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (128, 64) for name in ("gate", "up")}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def write_checkpoint(folder, tensors, num_shards=1, config=CONFIG):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_SHARD, metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    weight_map = {name: SHARDS[0 if i < len(names) // 2 else 1] for i, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return folder


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX_NAME).read_text())
    for name, shard in changes.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    write_json(folder / INDEX_NAME, index)


@pytest.fixture
def single(tmp_path):
    return write_checkpoint(tmp_path / "single", tiny_tensors())


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path / "sharded", tiny_tensors(), num_shards=2)


@pytest.fixture(params=[1, 2], ids=["single", "sharded"])
def folder(request, tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_tensors(), num_shards=request.param)


# Reading


def test_every_tensor_is_read_as_the_library_reads_it(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == CONFIG
    expected = tiny_tensors()
    assert checkpoint.tensors.keys() == expected.keys()
    for shard in checkpoint.shards:
        stored = load_file(folder / shard)
        infos = checkpoint.shard_tensors(shard)
        assert [info.name for info in infos] == sorted(stored, key=lambda name: checkpoint.tensors[name].offset)
        for info in infos:
            assert info.shard == shard
            assert (info.dtype, info.shape) == ("BF16", tuple(stored[info.name].shape))
            assert info.size_bytes == 2 * info.num_elements
            assert torch.equal(checkpoint.read(info.name), stored[info.name])
            assert torch.equal(stored[info.name], expected[info.name])


@pytest.mark.parametrize(("start", "stop"), [(0, 128), (0, 1), (127, 128), (5, 9), (7, 7), (128, 128)])
def test_rows(single, start, stop):
    rows = Checkpoint.open(single).read_rows(UP, start, stop)
    assert rows.shape == (stop - start, 64)
    assert torch.equal(rows, tiny_tensors()[UP][start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 129), (5, 4)])
def test_rows_out_of_range_are_refused(single, start, stop):
    with pytest.raises(ValueError, match=rf"{UP}: rows {start} to {stop} asked of a tensor of shape \[128, 64\]"):
        Checkpoint.open(single).read_rows(UP, start, stop)


def test_a_name_or_shard_that_is_not_there_is_refused(single):
    checkpoint = Checkpoint.open(single)
    for read in (checkpoint.read, lambda name: checkpoint.read_rows(name, 0, 1)):
        with pytest.raises(ValueError, match=r"there is no tensor model.absent"):
            read("model.absent")
    with pytest.raises(ValueError, match=r"other.safetensors is not one of its shards \(model.safetensors\)"):
        checkpoint.shard_tensors("other.safetensors")


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_dtypes_and_odd_shapes(tmp_path, dtype):
    shapes = {"scalar": (), "empty": (0, 3), "hollow": (3, 0), "vector": (7,), "odd": (3, 5), "experts": (4, 3, 5)}
    tensors = {name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for name, shape in shapes.items()}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", tensors))
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == dtype
        assert torch.equal(read, tensor)
        if tensor.dim():
            for start in (0, len(tensor) // 2, len(tensor)):
                assert torch.equal(checkpoint.read_rows(name, start, len(tensor)), tensor[start:])
    with pytest.raises(ValueError, match="scalar: rows 0 to 0"):
        checkpoint.read_rows("scalar", 0, 0)


def test_rows_need_only_their_own_bytes_and_a_shrunken_file_is_told(single):
    checkpoint = Checkpoint.open(single)
    last = checkpoint.shard_tensors(SINGLE_SHARD)[-1]
    assert last.shape[0] > 3
    row_bytes = last.size_bytes // last.shape[0]
    os.truncate(single / SINGLE_SHARD, last.offset + 3 * row_bytes)
    assert torch.equal(checkpoint.read_rows(last.name, 1, 3), tiny_tensors()[last.name][1:3])
    with pytest.raises(ValueError, match=rf"{3 * row_bytes} of {last.size_bytes} bytes of {last.name}"):
        checkpoint.read(last.name)


def test_reads_own_their_memory(single):
    checkpoint = Checkpoint.open(single)
    rows = checkpoint.read_rows(UP, 0, 2)
    assert rows.untyped_storage().nbytes() == 2 * 64 * 2
    rows.zero_()
    assert torch.equal(checkpoint.read_rows(UP, 0, 2), tiny_tensors()[UP][:2])


def test_side_files_are_everything_that_is_not_weights(sharded):
    wanted = ["LICENSE", "README.md", "chat_template.jinja", "config.json", "custom_model.py", "generation_config.json"]
    wanted += ["merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "vocab.json"]
    others = ["pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.pt", "consolidated.safetensors", "x.gguf"]
    for name in [*wanted[4:], *wanted[:3], *others, ".gitattributes"]:
        if name != "config.json":
            (sharded / name).write_text("x")
    (sharded / "onnx").mkdir()
    (sharded / "onnx" / "config.json").write_text("{}")
    assert Checkpoint.open(sharded).side_files() == wanted


# Structure: refused before any weight is read


def test_missing_folder_config_or_weights(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config.json: no such file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor .*, but no safetensors file at all"):
        Checkpoint.open(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / SHARDS[0])
    with pytest.raises(ValueError, match=f"has neither model.safetensors nor .*index.json, but {SHARDS[0]}"):
        Checkpoint.open(tmp_path)
    save_file({}, tmp_path / SINGLE_SHARD)
    (tmp_path / SHARDS[0]).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors holds no tensors"):
        Checkpoint.open(tmp_path)


class Harmless:
    """Unpickling an instance leaves a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("names", [("pytorch_model.bin",), ("pytorch_model-1-of-2.bin", "pytorch_model-2-of-2.bin")])
def test_pickled_weights_are_refused_unopened(tmp_path, names):  # CNV-44
    trace = tmp_path / "unpickled"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Harmless(trace)))
    with pytest.raises(ValueError, match=r"holds only pytorch_model\*\.bin; convert to safetensors first"):
        Checkpoint.open(folder)
    assert not trace.exists()
    save_file(tiny_tensors(), folder / SINGLE_SHARD)
    assert Checkpoint.open(folder).shards == (SINGLE_SHARD,)  # safetensors beside pickles are used


def test_a_shard_the_index_names_is_not_on_disk(sharded):  # CNV-37
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(ValueError, match=f"names shards that are not on disk: {SHARDS[1]}$"):
        Checkpoint.open(sharded)


def test_a_tensor_in_the_wrong_shard(sharded):  # CNV-38
    edit_index(sharded, **{NORM: SHARDS[0]})
    with pytest.raises(ValueError, match=f"wrong shard: maps {NORM} to {SHARDS[0]}, but it is stored in {SHARDS[1]}"):
        Checkpoint.open(sharded)


def test_a_tensor_that_no_shard_holds(sharded):  # CNV-38
    edit_index(sharded, **{"mtp.fc.weight": SHARDS[1]})
    with pytest.raises(ValueError, match=f"maps mtp.fc.weight to {SHARDS[1]}, whose header lacks it"):
        Checkpoint.open(sharded)


def test_a_tensor_absent_from_the_index(sharded):  # CNV-38
    edit_index(sharded, **{NORM: None})
    with pytest.raises(ValueError, match=f"unlisted tensors, stored but absent from the index: {NORM} in {SHARDS[1]}$"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("extra", [SINGLE_SHARD, "model-00003-of-00003.safetensors"])
def test_weights_the_index_does_not_name(sharded, extra):
    save_file({"x": torch.zeros(1)}, sharded / extra)
    with pytest.raises(ValueError, match=rf"{extra}: lies beside .* but no index names it"):
        Checkpoint.open(sharded)


def test_a_tensor_stored_in_two_shards(sharded):
    second = load_file(sharded / SHARDS[1])
    save_file(second | {"lm_head.weight": torch.zeros(1)}, sharded / SHARDS[1])
    with pytest.raises(ValueError, match=f"lm_head.weight is stored twice, in {SHARDS[0]} and in {SHARDS[1]}"):
        Checkpoint.open(sharded)


OUTSIDE = ("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "sub\\x.safetensors", "..")
NOT_PLAIN = ("", "x.bin", ".safetensors", ".hidden.safetensors", "x.safetensors/", "a\0.safetensors", 3)


@pytest.mark.parametrize("shard", [*OUTSIDE, *NOT_PLAIN])
def test_an_index_must_name_plain_files(sharded, shard):
    save_file({"x": torch.zeros(1)}, sharded.parent / "x.safetensors")
    edit_index(sharded, **{NORM: shard})
    with pytest.raises(ValueError, match=f"maps {NORM} to .*, which is not the plain name of a .safetensors file"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": null}'])
def test_an_index_without_a_weight_map(sharded, text):
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: has no weight_map"):
        Checkpoint.open(sharded)


def test_an_index_that_maps_a_tensor_twice(sharded):
    (sharded / INDEX_NAME).write_text('{"weight_map": {"a": "model-1-of-1.safetensors", "a": "x.safetensors"}}')
    with pytest.raises(ValueError, match="the key a is there twice"):
        Checkpoint.open(sharded)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LFS_POINTER, rf"this is a Git LFS pointer of {len(LFS_POINTER)} bytes"),
        (b"<!DOCTYPE html>\n<html><body>Not found</body></html>", "this is a web page, not a safetensors file"),
        (b"\n <html lang=en>", "this is a web page, not a safetensors file"),
        (b"", r"empty \(0 bytes\), not a safetensors file"),
        (b"\x01" * 7, "not a safetensors file: 7 bytes"),
        (
            b"PK\x03\x04" + b"\xff" * 100,
            f"not a safetensors file: its header would have .*limit is {HEADER_LIMIT_BYTES}",
        ),
        (struct.pack("<Q", HEADER_LIMIT_BYTES + 1) + b"{}", ".* would have 100000001 bytes, the limit is 100000000"),
        (struct.pack("<Q", 2) + b"[]", ".*header does not start with '{'"),
        (struct.pack("<Q", 0), ".*header does not start with '{'"),
    ],
)
def test_files_that_are_not_safetensors(single, content, message):  # CNV-40
    (single / SINGLE_SHARD).write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors: {message}"):
        Checkpoint.open(single)


def test_the_library_s_header_limit_is_ours(tmp_path):
    # A sparse file: the header claims one byte more than the limit, then exactly the limit.
    for length, message in ((HEADER_LIMIT_BYTES + 1, "too large"), (HEADER_LIMIT_BYTES, "too small|invalid")):
        with open(tmp_path / "x.safetensors", "wb") as file:
            file.write(struct.pack("<Q", length))
            file.truncate(8 + length - 1)
        with pytest.raises(Exception, match=message), safe_open(tmp_path / "x.safetensors", "pt"):
            pass


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_weights_are_told_with_both_sizes(folder, cut):  # CNV-41
    path = sorted(folder.glob("*.safetensors"))[-1]
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with pytest.raises(
        ValueError, match=f"{path}: truncated: header and tensors take {size} bytes, the file has {size - cut}$"
    ):
        Checkpoint.open(folder)


def test_truncated_inside_the_header(single):  # CNV-41
    end = 8 + struct.unpack("<Q", (single / SINGLE_SHARD).read_bytes()[:8])[0]
    os.truncate(single / SINGLE_SHARD, 100)
    with pytest.raises(ValueError, match=f"truncated: its header ends at byte {end}, the file has 100$"):
        Checkpoint.open(single)


def test_an_extra_byte_at_the_end(single):  # CNV-41
    size = (single / SINGLE_SHARD).stat().st_size
    with open(single / SINGLE_SHARD, "ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=f"too long: header and tensors take {size} bytes, the file has {size + 1}$"):
        Checkpoint.open(single)


def entry(start, stop, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "b overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "b overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(5, 8)}, 8, "b leaves a gap before it"),
        ({"a": entry(1, 4)}, 4, "a leaves a gap before it"),
        ({"a": entry(0, 4, shape=[5])}, 4, r"a, U8 \[5\], takes 5 bytes; its offsets are \[0, 4\]"),
        ({"a": entry(0, 4, dtype="F32", shape=[2])}, 4, r"a, F32 \[2\], takes 8 bytes"),
        ({"a": entry(4, 0, shape=[4])}, 4, "a, U8 .* takes 4 bytes"),
        ({"a": entry(0, 4, shape=[-2, -2])}, 4, "a has shape"),
        ({"a": entry(0, 4, shape=[True, 4])}, 4, "a has shape"),
        ({"a": entry(0, 4, shape=[4.0])}, 4, "a has shape"),
        ({"a": entry(0, 4, shape="4")}, 4, "a has shape"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}}, 4, "a has shape"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "a is not described by"),
        ({"a": entry(0, 4) | {"more": 1}}, 4, "a is not described by"),
        ({"a": [0, 4]}, 4, "a is not described by"),
        ({"a": entry(0, 4, dtype="Q4")}, 4, "a has dtype 'Q4'; supported are"),
        ({"a": entry(0, 4, dtype=None)}, 4, "a has dtype None"),
        ({"a": entry(0, 2**70)}, 4, "truncated: header and tensors take"),
        ({"a": entry(0, 4), "__metadata__": {"x": 1}}, 4, "__metadata__ is not a table of strings"),
        ({"a": entry(0, 4), "__metadata__": []}, 4, "__metadata__ is not a table of strings"),
        (b'{"a": 1, "a": 2}', 0, "the key a is there twice"),
        (b'{"a": ', 0, "header is not valid JSON"),
        (b'{"\xff": 1}', 0, "header is not valid JSON"),
    ],
)
def test_contradictory_headers(single, header, size, message):
    write_raw(single / SINGLE_SHARD, header, bytes(size))
    with pytest.raises(ValueError, match=f"model.safetensors: .*{message}"):
        Checkpoint.open(single)


VALID = (
    struct.pack("<Q", 184)
    + json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]},
        }
    )
    .encode()
    .ljust(184)
    + bytes(16)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALID) - 17), st.sampled_from(b'0159-"{}[],:.eUBF86 \x00\xff')), max_size=4
    ),
    cut=st.one_of(st.just(0), st.integers(0, len(VALID))),
)
def test_damaged_headers_raise_value_errors_only(tmp_path, edits, cut):
    damaged = bytearray(VALID)
    for position, value in edits:
        damaged[position] = value
    path = tmp_path / "x.safetensors"
    path.write_bytes(damaged[: len(damaged) - cut])
    try:
        infos = read_header(path)
    except ValueError:
        return
    with safe_open(path, "pt") as file:  # what is accepted here must be fit for the library too
        assert set(file.keys()) == {info.name for info in infos}


def test_the_undamaged_header_of_that_fuzz_is_accepted(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(VALID)
    assert [(info.name, info.offset, info.size_bytes) for info in read_header(tmp_path / "x.safetensors")] == [
        ("a", 192, 12),
        ("b", 204, 4),
    ]


# Quantised sources


@pytest.mark.parametrize(("rows", "blocks"), [(128, 1), (200, 2)])
def test_fp8_weights_with_block_scales_are_refused(tmp_path, rows, blocks):  # CNV-25
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.ones(rows, rows).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.weight_scale_inv": torch.full((blocks, blocks), 0.5),
    }
    folder = write_checkpoint(tmp_path / "model", tensors)
    with pytest.raises(ValueError, match=r"up_proj.* an already quantised \(fp8\) source is not supported"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "method"),
    [
        ("x.weight", torch.float8_e5m2, "fp8"),
        ("x.weight_scale_inv", torch.bfloat16, "fp8"),
        ("x.input_scale", torch.float32, "packed"),
        ("x.qweight", torch.int32, "packed"),
        ("x.weight_packed", torch.int32, "packed"),
    ],
)
def test_each_sign_of_quantisation_is_enough(tmp_path, name, dtype, method):
    folder = write_checkpoint(tmp_path / "model", {name: torch.ones(2, 2).to(dtype)})
    with pytest.raises(ValueError, match=rf"{name} .* already quantised \({method}\) source is not supported"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("extra", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "unnamed method"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_a_config_that_tells_of_quantisation(tmp_path, extra, method):
    folder = write_checkpoint(tmp_path / "model", tiny_tensors(), config=CONFIG | extra)
    with pytest.raises(ValueError, match=rf"config.json: an already quantised \({method}\) source is not supported"):
        Checkpoint.open(folder)


def test_an_empty_quantization_config_is_none(tmp_path):
    folder = write_checkpoint(tmp_path / "model", tiny_tensors(), config=CONFIG | {"quantization_config": None})
    assert Checkpoint.open(folder).shards == (SINGLE_SHARD,)


# Manifest


def test_manifest_holds_hashes_table_and_counts(folder):
    (folder / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint.open(folder)
    manifest = build_manifest(checkpoint, "llama", progress=False)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    hashes.pop(INDEX_NAME, None)
    assert {name: file["sha256"] for name, file in manifest["files"].items()} == hashes
    assert {name: file["size_bytes"] for name, file in manifest["files"].items()} == {
        name: (folder / name).stat().st_size for name in hashes
    }
    text = json.dumps([[name, hashes[name]] for name in sorted(hashes)], separators=(",", ":"))
    assert manifest["digest"] == hashlib.sha256(text.encode()).hexdigest()
    assert manifest["num_parameters"] == sum(tensor.numel() for tensor in tiny_tensors().values())
    assert (manifest["architecture"], manifest["family"]) == ("LlamaForCausalLM", "llama")
    assert manifest["shards"] == list(checkpoint.shards)
    assert manifest["tensors"][UP] == {"dtype": "BF16", "shape": [128, 64], "shard": checkpoint.tensors[UP].shard}
    assert manifest["tensors"].keys() == tiny_tensors().keys()


def test_manifest_depends_on_content_alone(sharded, tmp_path):
    write_json(tmp_path / "a.json", build_manifest(Checkpoint.open(sharded), "llama", progress=False))
    shutil.copytree(sharded, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        os.utime(path, (1, 1))
    write_json(tmp_path / "b.json", build_manifest(Checkpoint.open(tmp_path / "elsewhere"), "llama", progress=False))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert str(tmp_path) not in (tmp_path / "a.json").read_text()


def poison(tensors, name, index, value):
    tensors[name][index] = value
    return tensors


@pytest.mark.parametrize(
    ("name", "index", "value", "counts"),
    [
        (UP, (3, 5), float("nan"), "1 NaN, 0 Inf"),
        (UP, (3, 5), float("inf"), "0 NaN, 1 Inf"),
        (UP, (slice(None), 0), float("-inf"), "0 NaN, 128 Inf"),
        (NORM, 63, float("nan"), "1 NaN, 0 Inf"),
    ],
)
def test_a_manifest_is_refused_for_weights_that_are_not_finite(tmp_path, name, index, value, counts):  # CNV-10
    folder = write_checkpoint(tmp_path / "model", poison(tiny_tensors(), name, index, value))
    with pytest.raises(ValueError, match=f"{folder}: weights are not finite: {name}: {counts}$"):
        build_manifest(Checkpoint.open(folder), "llama", progress=False)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("block_bytes", [8, 64, 1 << 24])
def test_every_tensor_that_is_not_finite_is_named(tmp_path, monkeypatch, num_shards, block_bytes):  # CNV-10, CNV-11
    monkeypatch.setattr(otf_llm.checkpoint, "SCAN_BLOCK_BYTES", block_bytes)
    tensors = tiny_tensors() | {"model.layers.0.mlp.experts.5.up_proj.weight": torch.zeros(4, 4)}
    poison(tensors, UP, (0, 0), float("nan"))
    poison(tensors, UP, (127, slice(62, 64)), float("-inf"))
    poison(tensors, "model.layers.0.mlp.experts.5.up_proj.weight", (3, 3), float("nan"))
    poison(tensors, "lm_head.weight", (slice(None), 1), float("nan"))
    folder = write_checkpoint(tmp_path / "model", tensors, num_shards=num_shards)
    with pytest.raises(ValueError, match="weights are not finite") as caught:
        build_manifest(Checkpoint.open(folder), "llama", progress=False)
    found = str(caught.value).partition("not finite: ")[2].split("; ")
    assert sorted(found) == [
        "lm_head.weight: 260 NaN, 0 Inf",
        "model.layers.0.mlp.experts.5.up_proj.weight: 1 NaN, 0 Inf",
        f"{UP}: 1 NaN, 2 Inf",
    ]


@settings(max_examples=100, deadline=None)
@given(
    data=st.lists(st.sampled_from(b"\x00\x01\x7c\x7f\x80\xf0\xfc\xff"), min_size=8, max_size=64),
    dtype=st.sampled_from(
        [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32), ("F64", torch.float64)]
    ),
)
def test_nonfinite_counts_are_those_of_torch(data, dtype):
    name, torch_dtype = dtype
    raw = np.array(data[: len(data) // 8 * 8], dtype=np.uint8)  # bytes that make exponents of all ones likely
    tensor = torch.from_numpy(raw).view(torch_dtype)
    assert count_nonfinite(raw, name) == (int(tensor.isnan().sum()), int(tensor.isinf().sum()))


def test_integers_are_never_nan():
    assert count_nonfinite(np.full(16, 0xFF, dtype=np.uint8), "I64") == (0, 0)


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "LlamaForCausalLM", [3]])
def test_a_config_without_one_architecture_has_no_manifest(tmp_path, architectures):
    config = CONFIG | {"architectures": architectures}
    folder = write_checkpoint(tmp_path / "model", {"x": torch.zeros(1)}, config=config)
    with pytest.raises(ValueError, match=r"config\.json: architectures must name one class"):
        build_manifest(Checkpoint.open(folder), "llama", progress=False)


@pytest.fixture
def manifest(sharded):
    (sharded / "tokenizer.json").write_text("{}")
    return json.loads(json.dumps(build_manifest(Checkpoint.open(sharded), "llama", progress=False)))


def test_an_unchanged_source_agrees_with_its_manifest(sharded, manifest):
    for path in sharded.iterdir():
        path.touch()
    assert verify_against_manifest(Checkpoint.open(sharded), manifest) is None


def grow_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{ }")


def drop_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def add_template(folder):
    (folder / "chat_template.jinja").write_text("")


def transpose_up(folder):
    tensors = load_file(folder / SHARDS[1])
    save_file(tensors | {UP: tensors[UP].T.contiguous()}, folder / SHARDS[1])


def rename_norm(folder):
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes().replace(NORM.encode(), b"model.form.weight"))
    edit_index(folder, **{NORM: None, "model.form.weight": SHARDS[1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grow_tokenizer, "tokenizer.json: has 3 bytes, the manifest says 2"),
        (drop_tokenizer, "tokenizer.json: gone"),
        (add_template, "chat_template.jinja: not in the manifest"),
        (transpose_up, rf"{SHARDS[1]}: {UP} is .*\[64, 128\].* the manifest says .*\[128, 64\]"),
        (rename_norm, rf"{SHARDS[1]}: model.form.weight is .* the manifest says None"),
    ],
)
def test_a_changed_source_is_told_by_its_file(sharded, manifest, change, message):
    change(sharded)
    with pytest.raises(ValueError, match=rf"{message}.*; the source changed since its manifest was made"):
        verify_against_manifest(Checkpoint.open(sharded), manifest)
