"""The speed of attention backends: arrays on the device, programs, and what follows from a time.

Each timing comes with a spot check of its result; TFLOP/s count the tiles that the block lists name, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import gpu, machine
from benchmarks.kernels import masks
from benchmarks.kernels.masks import Mask
from benchmarks.kernels.oracle import frequencies, oracle, rotation
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
KERNELS = ("triton", "mosaic", "jax_triton")
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
        ms = machine.milliseconds(lambda: program(q, view), samples=self.samples) / max(times, 1)
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
    """Bytes of all block lists, and of the largest of them."""
    sizes = [x.nbytes for x in jax.tree.leaves(blocks)]
    return sum(sizes), max(sizes)


def measure_lists(bench: Bench, mask: Mask, page_size: int, block_rows: int) -> dict[str, Any]:
    """Time to build the block lists of a mask, once a step for all layers, and their size."""
    rows, entries = masks.rows_of(mask), masks.entries_of(mask, page_size)
    program = masks.build_lists.lower(rows, entries, block_rows=block_rows).compile()
    total, largest = list_bytes(program(rows, entries))
    return {
        "ms": machine.milliseconds(lambda: program(rows, entries), samples=bench.samples),
        "block_rows": block_rows,
        "list_bytes": total,
        "largest_list_bytes": largest,
        "temp_bytes": temporary_bytes(program),
    }


def plan(model: Model) -> Iterator[Mask]:
    """Masks in the order of their importance."""
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
