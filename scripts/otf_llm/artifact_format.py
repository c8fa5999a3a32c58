"""What the writer and the readers of a converted folder share: names, the manifest, and its check."""

from __future__ import annotations

from pathlib import Path

from otf_llm.files import read_json_object, sha256

QUANT_METHOD = "otf"
FORMAT_VERSION = 1
PERMUTATION_TABLE = "global_perm_idx"
PERMUTATION_FILE = "permutation.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "manifest.json"


def shard_name(index: int, total: int) -> str:
    """File name of output shard ``index`` (from 0) of ``total``."""
    return f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def load_manifest(folder: Path) -> dict:
    """Read a converted folder's manifest; raises ValueError naming the folder when it is not one or is newer."""
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not a converted folder: it has no {MANIFEST_FILE}")
    manifest = read_json_object(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {manifest.get('format_version')}, expected {FORMAT_VERSION}")
    return manifest


def verify_files(folder: Path) -> None:
    """Check every file of a converted folder against its manifest; raises ValueError naming those that differ."""
    wrong = [
        entry["name"]
        for entry in load_manifest(folder)["files"]
        if not (Path(folder) / entry["name"]).exists() or sha256(Path(folder) / entry["name"]) != entry["sha256"]
    ]
    if wrong:
        raise ValueError(
            f"{folder}: files missing or changed since conversion: {', '.join(wrong)}; "
            f"remove its {MANIFEST_FILE} to have them made again"
        )
