"""Keys that several decoding rows read together: logits are those of each request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ragjax.core import Grid, Span, Step
from ragjax.kernels.attention import op as attention
from ragjax.kernels.attention import triton as attention_triton
from ragjax.runner.runner import Runner
from tests.support.steps import (
    GRID,
    PAGE,
    Part,
    assert_near,
    compute,
    dense,
    make_runner,
    run_of,
    step_of,
    tokens_of,
    whole,
)

PREFIX = 2 * PAGE


@pytest.fixture(scope="module")
def runner() -> Runner:
    return make_runner()


def requests(runner: Runner, count: int) -> tuple[list[np.ndarray], list[Part]]:
    """Prompts with a common beginning of two pages, prefilled but for the last token, and their last rows."""
    common, run = tokens_of(0, PREFIX), run_of(1, PREFIX)
    compute(runner, [whole(common, 1)], 24)
    prompts, rows = [], []
    for number in range(count):
        own = tokens_of(10 + number, 3 + number)
        spans = (Span.consecutive(0, run), Span.consecutive(PREFIX, run_of(5 + number, len(own))))
        part = Part(own, PREFIX + np.arange(len(own)), spans)
        compute(runner, [replace(part, tokens=own[:-1], indices=part.indices[:-1])], 24)
        prompts.append(np.concatenate([common, own]))
        rows.append(replace(part, tokens=own[-1:], indices=part.indices[-1:]))
    return prompts, rows


def share(step: Step, members: Sequence[int], grid: Grid, block: int = 0) -> Step:
    """The step with the two pages of the common beginning listed once, for the block of places of these requests."""
    rows = grid.shape(len(step.token_T))
    request_S, index_SC, sharer_O = step.request_S.copy(), step.index_SC, step.sharer_O.copy()
    common_S = np.isin(request_S, members) & (index_SC.min(1) < PREFIX)
    kept_S = common_S & (request_S == members[0])
    request_S[common_S & ~kept_S] = -1
    request_S[kept_S] = rows.rows + block
    at = block * rows.sharing[1]
    sharer_O[at : at + len(members)] = [int(np.flatnonzero(step.request_T == member)[0]) for member in members]
    return replace(step, request_S=request_S, sharer_O=sharer_O)


def logits_of(runner: Runner, step: Step, count: int) -> np.ndarray:
    rows = [int(np.flatnonzero(step.request_T == request)[0]) for request in range(count)]
    return runner.logits(runner.step(step), rows)


@pytest.mark.slow
@pytest.mark.parametrize("members", [(0, 1), (1, 3), (0, 1, 2, 3)])
def test_rows_that_share_get_the_logits_they_have_alone(runner: Runner, members: tuple[int, ...]) -> None:
    prompts, rows = requests(runner, 4)
    step = share(step_of(rows, 4), members, GRID)
    assert (step.request_S >= 4).sum() == 2, "two pages are listed once"
    for got, prompt in zip(logits_of(runner, step, 4), prompts, strict=True):
        assert_near(got, dense(prompt)[-1])


@pytest.mark.slow
def test_beside_prefill(runner: Runner) -> None:
    prompts, rows = requests(runner, 3)
    other = tokens_of(30, 7)
    step = share(step_of([*rows, whole(other, 20)], 12), (0, 1, 2), GRID)
    got = logits_of(runner, step, 3)
    for found, prompt in zip(got, prompts, strict=True):
        assert_near(found, dense(prompt)[-1])


def test_pages_that_nobody_shares_change_nothing(runner: Runner) -> None:
    """Without places the step is what it was; a place without keys adds nothing."""
    prompts, rows = requests(runner, 2)
    step = step_of(rows, 4)
    plain = logits_of(runner, step, 2)
    idle = replace(step, sharer_O=np.array([0, 1, -1, -1], np.int32))
    np.testing.assert_array_equal(logits_of(runner, idle, 2), plain)
    assert_near(plain[0], dense(prompts[0])[-1])


def test_without_the_shared_keys_logits_are_others(runner: Runner) -> None:
    """What the tests above would find if the merge dropped what is read together."""
    prompts, rows = requests(runner, 2)
    step = share(step_of(rows, 4), (0, 1), GRID)
    lost = replace(step, sharer_O=np.full_like(step.sharer_O, -1))
    assert np.abs(logits_of(runner, lost, 2)[0] - dense(prompts[0])[-1]).max() > 0.01


@pytest.mark.slow
def test_on_the_gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernel, interpreted, serves blocks of places as it serves blocks of prefill."""
    interpreted = attention.Backend(partial(attention_triton.attend, interpret=True), lambda *_: None)
    monkeypatch.setitem(attention.BACKENDS, "triton", interpreted)  # type: ignore[arg-type]
    runner = make_runner(attention="triton", grid=Grid(rows=((4, 1, 0, True), (24, 8)), entries=(16,), logits=(2, 4)))
    prompts, rows = requests(runner, 3)
    step = share(step_of(rows, 4, grid=runner.grid), (0, 1, 2), runner.grid)
    for got, prompt in zip(logits_of(runner, step, 3), prompts, strict=True):
        assert_near(got, dense(prompt)[-1])
    assert set(runner.calls) == {"triton"}


@pytest.mark.parametrize("sharer", [[4, -1, -1, -1], [0, 1]])
def test_rows_that_are_none_are_refused(runner: Runner, sharer: list[int]) -> None:
    _, rows = requests(runner, 2)
    step = replace(step_of(rows, 4), sharer_O=np.array(sharer, np.int32))
    with pytest.raises(ValueError, match="sharer_O"):
        runner.step(step)
