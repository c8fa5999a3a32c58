"""What a checkpoint must be before any stage works on it, and the same checkpoint opened again later."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from otf_llm.blocks import row_blocks
from otf_llm.checkpoint import Checkpoint, verify_against_manifest
from otf_llm.families import Family, Geometry, check_tensors, find_family
from otf_llm.files import read_json_object

logger = logging.getLogger(__name__)


def inspect_checkpoint(checkpoint: Checkpoint) -> Family:
    """Check a checkpoint's architecture and tensor table and return its family.

    Raises ValueError naming an unsupported architecture, a missing tensor, a wrong shape, or a stored head that differs
    from the embedding although the configuration ties the two. Tensors outside the family's table are logged.
    """
    family = find_family(checkpoint.config)
    geometry = Geometry.of(checkpoint.config, family)
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


def open_verified(folder: Path, manifest: Path) -> Checkpoint:
    """Open the checkpoint that ``manifest`` describes; raises ValueError naming what has changed since."""
    checkpoint = Checkpoint.open(folder)
    verify_against_manifest(checkpoint, read_json_object(manifest))
    return checkpoint
