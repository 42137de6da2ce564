"""The compiled programs of a runner: their names, the backend of attention for each, and how each is compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from ragjax.core import Compression, Grid, Measure, RowShape
from ragjax.core.compression import BY_MASS, BY_QUERIES
from ragjax.core.step import STEP_ARRAYS, padding
from ragjax.kernels import sampling
from ragjax.kernels.attention.op import Choice, choose, register_kernel
from ragjax.kernels.device import Device
from ragjax.kernels.pages import Pages, move_slots
from ragjax.kernels.reductions import measure as reductions
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import Rows
from ragjax.kernels.view import View
from ragjax.models.config import ModelConfig
from ragjax.models.executables import Executables, key_of
from ragjax.runner import compaction, stages
from ragjax.runner.mesh import POOL
from ragjax.runner.stages import Spec
from ragjax.runner.weights import Weights
from ragjax.store import device as page_store

log = logging.getLogger(__name__)

Name = tuple[Any, ...]
"""A kind and what it is compiled for: begin (rows, entries), stage (rows, entries, layers, and the measure and its
segments if it measures), end (rows, logits), allow (logits), sample (logits, tokens of a row whose logits are
adjusted), logprobs (logits), move (slots), extract (pages), insert (pages), compact (compression, tokens)."""


class Programs:
    """Programs by name. Each is compiled ahead (`compile`) or at its first use.

    spec: what all programs share. pool: of one stage, as shapes. attention: backend to try first. executables: where
    compiled ones are kept. kernel: name of the attention kernel that they call. faults: why some could not be made
    ahead. ahead: true if some are made ahead, and steps take those. waited_s: seconds that steps waited for programs
    made at their first use.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: Spec,
        weights: Weights,
        pool: Pages,
        rotation: Rotation,
        grid: Grid,
        attention: str | None,
        executables: Executables | None = None,
    ):
        self._config = config
        self._spec = spec
        self._weights = weights
        self._pool = pool
        self._rotation = rotation
        self._grid = grid
        self._attention = attention
        self._executables = executables
        self._device = Device.of(spec.mesh.devices.flat[0])
        kernels = None if executables is None else executables.kernels
        pool_dtype, capped = pool.k_LPKCD.dtype, spec.cap is not None
        self.kernel = register_kernel(config.head_dim, pool_dtype, capped, self._device, kernels)
        self._pool_sharding = NamedSharding(spec.mesh, POOL)
        self._everywhere = NamedSharding(spec.mesh, P())
        self._choices: dict[tuple[int, int], tuple[Choice, ...]] = {}
        self.compiled: dict[Name, Any] = {}
        self.faults: dict[Name, Exception] = {}
        self.ahead = False
        self.waited_s = 0.0
        self._there: dict[frozenset[Name], tuple[int, tuple[RowShape, ...]]] = {}

    def names(
        self,
        measures: Collection[Measure] = (),
        end: int = 0,
        *,
        shapes: Iterable[RowShape] | None = None,
        segments: int = 0,
    ) -> list[Name]:
        """Programs of the grid, for steps through all layers, and for those that measure.

        end: layer after which steps that measure end (0: the last). shapes: of steps (None: all). segments: most
        segments of a prompt.
        """
        kinds = tuple(self._kinds(set(measures) - {Measure.LOGITS}, end, self._grid.fit_segments(segments)))
        shapes = self._grid.rows if shapes is None else shapes
        return [
            *dict.fromkeys(name for shape in shapes for name in self._of_shape(shape, kinds)),
            *(("sample", n, 0) for n in self._grid.logits),
            *(("logprobs", n) for n in self._grid.logits),
            *((kind, n) for kind in ("extract", "insert") for n in page_store.BUCKETS),
        ]

    def _kinds(self, measures: Collection[Measure], end: int, segments: int) -> Iterator[Name]:
        """Yield the ends of names of stages: how many layers they run, and what those measure."""
        depth = self._weights.depth
        yield (depth,)
        whole, rest = divmod(end or depth, depth)
        for what in sorted(measures):
            for count in (*[depth] * min(whole, 1), *[rest] * min(rest, 1)):
                yield count, what, segments if what is Measure.SEGMENT_SCORE else 0

    def _of_shape(self, shape: RowShape, kinds: Iterable[Name]) -> Iterator[Name]:
        for entries in self._grid.entries_of(shape):
            yield "begin", shape.rows, entries
            for kind in kinds:
                if shape.block > 1 or len(kind) == 1:  # what decodes alone measures nothing
                    yield "stage", shape.rows, entries, *kind
        yield "end", shape.rows, self._grid.logits_of(shape)

    def shapes_for(self, kinds: frozenset[Name]) -> tuple[RowShape, ...]:
        """Shapes of which all programs for such steps are there; all shapes if none is, or nothing is made ahead."""
        if not self.ahead:
            return self._grid.rows
        if self._there.get(kinds, (0, ()))[0] != (number := len(self.compiled)):
            measures = any(len(kind) > 1 for kind in kinds)
            able = (shape for shape in self._grid.rows if shape.block > 1 or not measures)
            there = [x for x in able if all(name in self.compiled for name in self._of_shape(x, kinds))]
            self._there[kinds] = number, tuple(there) or self._grid.rows
        return self._there[kinds][1]

    def compile(self, names: Iterable[Name]) -> None:
        for name in names:
            if name not in self.compiled:
                self.compiled[name] = self._make(name)

    def get(self, *name: Any) -> Any:
        """The program of this name; it is made now if that was not done ahead, or failed."""
        if name not in self.compiled:
            if name in self.faults:  # the next request may find room
                raise self.faults.pop(name)
            log.info("compiling %s at its first use", " ".join(map(str, name)))
            begin = time.perf_counter()
            try:
                self.compiled[name] = self._make(name)
            finally:
                self.waited_s += time.perf_counter() - begin
        return self.compiled[name]

    def try_make(self, name: Name) -> None:
        """Make a program; a fault is kept for the request that needs it."""
        try:
            self.compile([name])
        except Exception as error:
            log.error("%s could not be compiled", " ".join(map(str, name)), exc_info=error)
            self.faults[name] = error

    def settled(self, name: Name) -> bool:
        return name in self.compiled or name in self.faults

    def padding(self, names: Collection[str], rows: int, entries: int) -> dict[str, NDArray[np.int32]]:
        return padding(names, rows, entries, self._pool.page_size, self._grid.sharing(rows)[0])

    def choices(self, rows: int, entries: int) -> tuple[Choice, ...]:
        """For each part of a step, and for shared keys, the backend of attention and those that refused it."""
        if (rows, entries) not in self._choices:
            _, inputs = self._begin_shapes(rows, entries)
            shape = self._grid.shape(rows)
            parts = list(zip(shape.parts, inputs.blocks, strict=True))
            if inputs.sharing is not None:
                parts.append((shape.sharing, inputs.sharing.blocks))
            self._choices[rows, entries] = tuple(self._choice(*part, inputs.entries, blocks) for part, blocks in parts)
        return self._choices[rows, entries]

    def _choice(self, rows: int, block: int, entries: Any, blocks: Any) -> Choice:
        mesh = self._spec.mesh
        heads, dim = self._config.num_heads // mesh.size, self._config.head_dim
        q_THD: Any = jax.ShapeDtypeStruct((rows, heads, dim), jnp.float32)

        def on_one(x_LPKCD: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            layers, pages, heads, *page = x_LPKCD.shape
            return jax.ShapeDtypeStruct((layers, pages, heads // mesh.shape["kv_heads"], *page), x_LPKCD.dtype)

        pool: Any = jax.tree.map(on_one, self._pool)
        row_T: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
        looking = Rows(row_T, row_T, row_T)
        view = View(looking, pool, 0, entries, self._rotation, blocks, self._spec.scale, block, cap=self._spec.cap)
        return choose(q_THD, view, self._device, self._attention)

    def _make(self, name: Name) -> Any:
        if self._executables is None:
            return self._compile(*name)
        devices = list(self._spec.mesh.devices.flat)
        shape = self._grid.shape(name[1]) if name[0] in ("begin", "stage") else None
        key = key_of(devices, {"name": name, "shape": shape, "common": self._common})
        found = self._executables.load(key, devices)
        if found is not None:
            program, choices = found
            if choices is not None:
                self._choices[name[1:]] = choices
            return program
        program = self._compile(*name)
        self._executables.keep(key, program, self.choices(*name[1:]) if name[0] == "begin" else None)
        return program

    @cached_property
    def _common(self) -> tuple[object, ...]:
        spec = self._spec
        arrays = jax.tree.leaves((self._weights.ends, self._weights.stages[0], self._pool, self._rotation))
        return (
            *(self._config.to_json(), str(spec.mesh), self._attention, self.kernel, self._weights.depth),
            *(spec.scanned, spec.scale, spec.widen, spec.cap),
            *((x.shape, str(x.dtype), str(x.sharding)) for x in arrays),
            *(str(spec.stage), str(jax.tree.structure(self._weights.ends))),  # how matrices are packed
        )

    def _compile(self, kind: str, *sizes: Any) -> Any:
        function: Any
        match kind, sizes:
            case "begin", (rows, entries):
                function = partial(stages.begin, self._spec, self._grid.shape(rows))
                jitted = jax.jit(function, out_shardings=self._everywhere)
                lowered = jitted.lower(self._weights.ends, self._rotation, self._shapes(STEP_ARRAYS, rows, entries))
            case "stage", (rows, entries, layers, *measure):
                lowered = self._stage(rows, entries, layers, tuple(measure) or None)
            case "end", (rows, n):
                jitted = jax.jit(partial(stages.end, self._spec), out_shardings=self._everywhere)
                x_TE = self._shape(rows, self._config.hidden_size, dtype=jnp.float32)
                lowered = jitted.lower(self._weights.ends, x_TE, self._shape(n))
            case "allow", (n,):
                bits_NW = self._shape(n, -(-self._config.vocab_size // 32), dtype=jnp.uint32)
                lowered = jax.jit(sampling.allow).lower(self._logits(n), bits_NW)
            case "sample", (n, adjusted):
                shapes = stages.sample_shapes(n, self._config.vocab_size, adjusted)
                lowered = jax.jit(stages.sample).lower(*self._replicated(shapes))
            case "logprobs", (n,):
                lowered = jax.jit(sampling.logprobs).lower(self._logits(n), self._shape(n))
            case "move", (n,):
                jitted = jax.jit(move_slots, donate_argnums=0, out_shardings=self._pool_sharding)
                lowered = jitted.lower(self._pool, *[self._shape(n)] * 3, self._rotation)
            case "extract", (n,):
                jitted = jax.jit(page_store.extract, out_shardings=self._pool_sharding)
                lowered = jitted.lower(self._pool, self._shape(n))
            case "insert", (n,):
                excerpt = jax.tree.map(
                    lambda x: self._shape(self._weights.depth, n, *x.shape[2:], dtype=x.dtype, at=self._pool_sharding),
                    self._pool,
                )
                jitted = jax.jit(page_store.insert, donate_argnums=0, out_shardings=self._pool_sharding)
                lowered = jitted.lower(self._pool, self._shape(n), excerpt)
            case "compact", (compression, tokens):
                function = partial(compaction.compact, compression, scale=self._spec.scale, cap=self._spec.cap)
                out = (self._pool_sharding, self._everywhere)
                jitted = jax.jit(function, donate_argnums=0, out_shardings=out)
                shapes = self._replicated(self._compact_shapes(compression, tokens))
                lowered = jitted.lower(self._pool, *shapes, self._rotation)
            case _:
                raise ValueError(f"there is no program {kind} of {sizes}")
        return lowered.compile()

    def _stage(self, rows: int, entries: int, layers: int, measure: tuple[Measure, int] | None) -> Any:
        names = () if measure is None else reductions.ARRAYS[measure[0]]
        backends = tuple(choice.backend for choice in self.choices(rows, entries))
        function = partial(stages.stage, self._spec, self._grid.shape(rows), backends, layers, measure)
        x_TE, inputs = self._replicated(self._begin_shapes(rows, entries))
        chosen_L = jax.ShapeDtypeStruct((layers if measure else 0,), jnp.bool_)
        measured_by = self._replicated(chosen_L), self._shapes(names, rows, entries)
        out = (self._everywhere, self._pool_sharding, self._everywhere)
        jitted = jax.jit(function, donate_argnums=(1, 2), out_shardings=out)
        return jitted.lower(self._weights.stages[0], self._pool, x_TE, inputs, self._rotation, *measured_by)

    def nothing_compacted(self, compression: Compression, tokens: int) -> Any:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._compact_shapes(compression, tokens))
        zeros[0]["target_B"] += stages.OUTSIDE + np.arange(len(zeros[0]["target_B"]), dtype=np.int32)
        return zeros

    def _compact_shapes(self, compression: Compression, tokens: int) -> tuple[Any, Any, Any]:
        config, layers = self._config, self._weights.depth
        query_LWHD = mass_LN = None
        if compression.method in BY_QUERIES:
            shape = (layers, compression.window, config.num_heads, config.head_dim)
            query_LWHD = jax.ShapeDtypeStruct(shape, jnp.float32)
        if compression.method in BY_MASS:
            mass_LN = jax.ShapeDtypeStruct((layers, tokens), jnp.float32)
        return compaction.shapes_of(compression, tokens), query_LWHD, mass_LN

    def _logits(self, n: int) -> Any:
        return self._shape(n, self._config.vocab_size, dtype=jnp.float32)

    def _shape(self, *size: int, dtype: Any = jnp.int32, at: NamedSharding | None = None) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=at or self._everywhere)

    def _begin_shapes(self, rows: int, entries: int) -> tuple[Any, Any]:
        begin = partial(stages.begin, self._spec, self._grid.shape(rows))
        step = self._shapes(STEP_ARRAYS, rows, entries)
        shapes: tuple[Any, Any] = jax.eval_shape(begin, self._weights.ends, self._rotation, step)
        return shapes

    def _shapes(self, names: Collection[str], rows: int, entries: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes: dict[str, jax.ShapeDtypeStruct] = self._replicated(self.padding(names, rows, entries))
        return shapes

    def _replicated(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), tree)
