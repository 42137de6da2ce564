"""Filters of searches: which files may be found, by their attributes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from ragjax import core
from ragjax.serve.schema.body import Body
from ragjax.serve.schema.metadata import Key, Scalar

MOST = 64
"""Filters in an `and` or `or`, and values of `in` and `nin`, at most."""
DEPTH = 8
"""Levels of `and` and `or`, at most."""


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


def _kind(given: object) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "<compound>" if kind in ("and", "or") else "<comparison>"


Filter = Annotated[
    Annotated[Comparison, Tag("<comparison>")] | Annotated[Compound, Tag("<compound>")], Discriminator(_kind)
]
Compound.model_rebuild()
