"""`Runner`: steps over pages against the decoder's plain forward, batched, in chunks, sharded; and its memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ragjax.models.decoder
import ragjax.runner.weights
from ragjax.core import NEVER, Compression, ConfigError, Grid, Measure, Run, Span, Step, StepMeasure
from ragjax.kernels.attention import op as attention
from ragjax.kernels.attention import triton as attention_triton
from ragjax.kernels.pages import Pages
from ragjax.kernels.reductions.measure import ARRAYS
from ragjax.runner.runner import Runner
from ragjax.store.device import BUCKETS
from tests.support.devices import assert_agreement
from tests.support.forward import dense_logits
from tests.support.matrix import few
from tests.support.steps import (
    CONFIG,
    PAGE,
    Part,
    assert_near,
    compute,
    dense,
    joined,
    make_decoder,
    make_runner,
    out,
    piece,
    run_of,
    step_of,
    tokens_of,
    whole,
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return make_runner()


# ------------------------------------------------------------------------------------------ equals dense


def test_a_pool_that_no_memory_holds_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"no room for a cache of .* GB beside the weights: lower --device-cache-gb"):
        make_runner(pages=10**12)


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


def test_decoding_rows_beside_prefill(runner: Runner) -> None:
    """Two requests decode while a third is prefilled: blocks of one row and of eight in one step."""
    prompts = [tokens_of(3, 8), tokens_of(4, 5), tokens_of(5, 7)]
    parts = [whole(t, 1 + 6 * i, start=i) for i, t in enumerate(prompts)]
    for part in parts[:2]:
        compute(runner, [piece(part, 0, len(part.tokens) - 1)], 24)
    mixed = [*(piece(part, len(part.tokens) - 1, len(part.tokens)) for part in parts[:2]), parts[2]]
    decoded, other, prefilled = compute(runner, mixed, 12)
    assert_near(decoded, dense(prompts[0])[-1:])
    assert_near(other, dense(prompts[1])[-1:])
    assert_near(prefilled, dense(prompts[2]))


@pytest.mark.parametrize(
    "what", few([Measure.KEY_SCORE, Measure.SEGMENT_SCORE, Measure.DEVIATION, Measure.QUERY], [Measure.DEVIATION])
)
def test_what_prefill_measures_is_the_same_beside_decoding_rows(runner: Runner, what: Measure) -> None:
    prompts = [tokens_of(3, 8), tokens_of(5, 7)]
    parts = [whole(t, 1 + 6 * i, start=i) for i, t in enumerate(prompts)]
    compute(runner, [piece(parts[0], 0, 7)], 24)
    compute(runner, [parts[1]], 24)

    def measured(step: Step, request: int) -> np.ndarray:
        mine = (step.request_T == request) & (step.index_T >= 0)
        said = {"asking_T": (1, 0), "segment_T": (1, -1), "stale_T": (3 * PAGE, -1), "offset_T": (3, 0)}
        arrays = {name: np.where(mine, *said[name]).astype(np.int32) for name in ARRAYS[what] if name in said}
        if "segment_SC" in ARRAYS[what]:
            arrays["segment_SC"] = np.where(step.index_SC == NEVER, -1, step.index_SC // 4).astype(np.int32)
        found = runner.step(replace(step, measure=StepMeasure(what, (1, 3), arrays, 16))).measured
        assert found is not None
        if what is Measure.KEY_SCORE:
            return found[:, step.request_S == request]
        return found[:, mine]

    alone = step_of([parts[1]], 24)
    beside = step_of([piece(parts[0], 7, 8), parts[1]], 12)
    assert_near(measured(beside, 1), measured(alone, 0))
    assert measured(alone, 0).any()


def test_bfloat16_is_near(runner: Runner) -> None:
    narrow = make_runner(dtype="bfloat16")
    tokens = tokens_of(0, 21)
    (got,) = compute(narrow, [whole(tokens, 3)], 24)
    assert_near(got, dense(tokens, "bfloat16"), 5e-2)


def test_widened_products_are_nearer_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bfloat16 weights, many rows are computed as float32 would, up to the rounding of KV."""
    monkeypatch.setattr(ragjax.models.decoder, "MANY", 16)
    tokens = tokens_of(0, 21)
    exact = make_decoder(dtype="bfloat16")
    for layer in exact.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            getattr(layer, name).set_value(getattr(layer, name)[...].astype(jnp.float32))
    wanted = dense_logits(exact, jnp.asarray(tokens))

    def error(widen: bool) -> float:
        (got,) = compute(make_runner(dtype="bfloat16", widen=widen), [whole(tokens, 3)], 24)
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    widened, narrow = error(True), error(False)
    assert widened < 0.01
    assert widened < 0.8 * narrow


