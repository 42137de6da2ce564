"""The catalog of a library: files with their contents, stores, and attachments, in one SQLite file.

A row is there or is not, also after a kill. Knowledge bases are brought in line with the catalog when they are opened
(`library.py`).
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragjax.core import WHOLE, Attachment, Counts, DamageError, File, KeptResponse, Slice, State, Store
from ragjax.retrieval.database import checksum, compare_schema, exclusive, free, hold_spare, transaction

_SCHEMA = """
create table if not exists files (
    number integer primary key autoincrement, id text not null unique, tenant text not null, name text not null,
    purpose text not null, size integer not null, created integer not null, content blob not null,
    expires integer, checksum blob
);
create table if not exists stores (
    number integer primary key autoincrement, id text not null unique, tenant text not null, name text not null,
    created integer not null, active integer not null, days integer, metadata text not null, description text,
    expired integer not null
);
create table if not exists attachments (
    number integer primary key autoincrement, store text not null references stores (id) on delete cascade,
    file text not null references files (id) on delete cascade, created integer not null, state text not null,
    usage integer not null, code text not null, message text not null, attributes text not null, chunk_tokens integer,
    batch text, unique (store, file)
);
create table if not exists responses (
    number integer primary key autoincrement, id text not null unique, tenant text not null, previous text,
    active integer not null, size integer not null, items text not null, body text not null
);
create index if not exists responses_by_tenant on responses (tenant);
create index if not exists files_by_tenant on files (tenant);
create index if not exists stores_by_tenant on stores (tenant);
create index if not exists attachments_by_store on attachments (store);
create index if not exists attachments_by_file on attachments (file);
"""
_ODD = (
    "select 1 from files where typeof(size) <> 'integer' or typeof(created) <> 'integer' or typeof(content) <> 'blob'"
    " or typeof(expires) not in ('integer', 'null')"
    " union select 1 from stores where typeof(created) <> 'integer' or typeof(active) <> 'integer'"
    " or typeof(days) not in ('integer', 'null')"
    " union select 1 from attachments where typeof(usage) <> 'integer' or typeof(created) <> 'integer'"
    " or state not in ('in_progress', 'completed', 'failed', 'cancelled')"
)
_FILE = "select id, name, purpose, size, created, expires from files"
_KEPT = "id, tenant, name, purpose, size, created, content, expires"
_STORE = "select id, name, created, active, days, metadata, description, expired from stores"
_ATTACHMENT = "select store, file, created, state, usage, code, message, attributes, chunk_tokens from attachments"

_COPIES = (
    "select coalesce(sum(max(files.size, ?)), 0) from stores join attachments on attachments.store = stores.id"
    " join files on files.id = attachments.file"
    " where stores.tenant = (select tenant from stores where id = ?) and not stores.expired"
)
"""The bytes of all files in the stores of one's tenant, each as often as it is in a store."""
_CHAIN = (
    "with recursive chain (id, tenant, previous, items, body, depth) as ("
    "select id, tenant, previous, items, body, 0 from responses where id = ? and tenant = ? union all"
    " select r.id, r.tenant, r.previous, r.items, r.body, depth + 1 from responses r"
    " join chain on r.id = chain.previous and r.tenant = chain.tenant)"
)
_log = logging.getLogger(__name__)


