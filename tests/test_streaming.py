"""The two-pass writer: readable by safetensors, in any order, whole or not at all."""

import errno
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from otf_llm import written_hash
from otf_llm.checkpoint import read_header
from otf_llm.files import sha256
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


@pytest.mark.parametrize("gathered_bytes", [0, 1 << 24])
def test_rows_may_come_in_blocks_and_out_of_order(tmp_path, monkeypatch, gathered_bytes):
    monkeypatch.setattr("otf_llm.streaming.GATHERED_BYTES", gathered_bytes)
    tensor, plain = torch.randn(7, 3), torch.randn(4, 2)
    specs = [
        TensorSpec("w", torch.float32, (7, 3)),
        TensorSpec("b", torch.float16, (2,)),
        TensorSpec("plain", torch.float32, (4, 2)),
        TensorSpec("empty", torch.float16, (7, 0)),
    ]
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, specs, hashed=True) as writer:
        for order in ([6, 5], [4, 0, 2], [1, 3]):
            writer.write_rows("w", tensor[order], 0, torch.tensor(order))
            writer.write_rows("empty", torch.empty(len(order), 0, dtype=torch.float16), 0, torch.tensor(order))
        writer.write("b", torch.ones(2, dtype=torch.float16))
        writer.write_rows("plain", plain[2:], 2)
        writer.write_rows("plain", plain[:2], 0)
        assert not path.exists(), "nothing stands under the final name before every byte is there"
    assert torch.equal(load_file(path)["w"], tensor)
    assert torch.equal(load_file(path)["plain"], plain)
    assert path.stat().st_size == writer.size_bytes
    assert writer.sha256 == sha256(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_blocks_with_and_without_an_order_do_not_mix(tmp_path):
    def mixed():
        with SafetensorsWriter(tmp_path / "x.safetensors", [TensorSpec("w", torch.float32, (4, 3))]) as writer:
            writer.write_rows("w", torch.ones(2, 3), 2)
            writer.write_rows("w", torch.ones(2, 3), 0, torch.tensor([0, 1]))

    with pytest.raises(ValueError, match="w: some of its blocks"):
        mixed()
    assert not list(tmp_path.iterdir())


def test_the_bytes_do_not_depend_on_the_order_of_the_specs(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8), "c": torch.ones(1)}
    save_tensors(tmp_path / "1.safetensors", tensors, {"x": 1, "y": 2})
    save_tensors(tmp_path / "2.safetensors", dict(reversed(tensors.items())), {"y": 2, "x": 1})
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()


def test_tensors_lie_in_the_order_of_their_specs_and_aligned(tmp_path):
    shapes = {
        "z": (torch.int8, (3, 8)),
        "odd": (torch.int8, (3,)),
        "a": (torch.float32, (2, 2)),
        "half": (torch.float16, (5,)),
    }
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in shapes.items()]
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, specs) as writer:
        for spec in specs:
            writer.write(spec.name, torch.ones(spec.shape, dtype=spec.dtype))
    infos = read_header(path)
    assert [info.name for info in infos] == ["z", "a", "half", "odd"]
    for info in infos:
        assert info.offset % DTYPE_SIZES[info.dtype] == 0, info.name


DTYPE_SIZES = {"I8": 1, "F16": 2, "F32": 4}


@pytest.mark.parametrize("seed", range(5))
def test_the_hash_follows_blocks_in_any_order(tmp_path, monkeypatch, seed):
    """Blocks from several threads, some with their rows shuffled; reads and syncs of a few bytes at a time."""
    monkeypatch.setattr(written_hash, "READ_BYTES", 100)
    monkeypatch.setattr(written_hash, "SYNC_BYTES", 1000)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(60, 7, generator=generator) for name in "abc"} | {
        "d": torch.randn(3, generator=generator)
    }
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    path = tmp_path / "x.safetensors"
    blocks = [(name, start) for name in "abc" for start in range(0, 60, 12)]
    blocks = [blocks[i] for i in torch.randperm(len(blocks), generator=generator).tolist()]
    order = torch.randperm(60, generator=generator)
    with SafetensorsWriter(path, specs, hashed=True) as writer, ThreadPoolExecutor(3) as pool:

        def put(block):
            name, start = block
            if name == "b":
                rows = order[start : start + 12]
                writer.write_rows(name, tensors[name][rows], start, rows)
            else:
                writer.write_rows(name, tensors[name][start : start + 12], start)

        list(pool.map(put, blocks))
        writer.write("d", tensors["d"])
    assert writer.sha256 == sha256(path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(path).items())


def test_a_failed_write_ends_the_thread_that_hashes(tmp_path):
    before = threading.active_count()
    with pytest.raises(ValueError, match="not written whole"):
        with SafetensorsWriter(tmp_path / "x", [TensorSpec("w", torch.float32, (4, 2))], hashed=True):
            pass
    with pytest.raises(KeyError):
        with SafetensorsWriter(tmp_path / "x", [TensorSpec("w", torch.float32, (4, 2))], hashed=True) as writer:
            writer.write("v", torch.zeros(2))
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_thread_that_hashes_is_told(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(written_hash.os, "fdatasync", full)
    monkeypatch.setattr(written_hash, "SYNC_BYTES", 1)
    path = tmp_path / "x.safetensors"
    with pytest.raises(OSError, match=r"x\.safetensors"):
        with SafetensorsWriter(path, [TensorSpec("w", torch.float32, (4, 2))], hashed=True) as writer:
            writer.write("w", torch.zeros(4, 2))
    assert list(tmp_path.iterdir()) == []


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
