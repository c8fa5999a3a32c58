"""Converting tensors of a 70B model's size takes a few row blocks of memory, whatever their size."""

import json
import subprocess
import sys
import textwrap

import pytest

from otf_llm.decoder import expected_shapes, read_config
from otf_llm.files import write_json
from otf_llm.memory import peak_memory

LIMIT_MB = 500
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
CONVERT = textwrap.dedent(
    """
    import json, resource, sys
    from pathlib import Path
    resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]) * 10**6,) * 2)
    import torch
    torch.set_num_threads(1)
    from otf_llm.calibration_profile import ActivationStatistics
    from otf_llm.checkpoint import Checkpoint
    from otf_llm.conversion import Recipe, convert_shard
    from otf_llm.decoder import decoder_inputs, read_config
    from otf_llm.families import HEAD_INPUT
    from otf_llm.permutation import ChannelStatistics, plan_permutation
    from otf_llm.settings import SchemeSettings
    from otf_llm.memory import peak_memory

    checkpoint = Checkpoint.open(Path(sys.argv[1]))
    family, geometry = read_config(checkpoint.config)
    widths = {name: geometry.sizes[i.width] for name, _, i in decoder_inputs(family, geometry)}
    widths[HEAD_INPUT] = geometry.hidden_size
    sums = {name: torch.linspace(1, 2, width, dtype=torch.float64) for name, width in widths.items()}
    statistics = {name: ActivationStatistics(vector, vector, 1) for name, vector in sums.items()}
    channels = {name: ChannelStatistics(vector, vector, vector.float()) for name, vector in sums.items()}
    scheme = SchemeSettings()
    permutation = plan_permutation(family, geometry, channels, scheme.permutation)
    recipe = Recipe(family, geometry, scheme, permutation, statistics)
    report = convert_shard(checkpoint, checkpoint.shards, recipe, Path(sys.argv[1], "out"), workers=2)
    actions = sorted({row["action"] for row in report["tensors"]})
    print(json.dumps([actions, peak_memory() / 1e6]))
    """
)


@pytest.fixture
def sparse_checkpoint(tmp_path):
    """One layer, embedding and head of a 70B model: 5.9 GB of zeros that take no room on disk."""
    shapes = expected_shapes(*read_config(CONFIG))
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


def test_conversion_at_70b_geometry_stays_below_500_mb(sparse_checkpoint):
    command = [sys.executable, "-c", CONVERT, str(sparse_checkpoint), str(LIMIT_MB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    actions, peak_mb = json.loads(done.stdout)
    assert actions == ["copied", "int4", "int8"]
    assert peak_mb < LIMIT_MB
    (sparse_checkpoint / "out").unlink()


def test_the_limit_of_that_test_bites(sparse_checkpoint):
    """Under a limit that torch alone reaches, the same command fails: the limit is one."""
    command = [sys.executable, "-c", CONVERT, str(sparse_checkpoint), "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert not (sparse_checkpoint / "out").exists()


def test_peak_memory_is_this_process_s_own():
    """ru_maxrss would tell of the parent, which holds 300 MB when it starts the child."""
    held = bytearray(b"x" * 300_000_000)
    code = "from otf_llm.memory import peak_memory; print(peak_memory())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert len(held) < peak_memory()
    assert child < 100e6
