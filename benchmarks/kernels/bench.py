"""The speed of attention backends: arrays on the device, programs, and what follows from a time.

Each timing comes with a spot check of its result; TFLOP/s count the tiles that the block lists name, and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import benchmarks.baseline.attention  # noqa: F401 (registers its name)
from benchmarks.common import gpu, machine, report
from benchmarks.common.machine import Ceilings
from benchmarks.kernels import masks
from benchmarks.kernels.masks import Mask, frequencies, oracle, rotation
from ragjax.kernels.attention.op import BACKENDS, paged_interval_attention
from ragjax.kernels.blocks import Blocks
from ragjax.kernels.device import Device
from ragjax.kernels.pages import Pages
from ragjax.kernels.rope import Rotation
from ragjax.kernels.view import View


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
KERNELS = ("cpu", "triton", "mosaic", "jax_triton")
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
        return Device.of(jax.devices()[0])

    @cached_property
    def table(self) -> Rotation:
        return rotation(self.model.dim, max(*self.model.lengths, self.model.context))

    @property
    def scale(self) -> float:
        return float(self.model.dim**-0.5)

    def pages(self, total: int, page_size: int) -> Pages:
        if (total, page_size) not in self._pages:
            m = self.model
            self._pages = {(total, page_size): masks.random_pages(
                jax.random.key(1), total, page_size, m.kv_heads, m.dim, m.dtype)}  # fmt: skip
        return self._pages[total, page_size]

    def queries(self, rows: int) -> jax.Array:
        if rows not in self._queries:
            shape = (rows, self.model.heads, self.model.dim)
            self._queries = {rows: jax.random.normal(jax.random.key(0), shape, jnp.dtype(self.model.dtype))}
        return self._queries[rows]

    def view(self, mask: Mask, page_size: int, block_rows: int) -> View:
        key = (mask.name, len(mask.index_N), page_size, block_rows)
        if key not in self._views:
            pages = self.pages(len(mask.index_N) // page_size, page_size)
            self._views = {key: masks.view_of(mask, pages, self.table, self.scale, block_rows)}
        return self._views[key]

    def program(self, backend: str, q: jax.Array, view: View, times: int) -> Any:
        """Attention by a backend; with `times`, that many calls one after the other, output alone."""
        key = (backend, q.shape, view.entries.index_SC.shape, view.block_rows, times)
        if key not in self._programs:

            def attend(q: jax.Array, view: View) -> Any:
                return paged_interval_attention(q, view, backend=backend)

            def step(q: jax.Array, view: View) -> jax.Array:
                out: jax.Array = attend(q, view)[0]
                return out

            function = machine.chained(step, times) if times else attend
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
        q: Any = jax.ShapeDtypeStruct(
            (len(mask.index_T), self.model.heads, self.model.dim), jnp.dtype(self.model.dtype)
        )
        return BACKENDS[backend].refusal(q, abstract_view(self.model, mask, page_size, block_rows), self.device)

    def backends(self, mask: Mask, page_size: int) -> list[str]:
        """The kernels that serve the mask, and XLA where there is no GPU."""
        served = [b for b in KERNELS if self.block_rows(b, mask, page_size) is not None]
        return served if self.device.platform == "gpu" else [*served, "xla"]

    def measure(self, backend: str, mask: Mask, page_size: int) -> dict[str, Any]:
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
        ms = machine.milliseconds(lambda: program(q, view), samples=self.samples) / max(times, 1)
        return {**self.figures(mask, view, ms), "error": error, "temp_bytes": temporary_bytes(single)}

    def figures(self, mask: Mask, view: View, ms: float) -> dict[str, Any]:
        m, slots = self.model, view.pages.page_size
        pairs, whole = masks.visited_tiles(view.blocks) * view.block_rows * slots, masks.pairs(mask)
        found: dict[str, Any] = {
            "ms": ms, "tflops": 4 * pairs * m.dim * m.heads / ms / 1e9,
            "visible_share": masks.visible_pairs(mask) / whole, "visited_share": pairs / whole,
            "block_rows": view.block_rows,
        }  # fmt: skip
        if mask.name.startswith("decode"):
            bytes_read = 2 * len(mask.index_N) * m.kv_heads * m.dim * jnp.dtype(m.dtype).itemsize
            found["gb_s"] = bytes_read / ms / 1e6
        return found

    def known(self, mask: Mask, backend: str, page_size: int) -> dict[str, Any]:
        return {
            "case": mask.name, "backend": backend, "dtype": self.model.dtype, "head_dim": self.model.dim,
            "rows": len(mask.index_T), "keys": len(mask.index_N), "page_size": page_size, "peer": None, "ratio": None,
        }  # fmt: skip


def abstract_view(model: Model, mask: Mask, page_size: int, block_rows: int) -> View:
    entries = jax.eval_shape(lambda: masks.entries_of(mask, page_size))
    total = len(mask.index_N) // page_size
    pages = jax.eval_shape(
        lambda: masks.random_pages(jax.random.key(0), total, page_size, model.kv_heads, model.dim, model.dtype)
    )
    rows = jax.eval_shape(lambda: masks.rows_of(mask))
    table = jax.eval_shape(lambda: Rotation(*(jnp.zeros((model.context, model.dim // 2)) for _ in range(2))))
    scale = float(model.dim**-0.5)
    view: View = jax.eval_shape(partial(View.build, layer=0, scale=scale, block_rows=block_rows), rows, pages,
                                entries=entries, rotation=table)  # fmt: skip
    return view


def spot_error(mask: Mask, q_THD: jax.Array, out_THD: jax.Array, view: View) -> float:
    """Relative error of a few rows, in the first and the last KV head, against float64."""
    m_heads, kv_heads = q_THD.shape[1], view.pages.k_LPKCD.shape[2]
    groups = m_heads // kv_heads
    page_S = view.entries.page_S
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
        k_ND = oracle.rotate(k_ND, mask.offset_N.astype(np.int64), freq)
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
    sizes = [x.nbytes for x in jax.tree.leaves(blocks)]
    return sum(sizes), max(sizes)


def measure_lists(bench: Bench, mask: Mask, page_size: int, block_rows: int) -> dict[str, Any]:
    """Time to build the block lists of a mask, once a step for all layers, and their size."""
    rows, entries = masks.rows_of(mask), masks.entries_of(mask, page_size)
    program = masks.build_lists.lower(rows, entries, block_rows=block_rows).compile()
    total, largest = list_bytes(program(rows, entries))
    return {
        "ms": machine.milliseconds(lambda: program(rows, entries), samples=bench.samples), "block_rows": block_rows,
        "list_bytes": total, "largest_list_bytes": largest, "temp_bytes": temporary_bytes(program),
    }  # fmt: skip


def plan(model: Model) -> Iterator[Mask]:
    low, high = model.pieces
    long = model.lengths[0]
    cut: Any = {"low": low, "high": high}
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
    ms = machine.milliseconds(work, samples=bench.samples)
    # two products forward, five backward
    return {"ms": ms, "tflops": 14 * pairs * m.dim * m.heads / ms / 1e9, "error": error, "temp_bytes": temp}


def _gradients(m: Model, mask: Mask, backend: str) -> tuple[Callable[[], Any], int, int | None]:
    """The gradients of q, k and v as a call, the pairs that its tiles cover, and its temporary memory."""
    from train.attention.mask import Mask as Tiled
    from train.attention.mask import Tokens
    from train.attention.op import train_attention

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


PRE_ROTATED, ALL_ROWS = "pre-rotated keys", "all rows"


def with_ratios(rows: Sequence[report.Row]) -> list[report.Row]:
    def same(row: report.Row, case: str) -> report.Row | None:
        alike = ("backend", "page_size", "keys")
        return next((r for r in rows if r["case"] == case and "ms" in r and all(r[a] == row[a] for a in alike)), None)

    rivals = {
        "recompute-moved": ("recompute-in-place", PRE_ROTATED), "decode-moved": ("decode-in-place", PRE_ROTATED),
        "all-rows-moved": ("causal", PRE_ROTATED), "recompute-in-place": ("causal", ALL_ROWS),
    }  # fmt: skip
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
