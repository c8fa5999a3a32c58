"""Speed of the INT4 kernel against cuBLAS FP16 and other 4-bit kernels, on one GPU in one run.

Every backend multiplies the same activations by weights of the same shape. Before anything is timed its result is
compared with a float64 product of the very weights that it stores. A time is that of one launch in a CUDA graph that
goes through enough copies of the weights to find none of them in the L2 cache: the median over many replays.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from otf_kernels.timing import event_times, launch_times, num_copies
from otf_llm.files import atomic_path
from otf_llm.packing import pack_int4

SHAPES = ((8192, 28672), (28672, 8192), (18944, 3584), (3584, 18944), (8192, 3072), (3072, 8192), (3072, 3072))
TOKENS = (1, 16, 64, 128, 2048)
MOST_PEER_TOKENS = 128  # beyond which kernels for decoding are not measured, but cuBLAS and ours
COPY_BYTES = 1 << 30
REPLAYS = 25
MOST_ERROR = 5e-4  # relative, of ours in half precision
COLUMNS = [
    "n",
    "k",
    "m",
    "backend",
    "time_us",
    "speedup_vs_fp16",
    "copy_fraction",
    "relative_error",
    "low_us",
    "high_us",
]

Launch = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Prepared:
    """A backend's weights of one shape: launches over different copies, what they multiply by, bytes a launch reads."""

    launches: Sequence[Launch]
    weights: torch.Tensor  # float64 [N, K]
    num_bytes: int
    dtype: torch.dtype = torch.float16
    arrange: Launch | None = None  # brings x into the order in which the backend wants to be given it, before timing


@dataclass(frozen=True)
class RandomLayer:
    """INT4 codes of random weights with FP16 columns, as a converted folder stores them."""

    q: torch.Tensor  # int8 [N, K - num_outliers]
    scales: torch.Tensor  # float16 [N, G]
    outliers: torch.Tensor  # float16 [N, num_outliers]
    group_size: int

    @property
    def in_features(self) -> int:
        return self.q.shape[1] + self.outliers.shape[1]

    def dense(self) -> torch.Tensor:
        scales = self.scales.double().repeat_interleave(self.group_size, 1)[:, : self.q.shape[1]]
        return torch.cat((self.outliers.double(), self.q.double() * scales), 1)


