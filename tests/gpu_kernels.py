"""The compiled kernels against the float64 reference, on a CUDA GPU; pytest does not collect this file.

    PYTHONPATH=scripts:kernels python tests/gpu_kernels.py [--out DIR] [--jobs N]

prints the largest relative error of every case, writes it to DIR/gpu_kernels.tsv, and exits with 1 if any is too large.
``--compile-only`` needs no GPU: it compiles the kernels for Ampere, Ada, Hopper and Blackwell GPUs and runs nothing.
``--odd-shape`` runs each kernel once or twice on one odd shape, as compute-sanitizer wants it, which is slow:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python tests/gpu_kernels.py --odd-shape
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from otf_llm import reference
from otf_llm.kernel_check import Int4Layer, Int8Table, tolerance
from otf_llm.packing import pack_int4

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HALF_DTYPES = (torch.float16, torch.bfloat16)
TOKENS = (0, 1, 7, 16, 17, 64, 200)
SMALL_SHAPES = ((1, 1, 0), (7, 63, 1), (260, 257, 3), (96, 128, 1))  # N, K, outlier columns
LARGE_SHAPES = ((4096, 4096, 41), (3072, 8192, 82))
TABLES = ((1, 1), (259, 65), (260, 64), (259, 208), (32000, 576))  # V, H
GROUP_SIZES = (0, 64, 128)
ODD_GROUP_SIZES = (1, 5, 96)  # groups that begin inside a byte, or that no power of two divides
PACKED_SHAPES = ((1, 8, 0), (7, 63, 1), (260, 257, 3), (263, 1000, 9), (3, 40, 40), (3072, 3072, 31), (1000, 8192, 82))
PACKED_GROUP_SIZES = (0, 64, 128, 256)
PACKED_TOKENS = (0, 1, 2, 7, 16, 17, 33, 64, 65, 128, 130, 300)
# block_m, block_n, num_warps, num_stages, programs_per_sm, split, early
PACKED_CONFIGS = (
    (8, 64, 4, 3, 3, 5, True), (8, 128, 4, 3, 2, 1, False), (16, 128, 4, 4, 2, 13, True), (16, 256, 8, 2, 1, 2, False),
    (32, 64, 4, 2, 1, 3, True), (64, 256, 8, 3, 1, 4, True), (64, 128, 8, 3, 1, 7, False), (128, 64, 4, 3, 1, 2, True),
    (128, 256, 8, 2, 1, 5, True), (8, 64, 4, 3, 3, 0, True), (16, 128, 4, 3, 2, 0, False), (64, 256, 8, 3, 1, 0, True),
    (128, 128, 8, 2, 1, 0, False), (128, 64, 4, 3, 1, -1, True), (64, 128, 4, 2, 2, -1, False),
)  # fmt: skip
OTHER_CAPABILITIES = {80: 163 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes a program may have
OFFSET_ROWS, OFFSET_BYTES = 524_300, 4_096  # 2.15 GB of codes: offsets pass 2^31
OFFSET_MEMORY = 24 << 30


def random_layer(
    num_rows: int,
    in_features: int,
    num_outliers: int,
    group_size: int,
    *,
    permuted: bool = True,
    biased: bool = True,
    outlier_dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Int4Layer:
    """A stored layer of random codes, scales, outlier columns, permutation and bias."""
    generator = torch.Generator().manual_seed(seed)
    columns = in_features - num_outliers
    q = torch.randint(-7, 8, (num_rows, columns), dtype=torch.int8, generator=generator)
    groups = -(-columns // (group_size or max(1, columns)))
    channels = torch.randperm(in_features, generator=generator)
    return Int4Layer(
        name=f"{num_rows}x{in_features} group {group_size}",
        codes=pack_int4(q).to(device),
        scales=(torch.rand(num_rows, groups, generator=generator) / 16 + 1 / 64).half().to(device),
        outliers=torch.randn(num_rows, num_outliers, generator=generator).to(device, outlier_dtype),
        perm=channels.to(device, torch.int16) if permuted else None,
        in_features=in_features,
        group_size=group_size,
        bias=torch.randn(num_rows, generator=generator).to(device) if biased else None,
    )


def random_table(vocabulary: int, width: int, *, device: torch.device | str = "cpu", seed: int = 0) -> Int8Table:
    """A stored embedding of random codes and scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (vocabulary, width), dtype=torch.int8, generator=generator)
    scales = (torch.rand(vocabulary, generator=generator) / 64 + 1 / 256).half()
    return Int8Table(f"{vocabulary}x{width}", codes.to(device), scales.to(device))


