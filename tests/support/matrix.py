"""Matrices of cases of which a few are tried with every change, and all of them in `make test-long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], keep: Collection[Any], smoke: Collection[Any] = ()) -> list[Any]:
    """The cases for `pytest.mark.parametrize`: those that are not among `keep` are marked long, some of the rest smoke.

    A case of several values is a tuple, as for parametrize.

    Raises:
        ValueError: if `keep` or `smoke` names something that is no case.
    """
    listed = list(cases)
    if unknown := [case for case in (*keep, *smoke) if case not in listed]:
        raise ValueError(f"no such case: {unknown}")
    long = [case for case in listed if case not in keep]
    return [_marked(case, "long" if case in long else "smoke" if case in smoke else None) for case in listed]


def with_smoke(cases: Iterable[Any], *smoke: Any) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, some of them marked smoke."""
    listed = list(cases)
    return few(listed, listed, smoke)


def _marked(case: Any, mark: str | None) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return case if mark is None else pytest.param(*values, marks=getattr(pytest.mark, mark))
