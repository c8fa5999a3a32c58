"""Which files a checkpoint folder is made of: shards, index, side files.

A workflow asks for them while it starts, so this needs no torch.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from otf_llm.files import read_json_object

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"
PICKLE_INDEX = "pytorch_model.bin.index.json"
NUMBERED_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
HEADER_LIMIT_BYTES = 100_000_000  # the safetensors library refuses longer headers
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json")

TEMPLATE_FOLDER = "additional_chat_templates"  # the one subfolder that transformers reads a tokenizer from


def layout(folder: Path) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """The folder's weight map (None for a single file) and the names of its shards in order, all of which are on disk.

    Raises ValueError if there is neither index nor single file, or if they and the files on disk contradict each other.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    present = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not index.exists():
        if SINGLE_SHARD in present:
            _refuse_unnamed_shards(folder, present, (SINGLE_SHARD,))
            return None, (SINGLE_SHARD,)
        if not present and pickled_shards(folder):
            raise ValueError(f"{folder}: holds only pytorch_model*.bin; convert to safetensors first")
        found = ", ".join(present) or "no safetensors file at all"
        raise ValueError(f"{folder}: has neither {SINGLE_SHARD} nor {INDEX_NAME}, but {found}")
    weight_map = read_index(index)
    shards = tuple(sorted(set(weight_map.values())))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{index}: names shards that are not on disk: {', '.join(missing)}")
    _refuse_unnamed_shards(folder, present, shards)
    return weight_map, shards


def pickled_shards(folder: Path) -> list[Path]:
    """The folder's pytorch_model*.bin, sorted by name."""
    return sorted(Path(folder).glob("pytorch_model*.bin"))


def read_index(path: Path) -> dict[str, str]:
    """The index's ``weight_map``: tensor name to shard file name.

    Raises ValueError if it is absent, empty, or names a shard by anything but the plain name of a .safetensors file.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: has no weight_map from tensor names to shards")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and re.fullmatch(r"[^./\\\0][^/\\\0]*\.safetensors", shard)
        if not plain:
            raise ValueError(f"{path}: maps {name} to {shard!r}, which is not the plain name of a .safetensors file")
    return weight_map


def side_files(folder: Path) -> list[str]:
    """Sorted names of the folder's files that are not weights: config, tokenizer, chat templates, licence, code."""
    names = [path.name for path in Path(folder).iterdir() if path.is_file()]
    names += [f"{TEMPLATE_FOLDER}/{path.name}" for path in (Path(folder) / TEMPLATE_FOLDER).glob("*.jinja")]
    return sorted(name for name in names if not name.startswith(".") and not name.lower().endswith(WEIGHT_SUFFIXES))


def _refuse_unnamed_shards(folder: Path, present: list[str], shards: tuple[str, ...]) -> None:
    """Refuse model weights that would be left out; files such as consolidated.safetensors repeat the same weights."""
    for name in present:
        if name in shards:
            continue
        if name == SINGLE_SHARD or NUMBERED_SHARD.fullmatch(name):
            raise ValueError(f"{folder / name}: lies beside {', '.join(shards[:3])} but no index names it")
        logger.info("%s: ignored, the model's weights are %s", folder / name, ", ".join(shards[:3]))
