"""The runner without engine and scheduler: random weights, passes cut into steps, decoding side by side."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.machine import median
from benchmarks.kernels.masks import seen_pairs
from ragjax.core import NEVER, Draw, Grid, RowShape, Run, Span, Step
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, Weight
from ragjax.runner.mesh import make_mesh
from ragjax.runner.runner import Runner, StepResult
from ragjax.schedule.batch import empty_step, put_table
from ragjax.schedule.rows import SpanTable


def random_decoder(config: ModelConfig, dtype: str) -> Decoder:
    """A decoder with random weights, each made on the device by a program of its shape."""
    decoder = Decoder.abstract(config, jnp.dtype(dtype))
    make = jax.jit(_random, static_argnames=("shape", "dtype", "scale"))
    owners = (decoder, *decoder.layers)
    weights = [w for owner in owners for w in vars(owner).values() if isinstance(w, Weight)]
    for i, weight in enumerate(weights):
        kind = jnp.dtype(weight.dtype)
        if kind == jnp.float32 and len(weight.shape) == 1:  # a norm
            weight.set_value(jnp.ones(weight.shape, kind))
        else:
            scale = 0.02 if weight.axes[0] == "vocab" else config.hidden_size**-0.5
            weight.set_value(make(jax.random.key(i), shape=tuple(weight.shape), dtype=kind.name, scale=scale))
    return decoder


def _random(key: jax.Array, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.dtype(dtype)) * jnp.asarray(scale, dtype)


def make_runner(config: ModelConfig, setting: Setting, devices: int = 1) -> Runner:
    """A runner with random weights and a pool for one prompt at a time, over so many devices."""
    context = max(setting.contexts) + 2 * setting.page
    runner = Runner(
        random_decoder(config, setting.dtype), pages=setting.entries + 1, page_size=setting.page, context=context,
        grid=setting.grid(config), mesh=make_mesh(devices, config),
    )  # fmt: skip
    gc.collect()  # the runner stacked the weights; the decoder's own go
    return runner


def cut(n: int, buckets: tuple[int, ...]) -> list[int]:
    """Buckets that together hold n rows, with the fewest rows of padding; each step counts as 64 rows more."""

    @cache
    def best(left: int) -> tuple[int, tuple[int, ...]]:
        whole = min((b for b in buckets if b >= left), default=None)
        found: list[tuple[int, tuple[int, ...]]] = [] if whole is None else [(whole + 64, (whole,))]
        for b in buckets:
            if left / 8 <= b < left or (whole is None and b == buckets[-1]):
                cost, rest = best(left - b)
                found.append((b + 64 + cost, (b, *rest)))
        return min(found)

    return list(best(n)[1])


def prefill_steps(grid: Grid, one: Pass, table: SpanTable, tokens: Int, page: int) -> Iterator[tuple[Step, int]]:
    """Steps that carry out a pass of one request, and how many rows each computes."""
    begin, n = 0, len(one.order)
    for rows in cut(n, tuple(shape.rows for shape in grid.rows if shape.block > 1)):
        step = empty_step(grid.shape(rows), grid.entries[0], page)
        take = min(rows, n - begin)
        _put_rows(step, slice(0, take), 0, one, slice(begin, begin + take), tokens)
        put_table(step, 0, 0, table, 0, len(table))
        yield step, take
        begin += take


def decode_step(grid: Grid, parts: Sequence[tuple[Pass, SpanTable, Int]], page: int) -> Step:
    step = empty_step(grid.rows[0], grid.entries[0], page)
    entry = 0
    for number, (one, table, tokens) in enumerate(parts):
        _put_rows(step, slice(number, number + 1), number, one, slice(0, 1), tokens)
        put_table(step, entry, number, table, 0, len(table))
        entry += len(table)
    return step


def _put_rows(step: Step, at: slice, request: int, one: Pass, part: slice, tokens: Int) -> None:
    step.token_T[at], step.index_T[at], step.position_T[at] = tokens[part], one.order[part], one.position[part]
    step.request_T[at], step.slot_T[at] = request, one.slot[part]


@dataclass
class Ours:
    """Our runner under test, made when it is first needed."""

    config: ModelConfig
    setting: Setting
    devices: int = 1

    @cached_property
    def runner(self) -> Runner:
        return make_runner(self.config, self.setting, self.devices)

    def prefill(self, one: Pass, tokens: Int | None = None) -> NDArray[np.float32]:
        """Logits behind the last row of a pass, [1, V]."""
        outcome, last = self._run(one, tokens)
        return self.runner.logits(outcome, [last])

    def _run(self, one: Pass, tokens: Int | None = None) -> tuple[StepResult, int]:
        ids = self.tokens(len(one.order), 0) if tokens is None else tokens
        table = SpanTable(one.spans, self.setting.page)
        for step, taken in prefill_steps(self.runner.grid, one, table, ids, self.setting.page):
            outcome, last = self.runner.step(step), taken - 1
        return outcome, last

    def tokens(self, n: int, seed: int) -> Int:
        return np.random.default_rng(seed).integers(3, self.config.vocab_size, n).astype(np.int32)

    def first_token(self, work: Sequence[Pass], runs: int) -> dict[str, Any]:
        """Median milliseconds of passes carried out one after the other; the first time compiles."""
        began = time.perf_counter()
        for one in work:
            logits = self.prefill(one)
        first_s = time.perf_counter() - began
        if not np.isfinite(logits).all():
            raise ArithmeticError("wrong result: logits are not finite")
        self._all(work)  # compiles how a token is chosen
        before, found = Counter(self.runner.calls), []
        for _ in range(runs):
            began = time.perf_counter()
            token = self._all(work)
            found.append((time.perf_counter() - began) * 1e3)
            if token != logits.argmax():
                raise ArithmeticError("wrong result: the same pass gave another token")
        used = " ".join(sorted(self.runner.calls - before))
        return {"ttft_ms": median(found), "ttft_ms_runs": found, "first_s": first_s, "attention": used}

    def _all(self, work: Sequence[Pass]) -> int:
        """The token behind the last of these passes."""
        for one in work:
            outcome, last = self._run(one)
        return self._likeliest(outcome, [last])[0]

    def _likeliest(self, outcome: StepResult, rows: Sequence[int]) -> list[int]:
        """The token behind each of these rows, chosen on the device."""
        draws = [Draw()] * len(rows)
        return [chosen.token for chosen in self.runner.sample(self.runner.predict(outcome, rows), draws).read()]

    def decode(self, layouts: Sequence[Layout], spans: Sequence[Sequence[Span]]) -> float:
        tails = [layout.table(own) for layout, own in zip(layouts, spans, strict=True)]
        chosen = [np.zeros(1, np.int32) for _ in layouts]
        for i in range(self.setting.decoded + 1):
            if i == 1:  # the first one compiles
                began = time.perf_counter()
            outcome = self._decode_step(layouts, tails, chosen, i)
            chosen = [np.array([token], np.int32) for token in self._likeliest(outcome, range(len(layouts)))]
        return self.setting.decoded * len(layouts) / (time.perf_counter() - began)

    def next_tokens(
        self, layouts: Sequence[Layout], tails: Sequence[tuple[SpanTable, Int]], chosen: Sequence[Int], i: int
    ) -> NDArray[np.float32]:
        """Logits behind the generated token i of each request."""
        return self.runner.logits(self._decode_step(layouts, tails, chosen, i), range(len(layouts)))

    def _decode_step(
        self, layouts: Sequence[Layout], tails: Sequence[tuple[SpanTable, Int]], chosen: Sequence[Int], i: int
    ) -> StepResult:
        parts = []
        for layout, (table, slots), token in zip(layouts, tails, chosen, strict=True):
            order = np.array([layout.context + i], np.int32)
            table.show(i, int(order[0]))
            parts.append((Pass(order, order, slots[i : i + 1], ()), table, token))
        return self.runner.step(decode_step(self.runner.grid, parts, self.setting.page))


Int = NDArray[np.int32]


@dataclass(frozen=True)
class Pass:
    """Rows to compute over spans of keys, for one request; slot: where each row's KV goes."""

    order: Int
    position: Int
    slot: Int
    spans: tuple[Span, ...]

    @property
    def visible_pairs(self) -> int:
        lengths = [len(span.indices) for span in self.spans]
        low, high = np.repeat([span.hidden for span in self.spans], lengths, axis=0).T
        return seen_pairs(self.order, np.concatenate([span.indices for span in self.spans]), low, high)


