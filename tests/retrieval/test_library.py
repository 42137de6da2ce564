"""The library: files in stores, what each tenant sees, and what a restart or a kill leaves."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragjax.core import (
    Attachment,
    Chunk,
    ConfigError,
    Counts,
    DamageError,
    DiskFullError,
    File,
    Filter,
    KeptResponse,
    MissingError,
    RequestError,
    Slice,
)
from ragjax.retrieval import chunk_store, chunking, confined, database, ingest
from ragjax.retrieval.catalog import Catalog
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.library import FOLDER, LEAST_BYTES, QUOTA, Library, steady_clock
from tests.support.files import pdf
from tests.support.shelf import Shelf, open_library

Holding = Callable[[KnowledgeBase], tuple[threading.Event, threading.Event]]
Opened = Callable[..., tuple[Library, Shelf]]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens a library as a start does: what was open before is closed."""
    with ExitStack() as held:

        def start(*given: Any, **options: Any) -> tuple[Library, Shelf]:
            held.close()
            library, shelf = open_library(*given, **options)
            held.callback(shelf.close)
            held.callback(library.close)
            return library, shelf

        yield start


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with closing(Shelf()) as shelf:
        yield shelf


@pytest.fixture
def library(shelf: Shelf) -> Iterator[Library]:
    """In memory, over the shelf."""
    with closing(Library(shelf, None, lambda: 1_000_000.0)) as library:
        library.open()
        yield library


@pytest.fixture
def store(library: Library) -> str:
    return library.create("", "s").id


def settled(library: Library, store: str, tenant: str = "") -> Counts:
    """The counts of a store, once nothing is in progress."""
    end = time.monotonic() + 60
    while (counts := library.counts(tenant, store)[0]).in_progress:
        assert time.monotonic() < end
        time.sleep(0.002)
    return counts


def attached(library: Library, store: str, text: str, name: str = "a.txt", tenant: str = "", **fields: Any) -> str:
    """A file of this text in a store, to be read; its id."""
    file = library.upload(tenant, name, "assistants", text.encode()).id
    library.attach(tenant, [Attachment(store, file, 0, **fields)])
    return file


def put(library: Library, store: str, text: str, name: str = "a.txt", tenant: str = "", **fields: Any) -> str:
    """A file of this text in a store, read; its id."""
    file = attached(library, store, text, name, tenant, **fields)
    settled(library, store, tenant)
    return file


def found(library: Library, store: str, question: str, tenant: str = "", **options: object) -> list[str]:
    return [p.chunk.document_id for p in library.search(tenant, store, [question], 10, **options)]


@pytest.mark.parametrize("stored", [True, False], ids=["directory", "memory"])
def test_a_file_in_a_store_is_found_until_it_leaves(opened: Opened, stored: bool, tmp_path: Path) -> None:
    library, shelf = opened(tmp_path if stored else None)
    store = library.create("", "harbour").id
    honey, salt = put(library, store, "Bees make honey."), put(library, store, "The sea holds salt.", "b.md")
    assert found(library, store, "honey") == [honey, salt]
    assert library.counts("", store) == (Counts(completed=2), sum(size for _, size in shelf.get(store).sizes()))
    assert library.passages("", store, salt)[0].text == "b\nThe sea holds salt.\n\n"
    library.detach("", store, honey)
    assert found(library, store, "honey") == [salt] and library.file("", honey).name == "a.txt"
    library.remove("", salt)
    assert found(library, store, "honey") == [] and library.counts("", store)[0] == Counts()
    library.delete("", store)
    with pytest.raises(MissingError):
        library.store("", store)
    assert not list(tmp_path.glob("vs_*"))


def test_a_restart_finds_all_and_goes_on_with_what_was_not_read(opened: Opened, tmp_path: Path) -> None:
    library, shelf = opened(tmp_path)
    store = library.create("acme", "s", {"a": "b"}, 3).id
    honey = put(library, store, "Bees make honey.", tenant="acme", attributes={"year": 1.0}, chunk_tokens=100)
    salt = library.upload("acme", "b.txt", "assistants", b"The sea holds salt.").id
    library.close()
    shelf.close()

    catalog = Catalog(tmp_path / FOLDER / "catalog.sqlite")  # as if the process had been killed just then
    catalog.attach([Attachment(store, salt, 5)], QUOTA, LEAST_BYTES)
    catalog.close()
    library, shelf = opened(tmp_path)
    assert settled(library, store, "acme") == Counts(completed=2)
    kept = library.store("acme", store)
    assert (kept.name, kept.metadata, kept.days) == ("s", {"a": "b"}, 3)
    assert library.content("acme", salt) == b"The sea holds salt."
    assert found(library, store, "salt", "acme")[0] == salt
    assert library.attachment("acme", store, honey).attributes == {"year": 1.0}


