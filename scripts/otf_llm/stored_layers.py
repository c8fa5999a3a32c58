"""The packed layers of a converted folder, read for checking kernels on them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from otf_llm.artifact_format import INDEX_FILE, PERMUTATION_TABLE, verify_files
from otf_llm.files import read_json_object
from otf_llm.kernel_check import Int4Layer, Int8Table


def stored_layers(folder: Path) -> list[Int4Layer | Int8Table]:
    """Every INT4 linear and the INT8 embedding of a converted folder, in the order of its config.json.

    Tensors are memory-mapped. Raises ValueError naming a file that differs from the folder's manifest.
    """
    verify_files(folder)
    quantization = read_json_object(folder / "config.json").get("quantization_config", {})
    weight_map = read_json_object(folder / INDEX_FILE)["weight_map"]
    opened = {name: safe_open(folder / name, framework="pt") for name in sorted(set(weight_map.values()))}

    def read(name: str) -> torch.Tensor | None:
        return opened[weight_map[name]].get_tensor(name) if name in weight_map else None

    table = read(PERMUTATION_TABLE)
    layers: list[Int4Layer | Int8Table] = []
    for name, (in_features, _, offset) in quantization.get("linears", {}).items():
        layers.append(
            Int4Layer(
                name=name,
                codes=read(f"{name}.codes"),
                scales=read(f"{name}.scales"),
                outliers=read(f"{name}.outliers"),
                perm=None if offset is None else table[offset : offset + in_features],
                in_features=in_features,
                group_size=quantization["group_size"],
                bias=read(f"{name}.bias"),
            )
        )
    for name in weight_map:
        module, _, leaf = name.rpartition(".")
        if leaf == "codes" and module not in quantization.get("linears", {}):
            layers.append(Int8Table(module, read(name), read(f"{module}.scales")))
    return layers
