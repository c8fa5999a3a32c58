"""What a checkpoint must be before any stage works on it, and the same checkpoint opened again later."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from otf_llm.blocks import row_blocks
from otf_llm.checkpoint import Checkpoint, TensorInfo, verify_against_manifest
from otf_llm.decoder import Geometry, check_tensors, fused_experts, read_config, tensor_role
from otf_llm.families import Family, Kind, language_model_config
from otf_llm.files import read_json_object

logger = logging.getLogger(__name__)


def inspect_checkpoint(checkpoint: Checkpoint) -> Family:
    """Check a checkpoint's architecture and tensor table and return its family.

    Raises ValueError naming an unsupported architecture, a missing tensor, a wrong shape, or a stored head that differs
    from the embedding although the configuration ties the two. Tensors outside the family's table are logged.
    """
    family, geometry = read_config(checkpoint.config)
    checkpoint = language_model(checkpoint)
    unknown = check_tensors(family, geometry, {name: info.shape for name, info in checkpoint.tensors.items()})
    if unknown:
        logger.warning(
            "%d tensors are not in the %s table and will be carried as they are: %s",
            len(unknown),
            family.name,
            ", ".join(unknown[:10]),
        )
    _check_tie(checkpoint, family, geometry)
    return family


def _check_tie(checkpoint: Checkpoint, family: Family, geometry: Geometry) -> None:
    head, embedding = f"{family.head}.weight", f"{family.embedding}.weight"
    if not geometry.tied or head not in checkpoint.tensors:
        return
    for start, stop in row_blocks(checkpoint.tensors[head].shape):
        if not torch.equal(checkpoint.read_rows(head, start, stop), checkpoint.read_rows(embedding, start, stop)):
            raise ValueError(
                f"config.json ties {head} to {embedding}, but both are stored and differ in rows {start} to {stop}; "
                f"set tie_word_embeddings to false to keep both"
            )


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The language model in a checkpoint: its own configuration, tensors by module names, fused experts taken apart.

    Raises ValueError for a configuration or a fused tensor that does not suit the family, and for a tensor that is
    stored under two names.
    """
    family, geometry = read_config(checkpoint.config)
    tensors: dict[str, TensorInfo] = {}
    for info in checkpoint.tensors.values():
        for part in _parts(family, geometry, info):
            if part.name in tensors:
                raise ValueError(f"{checkpoint.folder}: {part.name} is stored twice, once as {info.name}")
            tensors[part.name] = part
    return replace(checkpoint, config=language_model_config(checkpoint.config), tensors=tensors)


def _parts(family: Family, geometry: Geometry, info: TensorInfo) -> list[TensorInfo]:
    """A stored tensor by its module name, or the experts' weights that lie in it one after the other."""
    name = family.module_name(info.name)
    if tensor_role(family, name).kind is not Kind.EXPERTS:
        return [replace(info, name=name)]
    names, shape = fused_experts(family, geometry, name)
    if info.shape != shape:
        raise ValueError(f"{name} has shape {list(info.shape)}, config.json demands {list(shape)}")
    rows, columns = info.shape[0] * info.shape[1] // len(names), info.shape[2]
    size = info.size_bytes // len(names)
    return [
        replace(info, name=part, shape=(rows, columns), offset=info.offset + index * size, size_bytes=size)
        for index, part in enumerate(names)
    ]


def open_verified(folder: Path, manifest: Path) -> Checkpoint:
    """The language model in the checkpoint that ``manifest`` describes.

    Raises ValueError naming what has changed since the manifest was made.
    """
    checkpoint = Checkpoint.open(folder)
    verify_against_manifest(checkpoint, read_json_object(manifest))
    return language_model(checkpoint)