@dataclass(frozen=True)
class Layout:
    """See the module.

    tail: slots behind the question, for decoding. fresh: pages for what is recomputed.
    """

    context: int
    chunk: int
    question: int
    page: int
    first_page: int = 1

    @property
    def join(self) -> int:
        """Order of the question's first token."""
        return self.context - self.question

    @property
    def starts(self) -> list[int]:
        return [0, *range(self.chunk - self.question, self.join, self.chunk), self.join]

    @property
    def runs(self) -> list[Run]:
        """Slots of the system prompt, of each chunk and of the question with its tail; each on pages of its own."""
        lengths = [*np.diff(self.starts).tolist(), self.question + self.page]
        found, page = [], self.first_page
        for length in lengths:
            count = -(-length // self.page)
            found.append(Run(tuple(range(page, page + count)), 0, length))
            page += count
        return found

    @property
    def pages(self) -> int:
        """Pages in use, those of recomputed tokens not counted."""
        return sum(len(run.pages) for run in self.runs)

    @property
    def fresh_page(self) -> int:
        """The first page behind the prompt's."""
        return self.first_page + self.pages

    def _asked(self) -> tuple[Int, Span]:
        run = self.runs[-1].slice(0, self.question, self.page)
        return indices(self.join, self.context), Span.consecutive(self.join, run)

    def full(self) -> Pass:
        spans = [Span.consecutive(start, run) for start, run in zip(self.starts, self.runs[:-1], strict=False)]
        order = indices(0, self.context)
        every = (*spans, self._asked()[1])
        return Pass(order, order, np.concatenate([s.run.slots(self.page) for s in every]), every)

    def chunks(self) -> Pass:
        """System prompt and chunks, each chunk at the position right behind the system prompt, hidden from others."""
        starts, system = self.starts, self.starts[1]
        spans = [Span.consecutive(0, self.runs[0])]
        position = [indices(0, system)]
        for begin, end, run in zip(starts[1:], starts[2:], self.runs[1:], strict=False):
            spans.append(Span.consecutive(begin, run, 0, (end, self.join)))
            position.append(indices(system, system + end - begin))
        slot = np.concatenate([s.run.slots(self.page) for s in spans])
        return Pass(indices(0, self.join), np.concatenate(position), slot, tuple(spans))

    def _cached(self, stale: Int | None = None) -> list[Span]:
        system, spans = self.starts[1], []
        for begin, run in zip(self.starts, self.runs[:-1], strict=False):
            order = indices(begin, begin + run.length)
            if stale is not None:
                order = np.where(np.isin(order, stale), NEVER, order)
            spans.append(Span(order, run, 0 if begin == 0 else begin - system))
        return spans

    def naive(self) -> Pass:
        order, asked = self._asked()
        return Pass(order, order, asked.run.slots(self.page), (*self._cached(), asked))

    def recompute(self, share: float, seed: int = 0) -> Pass:
        """The question and `share` of the context, which goes to fresh pages; what it replaces is hidden."""
        count = round(share * self.join)
        stale = np.sort(np.random.default_rng(seed).choice(self.join, count, replace=False)).astype(np.int32)
        first = self.fresh_page
        fresh = Span(stale, Run(tuple(range(first, first + -(-count // self.page))), 0, count))
        question, asked = self._asked()
        order = np.concatenate([stale, question])
        slot = np.concatenate([fresh.run.slots(self.page), asked.run.slots(self.page)])
        return Pass(order, order, slot, (*self._cached(stale), fresh, asked))

    def table(self, spans: Sequence[Span]) -> tuple[SpanTable, Int]:
        """Entries of the prompt's spans and of a tail for generated tokens, not shown yet; and the tail's slots."""
        tail = self.runs[-1].slice(self.question, self.runs[-1].length, self.page)
        hidden = Span(np.full(tail.length, NEVER, np.int32), tail)
        return SpanTable([*spans, hidden], self.page), tail.slots(self.page)


def indices(begin: int, end: int) -> Int:
    return np.arange(begin, end, dtype=np.int32)


PAGE = 64
CHUNK, QUESTION = 512, 32
DECODED = 32


def _config(
    family: Any, heads: int, kv: int, layers: int, hidden: int, mlp: int, vocab: int, bias: bool
) -> ModelConfig:
    return ModelConfig(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=kv, head_dim=hidden // heads, rope_theta=500000.0, rope_scaling=None, norm_eps=1e-5,
        tie_embeddings=False, qkv_bias=bias, qk_norm=False, context_length=32768 + 256, eos_ids=(2,), bos_id=None,
    )  # fmt: skip


LLAMA = _config("llama", 32, 8, 32, 4096, 14336, 128256, False)
QWEN = _config("qwen2", 28, 4, 28, 3584, 18944, 152064, True)
TINY = replace(_config("llama", 8, 2, 4, 64, 96, 320, False), context_length=1024)


@dataclass(frozen=True)
class Setting:
    """What is run."""

    models: Mapping[str, ModelConfig]
    contexts: tuple[int, ...]
    chunk: int
    question: int
    page: int
    dtype: str
    rows: tuple[int, ...]  # buckets
    entries: int  # of every step, and pages of the pool
    batch_context: int
    runs: int
    decoded: int

    def layout(self, context: int, first_page: int = 1) -> Layout:
        return Layout(context, self.chunk, self.question, self.page, first_page)

    def grid(self, config: ModelConfig) -> Grid:
        """Row buckets that fit the passes measured here; one entry bucket, to compile few programs."""
        # with its padded group a block fills the 128 rows of a kernel
        block = 128 // (1 << (config.num_groups - 1).bit_length())
        rows = (RowShape(8, 1, shares=True), *(RowShape(n, block) for n in self.rows))
        return Grid(rows=rows, entries=(self.entries,), logits=(1, 8))


FULL = Setting(
    models={"llama-3-8b": LLAMA, "qwen2.5-7b": QWEN}, contexts=(32768, 16384, 27648, 8192, 4096), chunk=CHUNK,
    question=QUESTION, page=PAGE, dtype="bfloat16", rows=(64, 1280, 2560, 4096, 5120), entries=640, batch_context=4096,
    runs=3, decoded=DECODED,
)  # fmt: skip
REHEARSAL = Setting(
    models={"tiny": TINY}, contexts=(128,), chunk=32, question=8, page=16, dtype="float32", rows=(32, 64), entries=24,
    batch_context=32, runs=1, decoded=4,
)  # fmt: skip


def hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.context_length, "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
    }  # fmt: skip
