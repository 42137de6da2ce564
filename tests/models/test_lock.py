"""A lock that processes share: whoever waits long says so once, and then goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from ragjax.models import hub
from tests.support.serving import wait_for


def test_nobody_waits_and_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with hub.locked(tmp_path / "lock", "making it"), pytest.raises(Timeout):
            FileLock(tmp_path / "lock").acquire(timeout=0)
    assert not caplog.records


def test_who_waits_long_says_so_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "PATIENCE", 0.01)
    went_on = threading.Event()

    def work() -> None:
        with hub.locked(tmp_path / "lock", "making it"):
            went_on.set()

    waiting = threading.Thread(target=work)
    with FileLock(tmp_path / "lock"):
        waiting.start()
        wait_for(lambda: bool(caplog.records))
        assert not went_on.is_set()
    waiting.join(timeout=60)
    assert went_on.is_set()
    (record,) = caplog.records
    assert "making it: waiting for another process" in record.message and str(tmp_path / "lock") in record.message


def test_a_failure_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no"), hub.locked(tmp_path / "lock", "making it"):
        raise RuntimeError("no")
    FileLock(tmp_path / "lock").acquire(timeout=0)
