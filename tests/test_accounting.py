import copy

import pytest
import torch

from otf_llm.accounting import bits_per_weight, byte_categories, stored_tensors, weight_file_sizes
from otf_llm.artifact import merge
from otf_llm.calibration import calibrate
from otf_llm.checkpoint import Checkpoint, build_manifest
from otf_llm.conversion import Recipe, convert_shard
from otf_llm.decoder import Geometry
from otf_llm.families import find_family
from otf_llm.layerwise import LayerwiseModel
from otf_llm.permutation import channel_statistics, plan_permutation
from otf_llm.settings import SchemeSettings
from otf_llm.streaming import SafetensorsWriter, TensorSpec
from otf_llm.weight_statistics import weight_statistics
from tiny import build_model, save_checkpoint

LAYER = "model.layers.0"
SHARD, TABLE = "model-00001-of-00001.safetensors", "permutation.safetensors"
HEADER, TABLE_HEADER = 1200, 96


def converted_manifest() -> dict:
    """One layer of K = 64 with one FP16 column of 64: 63 codes, so 32 bytes a row with their padding nibble."""
    rows = [
        {
            "tensor": "model.embed_tokens.weight", "action": "int8", "module": "model.embed_tokens", "shape": [10, 64],
            "relative_error": 1e-5,
            "outputs": {"model.embed_tokens.codes": 640, "model.embed_tokens.scales": 20},
        },
        {
            "tensor": f"{LAYER}.self_attn.q_proj.weight", "action": "int4", "module": f"{LAYER}.self_attn.q_proj",
            "shape": [4, 64], "relative_error": 0.002,
            "outputs": {
                f"{LAYER}.self_attn.q_proj.codes": 4 * 32,
                f"{LAYER}.self_attn.q_proj.scales": 4 * 2,
                f"{LAYER}.self_attn.q_proj.outliers": 4 * 2,
            },
        },
        {
            "tensor": f"{LAYER}.self_attn.k_proj.weight", "action": "copied", "shape": [2, 64],
            "outputs": {f"{LAYER}.self_attn.k_proj.weight": 2 * 64 * 2},
        },
        {
            "tensor": f"{LAYER}.self_attn.q_proj.bias", "action": "copied", "shape": [4],
            "outputs": {f"{LAYER}.self_attn.q_proj.bias": 8},
        },
        {
            "tensor": f"{LAYER}.input_layernorm.weight", "action": "reordered", "shape": [64],
            "outputs": {f"{LAYER}.input_layernorm.weight": 128},
        },
        {
            "tensor": "adapter.weight", "action": "copied", "shape": [64], "reason": "not in the family's table",
            "outputs": {"adapter.weight": 128},
        },
        {
            "tensor": "lm_head.weight", "action": "int4", "module": "lm_head", "shape": [10, 64],
            "relative_error": 0.003,
            "outputs": {"lm_head.codes": 10 * 32, "lm_head.scales": 10 * 2, "lm_head.outliers": 10 * 2},
        },
    ]  # fmt: skip
    tensor_bytes = 660 + 144 + 256 + 8 + 128 + 128 + 360
    table = {"action": "permutation", "shard": TABLE, "outputs": {"global_perm_idx": 128}}
    return {
        "source": {"digest": "d" * 64, "family": "llama"},
        "scheme": SchemeSettings().to_dict(),
        "lm_head": "int4",
        "weight_files": [SHARD, TABLE],
        "files": [
            {"name": "config.json", "size_bytes": 999},
            {"name": SHARD, "size_bytes": tensor_bytes + HEADER},
            {"name": TABLE, "size_bytes": 128 + TABLE_HEADER},
        ],
        "tensors": [row | {"shard": SHARD} for row in rows] + [table],
    }


def source_manifest() -> dict:
    tensors = {
        "lm_head.weight": {"dtype": "BF16", "shape": [10, 64], "shard": "b.safetensors"},
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [10, 64], "shard": "a.safetensors"},
        f"{LAYER}.mlp.up_proj.weight": {"dtype": "F32", "shape": [6, 64], "shard": "b.safetensors"},
        f"{LAYER}.self_attn.q_proj.weight": {"dtype": "BF16", "shape": [4, 64], "shard": "a.safetensors"},
        "model.norm.weight": {"dtype": "BF16", "shape": [64], "shard": "b.safetensors"},
    }
    return {
        "digest": "d" * 64,
        "family": "llama",
        "shards": ["a.safetensors", "b.safetensors"],
        "files": {
            "a.safetensors": {"size_bytes": 1280 + 512 + 208},
            "b.safetensors": {"size_bytes": 1280 + 1536 + 128 + 50_000},
            "config.json": {"size_bytes": 77},
        },
        "tensors": tensors,
    }


