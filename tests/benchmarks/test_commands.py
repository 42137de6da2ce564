"""What all commands refuse before anything is measured, and say in one line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import cost, demo

REFUSED = {
    "compress": {
        "--methods zip": "unknown method 'zip'",
        "--graphs zip": "unknown graph 'zip'",
        "--budgets 8": "whole number from 33",
    },
    "cost": {"--out cost.json --longest 32": "--longest: must be a whole number from 33"},
    "demo": {
        "--strategy full,fastest": "unknown strategy 'fastest'",
        "--limit 0": "whole number from 1",
        "--limit -70": "whole number from 1",
    },
    "e2e": {"--qui": "--qui", "--platform tpu": "invalid choice: 'tpu'", "--out a --json b": "give one of them"},
    "graphrag": {"--data d --limit 0": "--limit: must be a whole number from 1"},
    "kernels": {"--seconds 0": "greater than 0", "--platform tpu": "invalid choice: 'tpu'"},
    "load": {
        "--workload questions": "--data DIR is needed",
        "--data . --systems sglang": "unknown system 'sglang'",
        "--data . --engine turbo=1": "fields are",
        "--data . --requests 1": "whole number from 2",
    },
    "parity": {
        "--no-such-flag": "--no-such-flag",
        "extra": "extra",
        "--make x --check": "--check",
        "--make x --json y": "--check",
    },
    "passages": {
        "--sets demo": "give --adapter, --packet or both",
        "--adapter a": "give --data for the sets of a folder",
        "--adapter a --data /nowhere/at/all": "/nowhere/at/all",
    },
    "policies": {
        "": "--data",
        "--data no-such-folder": "no such folder: no-such-folder",
        "--data . --limit 0": "--limit: must be a whole number from 1",
        "--data . --qui": "--qui",
    },
    "quality": {
        "": "give --data, --triviaqa or both",
        "--data . --judge http://x/v1": "--judge and --judge-model belong together",
        "--data . --judge-model m": "--judge and --judge-model belong together",
        "--data . --judge-key K": "--judge-key to both",
        "--data . --options 1": "whole number from 2 to 8",
        "--data . --ratios 2": "--ratios",
        "--data . --limit 0": "whole number from 1",
        "--data . --neighbours x": "whole number from 1 to 100",
        "--data . --sweeps 1": "--sweeps",
        "--data . --strategies blent": "unknown strategy 'blent'",
    },
    "repair": {"--runs 0": "whole number from 1", "--strategies nothing": "unknown strategy 'nothing'"},
    "ttft": {"--qui": "--qui"},
}
"""Flags of each command, and words of the error."""

PACKAGES = ("kernels", "load", "policies", "quality")


@pytest.mark.parametrize(("name", "flags"), [(name, flags) for name, cases in REFUSED.items() for flags in cases])
def test_flags_that_cannot_work_are_errors_before_anything_is_measured(
    name: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = import_module(f"benchmarks.{name}" + ".__main__" * (name in PACKAGES))
    with pytest.raises(SystemExit) as stop:
        command.main(flags.split())
    assert stop.value.code == 2 and REFUSED[name][flags] in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cost.main(["--out", str(tmp_path / "cost.json"), "--model", "nope"]) == 1
    assert demo.main(["--model", "nope"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("unknown model 'nope'" in line for line in errors)
