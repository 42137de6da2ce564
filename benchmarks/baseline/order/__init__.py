"""Orders of the tables: `lpm` and `lsp`."""

from benchmarks.baseline.order import lpm, lsp

__all__ = ["lpm", "lsp"]
