"""Types of the values that Python callers give; the dataclasses of options and requests say what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError


def put(of: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass while it is made."""
    object.__setattr__(of, name, value)


def check_fields(of: Any, error: Callable[[str, str], Exception], unchecked: tuple[str, ...] = ()) -> None:
    """Check the fields of a frozen dataclass by their types and bounds, while it is made.

    Numbers of NumPy become Python's, and a list that stands for a tuple becomes one. Nothing else is converted. error:
    makes what is raised from the field's name and the whole reason, which names it too.
    """
    for name, adapter in _adapters(type(of), unchecked).items():  # type: ignore[arg-type] # a class can be hashed
        given = getattr(of, name)
        try:
            put(of, name, adapter.validate_python(_plain(given), strict=True))
        except ValidationError as wrong:
            place, last = name, None
            for key in wrong.errors()[0]["loc"]:  # of a value in a mapping or a tuple
                if key == "[key]":
                    given = last
                elif key in given if isinstance(given, Mapping) else isinstance(key, int):
                    place, given, last = f"{place}[{key!r}]", given[key], key
            raise error(name, f"{place} {reason_of(wrong)}, not {given!r}") from None


def _plain(given: Any) -> Any:
    if isinstance(given, np.generic):
        return given.item()
    if isinstance(given, Mapping):
        return {_plain(key): _plain(value) for key, value in given.items()}
    return tuple(given) if isinstance(given, list) else given


def reason_of(error: ValidationError) -> str:
    """The rule that a value broke, as "must be greater than 0"."""
    reasons = (one["msg"].removeprefix("Value error, ") for one in error.errors())
    return ", or ".join(dict.fromkeys(re.sub(r"^\w+ should ", "must ", reason) for reason in reasons))


@cache
def _adapters(kind: type[Any], unchecked: tuple[str, ...]) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: TypeAdapter(hints[one.name]) for one in fields(kind) if one.name not in unchecked}
