"""Small valid files with random changes, for readers that must take them or refuse them with one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

T = TypeVar("T")

NESTED = b"[" * 100_000
"""JSON that is nested deeper than Python reads."""

EXAMPLES = [pytest.param(15, id="few"), pytest.param(2_000, id="many", marks=pytest.mark.long)]
"""How many files a test tries: few in the suite of every change."""

ODD: list[Any] = [None, True, -1, 0, 1, 2**70, 0.5, float("inf"), "", "x", "\ud800", [], [[]], {}, {"x": 1}]
"""Values that a field may be given instead of its own."""


def tried(examples: int, files: st.SearchStrategy[T], check: Callable[[T], object]) -> None:
    """Call `check` with so many files."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(files)
    def run(file: T) -> None:
        check(file)

    run()


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with a few of them replaced, taken out or put in, and perhaps cut short."""
    place, length, new = st.integers(0, max(len(data), 1) - 1), st.integers(0, 8), st.binary(max_size=8)
    edits = st.lists(st.tuples(place, length, new), min_size=1, max_size=4)

    def apply(edits: list[tuple[int, int, bytes]], end: int | None) -> bytes:
        changed = data
        for at, count, more in edits:
            changed = changed[:at] + more + changed[at + count :]
        return changed[:end]

    return st.builds(apply, edits, st.none() | place)


Spoil = tuple[list[tuple[int, bytes]], int | None]
"""Bytes written over others, and where the rest is cut off."""


def spoils(size: int) -> st.SearchStrategy[Spoil]:
    """For a file of so many bytes in which most places are told by their number: nothing is moved."""
    place = st.integers(0, size - 1)
    over = st.tuples(place, st.binary(min_size=1, max_size=4))
    return st.tuples(st.lists(over, min_size=1, max_size=4), st.none()) | st.tuples(st.just([]), place)


def spoiled(data: bytes, spoil: Spoil) -> bytes:
    """The bytes with this done to them."""
    changed = bytearray(data)
    for at, new in spoil[0]:
        changed[at : at + len(new)] = new[: len(data) - at]
    return bytes(changed[: spoil[1]])


def altered(value: Any) -> st.SearchStrategy[bytes]:
    """A JSON text with one or two values replaced by others, or taken out, or nested too deeply."""
    text = json.dumps(value)
    change = st.tuples(st.integers(0, 2**16), st.sampled_from([*ODD, ...]))

    def apply(changes: list[tuple[int, Any]]) -> bytes:
        root = {"": json.loads(text)}
        for number, new in changes:
            places = list(_places(root))
            holder, key = places[number % len(places)]
            if new is not ...:
                holder[key] = deepcopy(new)
            elif holder is not root:
                del holder[key]
        return json.dumps(root[""]).encode()

    return st.just(NESTED) | st.builds(apply, st.lists(change, min_size=1, max_size=2))


def _places(node: Any) -> Any:
    """Each value within, as what holds it and where."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys):
        yield node, key
        yield from _places(node[key])
