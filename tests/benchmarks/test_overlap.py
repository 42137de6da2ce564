"""The benchmark of host work beside the device: what its rows say."""

from __future__ import annotations

import pytest

from benchmarks import overlap
from tests.support import tiny


@pytest.mark.slow
@pytest.mark.parametrize("mode", overlap.MODES)
def test_a_row_counts_steps_in_which_all_clients_decode(mode: str) -> None:
    with tiny.engine() as engine:
        row = overlap.row(engine, mode, 3, 80, 2)
        assert engine._loop._execution.land.__func__.__name__ == "land", "the engine is left as it was"
    assert set(row) == set(overlap.COLUMNS)
    assert 0 < row["steps"] <= 2 * 79
    assert 0 < row["hidden_ms"] < row["step_ms"] and row["waited_ms"] > 0 and row["exposed_ms"] > 0
