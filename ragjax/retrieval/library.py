"""The library: files that clients upload, and stores, which are knowledge bases that the files fill.

A store's id is the name of its knowledge base. The bases that the server was started with are stores that everybody
sees and nobody changes. A file becomes one document, whose id is the file's; a thread of its own reads and embeds it.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ragjax.core import (
    CHUNK_TOKENS,
    PURPOSES,
    WHOLE,
    Attachment,
    Attributes,
    Chunk,
    Counts,
    File,
    Filter,
    KeptResponse,
    MissingError,
    Passage,
    RequestError,
    Slice,
    State,
    Store,
    has_controls,
    invalid,
    is_unicode,
)
from ragjax.retrieval.catalog import Catalog
from ragjax.retrieval.formats import KINDS, SUFFIXES
from ragjax.retrieval.ingest import Ingest
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.registry import KnowledgeRegistry

NAME_CHARS = 1024
"""Characters of a file's name: every passage has it."""
QUOTA = 2**30
"""Bytes of files that a tenant may keep."""
LEAST_BYTES = 4096
"""What a file counts as, at least: a quota bounds the number of files too."""

FOLDER = ".library"
"""Beside the folders of the knowledge bases; none of them can have this name."""
RESPONSE_DAYS = 30
"""Days for which a response is kept after its last use, as OpenAI does."""
RESPONSE_SHARE = 16
"""Responses of a tenant may have this part of what its files may have, beside them."""
STORES_OF_TENANT = 1000
"""Stores that a tenant may have; each keeps two files open."""
_ID = re.compile(r"vs_[0-9a-f]{24}")


def steady_clock(
    wall: Callable[[], float] = time.time,
    passed: Callable[[], float] = lambda: time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)),
) -> Callable[[], float]:
    """A clock that shows the time as it was when it was made, and what has passed since, whatever the other one does.

    Files must not expire because a clock was set wrong for a while. passed: counts while the machine sleeps, too.
    """
    began = wall() - passed()
    return lambda: began + passed()


