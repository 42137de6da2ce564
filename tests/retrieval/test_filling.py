"""Filling a knowledge base from a folder: broken files do no harm, and what did not change is not read again."""

import logging
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.core import ConfigError, EngineOptions, Indexing, Message, Rag, Request, Slice
from ragjax.engine.grounding import Grounding
from ragjax.engine.knowledge import check_documents
from ragjax.retrieval import document, filling, formats
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.document import load
from ragjax.retrieval.filling import Filler, Filling, GraphFilling
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.library import Library
from ragjax.retrieval.registry import KnowledgeRegistry
from ragjax.retrieval.triple_files import MOST_BROKEN
from tests.support.fakes import WordEncoder
from tests.support.serving import wait_for
from tests.support.shelf import Shelf, encode_bytes, open_base

LONG_AGO = 10**18


def write(folder: Path, name: str, text: str | bytes, modified: int = LONG_AGO) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(path, ns=(modified, modified))
    return path


def fill(base: KnowledgeBase, source: Path) -> None:
    for _ in Filling(base, source).steps():
        pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are opened."""
    names: list[str] = []
    read = document._data

    monkeypatch.setattr(document, "_data", lambda path: names.append(path.name) or read(path))
    return names


def test_files_that_cannot_be_read_are_left_out_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "good.txt", "The ferry leaves at nine.")
    write(tmp_path, "deep/broken.pdf", b"no pdf")
    write(tmp_path, "binary.txt", b"first\nnot \0 text")
    write(tmp_path, "empty.md", " ")
    with open_base() as base:
        with caplog.at_level(logging.WARNING):
            fill(base, tmp_path)
        told = base.indexing
        assert base.document_ids == {"good"}
        assert (told.files, told.files_total, told.running) == (4, 4, False)
        reasons = {one.name: one.reason for one in told.skipped}
        assert list(reasons) == ["binary.txt:2", "deep/broken.pdf", "empty.md"]
        assert "not a readable PDF" in reasons["deep/broken.pdf"] and str(tmp_path) not in str(reasons)
        assert all(f"left out {name}: {reason}" in caplog.text for name, reason in reasons.items())
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert "broken.pdf: not a readable PDF" in str(refused.value) and "binary.txt:2: binary content" in str(
        refused.value
    )
    assert "empty.md" not in str(refused.value), "an empty file is no fault"


def test_the_log_names_so_many_and_sums_up_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "good.txt", "The ferry leaves at nine.")
    for n in range(25):
        write(tmp_path, f"bad{n:02}.txt", b"\0")
    with open_base() as base, caplog.at_level(logging.WARNING):
        fill(base, tmp_path)
    assert len(caplog.records) == 21 and caplog.records[-1].getMessage().endswith("left out 5 more: 5 .txt")


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    source = write(
        tmp_path, "a.jsonl", '{"id": "1", "text": "one"}\nbroken\n{"id": "1", "text": "two"}\n{"id": "2", "text": "2"}'
    )
    with open_base() as base:
        fill(base, source)
        assert base.document_ids == {"1", "2"}
        assert [one.name for one in base.indexing.skipped] == ["a.jsonl:2", "a.jsonl:3"]
        write(tmp_path, "a.jsonl", '{"id": "2", "text": "2"}')
        fill(base, source)
        assert base.document_ids == {"2"} and not base.indexing.skipped


def test_a_reader_that_fails_costs_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.html", "<p>A")
    write(tmp_path, "b.txt", "B")
    monkeypatch.setitem(formats.READERS, ".html", lambda data, path: 1 / 0)
    with open_base() as base:
        fill(base, tmp_path)
        assert base.document_ids == {"b"}
        assert [one.name for one in base.indexing.skipped] == ["a.html"]


def test_what_did_not_change_is_not_read_again(tmp_path: Path, opened: list[str]) -> None:
    folder, kept = tmp_path / "docs", tmp_path / "index"
    for name in "abc":
        write(folder, f"{name}.txt", f"This is {name}.")
    write(folder, "d.txt", b"\0")
    with open_base(kept) as base:
        fill(base, folder)
    assert opened == ["a.txt", "b.txt", "c.txt", "d.txt"]
    opened.clear()
    with open_base(kept) as base:
        fill(base, folder)
        assert not opened and base.document_ids == {"a", "b", "c"}
        assert [one.name for one in base.indexing.skipped] == ["d.txt:1"], "its fault is remembered"
    write(folder, "b.txt", "This is b.", LONG_AGO + 1)
    write(folder, "d.txt", "d now")
    (folder / "c.txt").unlink()
    with open_base(kept) as base:
        fill(base, folder)
        assert opened == ["b.txt", "d.txt"] and base.document_ids == {"a", "b", "d"}
        assert base.files.keys() == {"a.txt", "b.txt", "d.txt"}
        assert not base.indexing.skipped
        base.delete(["a"])
        opened.clear()
        fill(base, folder)
        assert opened == ["a.txt"] and "a" in base
        write(folder, "b.txt", b"\0\0")
        fill(base, folder)
        assert base.document_ids == {"a", "d"}, "what cannot be read any more is not found"


def test_readers_that_changed_read_all_again(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.txt", "text")
    with open_base() as base:
        fill(base, tmp_path)
        monkeypatch.setattr(filling, "_readers", lambda: "others")
        fill(base, tmp_path)
    assert opened == ["a.txt", "a.txt"]


@pytest.mark.parametrize(("ahead", "reads"), [(0, 2), (3600, 1)])
def test_a_file_that_changed_just_now_is_read_again(tmp_path: Path, opened: list[str], ahead: int, reads: int) -> None:
    """It may change once more within a tick of the clock; one of the future is of before the clock was set back."""
    write(tmp_path, "a.txt", "one", time.time_ns() + ahead * 10**9)
    with open_base() as base:
        fill(base, tmp_path)
        fill(base, tmp_path)
    assert opened == ["a.txt"] * reads


def test_a_run_that_ends_early_goes_on(tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_FIRST_CHARS", 1)
    monkeypatch.setattr(filling, "_BATCH_CHARS", 1)
    for name in "abc":
        write(tmp_path, f"{name}.txt", f"This is {name}.")
    with open_base() as base:
        steps = Filling(base, tmp_path).steps()
        while "b" not in base:
            next(steps)
            assert base.indexing.running and base.indexing.seconds_left > 0
        del steps
        assert base.indexing.files == 2
        opened.clear()
        fill(base, tmp_path)
        assert opened == ["c.txt"] and base.indexing.share == "3 of 3 files of default"


def test_a_folder_that_is_gone_takes_nothing_away(tmp_path: Path) -> None:
    write(tmp_path / "docs", "a.txt", "text")
    with open_base() as base:
        fill(base, tmp_path / "docs")
        (tmp_path / "docs" / "a.txt").unlink()
        with pytest.raises(ConfigError, match="no documents"):
            fill(base, tmp_path / "docs")
        assert "a" in base


def test_the_own_store_lists_what_was_left_out(tmp_path: Path) -> None:
    shelf = Shelf()
    base = shelf.make("own")
    for name in "abc":
        write(tmp_path, f"{name}.txt", "text" if name != "b" else b"\0")
    fill(base, tmp_path)
    library = Library(shelf, None)
    try:
        (failed,) = library.attachments("", "own", "failed")
        assert failed.file == "b.txt:1" and failed.state == "failed" and "binary content" in failed.error[1]
        assert library.attachment("", "own", "b.txt:1") == failed
        assert [one.file for one in library.attachments("", "own")] == ["a", "b.txt:1", "c"]
        assert [one.file for one in library.attachments("", "own", part=Slice(2, last=True))] == ["b.txt:1", "c"]
        assert [one.file for one in library.attachments("", "own", part=Slice(1, after="a"))] == ["b.txt:1"]
        counts, _ = library.counts("", "own")
        assert (counts.completed, counts.failed, counts.in_progress) == (2, 1, 0)
    finally:
        library.close()


def test_facts_that_cannot_be_read_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path, "a.tsv", b"Tolva\texports\tsalt\nTolva\texports\n\xff\nOske\texports\tcopper\n")
    with KnowledgeGraph(None, WordEncoder()) as graph, caplog.at_level(logging.WARNING):
        filling = GraphFilling(graph, "facts", source)
        states = [filling.progress and filling.progress.running for _ in filling.steps()]
        assert len(graph) == 2 and len(states) > 1 and all(states)
        told = graph.indexing
        assert (told.files, told.facts, told.running) == (1, 2, False)
        assert [one.name for one in told.skipped] == ["a.tsv:2", "a.tsv:3"]
        assert "left out a.tsv:2: 2 column(s); write head" in caplog.text
        assert "left out a.tsv:3: not UTF-8 text (byte 0xff); convert the file" in caplog.text
        assert not list(filling.steps()), "a file that has not changed is not read again"
        write(tmp_path, "a.tsv", "nothing of it")
        list(filling.steps())
        assert not len(graph) and graph.indexing.skipped[0].name == "a.tsv:1"


@pytest.mark.parametrize(
    ("name", "data", "broken"),
    [
        ("a.nt", b'<a:a> <a:b> <a:c> .\nnone\n<a:a> <a:b> <a:d> .\n<a:a> "b" .\n', [2, 4]),
        ("a.ttl", b"@prefix a: <a:> .\na:a a:b a:c .\nno fact .\na:a a:b a:d .\na:a a:b [\n", [3, 6]),
    ],
)
def test_statements_of_rdf_that_cannot_be_read_are_left_out(
    tmp_path: Path, name: str, data: bytes, broken: list[int]
) -> None:
    source = write(tmp_path, name, data)
    with KnowledgeGraph(None, WordEncoder()) as graph:
        list(GraphFilling(graph, "facts", source).steps())
        told = graph.indexing
        assert told.facts == len(graph) == 2
        assert [one.name for one in told.skipped] == [f"{name}:{line}" for line in broken]
        assert all("mend the line" in one.reason for one in told.skipped)


def test_a_server_starts_with_facts_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fillings = list[GraphFilling]()
    for name in ("broken", "whole"):
        source = write(tmp_path, f"{name}.nt", "none\n" * 20_000 if name == "broken" else "<a:a> <a:b> <a:c> .\n")
        fillings.append(GraphFilling(KnowledgeGraph(None, WordEncoder()), name, source))
    filler = Filler(fillings, lambda: False)
    assert filler.wait(60)
    filler.close()
    counts = [one.progress and (one.progress.facts, len(one.progress.skipped)) for one in fillings]
    assert counts == [(0, MOST_BROKEN + 1), (1, 0)]
    both = Indexing.together([one.progress for one in fillings if one.progress])
    assert (both.knowledge, both.files, both.facts, both.running) == ("broken, whole", 2, 1, False)
    for one in fillings:
        one.graph.close()


def test_strict_documents_name_all_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "docs", "a.txt", b"\0")
    write(tmp_path / "docs", "b.pdf", b"no pdf")
    write(tmp_path / "docs", "c.txt", "fine")
    facts = write(tmp_path, "facts.tsv", "a\tb\n")
    options = EngineOptions("none", knowledge=tmp_path / "docs", graph=facts)
    check_documents(options)
    with pytest.raises(ConfigError) as refused:
        check_documents(replace(options, strict_documents=True))
    first, second, third = str(refused.value).splitlines()
    assert "a.txt:1: binary content" in first and "b.pdf: not a readable" in second and "facts.tsv:1: 2 col" in third


# -------------------------------------------------------------------------------------------- the thread


class Held(WordEncoder):
    """An encoder that waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.reached = Event(), Event()

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]:
        self.reached.set()
        assert self.go.wait(60)
        return super().encode(texts)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a fault nor a change is waited for."""
    for name in ("_LOOK_S", "_RETRY_S"):
        monkeypatch.setattr(filling, name, 0.01)


def test_a_base_answers_while_it_is_filled_and_says_how_far(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "The ferry leaves at nine.")
    write(tmp_path, "b.txt", "The mill grinds at ten.")
    encoder = Held()
    with open_base(encoder=encoder) as base:
        filler = Filler([Filling(base, tmp_path)], lambda: False)
        assert encoder.reached.wait(60) and not filler.wait(0)
        assert base.search("When does the ferry leave?", 3) == (), "no error: documents come"
        assert base.indexing.notice.startswith("0 of 2 files of default are indexed so far")
        bases = KnowledgeRegistry[KnowledgeBase]("knowledge base", "rag.knowledge", lambda name: base)
        bases.make("default")
        grounding = Grounding(bases, Chunker(encode_bytes), context_length=512, top_k=3, share=False)
        request = Request((Message("user", "When?"),), rag=Rag())
        assert grounding.unread(request) == (base.indexing.notice,) and grounding.hits(request) == ()
        assert grounding.stages(request, 3) is None, "a search in stages would tell nothing of it"
        encoder.go.set()
        assert filler.wait(60)
        assert grounding.unread(request) == ()
        assert base.indexing.notice is None and len(base.search("When does the ferry leave?", 3)) == 2
        filler.close()


def test_filling_waits_for_requests_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_YIELD_S", 0.05)
    write(tmp_path, "a.txt", "text")
    asked = count()
    with open_base() as base:
        filler = Filler([Filling(base, tmp_path)], lambda: next(asked) >= 0)
        assert filler.wait(60) and next(asked) > 2 and "a" in base
        filler.close()


def test_it_ends_with_the_step_at_hand(tmp_path: Path, opened: list[str]) -> None:
    for n in range(50):
        write(tmp_path, f"{n:02}.txt", "text")
    with open_base() as base:
        filler = Filler([Filling(base, tmp_path)], lambda: True)
        wait_for(lambda: bool(opened))
        filler.close()
        assert len(opened) < 50


@pytest.mark.usefixtures("quick")
def test_a_fault_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a.txt", "text")
    left = [sqlite3.OperationalError("database or disk is full")] * 3
    store = KnowledgeBase.note_files

    def full(base: KnowledgeBase, notes: dict[str, str], gone: Sequence[str] = ()) -> None:
        if notes and left:
            raise left.pop()
        store(base, notes, gone)

    monkeypatch.setattr(KnowledgeBase, "note_files", full)
    with open_base() as base, caplog.at_level(logging.ERROR):
        filler = Filler([Filling(base, tmp_path)], lambda: False)
        wait_for(lambda: bool(base.files))
        filler.close()
    assert len(caplog.records) == 1 and "disk is full" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_folder_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "docs"
    write(folder, "a.txt", "one")
    write(folder, "b.txt", "two")
    with open_base() as base, caplog.at_level(logging.ERROR):
        filler = Filler([Filling(base, folder)], lambda: False, watch=True)
        wait_for(lambda: base.document_ids == {"a", "b"})
        write(folder, "c.txt", "three")
        wait_for(lambda: base.document_ids == {"a", "b", "c"})
        (folder / "a.txt").unlink()
        write(folder, "b.txt", "changed", LONG_AGO + 1)
        wait_for(lambda: base.document_ids == {"b", "c"} and "changed" in base.document("b")[0].text)
        folder.rename(tmp_path / "away")
        wait_for(lambda: "no such folder" in caplog.text)
        assert base.document_ids == {"b", "c"}, "a disk that is not mounted takes nothing away"
        (tmp_path / "away").rename(folder)
        write(folder, "d.txt", "four")
        wait_for(lambda: "d" in base)
        filler.close()
    assert len(caplog.records) == 1
