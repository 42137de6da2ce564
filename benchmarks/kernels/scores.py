"""Attention scores (`reductions`) on this machine's device: are they right, and how fast are they?

Right: key scores and row by segment scores by the device's backend, on the prompts of `correctness`, against the
float64 oracle's probabilities. Speed: the rows of a selective recompute over 32K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import gpu, machine, report
from benchmarks.kernels import masks
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.correctness import CONTENTS, Case, Shape, make_case
from benchmarks.kernels.masks import Mask
from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.device import Device
from ragjax.kernels.reductions import triton
from ragjax.kernels.reductions.op import key_scores, row_segment_score
from ragjax.kernels.rope import Rotation
from ragjax.kernels.view import View

SEGMENTS, SEGMENT = 5, 64  # how many there are, and the tokens of each
TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Largest error of all of a score's numbers together, relative to them."""


class Scores(NamedTuple):
    """Scores of keys, plain and times the norm of the value, [S, C] each; of rows by segment, [T, Z]."""

    plain_SC: Any
    valued_SC: Any
    row_TZ: Any


class Labels(NamedTuple):
    """Which rows count, bool [T]; the segment of each row, int32 [T], and of each slot, int32 [S, C]."""

    chosen_T: Any
    row_segment_T: Any
    key_segment_SC: Any


