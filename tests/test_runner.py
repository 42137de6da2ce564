"""`Runner`: steps over pages against the decoder's plain forward, batched, in chunks, sharded; and its memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ragjax.runner
from ragjax.core import NEVER, Grid, Run, Span, Step
from ragjax.kernels import attention, attention_triton
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder
from ragjax.runner import Runner
from tests.devices import assert_agreement

PAGE = 8
CONFIG = ModelConfig(
    family="qwen3", vocab_size=53, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=8, num_kv_heads=4,
    head_dim=8, rope_theta=1000.0, rope_scaling=None, norm_eps=1e-6, tie_embeddings=False, qkv_bias=False,
    qk_norm=True, context_length=256, eos_ids=(1,), bos_id=0,
)  # fmt: skip
GRID = Grid(rows=((2, 2), (4, 1), (24, 8)), slots=(16,), logits=(2, 4))


def make_decoder(config: ModelConfig = CONFIG, dtype: str = "float32") -> Decoder:
    """Random weights, scaled up so that attention is far from uniform."""
    decoder = Decoder(config, jnp.dtype(dtype), rngs=nnx.Rngs(0))
    for layer in decoder.layers:
        layer.qkv.set_value(layer.qkv[...] * 2)
    return decoder


def make_runner(config: ModelConfig = CONFIG, dtype: str = "float32", *, pages: int = 40, **options: object) -> Runner:
    options = {"page_size": PAGE, "grid": GRID} | options
    return Runner(make_decoder(config, dtype), pages=pages, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return make_runner()


# ------------------------------------------------------------------------------------------ steps by hand


@dataclass(frozen=True)
class Part:
    """One request's share of a step: the orders to compute, their tokens and positions, and its keys."""

    tokens: np.ndarray
    orders: np.ndarray
    spans: tuple[Span, ...]
    positions: np.ndarray | None = None


