"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragjax.core.file import atomic_path


def test_a_file_is_replaced_when_its_draft_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "notes"
    target.write_text("old")
    with atomic_path(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    target = tmp_path / "notes"
    target.write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_path(target) as part:
        part.write_text("ne")
        raise OSError("disk full")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "notes"
    there = list[bool]()
    monkeypatch.setattr("os.fsync", lambda _: there.append(target.exists()))
    with atomic_path(target, durable=True) as part:
        part.write_text("new")
    assert there == [False] and target.read_text() == "new"


def test_the_draft_that_a_kill_leaves_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "notes"
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        with atomic_path(target, durable=True) as first:
            first.write_text("new")
    with atomic_path(target, durable=True) as second:
        assert second == first
        second.write_text("newer")
