"""Rivals' environments, and the workers that run in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.common import envs

ECHO = f"""
import sys
sys.path.insert(0, {str(envs.WORKERS)!r})
from wire import serve

class Worker:
    def double(self, value):
        print("words that are no answer")
        return {{"value": 2 * value}}

    def leave(self):
        print("last words", file=sys.stderr)
        sys.exit(3)

serve(Worker())
"""


@pytest.mark.slow
def test_worker_answers_and_reports_errors() -> None:
    with envs.Worker([sys.executable, "-c", ECHO]) as worker:
        assert worker.ask({"op": "double", "value": 21}) == {"value": 42}
        with pytest.raises(envs.RivalError, match="AttributeError"):
            worker.ask({"op": "no such operation"})
        assert worker.ask({"op": "double", "value": "ab"}) == {"value": "abab"}
        with pytest.raises(envs.RivalError, match=r"exit code 3(.|\n)*last words"):
            worker.ask({"op": "leave"})
        with pytest.raises(envs.RivalError, match="exit code 3"):
            worker.ask({"op": "double", "value": 1})


def test_unknown_environment_is_an_error() -> None:
    with pytest.raises(envs.RivalError, match="llamacpp, llamaserver, openvino, transformers"):
        envs.python("no-such-rival")


def test_environment_is_remade_only_when_its_pins_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").mkdir()
    pins = tmp_path / "envs" / "rival.txt"
    pins.write_text("one==1\n")
    installed: list[str] = []

    def make(home: Path, with_pip: bool) -> None:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").touch()

    monkeypatch.setattr(envs, "HERE", tmp_path)
    monkeypatch.setattr(envs, "HOMES", tmp_path / ".envs")
    monkeypatch.setattr(envs.venv, "create", make)
    monkeypatch.setattr(envs, "_install", lambda interpreter, pins, *_: installed.append(pins.read_text()))
    assert envs.python("rival") == envs.python("rival") == tmp_path / ".envs" / "rival" / "bin" / "python"
    assert installed == ["one==1\n"]
    pins.write_text("one==2\n")
    envs.python("rival")
    assert installed == ["one==1\n", "one==2\n"]


def test_failed_installation_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "HOMES", tmp_path)

    def make(home: Path, with_pip: bool) -> None:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").write_text("#!/bin/sh\necho no wheel for this machine\nexit 1\n")
        (home / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(envs.venv, "create", make)
    with pytest.raises(envs.RivalError, match="no wheel for this machine"):
        envs.python("transformers")
    assert list(tmp_path.iterdir()) == []
