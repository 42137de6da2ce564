"""Matrices of cases of which a few are tried with every change, and all of them in `make test-long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`: those that are not among `keep` are marked long.

    A case of several values is a tuple, as for parametrize.

    Raises:
        ValueError: if `keep` names something that is no case.
    """
    listed = list(cases)
    if unknown := [case for case in keep if case not in listed]:
        raise ValueError(f"no such case: {unknown}")
    return [case if case in keep else _long(case) for case in listed]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
