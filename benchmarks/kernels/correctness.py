"""Every backend against the oracle: small random prompts over shapes, dtypes and contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import benchmarks.baseline.attention  # noqa: F401 (registers its name)
from benchmarks.common import gpu, report
from benchmarks.common.machine import cores
from benchmarks.kernels.masks import frequencies, oracle, rotation
from ragjax.core import NEVER
from ragjax.kernels.attention.op import BACKENDS, paged_interval_attention
from ragjax.kernels.device import Device
from ragjax.kernels.rope import Rotation
from ragjax.kernels.view import View

COLUMNS = ("backend", "dtype", "shapes", "cases", "wrong", "worst_error", "overall_error", "worst_lse_error")
TOLERANCE = {"float32": (3e-5, 3e-6, 3e-5), "float16": (6e-3, 1e-3, 4e-3), "bfloat16": (4e-2, 6e-3, 3e-2)}
"""Largest error of any row, relative to the rows' typical length; of all rows together; of any log-sum-exp."""

MAX_OFFSET, LOCAL = 1000, 4096  # of the small prompts: how far a key may be moved, and how long one is at most


@dataclass(frozen=True)
class Shape:
    """One compiled shape. q_dtype: of the queries, where it is not that of the pages."""

    dim: int
    dtype: str
    groups: int
    page_size: int
    block_rows: int
    rows: int
    kv_heads: int = 2
    q_dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"d{self.dim}-{self.dtype}-g{self.groups}-p{self.page_size}-b{self.block_rows}"

    def known(self, backend: str) -> dict[str, Any]:
        return {
            "case": "correctness", "backend": backend, "dtype": self.dtype, "head_dim": self.dim, "rows": self.rows,
            "groups": self.groups, "page_size": self.page_size, "block_rows": self.block_rows, "q_dtype": self.q_dtype,
        }  # fmt: skip

    @property
    def sizes(self) -> Any:
        """Of the pool and the entries; many entries, so that decode splits its lists."""
        return oracle.Sizes(page_size=self.page_size, pages=48, entries=48)


def _prefill(dim: int, dtype: str, groups: int, page: int, block: int, q: str = "float32") -> Shape:
    return Shape(dim, dtype, groups, page, block, 4 * block, q_dtype=q)


def _decode(dim: int, dtype: str, groups: int, page: int, q: str = "float32") -> Shape:
    return Shape(dim, dtype, groups, page, 1, 8, q_dtype=q)


# each pair of head dimension, dtype, group and page size is in here
SHAPES = (
    _prefill(128, "bfloat16", 4, 64, 32, "bfloat16"), _decode(128, "bfloat16", 4, 64),
    _prefill(128, "bfloat16", 7, 128, 16), _decode(64, "bfloat16", 7, 64, "bfloat16"),
    _prefill(64, "bfloat16", 8, 64, 16), _decode(128, "bfloat16", 8, 128), _prefill(64, "bfloat16", 1, 128, 64),
    _decode(64, "bfloat16", 1, 128, "bfloat16"), _prefill(64, "float32", 4, 64, 16), _decode(64, "float32", 4, 128),
    _prefill(128, "float32", 8, 64, 8), _decode(128, "float32", 1, 64), _prefill(64, "float32", 7, 128, 8),
    _decode(128, "float32", 7, 128), _prefill(128, "float32", 1, 64, 64), _decode(64, "float32", 8, 64),
    _prefill(128, "float16", 4, 128, 16, "float16"), _decode(64, "float16", 4, 64), _prefill(64, "float16", 7, 64, 16),
    _decode(128, "float16", 7, 64, "float16"), _prefill(128, "float16", 8, 128, 8), _decode(64, "float16", 8, 128),
    _prefill(128, "float16", 1, 64, 128), _decode(128, "float16", 1, 128),
)  # fmt: skip
QUICK_SHAPES = (Shape(64, "float32", 4, 64, 16, 64), Shape(64, "bfloat16", 7, 64, 1, 8))

CONTENTS: tuple[tuple[tuple[str, bool], ...], ...] = (
    (("chain", True), ("isolated", True)), (("tree", True),), (("isolated", False), ("stale", False)),
    (("tree", False), ("chain", False)),
)  # fmt: skip
"""Requests of each case: the kind of prompt, and whether its rows are its last tokens or any."""


@dataclass(frozen=True)
class Case:
    """A call, and what it should return; the oracle's keys and probabilities, and the entry and slot of each key."""

    arguments: tuple[Any, ...]
    place_T: Any
    want_THD: Any
    want_TH: Any
    prob_THN: Any
    keys: Any
    entry_N: Any
    slot_N: Any


