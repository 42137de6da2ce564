"""RoPE as config.json describes it: `rope_parameters`, or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragjax.core import ConfigError
from ragjax.models.config import Family, LongRope, RopeScaling
from ragjax.models.fields import check, integer, number

_HARMLESS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LLAMA3 = frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
_LONG = frozenset({"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"})
_LONG_NAMES = ("longrope", "su")  # the second in the first files of Phi-3


@dataclass(frozen=True)
class Rope:
    """theta, scaling, rotary_dim: as of `config.ModelConfig`. context: tokens that they hold for; None if for all."""

    theta: float
    scaling: RopeScaling | LongRope | None = None
    rotary_dim: int | None = None
    context: int | None = None


def read_rope(mapping: Mapping[str, Any], family: Family, head_dim: int) -> Rope:
    """From the contents of config.json. Raises ConfigError that names the field which cannot be honoured."""
    where, rope = _section(mapping)
    theta = number(rope, "rope_theta", number(mapping, "rope_theta", 10000.0))
    rotary_dim = _rotary_dim(mapping, rope, where, family, head_dim)
    method = rope.get("rope_type", rope.get("type", "default"))
    if method == "default":
        _refuse_unknown(rope, where, frozenset())
        return Rope(theta, None, rotary_dim)
    if method in _LONG_NAMES and family == "phi3":
        _refuse_unknown(rope, where, _LONG)
        scaling, original = _long_rope(mapping, rope, where)
        return Rope(theta, scaling, rotary_dim, original)
    if method != "llama3":
        raise ConfigError(f"model configuration: {where} of type {method!r} is not supported, only llama3")
    _refuse_unknown(rope, where, _LLAMA3)
    stretched = RopeScaling(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_context=integer(rope, "original_max_position_embeddings"),
    )
    return Rope(theta, stretched, rotary_dim)


def _section(mapping: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    forms = [key for key in ("rope_parameters", "rope_scaling") if mapping.get(key)]
    if len(forms) == 2 and mapping["rope_parameters"] != mapping["rope_scaling"]:
        raise ConfigError("model configuration: rope_parameters and rope_scaling contradict each other")
    rope: Mapping[str, Any] = mapping[forms[0]] if forms else {}
    where = forms[0] if forms else "rope_scaling"
    check(isinstance(rope, Mapping), where, rope, "an object")
    return where, rope


def _rotary_dim(
    mapping: Mapping[str, Any], rope: Mapping[str, Any], where: str, family: Family, head_dim: int
) -> int | None:
    """The components that are turned; None if all are."""
    name, owner = (f"{where}.", rope) if "partial_rotary_factor" in rope else ("", mapping)
    share = owner.get("partial_rotary_factor")
    if share in (None, 1, 1.0):
        return None
    check(family == "phi3", f"{name}partial_rotary_factor", share, f"1 for {family}")
    return int(head_dim * number(owner, "partial_rotary_factor"))


def _long_rope(mapping: Mapping[str, Any], rope: Mapping[str, Any], where: str) -> tuple[LongRope, int]:
    """LongRoPE and the original length: up to it, the short factors hold (transformers' `longrope`)."""
    key = "original_max_position_embeddings"
    original = integer(rope, key, integer(mapping, key, 4096))
    check(original >= 2, key, original, "at least 2")
    short = rope.get("short_factor")
    valid = isinstance(short, list | tuple) and all(isinstance(f, int | float) for f in short)
    check(valid, f"{where}.short_factor", short, "a list of numbers")
    factor = number(rope, "factor", integer(mapping, "max_position_embeddings") / original)
    usual = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return LongRope(tuple(map(float, short or ())), number(rope, "attention_factor", usual)), original


def _refuse_unknown(rope: Mapping[str, Any], where: str, wanted: frozenset[str]) -> None:
    unknown = sorted(set(rope) - _HARMLESS - wanted)
    if unknown:
        raise ConfigError(f"model configuration: {where} has unsupported fields: {', '.join(unknown)}")
