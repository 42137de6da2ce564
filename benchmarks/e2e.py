"""Time to the first token and decode speed of real model sizes with random weights, beside transformers' generate.

    python -m benchmarks.e2e [--quick] [--platform cpu] [--seconds N] [--json FILE | --out DIR]

Llama-3-8B and Qwen2.5-7B, bfloat16, contexts of 4K to 32K tokens: a system prompt, chunks of 512 tokens, a question of
32. `full`: everything is computed. `naive`: chunks that were computed behind the system prompt alone are read where
they lie, at their new positions, and the question is computed; `cold` includes the chunks. `recompute-15`: chunks as in
`naive`, and 15% of the context is computed anew beside the question. The runner is driven without engine and
scheduler; times run from the host's arrays to the logits on the host. Decoding is greedy, one host round trip a token.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks import gpu, report
from ragjax.core import NEVER, Grid, Run, Span, Step
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, Weight
from ragjax.runner.runner import Runner
from ragjax.schedule.table import PageTable

Int = NDArray[np.int32]

COLUMNS: tuple[str, ...] = ("model", "system", "strategy", "state", "context_tokens", "attention", "batch", "ttft_ms")
COLUMNS += ("floor_ms", "decode_tokens_per_s", "ttft_ratio_transformers", "ttft_ratio_full")
COLUMNS += ("decode_ratio_transformers", "failed")
WORKER = "torch_generate_worker.py"
MEMORY_SHARE = 0.55  # of the GPU for this process: weights twice while they are stacked, and the pool
PATIENCE_S = 150.0
PAGE = 64
CHUNK, QUESTION, SHARE = 512, 32, 0.15
DECODED = 32


# --------------------------------------------------------------------------------------------- models


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
    """What is run. rows: buckets; entries: of every step, and pages of the pool."""

    models: Mapping[str, ModelConfig]
    contexts: tuple[int, ...]
    chunk: int
    question: int
    page: int
    dtype: str
    rows: tuple[int, ...]
    entries: int
    batch_context: int
    runs: int
    decoded: int

    def grid(self, config: ModelConfig) -> Grid:
        """Row buckets that fit the passes measured here; one entry bucket, to compile few programs."""
        # with its padded group a block fills the 128 rows of a kernel
        block = 128 // (1 << (config.num_groups - 1).bit_length())
        return Grid(rows=((8, 1), *((n, block) for n in self.rows)), entries=(self.entries,), logits=(8,))


FULL = Setting(
    models={"llama-3-8b": LLAMA, "qwen2.5-7b": QWEN},
    contexts=(32768, 16384, 27648, 8192, 4096),
    chunk=CHUNK,
    question=QUESTION,
    page=PAGE,
    dtype="bfloat16",
    rows=(64, 1280, 2560, 4096, 5120),
    entries=640,
    batch_context=4096,
    runs=3,
    decoded=DECODED,
)
REHEARSAL = Setting(
    models={"tiny": TINY},
    contexts=(128,),
    chunk=32,
    question=8,
    page=16,
    dtype="float32",
    rows=(32, 64),
    entries=24,
    batch_context=32,
    runs=1,
    decoded=4,
)


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


def make_runner(config: ModelConfig, setting: Setting) -> Runner:
    """A runner with random weights and a pool for one prompt at a time."""
    context = max(setting.contexts) + 2 * setting.page
    runner = Runner(
        random_decoder(config, setting.dtype),
        pages=setting.entries + 1,
        page_size=setting.page,
        context=context,
        grid=setting.grid(config),
    )
    gc.collect()  # the runner stacked the weights; the decoder's own go
    return runner


# -------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Pass:
    """Rows to compute over spans of keys, for one request; slot: where each row's KV goes."""

    order: Int
    position: Int
    slot: Int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Layout:
    """A prompt of system, chunks and question on pages of its own, and the passes over it.

    tail: slots behind the question, for decoding. fresh: pages for what is computed anew.
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
        """First token of the system prompt and of each chunk, and the join."""
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
        """Plain causal attention over everything."""
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
        """Keys of the chunks at their places in the prompt."""
        system, spans = self.starts[1], []
        for begin, run in zip(self.starts, self.runs[:-1], strict=False):
            order = indices(begin, begin + run.length)
            if stale is not None:
                order = np.where(np.isin(order, stale), NEVER, order)
            spans.append(Span(order, run, 0 if begin == 0 else begin - system))
        return spans

    def naive(self) -> Pass:
        """The question over cached chunks."""
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

    def table(self, spans: Sequence[Span]) -> tuple[PageTable, Int]:
        """Entries of the prompt's spans and of a tail for generated tokens, not shown yet; and the tail's slots."""
        tail = self.runs[-1].slice(self.question, self.runs[-1].length, self.page)
        hidden = Span(np.full(tail.length, NEVER, np.int32), tail)
        return PageTable([*spans, hidden], self.page), tail.slots(self.page)


def indices(begin: int, end: int) -> Int:
    """Consecutive orders."""
    return np.arange(begin, end, dtype=np.int32)


def cut(n: int, buckets: tuple[int, ...]) -> list[int]:
    """Buckets that together hold n rows, with the fewest rows of padding; each step counts as 64 rows more."""

    @cache
    def best(left: int) -> tuple[int, tuple[int, ...]]:
        whole = min((b for b in buckets if b >= left), default=None)
        found = [] if whole is None else [(whole + 64, (whole,))]
        for b in buckets:
            if left / 8 <= b < left or (whole is None and b == buckets[-1]):
                cost, rest = best(left - b)
                found.append((b + 64 + cost, (b, *rest)))
        return min(found)

    return list(best(n)[1])


def prefill_steps(grid: Grid, one: Pass, table: PageTable, tokens: Int, page: int) -> Iterator[tuple[Step, int]]:
    """Steps that carry out a pass of one request, and how many rows each computes."""
    begin, n = 0, len(one.order)
    for rows in cut(n, tuple(n for n, block in grid.rows if block > 1)):
        step = empty_step(rows, grid.entries[0], page)
        take = min(rows, n - begin)
        _put_rows(step, slice(0, take), 0, one, slice(begin, begin + take), tokens)
        _put_entries(step, 0, 0, table)
        yield step, take
        begin += take


def decode_step(grid: Grid, parts: Sequence[tuple[Pass, PageTable, Int]], page: int) -> Step:
    """One step of a row for each of several requests."""
    step = empty_step(grid.rows[0][0], grid.entries[0], page)
    entry = 0
    for number, (one, table, tokens) in enumerate(parts):
        _put_rows(step, slice(number, number + 1), number, one, slice(0, 1), tokens)
        _put_entries(step, entry, number, table)
        entry += len(table)
    return step


def _put_rows(step: Step, at: slice, request: int, one: Pass, part: slice, tokens: Int) -> None:
    step.token_T[at], step.index_T[at], step.position_T[at] = tokens[part], one.order[part], one.position[part]
    step.request_T[at], step.slot_T[at] = request, one.slot[part]


def _put_entries(step: Step, entry: int, request: int, table: PageTable) -> None:
    here = slice(entry, entry + len(table))
    step.page_S[here], step.offset_S[here], step.request_S[here] = table.page_S, table.offset_S, request
    step.index_SC[here] = table.index_SC
    step.hide_from_SC[here], step.hide_until_SC[here] = table.hide_from_SC, table.hide_until_SC


def empty_step(rows: int, entries: int, page: int) -> Step:
    """A step of padding."""
    return Step(
        token_T=np.zeros(rows, np.int32), index_T=np.full(rows, -1, np.int32), position_T=np.zeros(rows, np.int32),
        request_T=np.full(rows, -1, np.int32), slot_T=np.zeros(rows, np.int32), page_S=np.zeros(entries, np.int32),
        offset_S=np.zeros(entries, np.int32), request_S=np.full(entries, -1, np.int32),
        index_SC=np.full((entries, page), NEVER, np.int32), hide_from_SC=np.zeros((entries, page), np.int32),
        hide_until_SC=np.zeros((entries, page), np.int32),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- measuring


@dataclass
class Ours:
    """Our runner under test, made when it is first needed."""

    config: ModelConfig
    setting: Setting

    @cached_property
    def runner(self) -> Runner:
        """Random weights and an empty pool."""
        return make_runner(self.config, self.setting)

    def prefill(self, one: Pass, tokens: Int | None = None) -> NDArray[np.float32]:
        """Logits behind the last row of a pass, [1, V]."""
        ids = self.tokens(len(one.order), 0) if tokens is None else tokens
        table = PageTable(one.spans, self.setting.page)
        for step, taken in prefill_steps(self.runner.grid, one, table, ids, self.setting.page):
            outcome, last = self.runner.step(step), taken - 1
        return self.runner.logits(outcome, [last])

    def tokens(self, n: int, seed: int) -> Int:
        """Random token ids."""
        return np.random.default_rng(seed).integers(3, self.config.vocab_size, n).astype(np.int32)

    def first_token(self, work: Sequence[Pass], runs: int) -> dict[str, Any]:
        """Median milliseconds of passes carried out one after the other; the first time compiles."""
        began = time.perf_counter()
        logits = self._all(work)
        first_s = time.perf_counter() - began
        if not np.isfinite(logits).all():
            raise ArithmeticError("wrong result: logits are not finite")
        before, found = Counter(self.runner.calls), []
        for _ in range(runs):
            began = time.perf_counter()
            again = self._all(work)
            found.append((time.perf_counter() - began) * 1e3)
        if again.argmax() != logits.argmax():
            raise ArithmeticError("wrong result: the same pass gave another token")
        used = " ".join(sorted(self.runner.calls - before))
        return {"ttft_ms": report.median(found), "ttft_ms_runs": found, "first_s": first_s, "attention": used}

    def _all(self, work: Sequence[Pass]) -> NDArray[np.float32]:
        for one in work:
            logits = self.prefill(one)
        return logits

    def decode(self, layouts: Sequence[Layout], spans: Sequence[Sequence[Span]]) -> float:
        """Tokens a second, greedy, of requests side by side."""
        tails = [layout.table(own) for layout, own in zip(layouts, spans, strict=True)]
        chosen = [np.zeros(1, np.int32) for _ in layouts]
        for i in range(self.setting.decoded + 1):
            if i == 1:  # the first one compiles
                began = time.perf_counter()
            logits = self.next_tokens(layouts, tails, chosen, i)
            chosen = [np.array([row.argmax()], np.int32) for row in logits]
        return self.setting.decoded * len(layouts) / (time.perf_counter() - began)

    def next_tokens(
        self, layouts: Sequence[Layout], tails: Sequence[tuple[PageTable, Int]], chosen: Sequence[Int], i: int
    ) -> NDArray[np.float32]:
        """Logits behind the generated token i of each request."""
        parts = []
        for layout, (table, slots), token in zip(layouts, tails, chosen, strict=True):
            order = np.array([layout.context + i], np.int32)
            table.show(i, int(order[0]))
            parts.append((Pass(order, order, slots[i : i + 1], ()), table, token))
        outcome = self.runner.step(decode_step(self.runner.grid, parts, self.setting.page))
        return self.runner.logits(outcome, range(len(parts)))


def floor_ms(config: ModelConfig, one: Sequence[Pass], limits: gpu.Ceilings) -> float:
    """Least milliseconds for these rows at the speed of the best product, attention to what they see included."""
    per_layer = config.hidden_size * (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_layer += 3 * config.hidden_size * config.intermediate_size
    rows = sum(len(p.order) for p in one)
    operations = 2 * rows * per_layer * config.num_layers
    operations += 4 * sum(map(visible_pairs, one)) * config.num_heads * config.head_dim * config.num_layers
    return operations / limits.product_tflops / 1e9


def visible_pairs(one: Pass) -> int:
    """Pairs of a row and a key that it sees."""
    total = 0
    for span in one.spans:
        low, high = span.hidden
        rows = one.order[(one.order < low) | (one.order >= high)]
        total += int(np.searchsorted(np.sort(span.indices), rows, side="right").sum())
    return total


def measure_ours(record: gpu.Record, name: str, setting: Setting, limits: gpu.Ceilings) -> None:
    """All rows of one model."""
    config = setting.models[name]
    ours = Ours(config, setting)
    for context in setting.contexts:
        key = f"{name}/ours/{context}"
        layout = Layout(context, setting.chunk, setting.question, setting.page)
        whole, cold, warm, some = layout.full(), layout.chunks(), layout.naive(), layout.recompute(SHARE)

        def row(strategy: str, state: str, work: Sequence[Pass], context: int = context, key: str = key) -> None:
            known = _known(name, "ragjax", strategy, state, context) | {"floor_ms": floor_ms(config, work, limits)}
            record.row(f"{key}/{strategy}-{state}", known, partial(ours.first_token, work, setting.runs))

        row("full", "cold", [whole])
        known = _known(name, "ragjax", "full", "decode", context)
        record.row(f"{key}/decode", known, partial(_decode, ours, [layout], [whole.spans]))
        row("naive", "cold", [cold, warm])
        row("naive", "warm", [warm])
        row(f"recompute-{round(100 * SHARE)}", "warm", [some])
    apart = [
        Layout(setting.batch_context, setting.chunk, setting.question, setting.page, first)
        for first in _first_pages(setting)
    ]
    known = _known(name, "ragjax", "full", "decode", setting.batch_context, len(apart))
    record.row(f"{name}/ours/decode-batch", known, partial(_decode, ours, apart, [a.full().spans for a in apart]))


def _first_pages(setting: Setting) -> list[int]:
    each = Layout(setting.batch_context, setting.chunk, setting.question, setting.page).pages
    # the question's last page and the tail's first are one page in two entries
    return [1 + i * each for i in range(min(8, setting.entries // (each + 1)))]


def _decode(ours: Ours, layouts: Sequence[Layout], spans: Sequence[Sequence[Span]]) -> dict[str, Any]:
    for layout in layouts:
        ours.prefill(layout.full())
    before = Counter(ours.runner.calls)
    rate = ours.decode(layouts, spans)
    return {"decode_tokens_per_s": rate, "attention": " ".join(sorted(ours.runner.calls - before))}


def _known(name: str, system: str, strategy: str, state: str, context: int, batch: int = 1) -> dict[str, Any]:
    return {
        "model": name, "system": system, "strategy": strategy, "state": state, "context_tokens": context,
        "batch": batch, "ttft_ms": None, "decode_tokens_per_s": None,
    }  # fmt: skip


def measure_theirs(record: gpu.Record, name: str, setting: Setting, rival: gpu.Rival) -> None:
    """Transformers with random weights of the same shapes."""
    config, device = setting.models[name], "cuda" if jax.devices()[0].platform == "gpu" else "cpu"
    wanted = [(context, 1) for context in setting.contexts]
    wanted.append((setting.batch_context, len(_first_pages(setting))))
    loaded = False

    def ask(context: int, batch: int) -> dict[str, Any]:
        nonlocal loaded
        patience = min(PATIENCE_S, max(record.clock.left, 0) + 30)
        if not loaded:
            shapes = {"family": config.family, "config": hf_config(config), "device": device, "dtype": setting.dtype}
            rival.ask({"op": "load", **shapes}, patience)
            loaded = True
        request = {"context": context, "batch": batch, "new": setting.decoded + 1, "runs": setting.runs}
        return rival.ask({"op": "generate", **request}, patience)

    for context, batch in wanted:
        known = _known(name, "transformers", "full", "cold", context, batch)
        record.row(f"{name}/transformers/{context}x{batch}", known, partial(ask, context, batch))


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The shapes under transformers' names."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.context_length, "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- main


def with_ratios(rows: Sequence[report.Row]) -> list[report.Row]:
    """Our rows beside transformers' and beside our own `full`, at equal length and batch."""

    def find(row: report.Row, system: str, state: str) -> report.Row:
        for r in rows:
            same = (r["model"], r["context_tokens"], r["batch"]) == (row["model"], row["context_tokens"], row["batch"])
            if same and (r["system"], r["strategy"], r["state"]) == (system, "full", state):
                return r
        return {}

    out = []
    for row in rows:
        more: dict[str, float] = {}
        theirs, own = find(row, "transformers", "cold"), find(row, "ragjax", "cold")
        if row["system"] == "ragjax" and row.get("ttft_ms"):
            more |= {f"ttft_ratio_{n}": r["ttft_ms"] / row["ttft_ms"]
                     for n, r in (("transformers", theirs), ("full", own)) if r.get("ttft_ms")}  # fmt: skip
        if row["system"] == "ragjax" and row.get("decode_tokens_per_s") and theirs.get("decode_tokens_per_s"):
            more["decode_ratio_transformers"] = row["decode_tokens_per_s"] / theirs["decode_tokens_per_s"]
        out.append({**row, **more})
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = gpu.options("e2e", (__doc__ or "").partition("\n")[0], arguments)
    clock = gpu.Clock(chosen.seconds)
    gpu.choose_platform(chosen, MEMORY_SHARE)
    limits = gpu.ceilings(chosen.quick)
    record = gpu.Record(chosen, gpu.header(chosen, limits, arguments), clock)
    setting = REHEARSAL if chosen.quick else FULL
    rival = gpu.Rival(WORKER)
    try:
        for name in setting.models:
            measure_ours(record, name, setting, limits)
            gc.collect()  # the runner's weights and pool go before the next model's come
            measure_theirs(record, name, setting, rival)
    except KeyboardInterrupt:
        print("stopped: what was measured so far follows", file=sys.stderr)
        record.skipped.append("what was left when it was stopped")
    finally:
        rival.close()
    record.rows = dict(zip(record.rows, with_ratios(list(record.rows.values())), strict=True))
    print("\nmedians:\n" + report.table(list(record.rows.values()), COLUMNS))
    record.finish()
    return 1 if record.failed else 0


if __name__ == "__main__":
    sys.exit(main())
