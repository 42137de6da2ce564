"""The knowledge base: what goes in is found, also after a restart or a kill, and nothing is embedded twice."""

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragjax.core import ConfigError, Document, Place, RequestError
from ragjax.retrieval import chunk_store
from ragjax.retrieval import knowledge as module
from ragjax.retrieval.index import TRAIN_AT, Ids, IndexKind, VectorIndex, Vectors
from ragjax.retrieval.knowledge import AddReport, KnowledgeBase, Query
from tests.support.fakes import WordEncoder
from tests.support.meanwhile import meanwhile
from tests.support.shelf import ISLANDS, encode_bytes, open_base

KINDS = pytest.mark.parametrize("kind", list(IndexKind))


def _found(base: KnowledgeBase, question: str, k: int = 1) -> list[str]:
    return [hit.chunk.document_id for hit in base.search(question, k)]


def test_an_earlier_question_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_base() as base:
        base.add(ISLANDS)
        searched, search = list[int](), base._index.search
        monkeypatch.setattr(base._index, "search", lambda *given: searched.append(1) or search(*given))
        query = Query("Which island exports copper?", ("What is red?",))
        first = base.search(query, 2)
        base.take_asked()
        assert base.search(query, 2) == first and len(searched) == 1
        assert len(base.take_asked()) == 2, "what is found again counts as asked for"
        for other in (replace(query, before=()), replace(query, tenant="acme")):
            base.search(other, 2)
        base.search(query, 1)
        base.search(query, 2, min_score=0.99)
        assert len(searched) == 5
        numbers = {chunk.id: number for number, chunk in base.chunks(base.numbers).items()}
        number = numbers[first[0].chunk.id]
        base.mark_fused(number, [n for n in base.numbers if n != number][:1], b"mark")
        assert base.search(query, 2)[0].chunk.behind == b"mark", "marks are told"
        base.add([Document("new", "Which island exports copper? What is red?")])
        assert base.search(query, 2)[0].chunk.document_id == "new"
        base.delete(["new"])
        assert [hit.chunk.document_id for hit in base.search(query, 2)] == [hit.chunk.document_id for hit in first]


def test_what_was_found_before_a_change_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_base() as base:
        base.add(ISLANDS)
        search = base._index.search

        def changing(*given: Any) -> Any:
            found = search(*given)
            monkeypatch.setattr(base._index, "search", search)
            base.add([Document("new", "honey")])
            return found

        monkeypatch.setattr(base._index, "search", changing)
        assert _found(base, "honey") != ["new"] and _found(base, "honey") == ["new"]


# ------------------------------------------------------------------------------------ adding and finding


@KINDS
@pytest.mark.parametrize("stored", [True, False], ids=["directory", "memory"])
def test_add_replace_delete(kind: IndexKind, stored: bool, tmp_path: Path) -> None:
    encoder = WordEncoder()
    with open_base(tmp_path / "new" / "base" if stored else None, index_kind=kind, encoder=encoder) as base:
        assert base.add(ISLANDS) == AddReport(added=4, replaced=0, unchanged=0)
        assert _found(base, "Who exports honey?") == ["isle/1"]
        assert _found(base, "絹") == ["isle/3"]

        encoder.encoded.clear()
        changed = Document("isle/1", "The island of Merrin exports feathers now.", "Merrin")
        assert base.add([ISLANDS[0], changed, Document("new", "A lighthouse burns oil.")]) == AddReport(1, 1, 1)
        assert len(encoder.encoded) == 2  # the unchanged one is not embedded again
        assert _found(base, "feathers now") == ["isle/1"]
        assert all("honey" not in hit.chunk.text for hit in base.search("honey in red boxes", 10))
        assert _found(base, "lighthouse oil") == ["new"]

        assert base.delete(["isle/0", "new"]) == 2
        assert not {"isle/0", "new"} & set(_found(base, "salt lighthouse", 10))
        assert base.document_ids == {"isle/1", "isle/2", "isle/3"}
        assert base.delete([]) == 0
        assert base.add([ISLANDS[0]]) == AddReport(1, 0, 0)
        assert _found(base, "Who exports salt?") == ["isle/0"]


