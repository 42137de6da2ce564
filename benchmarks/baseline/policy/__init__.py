"""Replacement policies of the tables: `none` (first in, first out), `lfu`, `s3fifo`, `sieve`, and `Belady`."""

from benchmarks.baseline.policy import fifo, lfu, s3fifo, sieve

__all__ = ["fifo", "lfu", "s3fifo", "sieve"]
