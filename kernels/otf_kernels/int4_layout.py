"""The order in which the fast kernels read an INT4 layer, and how a stored layer is brought into it.

A stored layer keeps two codes a byte, row by row. Tensor cores want a tile of rows by channels in registers, so a layer
is packed once, when it is loaded: artifacts stay independent of any GPU, and packing costs a fraction of a second per
gigabyte. Background columns are taken 256 at a time, a block. An int16 word holds four codes of one row, 64 columns
apart, so that one load gives four planes of 64 contiguous columns and no plane needs shuffling:

    word (b, n, i):   bits 15..12   11..8   7..4   3..0
    column 256 b +       192 + i   128 + i  64 + i    i        codes are stored as u = q + 8, and u = 8 beyond K_b

In half precision the bits ``u`` alone are the subnormal number u · 2^-24 and ``u << 4`` is u · 2^-20, so a mask and one
fused multiply-add make a scaled weight out of a plane: u · 2^-24 · S - 8 · 2^-24 · S, rounded once. S is the group's
scale times a power of two of the row's own that brings the row's largest S into [2^14, 2^15); ``row_factors`` undoes it
after the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from otf_kernels import check_is_tensor, check_tensor

BLOCK = 256  # columns of a block
PLANES = 4  # codes of a word
PLANE = BLOCK // PLANES  # words of a row in a block
ALIGNMENT = 8  # channels: 16 bytes, the step of the copy engine
MOST_TOKEN_TILES = 4  # tiles of tokens whose parts ``arrivals`` can count
SMALLEST_TILE = 16  # output features
LARGEST_SCALE_EXPONENT = 15  # a row's largest S is below 2^15
ROW_SCALE_EXPONENT = 14  # S where a row has one scale only, which ``row_factors`` then hold


@dataclass(frozen=True)
class PackedInt4:
    """An INT4 layer as the kernels read it; K_b = in_features - num_outliers background columns, B = ceil(K_b / 256).

    words: int16 [B, N, 64], see the module's text.
    scales: float16, S of every group: [B, N rounded up to a multiple of 8, G] where a block holds G groups
        (``scales_per_block``), so that the copy engine can start at any block, and [N, ceil(K_b / group_size)] for a
        group size of another kind. Empty with group_size 0, where S is 2^14.
    row_factors: float32 [N], 2^24 over the row's power of two; with group_size 0 that times the row's scale.
    outliers: float16 or bfloat16 [N, A], A = num_outliers rounded up to a multiple of 8; zeros beyond num_outliers.
    bias: float32 [N] or None.
    arrivals: int32 [4 ceil(N / 16)], zeros between launches: how many parts of a tile have been summed. Launches of one
        layer must not overlap in time (as they cannot on one stream).
    """

    words: torch.Tensor
    scales: torch.Tensor
    row_factors: torch.Tensor
    outliers: torch.Tensor
    bias: torch.Tensor | None
    arrivals: torch.Tensor
    in_features: int
    num_outliers: int
    group_size: int

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

    @property
    def aligned_outliers(self) -> int:
        """A: channels before the background in activations as the kernels read them."""
        return self.outliers.shape[1]

    @property
    def aligned_features(self) -> int:
        """Width of activations as the kernels read them: [outliers, zeros up to A | background, zeros to a plane]."""
        return self.aligned_outliers + max(1, -(-(self.in_features - self.num_outliers) // PLANE)) * PLANE

    @property
    def num_bytes(self) -> int:
        """Bytes of every tensor that a launch reads."""
        tensors = (self.words, self.scales, self.row_factors, self.outliers, self.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def align(channels: int) -> int:
    """``channels`` rounded up to a multiple of 8."""
    return -(-channels // ALIGNMENT) * ALIGNMENT


def scales_per_block(group_size: int) -> int | None:
    """Groups in a block of 256 columns, when planes of 64 make them up: 64, 128 or a multiple of 256 columns a group.

    0 for one scale a row (group_size 0), None for any other group size.
    """
    if group_size in (64, 128):
        return BLOCK // group_size
    if group_size % BLOCK == 0:
        return min(1, group_size)
    return None


def pack_layer(
    codes: torch.Tensor,
    scales: torch.Tensor,
    outliers: torch.Tensor,
    *,
    in_features: int,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> PackedInt4:
    """Bring a stored INT4 layer into the kernels' order, on its device.

    Args:
        codes: uint8 [N, ceil(K_b / 2)], K_b = in_features - num_outliers: column j is nibble j % 2 (0 = low) of byte
            j // 2, stored as q + 8.
        scales: float16 [N, ceil(K_b / group_size)], or [N, 1] with group_size 0 (none without columns).
        outliers: float16 or bfloat16 [N, num_outliers], possibly without columns.
        in_features: K.
        group_size: columns that share a scale, any size from 1; 0 for one scale per row.
        bias: float [N] or None.

    Raises ValueError naming the argument that does not fit. Uses four bytes of working memory a weight.
    """
    num_columns = _check_layer(codes, scales, outliers, in_features=in_features, group_size=group_size, bias=bias)
    num_rows, num_outliers = outliers.shape
    blocks = max(1, -(-num_columns // BLOCK))
    normalised, row_factors = _normalise(scales)
    groups_per_block = scales_per_block(group_size)
    if groups_per_block == 0:
        row_factors = scales.float().sum(1) * 2.0 ** (24 - ROW_SCALE_EXPONENT)  # one scale, or none without columns
        normalised = normalised[:, :0]
    elif groups_per_block is not None:
        if group_size > BLOCK:
            normalised = normalised.repeat_interleave(min(group_size // BLOCK, blocks), 1)
        # Groups beyond the last have only codes of 0, and any finite scale does for them.
        wanted = blocks * groups_per_block
        normalised = torch.nn.functional.pad(normalised[:, :wanted], (0, max(0, wanted - normalised.shape[1])))
        normalised = normalised.view(num_rows, blocks, groups_per_block).transpose(0, 1)
        normalised = torch.nn.functional.pad(normalised, (0, 0, 0, align(num_rows) - num_rows))
    return PackedInt4(
        words=_pack_words(codes, num_columns, blocks),
        scales=normalised.contiguous(),
        row_factors=row_factors,
        outliers=torch.nn.functional.pad(outliers, (0, align(num_outliers) - num_outliers)).contiguous(),
        bias=None if bias is None else bias.float(),
        arrivals=torch.zeros(MOST_TOKEN_TILES * -(-num_rows // SMALLEST_TILE), dtype=torch.int32, device=codes.device),
        in_features=in_features,
        num_outliers=num_outliers,
        group_size=group_size,
    )


def pack_layers(layers: Sequence[Mapping]) -> PackedInt4:
    """Pack layers that read the same activations (q, k and v; gate and up) as one, their rows one after another.

    Args:
        layers: arguments of ``pack_layer`` by name, one mapping a layer, with the same in_features and group_size and
            as many outlier columns of one dtype. Where only some have a bias, the others' is 0.

    Raises ValueError naming what differs, or what ``pack_layer`` refuses.
    """
    if not layers:
        raise ValueError("layers must hold at least one layer")
    first = layers[0]
    for index, layer in enumerate(layers):
        try:
            _check_layer(**layer)
        except (ValueError, TypeError) as error:  # TypeError: an argument is missing, or unknown
            raise ValueError(f"layers[{index}]: {str(error).removeprefix('_check_layer() ')}") from error
        for name in ("in_features", "group_size"):
            if layer[name] != first[name]:
                raise ValueError(f"layers[{index}] has {name} {layer[name]}, but layers[0] has {first[name]}")
        own, wanted = layer["outliers"], first["outliers"]
        if own.shape[1] != wanted.shape[1] or own.dtype is not wanted.dtype:
            described, wanted = [
                f"{str(value.dtype).removeprefix('torch.')} [N, {value.shape[1]}]" for value in (own, wanted)
            ]
            raise ValueError(f"layers[{index}] has outliers {described}, but layers[0] has {wanted}")
        if own.device != wanted.device:
            raise ValueError(f"layers[{index}] is on {own.device}, but layers[0] is on {wanted.device}")
    biases = [layer.get("bias") for layer in layers]
    bias = None
    if any(value is not None for value in biases):
        rows = [layer["outliers"].new_zeros(len(layer["outliers"]), dtype=torch.float32) for layer in layers]
        bias = torch.cat([zeros if value is None else value.float() for value, zeros in zip(biases, rows, strict=True)])
    joined = {name: torch.cat([layer[name] for layer in layers]) for name in ("codes", "scales", "outliers")}
    return pack_layer(**joined, in_features=first["in_features"], group_size=first["group_size"], bias=bias)


def kernel_order(packed: PackedInt4, perm: torch.Tensor | None = None) -> torch.Tensor:
    """Which channel stands where in activations as the kernels read them, -1 where a zero does.

    Args:
        packed: the layer.
        perm: int [in_features], position i of the stored order is channel perm[i]; None for the stored order itself.

    Returns:
        int32 [packed.aligned_features], on packed's device.

    Raises ValueError when perm has another length or does not hold whole numbers. Its values are not looked at, since
    reading them would wait for the GPU.
    """
    device = packed.words.device
    if perm is None:
        perm = torch.arange(packed.in_features, device=device)
    else:
        check_is_tensor("perm", perm)
        check_tensor("perm", perm, (torch.int16, torch.int32, torch.int64), (packed.in_features,), perm.device)
        perm = perm.to(device)
    order = torch.full((packed.aligned_features,), -1, dtype=torch.int32, device=device)
    order[: packed.num_outliers] = perm[: packed.num_outliers]
    background = packed.in_features - packed.num_outliers
    order[packed.aligned_outliers : packed.aligned_outliers + background] = perm[packed.num_outliers :]
    return order


def arrange(x: torch.Tensor, packed: PackedInt4, perm: torch.Tensor | None = None) -> torch.Tensor:
    """Activations in the kernels' order, by PyTorch; ``activations`` has kernels that write them so in the first place.

    Args:
        x: float [..., in_features].
        packed: the layer that they are for.
        perm: int [in_features], position i of the stored order is channel perm[i]; None when x arrives in that order.

    Returns:
        [..., packed.aligned_features] in x.dtype.

    Raises ValueError when x is not as wide as the layer, or as ``kernel_order`` does.
    """
    check_is_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] != packed.in_features:
        raise ValueError(f"x must have shape [..., {packed.in_features}], not {list(x.shape)}")
    order = kernel_order(packed, perm)
    return x[..., order.clamp(min=0).long()].masked_fill_(order < 0, 0)


def unpack_codes(packed: PackedInt4) -> torch.Tensor:
    """The codes of a packed layer as int8 [N, K_b]; for tests and for looking at a layer."""
    shifts = torch.arange(0, 4 * PLANES, 4, dtype=torch.int32, device=packed.words.device)
    u = (packed.words.int()[..., None, :] >> shifts[:, None]) & 0xF  # [B, N, 4, 64]
    q = (u - 8).to(torch.int8).transpose(0, 1).reshape(packed.out_features, -1)
    return q[:, : packed.in_features - packed.num_outliers]


def _check_layer(codes, scales, outliers, *, in_features, group_size, bias=None) -> int:
    """Refuse what is not a stored layer as ``pack_layer`` describes it; return the number of background columns."""
    for name, tensor in (("codes", codes), ("scales", scales), ("outliers", outliers)):
        check_is_tensor(name, tensor)
    if not isinstance(in_features, int) or in_features < 1:
        raise ValueError(f"in_features must be a positive whole number, not {in_features}")
    if not isinstance(group_size, int) or group_size < 0:
        raise ValueError(f"group_size must be 0 (per channel) or a positive whole number, not {group_size}")
    if outliers.dim() != 2 or outliers.shape[1] > in_features:
        raise ValueError(f"outliers must have shape [N, at most {in_features}], not {list(outliers.shape)}")
    num_rows, num_outliers = outliers.shape
    num_columns = in_features - num_outliers
    num_groups = -(-num_columns // (group_size or max(1, num_columns)))
    check_tensor("outliers", outliers, (torch.float16, torch.bfloat16), (num_rows, num_outliers), codes.device)
    check_tensor("codes", codes, (torch.uint8,), (num_rows, (num_columns + 1) // 2), codes.device)
    check_tensor("scales", scales, (torch.float16,), (num_rows, num_groups), codes.device)
    if bias is not None:
        check_tensor("bias", bias, (torch.float16, torch.bfloat16, torch.float32), (num_rows,), codes.device)
    return num_columns


def _pack_words(codes: torch.Tensor, num_columns: int, blocks: int) -> torch.Tensor:
    num_rows = codes.shape[0]
    u = torch.full((num_rows, blocks * BLOCK), 8, dtype=torch.uint8, device=codes.device)
    u[:, 0:num_columns:2] = codes & 0xF
    u[:, 1:num_columns:2] = (codes >> 4)[:, : num_columns // 2]
    planes = u.view(num_rows, blocks, PLANES, PLANE).transpose(0, 1)  # [B, N, 4, 64]
    low = planes[:, :, 0] | planes[:, :, 1] << 4
    high = planes[:, :, 2] | planes[:, :, 3] << 4
    return torch.stack((low, high), -1).view(torch.int16).squeeze(-1)  # the low byte comes first


def _normalise(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S, float16 like scales, and row_factors, float32 [N]: scales times a power of two of each row's own.

    Half precision's subnormal numbers round the weights of a group whose scale is far below the row's largest, by at
    most 2^-16 of the largest weight that the row can hold.
    """
    exact = scales.double()
    largest = exact.abs().amax(1) if scales.shape[1] else exact.new_zeros(scales.shape[0])
    exponents = LARGEST_SCALE_EXPONENT - torch.frexp(torch.where(largest > 0, largest, 1.0))[1]
    normalised = torch.ldexp(exact, exponents[:, None]).half()
    return normalised, torch.ldexp(torch.ones_like(largest), 24 - exponents).float()
