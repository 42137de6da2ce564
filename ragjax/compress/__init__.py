"""The choice of the tokens of a prompt that decoding sees: scorers by name, budgets, GraphKV (docs/compression.md).

Pure functions over the arrays of one layer, which the runner compiles and maps over layers; budgets on the host. A new
scorer is a class, one line here, and its name in `METHODS` of `ragjax/core/compression.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ragjax.compress.base import Evidence, Score, Scorer
from ragjax.compress.scorers import CAKE, H2O, KNorm, PyramidKV, SnapKV

SCORERS: Mapping[str, Scorer] = dict(snapkv=SnapKV(), pyramidkv=PyramidKV(), h2o=H2O(), knorm=KNorm(), cake=CAKE())

__all__ = ["SCORERS", "Evidence", "Score", "Scorer"]
