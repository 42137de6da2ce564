"""Types of the values that Python callers give; the dataclasses of options and requests say what is wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Real
from typing import Any, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError


def whole(value: object) -> int | None:
    """A whole number as an int, NumPy's too; None if it is none. A bool is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_number(value: object) -> bool:
    """Tell if it is a real number, of Python or NumPy. A bool is none; infinities and NaN are."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_list(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Tell if it is a sequence of such items; a text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, kinds) for item in value)


def put(of: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass while it is made."""
    object.__setattr__(of, name, value)


def check_fields(of: Any, error: Callable[[str], Exception]) -> None:
    """Check the fields of a frozen dataclass by their types and bounds, while it is made.

    Numbers of NumPy become Python's, and a list that stands for a tuple becomes one. Nothing else is converted.

    Args:
        of: the object.
        error: what is raised; it names the field.
    """
    for name, adapter in _adapters(type(of)).items():  # type: ignore[arg-type] # a class can be hashed
        given = getattr(of, name)
        value = given.item() if isinstance(given, np.generic) else tuple(given) if isinstance(given, list) else given
        try:
            put(of, name, adapter.validate_python(value, strict=True))
        except ValidationError as wrong:
            if isinstance(given, Mapping):  # the error of a value names its key
                for key in [key for key in wrong.errors()[0]["loc"] if key in given]:
                    name, given = f"{name}[{key!r}]", given[key]
            raise error(f"{name} {reason_of(wrong)}, not {given!r}") from None


def reason_of(error: ValidationError) -> str:
    """The rule that a value broke, as "must be greater than 0"."""
    reasons = (one["msg"].removeprefix("Value error, ").replace("Input should be", "must be") for one in error.errors())
    return ", or ".join(dict.fromkeys(reasons))


@cache
def _adapters(kind: type[Any]) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: TypeAdapter(hints[one.name]) for one in fields(kind)}
