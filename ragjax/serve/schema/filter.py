"""Filters of searches: which files may be found, by their attributes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ragjax import core
from ragjax.serve.schema.body import Body
from ragjax.serve.schema.metadata import Key, Scalar

MOST = 64
"""Filters in an `and` or `or`, and values of `in` and `nin`, at most."""
DEPTH = 8
"""Levels of `and` and `or`, at most."""
ALL = 256
"""Filters of all levels, at most, each value of `in` and `nin` counted: all are compared with each file of a store."""


class Comparison(Body):
    """An attribute compared with a value."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: Key
    value: Annotated[
        Annotated[Scalar, Tag("<one>")] | Annotated[list[Scalar], Field(max_length=MOST), Tag("<several>")],
        Discriminator(lambda value: "<several>" if isinstance(value, list | tuple) else "<one>"),
    ]

    def to_core(self, depth: int = 0) -> core.Filter:
        """The same for the engine."""
        value = tuple(self.value) if isinstance(self.value, list) else self.value
        return core.Comparison(self.type, self.key, value)


class Compound(Body):
    """All of these filters, or any of them."""

    type: Literal["and", "or"]
    filters: Annotated[list[Filter], Field(min_length=1, max_length=MOST, fail_fast=True)]

    def to_core(self, depth: int = 0) -> core.Filter:
        """The same for the engine.

        Raises:
            core.RequestError: if it is nested too deeply.
        """
        if depth == DEPTH:
            raise core.RequestError(f"filters are nested more than {DEPTH} levels deep", param="filters")
        return core.Compound(self.type, tuple(part.to_core(depth + 1) for part in self.filters))


def filters_in(given: object) -> int:
    """Filters of all levels, as parsed from JSON and not yet validated; one with several values counts as so many."""
    found, left = 0, [given]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            value, parts = one.get("value"), one.get("filters")
            found += len(value) if isinstance(value, list) and value else 1
            left += parts if isinstance(parts, list) else []
    return found


def _few(given: object) -> object:
    if (count := filters_in(given)) > ALL:
        raise ValueError(
            f"there are {count} filters of all levels, values of in and nin counted; at most {ALL} are taken"
        )
    return given


def _kind(given: object) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "<compound>" if kind in ("and", "or") else "<comparison>"


Filter = Annotated[
    Annotated[Comparison, Tag("<comparison>")] | Annotated[Compound, Tag("<compound>")], Discriminator(_kind)
]
Compound.model_rebuild()
Filters = Annotated[Filter, BeforeValidator(_few, json_schema_input_type=Filter)]
"""The filter of a search, as a whole."""
