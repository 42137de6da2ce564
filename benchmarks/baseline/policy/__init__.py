"""Replacement policies of the tables: `none` (first in, first out), `lfu`, and `Belady`."""

from benchmarks.baseline.policy import fifo, lfu

__all__ = ["fifo", "lfu"]
