"""Communities of a graph: two cliques are told apart, whatever the order of their facts."""

from __future__ import annotations

import itertools
import random
import sys
import threading

import pytest

from ragjax.core import ConfigError, Document
from ragjax.retrieval.communities import MOST_FACTS, communities, community_documents, summarised
from ragjax.retrieval.triples import Triple


def clique(letters: str) -> list[Triple]:
    return [Triple(a, "is beside", b) for a, b in itertools.combinations(letters, 2)]


FACTS = [*clique("abcde"), *clique("vwxyz"), Triple("a", "has met", "v")]


def test_two_cliques_are_two_communities_in_any_order() -> None:
    found = communities(FACTS)
    assert [set(facts) for facts in found] == [set(clique("abcde")), set(clique("vwxyz"))]
    for seed in range(5):
        shuffled = random.Random(seed).sample(FACTS, len(FACTS))
        assert communities([*shuffled, *shuffled]) == found


def test_levels_are_told_from_the_finest_on() -> None:
    """A ring of thirty cliques: Louvain's first level has the cliques, the next ones join neighbours."""
    names = [[f"{i}{letter}" for letter in "abcd"] for i in range(30)]
    inside = [Triple(a, "is beside", b) for group in names for a, b in itertools.combinations(group, 2)]
    ring = [Triple(names[i][0], "is before", names[(i + 1) % 30][1]) for i in range(30)]
    sizes = [len(facts) for facts in communities([*inside, *ring])]
    assert sizes[:30] == [6] * 30 and all(size >= 13 for size in sizes[30:]) and len(sizes) > 30


def test_a_document_has_the_most_connected_facts_and_an_id_of_its_text() -> None:
    hub = [Triple("hub", "leads to", f"leaf {i:02}") for i in range(40)]
    facts = [*hub, Triple("leaf 38", "belongs to", "hub")]
    (one,) = community_documents(facts)
    lines = one.text.splitlines()
    assert len(lines) == MOST_FACTS
    assert lines[:3] == ["hub leads to leaf 38.", "leaf 38 belongs to hub.", "hub leads to leaf 00."]
    assert one.title == "hub, leaf 38, leaf 00"
    again = community_documents([*facts, *clique("xyz")])
    assert one in again and len({document.id for document in again}) == 2


def test_a_graph_without_facts_has_none() -> None:
    assert communities([]) == [] and community_documents([]) == []


def test_a_summary_that_says_nothing_is_left_out_and_an_error_asks_no_more() -> None:
    documents = [Document(str(i), f"fact {i}") for i in range(30)]
    found = summarised(documents, lambda text: "" if text.endswith("3") else f" {text}! ", 2)
    assert [(one.id, text) for one, text in found][:4] == [(str(i), f"fact {i}!") for i in (0, 1, 2, 4)]
    asked, going = [], threading.Event()

    def failing(text: str) -> str:
        asked.append(text)
        if text == "fact 0":
            raise ConfigError("the endpoint is gone")
        assert going.wait(60)
        return text

    with pytest.raises(ConfigError, match="gone"):
        threading.Timer(0.2, going.set).start()
        list(summarised(documents, failing, 2))
    assert len(asked) < 30


def test_without_networkx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ConfigError, match="pip install"):
        communities(FACTS)
