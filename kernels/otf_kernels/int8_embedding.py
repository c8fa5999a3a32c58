"""INT8 embedding table: rows for token ids, and the tied output head straight from the same table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from otf_kernels import (
    ACTIVATION_DTYPES,
    check_apart,
    check_is_tensor,
    check_tensor,
    interpreter_dtype,
    launch_device,
)

MIN_DOT = 16  # tl.dot takes tiles of at least 16 in every dimension
BLOCK_COLUMNS = 1024  # embedding columns per program: 1 KB of codes, 4 bytes a thread and more


@dataclass(frozen=True)
class Tile:
    """Work of one program: ``block_n`` rows of the table by ``block_m`` tokens, ``block_k`` channels at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name in ("block_m", "block_n", "block_k"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < MIN_DOT or size & (size - 1):
                raise ValueError(f"{name} must be a power of two of at least {MIN_DOT}, not {size}")


# Most tokens a tile is meant for, tile; table rows are the tile's rows (see int4_portable.HALF_TILES).
TILES = (
    (16, Tile(block_m=16, block_n=64, block_k=128)),
    (32, Tile(block_m=32, block_n=64, block_k=128)),
    (128, Tile(block_m=64, block_n=64, block_k=64)),
    (1 << 62, Tile(block_m=128, block_n=128, block_k=64, num_warps=8)),
)
FLOAT32_TILES = ((1 << 62, Tile(block_m=16, block_n=64, block_k=32, num_stages=2)),)


def int8_embedding(
    ids: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    *,
    check_ids: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather and dequantise embedding rows: codes[id] · scales[id].

    Args:
        ids: int32 or int64 [...].
        codes: int8 [V, H].
        scales: float16 [V].
        dtype: float16, bfloat16 or float32, of the result.
        check_ids: read the smallest and largest id back to the host and refuse ids outside the table. That waits for
            the GPU once per call and cannot be captured in a CUDA graph; with False an id outside gives a row of NaN
            and reads no memory outside the table.
        out: contiguous [..., H] in dtype to write to, or None to allocate it.

    Returns:
        dtype [..., H].

    Raises ValueError naming the argument that does not fit, or the id and the vocabulary's size.
    """
    if dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, not {str(dtype).removeprefix('torch.')}")
    check_is_tensor("ids", ids)
    vocabulary, width = _check_table(codes, scales, ids.device)
    ids = ids.contiguous()
    check_tensor("ids", ids, (torch.int32, torch.int64), ids.shape, codes.device)
    if out is None:
        out = torch.empty((*ids.shape, width), dtype=dtype, device=ids.device)
    else:
        check_tensor("out", out, (dtype,), (*ids.shape, width), ids.device)
    if check_ids and ids.numel():
        lowest, highest = torch.stack(ids.aminmax()).tolist()
        if lowest < 0 or highest >= vocabulary:
            outside = lowest if lowest < 0 else highest
            raise ValueError(f"token id {outside} is outside the vocabulary of {vocabulary} rows")
    if out.numel() == 0:
        return out

    run_dtype = interpreter_dtype(int8_embedding_kernel, dtype)
    y = out if run_dtype is dtype else torch.empty_like(out, dtype=run_dtype)
    grid = (ids.numel() * triton.cdiv(width, BLOCK_COLUMNS),)
    with launch_device(int8_embedding_kernel, ids.device):
        int8_embedding_kernel[grid](ids, codes, scales, y, vocabulary, width, BLOCK_COLUMNS=BLOCK_COLUMNS)
    return out if y is out else out.copy_(y)


def int8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Tied output head: logits x @ (codes · scales).T, exactly one column per row of the table.

    Args:
        x: float16, bfloat16 or float32 [..., H], any strides.
        codes: int8 [V, H].
        scales: float16 [V].
        out: contiguous [..., V] in x.dtype to write to, apart from x, or None to allocate it.
        tile: size of one program's work, for tests and tuning.

    Returns:
        [..., V] in x.dtype.

    Raises ValueError naming the argument whose shape, dtype, device or stride does not fit.
    """
    check_is_tensor("x", x)
    vocabulary, width = _check_table(codes, scales, x.device)
    if x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32, not {str(x.dtype).removeprefix('torch.')}")
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"x must have shape [..., {width}] for codes of {width} columns, not {list(x.shape)}")
    y_shape = (*x.shape[:-1], vocabulary)
    if out is None:
        out = torch.empty(y_shape, dtype=x.dtype, device=x.device)
    else:
        check_tensor("out", out, (x.dtype,), y_shape, x.device)
        check_apart("out", out, "x", x)
    if tile is not None and not isinstance(tile, Tile):
        raise ValueError(f"tile must be a Tile or None, not a {type(tile).__name__}")
    if out.numel() == 0:
        return out

    if tile is None and _suits_hopper(x, codes):
        from otf_kernels import hopper

        return hopper.launch_int8(x, codes, scales, out)
    tokens = x.reshape(out.numel() // vocabulary, width).to(interpreter_dtype(int8_linear_kernel, x.dtype))
    y = out if tokens.dtype is x.dtype else torch.empty(y_shape, dtype=tokens.dtype, device=x.device)
    tiles = FLOAT32_TILES if x.dtype is torch.float32 else TILES
    tile = tile or next((tile for most, tile in tiles if tokens.shape[0] <= most), tiles[-1][1])
    grid = (triton.cdiv(tokens.shape[0], tile.block_m) * triton.cdiv(vocabulary, tile.block_n),)
    with launch_device(int8_linear_kernel, x.device):
        int8_linear_kernel[grid](
            tokens, codes, scales, y,
            tokens.shape[0], vocabulary, width, tokens.stride(0), tokens.stride(1),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
    return out if y is out else out.copy_(y)


def _suits_hopper(x: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether the Hopper kernel can read these activations and this table."""
    return (
        x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and x.dtype in (torch.float16, torch.bfloat16)
        and codes.shape[1] % 16 == 0
        and codes.data_ptr() % 16 == 0
    )


def _check_table(codes: torch.Tensor, scales: torch.Tensor, device: torch.device) -> tuple[int, int]:
    """Refuse a table that is not int8 [V, H] with float16 [V] scales; return V and H."""
    check_is_tensor("codes", codes)
    if codes.dim() != 2:
        raise ValueError(f"codes must have shape [V, H], not {list(codes.shape)}")
    check_tensor("codes", codes, (torch.int8,), codes.shape, device)
    check_tensor("scales", scales, (torch.float16,), codes.shape[:1], device)
    return codes.shape


@triton.jit
def int8_embedding_kernel(ids, codes, scales, y, vocabulary, width, BLOCK_COLUMNS: tl.constexpr):
    """BLOCK_COLUMNS columns of one token's row."""
    program = tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK_COLUMNS)
    token = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.load(ids + token).to(tl.int64)
    known = (row >= 0) & (row < vocabulary)
    row = tl.where(known, row, 0)
    code = tl.load(codes + row * width + columns, mask=known & (columns < width), other=0).to(tl.float32)
    scale = tl.where(known, tl.load(scales + row, mask=known, other=0.0).to(tl.float32), float("nan"))
    tl.store(y + token * width + columns, (code * scale).to(y.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=("num_tokens",))
def int8_linear_kernel(
    x, codes, scales, y,
    num_tokens, num_rows, width, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of logits.T: BLOCK_N table rows by BLOCK_M tokens. Every float type holds a code exactly."""
    program = tl.program_id(0)
    token_tiles = tl.cdiv(num_tokens, BLOCK_M)
    tokens = ((program % token_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    rows = ((program // token_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    # Tokens and rows past the end repeat the last one, and only the store leaves them out.
    read_tokens = tl.minimum(tokens, num_tokens - 1)
    read_rows = tl.minimum(rows, num_rows - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        wanted = columns < width
        code = tl.load(codes + read_rows[:, None] * width + columns[None, :], mask=wanted[None, :], other=0)
        activation = tl.load(
            x + columns[:, None].to(tl.int64) * stride_xk + read_tokens[None, :] * stride_xm,
            mask=wanted[:, None],
            other=0.0,
        )
        acc = tl.dot(code.to(activation.dtype), activation, acc, input_precision="ieee")
    acc *= tl.load(scales + read_rows).to(tl.float32)[:, None]
    tl.store(
        y + tokens[None, :] * num_rows + rows[:, None],
        acc.to(y.dtype.element_ty),
        mask=(tokens < num_tokens)[None, :] & (rows < num_rows)[:, None],
    )
