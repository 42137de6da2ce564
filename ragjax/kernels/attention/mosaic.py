"""`paged_interval_attention` in Pallas Mosaic GPU, for prefill and selective recompute on Hopper.

Source: a producer warpgroup that copies by TMA and compute warpgroups that multiply with wgmma, as in FlashAttention-3
(arXiv 2407.08608 §3.1), over the lists of `blocks.py`. The query heads of a KV head are folded into rows; a program
takes one or two tiles of 64 folded rows of one row block, a compute warpgroup each, and its own copy of the walk
through the block's list. A query tile is rotated once a run of equal offset, in shared memory, where wgmma reads it.

Barriers. The producer and each compute warpgroup walk the same list, item j using stage j mod `stages`.
  key_ready, value_ready [stage]: the TMA of an item's keys, values has landed; computers wait once an item.
  slots_ready [stage]: three TMAs (order, hide_from, hide_until), for partial items alone; both sides know which.
  key_free, value_free [stage]: every compute warpgroup has read them; the producer waits for the release of item
      j - stages before it fills item j, so never in a list's first `stages` items. Slots are read before the
      values are released, and refilled after value_free.
  run_ready, run_free [run mod 2]: likewise for the rotation of a run.
Each wait thus meets one completed phase, in order; a barrier is at most one phase ahead of its waiter, since its next
completion needs a copy that comes after that wait. At the end the producer drains the releases that no refill waited
for, so that every phase has been seen when the program ends. An empty list starts no copy and waits for none.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ragjax.kernels.device import Device
from ragjax.kernels.view import View

Ref = Any
Transforms = tuple[Any, ...]

TILE = 64
"""Folded rows of a compute warpgroup: M of wgmma."""

SHARED_BYTES = 232448
"""Shared memory a program may use on compute capability 9.0."""

LOWEST = -1e30
"""Below every logit, yet finite: a row that has seen nothing then needs no case of its own."""

LOG2_E = math.log2(math.e)
DIMS = (64, 128)
CELLS = (64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
QUERY_DTYPES = (jnp.float32, *DTYPES)

MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class _Sizes:
    """What is static in a call."""

    block_rows: int
    heads: int
    kv_heads: int
    dim: int
    slots: int
    pages: int
    query_dtype: jnp.dtype
    dtype: jnp.dtype
    scale: float
    interpret: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def half(self) -> int:
        return self.dim // 2

    @property
    def tiles(self) -> int:
        """Tiles of a block's folded rows; the last may be filled up with rows that are computed and dropped."""
        return -(-self.block_rows * self.group // TILE)

    @property
    def computers(self) -> int:
        """Compute warpgroups of a program: two share each copy of keys and values, where the memory suffices."""
        return 2 if self.tiles > 1 and self._room(2) >= 2 else 1

    @property
    def programs(self) -> int:
        return -(-self.tiles // self.computers)

    @property
    def stages(self) -> int:
        """Items of a list in shared memory at a time."""
        return min(4, self._room(self.computers))

    @property
    def piece(self) -> int:
        """Rows of a tile that belong to one query head, side by side in memory."""
        return min(self.block_rows, TILE)

    @property
    def pieces(self) -> int:
        return TILE // self.piece

    def _room(self, computers: int) -> int:
        """Stages that fit beside the queries of `computers` tiles, two rotations and the barriers."""
        query = TILE * (self.dim * (self.query_dtype.itemsize + self.dtype.itemsize) + 4)
        stage = self.slots * (2 * self.dim * self.dtype.itemsize + 3 * 4)
        return (SHARED_BYTES - computers * query - 2 * self.dim * 4 - 1024) // stage

    def place(self, tile: jax.Array, piece: int) -> tuple[jax.Array, jax.Array]:
        """The head within the group, and the first row within the block, of a piece of a tile."""
        row = tile * TILE + piece * self.piece
        return lax.div(row, jnp.int32(self.block_rows)), lax.rem(row, jnp.int32(self.block_rows))


class _Inputs(NamedTuple):
    """In global memory. Keys and values are rows of one matrix: layer, page, KV head, slot."""

    q_THD: Ref
    index_NM: Ref
    high_N: Ref
    k: Ref
    v: Ref
    layer: Ref
    page_S: Ref
    offset_S: Ref
    index_SC: Ref
    hide_from_SC: Ref
    hide_until_SC: Ref
    cos_NR: Ref
    sin_NR: Ref
    entry_NS: Ref
    partial_NU: Ref
    end_NU: Ref
    runs_N: Ref


class _Shared(NamedTuple):
    """In shared memory; leading axes are compute warpgroups, stages or the two rotations."""

    q: Ref
    order: Ref
    turned: Ref
    k: Ref
    v: Ref
    slots: Ref
    cos: Ref
    sin: Ref
    query_ready: Ref
    key_ready: Ref
    value_ready: Ref
    slots_ready: Ref
    run_ready: Ref
    key_free: Ref
    value_free: Ref
    run_free: Ref
    staging: Ref | None = None


class _Place(NamedTuple):
    """Which program this is: the row block and the KV head."""

    block: jax.Array
    kv_head: jax.Array


class _State(NamedTuple):
    """Online softmax in base 2: sum of weighted values [M, D], largest logit and sum of weights [M]."""

    acc: jax.Array
    peak: jax.Array
    total: jax.Array


class _Run(NamedTuple):
    """Where a run's partial items begin, where it ends, and the offset of its entries."""

    partial: jax.Array
    end: jax.Array
    offset: jax.Array


def refusal(q_THD: jax.Array, view: View, device: Device) -> str | None:
    """Why this backend cannot serve the call on the device, or None."""
    if lack := device.lacks((9, 0)):
        return lack
    if device.capability >= (10, 0):
        return f"wgmma needs compute capability 9.x, not {'.'.join(map(str, device.capability))}"
    return _unfit(q_THD, view)


def _unfit(q_THD: jax.Array, view: View) -> str | None:
    """Why no device could serve the call here."""
    _, heads, dim = q_THD.shape
    _, _, kv_heads, slots, _ = view.pages.k_LPKCD.shape
    b, folded = view.block_rows, view.block_rows * (heads // kv_heads)
    for name, value, among in (
        ("head dim", dim, DIMS),
        ("page size", slots, CELLS),
        ("pool dtype", view.pages.k_LPKCD.dtype, DTYPES),
        ("query dtype", q_THD.dtype, QUERY_DTYPES),
    ):
        if value not in among:
            return f"{name} {value} is none of {', '.join(jnp.dtype(x).name if callable(x) else str(x) for x in among)}"
    if b < 8 or (TILE % b and b % TILE):
        return f"block_rows {b} is neither 8, 16, 32 nor a multiple of {TILE}"
    if folded < TILE:
        return f"{b} rows x {heads // kv_heads} query heads a KV head do not fill the {TILE} rows of a wgmma"
    return None


def attend(q_THD: jax.Array, view: View, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """See `attention.paged_interval_attention`.

    Args:
        q_THD: float32, bfloat16 or float16; D is 64 or 128.
        view: with a bfloat16 or float16 pool of pages of 64 or 128 slots, and blocks of 8, 16, 32 or a multiple of 64
            rows that fill at least 64 rows when the query heads of a KV head are folded into them.
        interpret: run on CPU, in JAX's simulation of a GPU's memory and barriers (jax 0.11 and up).

    Raises:
        ValueError: saying why the call cannot be served.
    """
    reason = _unfit(q_THD, view)
    if reason is not None:
        raise ValueError(f"the mosaic backend cannot serve this call: {reason}")
    t, heads, dim = q_THD.shape
    _, pages, kv_heads, slots, _ = view.pages.k_LPKCD.shape
    sizes = _Sizes(
        view.block_rows,
        heads,
        kv_heads,
        dim,
        slots,
        pages,
        q_THD.dtype,
        view.pages.k_LPKCD.dtype,
        view.scale,
        interpret,
    )
    n, m = t // view.block_rows, sizes.programs * sizes.computers * TILE
    kernel = plgpu.kernel(
        functools.partial(_kernel, sizes),
        out_type=(
            jax.ShapeDtypeStruct(q_THD.shape, q_THD.dtype),
            jax.ShapeDtypeStruct((n, kv_heads, m), jnp.float32),
        ),
        scratch_types=_scratch(sizes),
        # last axis first: programs side by side in time read much the same pages
        grid=(kv_heads, sizes.programs, n),
        grid_names=("kv_head", "program", "block"),
        num_threads=sizes.computers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": _simulation()} if interpret else {}),
    )
    out_THD, lse_NKM = kernel(*_inputs(q_THD, view, m))
    lse_NKGB = lse_NKM[:, :, : sizes.group * view.block_rows].reshape(n, kv_heads, sizes.group, view.block_rows)
    return out_THD, lse_NKGB.transpose(0, 3, 1, 2).reshape(t, heads)


def _simulation() -> Any:
    """JAX's own module of it is not public in every supported version."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def _inputs(q_THD: jax.Array, view: View, folded: int) -> _Inputs:
    """Views and small arrays; the pool is not copied."""
    rows, entries, blocks, pages = view.rows, view.entries, view.blocks, view.pages
    index_NB = rows.index_T.reshape(-1, view.block_rows)
    index_NM = jnp.tile(index_NB, (1, -(-folded // view.block_rows)))[:, :folded]
    dim = q_THD.shape[-1]
    return _Inputs(
        q_THD=q_THD,
        index_NM=index_NM,
        high_N=index_NB.max(1),
        k=pages.k_LPKCD.reshape(-1, dim),
        v=pages.v_LPKCD.reshape(-1, dim),
        layer=jnp.asarray(view.layer, jnp.int32).reshape(1),
        page_S=entries.page_AS[0],
        offset_S=entries.offset_AS[0],
        index_SC=entries.index_ASC[0],
        hide_from_SC=entries.hide_from_ASC[0],
        hide_until_SC=entries.hide_until_ASC[0],
        cos_NR=view.rotation.cos_NR,
        sin_NR=view.rotation.sin_NR,
        entry_NS=blocks.entry_NS,
        partial_NU=blocks.partial_NU,
        end_NU=blocks.end_NU,
        runs_N=blocks.runs_N,
    )


def _scratch(sizes: _Sizes) -> dict[str, Any]:
    c, d, w, s = sizes.slots, sizes.dim, sizes.computers, sizes.stages
    half = _tiled(sizes.half, sizes.dtype)  # halves of a head are rotated apart, so no tile may span both
    scratch = {
        "q": plgpu.SMEM((w, TILE, d), sizes.query_dtype, transforms=_tiled(sizes.half, sizes.query_dtype)),
        "order": plgpu.SMEM((w, TILE), jnp.int32),
        "turned": plgpu.SMEM((w, TILE, d), sizes.dtype, transforms=half),
        "k": plgpu.SMEM((s, c, d), sizes.dtype, transforms=half),
        "v": plgpu.SMEM((s, c, d), sizes.dtype, transforms=_tiled(d, sizes.dtype)),
        "slots": plgpu.SMEM((s, 3, c), jnp.int32),
        "cos": plgpu.SMEM((2, sizes.half), jnp.float32),
        "sin": plgpu.SMEM((2, sizes.half), jnp.float32),
        "query_ready": plgpu.Barrier(num_arrivals=sizes.pieces + 1, num_barriers=w),
        "key_ready": plgpu.Barrier(num_barriers=s),
        "value_ready": plgpu.Barrier(num_barriers=s),
        "slots_ready": plgpu.Barrier(num_arrivals=3, num_barriers=s),
        "run_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "key_free": plgpu.Barrier(num_arrivals=w, num_barriers=s),
        "value_free": plgpu.Barrier(num_arrivals=w, num_barriers=s),
        "run_free": plgpu.Barrier(num_arrivals=w, num_barriers=2),
    }
    if sizes.interpret:
        scratch["staging"] = plgpu.SMEM((w, TILE, c), sizes.dtype, transforms=_tiled(c, sizes.dtype))
    return scratch


def _tiled(columns: int, dtype: jnp.dtype) -> Transforms:
    """Tiles of 8 rows by at most 128 bytes, swizzled, as wgmma and TMA want them."""
    swizzle = min(128, columns * dtype.itemsize)
    return plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(sizes: _Sizes, *refs: Ref, **scratch: Ref) -> None:
    inputs, (out_THD, lse_NKM) = _Inputs(*refs[:-2]), refs[-2:]
    shared = _Shared(**scratch)
    last = jnp.int32(inputs.entry_NS.shape[0] - 1)
    # the last blocks first: as a rule they have the longest lists, and a sweep should end with short ones
    place = _Place(last - lax.axis_index("block"), lax.axis_index("kv_head"))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < sizes.computers)
    def _() -> None:
        if sizes.computers == 2:
            plgpu.set_max_registers(240, action="increase")
        _compute(sizes, inputs, shared, place, warpgroup, out_THD, lse_NKM)

    @pl.when(warpgroup == sizes.computers)
    def _() -> None:
        if sizes.computers == 2:
            plgpu.set_max_registers(24, action="decrease")
        _produce(sizes, inputs, shared, place)


# ------------------------------------------------------------------------------------------- producer


def _produce(sizes: _Sizes, inputs: _Inputs, shared: _Shared, place: _Place) -> None:
    """Copy the rotation of each run and the keys, values and slots of each item, as room comes free."""
    first_page = inputs.layer[0] * sizes.pages

    def item(j: jax.Array, partial: jax.Array) -> jax.Array:
        entry = inputs.entry_NS[place.block, j]
        row = ((first_page + inputs.page_S[entry]) * sizes.kv_heads + place.kv_head) * sizes.slots
        slots = pl.ds(row, sizes.slots)
        stage = lax.rem(j, jnp.int32(sizes.stages))
        used = j >= sizes.stages
        _wait_if(used, shared.key_free.at[stage])
        plgpu.copy_gmem_to_smem(inputs.k.at[slots], shared.k.at[stage], shared.key_ready.at[stage])
        _wait_if(used, shared.value_free.at[stage])

        @pl.when(j >= partial)
        def _() -> None:
            for i, bounds in enumerate((inputs.index_SC, inputs.hide_from_SC, inputs.hide_until_SC)):
                plgpu.copy_gmem_to_smem(bounds.at[entry], shared.slots.at[stage, i], shared.slots_ready.at[stage])

        plgpu.copy_gmem_to_smem(inputs.v.at[slots], shared.v.at[stage], shared.value_ready.at[stage])
        return partial

    def run(u: jax.Array, begin: jax.Array) -> jax.Array:
        bounds = _bounds(inputs, place, u, begin)
        parity = lax.rem(u, jnp.int32(2))
        angle = lax.abs(bounds.offset)
        _wait_if(u >= 2, shared.run_free.at[parity])
        plgpu.copy_gmem_to_smem(inputs.cos_NR.at[angle], shared.cos.at[parity], shared.run_ready.at[parity])
        plgpu.copy_gmem_to_smem(inputs.sin_NR.at[angle], shared.sin.at[parity], shared.run_ready.at[parity])
        lax.fori_loop(begin, bounds.end, item, bounds.partial)
        return bounds.end

    runs = inputs.runs_N[place.block]
    count = lax.fori_loop(0, runs, run, jnp.int32(0))
    _drain(count, sizes.stages, shared.key_free, shared.value_free)
    _drain(runs, 2, shared.run_free)


def _drain(count: jax.Array, size: int, *free: Ref) -> None:
    """Wait for the releases of the last `size` of `count` fills, which no refill waits for."""

    def wait(i: jax.Array, carry: None) -> None:
        for barrier in free:
            plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(size))])

    lax.fori_loop(jnp.maximum(count - size, 0), count, wait, None)


def _bounds(inputs: _Inputs, place: _Place, u: jax.Array, begin: jax.Array) -> _Run:
    """Run u, which begins at item `begin`; behind the last run, anything."""
    last = jnp.int32(inputs.entry_NS.shape[1] - 1)
    run = place.block, jnp.minimum(u, last)
    entry = inputs.entry_NS[place.block, jnp.minimum(begin, last)]
    return _Run(inputs.partial_NU[run], inputs.end_NU[run], inputs.offset_S[entry])


def _wait_if(condition: jax.Array, barrier: Ref) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


# ------------------------------------------------------------------------------------------ computers


def _compute(
    sizes: _Sizes, inputs: _Inputs, shared: _Shared, place: _Place, warpgroup: jax.Array, out_THD: Ref, lse_NKM: Ref
) -> None:
    """One tile of folded rows, from its queries to its outputs."""
    tile = lax.axis_index("program") * sizes.computers + warpgroup
    q = shared.q.at[warpgroup]
    for i in range(sizes.pieces):
        head, row = sizes.place(tile, i)
        # rows that fill up the last tile take the last head's queries, so that each tile copies as many pieces
        source = _piece(sizes, inputs.q_THD, place, jnp.minimum(head, sizes.group - 1), row)
        plgpu.copy_gmem_to_smem(source, q.at[_rows_of_piece(sizes, i)], shared.query_ready.at[warpgroup])
    rows = pl.ds(tile * TILE, TILE)
    index_M = shared.order.at[warpgroup]
    plgpu.copy_gmem_to_smem(inputs.index_NM.at[place.block, rows], index_M, shared.query_ready.at[warpgroup])
    plgpu.barrier_wait(shared.query_ready.at[warpgroup])
    order = _load(index_M, PER_ROW)
    state = _walk(sizes, inputs, shared, place, warpgroup, order)
    dead = (state.total == 0.0) | (order < 0)
    total = jnp.where(dead, 1.0, state.total)
    lse_NKM[place.block, place.kv_head, rows] = jnp.where(dead, -jnp.inf, (state.peak + jnp.log2(total)) / LOG2_E)
    share = _across(jnp.where(dead, 0.0, 1.0 / total), (TILE, sizes.dim))
    q[...] = jnp.where(_across(dead, share.shape), 0.0, state.acc * share).astype(sizes.query_dtype)
    plgpu.commit_smem()
    for i in range(sizes.pieces):
        head, row = sizes.place(tile, i)
        target = _piece(sizes, out_THD, place, jnp.minimum(head, sizes.group - 1), row)
        pl.when(head < sizes.group)(functools.partial(plgpu.copy_smem_to_gmem, q.at[_rows_of_piece(sizes, i)], target))
    plgpu.wait_smem_to_gmem(0)


def _piece(sizes: _Sizes, x_THD: Ref, place: _Place, head: jax.Array, row: jax.Array) -> Ref:
    rows = pl.ds(place.block * sizes.block_rows + row, sizes.piece)
    return x_THD.at[rows, place.kv_head * sizes.group + head]


def _rows_of_piece(sizes: _Sizes, i: int) -> Any:
    return pl.ds(i * sizes.piece, sizes.piece)


def _walk(
    sizes: _Sizes, inputs: _Inputs, shared: _Shared, place: _Place, warpgroup: jax.Array, order: jax.Array
) -> _State:
    """Online softmax over the block's list, run after run."""
    high = inputs.high_N[place.block]
    step = functools.partial(_step, sizes, shared, warpgroup, order, high)

    def run(u: jax.Array, carry: tuple[jax.Array, _Run, _State]) -> tuple[jax.Array, _Run, _State]:
        begin, bounds, state = carry
        following = _bounds(inputs, place, u + 1, bounds.end)  # read a run ahead: nothing waits for global memory
        _turn(sizes, shared, warpgroup, u, bounds.offset)
        state = lax.fori_loop(begin, bounds.partial, functools.partial(step, masked=False), state)
        state = lax.fori_loop(bounds.partial, bounds.end, functools.partial(step, masked=True), state)
        return bounds.end, following, state

    empty = _State(_full((TILE, sizes.dim), 0.0, MATRIX), _full((TILE,), LOWEST, PER_ROW), _full((TILE,), 0.0, PER_ROW))
    first = jnp.int32(0)
    start = first, _bounds(inputs, place, first, first), empty
    walked: tuple[jax.Array, _Run, _State] = lax.fori_loop(0, inputs.runs_N[place.block], run, start)
    return walked[-1]


def _turn(sizes: _Sizes, shared: _Shared, warpgroup: jax.Array, u: jax.Array, offset: jax.Array) -> None:
    """Rotate the queries by minus the offset of run u, scale them for exp2, and put them where wgmma reads them."""
    parity = lax.rem(u, jnp.int32(2))
    plgpu.barrier_wait(shared.run_ready.at[parity])
    factor = jnp.float32(sizes.scale * LOG2_E)
    signed = jnp.where(offset < 0, -factor, factor)  # the table holds positive angles
    size = (TILE, sizes.half)
    cos = _along(_load(shared.cos.at[parity], PER_COLUMN) * factor, size)
    sin = _along(_load(shared.sin.at[parity], PER_COLUMN) * signed, size)
    halves = pl.ds(0, sizes.half), pl.ds(sizes.half, sizes.half)
    x1, x2 = (_load(shared.q.at[warpgroup, :, half], MATRIX).astype(jnp.float32) for half in halves)
    turned = shared.turned.at[warpgroup]
    turned[:, halves[0]] = (x1 * cos + x2 * sin).astype(sizes.dtype)
    turned[:, halves[1]] = (x2 * cos - x1 * sin).astype(sizes.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.run_free.at[parity])  # after the commit: TMA must not overtake the reads above


def _step(
    sizes: _Sizes,
    shared: _Shared,
    warpgroup: jax.Array,
    order: jax.Array,
    high: jax.Array,
    j: jax.Array,
    state: _State,
    *,
    masked: bool,
) -> _State:
    """Item j of the list, without masks if every row sees it whole."""
    stage = lax.rem(j, jnp.int32(sizes.stages))
    k, v = shared.k.at[stage], shared.v.at[stage]

    plgpu.barrier_wait(shared.key_ready.at[stage])
    logits = _product(shared.turned.at[warpgroup], k.transpose((1, 0)), sizes.slots)
    plgpu.barrier_arrive(shared.key_free.at[stage])
    if masked:
        plgpu.barrier_wait(shared.slots_ready.at[stage])
        logits = jnp.where(_seen(shared.slots.at[stage], order, logits.shape), logits, -jnp.inf)
    peak = jnp.maximum(state.peak, logits.max(axis=1))
    decay = jnp.exp2(state.peak - peak)
    weights = jnp.exp2(logits - _across(peak, logits.shape))
    total = state.total * decay + weights.sum(axis=1)
    acc = state.acc * _across(decay, state.acc.shape)
    plgpu.barrier_wait(shared.value_ready.at[stage])
    if masked:
        _clear(sizes, shared.slots.at[stage], v, high)
    acc = _weigh(sizes, shared, warpgroup, acc, weights.astype(sizes.dtype), v)
    plgpu.barrier_arrive(shared.value_free.at[stage])
    return _State(acc, peak, total)


def _seen(slots: Ref, order: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Which rows see which slots, by `entries.visible`; the entry is of the rows' request."""
    key, hide_from, hide_until = (_along(_load(slots.at[i], PER_COLUMN), size) for i in range(3))
    row = _across(order, size)
    return (key <= row) & ((row < hide_from) | (row >= hide_until))


def _clear(sizes: _Sizes, slots: Ref, v: Ref, high: jax.Array) -> None:
    """Zero the values of slots that no order up to the block's highest sees: they may hold NaN, and 0 * NaN is NaN.

    Each compute warpgroup does it for itself. Both write the same: what is there, or zero.
    """
    for row in range(0, sizes.slots, TILE):
        rows = pl.ds(row, TILE)
        order, hide_from, hide_until = (_load(slots.at[i, rows], PER_ROW) for i in range(3))
        dead = (order > high) | ((hide_from <= order) & (hide_until > high))
        for column in range(0, sizes.dim, TILE):
            part = v.at[rows, pl.ds(column, TILE)]
            values = _load(part, MATRIX)
            part[...] = jnp.where(_across(dead, values.shape), jnp.zeros((), sizes.dtype), values)
    plgpu.commit_smem()


def _weigh(
    sizes: _Sizes, shared: _Shared, warpgroup: jax.Array, acc: jax.Array, weights: jax.Array, v: Ref
) -> jax.Array:
    """Return acc + weights @ v. In interpret mode the left factor has to be in shared memory, and acc starts from 0."""
    if shared.staging is None:
        carried: jax.Array = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v))(plgpu.WGMMAAccumulatorRef.init(acc))
        return carried
    staging = shared.staging.at[warpgroup]
    staging[...] = weights
    plgpu.commit_smem()
    return acc + _product(staging, v, sizes.dim)


def _product(x: Ref, y: Ref, columns: int) -> jax.Array:
    """Product of a tile of rows in shared memory, float32."""

    def multiply(acc: Ref) -> Any:
        plgpu.wgmma(acc, x, y)
        return acc[...]

    product: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, columns), jnp.float32))
    return product


# -------------------------------------------------------------------------------------------- layouts


def _load(ref: Ref, layout: Any) -> jax.Array:
    loaded: jax.Array = plgpu.layout_cast(ref[...], layout)
    return loaded


def _full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    filled: jax.Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    return filled


def _across(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per row, along the columns of a matrix."""
    return lax.broadcast_in_dim(x, shape, [0])


def _along(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value per column, along the rows of a matrix."""
    return lax.broadcast_in_dim(x, shape, [1])
