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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ragjax.core import (
    WHOLE,
    Attachment,
    Chunk,
    Counts,
    FileBatch,
    Filter,
    MissingError,
    Passage,
    RequestError,
    Scalar,
    Slice,
    State,
    Store,
)
from ragjax.retrieval.catalog import Catalog
from ragjax.retrieval.files import LEAST_BYTES, QUOTA, Files, hexadecimal
from ragjax.retrieval.ingest import Bases, Intake

FOLDER = ".library"
"""Beside the folders of the knowledge bases; none of them can have this name."""
FEWEST_TOKENS, MOST_TOKENS = 100, 4096
"""Tokens of a chunk that a client may ask for, as in OpenAI's API."""
STORES_OF_TENANT = 1000
"""Stores that a tenant may have; each keeps two files open."""
BATCHES_OF_STORE = 1000
"""The latest batches of a store are kept, and those that are in progress."""
_ID = re.compile(r"vs_[0-9a-f]{24}")


class Library(Files):
    """Files and stores of tenants ("": of nobody). Any thread may call it; whatever is not the tenant's is not there.

    directory: where the knowledge bases are kept; None keeps all in memory. now, quota: as `Files` has them.

    Raises:
        ConfigError: what is kept there cannot be used.
    """

    def __init__(self, bases: Bases, directory: Path | None, now: Callable[[], float] = time.time, quota: int = QUOTA):
        catalog = Catalog(None if directory is None else directory / FOLDER / "catalog.sqlite")
        super().__init__(catalog, Intake(catalog, bases), now, quota)
        self._bases = bases
        self._directory = directory
        self._began = int(now())
        self._attaching = threading.Lock()

    def open(self) -> None:
        """Open the stores that were kept, and go on with what was not finished."""
        self._begin()
        kept = self._catalog.owners()
        owners = {store: tenant for store, tenant in kept.items() if not self._expired(tenant, store)}
        self._sweep(set(owners))
        for store, tenant in owners.items():
            base = self._bases.make(store, tenant)
            wanted = {
                one.file: one for one in self._catalog.attachments(store) if one.state not in ("failed", "cancelled")
            }
            base.delete(base.document_ids - wanted.keys())
            for one in wanted.values():
                if one.state == "in_progress" or (one.state == "completed" and one.file not in base.document_ids):
                    self._catalog.reopen(store, one.file)
                    self._intake.start(tenant, store, one.file)

    def close(self) -> None:
        """Stop reading files. What was not finished goes on when the library is opened again."""
        self._intake.close()
        self._catalog.close()

    # --------------------------------------------------------------------------------------------- stores

    def create(
        self,
        tenant: str,
        name: str,
        metadata: Mapping[str, str] | None = None,
        days: int | None = None,
        description: str | None = None,
    ) -> Store:
        """Make a store.

        Raises:
            RequestError: if the tenant has as many as it may.
            ConfigError: if it cannot be made; nothing of it is left then.
        """
        now = int(self._now())
        store = Store(f"vs_{hexadecimal()}", name, now, now, days, metadata or {}, description)
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
        """One store.

        Raises:
            MissingError: if it is not there.
        """
        found = self._catalog.store(tenant, store)
        if found is not None:
            return self._looked_at(found)
        if store in self._bases.names:
            return self._own(store)
        raise self._missing(store)

    def update(self, tenant: str, store: str, **changes: object) -> Store:
        """Change name, days, metadata or description of a store; an expired one stays so.

        Raises:
            RequestError: if it is not there, or the server's own.
        """
        changed = replace(self._changeable(tenant, store), **changes)  # type: ignore[arg-type]
        if not self._catalog.change_store(changed):
            raise self._missing(store)
        return changed

    def delete(self, tenant: str, store: str) -> None:
        """Delete a store; its files stay. Raises as `update`."""
        self._changeable(tenant, store)
        self._catalog.remove_store(store)
        self._drop(store)

    def use(self, tenant: str, store: str) -> None:
        """Note that a store is used, if this is one.

        Raises:
            RequestError: if it has expired.
        """
        self.expire()
        kept = self._catalog.store(tenant, store)
        if kept is not None:
            self._check(self._looked_at(kept))
            self._catalog.touch(store, int(self._now()))

    # ---------------------------------------------------------------------------------------- attachments

    def attach(self, tenant: str, attachments: Sequence[Attachment], *, batch: bool = False) -> FileBatch | None:
        """Put files into a store, all of the same; they are read and embedded one behind another, later.

        Raises:
            RequestError: if the store or a file is not there, the store cannot be changed, or the files in all stores
                are beyond the quota. Nothing is done then.
        """
        now = int(self._now())
        store = self._changeable(tenant, attachments[0].store)
        self._check(store)
        for one in attachments:
            self.file(tenant, one.file)
        made = FileBatch(f"vsfb_{hexadecimal()}", store.id, now) if batch else None
        rows = [replace(one, created=now, batch=None if made is None else made.id) for one in attachments]
        try:
            with self._attaching:
                kept = self._catalog.attach(rows, self._quota, LEAST_BYTES, made, BATCHES_OF_STORE)
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
            self._intake.start(tenant, row.store, row.file)
        return made

    def attachments(
        self, tenant: str, store: str, batch: str | None = None, state: State | None = None, part: Slice = WHOLE
    ) -> list[Attachment]:
        """What a store holds, the oldest first, of the server's own by id; or a part of it. Raises as `store`.

        batch, state: what came with it, and is in it, alone.
        """
        self.expire()
        if not self.store(tenant, store).own:
            return self._catalog.attachments(store, batch, state, part)
        if state not in (None, "completed"):
            return []
        found = self._bases.get(store).sizes(part.count, after=part.after, before=part.before, last=part.last)
        return [self._own_document(store, file, size) for file, size in found]

    def attachment(self, tenant: str, store: str, file: str, batch: str | None = None) -> Attachment:
        """A file in a store, or of a batch.

        Raises:
            MissingError: if it is not there.
        """
        self.expire()
        found: Attachment | None
        if self.store(tenant, store).own:
            size = self._bases.get(store).size(file)
            found = None if size is None else self._own_document(store, file, size)
        else:
            found = self._catalog.attachment(store, file, batch)
        if found is None:
            raise MissingError(f"no file {file!r} in vector store {store!r}", param="file_id", code="not_found")
        return found

    def note(self, tenant: str, store: str, file: str, attributes: Mapping[str, Scalar]) -> Attachment:
        """Change the attributes of a file in a store; raises as `detach`."""
        self._changeable(tenant, store)
        found = self.attachment(tenant, store, file)
        self._catalog.note(store, file, attributes)
        return replace(found, attributes=attributes)

    def detach(self, tenant: str, store: str, file: str) -> None:
        """Take a file out of a store.

        Raises:
            RequestError: if it is not there, or the store cannot be changed.
        """
        self._changeable(tenant, store)
        self.attachment(tenant, store, file)
        self._catalog.detach(store, file)
        self._intake.forget(store, file)

    def discard(self, tenant: str, file: str) -> None:
        """Delete a file that is in no store; an expired store does not count.

        Raises:
            MissingError: if it is not there.
            RequestError: if a store has it. Nothing is done then.
        """
        found = self.file(tenant, file).id
        with self._attaching:  # nobody puts it into a store between the look and the deletion
            stores = self._catalog.attached(found)
            if not all(self._expired(tenant, store) for store in stores):
                raise RequestError(f"the file {file!r} is in a vector store", param="file_id", code="in_use")
            self._remove(found)

    def batch(self, tenant: str, store: str, batch: str) -> FileBatch:
        """A batch.

        Raises:
            MissingError: if it is not there.
        """
        self.store(tenant, store)
        found = self._catalog.batch(store, batch)
        if found is None:
            raise MissingError(f"no file batch {batch!r} in vector store {store!r}", param="batch_id", code="not_found")
        return found

    def cancel(self, tenant: str, store: str, batch: str) -> FileBatch:
        """Read no more of a batch: what is in progress of it is cancelled; raises as `batch`."""
        found = self.batch(tenant, store, batch)
        for file in self._catalog.cancel(store, batch):
            self._intake.forget(store, file)  # as it was before, if it was there
        return found

    def counts(self, tenant: str, store: str, batch: str | None = None) -> tuple[Counts, int]:
        """The files of a store or batch by what became of them, and the bytes that their chunks take."""
        self.expire()
        if self.store(tenant, store).own:
            documents, size = self._bases.get(store).extent
            return Counts(completed=documents), size
        return self._catalog.counts(store, batch)

    # -------------------------------------------------------------------------------------------- searches

    def passages(self, tenant: str, store: str, file: str) -> tuple[Chunk, ...]:
        """The chunks of a file in a store, in order. One that is not read yet has none.

        Raises:
            RequestError: if it is not there, or the store has expired.
        """
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
        """The k passages nearest to any of the questions, best first.

        Raises:
            RequestError: if the store is not there, has expired, or a question is empty.
        """
        self._check(self.store(tenant, store))
        if not all(question.strip() for question in questions):
            raise RequestError("a query is empty: say what to search for", param="query", code="invalid_value")
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
                    best[hit.chunk.id] = self._passage(tenant, store, hit.chunk, hit.score)
        return sorted(best.values(), key=lambda passage: -passage.score)[:k]

    def passage(self, tenant: str, store: str, chunk_id: str, score: float) -> Passage | None:
        """The passage that a chunk of a store is; None: it was deleted meanwhile."""
        try:
            chunks = self._bases.get(store).document(chunk_id.rpartition("#")[0])
        except RequestError:
            return None
        found = next((chunk for chunk in chunks if chunk.id == chunk_id), None)
        return None if found is None else self._passage(tenant, store, found, score)

    def _passage(self, tenant: str, store: str, chunk: Chunk, score: float) -> Passage:
        file = self._catalog.file(tenant, chunk.document_id)
        attachment = self._catalog.attachment(store, chunk.document_id)
        name = chunk.title or chunk.document_id if file is None else file.name
        return Passage(chunk, score, name, {} if attachment is None else attachment.attributes)

    # ------------------------------------------------------------------------------------------ the rules

    def _drop(self, store: str) -> None:
        """Close a store if it is open, and delete its folder."""
        with suppress(RequestError):  # it expired before, or before it was opened
            self._bases.drop(store)
        if self._directory is not None:
            shutil.rmtree(self._directory / store, ignore_errors=True)

    def _sweep(self, known: set[str]) -> None:
        """Delete the folders of stores that were deleted, or have expired, just before the process ended."""
        if self._directory is None:
            return
        for folder in self._directory.iterdir():
            if _ID.fullmatch(folder.name) and folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    def _own(self, name: str) -> Store:
        return Store(name, name, self._began, self._began, own=True)

    def _own_document(self, store: str, file: str, size: int) -> Attachment:
        return Attachment(store, file, self._began, "completed", size)

    def _changeable(self, tenant: str, store: str) -> Store:
        found = self.store(tenant, store)
        if found.own:
            reason = (
                f"the vector store {store!r} is the server's own and holds what --knowledge holds: make another one"
            )
            raise RequestError(reason, param="vector_store_id", code="invalid_value")
        return found

    def _check(self, store: Store) -> None:
        if store.expired:
            reason = f"the vector store {store.id!r} has expired: make another one"
            raise RequestError(reason, param="vector_store_id", code="expired")

    def _expired(self, tenant: str, store: str) -> bool:
        found = self._catalog.store(tenant, store)
        return found is None or self._looked_at(found).expired

    @staticmethod
    def _missing(store: str) -> MissingError:
        return MissingError(f"no vector store {store!r}", param="vector_store_id", code="not_found")

    def _looked_at(self, store: Store) -> Store:
        """The store; if its time is over, it expires now."""
        if store.expired or store.expires is None or self._now() < store.expires:
            return store
        gone = replace(store, expired=True)
        self._catalog.expire_store(store.id)
        self._drop(store.id)
        return gone
