"""The attention kernels on this machine's device: are they right, and how fast are they?

    python -m benchmarks.kernels [--quick] [--platform cpu] [--seconds N] [--json FILE | --out DIR]

First every backend that serves on the device against a float64 oracle: small random prompts over head dimension,
dtype, group, page size, prefill and decode, NaN in all unused slots. Then timings at 16K and 32K rows, each with a spot
check of its result; TFLOP/s count the tiles that the block lists name, and nothing else. Exit code 1 if a result is
wrong or one of the cases could not be run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu, masks, report
from benchmarks.masks import Mask
from ragjax.core import NEVER
from ragjax.kernels.attention.op import BACKENDS, paged_interval_attention
from ragjax.kernels.blocks import Blocks
from ragjax.kernels.device import Device
from ragjax.kernels.pages import Pages
from ragjax.kernels.rope import Rotation
from ragjax.kernels.view import View

COLUMNS: tuple[str, ...] = ("case", "backend", "page_size", "block_rows", "rows", "keys", "visible_share", "ms")
COLUMNS += ("tflops", "gb_s", "peer", "ratio", "error", "failed")
CORRECT_COLUMNS = ("backend", "dtype", "shapes", "cases", "wrong", "worst_error", "overall_error", "worst_lse_error")
BASE = 10000.0  # of the RoPE frequencies


def load_oracle() -> Any:
    """tests/support/oracle.py by its path: another package's top-level `tests` must not come in between."""
    name = "ragjax_tests_oracle"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, gpu.ROOT / "tests" / "support" / "oracle.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


oracle = load_oracle()


# ----------------------------------------------------------------------------------------- correctness

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
        """Names the shape in keys and messages."""
        return f"d{self.dim}-{self.dtype}-g{self.groups}-p{self.page_size}-b{self.block_rows}"

    def known(self, backend: str) -> dict[str, Any]:
        """What a row says before it is measured."""
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
    _prefill(128, "bfloat16", 4, 64, 32, "bfloat16"),
    _decode(128, "bfloat16", 4, 64),
    _prefill(128, "bfloat16", 7, 128, 16),
    _decode(64, "bfloat16", 7, 64, "bfloat16"),
    _prefill(64, "bfloat16", 8, 64, 16),
    _decode(128, "bfloat16", 8, 128),
    _prefill(64, "bfloat16", 1, 128, 64),
    _decode(64, "bfloat16", 1, 128, "bfloat16"),
    _prefill(64, "float32", 4, 64, 16),
    _decode(64, "float32", 4, 128),
    _prefill(128, "float32", 8, 64, 8),
    _decode(128, "float32", 1, 64),
    _prefill(64, "float32", 7, 128, 8),
    _decode(128, "float32", 7, 128),
    _prefill(128, "float32", 1, 64, 64),
    _decode(64, "float32", 8, 64),
    _prefill(128, "float16", 4, 128, 16, "float16"),
    _decode(64, "float16", 4, 64),
    _prefill(64, "float16", 7, 64, 16),
    _decode(128, "float16", 7, 64, "float16"),
    _prefill(128, "float16", 8, 128, 8),
    _decode(64, "float16", 8, 128),
    _prefill(128, "float16", 1, 64, 128),
    _decode(128, "float16", 1, 128),
)
QUICK_SHAPES = (Shape(64, "float32", 4, 64, 16, 64), Shape(64, "bfloat16", 7, 64, 1, 8))

CONTENTS: tuple[tuple[tuple[str, bool], ...], ...] = (
    (("chain", True), ("isolated", True)),
    (("tree", True),),
    (("isolated", False), ("stale", False)),
    (("tree", False), ("chain", False)),
)
"""Requests of each case: the kind of prompt, and whether its rows are its last tokens or any."""


@dataclass(frozen=True)
class Case:
    """A call, and what it should return."""

    arguments: tuple[Any, ...]
    place_T: Any
    want_THD: Any
    want_TH: Any