def pieces_of(kind: str, request: int, lengths: Sequence[int], base: int, rng: np.random.Generator) -> list[Any]:
    """A prompt of pieces: "chain", "isolated" chunks, a "tree", or a chain with "stale" tokens that are recomputed."""
    starts = [int(n) for n in np.cumsum([0, *lengths])]
    last = len(lengths) - 1
    depths = [0]
    for _ in lengths[1:]:
        depths.append(int(rng.integers(1, depths[-1] + 2)))

    def hidden(i: int) -> tuple[int, int]:
        if kind not in ("isolated", "tree") or i == last:
            return (0, 0)
        if kind == "isolated":
            return (starts[i + 1], starts[last]) if i else (0, 0)
        after = next((j for j in range(i + 1, last) if depths[j] <= depths[i]), last)
        return (starts[after], starts[last])

    pieces = [
        oracle.Piece(request, tuple(range(starts[i], starts[i + 1])), base + starts[i], hidden(i), 100 * request + i)
        for i in range(len(lengths))
    ]
    if kind != "stale":
        return pieces
    stale = sorted(int(n) for n in rng.choice(starts[-1], min(starts[-1], 12), replace=False))
    dead = [replace(p, indices=tuple(NEVER if o in stale else o for o in p.indices)) for p in pieces]
    return [*dead, oracle.Piece(request, tuple(stale), base + 7, (0, 0), 100 * request + 99)]


