"""The commands `cost` and `restart` on miniatures: what they measure is what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost, restart
from benchmarks.common import profiles
from benchmarks.common.questions import spread
from benchmarks.latency.life import STRATEGIES
from ragjax.cache.profile import Profile
from ragjax.core import ConfigError
from tests.support import tiny

pytestmark = pytest.mark.slow


def test_cost_measures_every_cell_and_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with tiny.engine() as engine:
        profile = cost.measure(engine, 40, 1)
    assert (profile.cached, profile.new) == ((0, 32, 40), (1, 32, 40))
    assert all(second > 0 for row in profile.seconds for second in row)
    assert "9/9" in capsys.readouterr().err


def test_cost_refuses_to_time_what_was_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine() as engine:
        answer = engine.answer_prompt
        monkeypatch.setattr(
            engine, "answer_prompt", lambda prompt, **more: answer(prompt, **{**more, "strategy": "full"})
        )
        with pytest.raises(AssertionError):
            cost.seconds(engine, 32, 8, 1)


def test_cost_wants_a_file_that_it_can_write_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "cost.json"):
        with pytest.raises(SystemExit):
            cost.main(["--quick", "--out", str(out)])
        assert f"--out: {out} cannot be written" in capsys.readouterr().err


def test_grid_of_a_profile() -> None:
    assert cost.grid(2048) == (32, 128, 512, 2048)
    assert cost.grid(100) == (32, 100)


def test_restart_rows_are_medians_beside_cold() -> None:
    def answer(state: str, ttft: float, strategy: str) -> dict[str, Any]:
        return {
            "state": state, "strategy": strategy, "context_tokens": 9, "ttft_ms": ttft, "load_ms": 1.0, "reused": 8,
            "tiers": [state], "notices": [],
        }  # fmt: skip

    answers = [
        answer(state, t, s) for s in STRATEGIES for state, t in (("cold", 90.0), ("cold", 110.0), ("disk", 20.0))
    ]
    rows = restart.rows(answers)
    assert [(r["state"], r["ttft_ms"], r["faster_than_cold"]) for r in rows[:2]] == [("cold", 100, 1), ("disk", 20, 5)]
    assert len(rows) == 4 and len(set(spread(5))) == 5


def test_restart_fails_where_an_answer_came_from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiers = True

    def fake(storage: Any, states: Sequence[str], strategies: Sequence[str], limit: int) -> dict[str, Any]:
        common = {"question": "?", "context_tokens": 9, "ttft_ms": 1.0, "load_ms": 1.0, "reused": 8, "notices": []}
        each = [(s, t) for s in states for t in strategies]
        return {"answers": [{"state": s, "strategy": t, "tiers": [s] * tiers, **common} for s, t in each]}

    monkeypatch.setattr(restart, "in_process", fake)
    assert restart.main(["--quick", "--json", str(tmp_path / "r.json")]) == 0
    assert len(json.loads((tmp_path / "r.json").read_text())["rows"]) == 8
    tiers = False
    assert restart.main(["--quick"]) == 1


def test_profiles_of_the_command_are_read_back(tmp_path: Path) -> None:
    made = Profile((0, 8), (1, 8), ((1.0, 2.0), (1.5, 3.0)), "tiny")
    profiles.save(made, tmp_path / "cost.json")
    assert profiles.load(tmp_path / "cost.json") == made


@pytest.mark.parametrize("text", ["", "[]", '{"cached": 3}', '"\\ud800"'])
def test_a_file_that_holds_no_profile_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    for path in (tmp_path / "profile.json", tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=path.name):
            profiles.load(path)
