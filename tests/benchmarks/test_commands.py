"""What all commands refuse before anything is measured, and say in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import cost, demo, restart, scale


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cost.main(["--out", str(tmp_path / "cost.json"), "--model", "nope"]) == 1
    assert demo.main(["--model", "nope"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("unknown model 'nope'" in line for line in errors)


@pytest.mark.parametrize("limit", ["0", "-70"])
def test_the_demo_refuses_no_questions(limit: str) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--limit", limit])


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (cost.main, ["--out", "cost.json", "--longest", "32"], "--longest: must be a whole number from 33"),
        (demo.main, ["--strategy", "full,fastest"], "unknown strategy 'fastest'"),
        (restart.main, ["--limit", "0"], "--limit: must be a whole number from 1"),
        (scale.main, ["--nodes", "9"], "--nodes: must be a whole number from 10"),
    ],
)
def test_flags_that_cannot_work_are_errors_before_anything_is_measured(
    command: Callable[[list[str]], int], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(flags)
    assert message in capsys.readouterr().err