def make_case(shape: Shape, requests: Sequence[tuple[str, bool]], seed: int) -> Case:
    """A random case; every slot that no key owns holds NaN."""
    rng = np.random.default_rng(seed)
    pieces: list[Any] = []
    for number, (kind, _) in enumerate(requests):
        lengths = [int(n) for n in rng.integers(1, 3 * shape.page_size // 2, int(rng.integers(3, 6)))]
        pieces += pieces_of(kind, number, lengths, int(rng.integers(0, MAX_OFFSET)), rng)
    keys = oracle.keys_of(pieces, shape.kv_heads, shape.dim, seed)
    freq = frequencies(shape.dim)
    layout = oracle.lay_out(
        pieces, keys, freq, shape.sizes, dtype=shape.dtype, seed=seed, garbage=np.nan, max_offset=MAX_OFFSET
    )
    queries = _queries(shape, requests, keys, rng)
    q, rows, place_T = oracle.lay_rows(queries, freq, shape.block_rows, shape.rows, seed)
    want_THD, want_TH, prob_THN = oracle.attend(queries, keys, freq, shape.dim**-0.5)
    arguments = (
        q.astype(shape.q_dtype), rows, layout.pages, jnp.int32(layout.layer), layout.entries,
        rotation(shape.dim, MAX_OFFSET + LOCAL),
    )  # fmt: skip
    return Case(arguments, place_T, want_THD, want_TH, prob_THN, keys, layout.entry_N, layout.slot_N)


def _queries(shape: Shape, requests: Sequence[tuple[str, bool]], keys: Any, rng: np.random.Generator) -> Any:
    most = shape.rows // shape.block_rows // len(requests) * shape.block_rows
    request_T: list[int] = []
    index_T: list[int] = []
    position_T: list[int] = []
    for number, (_, dense) in enumerate(requests):
        own = (keys.request_N == number) & (keys.index_N < NEVER)
        position = dict(zip(keys.index_N[own].tolist(), keys.position_N[own].tolist(), strict=True))
        indices = sorted(position)
        count = min(len(indices), most, 96)
        chosen = indices[-count:] if dense else sorted(rng.choice(indices, count, replace=False).tolist())
        request_T += [number] * count
        index_T += chosen
        position_T += [position[o] for o in chosen]
    q_THD = rng.standard_normal((len(index_T), shape.kv_heads * shape.groups, shape.dim))
    return oracle.Queries(np.asarray(request_T), np.asarray(index_T), np.asarray(position_T), q_THD)


def attend_case(
    backend: str, block_rows: int, q: Any, rows: Any, pages: Any, layer: Any, entries: Any, table: Rotation
) -> Any:
    scale = float(q.shape[-1] ** -0.5)
    view = View.build(rows, pages, layer, entries, table, scale=scale, block_rows=block_rows)
    return paged_interval_attention(q, view, backend=backend)


def why_not(backend: str, shape: Shape, case: Case) -> str | None:
    """Why a backend does not serve a shape on this device."""
    q, rows, pages, layer, entries, table = case.arguments
    view = jax.eval_shape(
        partial(View.build, scale=1.0, block_rows=shape.block_rows), rows, pages, layer, entries, table
    )
    return BACKENDS[backend].refusal(q, view, Device.of(jax.devices()[0]))


def compile_case(backend: str, shape: Shape, case: Case) -> Any:
    return jax.jit(partial(attend_case, backend, shape.block_rows)).lower(*case.arguments).compile()


def check_cases(program: Callable[..., Any], shape: Shape, cases: Sequence[Case]) -> dict[str, Any]:
    worst, worst_overall, worst_lse, wrong = 0.0, 0.0, 0.0, 0
    for case in cases:
        out, lse = (np.asarray(x, np.float64) for x in program(*case.arguments))
        error = oracle.worst_error(out[case.place_T], case.want_THD)
        lse_error = oracle.lse_error(lse[case.place_T], case.want_TH)
        padding = np.setdiff1d(np.arange(shape.rows), case.place_T)
        overall = float(np.linalg.norm(out[case.place_T] - case.want_THD) / np.linalg.norm(case.want_THD))
        found = np.nan_to_num([error, overall, lse_error], nan=np.inf)
        good = (found <= TOLERANCE[shape.dtype]).all() and not out[padding].any()
        wrong += not (good and np.isneginf(lse[padding]).all())
        worst, worst_overall, worst_lse = np.maximum([worst, worst_overall, worst_lse], found).tolist()
    return {
        "cases": len(cases), "wrong": wrong, "error": worst, "overall_error": worst_overall, "lse_error": worst_lse,
    }  # fmt: skip


def correctness(record: gpu.Record, shapes: Sequence[Shape]) -> list[report.Row]:
    """Measure the matrix; rows of the shapes that each backend serves. Programs are compiled side by side."""
    made: dict[Shape, list[Case]] = {}
    reasons: dict[tuple[Shape, str], str | None] = {}
    programs: dict[tuple[Shape, str], Future[Any]] = {}
    pool = ThreadPoolExecutor(max(1, min(8, cores() // 2)))
    for shape in shapes:
        made[shape] = [make_case(shape, c, seed) for seed, c in enumerate(CONTENTS)]
        for backend in BACKENDS:
            reasons[shape, backend] = why_not(backend, shape, made[shape][0])
            if reasons[shape, backend] is None and not record.has(_key(shape, backend)):
                programs[shape, backend] = pool.submit(compile_case, backend, shape, made[shape][0])
    served = [pair for pair, reason in reasons.items() if reason is None]

    def measure(shape: Shape, backend: str) -> dict[str, Any]:
        return check_cases(programs[shape, backend].result(), shape, made[shape])

    found = []
    for shape, backend in served:
        known, key = shape.known(backend), _key(shape, backend)
        row = record.row(key, known, partial(measure, shape, backend))
        found.append(row or record.rows.get(key) or {**known, "failed": "no time"})
    pool.shutdown(wait=False, cancel_futures=True)
    refused = [(backend, reason) for (_, backend), reason in reasons.items() if reason is not None]
    for backend, reason in dict.fromkeys(refused):
        print(f"{backend} does not serve {refused.count((backend, reason))} of {len(shapes)} shapes: {reason}")
    return found


def _key(shape: Shape, backend: str) -> str:
    return f"correctness/{shape.name}/{backend}"


def show_correctness(rows: Sequence[report.Row]) -> bool:
    """Print the matrix by backend and dtype; whether all of it was run and right."""
    told = []
    for backend, dtype in dict.fromkeys((r["backend"], r["dtype"]) for r in rows):
        own = [r for r in rows if (r["backend"], r["dtype"]) == (backend, dtype)]
        ran = [r for r in own if "failed" not in r]
        told.append(
            {
                "backend": backend, "dtype": dtype, "shapes": len(own), "cases": sum(r["cases"] for r in ran),
                "wrong": sum(r["wrong"] for r in ran),
                "worst_error": max((float(r["error"]) for r in ran), default=None),
                "overall_error": max((float(r["overall_error"]) for r in ran), default=None),
                "worst_lse_error": max((float(r["lse_error"]) for r in ran), default=None),
            }
        )  # fmt: skip
    print("\ncorrectness, against float64:\n" + report.table(told, COLUMNS))
    bad = [r for r in rows if "failed" in r or r["wrong"]]
    for r in bad:
        errors = ", ".join(f"{n} {float(r[n]):.3g}" for n in ("error", "overall_error", "lse_error") if n in r)
        what = r.get("failed") or f"{r['wrong']} of {r['cases']} cases wrong: {errors}"
        shape = f"d{r['head_dim']} g{r['groups']} p{r['page_size']} b{r['block_rows']} {r['dtype']}"
        print(f"WRONG: {r['backend']}, {shape}: {what}")
    return not bad