@pytest.mark.slow
def test_warming_up_runs_every_program_once_and_leaves_kv_alone() -> None:
    grid = Grid(rows=((4, 1), (24, 8)), entries=(16,), logits=(4,))
    made = make_runner(replace(CONFIG, num_layers=1), "bfloat16", grid=grid)
    compute(made, [whole(tokens_of(0, 21), 3)], 24)
    measures, compression = {Measure.SEGMENT_SCORE, Measure.DEVIATION}, Compression("h2o", 40, window=4)
    names = made.programs(measures, 0, compression)
    made.compile(names)
    programs, runs = made._programs.compiled, Counter[tuple[object, ...]]()

    def counted(name: tuple[object, ...], program: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            runs[name] += 1
            return program(*arguments)

        return run

    assert ("compact", Compression("h2o", 64, window=4), 256) in names
    programs.update({name: counted(name, programs[name]) for name in names})
    before = [np.array(x) for x in jax.tree.leaves(made._pools)]
    made.warm_up(names)
    assert set(runs) == set(names)
    assert all(runs[name] == 1 for name in names if name[0] in ("stage", "end", "insert"))
    for one, other in zip(before, jax.tree.leaves(made._pools), strict=True):
        np.testing.assert_array_equal(one, np.array(other))


def test_timing_a_step_writes_the_scratch_page_alone(runner: Runner) -> None:
    compute(runner, [whole(tokens_of(0, 21), 3)], 24)
    before = [np.array(x) for x in jax.tree.leaves(runner._pools)]
    assert runner.seconds(4, runs=1) > 0 and runner.seconds(4, 2, runs=1) > 0
    for one, other in zip(before, jax.tree.leaves(runner._pools), strict=True):
        np.testing.assert_array_equal(one[:, 1:], np.array(other)[:, 1:])


def test_scanned_equals_unrolled(runner: Runner) -> None:
    scanned = make_runner(scanned=True)
    prompts = [tokens_of(3, 8), tokens_of(4, 5)]
    parts = [whole(t, 1 + 6 * i) for i, t in enumerate(prompts)]
    for one, other in zip(compute(runner, parts, 24), compute(scanned, parts, 24), strict=True):
        assert_near(one, other, 2e-6)


def test_several_stages_equal_one(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragjax.runner.weights, "STAGE_LAYERS", 3)  # of 4 layers: two stages of two
    staged = make_runner()
    assert len(staged._pools) == 2
    tokens = tokens_of(6, 20)
    parts = [whole(tokens, 4)]
    assert_near(compute(staged, parts, 24)[0], compute(runner, parts, 24)[0], 2e-6)
    slots = parts[0].spans[0].run.slots(PAGE)
    for one, other in zip(staged.read(slots), runner.read(slots), strict=True):
        assert one.shape == (4, 20, 4, 8)
        np.testing.assert_allclose(one, other, atol=1e-5)


# ------------------------------------------------------------------------------------- spans and visibility


def test_cached_keys_take_part_at_any_offset(runner: Runner) -> None:
    """Keys made at positions 0.. are read at 100..; RoPE being relative, the logits are those of the prompt."""
    tokens = tokens_of(7, 18)
    what = dense(tokens)
    compute(runner, [piece(whole(tokens, 2), 0, 11)], 24)
    prefix = Span.consecutive(0, whole(tokens, 2).spans[0].run.slice(0, 11, PAGE), offset=100)
    own = Span.consecutive(11, run_of(20, 7, start=2))
    moved = Part(tokens[11:], np.arange(11, 18), (own, prefix), np.arange(111, 118))
    assert_near(compute(runner, [moved], 24)[0], what[11:])
    # and a wrong offset shows
    wrong = replace(moved, spans=(own, replace(prefix, offset=99)))
    assert np.abs(compute(runner, [wrong], 24)[0] - what[11:]).max() > 1e-2 * np.abs(what).max()


def test_one_page_serves_two_requests_at_two_offsets(runner: Runner) -> None:
    shared, ends = tokens_of(8, 10), [tokens_of(9, 5), tokens_of(10, 4)]
    compute(runner, [whole(shared, 2, start=3)], 24)
    run = whole(shared, 2, start=3).spans[0].run
    parts = []
    for i, (end, offset) in enumerate(zip(ends, (0, 50), strict=True)):
        spans = Span.consecutive(10, run_of(10 + 5 * i, len(end))), Span.consecutive(0, run, offset=offset)
        indices = np.arange(10, 10 + len(end))
        parts.append(Part(end, indices, spans, indices + offset))
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
    """Whatever the neighbour's tokens, indices, positions and visibility are, not one bit changes."""
    own = tokens_of(15, 9)
    compute(runner, [piece(whole(own, 2), 0, 8)], 24)
    mine = piece(whole(own, 2), 8, 9)
    results = []
    for seed, extra in ((16, 0), (17, 30)):
        other = tokens_of(seed, 8)
        compute(runner, [whole(other, 12, start=seed - 16)], 24)
        neighbour = piece(whole(other, 12, start=seed - 16), 7, 8)
        neighbour = replace(neighbour, positions=neighbour.indices + extra)
        results.append(compute(runner, [mine, neighbour], rows))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert np.abs(results[0][1] - results[1][1]).max() > 1e-3
    assert_near(results[0][0], dense(own)[8:])


def test_slots_of_others_are_not_written(runner: Runner) -> None:
    tokens = tokens_of(18, 12)
    compute(runner, [whole(tokens, 2)], 24)
    others = np.setdiff1d(np.arange(PAGE, 40 * PAGE), whole(tokens, 30).spans[0].run.slots(PAGE)).astype(np.int32)
    before = runner.read(others)
    compute(runner, [whole(tokens, 30)], 24)
    for one, other in zip(before, runner.read(others), strict=True):
        np.testing.assert_array_equal(one, other)
    made = [runner.read(whole(tokens, page).spans[0].run.slots(PAGE)) for page in (2, 30)]
    np.testing.assert_allclose(made[0][0], made[1][0], atol=1e-6)
    assert np.abs(made[0][0]).max() > 0.1


# --------------------------------------------------------------------------------------------- key score


@pytest.mark.slow
def test_key_score_adds_up_per_request_and_layer(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragjax.runner.weights, "STAGE_LAYERS", 2)
    parts = [whole(tokens_of(19, 13), 2), whole(tokens_of(20, 6), 9)]
    step = step_of(parts, 24, score=4)
    for some in (runner, make_runner()):
        outcome = some.step(step)
        assert outcome.measured is not None
        assert outcome.measured.shape == (4, 16, PAGE)
        for request, part in enumerate(parts):
            mine = outcome.measured[:, step.request_S == request].sum((1, 2))
            np.testing.assert_allclose(mine, len(part.indices), rtol=1e-5)
        assert not outcome.measured[:, step.index_SC == NEVER].any()
        # a row's first key is seen by all rows of its request, its last by one
        first, last = (outcome.measured[:, (step.index_SC == o) & (step.request_S == 0)[:, None]] for o in (0, 12))
        assert (first > last).all()


def test_measuring_changes_no_result(runner: Runner) -> None:
    parts = [whole(tokens_of(19, 13), 2)]
    plain, measured = (runner.step(step_of(parts, 24, score=score)) for score in (0, 4))
    np.testing.assert_allclose(plain.x_TE, measured.x_TE, atol=1e-5)


# ------------------------------------------------------------------------------------------------ programs


@pytest.mark.slow
def test_compile_compiles_everything() -> None:
    small = Grid(rows=((2, 2), (4, 1)), entries=(4,), logits=(2,))
    made = make_runner(replace(CONFIG, num_layers=2), grid=small)
    names = made.programs({Measure.LOGITS, Measure.KEY_SCORE})
    made.compile(names)
    assert len(names) == 2 + 3 + 2 + 2 + 2 * len(BUCKETS)  # rows that decode measure nothing
    before = set(made._programs.compiled)
    tokens = tokens_of(21, 4)
    for begin, rows in ((0, 2), (2, 2)):
        part = piece(whole(tokens, 2), begin, begin + 2)
        for score in (0, 2):
            outcome = made.step(step_of([part], rows, entries=4, grid=small, score=score))
        made.logits(outcome, [0, 1])
    assert set(made._programs.compiled) == before


def test_logits_of_more_rows_than_a_bucket_in_any_order(runner: Runner) -> None:
    tokens = tokens_of(22, 20)
    outcome = runner.step(step_of([whole(tokens, 2)], 24))
    order = np.random.default_rng(0).permutation(20)
    assert_near(runner.logits(outcome, order.tolist()), dense(tokens)[order])


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporary_memory_does_not_grow_with_the_pool(dtype: str, scanned: bool) -> None:
    def measure(pages: int) -> tuple[int, int]:
        grid = Grid(rows=((32, 32),), entries=(64,), logits=(2,))
        config = replace(CONFIG, head_dim=16, num_layers=2)
        made = make_runner(config, dtype, pages=pages, page_size=64, grid=grid, scanned=scanned)
        analysis = made._programs.get("stage", 32, 64, 2).memory_analysis()
        return analysis.temp_size_in_bytes, sum(x.nbytes for x in jax.tree.leaves(made._pools[0]))

    (small, _), (large, pool) = measure(512), measure(8192)
    assert pool == 8192 * 64 * 2 * 2 * 4 * 16 * (4 if dtype == "float32" else 2)
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


# ------------------------------------------------------------------------------------- pages out and in


def random_pages(made: Runner, pages: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of whole pages, in the pool's dtype."""
    shape = (2, made.config.num_layers, pages, made.config.num_kv_heads, made.page_size, made.config.head_dim)
    values = np.random.default_rng(seed).standard_normal(shape)
    if made.storage_dtype == np.uint16:
        values = values.astype(jnp.bfloat16).view(np.uint16)
    k, v = values.astype(made.storage_dtype)
    return k, v


def put(made: Runner, pages: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    k, v = random_pages(made, len(pages), seed)
    made.insert(np.asarray(pages, np.int32), made.upload(k, v))
    return k, v


def assert_same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [1, 4], ids=["stages", "one stage"])
def test_pages_come_out_as_they_went_in(monkeypatch: pytest.MonkeyPatch, layers: int, dtype: str) -> None:
    monkeypatch.setattr(ragjax.runner.weights, "STAGE_LAYERS", layers)
    made = make_runner(dtype=dtype)
    assert len(made._pools) == 4 // layers
    order = np.random.default_rng(0).permutation(np.arange(1, 40)).tolist()
    kept = put(made, order, 1)
    for n in (1, 2, 4, 16, 21, 39):  # less than a bucket, whole ones, several
        assert_same(out(made, order[:n]), [x[:, :n] for x in kept])
    some = put(made, order[7:12], 2)
    assert_same(out(made, order[7:12]), some)
    assert_same(out(made, order[:7] + order[12:]), [np.delete(x, np.s_[7:12], 1) for x in kept])
    made.insert(np.array(order[20:39], np.int32), made.extract(np.array(order[:19], np.int32)))  # with no detour
    assert_same(out(made, order[20:39]), out(made, order[:19]))
    # and the slots are those that steps read
    page, slot = order[9], 5
    k, v = made.read(np.array([page * PAGE + slot], np.int32))
    for got, pages in zip((k, v), some, strict=True):
        what = pages[:, 2, :, slot]
        np.testing.assert_array_equal(got[:, 0], what if dtype == "float32" else what.view(jnp.bfloat16).astype("f4"))


def test_nothing_moves_for_no_pages(runner: Runner) -> None:
    assert runner.extract(np.zeros(0, np.int32)) == []
    runner.insert(np.zeros(0, np.int32), runner.upload(*random_pages(runner, 0, 0)))


def test_what_was_extracted_does_not_see_later_writes(runner: Runner) -> None:
    """The pools are donated to each step and insertion, and written in place, while the copies may be on their way."""
    tokens = tokens_of(0, 21)
    for seed in range(20):
        kept = put(runner, range(1, 22), seed)
        taken = runner.extract(np.arange(1, 22, dtype=np.int32))
        runner.step(step_of([whole(tokens, 3)], 24))
        put(runner, range(1, 22), seed + 100)
        runner.step(step_of([whole(tokens, 5)], 24))
        assert_same(joined(taken), kept)


def test_moved_pages_serve_a_step(runner: Runner) -> None:
    """A prefix computed on some pages, moved to others, continues as if it had been there."""
    tokens = tokens_of(7, 20)
    part = whole(tokens, 2)
    compute(runner, [piece(part, 0, 16)], 24)
    moved = runner.extract(np.asarray(part.spans[0].run.pages[:2], np.int32))
    put(runner, range(1, 20), 5)
    there = Run((31, 30, 29), 0, 20)
    runner.insert(np.array([31, 30], np.int32), runner.upload(*joined(moved)))
    rest = piece(replace(part, spans=(Span.consecutive(0, there),)), 16, 20)
    assert_near(compute(runner, [rest], 24)[0], dense(tokens)[16:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_are_inserted_in_place(dtype: str) -> None:
    made = make_runner(dtype=dtype, pages=400)
    pool = made._pools[0]
    where = pool.k_LPKCD.unsafe_buffer_pointer(), pool.v_LPKCD.unsafe_buffer_pointer()
    size = sum(x.nbytes for x in jax.tree.leaves(pool))
    put(made, range(3, 24), 0)
    new = jax.block_until_ready(made._pools[0])
    assert pool.k_LPKCD.is_deleted()
    assert (new.k_LPKCD.unsafe_buffer_pointer(), new.v_LPKCD.unsafe_buffer_pointer()) == where
    for n in BUCKETS:
        inserted = made._programs.get("insert", n).memory_analysis()
        assert inserted.alias_size_in_bytes == size
        assert inserted.temp_size_in_bytes < size * (n + 1) / 400
        assert made._programs.get("extract", n).memory_analysis().temp_size_in_bytes < size * (n + 1) / 400


@pytest.mark.parametrize(
    ("pages", "count", "named"),
    [
        ([3, 40], 2, "pages holds 40, outside of the 40 pages"),
        ([-1, 4], 2, "pages holds -1"),
        ([3, 4, 3], 3, "pages names a page twice"),
        ([3, 4], 3, "excerpts are not those of 2 pages"),
    ],
)
def test_bad_pages_are_refused(runner: Runner, pages: list[int], count: int, named: str) -> None:
    before = put(runner, [3, 4, 39], 0)
    with pytest.raises(ValueError, match=named):
        runner.insert(np.asarray(pages, np.int32), runner.upload(*random_pages(runner, count, 1)))
    if named.startswith("pages holds"):
        with pytest.raises(ValueError, match=named):
            runner.extract(np.asarray(pages, np.int32))
    assert_same(out(runner, [3, 4, 39]), before)


# ------------------------------------------------------------------------------------------- loss of the pool


def test_a_step_that_fails_halfway_loses_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragjax.runner.weights, "STAGE_LAYERS", 2)
    made = make_runner(executables=None)  # programs that have run before say otherwise that an array is gone
    step = step_of([whole(tokens_of(0, 5), 3)], 24)
    assert not made.lost
    made.step(step)
    assert not made.lost
    real = made._programs.get("stage", 24, 16, 2)

    def failing(weights: object, pool: Pages, *rest: object) -> object:
        real(weights, pool, *rest)
        raise RuntimeError("device lost")

    made._programs.compiled["stage", 24, 16, 2] = failing
    with pytest.raises(RuntimeError, match="device lost"):
        made.step(step)
    assert made.lost
    with pytest.raises(RuntimeError):
        jax.block_until_ready(made.extract(np.array([3], np.int32)))
    made._programs.compiled["stage", 24, 16, 2] = real
    made.reset()
    assert not made.lost
    assert not any(x.any() for x in out(made, [1, 3, 39]))
    (got,) = compute(made, [whole(tokens_of(0, 5), 3)], 24)
    assert_near(got, dense(tokens_of(0, 5)))


class Poisoned:
    """What a dispatched program leaves of an array that it could not make."""

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.ready

    def block_until_ready(self) -> None:
        assert self.ready, "this waits for the device"
        raise RuntimeError("device lost")


def test_an_error_that_comes_late_loses_the_pool() -> None:
    made = make_runner()
    kept = made._pools[0]
    for ready in (False, True):
        made._pools[0] = Pages(kept.k_LPKCD, Poisoned(ready))  # type: ignore[arg-type]
        assert made.lost == ready


def test_reset_gives_pools_of_the_same_kind(runner: Runner) -> None:
    """So that compiled programs take them."""
    made = make_runner()
    compute(made, [whole(tokens_of(0, 5), 3)], 24)
    before = made._pools[0].k_LPKCD
    made.reset()
    assert before.is_deleted()
    after = made._pools[0].k_LPKCD
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    (got,) = compute(made, [whole(tokens_of(0, 5), 3)], 24)
    assert_near(got, dense(tokens_of(0, 5)))


# ------------------------------------------------------------------------------------------- attention backend


def interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Pallas-Triton kernel run here, interpreted."""
    interpreted = attention.Backend(partial(attention_triton.attend, interpret=True), lambda *_: None)
    monkeypatch.setitem(attention.BACKENDS, "triton", interpreted)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_decoder_on_pallas_attention(monkeypatch: pytest.MonkeyPatch, scanned: bool) -> None:
    interpret_triton(monkeypatch)
    made = make_runner(replace(CONFIG, num_layers=2), attention="triton", scanned=scanned)
    tokens = tokens_of(0, 21)
    part = whole(tokens, 3, start=5)
    (first,) = compute(made, [piece(part, 0, 20)], 24)
    (last,) = compute(made, [piece(part, 20, 21)], 2)
    what = np.asarray(dense_logits(make_decoder(replace(CONFIG, num_layers=2)), jnp.asarray(tokens)))
    assert_near(np.concatenate([first, last]), what)
    assert made.calls == {"triton": 4} and not made.fallbacks


def test_fallback_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = make_runner(replace(CONFIG, num_layers=2, head_dim=16), attention="triton")
    with caplog.at_level(logging.WARNING):
        for rows in (24, 24, 2):
            compute(made, [piece(whole(tokens_of(0, 21), 3), 20, 21)], rows)
    assert made.calls == {"cpu": 6}
    assert made.fallbacks == {"triton: it runs on GPUs, not on cpu": 6}
    assert [r.getMessage() for r in caplog.records] == [
        "attention runs on cpu instead of triton: it runs on GPUs, not on cpu"
    ]


def test_unknown_attention_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda' is none of"):
        make_runner(attention="cuda").step(step_of([whole(tokens_of(0, 3), 3)], 24))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("page_S", 40, "entries.page holds 40"),
        ("page_S", -1, "entries.page holds -1"),
        ("offset_S", -256, "entries.offset holds 256"),
        ("position_T", 256, "rows.position holds 256"),
        ("request_T", 1, "rows.request mixes requests in block 0"),
        ("slot_T", 40 * PAGE, "step.slot_T"),
        ("slot_T", -1, "step.slot_T"),
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


def test_padding_and_unused_entries_may_hold_anything(runner: Runner) -> None:
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
from ragjax.core import Compression, Measure, StepMeasure
from ragjax.core.compression import GraphKV
from ragjax.kernels.attention import op as attention, triton as attention_triton
from ragjax.kernels.pages import Pages
from ragjax.runner.mesh import make_mesh
from tests.support import steps as t

triton = partial(attention_triton.attend, interpret=True)
attention.BACKENDS["triton"] = attention.Backend(triton, lambda *_: None)

config = replace(t.CONFIG, num_layers=2, num_heads=16, num_kv_heads=4)  # on eight devices each has two copies
prompts = [t.tokens_of(3, 8), t.tokens_of(4, 5)]
parts = [t.whole(x, 1 + 6 * i, start=i) for i, x in enumerate(prompts)]
results = []
for devices, backend in ((1, "xla"), (8, "xla"), (8, "triton")):
    mesh = make_mesh(devices, config)
    made = t.make_runner(config, mesh=mesh, attention=backend)
    step = t.step_of(parts, 24, score=2)
    outcome = made.step(step)
    logits = [made.logits(outcome, t.rows_of(step, r)) for r in range(2)]
    again = t.compute(made, [t.piece(parts[0], 7, 8)], 2)
    shard = made._pools[0].k_LPKCD.addressable_shards[0].data.shape
    assert len(made._pools[0].k_LPKCD.addressable_shards) == devices
    assert shard == (2, 40, 4 if devices == 1 else 1, t.PAGE, 8), shard
    layers = jax.tree.unflatten(made._weights.stage_def, made._weights.stages[0])
    qkv = layers[0]["qkv"].get_value().addressable_shards[0].data.shape
    assert qkv == ((4, 6, 8, 32) if devices == 1 else (1, 4, 8, 32)), qkv
    pages = np.arange(1, 7, dtype=np.int32)
    copies = made.extract(pages)
    assert len(copies[0][0].k_LPKCD.addressable_shards) == devices
    made.insert(pages + 20, made.upload(*t.joined(copies)))
    made.insert(pages + 30, copies)
    assert {s.data.shape for s in made._pools[0].k_LPKCD.addressable_shards} == {shard}
    moved = [*t.out(made, range(21, 27)), *t.out(made, range(31, 37))]
    stale = {"stale_T": np.where(step.index_T >= 0, 8, -1).astype(np.int32), "offset_T": np.full(24, 3, np.int32)}
    apart = made.step(replace(step, measure=StepMeasure(Measure.DEVIATION, (1, 2), stale))).measured
    assert apart.shape == (1, 24) and apart.max() > 1
    queries = made.step(replace(step, measure=StepMeasure(Measure.QUERY, (0, 2), {}))).measured
    asked = Compression("snapkv", 6, GraphKV(sources=0.5, neighbours=2), window=2)
    source, target = parts[0].spans[0].run.slots(t.PAGE), 38 * t.PAGE + np.arange(6, dtype=np.int32)
    kept = made.compact(asked, source, np.zeros(8, np.int32), target, queries[:, t.rows_of(step, 0)[-2:]])
    moved += [queries, *made.read(target), *(np.asarray(part) for part in kept.indexes)]
    results.append([*logits, *again, outcome.measured, apart, *made.read(parts[0].spans[0].run.slots(t.PAGE)), *moved])
for one, *others in zip(*results, strict=True):
    for other in others:
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
print("agree on", jax.device_count(), "devices")
"""


@pytest.mark.slow
def test_eight_devices_agree_with_one() -> None:
    assert_agreement(SHARDED, devices=8)


def test_a_timed_step_reads_keys_of_distinct_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys of one token index would take the square of the time that a prompt's take."""
    runner, steps = make_runner(CONFIG), list[Step]()
    monkeypatch.setattr(runner, "step", lambda step: steps.append(step) or Runner.step(runner, step))
    runner.seconds(runner.grid.least[0].rows, 3, runs=1)
    (step,) = steps
    of_first = step.index_SC[step.request_S == 0]
    assert of_first.shape[0] == 3 and np.unique(of_first).size == of_first.size
    assert step.index_T[0] == of_first.max() + 1
