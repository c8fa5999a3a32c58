"""Folders of pytorch_model*.bin written as safetensors, without running what a pickle asks for."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import torch
from tqdm import tqdm

from otf_llm.blocks import row_blocks
from otf_llm.checkpoint import Checkpoint
from otf_llm.files import atomic_folder, read_json_object
from otf_llm.shards import PICKLE_INDEX, SINGLE_SHARD, pickled_shards, side_files
from otf_llm.streaming import DTYPE_NAMES, SafetensorsWriter, TensorSpec


def write_safetensors(source: Path, destination: Path) -> None:
    """Write the weights of a folder of pickles into ``destination`` as one safetensors file, with its side files.

    The pickles are mapped, not loaded, and read with torch's restricted unpickler, which makes tensors and nothing
    else. The folder appears whole or not at all. Raises ValueError naming the file that is damaged, in torch's format
    of before 1.6, or holds anything but named tensors, and where the index contradicts the files.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in pickled_shards(source):
        for name, tensor in _load(path).items():
            if name in tensors:
                raise ValueError(f"{path}: {name} is in an earlier file too")
            tensors[name] = tensor
    _check_index(source, tensors)
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with atomic_folder(destination) as folder:
        total = sum(spec.size_bytes for spec in specs)
        with (
            SafetensorsWriter(folder / SINGLE_SHARD, specs) as writer,
            tqdm(total=total, unit="B", unit_scale=True, desc="pytorch_model.bin") as bar,
        ):
            for spec in specs:
                if spec.shape:
                    for start, stop in row_blocks(spec.shape):
                        writer.write_rows(spec.name, tensors[spec.name][start:stop], start)
                else:
                    writer.write(spec.name, tensors[spec.name])
                bar.update(spec.size_bytes)
        for name in side_files(source):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        Checkpoint.open(folder)


def _load(path: Path) -> dict[str, torch.Tensor]:
    hint = "convert to safetensors first"
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: refused, it holds more than tensors; {hint} ({_first_line(error)})") from error
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: damaged, or saved by torch before 1.6; {hint} ({_first_line(error)})") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise ValueError(f"{path}: not a table of named tensors; {hint}")
    for name, tensor in loaded.items():
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
            raise ValueError(f"{path}: {name} is {tensor.dtype} {tensor.layout}, which is not supported")
    return loaded


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _check_index(source: Path, tensors: dict[str, torch.Tensor]) -> None:
    index = source / PICKLE_INDEX
    if not index.exists():
        if len(pickled_shards(source)) > 1:
            raise ValueError(f"{source}: several pytorch_model*.bin, but no {PICKLE_INDEX}")
        return
    weight_map = read_json_object(index).get("weight_map")
    names = set(weight_map) if isinstance(weight_map, dict) else set()
    missing = sorted(names - tensors.keys()) or sorted(tensors.keys() - names)
    if missing:
        raise ValueError(f"{index}: files and index do not hold the same tensors: {', '.join(missing[:5])}")
