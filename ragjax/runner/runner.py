"""The compute side: a fixed grid of compiled programs over a page pool. It never sees a request.

A step takes arrays and runs three kinds of program: `begin` (embedding, rotation, visible blocks: once), `stage` (some
layers: writes the rows' KV into the pool in place and attends), and `end` (logits of chosen rows). All stages have
equally many layers, so one program per row bucket serves them all and compile time does not grow with depth. A step may
run some of the layers only, and measure in some; `move` copies KV from slots to slots.
"""

from __future__ import annotations

import logging
import timeit
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from ragjax.core import Compression, DeviceFullError, Draw, Grid, Measure, Residual, RowShape, Step, StepMeasure
from ragjax.core.step import STEP_ARRAYS
from ragjax.kernels.reductions import measure as reductions
from ragjax.models.decoder import Decoder, rotation_table
from ragjax.models.executables import Executables
from ragjax.runner import compaction, sampling
from ragjax.runner.device import is_full
from ragjax.runner.mesh import POOL, mesh_of
from ragjax.runner.pool import DevicePool, check_range
from ragjax.runner.programs import Name, Programs
from ragjax.runner.sampling import Logits, Sampled
from ragjax.runner.stages import Spec
from ragjax.runner.supply import Supply
from ragjax.runner.weights import Weights
from ragjax.store import device as page_store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    x_TE: residual rows after the last layer that ran, float32 [T, E].
    found: of each stage that measured what it found, [layers, ...], and which layers of it count, bool [layers].
    """

    x_TE: jax.Array
    found: tuple[tuple[jax.Array, NDArray[np.bool_]], ...] = ()

    def wait(self) -> None:
        self.x_TE.block_until_ready()

    @property
    def measured(self) -> NDArray[np.float32] | None:
        """The measurement the step asked for, float32 [layers, ...] (`kernels.reductions.measure`); waits for it."""
        if not self.found:
            return None
        return np.concatenate([np.asarray(found_L)[chosen_L] for found_L, chosen_L in self.found])


class Runner(DevicePool):
    """The page pool of one model on one mesh, and the programs that compute on it.

    decoder: its arrays are taken over. pages: the scratch page 0 included. context: largest position plus one. grid:
    buckets of rows, entries and logits that programs are compiled for. scanned: run a stage's layers by `lax.scan`
    instead of unrolled: programs are smaller, but XLA copies each layer's matrices before it reads them (a third of a
    decode step on an H200, docs/kernels.md). attention: backend to try first. widen: products of many rows read
    bfloat16 weights and KV as float32: faster on a CPU without bfloat16 products. stage_layers: most layers of a stage.

    Attributes:
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
        scanned: bool = False,
        mesh: Mesh | None = None,
        attention: str | None = None,
        widen: bool = False,
        executables: Executables | None = None,
        stage_layers: int | None = None,
    ):
        mesh = mesh or mesh_of(jax.devices()[:1])
        platform = mesh.devices.flat[0].platform
        self._weights = weights = Weights.of(decoder, mesh, scanned=scanned, most=stage_layers)
        self.config = config = decoder.config
        dtype = decoder.embedding[...].dtype
        self.dtype = str(dtype)
        self.storage_dtype = page_store.storage_dtype(dtype, platform)
        self.grid = grid or Grid()
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

        self._replicated = NamedSharding(mesh, P())
        rotation = jax.device_put(rotation_table(config, context or config.context_length), self._replicated)
        create = partial(page_store.create, config, weights.depth, pages, page_size, self.storage_dtype)
        jitted = jax.jit(create, out_shardings=NamedSharding(mesh, POOL))
        definitions = (weights.layer_def, weights.stage_def, weights.ends_def)
        spec = Spec(*definitions, mesh, scanned, config.attention_scale, widen, config.attention_cap)
        programs = Programs(config, spec, weights, jitted.eval_shape(), rotation, self.grid, attention, executables)
        super().__init__(jitted, len(weights.stages), programs, rotation)

    @property
    def attention_kernel(self) -> str | None:
        """Name of the CPU's attention kernel that programs call; it computes a row alike in any step."""
        return self._programs.kernel

    @property
    def held(self) -> str:
        arrays = jax.tree.leaves((self._weights.ends, self._weights.stages)), jax.tree.leaves(self._pools)
        # stages share the arrays of packed layers
        buffers = ({x.addressable_data(0).unsafe_buffer_pointer(): x.nbytes for x in part} for part in arrays)
        weights, cache = (sum(part.values()) / 2**30 for part in buffers)
        return f"{weights:.3g} GB of weights and a cache of {cache:.3g} GB"

    def explained(self, error: Exception) -> Exception:
        """Replace the error of a full device by one that says what to change."""
        if not is_full(error):
            return error
        told = DeviceFullError(
            f"the device has no room for what the request computes, beside {self.held}: lower --device-cache-gb, or "
            "use the strategy and the compression that the server was started with, whose programs have room"
        )
        told.__cause__ = error
        return told

    @property
    def waited_s(self) -> float:
        return self._programs.waited_s

    def compile(self, names: Iterable[Name]) -> None:
        self._programs.compile(names)

    def supply(self, planned: Iterable[Name]) -> Supply:
        """Make programs in a thread of its own from now on; steps take shapes whose programs are there."""
        self._programs.ahead = True
        return Supply(self._programs, planned)

    def shapes_for(self, layers: tuple[int, int], measure: StepMeasure | None) -> tuple[RowShape, ...]:
        """Shapes of a step of these layers that no program is missing for (all, if none is so).

        measure: its segments are those of the prompts.
        """
        kinds = set[Name]()
        for first in range(*layers, self._depth):
            count = min(self._depth, layers[1] - first)
            measures = measure is not None and measure.layers[0] < first + count and first < measure.layers[1]
            if measures and measure is not None:
                segmented = measure.what is Measure.SEGMENT_SCORE
                kinds.add((count, measure.what, self.grid.fit_segments(measure.segments) if segmented else 0))
            else:
                kinds.add((count,))
        return self._programs.shapes_for(frozenset(kinds))

    def warm_up(self, names: Iterable[Name]) -> None:
        """Run programs once, which shows if the device has room. All rows are padding: no KV changes."""
        for name in names:
            jax.block_until_ready(self._run_empty(*name))

    def computes_numbers(self) -> bool:
        """True if the logits of a token, at the first position, are finite. What it writes lies in page 0."""
        rows = self.grid.least[0].rows
        arrays: dict[str, Any] = {**self._programs.padding(STEP_ARRAYS, rows, self.grid.entries[0])}
        for name in ("index_T", "request_T", "request_S"):
            arrays[name][0] = 0
        arrays["index_SC"][0, 0] = 0
        return bool(np.isfinite(self.logits(self.step(Step(**arrays)), [0])).all())

    def seconds(self, rows: int, pages: int = 0, runs: int = 3) -> float:
        """Seconds of a step with so many rows: the minimum of some runs.

        pages: that each row reads, in blocks of one; all are page 0, whose tokens count on from page to page. With 0
            the rows are padding, but for the last: padding at the end may cost nothing.
        """
        entries = self.grid.entries_of(self.grid.shape(rows))[0]
        arrays: dict[str, Any] = {**self._programs.padding(STEP_ARRAYS, rows, entries)}
        arrays["index_T"][-1] = 0
        if pages:
            keys = pages * self.page_size
            arrays["request_T"], arrays["index_T"] = np.arange(rows, dtype=np.int32), np.full(rows, keys, np.int32)
            arrays["request_S"][: rows * pages] = np.repeat(arrays["request_T"], pages)
            # many keys of one token index, which no prompt has, take the square of the time
            arrays["index_SC"][: rows * pages] = np.tile(np.arange(keys).reshape(pages, -1), (rows, 1))
            arrays["slot_T"] = np.arange(rows, dtype=np.int32)
        step = Step(**arrays)

        def run() -> None:
            jax.block_until_ready(self.step(step).x_TE)

        return min(timeit.repeat(run, number=1, repeat=runs))

    def _run_empty(self, kind: str, *sizes: Any) -> Any:
        program = self._programs.get(kind, *sizes)
        if kind == "extract":
            return program(self._pools[0], np.zeros(sizes, np.int32))
        if kind == "insert":
            zeros = np.zeros(sizes, np.int32)
            scratch = self._programs.get("extract", *sizes)(self._pools[0], zeros)
            self._pools[0] = program(self._pools[0], zeros, scratch)
            return self._pools[0]
        if kind == "compact":
            nothing = self._programs.nothing_compacted(*sizes)
            self._pools[0], index_LKB = program(self._pools[0], *nothing, self._rotation)
            return index_LKB
        if kind == "end":
            rows, n = sizes
            x_TE = self._upload(np.zeros((rows, self.config.hidden_size), np.float32))
            return program(self._weights.ends, x_TE, np.zeros(n, np.int32))
        if kind in ("sample", "logprobs"):
            zeros_V = np.zeros(self.config.vocab_size, np.float32)
            draws = [Draw(1.0, logprobs=kind == "logprobs")] * sizes[0]
            return [part[1:] for part in self.sample(self.upload_logits([zeros_V] * sizes[0]), draws).parts]
        rows, entries, *stage = sizes
        step = self._programs.padding(STEP_ARRAYS, rows, entries)
        x_TE, inputs = self._programs.get("begin", rows, entries)(self._weights.ends, self._rotation, step)
        if kind == "begin":
            return x_TE
        layers, *measure = stage
        names = reductions.ARRAYS[measure[0]] if measure else ()
        arrays = self._programs.padding(names, rows, entries)
        chosen_L = np.ones(layers if measure else 0, np.bool_)
        x_TE, self._pools[0], _ = program(
            self._weights.stages[0], self._pools[0], x_TE, inputs, self._rotation, chosen_L, arrays
        )
        return x_TE

    def programs(
        self,
        measures: Collection[Measure] = (),
        end: int = 0,
        compression: Compression | None = None,
        *,
        shapes: Iterable[RowShape] | None = None,
        segments: int = 0,
        tokens: int | None = None,
    ) -> list[Name]:
        """Names of programs. end: layer after which steps that measure end (0: the last). tokens: of a prompt that is
        compressed.
        """
        names = self._programs.names(measures, end, shapes=shapes, segments=segments)
        if compression is not None:
            sizes: Sequence[int] = compaction.buckets(compression, self._rotation.cos_NR.shape[0])
            if tokens is not None:
                sizes = [compaction.bucket(tokens)]
            names += [("compact", compression.program, size) for size in sizes]
        return names

    def step(self, step: Step) -> StepResult:
        """Run layers for one batch of rows (arrays as in `core.Step`): their KV is in the pool afterwards.

        Waits for nothing. The arrays must not change any more: the device may read them later. ValueError: before
        anything is computed, if a page, slot, position, offset or layer is out of range.
        """
        rows, entries = len(step.token_T), len(step.page_S)
        begin, end = step.layers or (0, self.config.num_layers)
        self._check(step, begin, end)
        arrays = {name: getattr(step, name) for name in STEP_ARRAYS}
        x_TE, inputs = self._programs.get("begin", rows, entries)(self._weights.ends, self._rotation, arrays)
        if step.residual_TE is not None:
            x_TE = self._upload(step.residual_TE)
        found = []
        for first in range(begin, end, self._depth):
            i = first // self._depth
            program, chosen_L, measured_by = self._stage_program(step, first, min(self._depth, end - first))
            x_TE, self._pools[i], found_L = program(
                self._weights.stages[i], self._pools[i], x_TE, inputs, self._rotation, chosen_L, measured_by
            )
            if len(chosen_L):
                found.append((found_L, chosen_L))
        for choice in self._programs.choices(rows, entries):
            self.calls[choice.backend] += end - begin
            for backend, reason in choice.refused.items():
                if (notice := f"{backend}: {reason}") not in self.fallbacks:
                    log.warning("attention runs on %s instead of %s", choice.backend, notice)
                self.fallbacks[notice] += end - begin
        return StepResult(x_TE, tuple(found))

    def _stage_program(
        self, step: Step, first: int, count: int
    ) -> tuple[Any, NDArray[np.bool_], Mapping[str, NDArray[np.int32]]]:
        key = ("stage", len(step.token_T), len(step.page_S), count)
        low, high = step.measure.layers if step.measure else (0, 0)
        layer_L = np.arange(first, first + count)
        chosen_L = (low <= layer_L) & (layer_L < high)
        if step.measure is None or not chosen_L.any():
            return self._programs.get(*key), chosen_L[:0], {}
        return self._programs.get(*key, step.measure.what, step.measure.segments), chosen_L, step.measure.arrays

    def _upload(self, residual_TE: NDArray[np.float32] | Residual) -> jax.Array:
        """A copy of its own: the first stage takes it over."""
        if isinstance(residual_TE, jax.Array):
            return jnp.copy(residual_TE)
        copy_TE: jax.Array = jax.device_put(np.asarray(residual_TE, np.float32), self._replicated, may_alias=False)
        return copy_TE

    def logits(self, outcome: StepResult, rows: Sequence[int]) -> NDArray[np.float32]:
        """Next-token logits of the step's rows at these indices on the host, float32 [len(rows), V]."""
        return np.stack(list(self.predict(outcome, rows).read().values()))

    def predict(self, outcome: StepResult, rows: Sequence[int]) -> Logits:
        """Next-token logits of the step's rows at these indices; they stay on the device. Waits for nothing."""
        total = outcome.x_TE.shape[0]
        n = self.grid.logits_of(self.grid.shape(total))
        if len(rows) > n:  # a strategy reads them
            n = self.grid.logits[-1]
        parts = []
        for begin in range(0, len(rows), n):
            part = np.asarray(rows[begin : begin + n], np.int32)
            index_N = np.concatenate([part, np.zeros(n - len(part), np.int32)])
            parts.append((len(part), self._programs.get("end", total, n)(self._weights.ends, outcome.x_TE, index_N)))
        return Logits(tuple(parts))

    def upload_logits(self, rows: Sequence[NDArray[np.float32]]) -> Logits:
        widest, parts = self.grid.logits[-1], []
        for begin in range(0, len(rows), widest):
            part = rows[begin : begin + widest]
            logits_NV = np.zeros((Grid.fit(self.grid.logits, len(part)), self.config.vocab_size), np.float32)
            logits_NV[: len(part)] = part
            parts.append((len(part), jax.device_put(logits_NV, self._replicated)))
        return Logits(tuple(parts))

    def sample(self, logits: Logits, draws: Sequence[Draw]) -> Sampled:
        return sampling.sample(self._programs, logits, draws)

    def compact(
        self,
        compression: Compression,
        source_N: NDArray[np.int32],
        offset_N: NDArray[np.int32],
        target_B: NDArray[np.int32],
        query_LWHD: NDArray[np.float32] | None = None,
        mass_LN: NDArray[np.float32] | None = None,
    ) -> compaction.Kept:
        """Copy the KV that a compression keeps to other slots, in place. Waits for nothing.

        Args:
            compression: its budget is the number of target slots.
            source_N: slot (page * C + slot) of each token of the prompt.
            offset_N: RoPE offset of each key.
            target_B: slots to write, none twice.
            query_LWHD: rotated queries of the prompt's last rows in all layers, if the scorer asks for them.
            mass_LN: attention that each token received in all layers, likewise.
        """
        self._check_copy(source_N, target_B, offset_N, (0, self.config.num_layers))
        if not len(target_B) == compression.budget < len(source_N):
            raise ValueError(f"{compression} of {len(source_N)} tokens has {len(target_B)} slots")
        arrays = compaction.arrays_of(compression, source_N, offset_N, target_B)
        tokens = len(arrays["source_N"])
        program = self._programs.get("compact", compression.program, tokens)
        if mass_LN is not None:
            mass_LN = np.pad(mass_LN, ((0, 0), (0, tokens - mass_LN.shape[1])))
        indexes = []
        for i, first in enumerate(self.stages[:-1]):
            stage = slice(first, first + self._depth)
            measured = [None if x is None else x[stage] for x in (query_LWHD, mass_LN)]
            self._pools[i], index_LKB = program(self._pools[i], arrays, *measured, self._rotation)
            indexes.append(index_LKB)
        return compaction.Kept(compression.budget, indexes)

    def _check(self, step: Step, begin: int, end: int) -> None:
        if begin not in self.stages[:-1] or not begin < end <= self.config.num_layers:
            raise ValueError(f"step.layers is {begin, end}; a step begins at one of {self.stages[:-1]}")
        if (step.residual_TE is None) != (begin == 0):
            raise ValueError(f"a step from layer {begin} on takes {'a' if begin else 'no'} residual")
        if step.residual_TE is not None and len(step.residual_TE) != len(step.token_T):
            raise ValueError(f"step.residual_TE is of {len(step.residual_TE)} rows, not {len(step.token_T)}")
        # rows of index -1 are padding and entries of request -1 unused: both may hold anything
        live_T, used_S, positions = step.index_T >= 0, step.request_S >= 0, self._rotation.cos_NR.shape[0]
        check_range("entries.page", step.page_S[used_S], self._pages, "pages of the pool")
        check_range("entries.offset", np.abs(step.offset_S[used_S]), positions, "positions of the rotation table")
        check_range("rows.position", step.position_T[live_T], positions, "positions of the rotation table")
        at = 0
        for rows, block in self.grid.shape(len(step.token_T)).parts:
            request_NB, live_NB = (x[at : at + rows].reshape(-1, block) for x in (step.request_T, live_T))
            first_N = request_NB[np.arange(len(request_NB)), live_NB.argmax(1)]
            mixed_N = (live_NB & (request_NB != first_N[:, None])).any(1)
            if mixed_N.any():
                raise ValueError(f"rows.request mixes requests in block {int(mixed_N.argmax())} of {block} rows")
            at += rows
        places, _ = self.grid.sharing(len(step.token_T))
        ones = self.grid.shape(len(step.token_T)).ones
        if step.sharer_O.shape != (places,) or (step.sharer_O >= ones).any():
            raise ValueError(f"step.sharer_O holds {step.sharer_O}: not {places} rows of the {ones} in blocks of one")
        check_range("step.slot_T", step.slot_T, self._pages * self.page_size, "slots of the pool")
