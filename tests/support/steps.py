"""Steps of a small runner, written by hand: parts of requests, their slots and spans, and the logits of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ragjax.core import NEVER, Grid, Measure, Run, Span, Step, StepMeasure
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder
from ragjax.runner.runner import Runner
from ragjax.store.device import Excerpt
from tests.support.forward import dense_logits
from tests.support.tiny import COMPILED

PAGE = 8
CONFIG = ModelConfig(
    family="qwen3", vocab_size=53, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=8, num_kv_heads=4,
    head_dim=8, rope_theta=1000.0, rope_scaling=None, norm_eps=1e-6, tie_embeddings=False, qkv_bias=False,
    qk_norm=True, context_length=256, eos_ids=(1,), bos_id=0,
)  # fmt: skip


GRID = Grid(rows=((2, 2), (4, 1, 0, True), (12, 8, 4, True), (24, 8)), entries=(16,), logits=(2, 4))


def make_decoder(config: ModelConfig = CONFIG, dtype: str = "float32") -> Decoder:
    """Random weights, scaled up so that attention is far from uniform."""
    decoder = Decoder(config, jnp.dtype(dtype), rngs=nnx.Rngs(0))
    for layer in decoder.layers:
        layer.qkv.set_value(layer.qkv[...] * 2)
    return decoder


def make_runner(config: ModelConfig = CONFIG, dtype: str = "float32", *, pages: int = 40, **options: object) -> Runner:
    options = {"page_size": PAGE, "grid": GRID, "executables": COMPILED} | options
    return Runner(make_decoder(config, dtype), pages=pages, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Part:
    """One request's share of a step: the token indices to compute, their tokens and positions, and its keys."""

    tokens: np.ndarray
    indices: np.ndarray
    spans: tuple[Span, ...]
    positions: np.ndarray | None = None


def run_of(first_page: int, length: int, start: int = 0) -> Run:
    """Slots on pages that run backwards, so that no page follows the one before it."""
    pages = tuple(first_page + i for i in reversed(range((start + length - 1) // PAGE + 1)))
    return Run(pages, start, length)


def step_of(parts: Sequence[Part], rows: int, *, entries: int = 16, grid: Grid = GRID, score: int = 0) -> Step:
    """Arrays of one step; requests take whole row blocks, in turn. score: how many layers measure it, first ones.

    Of a mixed shape, parts of one row come first.
    """
    shape = grid.shape(rows)
    t = {n: np.zeros(rows, np.int32) for n in ("token", "position", "request", "slot")} | {"index": -np.ones(rows, int)}
    s = {"page": np.zeros(entries), "offset": np.zeros(entries), "request": -np.ones(entries)}
    c = {n: np.zeros((entries, PAGE), np.int64) for n in ("hide_from", "hide_until")}
    c["index"] = np.full((entries, PAGE), NEVER)
    row, entry = 0, 0
    for request, part in enumerate(parts):
        if len(part.indices) > 1 or row >= shape.single:
            row = max(row, shape.single)
        here = slice(row, row + len(part.indices))
        row += len(part.indices) if row < shape.single else -(-len(part.indices) // shape.block) * shape.block
        slot_of = {
            int(o): int(slot)
            for span in part.spans
            if span.offset == 0
            for o, slot in zip(span.indices, span.run.slots(PAGE), strict=True)
        }
        t["token"][here], t["index"][here], t["request"][here] = part.tokens, part.indices, request
        t["position"][here] = part.indices if part.positions is None else part.positions
        t["slot"][here] = [slot_of[int(o)] for o in part.indices]
        for span in part.spans:
            slots = span.run.slots(PAGE)
            for page in dict.fromkeys(slots // PAGE):
                on = slots // PAGE == page
                s["page"][entry], s["offset"][entry], s["request"][entry] = page, span.offset, request
                c["index"][entry, slots[on] % PAGE] = span.indices[on]
                c["hide_from"][entry, slots[on] % PAGE], c["hide_until"][entry, slots[on] % PAGE] = span.hidden
                entry += 1
    assert row <= rows
    named = (
        {f"{n}_T": x for n, x in t.items()} | {f"{n}_S": x for n, x in s.items()} | {f"{n}_SC": x for n, x in c.items()}
    )
    named["sharer_O"] = np.full(shape.sharing[0], -1)
    measure = StepMeasure(Measure.KEY_SCORE, (0, score), {"asking_T": np.ones(rows, np.int32)}) if score else None
    return Step(**{name: x.astype(np.int32) for name, x in named.items()}, measure=measure)


def rows_of(step: Step, request: int) -> np.ndarray:
    return np.flatnonzero((step.request_T == request) & (step.index_T >= 0))


def compute(runner: Runner, parts: Sequence[Part], rows: int) -> list[np.ndarray]:
    """Logits of every row, per request."""
    step = step_of(parts, rows, grid=runner.grid)
    outcome = runner.step(step)
    assert outcome.measured is None
    return [runner.logits(outcome, rows_of(step, r)) for r in range(len(parts))]


def tokens_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, n).astype(np.int32)


def dense(tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    return np.asarray(dense_logits(make_decoder(dtype=dtype), jnp.asarray(tokens)))


def whole(tokens: np.ndarray, first_page: int, start: int = 0) -> Part:
    """All rows of a causal prompt at once."""
    run = run_of(first_page, len(tokens), start)
    return Part(tokens, np.arange(len(tokens)), (Span.consecutive(0, run),))


def piece(part: Part, begin: int, end: int) -> Part:
    """Rows [begin, end) of a prompt, over the keys up to them."""
    span = part.spans[0]
    upto = Span.consecutive(0, span.run.slice(0, end, PAGE))
    return replace(part, tokens=part.tokens[begin:end], indices=part.indices[begin:end], spans=(upto,))


def assert_near(got: np.ndarray, what: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == what.shape
    assert np.abs(got - what).max() <= tolerance * np.abs(what).max()


def joined(excerpts: list[Excerpt]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [L, P, K, C, D] of all stages and parts."""

    def join(name: str) -> np.ndarray:
        return np.concatenate([np.concatenate([getattr(s, name) for s in stages]) for stages in excerpts], axis=1)

    return join("k_LPKCD"), join("v_LPKCD")


def out(made: Runner, pages: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    return joined(made.extract(np.asarray(pages, np.int32)))
