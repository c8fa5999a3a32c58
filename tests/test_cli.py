"""The command otf-llm: what it says where it cannot run, and what it draws."""

import pandas as pd
import pytest
import torch

from otf_llm import kernel_benchmark, reference
from otf_llm.cli import main
from otf_llm.packing import pack_int4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys, tmp_path):
    assert main(["bench", "kernels", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: the kernel benchmark needs a Hopper GPU (compute capability 9.x)\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option",
    [
        ["--shapes", "8192"],
        ["--shapes", "8xk"],
        ["--tokens", "0"],
        ["--tokens", "-1"],
        ["--tune", "nan"],
        ["--jobs", "0"],
    ],
)
def test_bad_options(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "kernels", *option])
    assert stopped.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_random_layer_is_a_stored_layer():
    """Its dense weights are those that a converted folder with the same tensors stands for."""
    layer = kernel_benchmark.random_layer(5, 300, 64, 0.01, torch.Generator().manual_seed(1))
    assert layer.outliers.shape == (5, 3)
    x = torch.randn(2, 300, dtype=torch.float64)
    stored = reference.int4_linear(x, pack_int4(layer.q), layer.scales, layer.outliers, in_features=300, group_size=64)
    torch.testing.assert_close(x @ layer.dense().T, stored)


def test_weights_of_peers_that_know_no_outliers():
    layer = kernel_benchmark.random_layer(4, 256, 64, 0.05, torch.Generator().manual_seed(1))
    q, scales = kernel_benchmark._all_columns(layer)
    assert q.shape == (4, 256)
    assert scales.shape == (4, 4)
    assert torch.equal(q[:, : layer.q.shape[1]], layer.q)


def test_speedup_is_over_cublas_of_the_same_row():
    columns = [name for name in kernel_benchmark.COLUMNS if name != "speedup_vs_fp16"]
    rows = [
        (n, k, m, backend, time * m, 0.5, 1e-4, 1.0, 2.0)
        for n, k in ((8, 4), (2, 4))
        for backend, time in (("otf", 2.0), ("cublas_fp16", 6.0))
        for m in (1, 16)
    ]
    table = kernel_benchmark._with_speedup(pd.DataFrame(rows, columns=columns))
    assert list(table.columns) == kernel_benchmark.COLUMNS
    assert [tuple(row) for row in table[["n", "m", "backend", "speedup_vs_fp16"]].itertuples(index=False)] == [
        (n, m, *pair) for n in (8, 2) for m in (1, 16) for pair in (("otf", 3.0), ("cublas_fp16", 1.0))
    ]


def test_table_and_plot(tmp_path):
    rows = [
        (n, k, m, backend, 10.0 * m, 1.0 + place, 0.5, 1e-4, 9.0, 11.0)
        for n, k in ((3072, 3072), (8192, 28672))
        for m in (1, 16)
        for place, backend in enumerate(("otf", "cublas_fp16", "tinygemm"))
    ]
    table = pd.DataFrame(rows, columns=kernel_benchmark.COLUMNS)
    kernel_benchmark.write_table(table, tmp_path / "kernels.csv")
    kernel_benchmark.write_plot(table, tmp_path / "kernels.png")
    read = pd.read_csv(tmp_path / "kernels.csv")
    assert list(read.columns) == kernel_benchmark.COLUMNS
    pd.testing.assert_frame_equal(read, table, check_dtype=False)
    assert (tmp_path / "kernels.png").read_bytes()[:4] == b"\x89PNG"