def test_a_knowledge_base_is_brought_in_line_with_the_catalog(opened: Opened, tmp_path: Path) -> None:
    library, shelf = opened(tmp_path)
    store, other = library.create("", "s").id, library.create("", "t").id
    honey, salt = put(library, store, "Bees make honey."), put(library, store, "The sea holds salt.")
    library.close()
    shelf.get(store).delete([salt])  # killed between two steps: of an attachment, and
    shelf.close()
    catalog = Catalog(tmp_path / FOLDER / "catalog.sqlite")
    catalog.detach(store, honey)  # of a removal,
    catalog.remove_store(other)  # and of a deletion
    catalog.close()
    library, shelf = opened(tmp_path)
    settled(library, store)
    assert shelf.get(store).document_ids == {salt}
    assert [path.name for path in tmp_path.glob("vs_*")] == [store]


def test_tenants_see_their_own_and_the_servers(opened: Opened) -> None:
    library, _ = opened(own=("isles",))
    mine, file = library.create("acme", "mine"), library.upload("acme", "a.txt", "assistants", b"a")
    for tenant in ("umbra", ""):
        assert [store.id for store in library.stores(tenant)] == ["isles"] and library.files(tenant) == []
        for call in (
            lambda tenant=tenant: library.store(tenant, mine.id),
            lambda tenant=tenant: library.delete(tenant, mine.id),
            lambda tenant=tenant: library.search(tenant, mine.id, ["a"], 1),
            lambda tenant=tenant: library.file(tenant, file.id),
            lambda tenant=tenant: library.content(tenant, file.id),
            lambda tenant=tenant: library.remove(tenant, file.id),
            lambda tenant=tenant: library.attach(tenant, [Attachment("isles", file.id, 0)]),
        ):
            with pytest.raises(RequestError):
                call()
    theirs = library.create("umbra", "theirs")
    with pytest.raises(MissingError):
        library.attach("umbra", [Attachment(theirs.id, file.id, 0)])
    assert [store.id for store in library.stores("acme")] == ["isles", mine.id]


def test_the_servers_own_bases_are_read_only_stores(opened: Opened) -> None:
    library, _ = opened(own=("isles",))
    assert library.counts("", "isles")[0] == Counts(completed=4)
    (first, *_) = library.search("", "isles", ["honey"], 2)
    assert (first.chunk.document_id, first.name, first.attributes) == ("isle/1", "Merrin", {})
    assert library.attachment("", "isles", "isle/1").state == "completed"
    file = library.upload("", "a.txt", "assistants", b"a")
    for call in (
        lambda: library.attach("", [Attachment("isles", file.id, 0)]),
        lambda: library.detach("", "isles", "isle/1"),
        lambda: library.update("", "isles", name="x"),
        lambda: library.delete("", "isles"),
    ):
        with pytest.raises(RequestError, match="server's own"):
            call()


