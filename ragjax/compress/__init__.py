"""The choice of the tokens of a prompt that decoding sees: scorers by name, and GraphKV (docs/compression.md).

Pure functions over the arrays of one layer, which the runner compiles and maps over layers. A new scorer is a class,
one line here, and its name in `METHODS` of `ragjax/core/compression.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ragjax.compress.base import Evidence, Scorer
from ragjax.compress.scorers import H2O, KNorm, SnapKV

SCORERS: Mapping[str, Scorer] = dict(snapkv=SnapKV(), h2o=H2O(), knorm=KNorm())

__all__ = ["SCORERS", "Evidence", "Scorer"]
