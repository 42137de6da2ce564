"""The choice of the tokens of a prompt that decoding sees: scorers by name, budgets, GraphKV (docs/compression.md).

Pure functions over the arrays of one layer, which the runner compiles and maps over layers; budgets on the host. A new
scorer is a class, one line here, and its name in `METHODS` of `ragjax/core/compression.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ragjax.compress.base import Evidence, Score, Scorer
from ragjax.compress.cake import CAKE
from ragjax.compress.h2o import H2O
from ragjax.compress.knorm import KNorm
from ragjax.compress.snapkv import PyramidKV, SnapKV

SCORERS: Mapping[str, Scorer] = {
    "snapkv": SnapKV(),
    "pyramidkv": PyramidKV(),
    "h2o": H2O(),
    "knorm": KNorm(),
    "cake": CAKE(),
}
"""Scorers by name."""

__all__ = ["SCORERS", "Evidence", "Score", "Scorer"]
