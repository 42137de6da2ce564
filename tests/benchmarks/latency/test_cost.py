"""The command `cost` on a miniature: what it measures is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cost
from benchmarks.common import profiles
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
