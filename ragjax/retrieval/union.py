"""A search in several knowledge bases at a time."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ragjax.core import Hit
from ragjax.retrieval.knowledge import KnowledgeBase


@dataclass(frozen=True)
class Part:
    """One of the knowledge bases. within: ids of its documents that may be found; None: all."""

    base: KnowledgeBase
    within: frozenset[str] | None = None

    def may_find(self, document_id: str) -> bool:
        """Whether a document is there, and may be found."""
        return (self.within is None or document_id in self.within) and document_id in self.base


def nearest(parts: Sequence[Part], question: str, k: int, min_score: float | None = None) -> list[tuple[Part, Hit]]:
    """The k chunks of all parts together that are nearest to the question, best first, and the part of each.

    A document that several parts may find is found in the first of these alone: no text stands in a prompt twice.

    Raises:
        RequestError: all parts are empty, or the question is.
    """
    filled = [part for part in parts if len(part.base)] or list(parts[:1])
    found: list[tuple[Part, Hit]] = []
    for n, part in enumerate(filled):
        within = _Rest(part, filled[:n]) if n else part.within
        found += [(part, hit) for hit in part.base.search(question, k, within=within, min_score=min_score)]
    return sorted(found, key=lambda one: -one[1].score)[:k]


@dataclass(frozen=True)
class _Rest(Container[str]):
    """Documents of a part that no earlier one may find."""

    part: Part
    earlier: Sequence[Part]

    def __contains__(self, document_id: object) -> bool:
        assert isinstance(document_id, str)
        return self.part.may_find(document_id) and not any(part.may_find(document_id) for part in self.earlier)
