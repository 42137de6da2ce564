"""The command `start`: the keys of its rows, over a server of fakes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import start
from benchmarks.latency.system import own_cache
from tests.support.fakes import FakeEngine
from tests.support.serving import serving


@pytest.mark.parametrize("state", ["first", "later"])
def test_a_start_has_these_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    @contextmanager
    def served(*_: Path | str) -> Iterator[tuple[Any, str]]:
        with serving(FakeEngine(programs_left=0)) as served:
            yield SimpleNamespace(pid=os.getpid(), poll=lambda: None), served.url

    monkeypatch.setattr(start, "served", served)
    monkeypatch.setattr(
        start, "body", lambda question, *_, **__: {"model": "fake", "messages": [{"role": "user", "content": question}]}
    )
    (tmp_path / "executables").mkdir()
    row = start.started(tmp_path, state)
    assert list(row) == ["system", "state", "ready_s", "first_answer_s", "rss_mb", "peak_mb", "programs", "prepared_s"]
    assert (row["system"], row["state"], row["programs"]) == ("ragjax", state, 0)
    assert 0 < row["ready_s"] <= row["first_answer_s"] and 0 < row["rss_mb"] <= row["peak_mb"]
    uses = [(use["strategy"], use["prepared"]) for use in start.first_uses(tmp_path)]
    assert uses == [("anchor", True), ("blend", True), ("anchor", False), ("blend", False)]


def test_a_cache_of_its_own_has_the_models_that_were_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path / "usual"))
    (tmp_path / "usual" / "models" / "one").mkdir(parents=True)
    own = Path(own_cache(tmp_path / "own"))
    assert [path.name for path in own.iterdir()] == ["models"] and (own / "models" / "one").is_dir()
