"""The field `rag`: what knowledge an answer uses, and how its KV is reused."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ragjax import core
from ragjax.serve.schema.body import (
    MOST_ENTRIES,
    NAME_CHARS,
    TOO_LONG,
    ClosedBody,
    Count,
    Filled,
    FilledName,
    Many,
    Name,
    at_most,
)

MOST_ENTITIES = 32  # entities of a graph, at most: up to 512 paths of each are compared with the question
MOST_STEPS = 8  # steps of a relation path, on average: paths that do not fit are left out of the prompt


class InlineDocument(ClosedBody):
    """A passage given with the request; its id has no control characters, which could forge lines of a log."""

    id: Annotated[str, Field(max_length=NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
    text: Filled
    title: Name | None = None


Passage = Annotated[
    Annotated[Name, Tag("<id>")] | Annotated[InlineDocument, Tag("<document>")],
    Discriminator(lambda value: "<id>" if isinstance(value, str) else "<document>"),
]


def _few_steps(paths: object) -> object:
    count = sum(len(path) for path in paths if isinstance(path, list)) if isinstance(paths, list) else 0
    if count > (most := MOST_STEPS * MOST_ENTRIES):
        reason = f"rag.graph.relation_paths[] has {count} steps in all paths; at most {most} are taken"
        raise core.RequestError(f"{reason}. Send fewer or shorter paths", param=PATHS, code=TOO_LONG)
    return paths


PATHS = "rag.graph.relation_paths"
Entities = Annotated[
    Many[FilledName], at_most(MOST_ENTITIES, "entities", "Name fewer entities", field="rag.graph.entities")
]
Paths = Annotated[
    Many[Many[Filled]],
    at_most(MOST_ENTRIES, "paths", "Send fewer paths", field=PATHS, code=TOO_LONG),
    BeforeValidator(_few_steps),
]
Passages = Annotated[
    Many[Passage], at_most(MOST_ENTRIES, "documents", "Send fewer documents", field="rag.documents", code=TOO_LONG)
]


class TextRag(ClosedBody):
    """Settings of KV reuse for prompts without retrieval."""

    strategy: Name | None = None
    recompute_ratio: float | None = None
    compression: Name | None = None  # tokens that the answer sees: "snapkv+graph:512", or "none"
    detail: bool | None = None  # the account names the tokens of each segment

    def to_core(self) -> core.Rag:
        return core.Rag(
            strategy=self.strategy,
            recompute_ratio=self.recompute_ratio,
            compression=None if self.compression is None else core.Compression.asked(self.compression),
            detail=bool(self.detail),
        )


class GraphRag(ClosedBody):
    """Facts to use. relation_paths: each is entity, relation, entity, …; used instead of retrieval."""

    name: Name | None = None
    entities: Entities | None = None
    relation_paths: Paths | None = None
    hops: Count | None = None
    paths: Count | None = None

    def to_core(self) -> core.Graph:
        given = None if self.relation_paths is None else tuple(map(tuple, self.relation_paths))
        entities = None if self.entities is None else tuple(self.entities)
        return core.Graph(self.name, entities, given, self.hops, self.paths)


NamedGraph = Annotated[
    GraphRag,
    BeforeValidator(
        lambda graph: {"name": graph} if isinstance(graph, str) else graph, json_schema_input_type=str | GraphRag
    ),
]


class ChatRag(TextRag):
    """Settings of retrieval and KV reuse.

    documents: passages used instead of retrieval: ids of the knowledge base, or whole documents. graph: facts of a
    knowledge graph, by its name or in detail.
    """

    knowledge: Name | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    documents: Passages | None = None
    graph: NamedGraph | None = None

    def to_core(self) -> core.Rag:
        given = (x if isinstance(x, str) else core.Document(x.id, x.text, x.title or "") for x in self.documents or ())
        documents = None if self.documents is None else tuple(given)
        graph = None if self.graph is None else self.graph.to_core()
        return replace(super().to_core(), knowledge=self.knowledge, top_k=self.top_k, documents=documents, graph=graph)