def test_every_byte_of_a_converted_model_has_a_category():
    manifest = converted_manifest()
    categories = byte_categories(manifest)
    assert categories == {
        "codes": 128 + 320,
        "scales": 8 + 20,
        "fp16_columns": 8 + 20,
        "dense": 256,
        "embedding": 660,
        "other": 8 + 128 + 128 + 128 + HEADER + TABLE_HEADER,
    }
    assert sum(categories.values()) == sum(weight_file_sizes(manifest).values()) == 1684 + HEADER + 128 + TABLE_HEADER


def test_every_byte_of_a_source_has_a_category_however_long_its_metadata():
    assert byte_categories(source_manifest()) == {
        "codes": 0,
        "scales": 0,
        "fp16_columns": 0,
        "dense": 1280 + 512 + 1536,
        "embedding": 1280,
        "other": 128 + 208 + 50_000,
    }


def test_bits_count_decoder_linears_with_padding_scales_and_fp16_columns():
    manifest = converted_manifest()
    linears = {tensor.module: tensor.bits for tensor in stored_tensors(manifest) if tensor.role.linear}
    assert linears[f"{LAYER}.self_attn.q_proj"] == 8 * 144 / 256 == 4.5
    assert linears[f"{LAYER}.self_attn.k_proj"] == 16
    assert bits_per_weight(manifest) == 8 * (144 + 256) / (256 + 128)
    assert bits_per_weight(source_manifest()) == 8 * (512 + 1536) / (256 + 384)


def test_a_tied_head_written_from_the_embedding_is_a_head():
    manifest = converted_manifest()
    kept = {"tensor": "model.embed_tokens.weight", "action": "copied", "shape": [10, 64], "shard": SHARD}
    manifest["tensors"][6] = kept | {"outputs": {"lm_head.weight": 1280}}
    manifest["files"][1]["size_bytes"] += 1280 - 360
    categories = byte_categories(manifest)
    assert (categories["dense"], categories["embedding"], categories["codes"]) == (256 + 1280, 660, 128)
    packed = copy.deepcopy(converted_manifest())
    packed["tensors"][6]["tensor"] = "model.embed_tokens.weight"
    assert byte_categories(packed) == byte_categories(converted_manifest())
    assert bits_per_weight(packed) == bits_per_weight(converted_manifest())


def test_a_dropped_head_takes_no_bytes():
    manifest = converted_manifest()
    dropped = {"tensor": "lm_head.weight", "action": "dropped", "outputs": {}, "shard": "not-a-weight-file"}
    manifest["tensors"].append(dropped)
    assert byte_categories(manifest) == byte_categories(converted_manifest())


@pytest.mark.parametrize(
    ("size", "numbers"),
    [(1684, "1684 bytes, the file has 1684"), (1600, "1684 bytes, the file has 1600"), (9000, "1684 bytes, .* 9000")],
)
def test_files_that_tensors_and_a_header_do_not_fill_are_refused(size, numbers):
    manifest = converted_manifest()
    manifest["files"][1]["size_bytes"] = size
    with pytest.raises(ValueError, match=f"{SHARD}: its tensors take {numbers}"):
        byte_categories(manifest)


