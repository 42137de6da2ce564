"""How a fit divides its questions: by chance, whatever their order means."""

from __future__ import annotations

import numpy as np
import pytest

from ragjax.commands.fitting import halves


@pytest.mark.parametrize("count", [40, 41])
def test_each_question_is_fitted_on_or_held_out(count: int) -> None:
    to_fit, to_hold_out = halves(range(count), np.random.default_rng(0))
    assert sorted(to_fit + to_hold_out) == list(range(count))
    assert len(to_hold_out) == count // 2


def test_no_question_and_no_turn_has_a_half_of_its_own() -> None:
    """Over 200 seeds each question is held out about as often as not, and so are both of two neighbours."""
    held = np.zeros((200, 40), bool)
    for seed in range(200):
        held[seed, halves(range(40), np.random.default_rng(seed))[1]] = True
    assert (np.abs(held.mean(0) - 0.5) < 0.2).all()
    together = (held[:, 1:] == held[:, :-1]).mean()  # by turns never, by blocks nearly always
    assert 0.4 < together < 0.6


def test_a_seed_gives_the_same_halves() -> None:
    first, again = (halves(range(40), np.random.default_rng(7)) for _ in range(2))
    assert first == again
