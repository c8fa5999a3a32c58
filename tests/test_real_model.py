"""The embedded model through the real pipeline: what the default has to reach, and that it speaks.

The model comes from the package index, as for a user; nothing is skipped when it cannot be had.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

import otf_llm  # noqa: F401 - transformers loads a converted folder only after it
from imports import REPOSITORY

MODEL = "smollm2-135m-instruct"
WIKITEXT = REPOSITORY.parent / "shared" / "data" / "wiki.test.raw"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Results of the default configuration with two of its schemes."""
    work = tmp_path_factory.mktemp("real")
    (work / "few.yaml").write_text("schemes: [int4-naive, int4]\n")
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile"), "--cores", "1"]
    command += ["--configfile", str(work / "few.yaml"), "--directory", str(work)]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return work / "results"


def test_the_default_keeps_most_of_what_the_naive_method_loses(results):
    summary = pd.read_csv(results / "tables" / "summary.csv").set_index("scheme")
    default, naive = summary.loc["int4"], summary.loc["int4-naive"]
    assert default.bits_per_weight <= 4.4
    assert default.perplexity_rise <= 0.35 * naive.perplexity_rise
    assert default.kld <= 0.4 * naive.kld
    assert default.kernels_passed.split("/")[0] == default.kernels_passed.split("/")[1]


def test_the_capital_of_france_is_paris(results):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = results / "convert" / MODEL / "int4"
    report = json.loads((results / "validate" / MODEL / "int4" / "fidelity.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    limit = yaml.safe_load((REPOSITORY / "config.yaml").read_text())["validate"]["max_new_tokens"]
    output = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
    text = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.startswith(" Paris")
    assert text == report["samples"][0]["text"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert "<|im_start|>user\nHello<|im_end|>" in chat
    assert model.generation_config.eos_token_id == 2
    assert "Apache License" in (folder / "LICENSE").read_text()


@pytest.mark.skipif(not WIKITEXT.exists(), reason="needs the WikiText-2 test split, which is not part of the project")
def test_divergence_on_wikitext(results, tmp_path):
    """KLD over the first 16 windows of 2,048 tokens, calibrated on plays (naive rounding: 0.44)."""
    from transformers import AutoTokenizer

    from otf_llm.evaluation import evaluate, load_model, reference_states

    source, folder = results / "source" / MODEL / "checkpoint", results / "convert" / MODEL / "int4"
    ids = AutoTokenizer.from_pretrained(source)(WIKITEXT.read_text())["input_ids"][: 16 * 2048]
    windows = list(torch.tensor(ids).view(16, 2048))
    model = load_model(source, torch.float32, "cpu")
    reference_states(model, windows, tmp_path / "states.safetensors")
    packed = load_model(folder, torch.float32, "cpu")
    fidelity = evaluate(packed, windows, tmp_path / "states.safetensors", model.get_output_embeddings())
    assert fidelity.num_tokens == 16 * 2048
    assert fidelity.kld <= 0.16