def test_hits_are_whole_chunks_with_their_similarity() -> None:
    with open_base() as base:
        base.add(ISLANDS)
        hits = base.search("The island of Oske exports copper", 3)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        chunk = hits[0].chunk
        assert (chunk.id, chunk.document_id, chunk.title) == ("isle/2#0", "isle/2", "Oske")
        assert chunk.text == "Oske\nThe island of Oske exports copper in grey boxes.\n\n"
        assert chunk.tokens.dtype == np.int32
        np.testing.assert_array_equal(chunk.tokens, encode_bytes(chunk.text))
        question, passage = base._encoder.encode(["The island of Oske exports copper", chunk.text])
        assert hits[0].score == pytest.approx(question @ passage, abs=1e-6)
        assert base.search("copper", 0) == ()
        assert len(base.search("copper", 50)) == len(base.search("copper", 10**19)) == 4  # faiss counts in int64
        assert base.search("copper", 1)[0].chunk is base.search("copper", 1)[0].chunk  # read from the store once


def test_so_many_chunks_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "_CACHED", 3)
    with open_base() as base:
        base.add(_some_documents(2, 20))
        for k in (2, 5, 20):
            assert len(base.search("copper", k)) == k and len(base._cache) <= 3


@KINDS
def test_a_filter_finds_what_the_index_would_not_visit(kind: IndexKind) -> None:
    with open_base(index_kind=kind) as base:
        base.add([Document(f"d{n}", f"word{n} and more") for n in range(TRAIN_AT + 100)])
        for n in range(0, TRAIN_AT, 40):
            (hit,) = base.search(f"word{n + 1}", 5, within={f"d{n}", "unknown"})
            assert hit.chunk.document_id == f"d{n}"
            assert base.search(f"word{n + 1}", 5, within={f"d{n}"}, min_score=hit.score - 1e-6) == (hit,)
            assert base.search(f"word{n + 1}", 5, within={f"d{n}"}, min_score=hit.score + 1e-3) == ()
        assert base.search("word3", 5, within=set()) == ()
        assert {hit.chunk.document_id for hit in base.search("word3", 2, within={"d3", "d4", "d5"})} > {"d3"}
        assert len(base.search("word3", 5, within=base.document_ids)) == 5


def test_title_alone_makes_a_change() -> None:
    with open_base() as base:
        base.add([Document("d", "text", "old")])
        assert base.add([Document("d", "text", "new")]).replaced == 1
        assert base.document("d")[0].title == "new"


def test_stored_chunks_are_what_the_chunker_cuts() -> None:
    document = Document("d", "The keeper climbed. " * 60, "Log")
    with open_base(max_tokens=100) as base:
        cut = base._chunker.chunks(document)
        base.add([document])
        stored = base.document("d")
        assert len(stored) == len(base) > 5
        assert [chunk.id for chunk in stored] == [f"d#{n}" for n in range(len(stored))]
        for a, b in zip(stored, cut, strict=True):
            assert (a.id, a.title, a.text, a.tokens.tolist()) == (b.id, b.title, b.text, b.tokens.tolist())


# ---------------------------------------------------------------------------------------------- refusals


def test_empty_base_and_question_are_refused() -> None:
    with open_base(name="lore") as base:
        with pytest.raises(RequestError, match="knowledge base 'lore' is empty: add documents first"):
            base.search("anything", 3)
        base.add(ISLANDS)
        with pytest.raises(RequestError, match="question is empty"):
            base.search(" \n", 3)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([Document("", "text")], "empty id"),
        ([Document("d", " \n\t")], "'d' has no text"),
        ([Document("d", "one"), Document("d", "two")], "'d' is given twice"),
        ([Document("d", "half a pair \ud83d")], "'d' is not valid Unicode"),
    ],
)
def test_bad_documents_are_refused_and_nothing_is_stored(documents: list[Document], message: str) -> None:
    with open_base() as base:
        with pytest.raises(RequestError, match=message):
            base.add([ISLANDS[0], *documents])
        assert len(base.document_ids) == len(base) == 0


