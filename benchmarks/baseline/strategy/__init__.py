"""Reuse strategies that stand in tables to be compared with; importing the package registers them."""

from benchmarks.baseline.strategy import ablation, epic, gradual, h2o, random, set_cache, unmoved
from ragjax.reuse import strategies as all_strategies

__all__ = ["ablation", "all_strategies", "epic", "gradual", "h2o", "random", "set_cache", "unmoved"]
