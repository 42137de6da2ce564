"""Rows of `quality` against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality.evaluation import FULL, NAIVE, Setting
from benchmarks.quality.rows import METRICS, main_settings, sweep_settings, verdicts
from benchmarks.quality.rows import rows as rows_of


def sample(kl: float, f1: float, share: float = 0.0) -> dict[str, Any]:
    return {**dict.fromkeys(METRICS, 0.5), "kl": kl, "f1": f1, "recomputed_share": share}


def measured(scale: float, fusion_kl: float = 0.1) -> list[dict[str, dict[str, Any]]]:
    """Four questions; blend's KL is four times fusion's, and half of the F1 is recovered. The first is swept too."""
    found = [
        {
            FULL.key: sample(0.0, 0.8, 1.0),
            NAIVE.key: sample(scale * i, 0.4),
            "blend/0.15/0": sample(4 * fusion_kl * i, 0.5, 0.15),
            "fusion/0.15/10": sample(fusion_kl * i, 0.6, 0.15),
        }
        for i in (1, 2, 3, 4)
    ]
    found[0] |= {"fusion/0.0/10": sample(2.0, 0.4), "blend/0.0/0": sample(3.0, 0.4)}
    return found


def settings() -> tuple[list[Setting], list[Setting]]:
    main = main_settings(["full", "blend", "fusion"], frozenset({"blend", "fusion"}), 0.15, 10)
    return main, sweep_settings(main, [0.15, 0.0])


def test_settings_put_the_references_first_and_sweep_the_rest() -> None:
    main, sweep = settings()
    assert main == [FULL, NAIVE, Setting("blend", 0.15), Setting("fusion", 0.15, 10)]
    assert {s.key for s in sweep} == {"blend/0.0/0", "fusion/0.0/10"}


def test_rows_hold_paired_figures_by_part_and_set() -> None:
    main, sweep = settings()
    made = rows_of({"a": measured(1.0), "b": measured(1.0, 0.3)}, main, sweep, "m")
    assert {(r["set"], r["part"]) for r in made} == {(s, p) for s in ("a", "b", "pooled") for p in ("main", "sweep")}
    rows = {(r["set"], r["part"], r["strategy"], r["ratio"], r["neighbours"]): r for r in made}
    blend = rows["a", "main", "blend", 0.15, None]
    assert blend["n"] == 4 and blend["kl"] == pytest.approx(1.0) and blend["kl_lo"] < 1 < blend["kl_hi"]
    assert [blend[f"kl_over_fusion{x}"] for x in ("", "_lo", "_hi")] == pytest.approx([4, 4, 4])
    assert blend["normalised_f1"] == pytest.approx(0.25) and blend["f1_minus_full"] == pytest.approx(-0.3)
    assert rows["pooled", "main", "fusion", 0.15, 10]["normalised_f1"] == pytest.approx(0.5)
    assert rows["pooled", "main", "fusion", 0.15, 10]["n"] == 8
    assert rows["a", "sweep", "fusion", 0.0, 10]["n"] == 1
    assert rows["a", "sweep", "blend", 0.0, None]["kl_over_fusion"] == pytest.approx(1.5)


def test_verdicts_name_the_slots_that_miss() -> None:
    main, _ = settings()
    made = rows_of({"a": measured(1.0), "b": measured(1.0)}, main, [], "m")
    claims = {(c["set"], c["strategy"]): c["holds"] for c in verdicts(made)}
    assert claims == {
        ("a", "blend"): "True",
        ("b", "blend"): "True",
        ("pooled", "blend"): "True",
        ("pooled", "fusion"): "False",
    }
