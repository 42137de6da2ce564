"""Bodies about vector stores and the files in them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ragjax import core
from ragjax.serve.schema import body
from ragjax.serve.schema.body import Body, ClosedBody, FilledName, Key, Metadata, Name, Scalar

MOST_VALUES = 64
"""Values of `in` and `nin`, at most."""


class FilterBody(Body):
    """A filter of files: an attribute compared with a value."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: Key
    value: Annotated[
        Annotated[Scalar, Tag("<one>")] | Annotated[list[Scalar], Field(max_length=MOST_VALUES), Tag("<several>")],
        Discriminator(lambda value: "<several>" if isinstance(value, list | tuple) else "<one>"),
    ]

    def to_core(self) -> core.Filter:
        value = tuple(self.value) if isinstance(self.value, list) else self.value
        return core.Filter(self.type, self.key, value)


MOST_FILES = 500
"""Files of a request, at most, as in OpenAI's API."""
FileIds = Annotated[list[FilledName], Field(max_length=MOST_FILES)]

MOST_RESULTS = 50
"""Passages of a search, at most, as in OpenAI's API."""


class Expiry(ClosedBody):
    """Expiry of a store: so many days after its last use."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Field(ge=1, le=365)]


class StaticChunks(ClosedBody):
    """Sizes of chunks in tokens of the serving model."""

    max_chunk_size_tokens: Annotated[int, Field(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Field(ge=0)] | None = None


class Chunking(ClosedBody):
    type: Literal["auto", "static"]
    static: StaticChunks | None = None

    def to_core(self) -> int | None:
        """Most tokens of a chunk; None: the knowledge base's own choice."""
        if self.type == "auto":
            body.refuse_beside(self.type, "chunking_strategy", static=self.static)
            return None
        if self.static is None:
            reason = 'chunking_strategy of type static needs static: {"max_chunk_size_tokens": …}'
            raise core.RequestError(reason, param="chunking_strategy.static", code="missing_required_parameter")
        if self.static.chunk_overlap_tokens:
            reason = "chunks do not overlap, so that the KV of each is computed once: chunk_overlap_tokens must be 0"
            raise core.invalid("chunking_strategy.static.chunk_overlap_tokens", reason)
        return self.static.max_chunk_size_tokens


class AttachmentBody(ClosedBody):
    """Body of POST /v1/vector_stores/{store}/files: a file, and what is noted of it."""

    file_id: FilledName
    attributes: body.Attributes | None = None
    chunking_strategy: Chunking | None = None

    def to_core(self, store: str) -> core.Attachment:
        size = None if self.chunking_strategy is None else self.chunking_strategy.to_core()
        return core.Attachment(store, self.file_id, 0, attributes=self.attributes or {}, chunk_tokens=size)


class StoreBody(ClosedBody):
    """Body of POST /v1/vector_stores."""

    name: Name | None = None
    description: Name | None = None
    file_ids: FileIds | None = None
    expires_after: Expiry | None = None
    chunking_strategy: Chunking | None = None
    metadata: Metadata | None = None

    def to_core(self, store: str) -> list[core.Attachment]:
        sizes = self.chunking_strategy
        if sizes is not None:
            sizes.to_core()
        given = self.file_ids or []
        if len(set(given)) < len(given):
            raise core.invalid("file_ids", "a file is given twice")
        return [AttachmentBody(file_id=file, chunking_strategy=sizes).to_core(store) for file in given]


class StoreChange(ClosedBody):
    """Body of POST /v1/vector_stores/{store}; what is left out stays as it is, and null takes it away."""

    name: Name | None = None
    expires_after: Expiry | None = None
    metadata: Metadata | None = None


class Ranking(Body):
    """Bounds of a search. score_threshold: the least cosine similarity. All rankers are the same here."""

    ranker: Name | None = None
    score_threshold: float | None = None


class SearchBody(ClosedBody):
    """Body of POST /v1/vector_stores/{store}/search.

    rewrite_query: false only: a query is searched for as it is.
    """

    query: Annotated[
        list[body.Filled],
        Field(min_length=1, max_length=16),
        BeforeValidator(
            lambda query: [query] if isinstance(query, str) else query, json_schema_input_type=str | list[str]
        ),
    ]
    max_num_results: Annotated[int, Field(ge=1, le=MOST_RESULTS)] | None = None
    filters: FilterBody | None = None
    ranking_options: Ranking | None = None
    rewrite_query: Literal[False] | None = None
