"""Layers that read pages of their own: the bits of pages in common, wherever units lie, in one array or several."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ragjax.runner.weights
from ragjax.core import NEVER, Measure, Span, Step, StepMeasure
from ragjax.core.passes import LayerLayout, LayerTable
from ragjax.kernels.pages import Pages
from ragjax.kernels.reductions.measure import ARRAYS
from ragjax.runner.runner import Runner
from tests.support.steps import CONFIG, PAGE, compute, make_runner, piece, step_of, tokens_of, whole

LAYERS = CONFIG.num_layers
MEASURES = (Measure.KEY_SCORE, Measure.SEGMENT_SCORE, Measure.DEVIATION, Measure.QUERY)
PROMPTS = [whole(tokens_of(3, 9), 1), whole(tokens_of(4, 7), 7), whole(tokens_of(5, 20), 13)]


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["unrolled", "scanned"])
def runners(request: pytest.FixtureRequest) -> tuple[Runner, Runner]:
    """Two stages of two layers: an array for each, and one for both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragjax.runner.weights, "STAGE_LAYERS", 2)
        by_stage, one = (make_runner(scanned=request.param, whole=whole) for whole in (False, True))
    assert [len(made._pools) for made in (by_stage, one)] == [2, 1] and by_stage.stages == one.stages == (0, 2, 4)
    return by_stage, one


def state(made: Runner) -> list[np.ndarray]:
    """All keys and values but the scratch page's."""
    return [
        np.concatenate([np.asarray(pool[:, 1:]) for pool in pools])
        for pools in zip(*map(leaves, made._pools), strict=True)
    ]


def leaves(pool: Pages) -> tuple[jax.Array, jax.Array]:
    return pool.k_LPKCD, pool.v_LPKCD


def common(step: Step) -> Step:
    return replace(step, by_layer=LayerTable.common(step.page_S, LAYERS, PAGE))


