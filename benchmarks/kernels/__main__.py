"""The attention kernels on this machine's device: are they right, and how fast are they?

First every backend that serves on the device against a float64 oracle, attention and attention scores: small random
prompts over head dimension, dtype, group, page size, prefill and decode, NaN in all unused slots. Then timings at 16K
and 32K rows, each with a spot check of its result; TFLOP/s count the tiles that the block lists name, and nothing else.
On a CPU, products with packed matrices beside XLA's, too.
Exit code 1 if a result is wrong or one of the cases could not be run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.common import gpu, report
from benchmarks.kernels import products, scores
from benchmarks.kernels.bench import REHEARSAL, Bench, backward, gates, timings, with_ratios
from benchmarks.kernels.correctness import QUICK_SHAPES, SHAPES, correctness, show_correctness

COLUMNS: tuple[str, ...] = ("case", "backend", "page_size", "block_rows", "rows", "keys", "matrix", "visible_share")
COLUMNS += ("ms", "tflops", "gb_s", "ceiling_share", "peer", "ratio", "error", "failed")

SCORED = 5
"""Scores are held to each so many-th shape of the matrix: every dtype, head dimension and page size is among them."""


def main(arguments: Sequence[str] | None = None) -> int:
    chosen, record = gpu.begin("kernels", __doc__, arguments, memory_share=0.8)
    bench = Bench(REHEARSAL, 2) if chosen.quick else Bench()
    shapes = QUICK_SHAPES if chosen.quick else SHAPES
    matrix: list[report.Row] = []
    scored: list[report.Row] = []
    with record.stoppable():
        matrix = correctness(record, shapes)
        scored = scores.correctness(record, shapes[::SCORED])
        timings(record, bench)
        backward(record, bench)
        scores.timings(record, bench)
        if bench.device.platform == "cpu":
            products.timings(record, bench.samples, quick=chosen.quick)
    right = show_correctness(matrix) and bool(matrix)
    right = scores.show(scored) and bool(scored) and right
    timed = [r for r in record.replace(with_ratios) if r["case"] not in ("correctness", "scores")]
    print("\ntimings, median of runs of many calls each:\n" + report.table(timed, COLUMNS))
    judged = gates(timed, record.head.ceilings, bench.model)
    gpu.show_gates(judged)
    record.finish(judged)
    wrong = any("wrong result" in str(row.get("failed", "")) for row in timed)
    return 0 if right and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
