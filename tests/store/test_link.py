"""Entries of one disk cache as links in another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragjax.store.folder import link
from tests.support.disks import arrays_of, digest, open_store, path_of, put, read_entry, same


def test_what_is_there_stays(tmp_path: Path) -> None:
    with open_store(tmp_path) as alone, open_store(tmp_path / "other") as own:
        put(alone, "both", "new")
        put(own, "both", "own")
    before = path_of(own, "both").stat().st_ino
    link(tmp_path, tmp_path / "other")
    with open_store(tmp_path / "other") as own:
        assert all(own.find(digest(name)) for name in ("both", "new", "own"))
        assert path_of(own, "both").stat().st_ino == before


def test_entries_of_another_format_are_left_out(tmp_path: Path) -> None:
    with open_store(tmp_path) as alone, open_store(tmp_path / "other") as own:
        put(alone, "old")
    manifest = alone.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": ', '"format": 1'))
    link(tmp_path, tmp_path / "other")
    assert not path_of(own, "old").exists()


def test_where_there_are_no_links_it_makes_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, path: Path) -> None:
        raise PermissionError("the file system has no links")

    with open_store(tmp_path) as alone:
        put(alone, "fused")
    monkeypatch.setattr(os, "link", refuse)
    link(tmp_path, tmp_path / "other")
    with open_store(tmp_path / "other") as own:
        assert same(read_entry(own, digest("fused")), arrays_of(digest("fused"))) and not own.stats().set_aside


def test_a_directory_that_is_not_there_has_no_entries(tmp_path: Path) -> None:
    link(tmp_path / "none", tmp_path / "other")
    assert not (tmp_path / "other").exists()
