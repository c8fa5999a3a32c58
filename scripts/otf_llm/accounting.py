"""Where a model's bytes are: every byte of its weight files by category, and the bits that a decoder weight takes.

Both kinds of manifest are read: that of a source checkpoint (a tensor table with dtypes and shapes) and that of a
converted folder (a row per converted tensor with the bytes of what was written). No weight is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from otf_llm.checkpoint import LENGTH_BYTES
from otf_llm.decoder import Role, tensor_role
from otf_llm.families import FAMILIES, Family, Kind
from otf_llm.streaming import DTYPES

CODES, SCALES, FP16_COLUMNS = "codes", "scales", "fp16_columns"
DENSE, EMBEDDING, OTHER = "dense", "embedding", "other"
CATEGORIES = (CODES, SCALES, FP16_COLUMNS, DENSE, EMBEDDING, OTHER)

# Last part of an INT4 output's name -> what it holds.
INT4_PARTS = {"codes": CODES, "scales": SCALES, "outliers": FP16_COLUMNS}
INT4_PARTS |= {"weight_packed": CODES, "weight_scale": SCALES, "weight_shape": SCALES}  # compressed-tensors
DENSE_KINDS = {Kind.LINEAR: DENSE, Kind.EXPERTS: DENSE, Kind.HEAD: DENSE, Kind.EMBEDDING: EMBEDDING}

# More than a safetensors header says of one tensor besides its name (dtype, dimensions, two offsets, punctuation), or
# of none: what a converted file has beyond that is no header.
HEADER_ENTRY_BYTES = 256


@dataclass(frozen=True)
class StoredTensor:
    """What one tensor of a model became: ``outputs`` is the list of (stored name, bytes, category).

    ``module`` and ``role`` tell what the tensor is, ``num_weights`` how many weights it has. ``relative_error`` is
    Σ h(w-ŵ)² / Σ h w², or None where it is stored as it was.
    """

    module: str
    role: Role
    num_weights: int
    shard: str
    outputs: tuple[tuple[str, int, str], ...]
    relative_error: float | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(size for _, size, _ in self.outputs)

    @property
    def bits(self) -> float:
        """Stored bits per weight: padding, scales and FP16 columns included."""
        return 8 * self.size_bytes / self.num_weights


def manifest_family(manifest: dict) -> Family:
    """The family that a source or a converted manifest names. Raises ValueError for a name that is none."""
    name = manifest["source"]["family"] if _is_converted(manifest) else manifest["family"]
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ValueError(f"the manifest names the family {name!r}; known are {known}")


def stored_tensors(manifest: dict) -> list[StoredTensor]:
    """What every tensor of a model became, in the manifest's order; tensors that were dropped are left out.

    Raises ValueError for an unknown family and, naming the tensor, for an INT4 output of no known kind.
    """
    family = manifest_family(manifest)
    if _is_converted(manifest):
        return [_converted_tensor(family, row) for row in manifest["tensors"] if row["outputs"]]
    return [_source_tensor(family, name, entry) for name, entry in manifest["tensors"].items()]


def weight_file_sizes(manifest: dict) -> dict[str, int]:
    """Bytes of a model's weight files by name. Raises ValueError for one that the manifest does not describe."""
    if _is_converted(manifest):
        names, files = manifest["weight_files"], {entry["name"]: entry for entry in manifest["files"]}
    else:
        names, files = manifest["shards"], manifest["files"]
    for name in names:
        if name not in files:
            raise ValueError(f"the manifest lists the weight file {name}, but not its size")
    return {name: files[name]["size_bytes"] for name in names}


