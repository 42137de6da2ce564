"""A search in several knowledge bases at a time."""

from __future__ import annotations

import pytest

from ragjax.core import Document, RequestError
from ragjax.retrieval.index import TRAIN_AT, IndexKind
from ragjax.retrieval.union import BasePart, search_parts
from tests.support.shelf import ISLANDS, open_base


def found(parts: list[BasePart], question: str, k: int, min_score: float | None = None) -> list[tuple[str, int]]:
    """The documents, and the part that each is of."""
    return [(hit.chunk.document_id, parts.index(part)) for part, hit in search_parts(parts, question, k, min_score)]


def test_passages_of_all_bases_are_merged_by_score() -> None:
    whole, left, right = open_base(name="whole"), open_base(name="left"), open_base(name="right")
    whole.add(ISLANDS)
    left.add(ISLANDS[::2])
    right.add(ISLANDS[1::2])
    for question in ("honey in red boxes", "copper", "salt and honey"):
        for k in (1, 2, 3, 9):
            together = search_parts([BasePart(left), BasePart(right)], question, k)
            alone = whole.search(question, k)
            assert [hit.chunk.id for _, hit in together] == [hit.chunk.id for hit in alone]
            assert [hit.score for _, hit in together] == pytest.approx([hit.score for hit in alone])
    least = whole.search("honey", 1)[0].score - 1e-6
    assert found([BasePart(left), BasePart(right)], "honey", 4, least) == [("isle/1", 1)]


def test_a_document_of_several_bases_is_found_in_the_first_that_may() -> None:
    first, second = open_base(name="first"), open_base(name="second")
    first.add([Document("a", "honey"), Document("b", "salt")])
    second.add([Document("a", "honey of the second"), Document("b", "salt"), Document("c", "honey honey salt")])
    assert sorted(found([BasePart(first), BasePart(second)], "honey", 9)) == [("a", 0), ("b", 0), ("c", 1)]
    parts = [BasePart(first, frozenset("b")), BasePart(second, frozenset("ac"))]
    assert sorted(found(parts, "honey", 9)) == [("a", 1), ("b", 0), ("c", 1)]
    assert len(found([BasePart(first), BasePart(second)], "honey", 3)) == 3, "what is left out makes room for others"


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(IndexKind))
def test_what_an_earlier_base_does_not_hold_is_found(kind: IndexKind) -> None:
    """The second base has few documents of its own, far from the question."""
    first, second = open_base(name="first"), open_base(name="second", index_kind=kind)
    both = [Document(f"d{n}", f"word{n} and more") for n in range(TRAIN_AT)]
    first.add(both)
    second.add([*both, Document("own", "honey")])
    assert sorted(found([BasePart(first), BasePart(second)], "word7", TRAIN_AT + 5))[-1] == ("own", 1)


def test_empty_bases_are_passed_over() -> None:
    empty, filled = open_base(name="empty"), open_base(name="filled")
    filled.add(ISLANDS)
    assert found([BasePart(empty), BasePart(filled)], "honey", 1) == [("isle/1", 1)]
    with pytest.raises(RequestError, match="is empty"):
        search_parts([BasePart(empty), BasePart(empty)], "honey", 1)