class Catalog:
    """Files, stores and attachments of tenants; any thread may call it. place: its file; None keeps it in memory."""

    def __init__(self, place: Path | None):
        self._lock = threading.Lock()
        self.damaged = 0
        """Times that a file was read and found damaged."""
        self._database = exclusive(place, _prepare, f"delete {place}: uploaded files are lost")
        self._spare = None if place is None else place.with_suffix(".spare")
        hold_spare(self._spare)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def add_file(self, tenant: str, file: File, content: bytes, quota: int, least: int) -> bool:
        """Keep a file, which counts as `least` bytes at least; False: the tenant's files would exceed the quota."""
        values = (
            file.id, tenant, file.name, file.purpose, file.size, file.created, content, file.expires,
        )  # fmt: skip
        sql = (
            f"insert into files ({_KEPT}, checksum) select ?, ?, ?, ?, ?, ?, ?, ?, ?"
            " where (select coalesce(sum(max(size, ?)), 0) from files where tenant = ?) + max(?, ?) <= ?"
        )
        return self._change(sql, *values, checksum(values), least, tenant, file.size, least, quota) == 1

    def files(self, tenant: str, purpose: str | None = None, part: Slice = WHOLE) -> list[File]:
        values = {"tenant": tenant, "purpose": purpose}
        sql = f"{_FILE} where tenant = :tenant and (:purpose is null or purpose = :purpose)"
        return [File(*row) for row in self._part(sql, "files where id = :id", values, part)]

    def file(self, tenant: str, file: str) -> File | None:
        return next((File(*row) for row in self._rows(f"{_FILE} where tenant = ? and id = ?", tenant, file)), None)

    def content(self, file: str) -> bytes | None:
        try:
            rows = self._rows(f"select content, checksum, {_KEPT} from files where id = ?", file)
        except sqlite3.DatabaseError as error:
            raise self._damaged(file) from error
        if not rows:
            return None
        ((content, known, *values),) = rows
        if known != checksum(values):
            raise self._damaged(file)
        kept: bytes = content
        return kept

    def _damaged(self, file: str) -> DamageError:
        self.damaged += 1
        _log.error("the file %s of the catalog is damaged; delete and upload it again", file)
        return DamageError(f"the file {file!r} is damaged where it is kept: delete it and upload it again")

    def name(self, file: str) -> str:
        rows: list[tuple[str]] = self._rows("select name from files where id = ?", file)
        return rows[0][0] if rows else ""

    def expired(self, now: int) -> list[str]:
        return [file for (file,) in self._rows("select id from files where expires <= ?", now)]

    def next_expiry(self) -> int | None:
        rows: list[tuple[int | None]] = self._rows("select min(expires) from files")
        return rows[0][0]

    def remove_file(self, file: str) -> list[str]:
        """Forget a file; returns the stores that it was attached to."""
        stores = self.attached(file)
        self._delete("delete from files where id = ?", file)
        return stores

    def add_store(self, tenant: str, store: Store, most: int) -> bool:
        """Keep a new store; False: the tenant has as many as it may."""
        values = (store.name, store.active, store.days, json.dumps(store.metadata), store.description, store.expired)
        sql = (
            "insert into stores (name, active, days, metadata, description, expired, id, tenant, created)"
            " select ?, ?, ?, ?, ?, ?, ?, ?, ? where (select count(*) from stores where tenant = ?) < ?"
        )
        return self._change(sql, *values, store.id, tenant, store.created, tenant, most) == 1

    def change_store(self, store: Store) -> bool:
        values = (store.name, store.days, json.dumps(store.metadata), store.description, store.id)
        sql = "update stores set name = ?, days = ?, metadata = ?, description = ? where id = ?"
        return self._change(sql, *values) == 1

    def expire_store(self, store: str) -> None:
        self._change("update stores set expired = 1 where id = ?", store)

    def stores(self, tenant: str, part: Slice = WHOLE) -> list[Store]:
        sql = f"{_STORE} where tenant = :tenant"
        return [_store(row) for row in self._part(sql, "stores where id = :id", {"tenant": tenant}, part)]

    def owners(self) -> dict[str, str]:
        return dict(self._rows("select id, tenant from stores order by number"))

    def store(self, tenant: str, store: str) -> Store | None:
        return next((_store(row) for row in self._rows(f"{_STORE} where tenant = ? and id = ?", tenant, store)), None)

    def touch(self, store: str, now: int) -> None:
        self._change("update stores set active = ? where id = ?", now, store)

    def remove_store(self, store: str) -> None:
        self._delete("delete from stores where id = ?", store)

    def attach(self, attachments: list[Attachment], quota: int, least: int) -> bool:
        """Keep attachments to a store, all or none; one that was there is replaced.

        False: the files in all stores of its tenant would exceed the quota. A file counts `least` bytes at least, for
        each store that it is in.

        Raises:
            sqlite3.IntegrityError: the store or a file is gone.
        """
        sql = (
            "insert or replace into attachments (store, file, created, state, usage, code, message, attributes,"
            " chunk_tokens) values (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        database = self._database
        with self._lock, transaction(database):
            for one in attachments:
                values = (one.store, one.file, one.created, one.state, one.usage, *one.error)
                database.execute(sql, (*values, json.dumps(one.attributes), one.chunk_tokens))
            size: int = database.execute(_COPIES, (least, attachments[0].store)).fetchone()[0]
            if size > quota:
                database.rollback()
        return size <= quota

    def settle(self, attachment: Attachment) -> bool:
        """Note what became of an attachment; False: it was removed, or replaced, meanwhile."""
        values = (attachment.state, attachment.usage, *attachment.error)
        key = (attachment.store, attachment.file, attachment.created, attachment.chunk_tokens)
        sql = (
            "update attachments set state = ?, usage = ?, code = ?, message = ? where store = ? and file = ?"
            " and created = ? and chunk_tokens is ? and state = 'in_progress'"
        )
        return self._change(sql, *values, *key) == 1

    def reopen(self, store: str, file: str) -> None:
        self._change("update attachments set state = 'in_progress' where store = ? and file = ?", store, file)

    def attachments(self, store: str, state: State | None = None, part: Slice = WHOLE) -> list[Attachment]:
        sql = f"{_ATTACHMENT} where store = :store and (:state is null or state = :state)"
        place = "attachments where store = :store and file = :id"
        return [_attachment(row) for row in self._part(sql, place, {"store": store, "state": state}, part)]

    def counts(self, store: str) -> tuple[Counts, int]:
        """The number of a store's attachments in each state, and the bytes that their chunks take."""
        sql = "select state, count(*), sum(usage) from attachments where store = ? group by state"
        found = self._rows(sql, store)
        return Counts(**{state: number for state, number, _ in found}), sum(usage for *_, usage in found)

    def attachment(self, store: str, file: str) -> Attachment | None:
        rows = self._rows(f"{_ATTACHMENT} where store = ? and file = ?", store, file)
        return next(map(_attachment, rows), None)

    def attached(self, file: str) -> list[str]:
        return [store for (store,) in self._rows("select store from attachments where file = ?", file)]

    def detach(self, store: str, file: str) -> None:
        self._delete("delete from attachments where store = ? and file = ?", store, file)

    def keep_response(self, tenant: str, response: KeptResponse, now: int, most: int) -> None:
        """Keeps a response; those that the tenant used longest ago leave, beyond `most` bytes of all.

        A clock that is set back makes none of them older than those before it.
        """
        values = (response.id, tenant, response.previous, len(response.items) + len(response.body))
        with self._lock, transaction(self._database):
            self._database.execute(
                "insert into responses (id, tenant, previous, size, items, body, active)"
                " select ?, ?, ?, ?, ?, ?, max(?, coalesce(max(active), 0)) from responses where tenant = ?",
                (*values, response.items, response.body, now, tenant),
            )
            self._database.execute(
                "delete from responses where number in (select number from (select number, sum(size) over"
                " (order by active desc, number desc) as total from responses where tenant = ?) where total > ?)",
                (tenant, most),
            )

    def conversation(self, tenant: str, response: str, now: int | None = None) -> list[KeptResponse]:
        """Returns a response behind those that it goes on from, the first of all first. now: it is used."""
        found = self._rows(
            f"{_CHAIN} select id, previous, items, body from chain order by depth desc", response, tenant
        )
        if now is not None:
            self._change(
                f"{_CHAIN} update responses set active = max(active, ?) where id in (select id from chain)",
                response,
                tenant,
                now,
            )
        return [KeptResponse(*row) for row in found]

    def remove_response(self, tenant: str, response: str) -> bool:
        sql = "delete from responses where tenant = ? and id = ?"
        return bool(free(self._database, lambda: self._change(sql, tenant, response), self._spare))

    def remove_responses(self, before: int) -> None:
        """Forgets those that were last used before this time."""
        self._delete("delete from responses where active < ?", before)

    def _change(self, sql: str, *values: object) -> int:
        with self._lock, transaction(self._database):
            return self._database.execute(sql, values).rowcount

    def _delete(self, sql: str, *values: object) -> None:
        """Carry out a statement that deletes, also where the disk is full."""
        free(self._database, lambda: self._change(sql, *values), self._spare)
        hold_spare(self._spare)

    def _rows(self, sql: str, *values: object, **named: object) -> list[Any]:
        with self._lock:
            return self._database.execute(sql, named or values).fetchall()

    def _part(self, sql: str, place: str, values: Mapping[str, object], part: Slice) -> list[Any]:
        """Rows by number, or a part of them.

        sql: selects them, and ends with its condition. place: table and condition of the row that `:id` names.
        """
        for sign, bound in ((">", "after"), ("<", "before")):
            if getattr(part, bound) is not None:
                sql += f" and number {sign} (select number from {place.replace(':id', f':{bound}')})"
        sql += f" order by number {'desc' if part.last else 'asc'} limit :count"
        found = self._rows(sql, **values, count=part.count, after=part.after, before=part.before)
        return found[::-1] if part.last else found


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("pragma foreign_keys = on")
    database.executescript(_SCHEMA)
    compare_schema(database, _SCHEMA)
    try:
        for row in database.execute(_STORE):
            _store(row)
        for row in database.execute(_ATTACHMENT):
            _attachment(row)
        odd = database.execute(_ODD).fetchone()
    except (ValueError, TypeError, RecursionError) as error:
        raise sqlite3.DatabaseError(f"a row cannot be read: {error}") from error
    if odd is not None:
        raise sqlite3.DatabaseError("a row holds values of other types")


def _store(row: tuple[Any, ...]) -> Store:
    store, name, created, active, days, metadata, description, expired = row
    return Store(store, name, created, active, days, json.loads(metadata), description, bool(expired))


def _attachment(row: tuple[Any, ...]) -> Attachment:
    store, file, created, state, usage, code, message, attributes, chunk_tokens = row
    error = (code, message)
    return Attachment(store, file, created, state, usage, error, json.loads(attributes), chunk_tokens)
