"""Configurations of the Hopper kernel as data: measured ones by GPU, shape and tokens, and how to measure more.

``tuning/<GPU>.json`` holds what was measured for a GPU, a file of the same form in the user's cache what this machine
has measured since. Shapes in neither get ``hopper_config.choose_config``, which measures nothing.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from otf_kernels.hopper_config import (
    BLOCK_M,
    SHAPES,
    Config,
    check_config,
    choose_config,
    num_steps,
    splits,
    tile_sizes,
)
from otf_kernels.int4_layout import MOST_TOKEN_TILES, PackedInt4, pack_layer
from otf_kernels.timing import launch_times, num_copies

FOLDER = Path(__file__).parent / "tuning"
CACHE_VARIABLE = "OTF_KERNELS_CACHE"
REPEATS = 5
FINAL_REPEATS = 25
FINALISTS = 6
MOST_TOKENS = 2048  # that have a measurement of their own


def cache_folder() -> Path | None:
    """Where this machine's measurements lie: $OTF_KERNELS_CACHE, or otf_kernels in the user's cache; None without it.

    A user without a home, as a service may be, has no cache.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "otf_kernels"
    home = os.path.expanduser("~")
    return None if home == "~" else Path(home) / ".cache" / "otf_kernels"


def tuned_config(gpu: str, packed: PackedInt4, num_tokens: int) -> Config | None:
    """The measured configuration for a layer of this shape and about as many tokens, or None.

    Raises ValueError naming a file that does not hold configurations or cannot be read.
    """
    rows = _measured(gpu)
    return rows.get((packed.out_features, packed.in_features, tokens_measured_for(num_tokens)))


def tokens_measured_for(num_tokens: int) -> int:
    """Numbers of tokens share a configuration up to the next power of two from 8 to 2048."""
    return min(MOST_TOKENS, max(BLOCK_M[0], 1 << (num_tokens - 1).bit_length()))


def tune(packed: PackedInt4, num_tokens: int, *, seconds: float = 20.0) -> Config:
    """Measure configurations for a layer on its GPU, at most ``seconds`` long, and keep the fastest in the cache.

    Returns the fastest. Raises ValueError when the layer is on no Hopper GPU, without a token and without a cache.
    """
    from otf_kernels import hopper

    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, not {num_tokens}")
    _writable_cache()
    device = packed.words.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        raise ValueError(f"the layer is on {device}, but tuning needs a Hopper GPU (compute capability 9.x)")
    properties = torch.cuda.get_device_properties(device)
    x = torch.randn(num_tokens, packed.aligned_features, device=device).half()
    out = torch.empty(num_tokens, packed.out_features, dtype=torch.float16, device=device)
    tensors = ("words", "scales", "row_factors", "outliers", "arrivals")
    held = [packed]
    for _ in range(num_copies(packed.num_bytes) - 1):
        held.append(dataclasses.replace(packed, **{name: getattr(packed, name).clone() for name in tensors}))

    def time_of(config, repeats: int) -> float:
        launches = [functools.partial(hopper.launch, x, layer, out, config) for layer in held]
        return launch_times(launches, repeats)[1]

    end = time.monotonic() + seconds
    times = {}
    steps = num_steps(packed.in_features, packed.num_outliers)
    for config in candidates(packed.out_features, steps, num_tokens, properties.multi_processor_count):
        times[config] = time_of(config, REPEATS)
        if time.monotonic() > end:
            break
    finalists = sorted(times, key=times.get)[:FINALISTS]
    finalists += [dataclasses.replace(config, early=not config.early) for config in finalists[:2]]
    best = min(finalists, key=lambda config: time_of(config, FINAL_REPEATS))
    _keep(properties.name, packed, tokens_measured_for(num_tokens), best)
    return best


def compile_ahead(layers: Sequence[tuple[int, int, int]], tokens: Sequence[int], jobs: int) -> int:
    """Compile what ``tune`` will launch, in ``jobs`` processes; return how many kernels.

    Most of a search's time on a new machine is compilation, one kernel after another.

    Args:
        layers: in_features, out_features and num_outliers of layers with group_size 128, float16 outliers and no bias.
        tokens: numbers of tokens.
        jobs: processes, each of which holds half a gigabyte of GPU memory.
    """
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    wanted = {}
    for (in_features, num_rows, num_outliers), num_tokens in itertools.product(layers, tokens):
        for config in candidates(num_rows, num_steps(in_features, num_outliers), num_tokens, num_sms):
            sizes = (config.block_m, config.block_n, config.num_warps, config.num_stages, config.registers)
            wanted[(*sizes, config.split < 1, num_rows % 16 == 0)] = config
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        aligned = [key[-1] for key in wanted]
        list(pool.map(_compile, wanted.values(), aligned, chunksize=4))
    return len(wanted)