def measuring(step: Step, what: Measure, request: int) -> Step:
    mine = (step.request_T == request) & (step.index_T >= 0)
    said = {"asking_T": (1, 0), "segment_T": (1, -1), "stale_T": (3 * PAGE, -1), "offset_T": (3, 0)}
    arrays = {name: np.where(mine, *said[name]).astype(np.int32) for name in ARRAYS[what] if name in said}
    if "segment_SC" in ARRAYS[what]:
        arrays["segment_SC"] = np.where(step.index_SC == NEVER, -1, step.index_SC // 4).astype(np.int32)
    return replace(step, measure=StepMeasure(what, (1, 3), arrays, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "whats"),
    [
        pytest.param(4, [None], marks=pytest.mark.long),
        (12, [None, Measure.KEY_SCORE, Measure.DEVIATION]),
        pytest.param(24, [None, *MEASURES], marks=pytest.mark.long),
        pytest.param(12, MEASURES, marks=pytest.mark.long),
    ],
)
def test_tables_by_layer_that_say_the_same_give_the_same_bits(
    runners: tuple[Runner, Runner], rows: int, whats: list[Measure | None]
) -> None:
    """An ordinary request beside one with tables of its own: its rows, its KV and what it measures."""
    last = [piece(part, len(part.tokens) - 1, len(part.tokens)) for part in PROMPTS]
    parts = {4: last, 12: [*last[:2], piece(PROMPTS[2], 12, 20)], 24: PROMPTS[:2]}[rows]
    for made in runners[1:] if rows == 12 else runners:
        compute(made, PROMPTS[:2], 24)
        compute(made, [PROMPTS[2]], 24)
        for what in whats:
            step = step_of(parts, rows)
            if what is not None:
                step = measuring(step, what, len(parts) - 1)
            plain, before = made.step(step), state(made)
            mine = made.step(common(step))
            np.testing.assert_array_equal(np.asarray(mine.x_TE), np.asarray(plain.x_TE))
            for new, old in zip(state(made), before, strict=True):
                np.testing.assert_array_equal(new, old)
            if what is not None:
                assert plain.measured is not None and plain.measured.any()
                np.testing.assert_array_equal(mine.measured, plain.measured)


def test_units_may_lie_in_any_layer_of_an_array(runners: tuple[Runner, Runner]) -> None:
    """A prompt's pages of 4 layers, shuffled over the units of as many other pages: the next token is the same."""
    for made, seed in zip(runners, (1, 2), strict=True):
        part, random = PROMPTS[2], np.random.default_rng(seed)
        compute(made, [piece(part, 0, 16)], 24)
        old = np.array(part.spans[0].run.pages[:2])
        new = np.array([25, 21])
        pages = [
            [np.concatenate([np.asarray(x) for x in xs]) for xs in zip(*map(leaves, part), strict=True)]
            for part in made.download(old)  # a part for each page: programs move 16, 4 or 1
        ]
        copies = [np.concatenate(xs, 1) for xs in zip(*pages, strict=True)]
        page_LS, lender_LS = np.zeros((LAYERS, 2), np.int32), np.zeros((LAYERS, 2), np.int32)
        laid = [np.full_like(x, np.nan) for x in copies]
        for first in range(0, LAYERS, made.reach):
            units = random.permutation(made.reach * 2)
            for at, unit in enumerate(units):
                layer, entry = first + at // 2, at % 2
                lender, page = first + unit // 2, unit % 2
                page_LS[layer, entry], lender_LS[layer, entry] = new[page], lender
                for x, y in zip(laid, copies, strict=True):
                    x[lender, page] = y[layer, entry]
        stages = [slice(i, i + 2) for i in (0, 2)]
        made.restore(
            new,
            [
                tuple(Pages(*(jnp.asarray(x[stage, i : i + 1]) for x in laid)) for stage in stages)
                for i in range(len(new))
            ],
        )

        step = step_of([piece(part, 16, 17)], 2)
        plain = np.asarray(made.step(step).x_TE)
        table = LayerTable.common(step.page_S, LAYERS, PAGE)
        at = [int(np.flatnonzero(step.page_S == page)[0]) for page in old]
        table.page_LS[:, at], table.lender_LS[:, at] = page_LS, lender_LS
        np.testing.assert_array_equal(np.asarray(made.step(replace(step, by_layer=table)).x_TE), plain)
        # and each layer sees as many slots as its table says
        table.seen_LS[2, at[1]] = 3
        assert np.abs(np.asarray(made.step(replace(step, by_layer=table)).x_TE) - plain)[0].max() > 1e-3


def test_one_array_computes_and_moves_what_several_do(runners: tuple[Runner, Runner]) -> None:
    by_stage, one = runners
    pages = np.array([4, 6, 9], np.int32)
    random = np.random.default_rng(0)
    k, v = random.standard_normal((2, 2, 3, CONFIG.num_kv_heads, PAGE, CONFIG.head_dim)).astype(np.float32)
    found = []
    for made in (by_stage, one):
        made.reset()
        compute(made, PROMPTS[:2], 24)
        compute(made, [piece(PROMPTS[2], 0, 20)], 24)
        made.move(
            np.arange(8, 12, dtype=np.int32), np.arange(240, 244, dtype=np.int32), np.full(4, 5, np.int32), (2, 4)
        )
        copies = made.download(pages)
        made.restore(pages + 20, copies)
        made.insert(pages + 24, made.upload(k, v), first=1)
        made.clear(np.array([13], np.int32))
        half = made.step(replace(step_of([piece(PROMPTS[0], 8, 9)], 2), layers=(0, 2)))
        rest = replace(step_of([piece(PROMPTS[0], 8, 9)], 2), layers=(2, 4), residual_TE=half.x_TE)
        found.append([*state(made), *jax.tree.leaves(copies), np.asarray(made.step(rest).x_TE)])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_one_array_is_written_in_place(runners: tuple[Runner, Runner]) -> None:
    for made in runners:
        where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(made._pools)]
        step = step_of([piece(PROMPTS[0], 8, 9)], 2)
        jax.block_until_ready(made.step(common(step)).x_TE)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(made._pools)] == where


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_temporary_memory_does_not_grow_with_the_pool(scanned: bool) -> None:
    def temporary(pages: int) -> int:
        made = make_runner(pages=pages, scanned=scanned, whole=True)
        return int(made._programs.get("layered", 24, 16, LAYERS).memory_analysis().temp_size_in_bytes)

    assert temporary(4096) <= temporary(256)


def test_a_span_over_containers_names_the_last_one_again() -> None:
    span = Span.laid(LayerLayout(np.array([40, 8, 3], np.int32), 3), (7, 5, 6), PAGE)
    assert span.run.pages == (7, 5, 6, 6, 6) and len(span.indices) == 40
