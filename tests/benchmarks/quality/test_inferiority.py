"""What intervals of accuracy say of a strategy, on constructed questions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.quality.evaluation import FULL, NAIVE, Setting
from benchmarks.quality.rows import (
    FEWEST,
    INFERIOR,
    LEAST,
    METRICS,
    NOT_INFERIOR,
    UNKNOWN,
    main_settings,
    needed,
    smallest,
    sweep_settings,
)
from benchmarks.quality.rows import rows as rows_of


def measured(n: int, **wrong: list[int]) -> list[dict[str, dict[str, Any]]]:
    """Questions that `full` answers right, and a setting does but for some."""
    keys = {"full": FULL.key, "naive": NAIVE.key} | {f"e{r}": Setting("epic", r / 100).key for r in (5, 15, 30)}
    return [
        {
            key: dict.fromkeys(METRICS, 0.5)
            | {"accuracy": float(i not in wrong.get(name, [])), "accuracy_sum": 1.0, "right_p": 0.5, "options": 4}
            for name, key in keys.items()
        }
        for i in range(n)
    ]


def table(found: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    main = main_settings(["epic"], frozenset({"epic"}), 0.15, 0)
    rows = rows_of({"a": found}, main, sweep_settings(main, [0.05, 0.3]), "m")
    return {row["strategy"]: row for row in smallest(rows)}


def test_the_smallest_ratio_that_is_not_inferior_is_found() -> None:
    found = table(measured(400, naive=list(range(60)), e5=list(range(20)), e15=[7], e30=[]))
    assert set(found) == {"naive", "epic"}
    assert (found["epic"]["ratio"], found["epic"]["verdict"]) == (0.15, NOT_INFERIOR)
    assert found["epic"]["accuracy_minus_full"] == pytest.approx(-1 / 400)
    assert (found["naive"]["ratio"], found["naive"]["verdict"], found["naive"]["needed"]) == (None, INFERIOR, None)


def test_few_questions_cannot_tell_even_if_all_agree() -> None:
    found = table(measured(LEAST - 1))
    assert found["epic"]["verdict"] == UNKNOWN and found["epic"]["accuracy_minus_full_lo"] == 0.0
    assert found["epic"]["ratio"] == 0.3 and found["epic"]["needed"] == LEAST
    assert table(measured(LEAST))["epic"]["verdict"] == NOT_INFERIOR
    everything = list(range(FEWEST))
    assert table(measured(FEWEST, naive=everything))["naive"]["verdict"] == INFERIOR
    assert table(measured(FEWEST - 1, naive=everything))["naive"]["verdict"] == UNKNOWN


def test_the_questions_needed_would_do() -> None:
    row = table(measured(50, e5=[1], e15=[1], e30=[1]))["epic"]
    assert row["verdict"] == UNKNOWN and needed({**row, "accuracy_minus_full": -0.03}) is None
    wrong = list(range(0, 600, 50))  # as often
    exact = measured(600, e5=wrong, e15=wrong, e30=wrong)
    for i in range(300, 312):  # and full is wrong as often: no difference
        exact[i][FULL.key]["accuracy"] = 0.0
    found = table(exact)["epic"]
    assert found["accuracy_minus_full"] == pytest.approx(0.0)
    half = found["accuracy_minus_full_hi"]
    assert found["needed"] == pytest.approx(600 * (half / 0.02) ** 2, rel=0.2)


def test_questions_without_a_choice_or_a_verdict_are_left_out() -> None:
    found = measured(6)
    for key in list(found[0]):
        del found[0][key]["accuracy"], found[0][key]["accuracy_sum"], found[0][key]["right_p"]
        for i in range(6):
            found[i][key]["faithful"] = None if i < 2 else i / 5
    made = rows_of({"a": found}, [FULL, NAIVE], [], "m")
    assert [r["chosen"] for r in made] == [5, 5] and [r["n"] for r in made] == [6, 6]
    assert made[1]["judged"] == 4 and made[1]["faithful"] == pytest.approx(np.mean([2, 3, 4, 5]) / 5)
    assert made[0]["options"] == 4 and {"accuracy", "accuracy_lo", "accuracy_hi"} <= set(made[0])
    for sample in (s for q in found for s in q.values()):
        sample.pop("accuracy", None), sample.pop("faithful")
    assert "accuracy" not in rows_of({"a": found}, [FULL, NAIVE], [], "m")[0]
    assert smallest(rows_of({"a": found}, [FULL, NAIVE], [], "m")) == []
