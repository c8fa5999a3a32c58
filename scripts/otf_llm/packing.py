"""INT4 storage: two codes per byte, the earlier column in the low nibble.

Column j of a row is nibble j % 2 (0 = low) of byte j // 2, stored as q + 8. A row with an odd number of columns ends in
a padding nibble of 8, that is q = 0. Packing changes storage only: scales and rounding are in ``quantization``.
"""

from __future__ import annotations

import torch

from otf_llm.quantization import INT4_MAX

NIBBLE_OFFSET = 8  # stored nibble = q + 8; nibble 0 (q = -8) is never written, since codes are symmetric


def packed_width(num_columns: int) -> int:
    """Bytes that one row of ``num_columns`` INT4 codes takes."""
    return (num_columns + 1) // 2


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """Store INT4 codes two to a byte.

    Args:
        q: int8 [N, K], values in [-7, 7]; N and K may be 0, K may be odd.

    Returns:
        uint8 [N, ceil(K / 2)], contiguous, on q's device.

    Raises ValueError when q is not a two-dimensional int8 tensor, or when a value lies outside [-7, 7]: it would spill
    into the neighbouring nibble, so it is refused rather than clamped (clamping belongs to ``quantize_int4``).
    """
    if q.dtype is not torch.int8 or q.dim() != 2:
        raise ValueError(f"q must be int8 with 2 dimensions, not {q.dtype} with {q.dim()}")
    if q.numel():
        lowest, highest = (int(value) for value in q.aminmax())
        if lowest < -INT4_MAX or highest > INT4_MAX:
            raise ValueError(f"q holds values from {lowest} to {highest}, outside [-{INT4_MAX}, {INT4_MAX}]")
    if q.shape[1] % 2:
        q = torch.nn.functional.pad(q, (0, 1))  # with q = 0
    if q.numel() == 0:
        return q.new_empty(q.shape[0], q.shape[1] // 2, dtype=torch.uint8)
    # Two codes at a time, the later one in the high byte: q's low four bits, the sign's one turned, are q + 8.
    pairs = q.contiguous().view(torch.int16) & 0x0F0F
    pairs.bitwise_xor_(0x0808)
    pairs |= pairs >> 4
    return pairs.view(torch.uint8)[:, 0::2].contiguous()


def unpack_int4(codes: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Read INT4 codes back, without the padding nibble.

    Args:
        codes: uint8 [N, ceil(num_columns / 2)] as written by ``pack_int4``.
        num_columns: K, the number of codes in a row.

    Returns:
        int8 [N, num_columns]. Every byte decodes; nibble 0, which ``pack_int4`` never writes, decodes to -8.

    Raises ValueError when codes is not a two-dimensional uint8 tensor of that width.
    """
    if codes.dtype is not torch.uint8 or codes.dim() != 2:
        raise ValueError(f"codes must be uint8 with 2 dimensions, not {codes.dtype} with {codes.dim()}")
    width = packed_width(num_columns)
    if num_columns < 0 or codes.shape[1] != width:
        raise ValueError(f"codes has {codes.shape[1]} bytes a row, but {num_columns} columns take {width}")
    low = (codes & 0xF).to(torch.int8) - NIBBLE_OFFSET
    high = (codes >> 4).to(torch.int8) - NIBBLE_OFFSET
    return torch.stack((low, high), dim=-1).flatten(1)[:, :num_columns].contiguous()


def is_permutation(order: torch.Tensor, size: int) -> bool:
    """Whether integers [K] are 0 … size - 1, each once."""
    return len(order) == size and torch.equal(order.long().sort().values, torch.arange(size))
