"""The targets of the kernels, and the rows that they are judged by."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial

from benchmarks.common import gpu, report
from benchmarks.common.machine import Ceilings
from benchmarks.kernels.bench import Model

PRE_ROTATED, ALL_ROWS = "pre-rotated keys", "all rows"


def with_ratios(rows: Sequence[report.Row]) -> list[report.Row]:
    """Rows beside what they are compared with: moved keys with keys in place, few rows with all rows."""

    def same(row: report.Row, case: str) -> report.Row | None:
        alike = ("backend", "page_size", "keys")
        return next((r for r in rows if r["case"] == case and "ms" in r and all(r[a] == row[a] for a in alike)), None)

    rivals = {
        "recompute-moved": ("recompute-in-place", PRE_ROTATED),
        "decode-moved": ("decode-in-place", PRE_ROTATED),
        "all-rows-moved": ("causal", PRE_ROTATED),
        "recompute-in-place": ("causal", ALL_ROWS),
    }
    out: list[report.Row] = []
    for row in rows:
        case, peer = rivals.get(str(row["case"]), ("", ""))
        base = same(row, case) if case else None
        out.append(row if base is None or "ms" not in row else {**row, "peer": peer, "ratio": base["ms"] / row["ms"]})
    return out


def gates(rows: Sequence[report.Row], limits: Ceilings, model: Model) -> list[report.Row]:
    """The targets that this part can judge. Speed is that of the best page size, in the worst mask and length."""
    timed = [r for r in rows if "ms" in r]
    found = []
    for backend, least in (("triton", 280.0), ("mosaic", 450.0)):
        speed = _worst_of_best(timed, backend, ("chunks", "tree"), model.lengths)
        found.append(gpu.gate(f"prefill under a dependency mask, {backend}", f">= {least:g} TFLOP/s", speed,
                              partial(operator.le, least), "visited tiles only"))  # fmt: skip
    moved = [r for r in timed if r["case"] == "recompute-moved" and r["ratio"]]
    fastest = min(moved, key=lambda r: r["ms"], default=None)
    cost = None if fastest is None else 1 / fastest["ratio"] - 1
    found.append(gpu.gate("repositioning in the kernel", "<= 8% over pre-rotated keys",
                          None if cost is None else 100 * cost, lambda x: x <= 8.0, "%, recompute of 15%"))  # fmt: skip
    rates = [r["gb_s"] for r in timed if r["case"] == "decode-in-place"]
    share = 100 * max(rates) / limits.copy_gb_s if rates else None
    text = f"% of {limits.copy_gb_s:.0f} GB/s; {max(rates, default=0):.0f} GB/s of KV read"
    found.append(gpu.gate("decode at batch 8, 8K context", ">= 70% of copy bandwidth", share, lambda x: x >= 70, text))
    return [*found, *_memory_gates(timed, model)]


def _worst_of_best(
    rows: Sequence[report.Row], backend: str, cases: Sequence[str], lengths: Sequence[int]
) -> float | None:
    best: list[float] = []
    for case in cases:
        for length in lengths:
            own = [r["tflops"] for r in rows if (r["case"], r["backend"], r["keys"]) == (case, backend, length)]
            if not own:
                return None
            best.append(max(own))
    return min(best)


def _memory_gates(rows: Sequence[report.Row], model: Model) -> list[report.Row]:
    long = model.lengths[0]
    whole = [r for r in rows if r["case"] in ("chunks", "tree", "causal") and r["keys"] == long and r.get("temp_bytes")]
    lists = [r for r in rows if r["case"] == "block-lists"]
    most = max((float(r["temp_bytes"]) for r in (*whole, *lists) if r.get("temp_bytes") is not None), default=None)
    # an array of one byte a pair would be the least one
    share = None if most is None else most / long**2
    items = [r["largest_list_bytes"] / (r["rows"] / r["block_rows"] * r["keys"] / r["page_size"]) for r in lists]
    return [
        gpu.gate("no n x n array", f"temporary memory at {long} rows < 1 byte a pair", share, lambda x: x < 1.0,
                 "bytes a pair"),
        gpu.gate("block lists", "<= rows/block x entries x int32", max(items, default=None), lambda x: x <= 4.0,
                 "bytes an item"),
    ]  # fmt: skip