def pieces_of(kind: str, request: int, lengths: Sequence[int], base: int, rng: np.random.Generator) -> list[Any]:
    """A prompt of pieces: "chain", "isolated" chunks, a "tree", or a chain with "stale" tokens computed anew."""
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


def frequencies(dim: int) -> Any:
    """RoPE frequencies in float64."""
    return BASE ** -(np.arange(dim // 2) / (dim // 2))


@cache
def rotation(dim: int, length: int) -> Rotation:
    """The RoPE table."""
    return Rotation.table(frequencies(dim), length)


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
    want_THD, want_TH, _ = oracle.attend(queries, keys, freq, shape.dim**-0.5)
    arguments = (
        q.astype(shape.q_dtype), rows, layout.pages, jnp.int32(layout.layer), layout.entries,
        rotation(shape.dim, MAX_OFFSET + LOCAL),
    )  # fmt: skip
    return Case(arguments, place_T, want_THD, want_TH)


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
    """Lists and attention in one program."""
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
    """The program of a backend and shape."""
    return jax.jit(partial(attend_case, backend, shape.block_rows)).lower(*case.arguments).compile()


def check_cases(program: Callable[..., Any], shape: Shape, cases: Sequence[Case]) -> dict[str, Any]:
    """Worst errors of a program over cases, and how many of them are wrong."""
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
    pool = ThreadPoolExecutor(max(1, min(8, report.cores() // 2)))
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
    print("\ncorrectness, against float64:\n" + report.table(told, CORRECT_COLUMNS))
    bad = [r for r in rows if "failed" in r or r["wrong"]]
    for r in bad:
        errors = ", ".join(f"{n} {float(r[n]):.3g}" for n in ("error", "overall_error", "lse_error") if n in r)
        what = r.get("failed") or f"{r['wrong']} of {r['cases']} cases wrong: {errors}"
        shape = f"d{r['head_dim']} g{r['groups']} p{r['page_size']} b{r['block_rows']} {r['dtype']}"
        print(f"WRONG: {r['backend']}, {shape}: {what}")
    return not bad


# --------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Model:
    """The attention that is timed, and at what lengths."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = (32768, 16384)
    page_sizes: tuple[int, ...] = (64, 128)
    recomputed: int = 4992  # 15.2% of 32K: a multiple of 128 rows, which suits every kernel
    batch: int = 8
    context: int = 8192
    backward: int = 8192
    pieces: tuple[int, int] = (256, 1024)
    loop: int = 50  # decode steps in one program


FULL = Model()
REHEARSAL = Model(
    heads=8, kv_heads=2, dim=64, dtype="float32", lengths=(512, 256), page_sizes=(64,), recomputed=128, batch=2,
    context=256, backward=128, pieces=(32, 64), loop=2,
)  # fmt: skip

SPOT_ROWS = 4
SPOT_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
KERNELS = ("triton", "mosaic", "raw")
"""Timed where they serve. XLA, which would take minutes on a GPU, is timed on CPUs alone."""


@dataclass
class Bench:
    """Arrays on the device and compiled programs, made once for all timings."""

    model: Model = FULL
    samples: int = 5
    _programs: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _views: dict[tuple[str, int, int, int], View] = field(default_factory=dict)
    _pages: dict[tuple[int, int], Pages] = field(default_factory=dict)
    _queries: dict[int, jax.Array] = field(default_factory=dict)

    @cached_property
    def device(self) -> Device:
        """The device that is measured."""
        return Device.of(jax.devices()[0])

    @cached_property
    def table(self) -> Rotation:
        """RoPE for every offset."""
        return rotation(self.model.dim, max(*self.model.lengths, self.model.context))

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.model.dim**-0.5)

    def pages(self, total: int, page_size: int) -> Pages:
        """A random pool."""
        if (total, page_size) not in self._pages:
            m = self.model
            self._pages = {(total, page_size): masks.random_pages(
                jax.random.key(1), total, page_size, m.kv_heads, m.dim, m.dtype)}  # fmt: skip
        return self._pages[total, page_size]

    def queries(self, rows: int) -> jax.Array:
        """Random queries."""
        if rows not in self._queries:
            shape = (rows, self.model.heads, self.model.dim)
            self._queries = {rows: jax.random.normal(jax.random.key(0), shape, jnp.dtype(self.model.dtype))}
        return self._queries[rows]

    def view(self, mask: Mask, page_size: int, block_rows: int) -> View:
        """The mask over a pool."""
        key = (mask.name, len(mask.index_N), page_size, block_rows)
        if key not in self._views:
            pages = self.pages(len(mask.index_N) // page_size, page_size)
            self._views = {key: masks.view_of(mask, pages, self.table, self.scale, block_rows)}
        return self._views[key]

    def program(self, backend: str, q: jax.Array, view: View, times: int) -> Any:
        """Attention by a backend; with `times`, that many calls one after the other, output alone."""
        key = (backend, q.shape, view.entries.index_ASC.shape, view.block_rows, times)
        if key not in self._programs:

            def attend(q: jax.Array, view: View) -> Any:
                return paged_interval_attention(q, view, backend=backend)

            def step(q: jax.Array, view: View) -> jax.Array:
                return attend(q, view)[0]

            function = gpu.chained(step, times) if times else attend
            self._programs[key] = jax.jit(function).lower(q, view).compile()
        return self._programs[key]

    def block_rows(self, backend: str, mask: Mask, page_size: int) -> int | None:
        """The largest block of rows that the backend takes for the mask; None if it takes none."""
        if mask.name.startswith("decode"):
            choices: tuple[int, ...] = (1,)
        else:
            groups = 1 << (self.model.heads // self.model.kv_heads - 1).bit_length()
            choices = (128 // groups, 64 // groups)
        for block in choices:
            if len(mask.index_T) % block == 0 and self.refusal(backend, mask, page_size, block) is None:
                return block
        return None

    def refusal(self, backend: str, mask: Mask, page_size: int, block_rows: int) -> str | None:
        """Why the backend does not serve the mask here."""
        q = jax.ShapeDtypeStruct((len(mask.index_T), self.model.heads, self.model.dim), jnp.dtype(self.model.dtype))
        return BACKENDS[backend].refusal(q, abstract_view(self.model, mask, page_size, block_rows), self.device)

    def backends(self, mask: Mask, page_size: int) -> list[str]:
        """The kernels that serve the mask; XLA where there is no GPU."""
        served = [b for b in KERNELS if self.block_rows(b, mask, page_size) is not None]
        return served or ([] if self.device.platform == "gpu" else ["xla"])

    def measure(self, backend: str, mask: Mask, page_size: int) -> dict[str, Any]:
        """Time a backend on a mask, with a spot check of what it computed."""
        block = self.block_rows(backend, mask, page_size)
        assert block is not None
        view, q = self.view(mask, page_size, block), self.queries(len(mask.index_T))
        single = self.program(backend, q, view, 0)
        error = spot_error(mask, q, single(q, view)[0], view)
        limit = SPOT_TOLERANCE[self.model.dtype]
        if not error <= limit:
            raise ArithmeticError(f"wrong result: relative error {error:.3g}, at most {limit:g} is right")
        times = self.model.loop if mask.name.startswith("decode") else 0
        program = self.program(backend, q, view, times)
        ms = gpu.milliseconds(lambda: program(q, view), samples=self.samples) / max(times, 1)
        return {**self.figures(mask, view, ms), "error": error, "temp_bytes": temporary_bytes(single)}

    def figures(self, mask: Mask, view: View, ms: float) -> dict[str, Any]:
        """What follows from a time and the lists."""
        m, slots = self.model, view.pages.page_size
        pairs, whole = masks.visited_tiles(view.blocks) * view.block_rows * slots, masks.pairs(mask)
        found: dict[str, Any] = {
            "ms": ms,
            "tflops": 4 * pairs * m.dim * m.heads / ms / 1e9,
            "visible_share": masks.visible_pairs(mask) / whole,
            "visited_share": pairs / whole,
            "block_rows": view.block_rows,
        }
        if mask.name.startswith("decode"):
            bytes_read = 2 * len(mask.index_N) * m.kv_heads * m.dim * jnp.dtype(m.dtype).itemsize
            found["gb_s"] = bytes_read / ms / 1e6
        return found

    def known(self, mask: Mask, backend: str, page_size: int) -> dict[str, Any]:
        """What a row says before it is measured."""
        return {
            "case": mask.name, "backend": backend, "dtype": self.model.dtype, "head_dim": self.model.dim,
            "rows": len(mask.index_T), "keys": len(mask.index_N), "page_size": page_size, "peer": None, "ratio": None,
        }  # fmt: skip


def abstract_view(model: Model, mask: Mask, page_size: int, block_rows: int) -> View:
    """The view of a mask, shapes alone."""
    entries = jax.eval_shape(lambda: masks.entries_of(mask, page_size))
    total = len(mask.index_N) // page_size
    pages = jax.eval_shape(
        lambda: masks.random_pages(jax.random.key(0), total, page_size, model.kv_heads, model.dim, model.dtype)
    )
    rows = jax.eval_shape(lambda: masks.rows_of(mask))
    table = jax.eval_shape(lambda: Rotation(*(jnp.zeros((model.context, model.dim // 2)) for _ in range(2))))
    scale = float(model.dim**-0.5)
    return jax.eval_shape(partial(View.build, layer=0, scale=scale, block_rows=block_rows), rows, pages,
                          entries=entries, rotation=table)  # fmt: skip


def spot_error(mask: Mask, q_THD: jax.Array, out_THD: jax.Array, view: View) -> float:
    """Relative error of a few rows, in the first and the last KV head, against float64."""
    m_heads, kv_heads = q_THD.shape[1], view.pages.k_LPKCD.shape[2]
    groups = m_heads // kv_heads
    page_S = view.entries.page_AS[0]
    live = np.flatnonzero(mask.index_T >= 0)
    rows = live[np.linspace(0, len(live) - 1, SPOT_ROWS).astype(int)]
    q, out = (np.asarray(x[rows].astype(jnp.float32), np.float64) for x in (q_THD, out_THD))
    freq = frequencies(q_THD.shape[2])
    got, what = [], []
    for kv_head in dict.fromkeys((0, kv_heads - 1)):
        k_ND, v_ND = (
            np.asarray(x[0, page_S, kv_head].astype(jnp.float32), np.float64).reshape(-1, q.shape[-1])
            for x in (view.pages.k_LPKCD, view.pages.v_LPKCD)
        )
        k_ND = oracle.turn(k_ND, mask.offset_N.astype(np.int64), freq)
        for i, t in enumerate(rows):
            order = mask.index_T[t]
            hidden = (mask.hide_from_N <= order) & (order < mask.hide_until_N)
            seen = (mask.request_N == mask.request_T[t]) & (mask.index_N <= order) & ~hidden
            own = slice(kv_head * groups, (kv_head + 1) * groups)
            logits = view.scale * (q[i, own] @ k_ND[seen].T)
            prob = np.exp(logits - logits.max(axis=1, keepdims=True))
            what.append(prob / prob.sum(axis=1, keepdims=True) @ v_ND[seen])
            got.append(out[i, own])
    return float(oracle.worst_error(np.concatenate(got), np.concatenate(what)))


def temporary_bytes(program: Any) -> int | None:
    """Memory a program takes besides its arguments and results, where the backend tells."""
    analysis = program.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def list_bytes(blocks: Blocks) -> tuple[int, int]:
    """Bytes of all block lists, and of the largest of them."""
    sizes = [x.nbytes for x in jax.tree.leaves(blocks)]
    return sum(sizes), max(sizes)


def measure_lists(bench: Bench, mask: Mask, page_size: int, block_rows: int) -> dict[str, Any]:
    """Time to build the block lists of a mask, once a step for all layers, and their size."""
    rows, entries = masks.rows_of(mask), masks.entries_of(mask, page_size)
    program = masks.build_lists.lower(rows, entries, block_rows=block_rows).compile()
    total, largest = list_bytes(program(rows, entries))
    return {
        "ms": gpu.milliseconds(lambda: program(rows, entries), samples=bench.samples),
        "block_rows": block_rows,
        "list_bytes": total,
        "largest_list_bytes": largest,
        "temp_bytes": temporary_bytes(program),
    }


def plan(model: Model) -> Iterator[Mask]:
    """Masks in the order of their importance."""
    low, high = model.pieces
    long = model.lengths[0]
    cut = {"low": low, "high": high}
    yield masks.chunks(long, **cut)
    yield masks.tree(long, **cut)
    yield masks.causal(long)
    yield masks.recompute(long, model.recomputed, moved=False, **cut)
    yield masks.recompute(long, model.recomputed, moved=True, **cut)
    yield masks.decode(model.batch, model.context, moved=False, **cut)
    yield masks.decode(model.batch, model.context, moved=True, **cut)
    yield replace(masks.recompute(long, long, moved=True, **cut), name="all-rows-moved")
    yield masks.graph(long)
    for short in model.lengths[1:]:
        yield masks.chunks(short, **cut)
        yield masks.tree(short, **cut)
        yield masks.causal(short)
        yield masks.graph(short)


def timings(record: gpu.Record, bench: Bench) -> None:
    """Measure all masks by all kernels that serve them: the first page size first."""
    model = bench.model
    for page_size in model.page_sizes:
        extra = masks.patched(model.lengths[0], model.recomputed, page_size, low=model.pieces[0], high=model.pieces[1])
        lists_of = masks.chunks(model.lengths[0], low=model.pieces[0], high=model.pieces[1])
        groups = model.heads // model.kv_heads
        known = bench.known(lists_of, "xla", page_size) | {"case": "block-lists"}
        key = f"block-lists/{page_size}"
        record.row(key, known, lambda: measure_lists(bench, lists_of, page_size, 128 // groups))  # noqa: B023
        for mask in (*plan(model), extra):
            for backend in bench.backends(mask, page_size):
                known = bench.known(mask, backend, page_size)
                key = f"{mask.name}/{len(mask.index_N)}/{backend}/{page_size}"
                record.row(key, known, lambda: bench.measure(backend, mask, page_size))  # noqa: B023


def backward(record: gpu.Record, bench: Bench) -> None:
    """Time forward and backward of the training op under isolated chunks."""
    mask = masks.chunks(bench.model.backward, low=bench.model.pieces[0], high=bench.model.pieces[1])
    for backend in ("triton",) if bench.device.platform == "gpu" else ("xla",):
        known = bench.known(mask, backend, 0) | {"case": "backward", "page_size": None}
        record.row(f"backward/{backend}", known, lambda: measure_backward(bench, mask, backend))  # noqa: B023


def measure_backward(bench: Bench, mask: Mask, backend: str) -> dict[str, Any]:
    """Forward and backward together; the gradients of a shorter prompt beside those of the dense definition."""
    m = bench.model
    short = masks.chunks(512, low=32, high=128, join=32)
    got, what = (_gradients(m, short, name)[0] for name in (backend, "reference"))
    pairs_of = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(got(), what(), strict=True)]
    error = max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs_of)
    if not error <= SPOT_TOLERANCE[m.dtype]:
        raise ArithmeticError(f"wrong result: relative error of a gradient {error:.3g}")
    work, pairs, temp = _gradients(m, mask, backend)
    ms = gpu.milliseconds(work, samples=bench.samples)
    # two products forward, five backward
    return {"ms": ms, "tflops": 14 * pairs * m.dim * m.heads / ms / 1e9, "error": error, "temp_bytes": temp}


def _gradients(m: Model, mask: Mask, backend: str) -> tuple[Callable[[], Any], int, int | None]:
    """The gradients of q, k and v as a call, the pairs that its tiles cover, and its temporary memory."""
    from ragjax.kernels.train_attention.mask import Mask as Tiled
    from ragjax.kernels.train_attention.mask import Tokens
    from ragjax.kernels.train_attention.op import train_attention

    tokens = Tokens(*(jnp.asarray(x) for x in (mask.index_T, mask.request_T, mask.hide_from_N, mask.hide_until_N)))
    tiled = jax.jit(Tiled.build)(tokens)
    rows, dtype = len(mask.index_T), jnp.dtype(m.dtype)
    heads = (m.heads, m.kv_heads, m.kv_heads, m.heads)
    q, k, v, dout = (jax.random.normal(jax.random.key(i), (rows, h, m.dim), dtype) for i, h in enumerate(heads))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, tiled: Tiled) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return train_attention(q, k, v, tiled, scale=float(m.dim**-0.5), backend=backend)[0]

        return jax.vjp(attend, q, k, v)[1](dout)

    program = jax.jit(gradients).lower(q, k, v, dout, tiled).compile()
    pairs = int(np.asarray(tiled.by_rows.count_N, np.int64).sum()) * tiled.block_rows * tiled.block_keys
    return lambda: program(q, k, v, dout, tiled), pairs, temporary_bytes(program)


# ---------------------------------------------------------------------------------------------- gates

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


def gates(rows: Sequence[report.Row], limits: gpu.Ceilings, model: Model) -> list[report.Row]:
    """The targets that this part can judge. Speed is that of the best page size, in the worst mask and length."""
    timed = [r for r in rows if "ms" in r]
    found = []
    for backend, least in (("triton", 280.0), ("mosaic", 450.0)):
        speed = _worst_of_best(timed, backend, ("chunks", "tree"), model.lengths)
        found.append(gpu.gate(f"prefill under a dependency mask, {backend}", f">= {least:g} TFLOP/s", speed,
                              lambda x, least=least: x >= least, "visited tiles only"))  # fmt: skip
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
    best = []
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


# ----------------------------------------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = gpu.options("kernels", (__doc__ or "").partition("\n")[0], arguments)
    clock = gpu.Clock(chosen.seconds)
    gpu.choose_platform(chosen, 0.8)
    limits = gpu.ceilings(chosen.quick)
    record = gpu.Record(chosen, gpu.header(chosen, limits, arguments), clock)
    bench = Bench(REHEARSAL, 2) if chosen.quick else Bench()
    matrix: list[report.Row] = []
    try:
        matrix = correctness(record, QUICK_SHAPES if chosen.quick else SHAPES)
        timings(record, bench)
        backward(record, bench)
    except KeyboardInterrupt:
        print("stopped: what was measured so far follows", file=sys.stderr)
        record.skipped.append("what was left when it was stopped")
    right = show_correctness(matrix) and bool(matrix)
    return finish(record, bench, limits, right)


def finish(record: gpu.Record, bench: Bench, limits: gpu.Ceilings, right: bool) -> int:
    """Print timings and targets, write the report; the exit code."""
    record.rows = dict(zip(record.rows, with_ratios(list(record.rows.values())), strict=True))
    timed = [r for r in record.rows.values() if r["case"] != "correctness"]
    print("\ntimings, median of runs of many calls each:\n" + report.table(timed, COLUMNS))
    judged = gates(timed, limits, bench.model)
    gpu.show_gates(judged)
    print("targets beside FlashAttention and FlexAttention: python -m benchmarks.peers")
    record.finish(judged)
    return 0 if right and not any(_is_wrong(r) for r in timed) else 1


def _is_wrong(row: Mapping[str, Any]) -> bool:
    return "wrong result" in str(row.get("failed", ""))


if __name__ == "__main__":
    sys.exit(main())
