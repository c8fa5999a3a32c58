"""The command ``otf-llm``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; a ValueError or OSError becomes one line on stderr and exit status 1."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="otf-llm", description="Measure what the kernels do on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="benchmarks")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    kernels = kinds.add_parser("kernels", help="INT4 against cuBLAS FP16 and other 4-bit kernels, on a Hopper GPU")
    kernels.add_argument("--out", type=Path, default=Path("."), help="folder for kernels.csv and kernels.png")
    kernels.add_argument("--shapes", type=_shape, nargs="+", metavar="NxK", help="output features x input channels")
    kernels.add_argument("--tokens", type=_positive, nargs="+", metavar="M", help="numbers of tokens")
    kernels.add_argument(
        "--tune", type=_positive, default=0, metavar="SECONDS",
        help="first look for the fastest configuration of each shape and number of tokens, this long for each",
    )  # fmt: skip
    kernels.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="processes that compile what --tune tries"
    )
    kernels.set_defaults(run=_bench_kernels)
    return parser


def _bench_kernels(parsed: argparse.Namespace) -> None:
    from otf_llm.kernel_benchmark import benchmark_kernels, write_plot, write_table

    parsed.out.mkdir(parents=True, exist_ok=True)
    chosen = {"shapes": parsed.shapes, "tokens": parsed.tokens}
    chosen = {name: value for name, value in chosen.items() if value}
    table = benchmark_kernels(tune_seconds=parsed.tune, jobs=parsed.jobs, **chosen)
    write_table(table, parsed.out / "kernels.csv")
    write_plot(table, parsed.out / "kernels.png")
    print(table.to_string(index=False, float_format="%.4g"))


def _shape(text: str) -> tuple[int, int]:
    num_rows, _, in_features = text.partition("x")
    return _positive(num_rows), _positive(in_features)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a positive whole number is wanted, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
