"""Segments of prompts as Python callers make them."""

from __future__ import annotations

import numpy as np
import pytest

from ragjax.core import Document, Kind, Place, RequestError, Segment

TOKENS = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize(
    ("given", "kind"),
    [("system", Kind.SYSTEM), ("chunk", Kind.CHUNK), ("join", Kind.QUERY), ("query", Kind.QUERY), ("node", Kind.NODE)],
)
def test_a_kind_may_be_given_by_its_name(given: str, kind: Kind) -> None:
    """The code compares kinds by identity: a text that stays one loses all reuse."""
    assert Segment("s", given, TOKENS).kind is kind  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["chnk", None, 3])
def test_an_unknown_kind_is_refused(given: object) -> None:
    with pytest.raises(RequestError, match=r"segment 's' has no kind .*: give one of system, chunk, node, query"):
        Segment("s", given, TOKENS)  # type: ignore[arg-type]


def test_a_character_stands_in_the_place_that_began_last() -> None:
    cover, empty, page = Place(2, page=1), Place(5, page=2), Place(5, page=3)
    document = Document("d", "words words", places=(cover, empty, page))
    assert [document.place_at(offset) for offset in (0, 2, 4, 5, 10)] == [None, cover, cover, page, page]