def byte_categories(manifest: dict, folder: Path | None = None) -> dict[str, int]:
    """Bytes of a model's weight files by category; they sum to the sizes of the files.

    ``codes``, ``scales`` and ``fp16_columns``: of INT4 decoder linears and head. ``dense``: linears and head left as
    they were. ``embedding``: INT8 codes and scales, or the dense table. ``other``: norms, biases, permutation table,
    tensors outside the family's table, and the files' headers, which are what the tensors leave of a file.

    Args:
        folder: the folder of the files; where given, their sizes and headers are compared with the manifest.

    Raises ValueError with both numbers when tensors and headers do not add up to a file, or a file has changed.
    """
    sizes = weight_file_sizes(manifest)
    tensor_bytes, header_limits = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, HEADER_ENTRY_BYTES)
    totals = dict.fromkeys(CATEGORIES, 0)
    for tensor in stored_tensors(manifest):
        if tensor.shard not in sizes:
            raise ValueError(f"{tensor.module} is stored in {tensor.shard}, which is none of the weight files")
        for name, size, category in tensor.outputs:
            totals[category] += size
            tensor_bytes[tensor.shard] += size
            header_limits[tensor.shard] += len(json.dumps(name)) + HEADER_ENTRY_BYTES
    for file, size in sizes.items():
        header = size - tensor_bytes[file]
        # A source's metadata may be of any length; ours is not, and a tensor that is missing here would pass for it.
        if header < LENGTH_BYTES or (_is_converted(manifest) and header > header_limits[file]):
            raise ValueError(f"{file}: its tensors take {tensor_bytes[file]} bytes, the file has {size}")
        if folder is not None:
            _check_file(Path(folder) / file, size, tensor_bytes[file])
        totals[OTHER] += header
    return totals


def bits_per_weight(manifest: dict) -> float:
    """Stored bits per weight of the decoder's linears, head and embedding left out.

    Scales, FP16 columns and the padding of odd rows count; a linear that was kept counts its dtype's width.
    Raises ValueError for a manifest without decoder linears.
    """
    linears = [tensor for tensor in stored_tensors(manifest) if tensor.role.kind in (Kind.LINEAR, Kind.EXPERTS)]
    if not linears:
        raise ValueError(f"the manifest of a {manifest_family(manifest).name} model lists no decoder linear")
    return 8 * sum(tensor.size_bytes for tensor in linears) / sum(tensor.num_weights for tensor in linears)


def _is_converted(manifest: dict) -> bool:
    return "scheme" in manifest


def _source_tensor(family: Family, name: str, entry: dict) -> StoredTensor:
    role = tensor_role(family, name)
    num_weights = math.prod(entry["shape"])
    size = num_weights * DTYPES[entry["dtype"]].itemsize
    output = (name, size, DENSE_KINDS.get(role.kind, OTHER))
    return StoredTensor(name.removesuffix(".weight"), role, num_weights, entry["shard"], (output,))


def _converted_tensor(family: Family, row: dict) -> StoredTensor:
    if row["action"] == "permutation":
        outputs = tuple((name, size, OTHER) for name, size in row["outputs"].items())
        return StoredTensor(outputs[0][0], Role(Kind.BUFFER), 0, row["shard"], outputs)
    # A dense output's own name tells what it is: a tied model's head may be written from its embedding.
    first = next(iter(row["outputs"]))
    module = row.get("module") or first.removesuffix(".weight")
    role = tensor_role(family, f"{module}.weight" if "module" in row else first)
    outputs = tuple((name, size, _category(row["action"], role, name)) for name, size in row["outputs"].items())
    return StoredTensor(module, role, math.prod(row["shape"]), row["shard"], outputs, row.get("relative_error"))


def _category(action: str, role: Role, name: str) -> str:
    if action == "int8":
        return EMBEDDING
    if action != "int4":
        return DENSE_KINDS.get(role.kind, OTHER)
    part = name.rpartition(".")[2]
    if part not in INT4_PARTS:
        raise ValueError(f"{name} is no part of an INT4 linear; those are {', '.join(INT4_PARTS)}")
    return INT4_PARTS[part]


def _check_file(path: Path, size: int, tensor_bytes: int) -> None:
    """Compare a weight file with its size in the manifest, and its header's length with what its tensors leave."""
    found = path.stat().st_size
    if found != size:
        raise ValueError(f"{path} has {found} bytes, its manifest says {size}")
    with open(path, "rb") as file:
        header = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
    if header + tensor_bytes != size:
        raise ValueError(f"{path}: header and tensors take {header} + {tensor_bytes} bytes, the file has {size}")
