"""Whether a scheme suits a model, told from the two descriptions alone: before a weight is read, or a token made."""

from __future__ import annotations

import math
from dataclasses import replace

from otf_llm.decoder import Geometry, decoder_linears, matched_linears
from otf_llm.families import Family, language_model_config
from otf_llm.settings import COMPRESSED_TENSORS, SchemeSettings

NIBBLES_PER_WORD = 8  # of compressed-tensors' int32; a word of them has the bytes of ours


def check_scheme(scheme: SchemeSettings, family: Family, geometry: Geometry) -> None:
    """Raises ValueError where a scheme does not suit a model, as the functions below do."""
    kept = matched_linears(family, geometry, scheme.keep)
    head_treatment(scheme, family, geometry, kept)
    if scheme.export == COMPRESSED_TENSORS:
        check_exportable(scheme, family, geometry, kept)


def check_lengths(values: dict, lengths: dict[str, int]) -> None:
    """Raises ValueError naming a setting (key → tokens) that is longer than a configuration's context."""
    context = language_model_config(values).get("max_position_embeddings")
    for key, tokens in lengths.items():
        if type(context) is int and tokens > context:
            raise ValueError(f"{key}: {tokens} tokens are more than the model's max_position_embeddings, {context}")


def head_treatment(scheme: SchemeSettings, family: Family, geometry: Geometry, kept: dict[str, str]) -> str:
    """What becomes of the head: ``tied``, ``int4`` or ``keep``.

    Raises ValueError for a head to be tied that is not, and where ``lm_head`` asks for one thing and ``keep`` for
    another.
    """
    if family.head not in kept:
        return scheme.head_for(geometry.tied)
    if scheme.lm_head not in ("auto", "keep"):
        raise ValueError(f"keep: {kept[family.head]!r} matches the head, but lm_head is {scheme.lm_head}")
    return replace(scheme, lm_head="keep").head_for(geometry.tied)


def check_exportable(scheme: SchemeSettings, family: Family, geometry: Geometry, kept: dict[str, str]) -> None:
    """Refuse a model whose linears compressed-tensors' pack-quantized layout cannot hold.

    Raises ValueError naming them: experts, and widths that words of eight codes or whole groups do not divide.
    """
    step = math.lcm(NIBBLES_PER_WORD, scheme.group_size or 1)
    odd = []
    for name, _, linear in decoder_linears(family, geometry):
        width = geometry.linear_shape(linear)[1]
        if linear.expert is not None:
            raise ValueError(f"export: {COMPRESSED_TENSORS} of models with experts is not supported: {name}")
        if width % step and name not in kept:
            odd.append(f"{name} ({width})")
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise ValueError(
            f"export: {COMPRESSED_TENSORS} needs widths that are multiples of {step}: {', '.join(odd[:3])}{more}"
        )
