"""Values of a model's configuration, each checked as it is read: a `ConfigError` names the field that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragjax.core import ConfigError


def check(ok: bool, name: str, value: object, wanted: str) -> None:
    """Refuse a value unless `ok`; wanted: what it must be."""
    if not ok:
        raise ConfigError(f"model configuration: {name} is {value!r}; it must be {wanted}")


def integer(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read a whole number, which may be given for each layer as long as the layers agree."""
    value = mapping.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"model configuration: {key} is missing")
    if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
        value = value[0]
    check(isinstance(value, int) and not isinstance(value, bool), key, value, "one whole number for all layers")
    return int(value)


def number(mapping: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Read a finite number."""
    value = mapping.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"model configuration: {key} is missing")
    check(isinstance(value, int | float) and not isinstance(value, bool), key, value, "a number")
    check(abs(value) < 1e300, key, value, "a finite number")
    return float(value)


def flag(mapping: Mapping[str, Any], key: str) -> bool:
    """Read a truth value, false where it is not given."""
    value = mapping.get(key)
    check(value is None or isinstance(value, bool), key, value, "true or false")
    return bool(value)


def token_ids(mapping: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Read a token id that configs give as a number, a list of numbers or null."""
    value = mapping.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    for token in ids:
        check(isinstance(token, int) and not isinstance(token, bool), key, value, "a token id or a list of them")
    return tuple(int(token) for token in ids)
