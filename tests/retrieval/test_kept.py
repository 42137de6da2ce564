"""Folders of sources without `--index-dir`: a later start finds them read, and they take no more room than is meant."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragjax.core import EngineOptions
from ragjax.engine.knowledge import base_opener
from ragjax.retrieval import document
from ragjax.retrieval.filling import Filling
from ragjax.retrieval.kept import open_kept, shrink_kept
from ragjax.retrieval.knowledge import KnowledgeBase
from tests.support.fakes import WordEncoder
from tests.support.shelf import encode_bytes, open_base

LONG_AGO = 10**9


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "my papers"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"text {name}")
        os.utime(folder / f"{name}.txt", (LONG_AGO, LONG_AGO))
    return folder


def opened(root: Path, source: Path, facts: tuple[str, ...] = ("one",), **changes: object) -> KnowledgeBase:
    return open_kept(root, source, facts, partial(open_base, **changes))


def started(root: Path, source: Path, facts: tuple[str, ...] = ("one",)) -> int:
    """Texts that a start embeds."""
    encoder = WordEncoder()
    with opened(root, source, facts, encoder=encoder) as base:
        for _ in Filling(base, source).steps():
            pass
        assert base.document_ids == {"a", "b"}
    return len(encoder.encoded)


def test_a_later_start_reads_and_embeds_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kept"
    with caplog.at_level(logging.INFO):
        assert started(root, source) == 2
    (place,) = root.iterdir()
    assert f"is kept in {place} (--index-dir names another place)" in caplog.text and "my_papers" in place.name
    assert root.stat().st_mode & 0o077 == 0, "no other user sees it"
    assert started(root, source, ("another model",)) == 2
    monkeypatch.setattr(document, "_data", lambda *_: pytest.fail("a file is read again"))
    assert started(root, source) == 0


def test_processes_that_read_one_source_have_folders_of_their_own(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kept"
    bases = [opened(root, source) for _ in range(4)]
    assert len(list(root.iterdir())) == 4
    with opened(root, source) as fifth:
        assert len(list(root.iterdir())) == 4 and not len(fifth)
    assert "kept in memory, and read again at the next start: all its places are in use" in caplog.text
    assert len(shrink_kept(root, 0)) == 4, "what is open stays"
    for base in bases:
        base.close()
    assert shrink_kept(root, 0) == [] == list(root.iterdir())


def test_a_damaged_folder_is_made_anew(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "kept"
    started(root, source)
    (place,) = root.iterdir()
    (place / "chunks.sqlite").write_bytes(b"no database" * 99)
    assert [started(root, source), started(root, source)] == [2, 0]


def test_documents_stay_in_memory_where_nothing_can_be_kept(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert started(tmp_path / "file" / "kept", source) == 2
    assert "Not a directory" in caplog.text


def test_the_folders_used_longest_ago_leave(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "kept"
    for age in range(3):
        started(root, source, (str(age),))
        (newest,) = (place for place in root.iterdir() if place.stat().st_mtime > LONG_AGO)
        os.utime(newest, (age, age))
    size = shrink_kept(root)[0]
    assert len(shrink_kept(root, 2 * size)) == 2
    assert sorted(place.stat().st_mtime for place in root.iterdir()) == [1, 2]


def test_what_others_added_to_a_file_of_documents_leaves(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"id": "a", "text": "salt"}\n')
    os.utime(source, (LONG_AGO, LONG_AGO))
    for others in (True, False):
        with opened(tmp_path / "kept", source) as base:
            for _ in Filling(base, source).steps():
                pass
            assert base.document_ids == {"a"}
            if others:
                base.add([document.Document("b", "honey")])


def test_named_sources_are_kept_and_other_bases_are_not(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path / "cache"))
    tokenizer = SimpleNamespace(encode=lambda text, **_: encode_bytes(text), digest=b"bytes")
    opener = base_opener(EngineOptions("tiny", knowledge={"papers": source}), tokenizer, WordEncoder)
    with opener("upload"), opener("papers"):
        assert len(list((tmp_path / "cache" / "documents").iterdir())) == 1