def benchmark_kernels(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    group_size: int = 128,
    outlier_fraction: float = 0.01,
    seed: int = 0,
    tune_seconds: float = 0.0,
    jobs: int = 1,
) -> pd.DataFrame:
    """Measure every backend that is installed; rows as COLUMNS says, in the order of shapes, tokens and backends.

    ``time_us`` is the median of a launch in microseconds, ``low_us`` and ``high_us`` its 10th and 90th percentile,
    ``copy_fraction`` the bytes that a launch has to move over its time, in parts of the copy bandwidth measured in the
    same run, and ``relative_error`` that of Frobenius norms, against float64. With ``tune_seconds`` our kernel's
    configurations are measured first, that long for each shape and number of tokens, and kept (``otf_kernels.tuning``);
    what has to be compiled for that is compiled by ``jobs`` processes.

    Raises ValueError without a Hopper GPU, and, before anything is timed, when our result is off by more than 5e-4.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise ValueError("the kernel benchmark needs a Hopper GPU (compute capability 9.x)")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    if tune_seconds > 0:
        from otf_kernels.tuning import compile_ahead

        layers = [(k, n, round(k * outlier_fraction)) for n, k in shapes]
        logging.info("compiled %d kernels", compile_ahead(layers, tokens, jobs))
    for shape in shapes:
        layer = random_layer(*shape, group_size, outlier_fraction, generator)
        for num_tokens in tokens:
            if tune_seconds > 0:
                config = _tuned(layer, num_tokens, tune_seconds)
                logging.info("%d x %d, %d tokens: %s", *shape, num_tokens, config)
            _check_ours(layer, num_tokens, generator)
    bandwidth = copy_bandwidth()
    logging.info("copy bandwidth %.2f TB/s", bandwidth / 1e12)
    backends = _backends()
    rows = []
    for shape in shapes:
        layer = random_layer(*shape, group_size, outlier_fraction, generator)
        for name, prepare in backends.items():
            prepared = prepare(layer, None)
            for num_tokens in tokens:
                if num_tokens > MOST_PEER_TOKENS and name not in ("otf", "cublas_fp16"):
                    continue
                x = torch.randn(num_tokens, layer.in_features, device="cuda", generator=generator).to(prepared.dtype)
                error = _relative_error(prepared, x)
                given = x if prepared.arrange is None else prepared.arrange(x)
                launches = [functools.partial(launch, given) for launch in prepared.launches]
                low, median, high = launch_times(launches, REPLAYS)
                moved = prepared.num_bytes + x.element_size() * num_tokens * sum(shape)
                rows.append((*shape, num_tokens, name, median, moved / bandwidth / median * 1e6, error, low, high))
                logging.info("%d x %d, %d tokens, %s: %.2f us, relative error %.1e", *rows[-1][:5], error)
            del prepared, launches
            torch.cuda.empty_cache()
    return _with_speedup(pd.DataFrame(rows, columns=[name for name in COLUMNS if name != "speedup_vs_fp16"]))


def _check_ours(layer: RandomLayer, num_tokens: int, generator: torch.Generator) -> None:
    x = torch.randn(num_tokens, layer.in_features, device="cuda", generator=generator).half()
    error = _relative_error(_prepare_otf(layer, 1), x)
    if not error <= MOST_ERROR:
        raise ValueError(
            f"otf's result for {layer.q.shape[0]} x {layer.in_features} and {num_tokens} tokens is off by {error:.2e}, "
            f"more than {MOST_ERROR}: nothing was timed"
        )


def _with_speedup(table: pd.DataFrame) -> pd.DataFrame:
    """The table with speed over cuBLAS FP16, by shape, tokens and backend in the order in which they came first."""
    keys = ["n", "k", "m"]
    baseline = table[table["backend"] == "cublas_fp16"].set_index(keys)["time_us"]
    table["speedup_vs_fp16"] = [
        baseline[key] / time for key, time in zip(table[keys].itertuples(index=False), table["time_us"], strict=True)
    ]
    place = table.groupby(["n", "k"], sort=False).ngroup()
    return table.assign(place=place).sort_values(["place", "m"], kind="stable")[COLUMNS].reset_index(drop=True)


def random_layer(
    num_rows: int, in_features: int, group_size: int, outlier_fraction: float, generator: torch.Generator
) -> RandomLayer:
    """A layer of random codes, scales and outlier columns on the generator's device."""
    device = generator.device
    num_outliers = round(in_features * outlier_fraction)
    columns = in_features - num_outliers
    q = torch.randint(-7, 8, (num_rows, columns), dtype=torch.int8, device=device, generator=generator)
    groups = -(-columns // group_size)
    scales = torch.rand(num_rows, groups, device=device, generator=generator) / 16 + 1 / 64
    outliers = torch.randn(num_rows, num_outliers, device=device, generator=generator) / 4
    return RandomLayer(q, scales.half(), outliers.half(), group_size)


def copy_bandwidth() -> float:
    """Bytes a second read and written by a copy of 1 GiB within the GPU's memory, the median of thirty."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = event_times(lambda: target.copy_(source), 30)
    return 2 * COPY_BYTES / statistics.median(times)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write the table as CSV, numbers with four significant digits."""
    with atomic_path(path) as unfinished:
        table.to_csv(unfinished, index=False, float_format="%.4g", lineterminator="\n")


def write_plot(table: pd.DataFrame, path: Path, dpi: int = 150) -> None:
    """Speed over cuBLAS FP16 by shape, a panel for each number of tokens, a mark for each backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tokens = list(dict.fromkeys(table["m"]))
    backends = list(dict.fromkeys(table["backend"]))
    shapes = list(dict.fromkeys(zip(table["n"], table["k"], strict=True)))
    figure = Figure(figsize=(2.6 * len(tokens) + 1.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tokens), sharey=True, squeeze=False)[0]
    for panel, num_tokens in zip(panels, tokens, strict=True):
        for backend, mark in zip(backends, "osD^vP", strict=False):
            rows = table[(table["m"] == num_tokens) & (table["backend"] == backend)].set_index(["n", "k"])
            if rows.empty:
                continue
            speeds = [rows["speedup_vs_fp16"].get(shape) for shape in shapes]
            panel.plot(speeds, range(len(shapes)), mark, label=backend, markersize=5)
        panel.axvline(1, color="#b8b8b8", linewidth=0.8)
        panel.set(title=f"{num_tokens:,} token{'s' * (num_tokens > 1)}", xlabel="speed over cuBLAS FP16")
        panel.set_xlim(left=0)
    panels[0].set_yticks(range(len(shapes)), [f"{n} × {k}" for n, k in shapes])
    panels[0].invert_yaxis()
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(backends), frameon=False
    )
    with atomic_path(path) as unfinished:
        figure.savefig(unfinished, dpi=dpi, format=path.suffix[1:], metadata={"Software": None})


def _backends() -> dict[str, Callable[[RandomLayer, int | None], Prepared]]:
    """Backends that can run here by name; why another cannot is logged."""
    found = {"otf": _prepare_otf, "cublas_fp16": _prepare_cublas, "tinygemm": _prepare_tinygemm}
    for name, module, prepare in (
        ("gemlite", "gemlite", _prepare_gemlite), ("bitsandbytes", "bitsandbytes", _prepare_bitsandbytes)
    ):  # fmt: skip
        try:
            __import__(module)
        except ImportError as error:
            logging.info("%s is left out: %s", name, error)
        else:
            found[name] = prepare
    return found


def _prepare_cublas(layer: RandomLayer, copies: int | None) -> Prepared:
    dense = layer.dense()
    weights = dense.half()
    num_bytes = weights.numel() * 2
    held = [weights, *(weights.clone() for _ in range((copies or num_copies(num_bytes)) - 1))]
    return Prepared([lambda x, w=w: torch.matmul(x, w.T) for w in held], weights.double(), num_bytes)


def _prepare_otf(layer: RandomLayer, copies: int | None) -> Prepared:
    """Activations are given in the kernel's order, in which the kernel before it writes them."""
    from otf_kernels.int4_layout import arrange
    from otf_kernels.int4_linear import int4_linear

    packed = _packed(layer)
    held = [packed]
    for _ in range((copies or num_copies(packed.num_bytes)) - 1):
        tensors = ("words", "scales", "row_factors", "outliers", "arrivals")
        held.append(dataclasses.replace(packed, **{name: getattr(packed, name).clone() for name in tensors}))
    return Prepared(
        [lambda x, p=p: int4_linear(x, p) for p in held],
        layer.dense(),
        packed.num_bytes,
        arrange=lambda x: arrange(x, packed).contiguous(),
    )


def _packed(layer: RandomLayer):
    from otf_kernels.int4_layout import pack_layer

    return pack_layer(
        pack_int4(layer.q), layer.scales, layer.outliers, in_features=layer.in_features, group_size=layer.group_size
    )


def _tuned(layer: RandomLayer, num_tokens: int, seconds: float):
    from otf_kernels.tuning import tune

    return tune(_packed(layer), num_tokens, seconds=seconds)


def _prepare_tinygemm(layer: RandomLayer, copies: int | None) -> Prepared:
    """PyTorch's own INT4 kernel, in bfloat16 and without FP16 columns: every column is a code."""
    q, scales = _all_columns(layer)
    u = (q + 8).to(torch.uint8)
    pairs = u[:, ::2] << 4 | u[:, 1::2]
    tiles = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scales = scales.bfloat16()
    both = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous()
    num_bytes = tiles.numel() * tiles.element_size() + both.numel() * 2
    held = [(tiles.clone(), both.clone()) for _ in range(copies or num_copies(num_bytes))]
    return Prepared(
        [
            lambda x, t=t, s=s: torch.ops.aten._weight_int4pack_mm(x, t, layer.group_size, s)
            for t, s in held
        ],
        _scaled(q, scales, layer.group_size),
        num_bytes,
        torch.bfloat16,
    )  # fmt: skip


def _prepare_gemlite(layer: RandomLayer, copies: int | None) -> Prepared:
    """gemlite's Triton kernels, without FP16 columns."""
    from gemlite.core import DType, GemLiteLinear

    q, scales = _all_columns(layer)
    held = []
    for _ in range(copies or num_copies(q.numel() // 2)):
        linear = GemLiteLinear(
            4, layer.group_size, layer.in_features, q.shape[0], input_dtype=DType.FP16, output_dtype=DType.FP16
        )
        linear.pack((q + 8).to(torch.uint8), scales, torch.full_like(scales, 8), None)
        held.append(linear)
    num_bytes = q.numel() // 2 + scales.numel() * 2
    return Prepared(held, _scaled(q, scales, layer.group_size), num_bytes)


def _prepare_bitsandbytes(layer: RandomLayer, copies: int | None) -> Prepared:
    """NF4 in blocks of 64, without FP16 columns."""
    from bitsandbytes import functional, matmul_4bit

    dense = layer.dense().half()
    num_bytes = dense.numel() // 2 + dense.numel() // 64 * 4
    held = [
        functional.quantize_4bit(dense, blocksize=64, quant_type="nf4") for _ in range(copies or num_copies(num_bytes))
    ]
    weights = functional.dequantize_4bit(*held[0]).double()
    launches = [
        lambda x, codes=codes, state=state: matmul_4bit(x, codes.t(), quant_state=state) for codes, state in held
    ]
    return Prepared(launches, weights, num_bytes)


def _all_columns(layer: RandomLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [N, K] and scales float16 [N, K / group_size] for kernels that know no FP16 columns."""
    missing = layer.in_features - layer.q.shape[1]
    q = torch.cat((layer.q, layer.q[:, :missing]), 1)
    groups = q.shape[1] // layer.group_size
    return q, layer.scales[:, torch.arange(groups, device=q.device) % layer.scales.shape[1]].contiguous()


def _scaled(q: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    return q.double() * scales.double().repeat_interleave(group_size, 1)


def _relative_error(prepared: Prepared, x: torch.Tensor) -> float:
    y = prepared.launches[0](x if prepared.arrange is None else prepared.arrange(x)).double()
    expected = x.double() @ prepared.weights.T
    return float((y - expected).norm() / expected.norm())
