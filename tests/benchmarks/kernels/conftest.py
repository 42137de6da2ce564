"""Compiled programs of the small model, shared."""

from __future__ import annotations

import pytest

from benchmarks.kernels.bench import Bench
from tests.support.checks import SMALL


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench(SMALL, samples=1)
