"""A search in several knowledge bases at a time."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ragjax.core import Hit
from ragjax.retrieval.knowledge import KnowledgeBase, Query


@dataclass(frozen=True)
class BasePart:
    """One of the knowledge bases of a search. within: ids of its documents that may be found; None: all."""

    base: KnowledgeBase
    within: frozenset[str] | None = None

    def may_find(self, document_id: str) -> bool:
        return (self.within is None or document_id in self.within) and document_id in self.base


def search_parts(
    parts: Sequence[BasePart], question: str | Query, k: int, min_score: float | None = None
) -> list[tuple[BasePart, Hit]]:
    """The k chunks of all parts together that are nearest to the question, best first, and the part of each.

    A document that several parts may find is found in the first of these alone: no text stands in a prompt twice.
    """
    filled = [part for part in parts if len(part.base)] or list(parts[:1])
    found: list[tuple[BasePart, Hit]] = []
    for n, part in enumerate(filled):
        within = _LaterDocuments(part, filled[:n]) if n else part.within
        found += [(part, hit) for hit in part.base.search(question, k, within=within, min_score=min_score)]
    return sorted(found, key=lambda one: -one[1].score)[:k]


@dataclass(frozen=True)
class _LaterDocuments(Container[str]):
    """Documents of a part that no earlier one may find."""

    part: BasePart
    earlier: Sequence[BasePart]

    def __contains__(self, document_id: object) -> bool:
        assert isinstance(document_id, str)
        return self.part.may_find(document_id) and not any(part.may_find(document_id) for part in self.earlier)
