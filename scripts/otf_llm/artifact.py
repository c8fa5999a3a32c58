"""Completes a converted folder: permutation table, index, config.json, side files and a manifest with checksums."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from otf_llm.artifact_format import (
    FORMAT_VERSION,
    INDEX_FILE,
    MANIFEST_FILE,
    PERMUTATION_FILE,
    PERMUTATION_TABLE,
    QUANT_METHOD,
)
from otf_llm.checkpoint import Checkpoint
from otf_llm.conversion import KEPT_REASONS, Recipe
from otf_llm.decoder import tensor_role
from otf_llm.families import Kind
from otf_llm.files import sha256, write_json
from otf_llm.settings import COMPRESSED_TENSORS
from otf_llm.streaming import save_tensors

logger = logging.getLogger(__name__)

CARRIED = KEPT_REASONS[Kind.UNKNOWN]
EXPECTED_SIDE_FILES = ("generation_config.json", "tokenizer_config.json")


def merge(
    checkpoint: Checkpoint, recipe: Recipe, folder: Path, shards: list[str], reports: list[dict], source: dict
) -> dict:
    """Write everything but the weight shards into ``folder`` and return the manifest, which is written last.

    Args:
        shards: output shard file names in order; reports: what ``convert_shard`` returned for each.
        source: the source manifest; its digest and family go into this one.

    Files of an earlier conversion that are not part of this one are removed.

    Raises ValueError naming a shard whose bytes are not those that were converted, or that another recipe made.
    """
    digests = {}
    for shard, report in zip(shards, reports, strict=True):
        if report["recipe"] != recipe.digest:
            raise ValueError(f"{folder / shard} was converted with other settings; remove it to have it made again")
        digests[shard] = sha256(folder / shard)
        if digests[shard] != report["sha256"]:
            raise ValueError(f"{folder / shard} has changed since it was converted; remove it to have it made again")
    rows = [row | {"shard": shard} for shard, report in zip(shards, reports, strict=True) for row in report["tensors"]]
    weight_map = {name: row["shard"] for row in rows for name in row["outputs"]}
    table, offsets = _write_table(recipe, folder, {row["input"] for row in rows if row["action"] == "int4"})
    if len(table):
        weight_map[PERMUTATION_TABLE] = PERMUTATION_FILE
        rows.append({"action": "permutation", "shard": PERMUTATION_FILE, "outputs": {PERMUTATION_TABLE: table.nbytes}})
    _copy_side_files(checkpoint, folder)
    config = checkpoint.config | _config_changes(checkpoint, recipe, rows, table, offsets)
    write_json(folder / "config.json", config)
    weight_files = sorted(set(weight_map.values()))
    tensor_bytes = sum(size for row in rows for size in row["outputs"].values())
    index = {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_FILE, index)
    names = [*weight_files, INDEX_FILE, "config.json", *_side_files(checkpoint)]
    _remove_others(folder, {*names, *shards, MANIFEST_FILE})
    manifest = {
        "format_version": FORMAT_VERSION,
        "source": {"digest": source["digest"], "family": source["family"], "architecture": source["architecture"]},
        "scheme": recipe.scheme.to_dict(),
        "lm_head": recipe.head,
        "files": [
            {
                "name": name,
                "size_bytes": (folder / name).stat().st_size,
                "sha256": digests.get(name) or sha256(folder / name),
            }
            for name in sorted(set(names))
        ],
        "weight_files": weight_files,
        "missing_side_files": [name for name in EXPECTED_SIDE_FILES if not (folder / name).exists()],
        "unseen_inputs": list(recipe.permutation.unseen) if recipe.permutation else [],
        "tensors": rows,
    }
    write_json(folder / MANIFEST_FILE, manifest)
    return manifest


def _write_table(recipe: Recipe, folder: Path, inputs: set[str]) -> tuple[torch.Tensor, dict[str, int]]:
    if recipe.permutation is None or recipe.scheme.export == COMPRESSED_TENSORS:
        return torch.zeros(0, dtype=torch.int16), {}
    table, offsets = recipe.permutation.runtime_table(inputs)
    if len(table):
        save_tensors(folder / PERMUTATION_FILE, {PERMUTATION_TABLE: table})
    return table, offsets


def _config_changes(checkpoint: Checkpoint, recipe: Recipe, rows: list[dict], table, offsets) -> dict:
    """The entries of config.json that differ from the source's."""
    # The packed head reads the packed embedding by itself; transformers must only tie what is still a plain weight.
    plain_tie = recipe.head == "tied" and recipe.scheme.embedding == "keep"
    if recipe.scheme.export == COMPRESSED_TENSORS:
        return {"quantization_config": _compressed_tensors(recipe, rows), "tie_word_embeddings": plain_tie}
    linears, bf16 = {}, []
    for row in rows:
        if row["action"] == "int4":
            order = recipe.permutation.inputs[row["input"]]
            offset = None if order.runtime is None else offsets[order.runtime]
            linears[row["module"]] = [order.in_features, order.num_outliers, offset]
            if row["outlier_dtype"] == "bfloat16":
                bf16.append(row["module"])
    quantized = bool(linears) or recipe.scheme.embedding == "int8"
    if not quantized:
        return {"tie_word_embeddings": recipe.geometry.tied}
    quantization = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "scheme": recipe.scheme.to_dict(),
        "group_size": recipe.scheme.group_size,
        "embedding": recipe.scheme.embedding,
        "lm_head": recipe.head,
        "linears": linears,
        "bf16_outliers": bf16,
        "carried": [name for row in rows if row.get("reason") == CARRIED for name in row["outputs"]],
        "permutation_length": len(table),
        "permutation_dtype": str(table.dtype).removeprefix("torch."),
    }
    return {"quantization_config": quantization, "tie_word_embeddings": plain_tie}


def _compressed_tensors(recipe: Recipe, rows: list[dict]) -> dict:
    """The ``quantization_config`` of compressed-tensors' pack-quantized layout; ``ignore`` names dense linears."""
    dense = (Kind.LINEAR, Kind.GATE)
    names = [name for row in rows if row["action"] in ("copied", "reordered") for name in row["outputs"]]
    ignored = [name for name in names if tensor_role(recipe.family, name).kind in dense]
    group_size = recipe.scheme.group_size
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size or None,
        "dynamic": False,
    }
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": [recipe.family.head, *(name.removesuffix(".weight") for name in ignored)],
    }


def _side_files(checkpoint: Checkpoint) -> list[str]:
    """The source's side files that are carried: all but config.json, which changes, and the names of our own."""
    return [name for name in checkpoint.side_files() if name not in ("config.json", MANIFEST_FILE)]


def _remove_others(folder: Path, names: set[str]) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in names and not path.name.startswith("."):
            logger.warning("%s is not part of this conversion and is removed", path)
            path.unlink()


def _copy_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    for name in _side_files(checkpoint):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(checkpoint.folder / name, folder / name)
