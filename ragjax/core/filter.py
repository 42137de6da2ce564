"""Filters over the attributes of files: which of them a search may find."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Scalar = str | float | bool
Attributes = Mapping[str, Scalar]

_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


@dataclass(frozen=True)
class Filter:
    """An attribute compared with a value, or for "in" and "nin" with several."""

    kind: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str
    value: Scalar | tuple[Scalar, ...]

    def holds(self, attributes: Attributes) -> bool:
        """Tell if it holds for a file; one without the attribute passes "ne" and "nin" alone.

        Strings are ordered by their characters; what cannot be ordered (a string and a number) is not so.
        """
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        there = self.key in attributes
        found = attributes.get(self.key, "")
        if self.kind in _ORDERS:
            return there and any(_kind(found) is _kind(value) and _ORDERS[self.kind](found, value) for value in values)
        equal = there and any(_kind(found) is _kind(value) and found == value for value in values)
        return equal is (self.kind in ("eq", "in"))


def _kind(value: Scalar) -> type:
    return bool if isinstance(value, bool) else str if isinstance(value, str) else float