def random_activations(tokens: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)


def reference_layer(x: torch.Tensor, layer: Int4Layer) -> torch.Tensor:
    """The reference on a stored layer."""
    return reference.int4_linear(
        x, layer.codes, layer.scales, layer.outliers,
        in_features=layer.in_features, group_size=layer.group_size, perm=layer.perm, bias=layer.bias,
    )  # fmt: skip


def pack(layer: Int4Layer):
    """A stored layer in the kernels' order."""
    from otf_kernels.int4_layout import pack_layer

    return pack_layer(
        layer.codes, layer.scales, layer.outliers,
        in_features=layer.in_features, group_size=layer.group_size, bias=layer.bias,
    )  # fmt: skip


def apply_layer(x: torch.Tensor, layer: Int4Layer, **options) -> torch.Tensor:
    """The kernel on a stored layer."""
    from otf_kernels.int4_linear import int4_linear

    return int4_linear(x, pack(layer), perm=layer.perm, **options)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """max |y - expected| over max |expected| or 1: values here are of order 1, but a lone one may cancel to nothing."""
    if y.shape != expected.shape:
        raise ValueError(f"y must have shape {list(expected.shape)}, not {list(y.shape)}")
    if y.numel() == 0:
        return 0.0
    if not torch.isfinite(y).all():
        return math.inf
    return float((y.double() - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def layer_cases(device: str):
    """(layer, activation dtype, tokens) of the INT4 grid."""
    small = itertools.product(SMALL_SHAPES, GROUP_SIZES, (False, True), DTYPES)
    odd_groups = itertools.product(SMALL_SHAPES[2:3], ODD_GROUP_SIZES, (True,), DTYPES)
    large = itertools.product(LARGE_SHAPES, GROUP_SIZES, (True,), DTYPES)
    for shape, group_size, permuted, dtype in itertools.chain(small, odd_groups, large):
        layer = random_layer(*shape, group_size, permuted=permuted, biased=permuted, device=device)
        yield layer, dtype, TOKENS
    # Outlier columns that FP16 cannot hold are stored as bfloat16. A float16 result has no room for them.
    layer = random_layer(260, 257, 3, 64, outlier_dtype=torch.bfloat16, device=device)
    for dtype in DTYPES:
        yield dataclasses.replace(layer, name="bfloat16 outliers"), dtype, TOKENS
    layer = dataclasses.replace(layer, name="outliers past 65504", outliers=layer.outliers * 70000)
    for dtype in DTYPES[1:]:
        yield layer, dtype, TOKENS


def check_grid(device: str, share: slice) -> list[dict]:
    """Cases of the grid: one row per layer and dtype, with the worst error over the numbers of tokens."""
    from otf_kernels.int8_embedding import int8_embedding, int8_linear

    rows = []
    for layer, dtype, token_counts in itertools.islice(layer_cases(device), share.start, None, share.step):
        errors = []
        for tokens in token_counts:
            x = random_activations(tokens, layer.in_features, dtype, device)
            y = apply_layer(x, layer)
            errors.append(relative_error(y, reference_layer(x.double(), layer)))
        case = f"{layer.name}{', permuted' if layer.perm is not None else ''}"
        rows.append(result("int4_linear", case, dtype, errors, layer.in_features))
    for (vocabulary, width), dtype in list(itertools.product(TABLES, DTYPES))[share]:
        table = random_table(vocabulary, width, device=device)
        head_errors, row_errors = [], []
        for tokens in TOKENS:
            x = random_activations(tokens, width, dtype, device)
            expected = reference.int8_linear(x.double(), table.codes, table.scales)
            head_errors.append(relative_error(int8_linear(x, table.codes, table.scales), expected))
            ids = torch.arange(tokens, device=device) * 7919 % vocabulary
            y = int8_embedding(ids, table.codes, table.scales, dtype)
            expected = reference.int8_embedding(ids, table.codes, table.scales, torch.float64)
            row_errors.append(relative_error(y, expected))
        rows.append(result("int8_linear", table.name, dtype, head_errors, width))
        rows.append(result("int8_embedding", table.name, dtype, row_errors, 1))
    return rows


def packed_cases(device: str):
    """(name, layer, numbers of tokens, configuration or None) of the Hopper kernel's grid."""
    from otf_kernels.hopper_config import Config

    for shape, group_size, plain in itertools.product(PACKED_SHAPES, PACKED_GROUP_SIZES, (False, True)):
        layer = random_layer(*shape, group_size, permuted=not plain, biased=not plain, device=device)
        yield f"{layer.name}{', permuted' * (not plain)}", layer, PACKED_TOKENS, None
    # Equal shares of the second layer hold whole tiles between parts of two others.
    for shape, values in itertools.product(((1000, 4000, 41), (40000, 500, 9)), PACKED_CONFIGS):
        config = Config(*values)
        layer = random_layer(*shape, 64, device=device)
        tokens = (1, config.block_m, 4 * config.block_m) + (2000,) * (config.split < 2)
        yield f"{layer.name}, {values}", layer, tokens, config
    layer = random_layer(260, 777, 9, 128, outlier_dtype=torch.bfloat16, device=device)
    yield "bfloat16 outliers", layer, (1, 64), None


def check_packed(device: str, share: slice) -> list[dict]:
    """The Hopper kernel over packed layers: every shape, group size and number of tokens, then every configuration."""
    rows = []
    for name, layer, token_counts, config in itertools.islice(packed_cases(device), share.start, None, share.step):
        packed = pack(layer)
        # A float16 result has no room for outlier columns that were stored as bfloat16.
        for dtype in HALF_DTYPES if layer.outliers.dtype is torch.float16 else HALF_DTYPES[1:]:
            errors = [packed_error(layer, packed, tokens, dtype, config) for tokens in token_counts]
            rows.append(result("hopper", name, dtype, errors, layer.in_features))
    return rows


def check_prefill(device: str, share: slice) -> list[dict]:
    """Weights written out slab by slab, then multiplied, which Hopper GPUs do for float32 only."""
    from otf_kernels import int4_prefill
    from otf_kernels.int4_layout import arrange

    rows = []
    cases = itertools.product(PACKED_SHAPES, PACKED_GROUP_SIZES, DTYPES)
    for shape, group_size, dtype in itertools.islice(cases, share.start, share.stop, share.step):
        layer = random_layer(*shape, group_size, device=device)
        packed = pack(layer)
        x = random_activations(130, layer.in_features, dtype, device)
        y = torch.full((130, packed.out_features), 777.0, dtype=dtype, device=device)
        int4_prefill.launch(arrange(x, packed, layer.perm), packed, y, slab_bytes=1 << 20)
        error = relative_error(y, reference_layer(x.double(), layer))
        rows.append(result("int4_prefill", layer.name, dtype, [error], layer.in_features))
    return rows


def packed_error(layer: Int4Layer, packed, tokens: int, dtype: torch.dtype, config=None) -> float:
    """Relative error of one launch; infinite when a second one differs in any bit or an output is left unwritten."""
    from otf_kernels.hopper import launch
    from otf_kernels.int4_layout import arrange

    x = random_activations(tokens, layer.in_features, dtype, layer.codes.device)
    arranged = arrange(x, packed, layer.perm)
    y = torch.full((tokens, packed.out_features), 777.0, dtype=dtype, device=x.device)
    if tokens:
        launch(arranged, packed, y, config)
        if not torch.equal(y, launch(arranged, packed, torch.empty_like(y), config)):
            return math.inf
    return relative_error(y, reference_layer(x.double(), layer))


def check_offsets(device: str) -> list[dict]:
    """Codes and outputs of more than 2^31 elements: the last rows, which 32-bit offsets would not reach."""
    from otf_kernels.int8_embedding import int8_embedding, int8_linear

    if torch.cuda.mem_get_info()[0] < OFFSET_MEMORY:
        print(f"offsets past 2^31: skipped, needs {OFFSET_MEMORY >> 30} GiB of free GPU memory")
        return []
    dtype, last = torch.float16, slice(OFFSET_ROWS - 64, OFFSET_ROWS)
    torch.manual_seed(0)
    codes = torch.randint(1, 256, (OFFSET_ROWS, OFFSET_BYTES), dtype=torch.uint8, device=device)
    scales = torch.full((OFFSET_ROWS, 1), 1 / 64, dtype=dtype, device=device)
    layer = Int4Layer("offsets", codes, scales, scales[:, :0].contiguous(), None, 2 * OFFSET_BYTES, 0)
    end = dataclasses.replace(layer, codes=codes[last], scales=scales[last], outliers=layer.outliers[last])
    rows = []
    for tokens in (1, 4100):  # 4100 x 524,300 outputs pass 2^31 too
        x = random_activations(tokens, layer.in_features, dtype, device)
        y = apply_layer(x, layer)[:, last]
        error = relative_error(y, reference_layer(x.double(), end))
        rows.append(result("int4_linear", f"offsets past 2^31, {tokens} tokens", dtype, [error], layer.in_features))
    table = Int8Table("offsets", codes.view(torch.int8), scales[:, 0].contiguous())
    x = random_activations(1, OFFSET_BYTES, dtype, device)
    y = int8_linear(x, table.codes, table.scales)[:, last]
    expected = reference.int8_linear(x.double(), table.codes[last], table.scales[last])
    rows.append(result("int8_linear", "offsets past 2^31", dtype, [relative_error(y, expected)], OFFSET_BYTES))
    ids = torch.arange(OFFSET_ROWS - 64, OFFSET_ROWS, device=device)
    y = int8_embedding(ids, table.codes, table.scales, dtype)
    expected = reference.dequantize_int8(table.codes[last], table.scales[last], torch.float64)
    rows.append(result("int8_embedding", "offsets past 2^31", dtype, [relative_error(y, expected)], 1))
    return rows


def check_graph(device: str) -> list[dict]:
    """A captured launch, replayed on activations that arrived after the capture."""
    from otf_kernels.int4_linear import int4_linear

    layer = random_layer(260, 257, 3, 64, device=device)
    packed = pack(layer)
    x = random_activations(1, layer.in_features, torch.float16, device)
    int4_linear(x, packed, perm=layer.perm)  # compiles, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = int4_linear(x, packed, perm=layer.perm)
    x.copy_(random_activations(3, layer.in_features, torch.float16, device)[2:])
    graph.replay()
    error = relative_error(y, reference_layer(x.double(), layer))
    return [result("int4_linear", "replayed CUDA graph", torch.float16, [error], layer.in_features)]


def check_activations(
    device: str, share: slice, widths: Sequence[tuple[int, int]] = ((576, 1536), (3072, 3080), (28672, 28680))
) -> list[dict]:
    """The kernels between linear layers, in an order with zeros, from one width to another."""
    from otf_kernels import activations

    rows = []
    sizes = list(itertools.product(DTYPES, widths))
    for dtype, (width, out_width) in sizes[share]:
        order = torch.full((out_width,), -1, device=device, dtype=torch.int32)
        order[: min(width, out_width)] = torch.randperm(width, device=device)[:out_width]
        x, residual, gate_up = (random_activations(3, size, dtype, device) for size in (width, width, 2 * width))
        weight = random_activations(1, width, torch.float32, device)[0]
        y, h = activations.rms_norm(x, weight, 1e-5, residual=residual, order=order)
        exact = h.double()
        normalised = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        gate, up = gate_up.double().split(width, -1)
        product = torch.nn.functional.silu(gate) * up
        cases = [
            ("rms_norm", y, normalised), ("silu_mul", activations.silu_mul(gate_up, order=order), product),
            ("arrange", activations.arrange(x, order), x.double()),
        ]  # fmt: skip
        for name, got, expected in cases:
            wanted = torch.where(order < 0, 0, expected[:, order.clamp(min=0).long()])
            rows.append(result(name, f"{width} to {out_width}", dtype, [relative_error(got, wanted)], width))
        head_dim = width // 3
        rotary = head_dim // 4 * 2
        angles = random_activations(3, rotary, torch.float32, device)
        heads = x.double()[:, : 2 * head_dim].unflatten(1, (2, head_dim))
        x1, x2, rest = heads.split((rotary // 2, rotary // 2, head_dim - rotary), -1)
        cos1, cos2 = angles.double().cos()[:, None].chunk(2, -1)
        sin1, sin2 = angles.double().sin()[:, None].chunk(2, -1)
        wanted = torch.cat((x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, rest), -1).flatten(1)
        wanted = torch.cat((wanted, x.double()[:, 2 * head_dim :]), 1)
        got = activations.rope(x.clone(), angles.cos(), angles.sin(), 2, head_dim)
        rows.append(result("rope", f"2 heads of {head_dim}", dtype, [relative_error(got, wanted)], 2))
    return rows


def check_next_token(device: str, share: slice) -> list[dict]:
    """The most likely token, and draws whose frequencies are the softmax's within four standard deviations."""
    from otf_kernels import tokens as next_token

    rows = []
    for dtype, vocabulary in list(itertools.product(DTYPES, (5, 8193, 128256)))[share]:
        logits = random_activations(33, vocabulary, dtype, device)
        wrong = next_token.argmax(logits) != (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        rows.append(result("argmax", f"{vocabulary}", dtype, [float(wrong.sum())], 1))
        draws = 20000
        logits = torch.zeros(draws, vocabulary if vocabulary < 10 else 5, dtype=dtype, device=device)
        logits[:, 0] = 1.0
        heat = torch.full((draws,), 0.7, device=device)
        first = next_token.sample(logits, heat, torch.arange(draws, device=device)) == 0
        likely = float((logits[0].double() / 0.7).softmax(0)[0])
        off = abs(float(first.double().mean()) - likely) / math.sqrt(likely * (1 - likely) / draws)
        rows.append(result("sample", f"{vocabulary}", dtype, [0.0 if off < 4 else math.inf], 1))
    return rows


def result(kernel: str, case: str, dtype: torch.dtype, errors: list[float], num_terms: int) -> dict:
    allowed = tolerance(dtype, num_terms)
    return {
        "kernel": kernel,
        "case": case,
        "dtype": str(dtype).removeprefix("torch."),
        "max_relative_error": max(errors),
        "tolerance": allowed,
        "passed": max(errors) <= allowed,
    }


def compile_all() -> int:
    """Compile the kernels with their smallest and largest tiles for GPUs that are not there; return how many were."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from otf_kernels import activations, int4_portable, int4_prefill, int8_embedding
    from otf_kernels import tokens as next_token

    count = 0

    def ends(tiles: tuple) -> tuple:
        return tiles[0][1], tiles[-1][1]

    def compile_kernel(kernel, pointers: dict, constants: dict, capability: int = 90, **options: int):
        nonlocal count
        count += 1
        signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        return triton.compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", capability, 32), options)

    types = {"*fp16": tl.float16, "*bf16": tl.bfloat16, "*fp32": tl.float32}
    for x in types:
        pointers = {"x": x, "y": x, "scales": "*fp16", "perm": "*i16", "bias": "*fp32", "ids": "*i64"}
        exact = x == "*fp32"
        # Outlier columns of x's dtype beside perm, bias and a split, then the other kind without; every kind of group.
        for same, groups in ((True, -1), (True, 2), (False, 0), (False, 1), (False, 4)):
            outliers = x if same and not exact else "*bf16" if x == "*fp16" else "*fp16"
            constants = {
                "HAS_PERM": same, "HAS_BIAS": same, "GROUPS": groups, "INLINE_PTX": True, "SPLIT": 3 if same else 1,
                "OUTLIER_DTYPE": types[x if outliers == x else "*fp32"],
                "OUTLIER_PRECISION": "ieee" if exact else "tf32",
                "BLOCK_M": 64 if same and not exact else 16, "BLOCK_N": 32 if exact else 128 if same else 64,
                "BLOCK_OUTLIERS": int4_portable.BLOCK_OUTLIERS,
            }  # fmt: skip
            types_4bit = pointers | {
                "words": "*i16",
                "outliers": outliers,
                "row_factors": "*fp32",
                "parts": "*fp32",
                "arrivals": "*i32",
            }
            options = {"num_warps": 8 if same and not exact else 4, "num_stages": 2}
            compile_kernel(int4_portable.int4_portable_kernel, types_4bit, constants, **options)
        pointers["codes"] = "*i8"
        constants = {"BLOCK_COLUMNS": int8_embedding.BLOCK_COLUMNS}
        compile_kernel(int8_embedding.int8_embedding_kernel, pointers, constants)
        for tile in ends(int8_embedding.FLOAT32_TILES if exact else int8_embedding.TILES):
            constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            compile_kernel(int8_embedding.int8_linear_kernel, pointers, constants, **options)
        lone = {"x": x, "y": x, "gate_up": x, "residual": x, "normalised": x, "total": x, "weight": x, "order": "*i32"}
        lone |= {"eps": "fp32", "offset": "fp32"}
        ordered = {"HAS_ORDER": True, "BLOCK": 1024}
        early = {"EARLY": True}
        ordered |= early
        compile_kernel(activations.silu_mul_kernel, lone, ordered)
        compile_kernel(activations.arrange_kernel, lone, {"BLOCK": 1024} | early)
        tables = {"qkv": x, "cos": x, "sin": "*fp32"}
        compile_kernel(activations.rope_kernel, tables, {"BLOCK": 64} | early)
        drawn = {"logits": x, "temperature": "*fp32", "seeds": "*i64", "tokens": "*i64"}
        drawing = {"SAMPLE": True, "BLOCK": next_token.BLOCK}
        compile_kernel(next_token.pick_kernel, drawn, drawing | early, num_warps=16)
        ordered |= {"HAS_RESIDUAL": True, "ROUND_TO_BF16": False, "BLOCK_OUT": 2048}
        compile_kernel(activations.rms_norm_kernel, lone, ordered)
        for per_block in (0, 1, 2, 4):
            constants = {"GROUPS": per_block, "INLINE_PTX": True, "BLOCK_N": int4_prefill.DEQUANTIZED_ROWS}
            types_4bit = {"words": "*i16", "scales": "*fp16", "row_factors": "*fp32", "outliers": "*bf16", "weights": x}
            compile_kernel(int4_prefill.dequantize_kernel, types_4bit, constants)
    # Other generations, with the tiles that a launch chooses there: they must fit the shared memory.
    for capability, shared_memory in OTHER_CAPABILITIES.items():
        early = {"EARLY": capability >= 90}
        ordered |= early
        compile_kernel(activations.rms_norm_kernel, lone, ordered, capability)
        compile_kernel(activations.rope_kernel, tables, {"BLOCK": 64} | early, capability)
        compile_kernel(next_token.pick_kernel, drawn, drawing | early, capability, num_warps=16)
        for block_m, block_n, num_warps, num_stages in int4_portable.HALF_TILES:
            pointers = dict.fromkeys(("x", "y", "outliers"), "*bf16") | {"words": "*i16", "scales": "*fp16"}
            pointers |= dict.fromkeys(("row_factors", "bias", "parts"), "*fp32") | {"perm": "*i16", "arrivals": "*i32"}
            constants = {
                "HAS_PERM": False, "HAS_BIAS": False, "GROUPS": 2, "INLINE_PTX": True, "SPLIT": 2,
                "OUTLIER_DTYPE": tl.bfloat16, "OUTLIER_PRECISION": "tf32", "BLOCK_M": block_m, "BLOCK_N": block_n,
                "BLOCK_OUTLIERS": int4_portable.BLOCK_OUTLIERS,
            }  # fmt: skip
            options = {"num_warps": num_warps, "num_stages": num_stages}
            compiled = compile_kernel(int4_portable.int4_portable_kernel, pointers, constants, capability, **options)
            if compiled.metadata.shared > shared_memory:
                raise ValueError(f"{block_m} x {block_n} takes {compiled.metadata.shared} bytes on {capability}")
    return count + compile_gluon_for_hopper()


def compile_gluon_for_hopper() -> int:
    """Compile the Hopper kernel in every configuration of PACKED_CONFIGS; return how many."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from otf_kernels import hopper, hopper_config

    kernel = hopper.linear_kernel
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kinds = itertools.cycle(((4, 0, 16), (4, 1, 16), (4, 2, 32), (4, 4, 64), (8, 0, 16)))
    variants = list(itertools.product(PACKED_CONFIGS, ("fp16", "bf16")))
    for (values, dtype), (bits, per_block, scale_bits) in zip(variants, kinds, strict=False):
        config = hopper_config.Config(*values)
        scale_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=scale_bits, rank=1)
        planes, factors = 16 // bits, "*fp32" if bits == 4 else "*fp16"
        constants = {
            "HAS_BIAS": per_block > 0, "BITS": bits, "GROUPS": per_block, "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n, "STAGES": config.num_stages, "EARLY": config.early,
            "PERSISTENT": config.split < 1,
        }  # fmt: skip
        types = {
            "x_planes": f"tensordesc<{dtype}[{planes}, {config.block_m}, 64],{dataclasses.replace(layout, rank=3)!r}>",
            "x_tokens": f"tensordesc<{dtype}[{config.block_m}, 64],{layout!r}>",
            "words_rows": f"tensordesc<i16[{config.block_n}, 64],{layout!r}>",
            "outlier_rows": f"tensordesc<fp16[{config.block_n}, 64],{layout!r}>",
            "scale_rows": f"tensordesc<i{scale_bits}[{config.block_n}],{scale_layout!r}>",
            "row_factors": factors, "bias": factors, "y": f"*{dtype}", "parts": "*fp32", "arrivals": "*i32",
        }  # fmt: skip
        signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        options = {"num_warps": config.num_warps, "maxnreg": config.registers, "launch_pdl": True}
        compiled = triton.compile(GluonASTSource(kernel, signature, places), GPUTarget("cuda", 90, 32), options)
        if compiled.metadata.shared > config.shared_memory:
            raise ValueError(f"{values} takes {compiled.metadata.shared} bytes of shared memory, not the planned")
    return len(variants)


def check_odd_shape(device: str) -> list[dict]:
    """Every kernel on one shape that no tile divides, the INT4 ones with their channels shared out as well."""
    from otf_kernels import hopper_config, int4_portable
    from otf_kernels.int4_layout import arrange
    from otf_kernels.int8_embedding import int8_embedding, int8_linear

    layer = random_layer(263, 777, 5, 64, device=device)
    packed = pack(layer)
    tokens = 19
    rows = []
    x = random_activations(tokens, layer.in_features, torch.bfloat16, device)
    for split in (1, 2):
        config = int4_portable.Config(32, 64, 4, 3, split)
        y = torch.empty(tokens, packed.out_features, dtype=x.dtype, device=device)
        int4_portable.launch(x, packed, layer.perm, y, config)
        error = relative_error(y, reference_layer(x.double(), layer))
        rows.append(result("int4_portable", f"{layer.name}, split {split}", x.dtype, [error], layer.in_features))
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    for dtype, split in itertools.product(HALF_DTYPES, (0, 1, 2) if on_hopper else ()):
        config = hopper_config.Config(32, 128, 8, 2, 1, split, early=split != 1)
        error = packed_error(layer, packed, tokens, dtype, config)
        rows.append(result("hopper", f"{layer.name}, split {split}", dtype, [error], layer.in_features))
    x = random_activations(tokens, layer.in_features, torch.float16, device)
    error = relative_error(
        apply_layer(arrange(x, packed, layer.perm), dataclasses.replace(layer, perm=None)),
        reference_layer(x.double(), layer),
    )
    rows.append(result("int4_linear", layer.name, torch.float16, [error], layer.in_features))
    for width, dtype in itertools.product((77, 80), HALF_DTYPES):  # the Hopper kernel reads multiples of 16
        table = random_table(263, width, device=device)
        x = random_activations(tokens, width, dtype, device)
        expected = reference.int8_linear(x.double(), table.codes, table.scales)
        error = relative_error(int8_linear(x, table.codes, table.scales), expected)
        rows.append(result("int8_linear", table.name, dtype, [error], width))
    ids = torch.arange(tokens, device=device) * 7919 % 263
    y = int8_embedding(ids, table.codes, table.scales, torch.float16)
    expected = reference.int8_embedding(ids, table.codes, table.scales, torch.float64)
    rows.append(result("int8_embedding", table.name, torch.float16, [relative_error(y, expected)], 1))
    rows += [*check_activations(device, slice(0, 1), ((77, 83),)), *check_prefill(device, slice(24, 27))]
    return [*rows, *check_next_token(device, slice(1, 9, 3))]


def check_share(share: slice) -> list[dict]:
    """Every ``share.step``-th case from ``share.start``; what cannot be shared out goes with the first."""
    rows = [*check_grid("cuda", share), *check_activations("cuda", share), *check_prefill("cuda", share)]
    rows += check_next_token("cuda", share)
    if torch.cuda.get_device_capability()[0] == 9:
        rows += check_packed("cuda", share)
    elif share.start == 0:
        print("hopper: skipped, needs a GPU of compute capability 9.x")
    return rows if share.start else [*rows, *check_graph("cuda"), *check_offsets("cuda")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder to write gpu_kernels.tsv to")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases: most of the time compiles")
    parser.add_argument("--compile-only", action="store_true", help="compile, without a GPU")
    parser.add_argument("--odd-shape", action="store_true", help="run each kernel on one odd shape, for a sanitizer")
    arguments = parser.parse_args()
    if arguments.compile_only:
        print(f"compiled {compile_all()} kernel variants")
        return 0
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels.py needs a CUDA GPU, and PyTorch sees none; on a CPU run pytest tests/test_kernels.py")
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    shares = [slice(first, None, arguments.jobs) for first in range(arguments.jobs)]
    if arguments.odd_shape:
        rows = check_odd_shape("cuda")
    elif arguments.jobs == 1:
        rows = check_share(shares[0])
    else:
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            rows = [row for found in pool.map(check_share, shares, chunksize=1) for row in found]
    for row in rows:
        verdict = "ok" if row["passed"] else "FAILED"
        print(
            f"{row['kernel']:15} {row['case']:40} {row['dtype']:9} {row['max_relative_error']:.2e} "
            f"(at most {row['tolerance']:.2e}) {verdict}"
        )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with open(arguments.out / "gpu_kernels.tsv", "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=rows[0], delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