class Library:
    """Files and stores of tenants ("": of nobody). Any thread may call it; whatever is not the tenant's is not there.

    directory: where the knowledge bases are kept; None keeps all in memory. quota: most bytes of files of a tenant,
    each of at least `LEAST_BYTES`; and of the files in its stores, where one counts for each store that it is in. now:
    seconds since the epoch.
    """

    def __init__(
        self,
        bases: KnowledgeRegistry[KnowledgeBase],
        directory: Path | None,
        now: Callable[[], float] | None = None,
        quota: int = QUOTA,
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        self.chunk_tokens = chunk_tokens
        self._catalog = Catalog(None if directory is None else directory / FOLDER / "catalog.sqlite")
        self._ingest = Ingest(self._catalog, bases)
        self._bases = bases
        self._now = now = steady_clock() if now is None else now
        self._quota = quota
        self._expiring = threading.Lock()
        self._due: int | None = None  # when the next file expires
        self._directory = directory
        self._began = int(now())
        self._attaching = threading.Lock()

    def open(self) -> None:
        with self._expiring:
            self._due = self._catalog.next_expiry()
        self.expire()
        kept = self._catalog.owners()
        owners = {store: tenant for store, tenant in kept.items() if not self._expired(tenant, store)}
        for folder in () if self._directory is None else self._directory.iterdir():
            if _ID.fullmatch(folder.name) and folder.name not in owners:  # the process ended before it was deleted
                shutil.rmtree(folder, ignore_errors=True)
        for store, tenant in owners.items():
            base = self._bases.make(store, tenant)
            wanted = {
                one.file: one for one in self._catalog.attachments(store) if one.state not in ("failed", "cancelled")
            }
            base.delete(base.document_ids - wanted.keys())
            for one in wanted.values():
                if one.state == "in_progress" or (one.state == "completed" and one.file not in base.document_ids):
                    self._catalog.reopen(store, one.file)
                    self._ingest.start(tenant, store, one.file)

    @property
    def reading(self) -> bool:
        return self._ingest.running

    def close(self) -> None:
        """Stop reading files. What was not finished goes on when the library is opened again."""
        self._ingest.close()
        self._catalog.close()

    def upload(self, tenant: str, name: str, purpose: str, content: bytes, seconds: int | None = None) -> File:
        """Keep a file. seconds: until it expires. RequestError: it cannot be searched in, or is beyond the quota."""
        if purpose not in PURPOSES:
            reason = f"files serve searches here: purpose must be {' or '.join(PURPOSES)}, not {purpose!r}"
            raise invalid("purpose", reason)
        if Path(name).suffix.lower() not in SUFFIXES or not is_unicode(name):
            reason = f"the file {name!r} cannot be read: files of these types can: {KINDS}"
            raise RequestError(reason, param="file", code="unsupported_file")
        if len(name) > NAME_CHARS or has_controls(name):
            reason = f"the file's name may have {NAME_CHARS} characters, and no control characters"
            raise invalid("file", reason)
        if not content:
            raise invalid("file", f"the file {name!r} is empty")
        self.expire()
        now = int(self._now())
        file = File(f"file-{_new_id()}", name, purpose, len(content), now, None if seconds is None else now + seconds)
        if not self._catalog.add_file(tenant, file, content, self._quota, LEAST_BYTES):
            reason = (
                f"all your files together may have {self._quota / 2**20:g} MiB: delete some, or upload a smaller one"
            )
            raise RequestError(reason, param="file", code="quota_exceeded")
        if seconds is not None:
            with self._expiring:
                self._due = self._catalog.next_expiry()
        return file

    def files(self, tenant: str, purpose: str | None = None, part: Slice = WHOLE) -> list[File]:
        self.expire()
        return self._catalog.files(tenant, purpose, part)

    def file(self, tenant: str, file: str) -> File:
        self.expire()
        found = self._catalog.file(tenant, file)
        if found is None:
            raise MissingError(f"no file {file!r}", param="file_id", code="not_found")
        return found

    def content(self, tenant: str, file: str) -> bytes:
        return self._catalog.content(self.file(tenant, file).id) or b""

    @property
    def damaged(self) -> int:
        return self._catalog.damaged

    def remove(self, tenant: str, file: str) -> None:
        """Delete a file, and take it out of all stores; raises as `file`."""
        for store in self._catalog.remove_file(self.file(tenant, file).id):
            self._ingest.forget(store, file)

    def keep_response(self, tenant: str, response: KeptResponse) -> None:
        """Keeps a response for `RESPONSE_DAYS`; beyond the share those used longest ago leave."""
        now = int(self._now())
        self._catalog.remove_responses(now - RESPONSE_DAYS * 86_400)
        self._catalog.keep_response(tenant, response, now, self._quota // RESPONSE_SHARE)

    def response(self, tenant: str, response: str) -> KeptResponse:
        found = self._catalog.conversation(tenant, response)
        if not found:
            raise MissingError(f"no response {response!r} is kept", param="response_id", code="not_found")
        return found[-1]

    def conversation(self, tenant: str, response: str) -> list[KeptResponse]:
        """The responses that one goes on from, the first of all first, and itself.

        Raises:
            RequestError: one of them is not there any more.
        """
        found = self._catalog.conversation(tenant, response, int(self._now()))
        if not found or found[0].previous is not None:
            gone = response if not found else found[0].previous
            reason = f"the response {gone!r} is not kept, or was deleted: send the items of the conversation in input"
            raise RequestError(reason, param="previous_response_id", code="previous_response_not_found")
        return found

    def remove_response(self, tenant: str, response: str) -> None:
        if not self._catalog.remove_response(tenant, response):
            raise MissingError(f"no response {response!r} is kept", param="response_id", code="not_found")

    def expire(self) -> None:
        """Delete the files whose time is over; everything that shows files calls it."""
        if self._due is None or self._now() < self._due:
            return
        with self._expiring:
            gone = [
                (store, file)
                for file in self._catalog.expired(int(self._now()))
                for store in self._catalog.remove_file(file)
            ]
            self._due = self._catalog.next_expiry()
        for store, file in gone:
            self._ingest.forget(store, file)

    def create(
        self,
        tenant: str,
        name: str,
        metadata: Mapping[str, str] | None = None,
        days: int | None = None,
        description: str | None = None,
    ) -> Store:
        now = int(self._now())
        store = Store(f"vs_{_new_id()}", name, now, now, days, metadata or {}, description)
        if not self._catalog.add_store(tenant, store, STORES_OF_TENANT):
            reason = f"you have {STORES_OF_TENANT} vector stores, as many as a server keeps for one client: delete some"
            raise RequestError(reason, code="quota_exceeded")
        try:
            self._bases.make(store.id, tenant)
        except BaseException:
            self._catalog.remove_store(store.id)
            self._drop(store.id)
            raise
        return store

    def stores(self, tenant: str, part: Slice = WHOLE) -> list[Store]:
        """All stores, the server's own first, then the oldest first; or a part of them."""
        names = list(self._bases.names)
        begin, end = (names.index(one) if one in names else None for one in (part.after, part.before))
        own = [] if part.after is not None and begin is None else names[0 if begin is None else begin + 1 : end]
        kept = []
        if end is None:  # the rest of the list are those of the catalog
            kept = self._catalog.stores(tenant, part if begin is None else replace(part, after=None))
        found = [*map(self._own, own), *map(self._looked_at, kept)]
        if part.count < 0:
            return found
        return found[max(0, len(found) - part.count) :] if part.last else found[: part.count]

    def store(self, tenant: str, store: str) -> Store:
        found = self._catalog.store(tenant, store)
        if found is not None:
            return self._looked_at(found)
        if store in self._bases.names:
            return self._own(store)
        raise _missing(store)

    def update(self, tenant: str, store: str, **changes: object) -> Store:
        """Change name, days, metadata or description of a store, which must not be the server's own."""
        changed = replace(self._changeable(tenant, store), **changes)  # type: ignore[arg-type]
        if not self._catalog.change_store(changed):
            raise _missing(store)
        return changed

    def delete(self, tenant: str, store: str) -> None:
        self._changeable(tenant, store)
        self._catalog.remove_store(store)
        self._drop(store)

    def use(self, tenant: str, store: str) -> None:
        """Note that a store is used, if this is one; raises RequestError if it has expired."""
        self.expire()
        kept = self._catalog.store(tenant, store)
        if kept is not None:
            self._check(self._looked_at(kept))
            self._catalog.touch(store, int(self._now()))

    def attach(self, tenant: str, attachments: Sequence[Attachment]) -> None:
        """Put files into a store, all of the same or none; they are read and embedded one behind another, later."""
        now = int(self._now())
        store = self._changeable(tenant, attachments[0].store)
        self._check(store)
        for one in attachments:
            self.file(tenant, one.file)
        rows = [replace(one, created=now) for one in attachments]
        try:
            with self._attaching:
                kept = self._catalog.attach(rows, self._quota, LEAST_BYTES)
        except sqlite3.IntegrityError:  # it was removed, or its time ran out, since it was looked up
            reason = "the vector store, or one of the files, was deleted just now"
            raise MissingError(reason, param="file_id", code="not_found") from None
        if not kept:
            reason = (
                f"the files in all your vector stores may have {self._quota / 2**20:g} MiB, each counted for every"
                " store that it is in: take some out"
            )
            raise RequestError(reason, param="file_id", code="quota_exceeded")
        self._catalog.touch(store.id, now)
        for row in rows:
            self._ingest.start(tenant, row.store, row.file)

    def attachments(self, tenant: str, store: str, state: State | None = None, part: Slice = WHOLE) -> list[Attachment]:
        """The files of a store, the oldest first, of the server's own by id. state: those in it alone."""
        self.expire()
        if not self.store(tenant, store).own:
            return self._catalog.attachments(store, state, part)
        found = list[Attachment]()
        if state in (None, "failed"):
            found += self._own_failures(store, part)
        if state in (None, "completed"):
            sizes = self._bases.get(store).sizes(part.count, after=part.after, before=part.before, last=part.last)
            found += [self._own_document(store, file, size) for file, size in sizes]
        found.sort(key=lambda one: one.file)
        count = len(found) if part.count < 0 else part.count
        return found[max(0, len(found) - count) :] if part.last else found[:count]

    def attachment(self, tenant: str, store: str, file: str) -> Attachment:
        self.expire()
        found: Attachment | None
        if self.store(tenant, store).own:
            size = self._bases.get(store).size(file)
            failed = (one for one in self._own_failures(store) if one.file == file)
            found = next(failed, None) if size is None else self._own_document(store, file, size)
        else:
            found = self._catalog.attachment(store, file)
        if found is None:
            raise MissingError(f"no file {file!r} in vector store {store!r}", param="file_id", code="not_found")
        return found

    def detach(self, tenant: str, store: str, file: str) -> None:
        self._changeable(tenant, store)
        self.attachment(tenant, store, file)
        self._catalog.detach(store, file)
        self._ingest.forget(store, file)

    def discard(self, tenant: str, file: str) -> None:
        """Delete a file that is in no store that has not expired; RequestError: one has it."""
        found = self.file(tenant, file).id
        with self._attaching:  # nobody puts it into a store between the look and the deletion
            stores = self._catalog.attached(found)
            if not all(self._expired(tenant, store) for store in stores):
                raise RequestError(f"the file {file!r} is in a vector store", param="file_id", code="in_use")
            self._catalog.remove_file(found)

    def counts(self, tenant: str, store: str) -> tuple[Counts, int]:
        """The files of a store by what became of them, and the bytes that their chunks take."""
        self.expire()
        if self.store(tenant, store).own:
            base = self._bases.get(store)
            (documents, size), told = base.extent, base.indexing
            if told is None:
                return Counts(completed=documents), size
            return Counts(told.files_total - told.files, documents, len(told.skipped)), size
        return self._catalog.counts(store)

    def passages(self, tenant: str, store: str, file: str) -> tuple[Chunk, ...]:
        """The chunks of a file in a store, in order. One that is not read yet has none."""
        self._check(self.store(tenant, store))
        found = self.attachment(tenant, store, file)
        return self._bases.get(store).document(file) if found.state == "completed" else ()

    def within(self, tenant: str, store: str, wanted: Filter | None) -> frozenset[str] | None:
        """The ids of the files that a search with this filter may find; None: all. Raises as `store`."""
        own = self.store(tenant, store).own
        if wanted is None:
            return None
        if own:  # its documents have no attributes: the filter holds for all of them or for none
            return None if wanted.holds({}) else frozenset()
        found = self.attachments(tenant, store)
        return frozenset(one.file for one in found if wanted.holds(one.attributes))

    def search(
        self,
        tenant: str,
        store: str,
        questions: Sequence[str],
        k: int,
        wanted: Filter | None = None,
        min_score: float | None = None,
    ) -> list[Passage]:
        self._check(self.store(tenant, store))
        if not all(question.strip() for question in questions):
            raise invalid("query", "a query is empty: say what to search for")
        self.use(tenant, store)
        base = self._bases.get(store)
        if not len(base):
            return []
        within = self.within(tenant, store, wanted)
        best: dict[str, Passage] = {}
        for question in questions:
            for hit in base.search(question, k, within=within, min_score=min_score):
                known = best.get(hit.chunk.id)
                if known is None or known.score < hit.score:
                    chunk = hit.chunk
                    file = None if chunk.filename else self._catalog.file(tenant, chunk.document_id)
                    name = chunk.source_name if file is None else file.name
                    best[chunk.id] = Passage(chunk, hit.score, name, self.attributes(store, chunk.document_id))
        return sorted(best.values(), key=lambda passage: -passage.score)[:k]

    def attributes(self, store: str, file: str) -> Attributes:
        attachment = self._catalog.attachment(store, file)
        return {} if attachment is None else attachment.attributes

    def _drop(self, store: str) -> None:
        with suppress(RequestError):  # it expired before, or before it was opened
            self._bases.drop(store)
        if self._directory is not None:
            shutil.rmtree(self._directory / store, ignore_errors=True)

    def _own(self, name: str) -> Store:
        return Store(name, name, self._began, self._began, own=True)

    def _own_document(self, store: str, file: str, size: int) -> Attachment:
        return Attachment(store, file, self._began, "completed", size)

    def _own_failures(self, store: str, part: Slice = WHOLE) -> list[Attachment]:
        told = self._bases.get(store).indexing
        return [
            Attachment(store, one.name, self._began, "failed", error=("invalid_file", one.reason))
            for one in (() if told is None else told.skipped)
            if (part.after or "") < one.name and (part.before is None or one.name < part.before)
        ]

    def _changeable(self, tenant: str, store: str) -> Store:
        found = self.store(tenant, store)
        if found.own:
            reason = (
                f"the vector store {store!r} is the server's own and holds what --knowledge holds: make another one"
            )
            raise invalid("vector_store_id", reason)
        return found

    def _check(self, store: Store) -> None:
        if store.expired:
            reason = f"the vector store {store.id!r} has expired: make another one"
            raise RequestError(reason, param="vector_store_id", code="expired")

    def _expired(self, tenant: str, store: str) -> bool:
        found = self._catalog.store(tenant, store)
        return found is None or self._looked_at(found).expired

    def _looked_at(self, store: Store) -> Store:
        """The store; if its time is over, it expires now."""
        if store.expired or store.expires is None or self._now() < store.expires:
            return store
        self._catalog.expire_store(store.id)
        self._drop(store.id)
        return replace(store, expired=True)


def _missing(store: str) -> MissingError:
    return MissingError(f"no vector store {store!r}", param="vector_store_id", code="not_found")


def _new_id() -> str:
    return uuid.uuid4().hex[:24]