def run_of(first_page: int, length: int, start: int = 0) -> Run:
    """Cells on pages that run backwards, so that no page follows the one before it."""
    pages = tuple(first_page + i for i in reversed(range((start + length - 1) // PAGE + 1)))
    return Run(pages, start, length)


def step_of(parts: Sequence[Part], rows: int, *, slots: int = 16, grid: Grid = GRID, mass: bool = False) -> Step:
    """Arrays of one step; requests take whole row blocks, in turn."""
    block = dict(grid.rows)[rows]
    t = {n: np.zeros(rows, np.int32) for n in ("token", "position", "request", "cell")} | {"order": -np.ones(rows, int)}
    s = {"page": np.zeros(slots), "offset": np.zeros(slots), "request": -np.ones(slots)}
    c = {n: np.zeros((slots, PAGE), np.int64) for n in ("hide_from", "hide_until")}
    c["order"] = np.full((slots, PAGE), NEVER)
    row, slot = 0, 0
    for request, part in enumerate(parts):
        here = slice(row, row + len(part.orders))
        row += -(-len(part.orders) // block) * block
        cell_of = {
            int(o): int(cell)
            for span in part.spans
            if span.offset == 0
            for o, cell in zip(span.orders, span.run.cells(PAGE), strict=True)
        }
        t["token"][here], t["order"][here], t["request"][here] = part.tokens, part.orders, request
        t["position"][here] = part.orders if part.positions is None else part.positions
        t["cell"][here] = [cell_of[int(o)] for o in part.orders]
        for span in part.spans:
            cells = span.run.cells(PAGE)
            for page in dict.fromkeys(cells // PAGE):
                on = cells // PAGE == page
                s["page"][slot], s["offset"][slot], s["request"][slot] = page, span.offset, request
                c["order"][slot, cells[on] % PAGE] = span.orders[on]
                c["hide_from"][slot, cells[on] % PAGE], c["hide_until"][slot, cells[on] % PAGE] = span.hidden
                slot += 1
    assert row <= rows
    named = (
        {f"{n}_T": x for n, x in t.items()} | {f"{n}_S": x for n, x in s.items()} | {f"{n}_SC": x for n, x in c.items()}
    )
    return Step(**{name: x.astype(np.int32) for name, x in named.items()}, mass=mass)


def rows_of(step: Step, request: int) -> np.ndarray:
    return np.flatnonzero((step.request_T == request) & (step.order_T >= 0))


def compute(runner: Runner, parts: Sequence[Part], rows: int) -> list[np.ndarray]:
    """Logits of every row, per request."""
    step = step_of(parts, rows, grid=runner.grid)
    outcome = runner.step(step)
    assert outcome.mass_LSC is None
    return [runner.logits(outcome, rows_of(step, r)) for r in range(len(parts))]


def tokens_of(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, n).astype(np.int32)


def dense(tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    return np.asarray(jax.jit(make_decoder(dtype=dtype).logits)(jnp.asarray(tokens)))


def whole(tokens: np.ndarray, first_page: int, start: int = 0) -> Part:
    """All rows of a causal prompt at once."""
    run = run_of(first_page, len(tokens), start)
    return Part(tokens, np.arange(len(tokens)), (Span.consecutive(0, run),))


def piece(part: Part, begin: int, end: int) -> Part:
    """Rows [begin, end) of a prompt, over the keys up to them."""
    span = part.spans[0]
    upto = Span.consecutive(0, span.run.slice(0, end, PAGE))
    return replace(part, tokens=part.tokens[begin:end], orders=part.orders[begin:end], spans=(upto,))


def assert_near(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


# ------------------------------------------------------------------------------------------ equals dense


def test_one_prefill_equals_the_plain_forward(runner: Runner) -> None:
    tokens = tokens_of(0, 21)
    (got,) = compute(runner, [whole(tokens, 3, start=5)], 24)
    assert_near(got, dense(tokens))


def test_prefill_in_chunks_of_any_bucket(runner: Runner) -> None:
    tokens = tokens_of(1, 40)
    part = whole(tokens, 5, start=3)
    got = []
    for begin, end, rows in ((0, 24, 24), (24, 26, 2), (26, 27, 4), (27, 40, 24)):
        (logits,) = compute(runner, [piece(part, begin, end)], rows)
        got.append(logits)
    assert_near(np.concatenate(got), dense(tokens))


@pytest.mark.parametrize("rows", [2, 4])
def test_decode_row_by_row(runner: Runner, rows: int) -> None:
    tokens = tokens_of(2, 14)
    part = whole(tokens, 5, start=7)
    got = [compute(runner, [piece(part, i, i + 1)], rows)[0] for i in range(len(tokens))]
    assert_near(np.concatenate(got), dense(tokens))


def test_requests_side_by_side(runner: Runner) -> None:
    """Three prefills in one step, then one decode row of each."""
    prompts = [tokens_of(3, 8), tokens_of(4, 5), tokens_of(5, 3)]
    parts = [whole(t, 1 + 6 * i, start=i) for i, t in enumerate(prompts)]
    last = [piece(part, len(part.tokens) - 1, len(part.tokens)) for part in parts]
    first = [piece(part, 0, len(part.tokens) - 1) for part in parts]
    for got, tokens in zip(compute(runner, first, 24), prompts, strict=True):
        assert_near(got, dense(tokens)[:-1])
    for got, tokens in zip(compute(runner, last, 4), prompts, strict=True):
        assert_near(got, dense(tokens)[-1:])


def test_bfloat16_is_near(runner: Runner) -> None:
    narrow = make_runner(dtype="bfloat16")
    tokens = tokens_of(0, 21)
    (got,) = compute(narrow, [whole(tokens, 3)], 24)
    assert_near(got, dense(tokens, "bfloat16"), 5e-2)


def test_scanned_equals_unrolled(runner: Runner) -> None:
    scanned = make_runner(scanned=True)
    prompts = [tokens_of(3, 8), tokens_of(4, 5)]
    parts = [whole(t, 1 + 6 * i) for i, t in enumerate(prompts)]
    for one, other in zip(compute(runner, parts, 24), compute(scanned, parts, 24), strict=True):
        assert_near(one, other, 2e-6)


def test_several_stages_equal_one(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragjax.runner, "STAGE_LAYERS", 3)  # of 4 layers: two stages of two
    staged = make_runner()
    assert len(staged._pools) == 2
    tokens = tokens_of(6, 20)
    parts = [whole(tokens, 4)]
    assert_near(compute(staged, parts, 24)[0], compute(runner, parts, 24)[0], 2e-6)
    cells = parts[0].spans[0].run.cells(PAGE)
    for one, other in zip(staged.read(cells), runner.read(cells), strict=True):
        assert one.shape == (4, 20, 4, 8)
        np.testing.assert_allclose(one, other, atol=1e-5)


# ------------------------------------------------------------------------------------- spans and visibility


def test_cached_keys_take_part_at_any_offset(runner: Runner) -> None:
    """Keys made at positions 0.. are read at 100..; RoPE being relative, the logits are those of the prompt."""
    tokens = tokens_of(7, 18)
    want = dense(tokens)
    compute(runner, [piece(whole(tokens, 2), 0, 11)], 24)
    prefix = Span.consecutive(0, whole(tokens, 2).spans[0].run.slice(0, 11, PAGE), offset=100)
    own = Span.consecutive(11, run_of(20, 7, start=2))
    moved = Part(tokens[11:], np.arange(11, 18), (own, prefix), np.arange(111, 118))
    assert_near(compute(runner, [moved], 24)[0], want[11:])
    # and a wrong offset shows
    wrong = replace(moved, spans=(own, replace(prefix, offset=99)))
    assert np.abs(compute(runner, [wrong], 24)[0] - want[11:]).max() > 1e-2 * np.abs(want).max()


def test_one_page_serves_two_requests_at_two_offsets(runner: Runner) -> None:
    shared, ends = tokens_of(8, 10), [tokens_of(9, 5), tokens_of(10, 4)]
    compute(runner, [whole(shared, 2, start=3)], 24)
    run = whole(shared, 2, start=3).spans[0].run
    parts = []
    for i, (end, offset) in enumerate(zip(ends, (0, 50), strict=True)):
        spans = Span.consecutive(10, run_of(10 + 5 * i, len(end))), Span.consecutive(0, run, offset=offset)
        orders = np.arange(10, 10 + len(end))
        parts.append(Part(end, orders, spans, orders + offset))
    for got, end in zip(compute(runner, parts, 24), ends, strict=True):
        assert_near(got, dense(np.concatenate([shared, end]))[10:])


def test_isolated_chunk_is_computed_as_if_alone(runner: Runner) -> None:
    """System, chunk A, chunk B: B's logits are those of system and B, placed side by side."""
    system, a, b = tokens_of(11, 6), tokens_of(12, 7), tokens_of(13, 8)
    tokens = np.concatenate([system, a, b])
    run = run_of(3, 21, start=2)
    spans = (
        Span.consecutive(0, run.slice(0, 6, PAGE)),
        Span.consecutive(6, run.slice(6, 13, PAGE), hidden=(13, 21)),
        Span.consecutive(13, run.slice(13, 21, PAGE)),
    )
    positions = np.concatenate([np.arange(13), np.arange(6, 14)])
    (got,) = compute(runner, [Part(tokens, np.arange(21), spans, positions)], 24)
    assert_near(got[:13], dense(tokens[:13]))
    assert_near(got[13:], dense(np.concatenate([system, b]))[6:])


def test_stale_tokens_take_no_part(runner: Runner) -> None:
    tokens = tokens_of(14, 15)
    compute(runner, [whole(np.roll(tokens, 1), 2)], 24)  # a cache of other tokens, of which nothing may remain
    old = Span(np.full(15, NEVER, np.int32), whole(tokens, 2).spans[0].run)
    new = replace(whole(tokens, 20), spans=(old, *whole(tokens, 20).spans))
    assert_near(compute(runner, [new], 24)[0], dense(tokens))


@pytest.mark.parametrize("rows", [4, 24])
def test_requests_of_a_batch_cannot_see_each_other(runner: Runner, rows: int) -> None:
    """Whatever the neighbour's tokens, orders, positions and visibility are, not one bit changes."""
    own = tokens_of(15, 9)
    compute(runner, [piece(whole(own, 2), 0, 8)], 24)
    mine = piece(whole(own, 2), 8, 9)
    results = []
    for seed, extra in ((16, 0), (17, 30)):
        other = tokens_of(seed, 8)
        compute(runner, [whole(other, 12, start=seed - 16)], 24)
        neighbour = piece(whole(other, 12, start=seed - 16), 7, 8)
        neighbour = replace(neighbour, positions=neighbour.orders + extra)
        results.append(compute(runner, [mine, neighbour], rows))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert np.abs(results[0][1] - results[1][1]).max() > 1e-3
    assert_near(results[0][0], dense(own)[8:])


def test_cells_of_others_are_not_written(runner: Runner) -> None:
    tokens = tokens_of(18, 12)
    compute(runner, [whole(tokens, 2)], 24)
    others = np.setdiff1d(np.arange(PAGE, 40 * PAGE), whole(tokens, 30).spans[0].run.cells(PAGE)).astype(np.int32)
    before = runner.read(others)
    compute(runner, [whole(tokens, 30)], 24)
    for one, other in zip(before, runner.read(others), strict=True):
        np.testing.assert_array_equal(one, other)
    made = [runner.read(whole(tokens, page).spans[0].run.cells(PAGE)) for page in (2, 30)]
    np.testing.assert_allclose(made[0][0], made[1][0], atol=1e-6)
    assert np.abs(made[0][0]).max() > 0.1


# --------------------------------------------------------------------------------------------- key mass


def test_key_mass_adds_up_per_request_and_layer(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragjax.runner, "STAGE_LAYERS", 2)
    parts = [whole(tokens_of(19, 13), 2), whole(tokens_of(20, 6), 9)]
    step = step_of(parts, 24, mass=True)
    for some in (runner, make_runner()):
        outcome = some.step(step)
        assert outcome.mass_LSC is not None
        assert outcome.mass_LSC.shape == (4, 16, PAGE)
        for request, part in enumerate(parts):
            mine = outcome.mass_LSC[:, step.request_S == request].sum((1, 2))
            np.testing.assert_allclose(mine, len(part.orders), rtol=1e-5)
        assert not outcome.mass_LSC[:, step.order_SC == NEVER].any()
        # a row's first key is seen by all rows of its request, its last by one
        first, last = (outcome.mass_LSC[:, (step.order_SC == o) & (step.request_S == 0)[:, None]] for o in (0, 12))
        assert (first > last).all()


def test_measuring_changes_no_result(runner: Runner) -> None:
    parts = [whole(tokens_of(19, 13), 2)]
    plain, measured = (runner.step(step_of(parts, 24, mass=mass)) for mass in (False, True))
    np.testing.assert_allclose(plain.x_TE, measured.x_TE, atol=1e-5)


# ------------------------------------------------------------------------------------------------ programs


def test_compile_compiles_everything() -> None:
    small = Grid(rows=((2, 2), (4, 1)), slots=(4,), logits=(2,))
    made = make_runner(replace(CONFIG, num_layers=2), grid=small)
    names: list[str] = []
    made.compile(mass=True, progress=names.append)
    assert len(names) == len(made.programs(mass=True)) == 2 + 4 + 2
    before = set(made._programs)
    tokens = tokens_of(21, 4)
    for begin, rows in ((0, 2), (2, 2)):
        part = piece(whole(tokens, 2), begin, begin + 2)
        for mass in (False, True):
            outcome = made.step(step_of([part], rows, slots=4, grid=small, mass=mass))
        made.logits(outcome, [0, 1])
    assert set(made._programs) == before


def test_logits_of_more_rows_than_a_bucket_in_any_order(runner: Runner) -> None:
    tokens = tokens_of(22, 20)
    outcome = runner.step(step_of([whole(tokens, 2)], 24))
    order = np.random.default_rng(0).permutation(20)
    assert_near(runner.logits(outcome, order.tolist()), dense(tokens)[order])


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporary_memory_does_not_grow_with_the_pool(dtype: str, scanned: bool) -> None:
    def measure(pages: int) -> tuple[int, int]:
        grid = Grid(rows=((32, 32),), slots=(64,), logits=(2,))
        config = replace(CONFIG, head_dim=16, num_layers=2)
        return make_runner(config, dtype, pages=pages, page_size=64, grid=grid, scanned=scanned).memory(32, 64)

    (small, _), (large, pool) = measure(512), measure(2048)
    assert pool == 2048 * 64 * 2 * 2 * 4 * 16 * (4 if dtype == "float32" else 2)
    assert large < 0.05 * pool
    assert large <= small


@pytest.mark.parametrize("scanned", [False, True])
def test_pool_is_updated_in_place(scanned: bool) -> None:
    made = make_runner(scanned=scanned)
    pool = made._pools[0]
    where = pool.k_LPKCD.unsafe_buffer_pointer(), pool.v_LPKCD.unsafe_buffer_pointer()
    for rows, part in ((24, whole(tokens_of(0, 9), 2)), (2, piece(whole(tokens_of(0, 10), 2), 9, 10))):
        jax.block_until_ready(made.step(step_of([part], rows)).x_TE)
        new = made._pools[0]
        assert pool.k_LPKCD.is_deleted()
        assert (new.k_LPKCD.unsafe_buffer_pointer(), new.v_LPKCD.unsafe_buffer_pointer()) == where
        pool = new


# ------------------------------------------------------------------------------------------- attention backend


def interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Pallas-Triton kernel run here, interpreted."""
    interpreted = attention.Backend(partial(attention_triton.attend, interpret=True), lambda *_: None)
    monkeypatch.setitem(attention.BACKENDS, "triton", interpreted)  # type: ignore[arg-type]


@pytest.mark.parametrize("scanned", [False, True])
def test_decoder_on_pallas_attention(monkeypatch: pytest.MonkeyPatch, scanned: bool) -> None:
    interpret_triton(monkeypatch)
    made = make_runner(replace(CONFIG, num_layers=2), attention="triton", scanned=scanned)
    tokens = tokens_of(0, 21)
    part = whole(tokens, 3, start=5)
    (first,) = compute(made, [piece(part, 0, 20)], 24)
    (last,) = compute(made, [piece(part, 20, 21)], 2)
    want = np.asarray(jax.jit(make_decoder(replace(CONFIG, num_layers=2)).logits)(jnp.asarray(tokens)))
    assert_near(np.concatenate([first, last]), want)
    assert made.calls == {"triton": 4} and not made.fallbacks


def test_fallback_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = make_runner(replace(CONFIG, num_layers=2), attention="triton")
    with caplog.at_level(logging.WARNING):
        for rows in (24, 24, 2):
            compute(made, [piece(whole(tokens_of(0, 21), 3), 20, 21)], rows)
    assert made.calls == {"xla": 6}
    assert made.fallbacks == {"triton: it runs on GPUs, not on cpu": 6}
    assert [r.getMessage() for r in caplog.records] == [
        "attention runs on xla instead of triton: it runs on GPUs, not on cpu"
    ]


def test_unknown_attention_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda' is none of"):
        make_runner(attention="cuda").step(step_of([whole(tokens_of(0, 3), 3)], 24))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("page_S", 40, "slots.page holds 40"),
        ("page_S", -1, "slots.page holds -1"),
        ("offset_S", -256, "slots.offset holds 256"),
        ("position_T", 256, "rows.position holds 256"),
        ("request_T", 1, "rows.request mixes requests in block 0"),
        ("cell_T", 40 * PAGE, "step.cell_T"),
        ("cell_T", -1, "step.cell_T"),
    ],
)
def test_step_out_of_range_is_refused(runner: Runner, field: str, value: int, named: str) -> None:
    """And the pool is as before."""
    part = whole(tokens_of(0, 21), 3)
    (before,) = compute(runner, [part], 24)
    step = step_of([part], 24)
    getattr(step, field)[1] = value
    with pytest.raises(ValueError, match=named):
        runner.step(step)
    (after,) = compute(runner, [piece(part, 20, 21)], 2)
    assert_near(after, before[-1:])


def test_padding_and_unused_slots_may_hold_anything(runner: Runner) -> None:
    part = whole(tokens_of(0, 5), 3)
    step = step_of([part], 24)
    step.page_S[-1], step.offset_S[-1], step.position_T[-1], step.request_T[-1] = 10**6, 10**6, 10**6, 7
    logits = runner.logits(runner.step(step), np.arange(5))
    assert_near(logits, dense(tokens_of(0, 5)))


# ---------------------------------------------------------------------------------------------------- mesh


SHARDED = """
import jax, numpy as np
from dataclasses import replace
from functools import partial
from jax.sharding import AxisType
from ragjax.kernels import attention, attention_triton
from tests import test_runner as t

triton = partial(attention_triton.attend, interpret=True)
attention.BACKENDS["triton"] = attention.Backend(triton, lambda *_: None)

config = replace(t.CONFIG, num_layers=2, num_heads=16, num_kv_heads=8)
prompts = [t.tokens_of(3, 8), t.tokens_of(4, 5)]
parts = [t.whole(x, 1 + 6 * i, start=i) for i, x in enumerate(prompts)]
results = []
for devices, backend in ((1, "xla"), (8, "xla"), (8, "triton")):
    mesh = jax.make_mesh((devices,), ("kv_heads",), axis_types=(AxisType.Auto,))
    made = t.make_runner(config, mesh=mesh, attention=backend)
    step = t.step_of(parts, 24, mass=True)
    outcome = made.step(step)
    logits = [made.logits(outcome, t.rows_of(step, r)) for r in range(2)]
    again = t.compute(made, [t.piece(parts[0], 7, 8)], 2)
    shard = made._pools[0].k_LPKCD.addressable_shards[0].data.shape
    assert len(made._pools[0].k_LPKCD.addressable_shards) == devices
    assert shard == (2, 40, 8 // devices, t.PAGE, 8), shard
    qkv = made._stages[0][0]["qkv"].get_value().addressable_shards[0].data.shape
    assert qkv == (8 // devices, 4, 8, 32), qkv
    results.append([*logits, *again, outcome.mass_LSC, *made.read(parts[0].spans[0].run.cells(t.PAGE))])
for one, *others in zip(*results, strict=True):
    for other in others:
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
print("agree on", jax.device_count(), "devices")
"""


def test_eight_devices_agree_with_one() -> None:
    assert_agreement(SHARDED, devices=8)