def test_unknown_ids_are_refused_and_nothing_is_removed() -> None:
    with open_base() as base:
        base.add(ISLANDS)
        with pytest.raises(RequestError, match="no document 'nowhere'"):
            base.delete(["isle/0", "nowhere"])
        assert len(base) == 4
        with pytest.raises(RequestError, match="no document 'nowhere'") as caught:
            base.document("nowhere")
        assert caught.value.code == "document_not_found"


def test_other_models_and_sizes_are_refused(tmp_path: Path) -> None:
    with open_base(tmp_path) as base:
        base.add(ISLANDS)
    for changes, message in (
        ({"encoder": WordEncoder("other")}, "encoder 'words', not 'other'"),
        ({"model_key": "other"}, "tokenizer 'bytes', not 'other'"),
        ({"max_tokens": 99}, "tokens per chunk '192', not '99'"),
    ):
        with pytest.raises(ConfigError, match=f"{message}; choose another directory, or delete this one"):
            open_base(tmp_path, **changes)
    with open_base(tmp_path) as base:
        assert len(base) == 4


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with open_base(tmp_path), pytest.raises(ConfigError, match="another process has it open"):
        open_base(tmp_path)
    open_base(tmp_path).close()


def test_broken_store_and_bad_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chunks.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigError, match=r"delete .* and add the documents again"):
        open_base(tmp_path)
    with pytest.raises(ConfigError, match="too small"):
        open_base(None, max_tokens=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_base(tmp_path / "file")


# ----------------------------------------------------------------------------------- neighbours and marks


def _numbers(base: KnowledgeBase) -> dict[str, int]:
    """Numbers of the chunks, by id."""
    return {chunk.id: number for number, chunk in base.chunks(range(1, 10_000)).items()}


def _nearest_by_hand(base: KnowledgeBase, n: int) -> dict[int, tuple[int, ...]]:
    """Every pair compared, one by one; of equal texts the first alone, and none of the chunk's own."""
    chunks = base.chunks(range(1, 10_000))
    vectors = {number: WordEncoder().encode([chunk.text])[0].astype(float) for number, chunk in chunks.items()}
    found = {}
    for number, chunk in chunks.items():
        taken, texts = [], {chunk.text}
        for other in sorted(chunks, key=lambda other: (-float((vectors[number] * vectors[other]).sum()), other)):
            if chunks[other].text not in texts and len(taken) < n:
                taken.append(other)
                texts.add(chunks[other].text)
        found[number] = tuple(taken)
    return found


WORDS = ["salt", "honey", "copper", "silk", "amber", "wool", "wax", "tin", "oil", "rope"]


def _some_documents(seed: int, count: int) -> list[Document]:
    """Short texts over few words: many are equal, and many equally near."""
    random = np.random.default_rng(seed)
    return [Document(f"d{n}", " ".join(random.choice(WORDS, random.integers(1, 4)))) for n in range(count)]


@KINDS
@pytest.mark.parametrize("n", [1, 3, 10, 200])
def test_neighbours_are_the_nearest_others(kind: IndexKind, n: int) -> None:
    with open_base(index_kind=kind) as base:
        base.add(_some_documents(0, 150))
        base.delete([f"d{i}" for i in range(0, 150, 7)])
        found, expected = base.neighbours(n), _nearest_by_hand(base, n)
        if kind is not IndexKind.HNSW:
            assert found == expected
            return
        assert found.keys() == expected.keys()  # a graph may miss some, and finds few others
        assert sum(found[i] == expected[i] for i in found) > 0.8 * len(found)


def test_neighbours_do_not_depend_on_what_else_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_base() as base:
        base.add(_some_documents(1, 100))
        found = base.neighbours(5)
        monkeypatch.setattr(module, "_QUERIES", 7)
        assert base.neighbours(5) == found
        base.add([Document("far", "zebra")])
        assert {k: v for k, v in base.neighbours(5).items() if k in found} == found


def test_neighbours_of_few() -> None:
    with open_base() as base:
        assert base.neighbours(3) == {}
        base.add(ISLANDS[:1])
        assert base.neighbours(3) == {1: ()}


def _marks(base: KnowledgeBase) -> dict[str, bytes]:
    """Digests by document, as a search sees them; `document` and `chunks` must agree."""
    marks = {hit.chunk.document_id: hit.chunk.behind for hit in base.search("island", 50)}
    assert marks == {name: base.document(name)[0].behind for name in base.document_ids}
    assert marks == {chunk.document_id: chunk.behind for chunk in base.chunks(range(1, 10_000)).values()}
    return marks


@pytest.mark.parametrize("stored", [True, False], ids=["directory", "memory"])
def test_marks_go_with_any_of_the_neighbours(stored: bool, tmp_path: Path) -> None:
    place = tmp_path if stored else None
    with open_base(place) as base:
        base.add(ISLANDS)
        zero, one, two, three = (_numbers(base)[f"isle/{n}#0"] for n in range(4))
        assert set(_marks(base).values()) == {b""}
        assert base.mark_fused(zero, (one, two), b"behind one and two")
        assert base.mark_fused(two, (three,), b"three")
        assert base.mark_fused(three, (two, zero), b"two and zero")
        assert base.mark_fused(three, (zero, two), b"zero and two")  # takes the earlier one's place
        marks = {"isle/0": b"behind one and two", "isle/1": b"", "isle/2": b"three", "isle/3": b"zero and two"}
        assert _marks(base) == marks
        if stored:
            base.close()
            base = open_base(place)
            assert _marks(base) == marks
        base.add([Document("isle/1", "The island of Merrin exports feathers now.")])
        assert _marks(base) == marks | {"isle/0": b""}
        base.delete(["isle/2"])
        assert _marks(base) == {"isle/0": b"", "isle/1": b"", "isle/3": b""}
        assert not base.mark_fused(zero, (two,), b"gone") and not base.mark_fused(two, (zero,), b"gone")
        assert set(_marks(base).values()) == {b""}
        base.add([ISLANDS[2]])  # it comes back under another number
        assert set(_marks(base).values()) == {b""}
        base.close()


def test_a_failed_write_takes_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_base() as base:
        base.add(ISLANDS)
        base.mark_fused(1, (2,), b"two")
        monkeypatch.setattr(chunk_store, "insert", _refuse)
        with pytest.raises(AssertionError):
            base.add([Document("isle/1", "other")])
        assert _marks(base)["isle/0"] == b"two"


# ------------------------------------------------------------------------------------ restarts and kills


@KINDS
def test_restart(kind: IndexKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_base(tmp_path, index_kind=kind) as base:
        base.add(ISLANDS)
        base.delete(["isle/2"])
        before = [(hit.chunk.id, hit.chunk.text, hit.score) for hit in base.search("honey", 9)]
    encoder = WordEncoder()
    with monkeypatch.context() as patch:
        patch.setattr(VectorIndex, "add", _refuse)  # the saved index is used as it is
        base = open_base(tmp_path, index_kind=kind, encoder=encoder)
    with base:
        assert base.add([document for document in ISLANDS if document.id != "isle/2"]) == AddReport(0, 0, 3)
        assert encoder.encoded == []
        assert [(hit.chunk.id, hit.chunk.text, hit.score) for hit in base.search("honey", 9)] == before
        base.add([ISLANDS[2]])
        assert _found(base, "copper") == ["isle/2"]


def _refuse(*_: object) -> None:
    raise AssertionError("refused")


def test_index_is_rebuilt_when_lost_broken_or_of_another_kind(tmp_path: Path) -> None:
    with open_base(tmp_path) as base:
        base.add(ISLANDS)
    (path,) = tmp_path.glob("index*")
    for spoil, kind in (
        (path.unlink, "flat"),
        (lambda: path.write_bytes(b"junk"), "flat"),
        (lambda: None, "hnsw"),
        (lambda: None, "ivf"),
    ):
        spoil()
        encoder = WordEncoder()
        with open_base(tmp_path, index_kind=kind, encoder=encoder) as base:
            assert base._index.kind == kind and encoder.encoded == []
            assert _found(base, "copper") == ["isle/2"]
        assert VectorIndex.load(path).kind == kind


def test_an_index_that_was_kept_goes_with_the_first_change(tmp_path: Path) -> None:
    with open_base(tmp_path) as base:
        base.add(ISLANDS)
    kept = tmp_path / "index.npz"
    older = kept.read_bytes()
    with open_base(tmp_path) as base:
        base.delete(["isle/1"])
        assert not kept.exists()  # it held the embedding of what was deleted
    assert VectorIndex.load(kept).ids == base._index.ids
    kept.write_bytes(older)
    with open_base(tmp_path) as base:
        assert len(base) == 3 and "isle/1" not in _found(base, "honey", 9)


def test_an_index_that_cannot_be_saved_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, open_base(tmp_path) as base:
        patch.setattr(VectorIndex, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        assert base.add(ISLANDS).added == 4
        base.close()
    assert "index.npz: not saved, and built again at the next start: disk full" in caplog.text
    with open_base(tmp_path) as base:
        assert _found(base, "honey") == ["isle/1"]


def test_kill_before_commit_changes_nothing(tmp_path: Path) -> None:
    with open_base(tmp_path) as base:
        base.add(ISLANDS[:2])
    program = f"""
import os
from pathlib import Path
from ragjax.core import Document
from ragjax.retrieval import chunk_store
from tests.support.shelf import open_base
chunk_store.insert = lambda *_: os._exit(9)
open_base(Path({str(tmp_path)!r})).add([Document("isle/1", "x")])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 9
    with open_base(tmp_path) as base:
        assert _found(base, "honey") == ["isle/1"]
        assert base.document("isle/1")[0].text.startswith("Merrin")


def test_failed_encoding_leaves_the_base_as_it_was(tmp_path: Path) -> None:
    encoder = WordEncoder()
    with open_base(tmp_path, encoder=encoder) as base:
        base.add(ISLANDS[:2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoder, "encode", lambda _: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                base.add(ISLANDS)
        assert len(base) == 2 and base.add(ISLANDS).added == 2


def test_numbers_are_never_used_twice(tmp_path: Path) -> None:
    """An index of the same numbers must hold the same vectors."""
    for round_ in range(3):
        with open_base(tmp_path) as base:
            base.add([Document("d", f"text {round_}")])
            (number,) = base._index.ids
            base.delete(["d"])
        assert number == round_ + 1


# ------------------------------------------------------------------------------------- threads and speed


@KINDS
def test_readers_while_one_writes(kind: IndexKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHUNKS", 8)

    def read() -> None:
        assert _found(base, "Who exports honey?") == ["isle/1"]
        assert base.document("isle/2")[0].title == "Oske"

    with open_base(tmp_path, index_kind=kind) as base:
        base.add(ISLANDS)
        with meanwhile(read):
            for round_ in range(4):
                base.add([Document(f"other/{n}", f"Passage {n} of round {round_}.") for n in range(30)])
            base.delete([f"other/{n}" for n in range(30)])
        assert len(base) == 4


def until_one_waits(base: KnowledgeBase) -> None:
    """Wait until a thread stands at the door of the lock that this one has."""
    while not base._writing._door.locked():
        time.sleep(0.002)


@pytest.mark.parametrize("gone", [["isle/0"], ["long"], ["isle/0", "long"]])
def test_a_deletion_does_not_wait_for_all_chunks_of_a_document(
    gone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the index of a long one, nor if this is what is deleted."""
    monkeypatch.setattr(module, "_BATCH_CHUNKS", 4)
    long = Document("long", "An island exports salt. " * 200)
    with open_base(tmp_path, index_kind=IndexKind.HNSW, max_tokens=64) as base:
        base.add(ISLANDS)
        parts: list[int] = []
        update = base._index.update
        deleter = threading.Thread(target=lambda: (base.delete(gone), parts.append(0)))

        def slow(remove: Sequence[int], ids: Ids, vectors: Vectors) -> None:
            if len(ids) and not parts:
                deleter.start()
                until_one_waits(base)
            if len(ids):
                parts.append(len(ids))
            update(remove, ids, vectors)

        monkeypatch.setattr(base._index, "update", slow)
        base.add([long])
        deleter.join()
        assert parts[:2] == [4, 0] and max(parts) == 4
        assert sum(parts) == 4 if "long" in gone else sum(parts) == len(base.document("long"))
        assert base._index.ids == set(base.numbers) and not set(gone) & base.document_ids
    with open_base(tmp_path, index_kind=IndexKind.HNSW, max_tokens=64) as base:
        assert base._index.ids == set(base.numbers)


def test_a_base_that_is_closed_between_parts_of_a_document_has_all_of_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_CHUNKS", 4)
    base = open_base(tmp_path, index_kind=IndexKind.HNSW, max_tokens=64)
    update, closer = base._index.update, threading.Thread(target=base.close)

    def slow(remove: Sequence[int], ids: Ids, vectors: Vectors) -> None:
        if len(ids):
            closer.start()
            until_one_waits(base)
        update(remove, ids, vectors)

    monkeypatch.setattr(base._index, "update", slow)
    base.add([Document("long", "An island exports salt. " * 200)])
    closer.join()
    assert len(base) == 4
    with open_base(tmp_path, index_kind=IndexKind.HNSW, max_tokens=64) as base:
        assert len(base) == len(base.document("long")) > 4


def test_sizes_follow_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(base: KnowledgeBase) -> list[tuple[str, int]]:
        chunks = {one: base.document(one) for one in sorted(base.document_ids)}
        return [(one, sum(len(c.text.encode()) + c.tokens.nbytes for c in found)) for one, found in chunks.items()]

    with open_base(tmp_path) as base:
        assert base.extent == (0, 0) and base.sizes() == []
        base.add(ISLANDS)
        assert base.sizes() == expected(base) and len(base.sizes()) == 4
        base.add([Document("isle/1", "other " * 200)])
        base.delete(["isle/0"])
        monkeypatch.setattr(chunk_store, "insert", _refuse)
        with pytest.raises(AssertionError):
            base.add([Document("isle/2", "lost")])
        found = base.sizes()
        assert found == expected(base) and base.extent == (3, sum(size for _, size in found))
        assert base.size("isle/1") == found[0][1] and base.size("isle/0") is None
        assert base.sizes(1) == found[:1] and base.sizes(2, last=True) == found[1:]
        assert base.sizes(after="isle/1", before="isle/3") == found[1:2]
        assert base.sizes(1, after="isle/1", last=True) == found[2:] and base.sizes(0) == []
    with open_base(tmp_path) as base:
        assert base.sizes() == found


def test_chunks_are_compared_with_their_checksums(tmp_path: Path) -> None:
    with open_base(tmp_path) as base:
        base.add(ISLANDS)
        assert len(base) == 4 and base.delete(["isle/0"]) == 1
        base.add([ISLANDS[0]])
    open_base(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "chunks.sqlite")) as database, database:
        database.execute("update chunks set text = replace(text, 'honey', 'money')")
    with pytest.raises(ConfigError, match=r"chunk 2 is not as it was written.*add the documents again"):
        open_base(tmp_path)


def test_chunks_keep_the_file_and_place_that_they_are_from(tmp_path: Path) -> None:
    guide = Document("guide", "The keeper climbed. " * 60, "Guide", (Place(0, 1, "Log"), Place(400, 2)), "a/guide.pdf")

    def places(base: KnowledgeBase) -> list[tuple[str, int | None, str | None]]:
        return [(chunk.filename, chunk.page, chunk.heading) for chunk in base.document("guide")]

    with open_base(tmp_path, max_tokens=100) as base:
        base.add([guide, ISLANDS[0]])
        found = places(base)
        assert {("a/guide.pdf", 1, "Log"), ("a/guide.pdf", 2, None)} == set(found)
        assert base.document("isle/0")[0].filename == "" and base.document("isle/0")[0].page is None
    encoder = WordEncoder()
    with open_base(tmp_path, max_tokens=100, encoder=encoder) as base:
        assert places(base) == found
        hits = base.search("keeper", 3)
        assert {(hit.chunk.filename, hit.chunk.page, hit.chunk.heading) for hit in hits} <= set(found)
        encoder.encoded.clear()
        moved = Document("guide", guide.text, "Guide", (Place(0, 7),), "guide.pdf")
        assert base.add([guide]).unchanged == base.add([moved]).replaced == 1
        assert set(places(base)) == {("guide.pdf", 7, None)} and not encoder.encoded  # texts are as they were
    with closing(sqlite3.connect(tmp_path / "chunks.sqlite")) as database, database:
        database.execute("update chunks set page = 8 where page = 7")
    with pytest.raises(ConfigError, match="is not as it was written"):
        open_base(tmp_path, max_tokens=100)