def test_faults_in_a_manifest_are_named():
    manifest = converted_manifest()
    manifest["source"]["family"] = "mamba"
    with pytest.raises(ValueError, match="'mamba'; known are llama"):
        byte_categories(manifest)
    manifest = converted_manifest()
    manifest["weight_files"].append("model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"weight file model-00002-of-00002\.safetensors, but not its size"):
        byte_categories(manifest)
    manifest = converted_manifest()
    manifest["weight_files"].remove(TABLE)
    with pytest.raises(ValueError, match=f"global_perm_idx is stored in {TABLE}"):
        byte_categories(manifest)
    manifest = converted_manifest()
    manifest["tensors"][1]["outputs"] = {f"{LAYER}.self_attn.q_proj.zeros": 144}
    with pytest.raises(ValueError, match=r"q_proj\.zeros is no part of an INT4 linear"):
        byte_categories(manifest)
    manifest = converted_manifest()
    manifest["tensors"] = manifest["tensors"][:1]
    with pytest.raises(ValueError, match="llama model lists no decoder linear"):
        bits_per_weight(manifest)


def _write_file(path, manifest):
    specs = [
        TensorSpec(name, torch.uint8, (size,))
        for row in manifest["tensors"]
        if row["shard"] == path.name
        for name, size in row["outputs"].items()
    ]
    with SafetensorsWriter(path, specs) as writer:
        for spec in specs:
            writer.write(spec.name, torch.zeros(spec.shape, dtype=spec.dtype))
    return path.stat().st_size


def test_the_files_themselves_are_compared_with_the_manifest(tmp_path):
    manifest = converted_manifest()
    for entry in manifest["files"][1:]:
        entry["size_bytes"] = _write_file(tmp_path / entry["name"], manifest)
    assert sum(byte_categories(manifest, tmp_path).values()) == sum(weight_file_sizes(manifest).values())

    # 128 bytes of a norm that the manifest does not list pass for a header until the header itself is read.
    incomplete = copy.deepcopy(manifest)
    del incomplete["tensors"][4]
    assert byte_categories(incomplete)["other"] == byte_categories(manifest)["other"]
    with pytest.raises(ValueError, match=r"header and tensors take \d+ \+ 1556 bytes"):
        byte_categories(incomplete, tmp_path)

    with open(tmp_path / TABLE, "ab") as file:
        file.write(b"\0")
    size = manifest["files"][2]["size_bytes"]
    with pytest.raises(ValueError, match=f"{TABLE} has {size + 1} bytes, its manifest says {size}"):
        byte_categories(manifest, tmp_path)


@pytest.mark.parametrize("weights", ["keep", "int4"])
def test_a_really_converted_folder_adds_up(tmp_path, weights):
    model = build_model(tie_word_embeddings=True, num_hidden_layers=1)
    checkpoint = Checkpoint.open(save_checkpoint(tmp_path / "source", model, tokenizer=False))
    family = find_family(checkpoint.config)
    geometry = Geometry.of(checkpoint.config, family)
    source = build_manifest(checkpoint, family.name, progress=False)
    scheme = SchemeSettings(weights=weights, lm_head="tied" if weights == "keep" else "int4")
    permutation = statistics = None
    if scheme.needs_calibration:
        statistics = calibrate(LayerwiseModel(checkpoint, family), geometry, [torch.arange(32)], 1)
        channels = channel_statistics(statistics, weight_statistics(checkpoint, family, geometry))
        permutation = plan_permutation(family, geometry, channels, scheme.permutation)
    recipe = Recipe(family, geometry, scheme, permutation, statistics)
    folder = tmp_path / "converted"
    report = convert_shard(checkpoint, ["model.safetensors"], recipe, folder / SHARD)
    manifest = merge(checkpoint, recipe, folder, [SHARD], [report], source)

    weight_files = sum((folder / name).stat().st_size for name in manifest["weight_files"])
    categories = byte_categories(manifest, folder)
    assert sum(categories.values()) == weight_files
    assert categories["embedding"] == 260 * 64 + 260 * 2
    # Rows of the six linears with 64 inputs, and of down_proj with 128: 1 and 2 FP16 columns, 1 and 2 groups of 64.
    rows, down_rows = 64 + 32 + 32 + 64 + 128 + 128, 64
    linear_bytes = 2 * (rows * 64 + down_rows * 128)
    assert byte_categories(source, checkpoint.folder)["dense"] == linear_bytes
    assert bits_per_weight(source) == 16
    if weights == "keep":
        assert categories["dense"] == linear_bytes
        assert bits_per_weight(manifest) == 16
    else:
        rows += 260  # the head's
        assert categories["codes"] == rows * 32 + down_rows * 63
        assert categories["scales"] == categories["fp16_columns"] == rows * 2 + down_rows * 4
        assert bits_per_weight(manifest) == 8 * ((rows - 260) * 36 + down_rows * 71) / (linear_bytes / 2)
