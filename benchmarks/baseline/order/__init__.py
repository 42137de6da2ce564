"""Orders of the tables: `lpm`."""

from benchmarks.baseline.order import lpm

__all__ = ["lpm"]
