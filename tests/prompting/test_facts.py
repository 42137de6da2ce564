"""Requests with facts: from a question or given paths to trees in the prompt, and what the answer says of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ragjax.core import Graph, Indexing, Kind, Message, Prompt, Rag, Request, RequestError
from ragjax.engine import Engine
from ragjax.engine.knowledge import fill
from ragjax.prompting.chat import graph_prompt
from ragjax.prompting.facts import ground
from ragjax.retrieval.filling import GraphFilling
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.triples import RelationPath, Subgraph, Triple
from tests.support import tiny
from tests.support.tiny import HashedEncoder

TRIPLES = [
    Triple("Elon Musk", "founded", "SpaceX"),
    Triple("SpaceX", "launched", "Falcon 9"),
    Triple("SpaceX", "located in", "Texas"),
    Triple("Ada", "wrote", "Notes"),
]
QUESTION = "Where is the company that Elon Musk founded?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny.engine(open_graph=lambda name: KnowledgeGraph(None, HashedEncoder())) as made:
        made.add_triples(TRIPLES)
        yield made


def test_a_graph_holds_what_its_source_holds_now(tmp_path: Path) -> None:
    source, folder = tmp_path / "facts.tsv", tmp_path / "graph"
    found = []
    for text in ("Ada\tlives in\tParis\nAda\twrote\tNotes\n", "Ada\tlives in\tRome\nAda\twrote\tNotes\n"):
        source.write_text(text)
        with tiny.engine(open_graph=lambda name: KnowledgeGraph(folder, HashedEncoder())) as made:
            fill(GraphFilling(made.knowledge.graphs.make("facts"), "facts", source), progress=False)
            found.append([fact.steps[2] for fact in made.answer("Ada?", graph=Graph(), max_tokens=1).facts])
    assert found == [["Paris", "Notes"], ["Rome", "Notes"]]


def test_an_answer_tells_that_facts_are_still_read(engine: Engine) -> None:
    graph = engine.knowledge.graphs.get()
    graph.indexing = Indexing("facts", 0, 1, 0.0, 2.0, 0, 9.0, (), running=True)
    try:
        assert "0 of 1 files of facts are indexed" in engine.answer(QUESTION, graph=Graph(), max_tokens=1).notices[0]
    finally:
        graph.indexing = None


def paths_of(engine: Engine, **options: object) -> list[tuple[str, ...]]:
    answer = engine.answer(QUESTION, graph=Graph(**options), max_tokens=1)
    return [fact.steps for fact in answer.facts]


def test_a_question_is_answered_from_the_paths_around_its_entities(engine: Engine) -> None:
    engine.clear_cache()
    answers = [engine.answer(QUESTION, graph=Graph(), max_tokens=2, want_logits=True) for _ in range(2)]
    for answer in answers:
        assert answer.strategy == "dependency" and answer.exact_to == "dependency"
        assert [fact.steps for fact in answer.facts] == [
            ("Elon Musk", "founded", "SpaceX", "launched", "Falcon 9"),
            ("Elon Musk", "founded", "SpaceX", "located in", "Texas"),
        ]
        assert [s.title for s in answer.segments[1:-1]] == ["Elon Musk"]
    cold, warm = answers
    assert cold.segments[1].reused == 0 and warm.segments[1].recomputed == 0
    np.testing.assert_allclose(cold.logits, warm.logits, atol=2e-4)


def test_shared_steps_stand_once(engine: Engine) -> None:
    messages = (Message("user", QUESTION),)
    subgraph = Subgraph("Elon Musk", tuple(RelationPath(steps) for steps in paths_of(engine)))
    tree = graph_prompt(engine.tokenizer, messages, [subgraph])
    line = graph_prompt(engine.tokenizer, messages, [subgraph], trees=False)
    text = "".join(engine.tokenizer.decode(s.tokens) for s in tree.segments if s.kind is Kind.NODE)
    assert text == "Elon Musk -founded-> SpaceX -l" + "aunched-> Falcon 9\n" + "ocated in-> Texas\n"
    [chunk] = [s for s in line.segments if s.kind is Kind.CHUNK]
    assert engine.tokenizer.decode(chunk.tokens) == "".join(f"{path.text}\n" for path in subgraph.paths)
    assert np.array_equal(tree.segments[0].tokens, line.segments[0].tokens)
    assert np.array_equal(tree.segments[-1].tokens, line.segments[-1].tokens)


def test_a_second_turn_reuses_the_trees_of_the_first(engine: Engine) -> None:
    engine.clear_cache()
    engine.answer(QUESTION, graph=Graph(), max_tokens=1)
    turn = [Message("user", QUESTION), Message("assistant", "In Texas."), Message("user", "And who is Elon Musk?")]
    answer = engine.answer(turn, graph=Graph(), max_tokens=1)
    by_id = {s.id: s for s in answer.segments}
    assert by_id["Elon Musk"].recomputed == 0 and by_id["history"].reused == 0


def test_other_strategies_take_the_paths_as_text(engine: Engine) -> None:
    answer = engine.answer(QUESTION, graph=Graph(), strategy="naive", max_tokens=1)
    assert answer.strategy == "naive" and [s.id for s in answer.segments] == ["system", "Elon Musk", "question"]


def test_given_paths_and_entities(engine: Engine) -> None:
    given = (("Ada", "wrote", "Notes"), ("Ada", "wrote", "Notes"), ("Bob", "met", "Ada", "wrote", "Notes"))
    assert paths_of(engine, relation_paths=given) == [
        ("Ada", "wrote", "Notes"),
        ("Bob", "met", "Ada", "wrote", "Notes"),
    ]
    assert paths_of(engine, entities=("Ada",)) == [("Ada", "wrote", "Notes")]
    assert paths_of(engine, hops=1) == [("Elon Musk", "founded", "SpaceX")]


def test_nothing_found_is_said(engine: Engine) -> None:
    answer = engine.answer("zzz qqq?", graph=Graph(), max_tokens=1)
    assert answer.facts == () and answer.exact_to == "full"
    assert any("no entity of the graph" in notice for notice in answer.notices)


@pytest.mark.parametrize(
    ("rag", "message"),
    [
        (lambda: Rag(graph=Graph("other")), "unknown knowledge graph 'other'; choose one of default"),
        (lambda: Rag(graph=Graph(entities=("Nobody",))), "Nobody"),
        (lambda: Rag(graph=Graph(relation_paths=(("A", "likes"),))), "a path is entity, relation, entity"),
        (lambda: Rag(graph=Graph(relation_paths=(("A", "likes", "B", "likes", "A"),))), "'A' twice"),
        (lambda: Rag(graph=Graph(relation_paths=(("A", "likes", "B" * 65_531),))), "65537 characters; .* up to 65536"),
        (lambda: Rag(graph=Graph(hops=9)), "hops"),
        (lambda: Rag(graph=Graph(), top_k=3), "not both"),
        (lambda: Rag(graph=Graph(entities=("A",), relation_paths=())), "not both"),
    ],
)
def test_bad_graphs_are_refused(engine: Engine, rag: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine._preparation.state(Request((Message("user", QUESTION),), rag=rag()), lambda event: None, 0.0)


@pytest.mark.parametrize("room", [10, 40, 75, 200, 1000])
def test_the_paths_nearest_the_question_are_kept(room: int) -> None:
    paths = tuple(RelationPath(("a", f"r{i}", f"tail {i}"), score=(i * 7 % 10) / 10) for i in range(10))
    tokenizer, messages = tiny.byte_tokenizer(), (Message("user", "a?"),)
    empty = len(graph_prompt(tokenizer, messages, ()))

    def build(subgraphs: object) -> Prompt:
        return graph_prompt(tokenizer, messages, subgraphs)

    made = ground([Subgraph("a", paths)], build, empty + room)
    scores = sorted((fact.score for fact in made.facts), reverse=True)
    assert len(made.prompt) <= empty + room
    assert scores == sorted((path.score for path in paths), reverse=True)[: len(scores)]
    left = len(paths) - len(scores)
    assert bool(made.notices) == (left > 0) and (not left or made.notices[0].startswith(f"{left} of 10"))
    if left:
        more = {
            path.score for path in paths if path.score >= sorted((p.score for p in paths), reverse=True)[len(scores)]
        }
        wider = Subgraph("a", tuple(path for path in paths if path.score in more))
        assert len(build([wider])) > empty + room, "one more would have fitted"