def labels_of(index_T: Any, index_SC: Any) -> Labels:
    """Two rows of three count; segments are runs of indices, the first of which belongs to none."""
    row_T, key_SC = (np.asarray(x) // SEGMENT - 1 for x in (index_T, index_SC))
    return Labels(np.arange(len(row_T)) % 3 > 0, row_T.astype(np.int32), key_SC.astype(np.int32))


def scores_of(backend: str, block_rows: int, labels: Labels, q: Any, rows: Any, pages: Any, layer: Any, entries: Any,
              table: Rotation) -> Scores:  # fmt: skip
    view = View.build(rows, pages, layer, entries, table, scale=float(q.shape[-1] ** -0.5), block_rows=block_rows)
    lse_TH = paged_interval_attention(q, view)[1]
    plain_SC, valued_SC = key_scores(q, lse_TH, view, labels.chosen_T, backend=backend)
    segments = labels.row_segment_T, labels.key_segment_SC, SEGMENTS
    return Scores(plain_SC, valued_SC, row_segment_score(q, lse_TH, view, *segments, backend=backend))


def wanted(shape: Shape, case: Case, labels: Labels) -> Scores:
    entry_N, slot_N, place_T = case.entry_N, case.slot_N, case.place_T
    norm_HN = np.repeat(np.linalg.norm(case.keys.v_NKD, axis=-1), shape.groups, axis=1).T
    chosen_T, prob_TN = labels.chosen_T[place_T], case.prob_THN.mean(1)

    def scatter(score_N: Any) -> Any:
        score_SC = np.zeros(labels.key_segment_SC.shape)
        np.add.at(score_SC, (entry_N, slot_N), score_N)
        return score_SC

    of_row_T, of_key_N = labels.row_segment_T[place_T], labels.key_segment_SC[entry_N, slot_N]
    index_T = np.asarray(case.arguments[1].index_T)[place_T]
    itself_TN = index_T[:, None] == case.keys.index_N[None]
    apart_TN = prob_TN * ~(itself_TN & (of_row_T[:, None] == of_key_N[None]))
    row_TZ = np.zeros((shape.rows, SEGMENTS))
    counted_T = (of_row_T >= 0) & (of_row_T < SEGMENTS)
    row_TZ[place_T] = (apart_TN * counted_T[:, None]) @ (of_key_N[:, None] == np.arange(SEGMENTS))
    return Scores(
        scatter(prob_TN[chosen_T].sum(0)), scatter((case.prob_THN[chosen_T] * norm_HN).mean(1).sum(0)), row_TZ
    )


def compile_scores(backend: str, shape: Shape) -> Any:
    case = make_case(shape, CONTENTS[0], 0)
    labels = labels_of(case.arguments[1].index_T, case.arguments[4].index_SC)
    return jax.jit(partial(scores_of, backend, shape.block_rows)).lower(labels, *case.arguments).compile()


def check(program: Any, shape: Shape) -> dict[str, Any]:
    """Worst errors of a program over the contents, and how many of them are wrong."""
    worst, wrong = np.zeros(len(Scores._fields)), 0
    for seed, contents in enumerate(CONTENTS):
        case = make_case(shape, contents, seed)
        labels = labels_of(case.arguments[1].index_T, case.arguments[4].index_SC)
        found, what = program(labels, *case.arguments), wanted(shape, case, labels)
        errors = np.array([
            np.linalg.norm(np.asarray(got, np.float64) - right) / max(float(np.linalg.norm(right)), 1e-9)
            for got, right in zip(found, what, strict=True)
        ])  # fmt: skip
        errors = np.nan_to_num(errors, nan=np.inf)
        stray = any(np.asarray(got)[right == 0].any() for got, right in zip(found, what, strict=True))
        wrong += bool(stray or (errors > TOLERANCE[shape.dtype]).any())
        worst = np.maximum(worst, errors)
    return {"cases": len(CONTENTS), "wrong": wrong, "error": float(worst.max()), **dict(zip(
        ("plain_error", "valued_error", "row_error"), worst.tolist(), strict=True))}  # fmt: skip


def correctness(record: gpu.Record, shapes: Sequence[Shape]) -> list[report.Row]:
    """Measure the shapes by the device's backend. Programs are compiled side by side."""
    backend = "triton" if Device.of(jax.devices()[0]).platform == "gpu" else "xla"
    found: list[report.Row] = []
    with ThreadPoolExecutor(max(1, min(8, machine.cores() // 2))) as pool:
        programs = {shape: pool.submit(compile_scores, backend, shape) for shape in shapes}
        for shape, program in programs.items():
            known, key = {**shape.known(backend), "case": "scores"}, f"scores/{shape.name}/{backend}"
            row = record.row(key, known, lambda: check(program.result(), shape))  # noqa: B023
            found.append(row or record.rows.get(key) or {**known, "failed": "no time"})
    return found


def show(rows: Sequence[report.Row]) -> bool:
    """Print the matrix; whether all of it was run and right."""
    columns: tuple[str, ...] = (
        "backend", "dtype", "head_dim", "groups", "page_size", "block_rows", "wrong", "plain_error",
    )  # fmt: skip
    columns += ("valued_error", "row_error", "failed")
    print("\nattention scores, against float64:\n" + report.table(rows, columns))
    return all("failed" not in r and not r["wrong"] for r in rows)


def timings(record: gpu.Record, bench: Bench) -> None:
    m = bench.model
    page_size = m.page_sizes[0]
    mask = masks.recompute(m.lengths[0], m.recomputed, moved=True, low=m.pieces[0], high=m.pieces[1])
    backend = "triton" if bench.device.platform == "gpu" else "xla"
    for what in ("key-scores", "segment-scores"):
        known = bench.known(mask, backend, page_size) | {"case": what}
        record.row(f"{what}/{backend}", known, partial(_measure, bench, mask, page_size, backend, what))


def _measure(bench: Bench, mask: Mask, page_size: int, backend: str, what: str) -> dict[str, Any]:
    m = bench.model
    block = bench.block_rows(backend, mask, page_size)
    assert block is not None
    view, q = bench.view(mask, page_size, block), bench.queries(len(mask.index_T))
    if backend == "triton" and (reason := triton.refusal(q, view, bench.device, SEGMENTS)):
        raise ValueError(reason)
    lse_TH = jax.jit(paged_interval_attention)(q, view)[1]
    size = len(mask.index_N) // SEGMENTS
    row_T, key_SC = jnp.asarray(mask.index_T // size), view.entries.index_SC // size

    def scores(q: jax.Array, lse_TH: jax.Array, view: View) -> Any:
        if what == "key-scores":
            return key_scores(q, lse_TH, view, backend=backend)
        return row_segment_score(q, lse_TH, view, row_T, key_SC, SEGMENTS, backend=backend)

    program = jax.jit(scores).lower(q, lse_TH, view).compile()
    total = float(np.sum(np.asarray(jax.tree.leaves(program(q, lse_TH, view))[0], np.float64)))
    # each row gives a probability of 1 in all: to keys, or to segments but for itself
    if not 0 < total <= len(mask.index_T) * 1.01 or (what == "key-scores" and total < len(mask.index_T) * 0.99):
        raise ArithmeticError(f"wrong result: the scores of {len(mask.index_T)} rows add up to {total:.6g}")
    ms = machine.milliseconds(lambda: program(q, lse_TH, view), samples=bench.samples)
    pairs = masks.visited_tiles(view.blocks) * view.block_rows * page_size
    return {"ms": ms, "tflops": 2 * pairs * m.dim * m.heads / ms / 1e9, "block_rows": block}
