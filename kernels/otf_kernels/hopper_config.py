"""How a launch of the Hopper kernel is cut up, which cuts are worth trying, and which is likely the fastest.

Needs neither Triton nor a GPU. ``choose_config`` estimates times with a few constants that were fitted to 5,600
measurements on an H200: the benchmark's seven shapes at 1 to 2,048 tokens. What it chose took 5 % longer there than the
fastest on average, and at most 28 %. ``tuning`` measures instead.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from otf_kernels.int4_layout import BLOCK, MOST_TOKEN_TILES, PLANE

REGISTERS = 65536  # of a multiprocessor
MOST_REGISTERS = 240  # a thread may have 255; the compiler keeps some
PRODUCER_WARPS = 4  # one works, and registers are handed out to four at a time
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that programs may use
RESERVED_SHARED_MEMORY = 1280  # of each program: barriers, and what CUDA takes
MOST_GROUPS = 4  # scales of a row in a stage
EQUAL_SHARES = 0  # instead of a split
WHOLE_TILES = -1
BLOCK_M = (8, 16, 32, 64, 128)
SHAPES = ((64, 4), (128, 4), (128, 8), (256, 8))  # block_n, num_warps


@dataclass(frozen=True)
class Config:
    """How a launch is cut up.

    block_m: tokens of a tile, 8, 16, 32, 64 or 128.
    block_n: output features of a tile, 64 for every four warps or a multiple of that.
    num_warps: warps that multiply, 4 or 8.
    num_stages: stages of 256 channels in shared memory.
    programs_per_sm: programs that shall fit a multiprocessor at a time.
    split: programs that share a tile's channels, 1 when tokens take more than MOST_TOKEN_TILES tiles. WHOLE_TILES (-1)
        for programs_per_sm programs a multiprocessor that take one tile after another, EQUAL_SHARES (0) for as many
        that take whole tiles and, unless those come out even, an equal share of the rest (data-parallel with a two-tile
        stream-K wave: Osama et al. 2023, arXiv:2301.03598).
    early: fetch the first stages' weights before the preceding kernel has finished (programmatic dependent launch);
        where programs take half of a multiprocessor, they do so while the preceding kernel's are at work.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    split: int
    early: bool

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), bool if field.name == "early" else int
            if type(value) is not wanted:
                raise ValueError(f"config.{field.name} must be of type {wanted.__name__}, not {value!r}")

    @property
    def shared_memory(self) -> int:
        stages = self.num_stages * 2 * (PLANE * self.block_n + BLOCK * self.block_m + MOST_GROUPS * self.block_n)
        rearranged = self.num_warps * 2 * 16 * min(16, self.block_m)  # part of y on its way to memory
        return stages + rearranged + RESERVED_SHARED_MEMORY

    @property
    def fits(self) -> bool:
        """Whether as many programs as wanted fit a multiprocessor's shared memory."""
        return self.shared_memory * self.programs_per_sm <= SHARED_MEMORY

    @property
    def registers(self) -> int:
        """Of a thread at the launch; the multiplying warps then take the producer's."""
        threads = 32 * (self.num_warps + PRODUCER_WARPS) * self.programs_per_sm
        return min(MOST_REGISTERS, REGISTERS // threads // 8 * 8)


def check_config(config: Config, num_tokens: int) -> None:
    """Raise ValueError when the kernel cannot be launched so."""
    if config.block_m not in BLOCK_M:
        raise ValueError(f"config.block_m must be 8, 16, 32, 64 or 128, not {config.block_m}")
    if config.num_warps not in (4, 8) or config.block_n not in (16 * config.num_warps, 32 * config.num_warps):
        raise ValueError(
            f"config must have 4 or 8 warps and 16 or 32 output features a warp, not num_warps {config.num_warps} and "
            f"block_n {config.block_n}"
        )
    if config.programs_per_sm < 1:
        raise ValueError(f"config.programs_per_sm must be at least 1, not {config.programs_per_sm}")
    if config.num_stages < 2 or not config.fits:
        raise ValueError(
            f"config.num_stages must be at least 2 and fit {SHARED_MEMORY} bytes of shared memory, not "
            f"{config.num_stages} ({config.programs_per_sm} x {config.shared_memory} bytes)"
        )
    if config.split < WHOLE_TILES or (config.split > 1 and num_tokens > MOST_TOKEN_TILES * config.block_m):
        raise ValueError(
            f"config.split must be at least -1, and at most 1 when tokens take over {MOST_TOKEN_TILES} tiles, not "
            f"{config.split}"
        )


def num_steps(in_features: int, num_outliers: int) -> int:
    """Steps of the main loop: 256 background channels each, then 64 outlier columns each."""
    return max(1, -(-(in_features - num_outliers) // BLOCK)) + -(-num_outliers // PLANE)


def tile_sizes(num_tokens: int) -> list[int]:
    """Sizes of token tiles worth trying."""
    least, most = min(64, num_tokens // MOST_TOKEN_TILES), max(8, 1 << (num_tokens - 1).bit_length())
    return [size for size in BLOCK_M if least <= size <= most]


def splits(programs_per_sm: int, num_sms: int, tiles: int, steps: int) -> list[int]:
    """How many programs may share a tile so that all run at once, and one fewer; equal shares; whole tiles.

    All may run at once where fewer do: programs of the next kernel can then start beside them.
    """
    found = {EQUAL_SHARES}
    if tiles > programs_per_sm * num_sms:
        found.add(WHOLE_TILES)
    for programs in range(num_sms, programs_per_sm * num_sms + 1, num_sms):
        most = max(1, min(programs // tiles, steps))
        for wanted in {most, max(1, most - 1)}:
            found.add(-(-steps // -(-steps // wanted)))  # no program without a step
    return sorted(found)


@functools.lru_cache(maxsize=4096)
def choose_config(num_rows: int, steps: int, num_tokens: int, num_sms: int) -> Config:
    """The configuration with the least estimated time; nothing is measured."""
    best, least = None, float("inf")
    for block_m in tile_sizes(num_tokens):
        for block_n, num_warps in ((64, 4), (128, 4), (256, 8)):
            tiles = -(-num_rows // block_n) * -(-num_tokens // block_m)
            most_programs = 1 if block_m >= 64 else 3 if block_n == 64 else 2
            for programs_per_sm in range(1, most_programs + 1):
                stages = 4 if programs_per_sm == 1 and block_n < 256 else 3
                if block_m == 128:
                    stages = 3 if block_n == 64 else 2
                for split in splits(programs_per_sm, num_sms, tiles, steps):
                    if split > 1 and num_tokens > MOST_TOKEN_TILES * block_m:
                        continue
                    config = Config(block_m, block_n, num_warps, stages, programs_per_sm, split, True)
                    time = estimated_time(config, num_rows, steps, num_tokens, num_sms)
                    if time < least and config.fits:
                        best, least = config, time
    return best


def estimated_time(config: Config, num_rows: int, steps: int, num_tokens: int, num_sms: int) -> float:
    """Microseconds of a launch on an H200, of which only the order matters.

    A multiprocessor works on a step of each of its programs at a time, as long as tensor cores, other arithmetic, the
    L2 cache or one program's chain of dependent instructions take. All of it cannot be faster than memory.
    """
    block_m, block_n, at_once = config.block_m, config.block_n, config.programs_per_sm * num_sms
    tiles = -(-num_rows // block_n) * -(-num_tokens // block_m)
    size = block_m * block_n / 1e4
    resident, sharing, ends = config.programs_per_sm, 0.0, 1.0
    if config.split == EQUAL_SHARES:
        programs = min(at_once, tiles * steps)
        steps_each = tiles * steps / programs
        ends += tiles // programs
        if tiles % programs:
            sharing = 1.7 + 0.91 * size
    else:
        share = -(-steps // max(1, config.split))
        programs = tiles * max(1, config.split)
        if config.split == WHOLE_TILES:
            programs = min(programs, at_once)
            ends = float(-(-tiles // programs))
        else:
            ends = float(-(-programs // at_once))
            resident = min(resident, -(-programs // num_sms))
        steps_each = ends * share
        if config.split > 1:
            sharing = 1.1 + 0.025 * config.split + 0.41 * size
    tensor = 87e-6 * block_n * max(block_m, 44)
    other = 561e-6 * block_n
    alone = 0.1 + tensor + 0.15 * other * (8 // config.num_warps)
    row_bytes = 2 * PLANE + 4
    cache = (512 * block_m + row_bytes * block_n) / 88e3
    step = max(resident * (tensor + 0.83 * other), alone, resident * cache)
    in_flight = min(1.0, config.num_stages * resident * row_bytes * block_n / 44e3)
    memory = num_rows * steps * row_bytes / 6.4e6 / max(0.3, in_flight)
    return 2.4 + max(steps_each * step, memory) + sharing + 0.98 * ends * size


def choose_int8_config(num_tokens: int) -> Config:
    """A configuration for a table, whose rows are many."""
    block_m = min(64, max(8, 1 << (num_tokens - 1).bit_length()))
    if block_m <= 32:
        return Config(block_m, 128, 4, 4, 2 if block_m <= 16 else 1, WHOLE_TILES, True)
    return Config(block_m, 256, 8, 3, 1, WHOLE_TILES, True)
