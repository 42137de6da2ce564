"""Filters over attributes: each comparison, types that do not mix, and what is not there."""

from __future__ import annotations

from typing import Any

import pytest

from ragjax.core import Filter

FILE = {"year": 2020.0, "lang": "en", "draft": False}


@pytest.mark.parametrize(
    ("kind", "key", "value", "holds"),
    [
        ("eq", "year", 2020, True),
        ("eq", "year", "2020", False),
        ("eq", "draft", 0, False),  # a boolean is no number
        ("eq", "draft", False, True),
        ("eq", "none", "en", False),
        ("ne", "lang", "de", True),
        ("ne", "lang", "en", False),
        ("ne", "none", "en", True),
        ("gt", "year", 2019, True),
        ("gt", "year", 2020, False),
        ("gte", "year", 2020, True),
        ("lt", "year", 2020, False),
        ("lte", "year", 2020, True),
        ("lt", "lang", "fr", True),
        ("lt", "lang", 5, False),
        ("gte", "none", 0, False),
        ("lt", "none", 0, False),
        ("in", "lang", ("de", "en"), True),
        ("in", "lang", ("de",), False),
        ("in", "none", ("de",), False),
        ("nin", "lang", ("de",), True),
        ("nin", "lang", ("de", "en"), False),
        ("nin", "none", ("de",), True),
    ],
)
def test_a_comparison(kind: Any, key: str, value: Any, holds: bool) -> None:
    assert Filter(kind, key, value).holds(FILE) is holds
