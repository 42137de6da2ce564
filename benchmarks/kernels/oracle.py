"""The float64 definition of attention that kernels are compared with, and the RoPE tables of both."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from typing import Any

import numpy as np

from benchmarks.common.machine import ROOT
from ragjax.kernels.rope import Rotation

BASE = 10000.0  # of the RoPE frequencies


def load_oracle() -> Any:
    """tests/support/oracle.py by its path: another package's top-level `tests` must not come in between."""
    name = "ragjax_tests_oracle"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "support" / "oracle.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


oracle = load_oracle()


def frequencies(dim: int) -> Any:
    """RoPE frequencies in float64."""
    return BASE ** -(np.arange(dim // 2) / (dim // 2))


@cache
def rotation(dim: int, length: int) -> Rotation:
    """The RoPE table."""
    return Rotation.table(frequencies(dim), length)
