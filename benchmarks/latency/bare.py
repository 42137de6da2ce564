"""The runner without engine and scheduler: random weights, passes cut into steps, decoding side by side."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.machine import median
from benchmarks.latency.layout import Int, Layout, Pass
from benchmarks.latency.sizes import Setting
from ragjax.core import Draw, Grid, Span, Step
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, Weight
from ragjax.runner.mesh import make_mesh
from ragjax.runner.runner import Runner, StepResult
from ragjax.schedule.batch import empty_step, put_table
from ragjax.schedule.rows import PageTable


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
        random_decoder(config, setting.dtype),
        pages=setting.entries + 1,
        page_size=setting.page,
        context=context,
        grid=setting.grid(config),
        mesh=make_mesh(devices, config),
    )
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


def prefill_steps(grid: Grid, one: Pass, table: PageTable, tokens: Int, page: int) -> Iterator[tuple[Step, int]]:
    """Steps that carry out a pass of one request, and how many rows each computes."""
    begin, n = 0, len(one.order)
    for rows in cut(n, tuple(n for n, block, _ in grid.rows if block > 1)):
        step = empty_step(grid.shape(rows), grid.entries[0], page)
        take = min(rows, n - begin)
        _put_rows(step, slice(0, take), 0, one, slice(begin, begin + take), tokens)
        put_table(step, 0, 0, table, 0, len(table))
        yield step, take
        begin += take


def decode_step(grid: Grid, parts: Sequence[tuple[Pass, PageTable, Int]], page: int) -> Step:
    """One step of a row for each of several requests."""
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
        """Random weights and an empty pool."""
        return make_runner(self.config, self.setting, self.devices)

    def prefill(self, one: Pass, tokens: Int | None = None) -> NDArray[np.float32]:
        """Logits behind the last row of a pass, [1, V]."""
        outcome, last = self._run(one, tokens)
        return self.runner.logits(outcome, [last])

    def _run(self, one: Pass, tokens: Int | None = None) -> tuple[StepResult, int]:
        """What the last step of a pass made, and which of its rows is the last."""
        ids = self.tokens(len(one.order), 0) if tokens is None else tokens
        table = PageTable(one.spans, self.setting.page)
        for step, taken in prefill_steps(self.runner.grid, one, table, ids, self.setting.page):
            outcome, last = self.runner.step(step), taken - 1
        return outcome, last

    def tokens(self, n: int, seed: int) -> Int:
        """Random token ids."""
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
        """Tokens a second, greedy, of requests side by side."""
        tails = [layout.table(own) for layout, own in zip(layouts, spans, strict=True)]
        chosen = [np.zeros(1, np.int32) for _ in layouts]
        for i in range(self.setting.decoded + 1):
            if i == 1:  # the first one compiles
                began = time.perf_counter()
            outcome = self._decode_step(layouts, tails, chosen, i)
            chosen = [np.array([token], np.int32) for token in self._likeliest(outcome, range(len(layouts)))]
        return self.setting.decoded * len(layouts) / (time.perf_counter() - began)

    def next_tokens(
        self, layouts: Sequence[Layout], tails: Sequence[tuple[PageTable, Int]], chosen: Sequence[Int], i: int
    ) -> NDArray[np.float32]:
        """Logits behind the generated token i of each request."""
        return self.runner.logits(self._decode_step(layouts, tails, chosen, i), range(len(layouts)))

    def _decode_step(
        self, layouts: Sequence[Layout], tails: Sequence[tuple[PageTable, Int]], chosen: Sequence[Int], i: int
    ) -> StepResult:
        """Compute the generated token i of each request."""
        parts = []
        for layout, (table, slots), token in zip(layouts, tails, chosen, strict=True):
            order = np.array([layout.context + i], np.int32)
            table.show(i, int(order[0]))
            parts.append((Pass(order, order, slots[i : i + 1], ()), table, token))
        return self.runner.step(decode_step(self.runner.grid, parts, self.setting.page))