def test_no_texts_are_read_to_tell_of_an_own_store(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    library, shelf = opened(own=("isles",))
    statements: list[str] = []
    shelf.get("isles")._database.set_trace_callback(statements.append)
    counts, size = library.counts("", "isles")
    assert (counts, size) == (Counts(completed=4), sum(one.usage for one in library.attachments("", "isles")))
    assert [one.file for one in library.attachments("", "isles", part=Slice(2, "isle/0"))] == ["isle/1", "isle/2"]
    part = Slice(2, before="isle/3", last=True)
    assert [one.file for one in library.attachments("", "isles", part=part)] == ["isle/1", "isle/2"]
    assert library.within("", "isles", Filter("eq", "a", 1)) == frozenset()
    assert library.within("", "isles", Filter("ne", "a", 1)) is None
    assert statements and not any("chunks" in statement for statement in statements)
    del statements[:]
    assert library.counts("", "isles") == (counts, size) and not statements
    shelf.get("isles").delete(["isle/0"])
    assert library.counts("", "isles")[0] == Counts(completed=3)


def test_errors_name_what_is_wrong_in_an_order_of_their_own(opened: Opened) -> None:
    now = 0.0
    library, _ = opened(now=lambda: now)
    store = library.create("", "s", days=1).id
    file = put(library, store, "honey")
    for questions in ([" "], ["honey", "\u00a0"]):
        for place in (store, library.create("", "empty").id):
            with pytest.raises(RequestError, match="a query is empty") as caught:
                library.search("", place, questions, 1)
            assert caught.value.param == "query"
    with pytest.raises(MissingError):
        library.within("", "vs_0", None)
    now = 200_000.0
    with pytest.raises(RequestError, match="has expired") as caught:
        library.passages("", store, file)
    assert caught.value.code == "expired"


def test_filters_find_what_stands_far_behind_the_nearest(library: Library, store: str) -> None:
    for n in range(12):
        put(library, store, f"honey honey number {n}", attributes={"year": float(n)})
    far = put(library, store, "salt in blue boxes", attributes={"year": 99.0})
    wanted = Filter("gte", "year", 99)
    assert [p.chunk.document_id for p in library.search("", store, ["honey"], 1, wanted)] == [far]
    assert found(library, store, "honey", wanted=Filter("gt", "year", 99)) == []
    near = library.search("", store, ["honey number 3", "salt"], 13, None, 0.2)
    assert far in {p.chunk.document_id for p in near} and all(p.score >= 0.2 for p in near)
    assert [p.score for p in near] == sorted((p.score for p in near), reverse=True)
    library.detach("", store, far)
    assert found(library, store, "honey", wanted=wanted) == []


def test_a_store_expires_after_its_last_use(opened: Opened, tmp_path: Path) -> None:
    now = 0.0
    library, shelf = opened(tmp_path, now=lambda: now)
    store = library.create("", "s", days=1).id
    put(library, store, "honey")
    now = 86_000.0
    library.use("", store)
    now = 86_000.0 + 86_399
    assert found(library, store, "honey")
    now += 86_401
    assert library.store("", store).expired
    for call in (lambda: library.use("", store), lambda: library.search("", store, ["a"], 1)):
        with pytest.raises(RequestError, match="has expired"):
            call()
    assert not (tmp_path / store).exists()
    library, shelf = opened(tmp_path, now=lambda: now)
    assert library.store("", store).expired and not shelf.owned(store)
    library.delete("", store)


def test_a_file_expires(opened: Opened, tmp_path: Path) -> None:
    now = 10_000.0
    library, shelf = opened(tmp_path, now=lambda: now)
    store = library.create("", "s").id
    files = [library.upload("", name, "assistants", b"honey " + name.encode(), 3600).id for name in ("a.md", "b.md")]
    library.attach("", [Attachment(store, file, 0) for file in files])
    kept = put(library, store, "honey")
    assert library.file("", files[0]).expires == 13_600 and set(found(library, store, "honey")) == {*files, kept}
    now = 13_599.0
    assert len(library.files("")) == 3
    now = 13_600.0
    assert found(library, store, "honey") == [kept] and library.counts("", store)[0].total == 1
    assert [file.id for file in library.files("")] == [kept]
    for call in (library.file, library.content, library.remove):
        with pytest.raises(MissingError):
            call("", files[0])
    late = library.upload("", "c.md", "assistants", b"salt in blue boxes", 3600).id
    library.attach("", [Attachment(store, late, 0)])
    settled(library, store)
    library.close()
    shelf.close()
    now = 99_999.0
    library, shelf = opened(tmp_path, now=lambda: now)
    assert shelf.get(store).document_ids == {kept}
    library.close()
    shelf.close()
    kept_bytes = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"honey" in kept_bytes and b"salt in blue boxes" not in kept_bytes


def test_a_clock_that_is_set_while_files_are_kept_changes_nothing(opened: Opened) -> None:
    wall, passed = [1_000_000.0], 50.0
    library, _ = opened(now=steady_clock(lambda: wall[0], lambda: passed))
    file = library.upload("", "a.md", "assistants", b"honey", 7200)
    for hours in (100, -100):
        wall[0] = 1_000_000.0 + hours * 3600
        assert library.files("") == [file]
    passed += 7200
    assert library.files("") == []


def test_a_clock_that_is_set_back_between_two_starts_takes_no_new_response(opened: Opened, tmp_path: Path) -> None:
    responses = [KeptResponse(name, None, "[]", "x" * 98) for name in "abcd"]
    for hour, two in ((10, responses[:2]), (0, responses[2:])):
        library, shelf = opened(tmp_path, now=lambda hour=hour: hour * 3600, quota=16 * 200)
        for one in two:
            library.keep_response("acme", one)
        assert [library.response("acme", one.id) for one in two] == two
        library.close()
        shelf.close()


def test_a_file_is_discarded_that_no_store_has(opened: Opened) -> None:
    now = 1_000_000.0
    library, _ = opened(now=lambda: now)
    kept, brief = library.create("acme", "kept").id, library.create("acme", "brief", days=1).id
    file = put(library, brief, "Bees make honey.", tenant="acme")
    library.attach("acme", [Attachment(kept, file, 0)])
    settled(library, kept, "acme")
    with pytest.raises(MissingError):
        library.discard("umbra", file)
    with pytest.raises(RequestError, match="is in a vector store") as caught:
        library.discard("acme", file)
    assert caught.value.code == "in_use" and found(library, kept, "honey", "acme") == [file]
    library.detach("acme", kept, file)
    with pytest.raises(RequestError, match="is in a vector store"):
        library.discard("acme", file)
    now += 86_400  # an expired store cannot be used any more
    library.discard("acme", file)
    assert library.files("acme") == []


def test_nothing_is_attached_while_a_file_is_discarded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    store, file = library.create("", "s").id, library.upload("", "a.txt", "assistants", b"honey").id
    steps = set()

    def noted(name: str, step: Callable[..., object], *given: object) -> object:
        steps.add((name, library._attaching.locked()))
        return step(*given)

    for name in ("attach", "attached", "remove_file"):
        monkeypatch.setattr(library._catalog, name, partial(noted, name, getattr(library._catalog, name)))
    library.attach("", [Attachment(store, file, 0)])
    library.detach("", store, file)
    library.discard("", file)
    assert steps == {("attach", True), ("attached", True), ("remove_file", True)}


def test_a_tenant_has_a_quota_of_files(opened: Opened) -> None:
    library, _ = opened(quota=10_000)
    first = library.upload("acme", "a.txt", "assistants", b"x" * 5000)
    library.upload("acme", "b.txt", "assistants", b"x")  # counts as 4096
    with pytest.raises(RequestError, match="delete some") as refused:
        library.upload("acme", "c.txt", "assistants", b"x")
    assert refused.value.code == "quota_exceeded" and len(library.files("acme")) == 2
    assert library.upload("umbra", "a.txt", "assistants", b"x" * 10_000).size == 10_000
    library.remove("acme", first.id)
    assert library.upload("acme", "c.txt", "assistants", b"x" * 5904).size == 5904


def test_copies_in_stores_have_the_same_quota(opened: Opened) -> None:
    now = 1_000_000.0
    library, _ = opened(now=lambda: now, quota=10_000)
    first, second = library.create("acme", "a", days=1).id, library.create("acme", "b").id
    file = library.upload("acme", "a.txt", "assistants", b"x" * 5000).id
    small = library.upload("acme", "b.txt", "assistants", b"x").id  # counts as 4096
    for store in (first, second):
        library.attach("acme", [Attachment(store, file, 0)])
        library.attach("acme", [Attachment(store, file, 0)])  # replaced, and counted once
    with pytest.raises(RequestError, match="take some out") as refused:
        library.attach("acme", [Attachment(second, small, 0)])
    assert refused.value.code == "quota_exceeded"
    assert [one.file for one in library.attachments("acme", second)] == [file]
    other = library.create("umbra", "c").id
    library.attach("umbra", [Attachment(other, library.upload("umbra", "a.txt", "assistants", b"x").id, 0)])
    now += 86_400  # what has expired holds nothing
    assert library.store("acme", first).expired
    library.attach("acme", [Attachment(second, small, 0)])


def test_a_part_of_a_list_is_read_alone(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    library, _ = opened(own=("isles", "seas"))
    made = ["isles", "seas", *(library.create("", str(n)).id for n in range(4))]
    files = [library.upload("", "a.txt", "assistants" if n % 2 else "user_data", b"x").id for n in range(4)]
    library.attach("", [Attachment(made[2], file, 0) for file in files])
    settled(library, made[2])
    read: list[str] = []
    rows = library._catalog._rows

    def noted(sql: str, *values: object, **named: object) -> list[Any]:
        found = rows(sql, *values, **named)
        read.extend(row[0] for row in found)
        return found

    monkeypatch.setattr(library._catalog, "_rows", noted)

    def stores(count: int, **bounds: Any) -> list[str]:
        del read[:]
        found = [one.id for one in library.stores("", Slice(count, **bounds))]
        assert len(read) <= count
        return found

    assert [one.id for one in library.stores("")] == made
    for low in (None, *range(6)):
        for high in (None, *range(6)):
            bounds = {"after": None if low is None else made[low], "before": None if high is None else made[high]}
            between = made[0 if low is None else low + 1 : high]
            assert stores(2, **bounds) == between[:2] and stores(2, **bounds, last=True) == between[-2:]
    del read[:]
    assert [one.id for one in library.files("", "assistants", Slice(1, files[0]))] == files[1:2]
    part = Slice(1, before=files[2], last=True)
    assert [one.file for one in library.attachments("", made[2], part=part)] == files[1:2]
    assert library.attachments("", made[2], state="failed", part=Slice(1)) == []
    assert len(read) <= 4, "the store is looked up for each list of what is in it"


def test_a_damaged_file_fails_where_it_is_read(opened: Opened, tmp_path: Path) -> None:
    library, shelf = opened(tmp_path)
    store = library.create("", "s").id
    bad, good = (library.upload("", "a.txt", "assistants", text).id for text in (b"wax", b"honey"))
    library.close()
    shelf.close()
    with sqlite3.connect(tmp_path / FOLDER / "catalog.sqlite") as database:
        database.execute("update files set content = x'00' where id = ?", (bad,))
    database.close()
    library, shelf = opened(tmp_path)
    with pytest.raises(DamageError, match=f"'{bad}' is damaged .* upload it again"):
        library.content("", bad)
    assert library.content("", good) == b"honey" and library.damaged == 1
    library.attach("", [Attachment(store, file, 0) for file in (bad, good)])
    assert settled(library, store) == Counts(completed=1, failed=1) and library.damaged == 2
    code, message = library.attachment("", store, bad).error
    assert code == "server_error" and "upload it again" in message


def test_a_file_that_cannot_be_read_fails_by_itself(library: Library, store: str) -> None:
    bad = put(library, store, "%PDF-1.4 broken", "a.pdf")
    blank, good = put(library, store, "  \n ", "b.md"), put(library, store, "honey", "c.html")
    whole = library.upload("", "d.pdf", "user_data", pdf("A lighthouse burns oil.")).id
    library.attach("", [Attachment(store, whole, 0)])
    assert settled(library, store) == Counts(completed=2, failed=2)
    for file, words in ((bad, "not a readable PDF"), (blank, "no text")):
        code, message = library.attachment("", store, file).error
        assert code == "invalid_file" and words in message
        assert library.passages("", store, file) == ()
    assert found(library, store, "lighthouse oil") == [whole, good]


@pytest.mark.parametrize(
    ("name", "purpose", "content", "words"),
    [
        ("a.exe", "assistants", b"x", r"these types can: Markdown, text"),
        ("a", "assistants", b"x", "cannot be read"),
        ("a.txt", "fine-tune", b"x", "purpose must be"),
        ("a.txt", "assistants", b"", "is empty"),
        ("a\x1b[2J.txt", "assistants", b"x", "no control characters"),
        ("a" * 1021 + ".txt", "assistants", b"x", "may have 1024 characters"),
    ],
)
def test_what_could_not_be_searched_is_not_taken(
    library: Library, name: str, purpose: str, content: bytes, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        library.upload("", name, purpose, content)
    assert library.files("") == []


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch) -> Holding:
    """Have a knowledge base embed no chunk with "slow" before it is told to: when it is asked to, and that it may."""

    def hold(base: KnowledgeBase) -> tuple[threading.Event, threading.Event]:
        begun, goes_on, encode = threading.Event(), threading.Event(), base._encoder.encode

        def slow(texts: Sequence[str], query: bool = False) -> object:
            if any("slow" in text for text in texts):
                begun.set()
                assert goes_on.wait(120)
            return encode(texts)

        monkeypatch.setattr(base._encoder, "encode", slow)
        return begun, goes_on

    return hold


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stores of the files that are read, as each of these comes to its end."""
    stores, settle = list[str](), Catalog.settle
    monkeypatch.setattr(Catalog, "settle", lambda self, one: stores.append(one.store) or settle(self, one))
    return stores


def waited_for(call: Callable[[], object]) -> bool:
    """Whether a call ends soon."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_nobody_waits_for_a_file_that_is_read(library: Library, shelf: Shelf, embedding: Holding) -> None:
    store, other = library.create("acme", "s").id, library.create("acme", "t", days=1).id
    old, older = (put(library, store, f"honey {n}", tenant="acme") for n in range(2))
    begun, goes_on = embedding(shelf.get(store))
    attached(library, store, "slow honey", tenant="acme")
    assert begun.wait(60)
    assert waited_for(lambda: library.detach("acme", store, old)) and found(library, store, "honey", "acme") == [older]
    assert waited_for(lambda: library.remove("acme", older)) and found(library, store, "honey", "acme") == []
    assert waited_for(lambda: library.delete("acme", store)) and not shelf.owned(store)
    goes_on.set()
    put(library, other, "salt", tenant="acme")


@pytest.mark.parametrize("leave", ["detach", "remove"])
def test_a_file_that_leaves_while_it_is_embedded_is_never_found(
    library: Library, shelf: Shelf, store: str, embedding: Holding, leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, stored = shelf.get(store), []
    begun, goes_on = embedding(base)
    insert = chunk_store.insert

    def noted(database: sqlite3.Connection, chunk: Chunk, row: object) -> int:
        stored.append(chunk.document_id)
        return insert(database, chunk, row)

    monkeypatch.setattr(chunk_store, "insert", noted)
    file = attached(library, store, "slow honey")
    assert begun.wait(60)
    library.remove("", file) if leave == "remove" else library.detach("", store, file)
    goes_on.set()
    library.close()
    assert stored == [] and base.document_ids == frozenset()


def test_a_file_that_leaves_and_comes_back_is_there(
    library: Library, shelf: Shelf, store: str, embedding: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shelf.get(store)
    file = put(library, store, "honey")
    delete = base.delete

    def late(*ids: object, **options: object) -> int:
        library.attach("", [Attachment(store, file, 0)])
        settled(library, store)
        return delete(*ids, **options)

    monkeypatch.setattr(base, "delete", late)
    library.detach("", store, file)
    assert library.attachment("", store, file).state == "completed" and found(library, store, "honey") == [file]


def test_a_long_file_that_leaves_is_embedded_no_further(
    library: Library, shelf: Shelf, store: str, embedding: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragjax.retrieval.knowledge._STEP_CHUNKS", 2)
    base = shelf.get(store)
    begun, goes_on = embedding(base)
    embedded, encode = [], base._encoder.encode
    monkeypatch.setattr(base._encoder, "encode", lambda texts: embedded.append(len(texts)) or encode(texts))
    file = attached(library, store, "slow honey " * 300)
    assert begun.wait(60)
    library.remove("", file)
    goes_on.set()
    library.close()
    assert embedded == [2]


def test_tenants_take_turns(library: Library, shelf: Shelf, embedding: Holding, read: list[str]) -> None:
    stores = {tenant: library.create(tenant, "s").id for tenant in ("acme", "umbra", "")}
    begun, goes_on = embedding(shelf.get(stores["acme"]))
    for text in ("slow", "1", "2", "3"):
        attached(library, stores["acme"], text, tenant="acme")
    assert begun.wait(60)
    for tenant in ("umbra", "umbra", ""):
        attached(library, stores[tenant], "x", tenant=tenant)
    goes_on.set()
    for tenant, store in stores.items():
        settled(library, store, tenant)
    library.close()
    names = {store: tenant for tenant, store in stores.items()}
    assert [names[store] for store in read] == ["acme", "acme", "umbra", "", "acme", "umbra", "acme"]


@pytest.mark.parametrize("closed", [False, True])
def test_a_long_file_gives_way_to_other_tenants(
    opened: Opened, embedding: Holding, read: list[str], closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragjax.retrieval.knowledge._STEP_CHUNKS", 2)
    library, shelf = opened(tmp_path)
    stores = [library.create(tenant, "s").id for tenant in ("acme", "umbra")]
    begun, goes_on = embedding(shelf.get(stores[0]))
    for tenant, store, text in zip(("acme", "umbra"), stores, ("slow honey " * 300, "salt"), strict=True):
        attached(library, store, text, tenant=tenant)
        assert begun.wait(60)
    if closed:  # it does not wait for the rest of the file
        closing = threading.Thread(target=library.close)
        closing.start()
        while not library._ingest._closed:
            time.sleep(0.002)
        goes_on.set()
        closing.join(60)
        shelf.close()
        assert read == []
        library, shelf = opened(tmp_path)
    goes_on.set()
    for tenant, store in zip(("acme", "umbra"), stores, strict=True):
        assert settled(library, store, tenant) == Counts(completed=1)
    assert closed or read == stores[::-1]


def test_a_long_text_gives_way_to_other_tenants_while_it_is_cut(
    library: Library, shelf: Shelf, embedding: Holding, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "_STEP_BLOCKS", 1)
    stores = [library.create(tenant, "s").id for tenant in ("acme", "umbra", "third")]
    begun, goes_on = embedding(shelf.get(stores[2]))
    split = Chunker._split
    monkeypatch.setattr(Chunker, "_split", lambda *given: read.append("block") or split(*given))
    long = "honey " * 10_000
    for tenant, store, text in (("third", stores[2], "slow"), ("acme", stores[0], long), ("umbra", stores[1], "salt")):
        attached(library, store, text, tenant=tenant)
        assert begun.wait(60)
    goes_on.set()
    for tenant, store in zip(("acme", "umbra", "third"), stores, strict=True):
        assert settled(library, store, tenant) == Counts(completed=1)
    blocks = len(long) // chunking._BLOCK_CHARS
    assert read.index(stores[1]) < blocks < read.index(stores[0])


def test_a_long_pdf_gives_way_to_other_tenants(
    library: Library, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [library.create(tenant, "s").id for tenant in ("acme", "umbra")]
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(confined.ReadingProcess):
        def wait(self, seconds: float) -> bool:
            begun.set()
            assert goes_on.wait(120)
            read.append("step")
            return read.count("step") > 6 and super().wait(seconds)  # whatever the machine's speed

    monkeypatch.setattr(confined, "ReadingProcess", Slow)
    monkeypatch.setattr(confined, "_IDLE", idle := deque[confined.ReadingProcess]())
    book = pdf(*(f"honey {page}" for page in range(9)))
    for tenant, store, name, content in zip(
        ("acme", "umbra"), stores, ("a.pdf", "a.txt"), (book, b"salt"), strict=True
    ):
        library.attach(tenant, [Attachment(store, library.upload(tenant, name, "assistants", content).id, 0)])
        assert begun.wait(60)
    goes_on.set()
    for tenant, store in zip(("acme", "umbra"), stores, strict=True):
        assert settled(library, store, tenant) == Counts(completed=1)
    assert 1 <= read.index(stores[1]) <= 3 < read.index(stores[0])
    (passage,) = library.search("acme", stores[0], ["honey"], 1)
    assert all(f"honey {page}" in passage.chunk.text for page in range(9))
    library.close()
    idle.pop().close()


@pytest.mark.parametrize("way", ["remove", "detach", "store"])
def test_nothing_on_the_disk_holds_what_was_deleted(opened: Opened, way: str, tmp_path: Path) -> None:
    library, _ = opened(tmp_path)
    store = library.create("", "s").id
    kept = put(library, store, "The sea holds salt. " * 50)
    file = put(library, store, "\n\n".join(f"SECRET-{n:05} of Mrs Example" for n in range(60)), "a.md")
    secret = (b"SECRET-", np.frombuffer(b"SECRET-", np.uint8).astype(np.int32).tobytes())

    def holders() -> set[str]:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {path.name for path in files if any(text in path.read_bytes() for text in secret)}

    assert {"catalog.sqlite", "chunks.sqlite"} <= holders()
    if way == "detach":
        library.detach("", store, file)
        assert holders() == {"catalog.sqlite"}
    if way == "store":
        library.delete("", store)
    library.remove("", file)
    assert holders() == set()
    assert library.content("", kept)


def test_a_file_that_is_put_into_a_store_again_is_read_as_the_last_call_says(
    library: Library, shelf: Shelf, store: str, embedding: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = embedding(shelf.get(store))
    first, file = (library.upload("", "a.txt", "assistants", b"slow honey " * 300).id for _ in range(2))
    library.attach("", [Attachment(store, first, 0)])
    assert begun.wait(60)
    read: list[str] = []
    monkeypatch.setattr(library._catalog, "name", lambda file: read.append(file) or "a.txt")
    for size in (100, 200, 400):
        library.attach("", [Attachment(store, file, 0, chunk_tokens=size)])
    library.attach("", [Attachment(store, first, 0, chunk_tokens=100)])  # while it is read as it was asked for before
    goes_on.set()
    assert settled(library, store) == Counts(completed=2)
    library.close()
    assert read == [file, first], "each once"
    sizes = {one: max(len(chunk.tokens) for chunk in shelf.get(store).document(one)) for one in (first, file)}
    assert sizes[first] <= 100 and 200 < sizes[file] <= 400


def test_several_files_are_attached_together_or_not_at_all(library: Library, store: str) -> None:
    files = [library.upload("", f"{n}.txt", "assistants", b"x" * n).id for n in (1, 2)]
    with pytest.raises(MissingError):
        library.attach("", [Attachment(store, files[0], 0), Attachment(store, "file-0", 0)])
    assert library.counts("", store)[0].total == 0
    library.attach("", [Attachment(store, file, 0) for file in files])
    assert settled(library, store) == Counts(completed=2)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_store_that_expires_while_nobody_serves_leaves_the_disk(
    opened: Opened, deleted: bool, tmp_path: Path
) -> None:
    """Killed between the note that it has expired and the removal, too."""
    library, shelf = opened(tmp_path, now=lambda: 0.0)
    store = library.create("", "s", days=1).id
    put(library, store, "Bees make honey.")
    library.close()
    shelf.close()
    if deleted:
        catalog = Catalog(tmp_path / FOLDER / "catalog.sqlite")
        catalog.expire_store(store)
        catalog.close()
    assert (tmp_path / store).exists()
    library, shelf = opened(tmp_path, now=lambda: 200_000.0)
    assert not (tmp_path / store).exists() and not shelf.owned(store)
    assert library.store("", store).expired
    library.delete("", store)
    assert library.stores("") == []


def test_stores_have_an_end(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragjax.retrieval.library.STORES_OF_TENANT", 2)
    monkeypatch.setattr(library._catalog, "stores", None)  # they are counted, not read
    first, _ = library.create("acme", "a"), library.create("acme", "b")
    with pytest.raises(RequestError, match="you have 2 vector stores") as caught:
        library.create("acme", "c")
    assert caught.value.code == "quota_exceeded"
    library.create("", "of somebody else")
    library.delete("acme", first.id)
    library.create("acme", "c")


def test_a_store_that_cannot_be_made_is_not_listed(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, shelf = opened(tmp_path)

    def fail(name: str | None = None, owner: str | None = None) -> KnowledgeBase:
        (tmp_path / str(name)).mkdir()
        raise ConfigError("unable to open database file")

    with monkeypatch.context() as changed, pytest.raises(ConfigError):
        changed.setattr(shelf, "make", fail)
        library.create("", "s")
    assert library.stores("") == [] and not list(tmp_path.glob("vs_*"))


@pytest.mark.parametrize("gone", ["file", "store"])
def test_what_is_deleted_while_it_is_attached_is_missing(
    library: Library, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = library.create("", "s").id, library.upload("", "a.txt", "assistants", b"honey").id
    look = library.file

    def remove_after(tenant: str, wanted: str) -> File:
        seen = look(tenant, wanted)
        monkeypatch.setattr(library, "file", look)
        library.remove("", file) if gone == "file" else library.delete("", store)
        return seen

    monkeypatch.setattr(library, "file", remove_after)
    with pytest.raises(MissingError, match="was deleted just now"):
        library.attach("", [Attachment(store, file, 0)])


def test_a_full_disk_is_one_error_and_leaves_room_to_delete(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, _ = opened(tmp_path)
    kept = library.upload("", "a.txt", "assistants", b"salt " * 20_000).id
    catalog = library._catalog
    catalog._database.execute(f"pragma max_page_count = {catalog._database.execute('pragma page_count').fetchone()[0]}")
    with pytest.raises(DiskFullError, match="the server's disk is full: delete files"):
        library.upload("", "b.txt", "assistants", b"salt " * 20_000)

    (spare,) = tmp_path.rglob("*.spare")
    assert spare.stat().st_size == database.SPARE
    change, full = Catalog._change, [True]

    def first_full(self: Catalog, sql: str, *values: object) -> int:
        if full and full.pop():
            raise DiskFullError("full")
        assert not spare.exists(), "its room is there for the deletion"
        return change(self, sql, *values)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "_change", first_full)
        library.remove("", kept)
    assert library.files("") == [] and spare.exists()
    assert library.upload("", "b.txt", "assistants", b"salt " * 20_000)


def test_a_file_for_which_the_disk_had_no_room_is_read_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "RETRY_S", 0.05)
    add, full = KnowledgeBase.add_steps, [True]

    def first_full(self: KnowledgeBase, *given: Any, **named: Any) -> Any:
        if full and full.pop():
            raise DiskFullError("the disk is full")
        return add(self, *given, **named)

    monkeypatch.setattr(KnowledgeBase, "add_steps", first_full)
    store = library.create("", "harbour").id
    assert put(library, store, "The sea holds salt.") in found(library, store, "salt")
    assert library.counts("", store)[0] == Counts(completed=1)


def test_responses_outlive_a_restart_and_leave_by_age_and_size(opened: Opened, tmp_path: Path) -> None:
    now = [1_000_000.0]

    def started() -> Library:
        return opened(tmp_path, now=lambda: now[0], quota=16 * 300)[0]

    def kept(name: str, previous: str | None = None) -> KeptResponse:
        return KeptResponse(name, previous, "[]", "x" * 98)

    library = started()
    library.keep_response("acme", kept("a"))
    library.keep_response("acme", kept("b", "a"))
    library.keep_response("umbra", kept("u"))
    library = started()
    now[0] += 1
    library.keep_response("acme", kept("c"))
    now[0] += 1
    assert [one.id for one in library.conversation("acme", "b")] == ["a", "b"], "it is used: c is the oldest now"
    library.keep_response("acme", kept("d", "b"))
    assert [one.id for one in library.conversation("acme", "d")] == ["a", "b", "d"]
    with pytest.raises(MissingError):
        library.response("acme", "c")
    library.remove_response("acme", "a")
    with pytest.raises(RequestError, match="'a' is not kept"):
        library.conversation("acme", "d")
    assert library.response("umbra", "u") == kept("u")
    now[0] += 31 * 86_400
    library.keep_response("acme", kept("e"))
    with pytest.raises(MissingError):
        library.response("umbra", "u")
