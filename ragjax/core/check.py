"""Types of the values that Python callers give; the dataclasses of options and requests say what is wrong."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real


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
