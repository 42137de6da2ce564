"""The endpoints of files and vector stores, in the form of OpenAI's API reference."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from ragjax import core
from ragjax.core import RequestError
from ragjax.serve.error import ApiError
from ragjax.serve.ignored_fields import take_ignored
from ragjax.serve.response import Json
from ragjax.serve.schema.store import AttachmentBody, SearchBody, StoreBody, StoreChange

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service

MOST_PARTS = 16  # parts of a form, at most


class FormField(NamedTuple):
    content: bytes
    filename: str | None


def parse(body: bytes, content_type: str) -> dict[str, FormField]:
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        reason = "the form cannot be read: send it as multipart/form-data"
        raise RequestError(reason, param="file", code="invalid_form")
    found: dict[str, FormField] = {}
    name, filename, content = "", None, bytearray()
    try:
        with PushMultipartParser(options["boundary"], len(body), max_segment_count=MOST_PARTS, strict=True) as parser:
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    name, filename, content = event.name or "", event.filename, bytearray()
                elif event is not None:
                    content += event
                elif name in found:
                    raise core.invalid(name, f"the field {name!r} is given twice")
                else:
                    found[name] = FormField(bytes(content), filename)
    except MultipartError as error:
        raise RequestError(f"the form cannot be read: {error}", param="file", code="invalid_form") from error
    return found


async def _tenant(request: Request) -> str:
    tenant: str = request.state.tenant
    return tenant


T = TypeVar("T")
Tenant = Annotated[str, Depends(_tenant)]
Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]
ManyFiles = Annotated[int, Query(ge=1, le=10_000)]
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FILE_FIELDS = frozenset({"file", "purpose", ANCHOR, SECONDS})
LEAST_SECONDS, MOST_SECONDS = 3600, 2_592_000  # after which a file may expire, as in OpenAI's API
FOUND = 10  # passages of a search unless it asks for others


@dataclass(frozen=True)
class ListPage:
    """The part of a list that is asked for: the first entries behind `after`, or else the last ones before `before`."""

    limit: Limit = 20
    order: Order = "desc"  # by time of creation
    after: str | None = None
    before: str | None = None

    def of(
        self, read: Callable[[core.Slice], Sequence[T]], look: Callable[[str], object], shown: Callable[[T], Json]
    ) -> Json:
        """Makes the list object. read: returns a part of the entries, the oldest first. look: raises MissingError."""
        for param, given in (("after", self.after), ("before", self.before)):
            try:
                if given is not None:
                    look(given)
            except core.MissingError:
                reason = f"{param}: there is no {given!r} in the list"
                raise core.MissingError(reason, param=param, code="not_found") from None
        up, backward = self.order == "asc", self.after is None and self.before is not None
        low, high = (self.after, self.before) if up else (self.before, self.after)
        # one more than is shown tells whether there are others
        found = read(core.Slice(self.limit + 1, low, high, last=backward is up))
        between = found if up else found[::-1]
        data = [shown(entry) for entry in (between[-self.limit :] if backward else between[: self.limit])]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        more = len(between) > len(data)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


class LibraryEndpoints:
    """The endpoints over an engine's library. All but the upload run in threads: they wait for SQLite."""

    def __init__(self, engine: Service):
        self._library = engine.library

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1")
        store, file = "/vector_stores/{vector_store_id}", "/files/{file_id:path}"
        for method, path, endpoint in (
            ("POST", "/files", self.upload),
            ("GET", "/files", self.files),
            ("GET", "/files/{file_id}", self.file),
            ("GET", "/files/{file_id}/content", self.content),
            ("DELETE", "/files/{file_id}", self.remove),
            ("POST", "/vector_stores", self.create),
            ("GET", "/vector_stores", self.stores),
            ("GET", store, self.store),
            ("POST", store, self.update),
            ("DELETE", store, self.delete),
            ("POST", f"{store}/search", self.search),
            ("POST", f"{store}/files", self.attach),
            ("GET", f"{store}/files", self.attachments),
            ("GET", f"{store}{file}/content", self.passages),
            ("GET", f"{store}{file}", self.attachment),
            ("DELETE", f"{store}{file}", self.detach),
            ("GET", "/responses/{response_id}", self.response),
            ("GET", "/responses/{response_id}/input_items", self.items),
            ("DELETE", "/responses/{response_id}", self.forget),
        ):
            router.add_api_route(path, endpoint, methods=[method], response_model=None)
        return router

    async def upload(self, request: Request, tenant: Tenant) -> Json:
        """Upload a file: a form with `file`, `purpose`, and when the file expires."""
        form = parse(await request.body(), request.headers.get("content-type", ""))
        file, purpose = form.get("file"), form.get("purpose")
        if file is None or file.filename is None:
            raise _missing("file", "the form needs a file, with its name")
        if purpose is None:
            raise _missing("purpose", f"the form needs a purpose: {' or '.join(core.PURPOSES)}")
        unknown = next((name for name in form if name not in FILE_FIELDS), None)
        if unknown is not None:
            raise ApiError(400, f"unknown field {unknown!r}", param=unknown, code="unknown_parameter")
        arguments = (tenant, file.filename, _said(purpose), file.content, _lifetime(form))
        return _file(await asyncio.to_thread(self._library.upload, *arguments))

    def files(
        self,
        tenant: Tenant,
        purpose: str | None = None,
        limit: ManyFiles = 10_000,
        order: Order = "desc",
        after: str | None = None,
    ) -> Json:
        read, look = partial(self._library.files, tenant, purpose), partial(self._library.file, tenant)
        return ListPage(limit, order, after).of(read, look, _file)

    def file(self, tenant: Tenant, file_id: str) -> Json:
        return _file(self._library.file(tenant, file_id))

    def content(self, tenant: Tenant, file_id: str) -> Response:
        """A file's bytes, as they were uploaded; to be saved, never shown by a browser as a page of this server."""
        file = self._library.file(tenant, file_id)
        kind = mimetypes.guess_type(f"file{Path(file.name).suffix}")[0] or "application/octet-stream"
        safe = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
        return Response(self._library.content(tenant, file_id), media_type=kind, headers=safe)

    def remove(self, tenant: Tenant, file_id: str, unattached: bool = False) -> Json:
        """Delete a file, also from all stores; `unattached`: only if no store has it."""
        (self._library.discard if unattached else self._library.remove)(tenant, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    def create(self, tenant: Tenant, body: StoreBody) -> Json:
        """Make a store, and put files into it."""
        days = None if body.expires_after is None else body.expires_after.days
        given, library = body.to_core(""), self._library
        for one in given:
            library.file(tenant, one.file)
        store = library.create(tenant, body.name or "", body.metadata, days, body.description)
        try:
            if given:
                library.attach(tenant, [replace(one, store=store.id) for one in given])
        except BaseException:
            with suppress(core.MissingError):
                library.delete(tenant, store.id)
            raise
        return self._store(tenant, store)

    def stores(self, tenant: Tenant, page: Annotated[ListPage, Depends()]) -> Json:
        read, look = partial(self._library.stores, tenant), partial(self._library.store, tenant)
        return page.of(read, look, partial(self._store, tenant))

    def store(self, tenant: Tenant, vector_store_id: str) -> Json:
        return self._store(tenant, self._library.store(tenant, vector_store_id))

    def update(self, tenant: Tenant, vector_store_id: str, body: StoreChange) -> Json:
        """Change a store's name, metadata and expiry."""
        changes = body.model_dump(exclude_unset=True)
        if "expires_after" in changes:
            changes["days"] = (changes.pop("expires_after") or {}).get("days")
        for name, empty in (("metadata", {}), ("name", "")):
            if name in changes:
                changes[name] = changes[name] or empty
        return self._store(tenant, self._library.update(tenant, vector_store_id, **changes))

    def delete(self, tenant: Tenant, vector_store_id: str) -> Json:
        """Delete a store; its files stay."""
        self._library.delete(tenant, vector_store_id)
        return {"id": vector_store_id, "object": "vector_store.deleted", "deleted": True}

    def search(self, tenant: Tenant, vector_store_id: str, body: SearchBody) -> Json:
        """The passages nearest to a query."""
        take_ignored(body, strict=True)
        found = self._library.search(
            tenant,
            vector_store_id,
            body.query,
            body.max_num_results or FOUND,
            None if body.filters is None else body.filters.to_core(),
            None if body.ranking_options is None else body.ranking_options.score_threshold,
        )
        shown = [
            {
                "file_id": one.chunk.document_id,
                "filename": one.name,
                "page": one.chunk.page,
                "heading": one.chunk.heading,
                "score": one.score,
                "attributes": dict(one.attributes),
                "content": [{"type": "text", "text": one.chunk.text}],
            }
            for one in found
        ]
        kind = "vector_store.search_results.page"
        return {"object": kind, "search_query": body.query, "data": shown, "has_more": False, "next_page": None}

    def attach(self, tenant: Tenant, vector_store_id: str, body: AttachmentBody) -> Json:
        """Put a file into a store. It is read in the background; until then its status is `in_progress`."""
        self._library.attach(tenant, [body.to_core(vector_store_id)])
        return self._attachment(self._library.attachment(tenant, vector_store_id, body.file_id))

    def attachments(
        self,
        tenant: Tenant,
        vector_store_id: str,
        page: Annotated[ListPage, Depends()],
        filter: core.State | None = None,
    ) -> Json:
        self._library.store(tenant, vector_store_id)
        read = partial(self._library.attachments, tenant, vector_store_id, filter)
        look = partial(self._library.attachment, tenant, vector_store_id)
        return page.of(read, look, self._attachment)

    def attachment(self, tenant: Tenant, vector_store_id: str, file_id: str) -> Json:
        return self._attachment(self._library.attachment(tenant, vector_store_id, file_id))

    def passages(self, tenant: Tenant, vector_store_id: str, file_id: str) -> Json:
        """The chunks of a file of a store, as they stand in prompts."""
        chunks = self._library.passages(tenant, vector_store_id, file_id)
        shown = [{"type": "text", "text": one.text, "page": one.page, "heading": one.heading} for one in chunks]
        return {"object": "vector_store.file_content.page", "data": shown, "has_more": False, "next_page": None}

    def detach(self, tenant: Tenant, vector_store_id: str, file_id: str) -> Json:
        """Take a file out of a store; the file stays."""
        self._library.detach(tenant, vector_store_id, file_id)
        return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}

    def response(self, tenant: Tenant, response_id: str) -> Json:
        """A response that was kept."""
        kept: Json = json.loads(self._library.response(tenant, response_id).body)
        return kept

    def items(self, tenant: Tenant, response_id: str, order: Order = "desc") -> Json:
        """The items it was asked, without the responses that it goes on from."""
        items: list[Json] = json.loads(self._library.response(tenant, response_id).items)
        data = [{"id": f"in_{i}_{response_id}", **item} for i, item in enumerate(items)]
        data = data[::-1] if order == "desc" else data
        return {"object": "list", "data": data, "first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}

    def forget(self, tenant: Tenant, response_id: str) -> Json:
        """Delete a response; those that go on from it cannot be gone on from any more."""
        self._library.remove_response(tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _store(self, tenant: str, store: core.Store) -> Json:
        counts, usage = (core.Counts(), 0) if store.expired else self._library.counts(tenant, store.id)
        status = "expired" if store.expired else "in_progress" if counts.in_progress else "completed"
        return {
            "id": store.id,
            "object": "vector_store",
            "created_at": store.created,
            "name": store.name,
            "description": store.description,
            "usage_bytes": usage,
            "file_counts": {**asdict(counts), "total": counts.total},
            "status": status,
            "expires_after": None if store.days is None else {"anchor": "last_active_at", "days": store.days},
            "expires_at": store.expires,
            "last_active_at": store.active,
            "metadata": dict(store.metadata),
        }

    def _attachment(self, one: core.Attachment) -> Json:
        code, message = one.error
        most = one.chunk_tokens or self._library.chunk_tokens
        sizes = {"max_chunk_size_tokens": most, "chunk_overlap_tokens": 0}
        return {
            "id": one.file,
            "object": "vector_store.file",
            "created_at": one.created,
            "usage_bytes": one.usage,
            "vector_store_id": one.store,
            "status": one.state,
            "last_error": {"code": code, "message": message} if code else None,
            "chunking_strategy": {"type": "static", "static": sizes},
            "attributes": dict(one.attributes),
        }


def _said(part: FormField) -> str:
    return part.content.decode("utf-8", "replace")


def _lifetime(form: Mapping[str, FormField]) -> int | None:
    anchor, seconds = form.get(ANCHOR), form.get(SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor is None or seconds is None:
        raise _missing(ANCHOR if anchor is None else SECONDS, f"give {ANCHOR} and {SECONDS}, or neither")
    if _said(anchor) != "created_at":
        raise core.invalid(ANCHOR, f"{ANCHOR} must be created_at, not {_said(anchor)!r}")
    given = re.fullmatch("[0-9]{1,7}", _said(seconds))
    if given is None or not LEAST_SECONDS <= int(given[0]) <= MOST_SECONDS:
        reason = f"{SECONDS} must be a whole number from {LEAST_SECONDS} to {MOST_SECONDS}, not {_said(seconds)!r}"
        raise core.invalid(SECONDS, reason)
    return int(given[0])


def _missing(field: str, message: str) -> ApiError:
    return ApiError(400, message, param=field, code="missing_required_parameter")


def _file(file: core.File) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
