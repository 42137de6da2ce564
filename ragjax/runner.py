"""The compute side: a fixed grid of compiled programs over a page pool. It never sees a request.

A step takes arrays (token, order, position, request and target cell of each row; the slots) and runs three kinds of
program: `begin` (embedding, rotation, visible blocks: once), `stage` (some layers: writes the rows' KV into the
pool in place and attends), and `end` (logits of chosen rows). All stages have equally many layers, so one program
per row bucket serves them all and compile time does not grow with depth. Programs are compiled ahead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
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

from ragjax.core import Grid, Step
from ragjax.kernels.attention import Choice, choose, paged_interval_attention
from ragjax.kernels.blocks import Blocks, visible_blocks
from ragjax.kernels.device import Device
from ragjax.kernels.pages import Pages, from_storage, write_pages
from ragjax.kernels.reductions import key_mass
from ragjax.kernels.rope import Rotation
from ragjax.kernels.slots import Rows, Slots
from ragjax.kernels.view import View, check_values
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, Layer, Weight, rotation_table
from ragjax.store import host
from ragjax.store import pages as page_store
from ragjax.store.pages import Excerpt

log = logging.getLogger(__name__)

Weights = Any
"""Parameters of a layer or of the ends, an nnx state; of a stage, a tuple of them or one stacked state."""

STAGE_LAYERS = 8
"""Most layers of a stage."""


@dataclass(frozen=True)
class Outcome:
    """Residual rows after the last layer, float32 [T, E], and the key mass per layer, float32 [L, S, C], if wanted."""

    x_TE: jax.Array
    mass_LSC: NDArray[np.float32] | None


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
        page_size: cells of a page.
        context: largest position plus one (the model's context length, if None).
        scanned: run a stage's layers by `lax.scan` (compile time independent of depth) instead of unrolled; None
            chooses per backend. On CPU bfloat16 is 2.6 times faster unrolled.
        mesh: one axis, "kv_heads" (one device, if None).
        attention: backend of attention to try first (`kernels.attention.BACKENDS`).

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

        per_stage = _stage_layers(config.num_layers)
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
        self._pools: list[Pages] = [self._create() for _ in stages]
        table = rotation_table(config, context or config.context_length)
        self._rotation: Rotation = jax.device_put(table, NamedSharding(self._mesh, P()))
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._choices: dict[tuple[int, int], Choice] = {}

    def compile(self, *, mass: bool = False, progress: Callable[[str], None] | None = None) -> None:
        """Compile the whole grid ahead, so that no step waits for a compilation.

        Args:
            mass: compile the programs that measure key mass too.
            progress: called with a program's name after each.
        """
        for key in self.programs(mass=mass):
            self._program(*key)
            if progress is not None:
                progress(" ".join(str(k) for k in key))

    def programs(self, *, mass: bool = False) -> list[tuple[Any, ...]]:
        """Names of the grid's programs."""
        pairs = [(rows, slots) for rows, _ in self.grid.rows for slots in self.grid.slots]
        kinds = (False, True) if mass else (False,)
        return [
            *(("begin", rows, slots) for rows, slots in pairs),
            *(("stage", rows, slots, kind) for rows, slots in pairs for kind in kinds),
            *(("end", rows, n) for rows, _ in self.grid.rows for n in self.grid.logits if n <= rows),
            *((kind, n) for kind in ("extract", "insert") for n in page_store.BUCKETS),
        ]

    def step(self, step: Step) -> Outcome:
        """Run all layers for one batch of rows: their KV is in the pool afterwards.

        Raises:
            ValueError: before anything is computed, if a page, cell, position or offset is out of range.
        """
        rows, slots = len(step.token_T), len(step.page_S)
        self._check(step)
        arrays = {name: value for name, value in vars(step).items() if name != "mass"}
        x_TE, inputs = self._program("begin", rows, slots)(self._ends, self._rotation, arrays)
        stage, masses = self._program("stage", rows, slots, step.mass), []
        for i, weights in enumerate(self._stages):
            x_TE, self._pools[i], mass_LSC = stage(weights, self._pools[i], x_TE, inputs, self._rotation)
            masses.append(mass_LSC)
        self._count(self._choice(rows, slots))
        mass = np.concatenate([np.asarray(m) for m in masses]) if step.mass else None
        return Outcome(x_TE, mass)

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

        depth = self.config.num_layers // len(self._pools)
        stages = [slice(i, i + depth) for i in range(0, self.config.num_layers, depth)]
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

    def read(self, cells: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of cells, float32 [L, n, K, D] each: for audits and tests, not for serving."""
        page, cell = cells // self.page_size, cells % self.page_size

        def pick(pool: jax.Array) -> NDArray[np.float32]:
            return np.asarray(from_storage(pool[:, page, :, cell, :]).astype(jnp.float32)).swapaxes(0, 1)

        keys = [pick(pool.k_LPKCD) for pool in self._pools]
        values = [pick(pool.v_LPKCD) for pool in self._pools]
        return np.concatenate(keys), np.concatenate(values)

    def memory(self, rows: int, slots: int) -> tuple[int, int]:
        """(temporary bytes of a stage program, bytes of its pool)."""
        analysis = self._program("stage", rows, slots, False).memory_analysis()
        return int(analysis.temp_size_in_bytes), sum(x.nbytes for x in jax.tree.leaves(self._pools[0]))

    def _check(self, step: Step) -> None:
        pages, cells = self._pools[0].k_LPKCD.shape[1], self._pools[0].page_size
        check_values(
            request_T=step.request_T,
            order_T=step.order_T,
            position_T=step.position_T,
            request_S=step.request_S,
            page_S=step.page_S,
            offset_S=step.offset_S,
            pages=pages,
            positions=self._rotation.cos_NR.shape[0],
            block_rows=dict(self.grid.rows)[len(step.token_T)],
        )
        if step.cell_T.min() < 0 or step.cell_T.max() >= pages * cells:
            raise ValueError(f"step.cell_T holds cells outside of the {pages * cells} of the pool")

    def _check_pages(self, pages: NDArray[np.int32]) -> None:
        total = self._pools[0].k_LPKCD.shape[1]
        if len(pages) and not 0 <= pages.min() <= pages.max() < total:
            raise ValueError(f"pages holds {pages.min()} to {pages.max()}, of {total} pages")

    def _choice(self, rows: int, slots: int) -> Choice:
        """The backend of attention for a bucket; each refusal on the way is logged once."""
        if (rows, slots) not in self._choices:
            block = dict(self.grid.rows)[rows]
            _, inputs = self._begin_shapes(rows, slots)
            q_THD: Any = jax.ShapeDtypeStruct((rows, self.config.num_heads, self.config.head_dim), jnp.float32)
            view = View(
                inputs.rows, self._pools[0], 0, inputs.slots, self._rotation, inputs.blocks, self._spec.scale, block
            )
            self._choices[rows, slots] = choose(q_THD, view, self._device, self._attention)
        return self._choices[rows, slots]

    def _count(self, choice: Choice) -> None:
        self.calls[choice.backend] += self.config.num_layers
        for backend, reason in choice.refused.items():
            notice = f"{backend}: {reason}"
            if notice not in self.fallbacks:
                log.warning("attention runs on %s instead of %s", choice.backend, notice)
            self.fallbacks[notice] += self.config.num_layers

    def _program(self, kind: str, *shape: Any) -> Any:
        key = (kind, *shape)
        if key not in self._programs:
            self._programs[key] = getattr(self, f"_compile_{kind}")(*shape)
        return self._programs[key]

    def _compile_begin(self, rows: int, slots: int) -> Any:
        function = partial(_begin, self._spec, dict(self.grid.rows)[rows])
        return jax.jit(function).lower(self._ends, self._rotation, self._step_shapes(rows, slots)).compile()

    def _compile_stage(self, rows: int, slots: int, mass: bool) -> Any:
        block = dict(self.grid.rows)[rows]
        function = partial(_stage, self._spec, block, self._choice(rows, slots).backend, mass)
        x_TE, inputs = self._begin_shapes(rows, slots)
        shapes = self._replicated(x_TE), self._replicated(inputs)
        jitted = jax.jit(function, donate_argnums=(1, 2))
        return jitted.lower(self._stages[0], self._pools[0], *shapes, self._rotation).compile()

    def _begin_shapes(self, rows: int, slots: int) -> tuple[Any, Any]:
        begin = partial(_begin, self._spec, dict(self.grid.rows)[rows])
        shapes: tuple[Any, Any] = jax.eval_shape(begin, self._ends, self._rotation, self._step_shapes(rows, slots))
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

    def _step_shapes(self, rows: int, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        sizes = {"T": (rows,), "S": (slots,), "SC": (slots, self.page_size)}
        names = [f for f in Step.__dataclass_fields__ if f != "mass"]
        shapes = {n: jax.ShapeDtypeStruct(sizes[n.rsplit("_", 1)[1]], jnp.int32) for n in names}
        placed: dict[str, jax.ShapeDtypeStruct] = self._replicated(shapes)
        return placed

    def _replicated(self, tree: Any) -> Any:
        sharding = NamedSharding(self._mesh, P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def _place(self, tree: Any) -> Any:
        def put(weight: Any) -> Any:
            axes = P(*("kv_heads" if axis == "kv_heads" else None for axis in weight.axes))
            return weight.replace(jax.device_put(weight.get_value(), NamedSharding(self._mesh, axes)))

        return jax.tree.map(put, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


OUTSIDE = 2**30
"""A cell beyond any pool."""

POOL = P(None, None, "kv_heads", None, None)
"""How a pool lies on the mesh."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Inputs:
    """What `begin` hands to every stage."""

    cos_TR: jax.Array
    sin_TR: jax.Array
    cell_T: jax.Array
    rows: Rows
    slots: Slots
    blocks: Blocks


def _begin(
    spec: _Spec, block_rows: int, ends: Weights, rotation: Rotation, step: dict[str, jax.Array]
) -> tuple[jax.Array, _Inputs]:
    rows = Rows(step["order_T"], step["position_T"], step["request_T"])
    names = ("page_S", "offset_S", "request_S", "order_SC", "hide_from_SC", "hide_until_SC")
    page, offset, request, order, hide_from, hide_until = (step[name] for name in names)
    slots = Slots(page[None], offset[None], request, order[None], hide_from[None], hide_until[None])
    cos_TR, sin_TR = rotation.at(rows.position_T)
    x_TE = nnx.merge(spec.ends, ends).embed(step["token_T"])
    # padding rows write nowhere: each gets a cell of its own beyond the pool
    nowhere_T = OUTSIDE + jnp.arange(len(rows.order_T), dtype=jnp.int32)
    cell_T = jnp.where(rows.order_T >= 0, step["cell_T"], nowhere_T)
    return x_TE, _Inputs(cos_TR, sin_TR, cell_T, rows, slots, visible_blocks(rows, slots, block_rows))


def _stage(
    spec: _Spec,
    block_rows: int,
    backend: str,
    mass: bool,
    weights: Weights,
    pool: Pages,
    x_TE: jax.Array,
    inputs: _Inputs,
    rotation: Rotation,
) -> tuple[jax.Array, Pages, jax.Array]:
    attend = _sharded_attention(spec, block_rows, backend, mass)

    def layer(x_TE: jax.Array, pool: Pages, state: Weights, index: Any) -> tuple[jax.Array, Pages, jax.Array]:
        block = nnx.merge(spec.layer, state)
        q_THD, k_TKD, v_TKD = block.project(x_TE, inputs.cos_TR, inputs.sin_TR)
        out_THD, pool, mass_SC = attend(q_THD, k_TKD, v_TKD, pool, jnp.asarray(index, jnp.int32), inputs, rotation)
        return block.finish(x_TE, out_THD), pool, mass_SC

    if spec.scanned:

        def body(carry: tuple[jax.Array, Pages], xs: tuple[Any, jax.Array]) -> Any:
            x_TE, pool, mass_SC = layer(*carry, *xs)
            return (x_TE, pool), mass_SC

        count = pool.k_LPKCD.shape[0]
        (x_TE, pool), mass_LSC = lax.scan(body, (x_TE, pool), (weights, jnp.arange(count, dtype=jnp.int32)))
        return x_TE, pool, mass_LSC
    masses = []
    for index, state in enumerate(weights):
        x_TE, pool, mass_SC = layer(x_TE, pool, state, index)
        masses.append(mass_SC)
    return x_TE, pool, jnp.stack(masses)


def _sharded_attention(
    spec: _Spec, block_rows: int, backend: str, mass: bool
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
    ) -> tuple[jax.Array, Pages, jax.Array]:
        pool = write_pages(pool, layer, inputs.cell_T, k_TKD, v_TKD)
        view = View(inputs.rows, pool, layer, inputs.slots, rotation, inputs.blocks, spec.scale, block_rows)
        out_THD, lse_TH = paged_interval_attention(q_THD, view, backend=backend)
        if not mass:
            return out_THD, pool, jnp.zeros((0, 0))
        # by itself it takes Triton wherever a GPU backend of attention serves: they ask for no less
        return out_THD, pool, lax.pmean(key_mass(q_THD, lse_TH, view), "kv_heads")

    heads = P(None, "kv_heads", None)
    sharded = jax.shard_map(
        attend,
        mesh=spec.mesh,
        in_specs=(heads, heads, heads, POOL, P(), P(), P()),
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
