"""Replacement policies of the tables: `none` (first in, first out), `s3fifo`, `sieve`, and `Belady` for simulators."""

from benchmarks.baseline.policy import fifo, s3fifo, sieve

__all__ = ["fifo", "s3fifo", "sieve"]
