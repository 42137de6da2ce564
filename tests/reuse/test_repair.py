"""Selectors of one's own: what they choose is checked, and an error names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ragjax.core import Tokens
from ragjax.reuse.repair import Choice, Selective, Selector
from ragjax.reuse.stitch import Isolated, Stitched
from tests.support import tiny
from tests.support.executor import Executor

Pick = Callable[[Stitched, int], Any]


class Mine(Selector):
    def __init__(self, pick: Pick):
        self._pick = pick

    def choose(self, stitched: Stitched, count: int) -> Choice:
        yield from ()
        return self._pick(stitched, count)


class Forgetful(Selector):
    def choose(self, stitched: Stitched, count: int) -> Choice:
        return stitched.chunks[-count:]


def recomputed(pick: Pick) -> list[tuple[tuple[int, int], ...]]:
    executor, strategy = Executor(), Selective("mine", Isolated(), Mine(pick))
    executor.run(strategy, tiny.prompt(3), 0.0)  # the chunks are kept now
    done = executor.run(strategy, tiny.prompt(3), 0.2)
    return [report.recomputed_at for report in done.plan.reports[1:-1]]


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (lambda s, n: s.chunks[-n:].tolist(), "Mine.choose must return .*NumPy array.*not list"),
        (lambda s, n: None, "Mine.choose must return .*not NoneType"),
        (lambda s, n: np.isin(s.chunks, s.chunks[:n]), "Mine.choose must return .*bool"),
        (lambda s, n: s.chunks[:n, None], r"Mine.choose must return .*\[n\]"),
        (lambda s, n: s.chunks[:n].astype(float), "Mine.choose must return .*float64"),
        (lambda s, n: s.chunks[: n + 1], "Mine.choose chose 27 tokens; at most 26"),
        (lambda s, n: np.arange(n, dtype=np.int32), "Mine.choose chose token 0, which is in no chunk"),
        (lambda s, n: s.queries[:n], "Mine.choose chose token 150, which is in no chunk"),
        (lambda s, n: np.arange(-n, 0), "Mine.choose chose token -26, which is in no chunk"),
        (lambda s, n: np.array([10**4]), "Mine.choose chose token 10000, which is in no chunk"),
    ],
)
def test_a_wrong_choice_is_an_error_that_names_the_selector(pick: Pick, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        recomputed(pick)


def test_a_selector_without_a_yield_is_told_so() -> None:
    strategy = Selective("mine", Isolated(), Forgetful())
    with pytest.raises(TypeError, match=r"Forgetful.choose must be a generator.*yield from \(\)"):
        Executor().run(strategy, tiny.prompt(3), 0.2)


def test_order_repetition_and_dtype_do_not_matter() -> None:
    def backwards(stitched: Stitched, count: int) -> Tokens:
        return np.repeat(stitched.chunks[-count:][::-1], 2).astype(np.int64)

    assert recomputed(backwards) == recomputed(lambda s, n: s.chunks[-n:]) == [(), (), ((31, 57),)]
