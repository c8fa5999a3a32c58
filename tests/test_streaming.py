"""The two-pass writer: readable by safetensors, in any order, whole or not at all."""

import resource

import pytest
import torch
from safetensors.torch import load_file

from otf_llm.streaming import SafetensorsWriter, TensorSpec, load_tensors, save_tensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool]


def test_every_dtype_and_empty_tensors_come_back(tmp_path):
    tensors = {str(d): torch.arange(6).reshape(2, 3).to(d) for d in DTYPES} | {"empty": torch.zeros(3, 0)}
    save_tensors(tmp_path / "x.safetensors", tensors, {"b": 1, "a": [2]})
    loaded, metadata = load_tensors(tmp_path / "x.safetensors")
    assert metadata == {"b": 1, "a": [2]}
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_rows_may_come_in_blocks_and_out_of_order(tmp_path):
    tensor = torch.randn(7, 3)
    specs = [TensorSpec("w", torch.float32, (7, 3)), TensorSpec("b", torch.float16, (2,))]
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, specs) as writer:
        writer.write_rows("w", tensor[5:], 5)
        writer.write("b", torch.ones(2, dtype=torch.float16))
        writer.write_rows("w", tensor[[4, 0, 2]], 0, torch.tensor([4, 0, 2]))
        writer.write_rows("w", tensor[[1, 3]], 0, torch.tensor([1, 3]))
        assert not path.exists(), "nothing stands under the final name before every byte is there"
    assert torch.equal(load_file(path)["w"], tensor)
    assert path.stat().st_size == writer.size_bytes
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_bytes_do_not_depend_on_the_order_of_the_specs(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8), "c": torch.ones(1)}
    save_tensors(tmp_path / "1.safetensors", tensors, {"x": 1, "y": 2})
    save_tensors(tmp_path / "2.safetensors", dict(reversed(tensors.items())), {"y": 2, "x": 1})
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()


def write_one(path, rows, *, start=0, dtype=torch.float32):
    with SafetensorsWriter(path, [TensorSpec("w", torch.float32, (4, 2))]) as writer:
        writer.write_rows("w", rows.to(dtype), start)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (torch.zeros(3, 2), {}, "1 tensors were not written whole"),
        (torch.zeros(4, 3), {}, "does not fit"),
        (torch.zeros(4, 2), {"dtype": torch.float16}, "does not fit"),
        (torch.zeros(4, 2), {"start": 1}, "rows 1..5 of 4"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path, rows, options, message):
    with pytest.raises(ValueError, match=message):
        write_one(tmp_path / "x.safetensors", rows, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_survives_a_failed_write(tmp_path):
    path = tmp_path / "x.safetensors"
    write_one(path, torch.ones(4, 2))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not written whole"):
        write_one(path, torch.zeros(1, 2))
    assert path.read_bytes() == before


def test_a_full_disk_names_the_path_and_leaves_nothing(tmp_path):
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"big\.safetensors"):
            save_tensors(tmp_path / "big.safetensors", {"w": torch.zeros(100, 100)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_something_else_is_no_safetensors_file(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"x\.safetensors is not a readable safetensors file"):
        load_tensors(tmp_path / "x.safetensors")
