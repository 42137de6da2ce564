"""The compute side: a fixed grid of compiled programs over a page pool. It never sees a request.

A step takes arrays (token, order, position, request and target slot of each row; the entries) and runs three kinds of
program: `begin` (embedding, rotation, visible blocks: once), `stage` (some layers: writes the rows' KV into the
pool in place and attends), and `end` (logits of chosen rows). All stages have equally many layers, so one program
per row bucket serves them all and compile time does not grow with depth. Programs are compiled ahead. A step may run
some of the layers only, and measure in some; `move` copies KV from slots to slots.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from ragjax.core import ConfigError, Grid, Measure, Step, StepMeasure
from ragjax.kernels.attention.op import Choice, choose, paged_interval_attention
from ragjax.kernels.blocks import Blocks, visible_blocks
from ragjax.kernels.device import Device
from ragjax.kernels.pages import Pages, from_storage, move_slots, write_pages
from ragjax.kernels.reductions import measure as reductions
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import PageTable, Rows
from ragjax.kernels.view import View, check_values
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, Layer, Weight, rotation_table
from ragjax.store import device as page_store
from ragjax.store import host
from ragjax.store.device import Excerpt

log = logging.getLogger(__name__)

Weights = Any
"""Parameters of a layer or of the ends, an nnx state; of a stage, a tuple of them or one stacked state."""

STAGE_LAYERS = 8
"""Most layers of a stage."""


@dataclass(frozen=True)
class Outcome:
    """What a step made.

    x_TE: residual rows behind the last layer that ran, float32 [T, E].
    measured: what its `StepMeasure` asks for, float32 [layers, ...] (`kernels.reductions.measure`).
    """

    x_TE: jax.Array
    measured: NDArray[np.float32] | None = None

    def residual(self) -> NDArray[np.float32]:
        """`x_TE` on the host, for a step that goes on where this one ended."""
        return np.asarray(self.x_TE)


@dataclass(frozen=True)
class _Spec:
    """What a program is compiled for, besides shapes."""

    config: ModelConfig
    layer: nnx.GraphDef[Layer]
    ends: nnx.GraphDef[Decoder]
    mesh: Mesh
    scanned: bool
    scale: float


class Runner:
    """Weights, pool and programs of one model on one mesh.

    Args:
        decoder: the model; its arrays are taken over.
        pages: pages of the pool, the scratch page 0 included.
        page_size: slots of a page.
        context: largest position plus one (the model's context length, if None).
        scanned: run a stage's layers by `lax.scan` (compile time independent of depth) instead of unrolled; None
            chooses per backend. On CPU bfloat16 is 2.6 times faster unrolled.
        mesh: one axis, "kv_heads" (one device, if None).
        attention: backend of attention to try first (`kernels.attention.BACKENDS`).

    Raises:
        ConfigError: if there is no memory for so many pages.

    Attributes:
        storage_dtype: of the pool's arrays.
        calls: attentions run so far, by backend.
        fallbacks: attentions that a backend refused so far, by "backend: reason".
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        pages: int,
        page_size: int = 64,
        context: int | None = None,
        grid: Grid | None = None,
        scanned: bool | None = None,
        mesh: Mesh | None = None,
        attention: str | None = None,
    ):
        config = decoder.config
        self.config = config
        self.dtype = str(decoder.embedding[...].dtype)
        self.grid = grid or Grid()
        self.page_size = page_size
        self._mesh = mesh or jax.make_mesh((1,), ("kv_heads",), axis_types=(AxisType.Auto,))
        self._device = Device.of(self._mesh.devices.flat[0])
        self._attention = attention
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        platform = self._device.platform
        scanned = platform != "cpu" if scanned is None else scanned

        self._depth = per_stage = _stage_layers(config.num_layers)
        layer_def, states = _split_layers(decoder)
        ends_def, ends = nnx.split(_without_layers(decoder))
        stages = [states[i : i + per_stage] for i in range(0, config.num_layers, per_stage)]
        self._stages = [self._place(_stack(stage) if scanned else tuple(stage)) for stage in stages]
        self._ends = self._place(ends)
        self._spec = _Spec(config, layer_def, ends_def, self._mesh, scanned, config.head_dim**-0.5)

        self.storage_dtype = page_store.storage_dtype(decoder.embedding[...].dtype, platform)
        self._pool_sharding = NamedSharding(self._mesh, POOL)
        create = partial(page_store.create, config, per_stage, pages, page_size, self.storage_dtype)
        self._create = jax.jit(create, out_shardings=self._pool_sharding)
        self._pools = self._create_pools(len(stages), pages)
        table = rotation_table(config, context or config.context_length)
        self._rotation: Rotation = jax.device_put(table, NamedSharding(self._mesh, P()))
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._choices: dict[tuple[int, int], Choice] = {}

    def _create_pools(self, count: int, pages: int) -> list[Pages]:
        try:
            pools = [self._create() for _ in range(count)]
            jax.block_until_ready(pools)
            return pools
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            size = self.config.kv_bytes_per_token(self.storage_dtype.itemsize) * self.page_size * pages / 2**30
            problem = f"the device has no room for a cache of {size:.3g} GB"
            raise ConfigError(f"{problem}: lower --device-cache-gb") from error

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers at which a step may begin, ascending, and the number of layers as a last entry."""
        return tuple(range(0, self.config.num_layers + 1, self._depth))

    def compile(self, measures: Collection[Measure] = (), *, progress: Callable[[str], None] | None = None) -> None:
        """Compile the grid ahead, so that no step waits for a compilation.

        Left for their first use are stages that end early, moves, and more segments than the smallest bucket holds.

        Args:
            measures: what steps will measure.
            progress: called with a program's name after each.
        """
        for key in self.programs(measures):
            if key not in self._programs:
                self._programs[key] = self._compile(*key)
            if progress is not None:
                progress(" ".join(str(k) for k in key))

    def programs(self, measures: Collection[Measure] = ()) -> list[tuple[Any, ...]]:
        """Names of the grid's programs."""
        pairs = [(rows, entries) for rows, _ in self.grid.rows for entries in self.grid.entries]
        kinds: list[tuple[Any, ...]] = [(self._depth,)]
        for what in sorted(set(measures) - {Measure.LOGITS}):
            kinds.append((self._depth, what, self.grid.segments if what in reductions.SEGMENTED else 0))
        return [
            *(("begin", rows, entries) for rows, entries in pairs),
            *(("stage", rows, entries, *kind) for rows, entries in pairs for kind in kinds),
            *(("end", rows, n) for rows, _ in self.grid.rows for n in self.grid.logits if n <= rows),
            *((kind, n) for kind in ("extract", "insert") for n in page_store.BUCKETS),
        ]

    def step(self, step: Step) -> Outcome:
        """Run layers for one batch of rows: their KV is in the pool afterwards.

        Raises:
            ValueError: before anything is computed, if a page, slot, position, offset or layer is out of range.
        """
        rows, entries = len(step.token_T), len(step.page_S)
        begin, end = step.layers or (0, self.config.num_layers)
        self._check(step, begin, end)
        arrays = {name: getattr(step, name) for name in STEP_ARRAYS}
        x_TE, inputs = self._program("begin", rows, entries)(self._ends, self._rotation, arrays)
        if step.residual_TE is not None:
            x_TE = self._upload(step.residual_TE)
        measured = []
        for first in range(begin, end, self._depth):
            i = first // self._depth
            program, *measured_by = self._stage_program(step, first, min(self._depth, end - first))
            x_TE, self._pools[i], found_L = program(
                self._stages[i], self._pools[i], x_TE, inputs, self._rotation, *measured_by
            )
            measured.append(found_L)
        self._count(self._choice(rows, entries), end - begin)
        return Outcome(x_TE, self._measured(step.measure, begin, measured))

    def _stage_program(
        self, step: Step, first: int, count: int
    ) -> tuple[Any, NDArray[np.bool_], Mapping[str, NDArray[np.int32]]]:
        """The program for these layers of a stage, which of them it measures, and the arrays this takes."""
        key = ("stage", len(step.token_T), len(step.page_S), count)
        low, high = step.measure.layers if step.measure else (0, 0)
        layer_L = np.arange(first, first + count)
        chosen_L = (low <= layer_L) & (layer_L < high)
        if step.measure is None or not chosen_L.any():
            return self._program(*key), chosen_L[:0], {}
        return self._program(*key, step.measure.what, step.measure.segments), chosen_L, step.measure.arrays

    def _measured(
        self, measure: StepMeasure | None, begin: int, found: Sequence[jax.Array]
    ) -> NDArray[np.float32] | None:
        """What was measured in the layers that `measure` names, out of what the stages from `begin` on found."""
        if measure is None:
            return None
        parts = []
        for i, found_L in enumerate(found):
            if found_L.shape[0]:
                low, high = (max(0, layer - begin - i * self._depth) for layer in measure.layers)
                parts.append(np.asarray(found_L)[low:high])
        return np.concatenate(parts)

    def _upload(self, residual_TE: NDArray[np.float32]) -> jax.Array:
        """A copy of its own: the first stage takes it over."""
        copy_TE: jax.Array = jax.device_put(jnp.array(residual_TE, jnp.float32), NamedSharding(self._mesh, P()))
        return copy_TE

    def logits(self, outcome: Outcome, rows: Sequence[int]) -> NDArray[np.float32]:
        """Next-token logits of the step's rows at these indices, float32 [len(rows), V]."""
        total = outcome.x_TE.shape[0]
        widest = max(n for n in self.grid.logits if n <= total)
        parts = []
        for begin in range(0, len(rows), widest):
            part = np.asarray(rows[begin : begin + widest], np.int32)
            n = Grid.fit(self.grid.logits, len(part))
            index_N = np.concatenate([part, np.zeros(n - len(part), np.int32)])
            parts.append(np.asarray(self._program("end", total, n)(self._ends, outcome.x_TE, index_N))[: len(part)])
        return np.concatenate(parts)

    def extract(self, pages: NDArray[np.int32]) -> list[Excerpt]:
        """Copies of whole pages in all layers, in parts (`store.pages.cuts`). Waits for nothing.

        The pages are read as they are now: whatever is dispatched later, the copies do not see.

        Raises:
            ValueError: if a page is outside of the pool.
        """
        self._check_pages(pages)

        def take(part: NDArray[np.int32]) -> Excerpt:
            program = self._program("extract", len(part))
            return tuple(program(pool, part) for pool in self._pools)

        return [take(pages[part]) for part in page_store.cuts(len(pages))]

    def upload(self, k_LPKCD: NDArray[Any], v_LPKCD: NDArray[Any]) -> list[Excerpt]:
        """Bring pages of all layers, in the pool's dtype, to the device, for `insert`; waits until they are there.

        Any thread may call it: it does not touch the pool. The arrays must not change afterwards.
        """

        def put(x_LPKCD: NDArray[Any], stage: slice, part: slice) -> jax.Array:
            x_LPKCD = x_LPKCD[stage, part].view(self.storage_dtype)
            return host.upload(np.ascontiguousarray(x_LPKCD), self._pool_sharding)

        stages = [slice(i, i + self._depth) for i in self.stages[:-1]]
        excerpts = [
            tuple(Pages(put(k_LPKCD, stage, part), put(v_LPKCD, stage, part)) for stage in stages)
            for part in page_store.cuts(k_LPKCD.shape[1])
        ]
        return jax.block_until_ready(excerpts)  # type: ignore[no-any-return]

    def insert(self, pages: NDArray[np.int32], excerpts: Sequence[Excerpt]) -> None:
        """Overwrite whole pages in all layers by what `extract` or `upload` gave, in place. Waits for nothing.

        Raises:
            ValueError: if a page is outside of the pool or named twice, or the excerpts are of another number of pages.
        """
        self._check_pages(pages)
        if len(np.unique(pages)) != len(pages):
            raise ValueError("pages names a page twice")
        parts = list(page_store.cuts(len(pages)))
        if [excerpt[0].k_LPKCD.shape[1] for excerpt in excerpts] != [part.stop - part.start for part in parts]:
            raise ValueError(f"excerpts are not those of {len(pages)} pages")
        for part, excerpt in zip(parts, excerpts, strict=True):
            program = self._program("insert", part.stop - part.start)
            for i, new in enumerate(excerpt):
                self._pools[i] = program(self._pools[i], pages[part], new)

    def move(
        self,
        source_N: NDArray[np.int32],
        target_N: NDArray[np.int32],
        offset_N: NDArray[np.int32],
        layers: tuple[int, int],
    ) -> None:
        """Copy KV from slots to slots in some layers, in place, keys turned by an offset each. Waits for nothing.

        Args:
            source_N: slots (page * C + slot) to read.
            target_N: slots to write, none twice and none of the source's.
            offset_N: RoPE offset of each key.
            layers: half-open, at boundaries of stages.

        Raises:
            ValueError: before anything is moved, if a slot, offset or layer is out of range.
        """
        self._check_move(source_N, target_N, offset_N, layers)
        for begin in range(0, len(source_N), MOVES[-1]):
            part = slice(begin, begin + MOVES[-1])
            size = Grid.fit(MOVES, len(source_N[part]))
            spare = size - len(source_N[part])
            # what pads the bucket is written nowhere: each has a slot of its own beyond the pool
            nowhere = np.arange(OUTSIDE, OUTSIDE + spare, dtype=np.int32)
            nothing = np.zeros(spare, np.int32)
            padded = ((source_N, nothing), (target_N, nowhere), (offset_N, nothing))
            arrays = [np.concatenate([x_N[part], padding]) for x_N, padding in padded]
            program = self._program("move", size)
            for i in range(layers[0] // self._depth, layers[1] // self._depth):
                self._pools[i] = program(self._pools[i], *arrays, self._rotation)

    @property
    def lost(self) -> bool:
        """Whether a pool is gone: a program that took it failed. Does not wait for programs that still run."""
        return any(_is_lost(array) for array in jax.tree.leaves(self._pools))

    def reset(self) -> None:
        """New pools of zeros, for ones that are lost; the old ones are freed first."""
        for array in jax.tree.leaves(self._pools):
            if not array.is_deleted():
                array.delete()
        for i in range(len(self._pools)):
            self._pools[i] = self._create()

    def read(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of slots, float32 [L, n, K, D] each: for audits and tests, not for serving."""
        page, slot = slots // self.page_size, slots % self.page_size

        def pick(pool: jax.Array) -> NDArray[np.float32]:
            return np.asarray(from_storage(pool[:, page, :, slot, :]).astype(jnp.float32)).swapaxes(0, 1)

        keys = [pick(pool.k_LPKCD) for pool in self._pools]
        values = [pick(pool.v_LPKCD) for pool in self._pools]
        return np.concatenate(keys), np.concatenate(values)

    def memory(self, rows: int, entries: int) -> tuple[int, int]:
        """(temporary bytes of a stage program, bytes of its pool)."""
        analysis = self._program("stage", rows, entries, self._depth).memory_analysis()
        return int(analysis.temp_size_in_bytes), sum(x.nbytes for x in jax.tree.leaves(self._pools[0]))

    def _check(self, step: Step, begin: int, end: int) -> None:
        if begin not in self.stages[:-1] or not begin < end <= self.config.num_layers:
            raise ValueError(f"step.layers is {begin, end}; a step begins at one of {self.stages[:-1]}")
        if (step.residual_TE is None) != (begin == 0):
            raise ValueError(f"a step from layer {begin} on takes {'a' if begin else 'no'} residual")
        if step.measure is not None:
            self._check_measure(step.measure, begin, end)
        pages, slots = self._pools[0].k_LPKCD.shape[1], self._pools[0].page_size
        check_values(
            request_T=step.request_T,
            index_T=step.index_T,
            position_T=step.position_T,
            request_S=step.request_S,
            page_S=step.page_S,
            offset_S=step.offset_S,
            pages=pages,
            positions=self._rotation.cos_NR.shape[0],
            block_rows=dict(self.grid.rows)[len(step.token_T)],
        )
        if step.slot_T.min() < 0 or step.slot_T.max() >= pages * slots:
            raise ValueError(f"step.slot_T holds slots outside of the {pages * slots} of the pool")

    def _check_measure(self, measure: StepMeasure, begin: int, end: int) -> None:
        low, high = measure.layers
        if not begin <= low < high <= end:
            raise ValueError(f"step.measure.layers is {measure.layers}, not within {begin, end}")
        if measure.what is not Measure.DEVIATION:
            return
        slots = self._pools[0].k_LPKCD.shape[1] * self.page_size
        if measure.arrays["stale_T"].max() >= slots:
            raise ValueError(f"step.measure.stale_T holds slots outside of the {slots} of the pool")
        if np.abs(measure.arrays["offset_T"]).max() >= self._rotation.cos_NR.shape[0]:
            raise ValueError("step.measure.offset_T holds offsets outside of the rotation table")

    def _check_move(
        self,
        source_N: NDArray[np.int32],
        target_N: NDArray[np.int32],
        offset_N: NDArray[np.int32],
        layers: tuple[int, int],
    ) -> None:
        slots = self._pools[0].k_LPKCD.shape[1] * self.page_size
        for name, slot_N in (("source", source_N), ("target", target_N)):
            if len(slot_N) and not 0 <= slot_N.min() <= slot_N.max() < slots:
                raise ValueError(f"{name} holds slots {slot_N.min()} to {slot_N.max()}, of {slots} of the pool")
        if len(np.unique(target_N)) != len(target_N) or np.isin(target_N, source_N).any():
            raise ValueError("target names a slot twice, or one of the source")
        if np.abs(offset_N).max(initial=0) >= self._rotation.cos_NR.shape[0]:
            raise ValueError("offset is outside of the rotation table")
        if not {*layers} <= {*self.stages} or layers[0] > layers[1]:
            raise ValueError(f"layers {layers} are not between two of {self.stages}")

    def _check_pages(self, pages: NDArray[np.int32]) -> None:
        total = self._pools[0].k_LPKCD.shape[1]
        if len(pages) and not 0 <= pages.min() <= pages.max() < total:
            raise ValueError(f"pages holds {pages.min()} to {pages.max()}, of {total} pages")

    def _choice(self, rows: int, entries: int) -> Choice:
        """The backend of attention for a bucket; each refusal on the way is logged once."""
        if (rows, entries) not in self._choices:
            block = dict(self.grid.rows)[rows]
            _, inputs = self._begin_shapes(rows, entries)
            q_THD: Any = jax.ShapeDtypeStruct((rows, self.config.num_heads, self.config.head_dim), jnp.float32)
            view = View(
                inputs.rows, self._pools[0], 0, inputs.entries, self._rotation, inputs.blocks, self._spec.scale, block
            )
            self._choices[rows, entries] = choose(q_THD, view, self._device, self._attention)
        return self._choices[rows, entries]

    def _count(self, choice: Choice, layers: int) -> None:
        self.calls[choice.backend] += layers
        for backend, reason in choice.refused.items():
            notice = f"{backend}: {reason}"
            if notice not in self.fallbacks:
                log.warning("attention runs on %s instead of %s", choice.backend, notice)
            self.fallbacks[notice] += layers

    def _program(self, kind: str, *shape: Any) -> Any:
        key = (kind, *shape)
        if key not in self._programs:
            log.info("compiling %s at its first use", " ".join(map(str, key)))
            self._programs[key] = self._compile(*key)
        return self._programs[key]

    def _compile(self, kind: str, *shape: Any) -> Any:
        compilers: dict[str, Callable[..., Any]] = {
            "begin": self._compile_begin,
            "stage": self._compile_stage,
            "end": self._compile_end,
            "move": self._compile_move,
            "extract": self._compile_extract,
            "insert": self._compile_insert,
        }
        return compilers[kind](*shape)

    def _compile_begin(self, rows: int, entries: int) -> Any:
        function = partial(_begin, self._spec, dict(self.grid.rows)[rows])
        return jax.jit(function).lower(self._ends, self._rotation, self._step_shapes(rows, entries)).compile()

    def _compile_stage(
        self, rows: int, entries: int, layers: int, what: Measure | None = None, segments: int = 0
    ) -> Any:
        block = dict(self.grid.rows)[rows]
        measure = None if what is None else (what, segments)
        names = () if what is None else reductions.ARRAYS[what]
        function = partial(_stage, self._spec, block, self._choice(rows, entries).backend, layers, measure)
        x_TE, inputs = self._replicated(self._begin_shapes(rows, entries))
        chosen_L = jax.ShapeDtypeStruct((layers if measure else 0,), jnp.bool_)
        measured_by = self._replicated((chosen_L, self._shapes(names, rows, entries)))
        jitted = jax.jit(function, donate_argnums=(1, 2))
        return jitted.lower(self._stages[0], self._pools[0], x_TE, inputs, self._rotation, *measured_by).compile()

    def _compile_move(self, n: int) -> Any:
        slot_N = self._replicated(jax.ShapeDtypeStruct((n,), jnp.int32))
        jitted = jax.jit(move_slots, donate_argnums=0, out_shardings=self._pool_sharding)
        return jitted.lower(self._pools[0], slot_N, slot_N, slot_N, self._rotation).compile()

    def _begin_shapes(self, rows: int, entries: int) -> tuple[Any, Any]:
        begin = partial(_begin, self._spec, dict(self.grid.rows)[rows])
        shapes: tuple[Any, Any] = jax.eval_shape(begin, self._ends, self._rotation, self._step_shapes(rows, entries))
        return shapes

    def _compile_end(self, rows: int, n: int) -> Any:
        x_TE = jax.ShapeDtypeStruct((rows, self.config.hidden_size), jnp.float32)
        index_N = jax.ShapeDtypeStruct((n,), jnp.int32)
        return jax.jit(partial(_end, self._spec)).lower(self._ends, *self._replicated((x_TE, index_N))).compile()

    def _compile_extract(self, n: int) -> Any:
        page_P = self._replicated(jax.ShapeDtypeStruct((n,), jnp.int32))
        return jax.jit(page_store.extract, out_shardings=self._pool_sharding).lower(self._pools[0], page_P).compile()

    def _compile_insert(self, n: int) -> Any:
        page_P = self._replicated(jax.ShapeDtypeStruct((n,), jnp.int32))

        def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0], n, *x.shape[2:]), x.dtype, sharding=self._pool_sharding)

        jitted = jax.jit(page_store.insert, donate_argnums=0, out_shardings=self._pool_sharding)
        return jitted.lower(self._pools[0], page_P, jax.tree.map(shape, self._pools[0])).compile()

    def _step_shapes(self, rows: int, entries: int) -> dict[str, jax.ShapeDtypeStruct]:
        placed: dict[str, jax.ShapeDtypeStruct] = self._replicated(self._shapes(STEP_ARRAYS, rows, entries))
        return placed

    def _shapes(self, names: Collection[str], rows: int, entries: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Of int32 arrays by their suffix."""
        sizes = {"T": (rows,), "S": (entries,), "SC": (entries, self.page_size)}
        return {name: jax.ShapeDtypeStruct(sizes[name.rsplit("_", 1)[1]], jnp.int32) for name in names}

    def _replicated(self, tree: Any) -> Any:
        sharding = NamedSharding(self._mesh, P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def _place(self, tree: Any) -> Any:
        def put(weight: Any) -> Any:
            axes = P(*("kv_heads" if axis == "kv_heads" else None for axis in weight.axes))
            return weight.replace(jax.device_put(weight.get_value(), NamedSharding(self._mesh, axes)))

        return jax.tree.map(put, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


OUTSIDE = 2**30
"""A slot beyond any pool."""

POOL = P(None, None, "kv_heads", None, None)
"""How a pool lies on the mesh."""

MOVES = (16, 128, 1024)
"""Slots that one program moves."""

STEP_ARRAYS = (
    *("token_T", "index_T", "position_T", "request_T", "slot_T"),
    *("page_S", "offset_S", "request_S", "index_SC", "hide_from_SC", "hide_until_SC"),
)
"""The arrays of a `Step` that every step has."""

_Measure = tuple[Measure, int]
"""What a stage measures, and how many segments the programs for it serve."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Inputs:
    """What `begin` hands to every stage."""

    cos_TR: jax.Array
    sin_TR: jax.Array
    slot_T: jax.Array
    rows: Rows
    entries: PageTable
    blocks: Blocks


def _begin(
    spec: _Spec, block_rows: int, ends: Weights, rotation: Rotation, step: dict[str, jax.Array]
) -> tuple[jax.Array, _Inputs]:
    rows = Rows(step["index_T"], step["position_T"], step["request_T"])
    names = ("page_S", "offset_S", "request_S", "index_SC", "hide_from_SC", "hide_until_SC")
    page, offset, request, order, hide_from, hide_until = (step[name] for name in names)
    entries = PageTable(page[None], offset[None], request, order[None], hide_from[None], hide_until[None])
    cos_TR, sin_TR = rotation.at(rows.position_T)
    x_TE = nnx.merge(spec.ends, ends).embed(step["token_T"])
    # padding rows write nowhere: each gets a slot of its own beyond the pool
    nowhere_T = OUTSIDE + jnp.arange(len(rows.index_T), dtype=jnp.int32)
    slot_T = jnp.where(rows.index_T >= 0, step["slot_T"], nowhere_T)
    return x_TE, _Inputs(cos_TR, sin_TR, slot_T, rows, entries, visible_blocks(rows, entries, block_rows))


def _stage(
    spec: _Spec,
    block_rows: int,
    backend: str,
    layers: int,
    measure: _Measure | None,
    weights: Weights,
    pool: Pages,
    x_TE: jax.Array,
    inputs: _Inputs,
    rotation: Rotation,
    chosen_L: jax.Array,
    arrays: Mapping[str, jax.Array],
) -> tuple[jax.Array, Pages, jax.Array]:
    """The first `layers` layers of a stage; what the chosen ones measure, and zeros for the others."""
    attend = _sharded_attention(spec, block_rows, backend, measure)

    def layer(x_TE: jax.Array, pool: Pages, state: Weights, index: Any) -> tuple[jax.Array, Pages, jax.Array]:
        block = nnx.merge(spec.layer, state)
        q_THD, k_TKD, v_TKD = block.project(x_TE, inputs.cos_TR, inputs.sin_TR)
        index = jnp.asarray(index, jnp.int32)
        chosen = chosen_L[index] if measure else jnp.zeros((), jnp.bool_)
        out_THD, pool, found = attend(q_THD, k_TKD, v_TKD, pool, index, inputs, rotation, chosen, arrays)
        return block.finish(x_TE, out_THD), pool, found

    if spec.scanned:

        def body(carry: tuple[jax.Array, Pages], xs: tuple[Any, jax.Array]) -> Any:
            x_TE, pool, found = layer(*carry, *xs)
            return (x_TE, pool), found

        if layers < pool.k_LPKCD.shape[0]:
            weights = jax.tree.map(lambda weight: weight[:layers], weights)
        (x_TE, pool), found_L = lax.scan(body, (x_TE, pool), (weights, jnp.arange(layers, dtype=jnp.int32)))
        return x_TE, pool, found_L if measure else jnp.zeros(0)
    found = []
    for index, state in enumerate(weights[:layers]):
        x_TE, pool, of_layer = layer(x_TE, pool, state, index)
        found.append(of_layer)
    return x_TE, pool, jnp.stack(found) if measure else jnp.zeros(0)


def _sharded_attention(
    spec: _Spec, block_rows: int, backend: str, measure: _Measure | None
) -> Callable[..., tuple[jax.Array, Pages, jax.Array]]:
    """Write the rows' KV, attend, and measure, each device on its own KV heads."""

    def attend(
        q_THD: jax.Array,
        k_TKD: jax.Array,
        v_TKD: jax.Array,
        pool: Pages,
        layer: jax.Array,
        inputs: _Inputs,
        rotation: Rotation,
        chosen: jax.Array,
        arrays: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Pages, jax.Array]:
        pool = write_pages(pool, layer, inputs.slot_T, k_TKD, v_TKD)
        view = View(inputs.rows, pool, layer, inputs.entries, rotation, inputs.blocks, spec.scale, block_rows)
        out_THD, lse_TH = paged_interval_attention(q_THD, view, backend=backend)
        if measure is None:
            return out_THD, pool, jnp.zeros(0)
        what, segments = measure
        found = reductions.measure(what, segments, q_THD, k_TKD, v_TKD, lse_TH, view, arrays, chosen)
        # nothing is below 0: the next layer has to wait for this before it writes the pool, or XLA would copy the pool
        out_THD = out_THD + jnp.minimum(found.min(), 0.0)
        return out_THD, pool, reductions.combine(what, found, "kv_heads")

    heads = P(None, "kv_heads", None)
    sharded = jax.shard_map(
        attend,
        mesh=spec.mesh,
        in_specs=(heads, heads, heads, POOL, P(), P(), P(), P(), P()),
        out_specs=(heads, POOL, P()),
        check_vma=False,
    )
    return jax.jit(sharded, inline=True)  # traced once for all layers of a stage


def _end(spec: _Spec, ends: Weights, x_TE: jax.Array, index_N: jax.Array) -> jax.Array:
    return nnx.merge(spec.ends, ends).unembed(x_TE[index_N])


def _is_lost(array: Any) -> bool:
    if array.is_deleted():
        return True
    if not array.is_ready():
        return False
    try:
        array.block_until_ready()
    except Exception:  # the error of the program that should have made it, of whatever kind
        return True
    return False


def _stage_layers(layers: int) -> int:
    """The largest divisor of the depth that a stage may have."""
    return max(n for n in range(1, STAGE_LAYERS + 1) if layers % n == 0)


def _split_layers(decoder: Decoder) -> tuple[nnx.GraphDef[Layer], list[Weights]]:
    pairs = [nnx.split(layer) for layer in decoder.layers]
    return pairs[0][0], [state for _, state in pairs]


def _without_layers(decoder: Decoder) -> Decoder:
    ends = Decoder.abstract(decoder.config)
    ends.embedding, ends.norm, ends.head = decoder.embedding, decoder.norm, decoder.head
    ends.layers = nnx.List([])
    return ends


def _stack(states: Sequence[Weights]) -> Weights:
    def stack(*weights: Weight) -> Weight:
        value = jnp.stack([w.get_value() for w in weights])
        return Weight(value, axes=("layers", *weights[0].axes))

    stacked: Weights = jax.tree.map(stack, *states, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return stacked