def _compile(config: Config, aligned: bool) -> None:
    """Launch the kernel once, on a small layer of the same kind."""
    from otf_kernels import hopper

    num_rows, in_features = 256 if aligned else 257, 520
    packed = pack_layer(
        torch.zeros(num_rows, 256, dtype=torch.uint8, device="cuda"),
        torch.ones(num_rows, 4, dtype=torch.float16, device="cuda"),
        torch.zeros(num_rows, 8, dtype=torch.float16, device="cuda"),
        in_features=in_features, group_size=128,
    )  # fmt: skip
    x = torch.zeros(config.block_m, packed.aligned_features, dtype=torch.float16, device="cuda")
    hopper.launch(x, packed, torch.empty(config.block_m, num_rows, dtype=torch.float16, device="cuda"), config)
    torch.cuda.synchronize()


def candidates(num_rows: int, steps: int, num_tokens: int, num_sms: int) -> list[Config]:
    """Configurations that fit: the untuned choice, then others in an order without a system, for a search cut short."""
    first = choose_config(num_rows, steps, num_tokens, num_sms)
    tokens = tokens_measured_for(num_tokens)
    found = {}
    for block_m, (block_n, num_warps) in itertools.product(tile_sizes(tokens), SHAPES):
        tiles = -(-num_rows // block_n) * -(-num_tokens // block_m)
        for programs_per_sm, num_stages in itertools.product((1, 2, 3, 4), (2, 3, 4)):
            for split in splits(programs_per_sm, num_sms, tiles, steps):
                config = Config(block_m, block_n, num_warps, num_stages, programs_per_sm, split, first.early)
                if config.fits and config != first and (split <= 1 or tokens <= MOST_TOKEN_TILES * block_m):
                    found[config] = None
    others = list(found)
    random.Random(0).shuffle(others)
    return [first, *others]


@functools.cache
def _measured(gpu: str) -> dict:
    """Configurations by (output features, input channels, tokens); this machine's own measurements win."""
    return {
        (row["n"], row["k"], row["m"]): Config(**row["config"])
        for folder in (FOLDER, cache_folder())
        if folder is not None
        for row in _read(folder / file_name(gpu))
    }


def _read(path: Path) -> list[dict]:
    """Rows of a file, none if there is no file."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; ${CACHE_VARIABLE} sets another folder") from error
    try:
        rows = json.loads(text)
        if not isinstance(rows, list):
            raise ValueError("no list")
        for row in rows:
            if not all(isinstance(row[name], int) for name in ("n", "k", "m")):
                raise ValueError(f"no shape: {row}")
            check_config(Config(**row["config"]), row["m"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} does not hold configurations: {error!r}; delete it to measure again") from error
    return rows


def file_name(gpu: str) -> str:
    """``nvidia_h200.json`` for "NVIDIA H200"."""
    return "".join(letter if letter.isalnum() else "_" for letter in gpu.lower()) + ".json"


def _writable_cache() -> Path:
    """The cache's folder, made if need be."""
    folder = cache_folder()
    if folder is None:
        raise ValueError(f"there is no home for measurements; set ${CACHE_VARIABLE} to a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot hold measurements: {error.strerror}; set ${CACHE_VARIABLE}") from error
    return folder


def _keep(gpu: str, packed: PackedInt4, tokens: int, config: Config) -> None:
    """Write one more measurement to the cache, which always is a whole file."""
    path = _writable_cache() / file_name(gpu)
    key = {"n": packed.out_features, "k": packed.in_features, "m": tokens}
    rows = [row for row in _read(path) if {name: row[name] for name in key} != key]
    rows.append(key | {"config": dataclasses.asdict(config)})
    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=lambda row: (row["n"], row["k"], row["m"])))
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)
    _measured.cache_clear()
