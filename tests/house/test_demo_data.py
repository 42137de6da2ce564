"""The bundled demo keeps its promises: sizes, questions its documents can answer, and a graph of what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

from ragjax.retrieval.lexicon import Lexicon
from ragjax.retrieval.triple_files import read_triples
from ragjax.retrieval.triples import INVERSE, RelationPath, Triple

DEMO = files("ragjax") / "demo"
FIELDS = {"id", "question", "answers", "documents"}
GRAPH_FIELDS = {"id", "question", "answers", "topic_entities", "triples", "paths"}

Documents = dict[str, tuple[str, str]]
Questions = list[dict[str, Any]]


@pytest.fixture(scope="module")
def documents() -> Documents:
    """Document id -> (title line, body)."""
    found: Documents = {}
    for entry in (DEMO / "documents").iterdir():
        title, _, body = entry.read_text(encoding="utf-8").partition("\n")
        found[entry.name.removesuffix(".md")] = (title, body)
    return found


@pytest.fixture(scope="module")
def questions() -> Questions:
    return lines("questions.jsonl")


@pytest.fixture(scope="module")
def facts() -> list[Triple]:
    return [item for item in read_triples(str(DEMO / "facts.tsv")) if isinstance(item, Triple)]


@pytest.fixture(scope="module")
def graph_questions() -> Questions:
    return lines("graph_questions.jsonl")


def lines(name: str) -> Questions:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def contains(body: str, answer: str) -> bool:
    # Whole words only: the answer "13" must not be found in "1913".
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", body, re.IGNORECASE) is not None


def test_there_are_enough_documents_and_questions(documents: Documents, questions: Questions) -> None:
    assert len(documents) >= 42
    assert len(questions) >= 66


def test_documents_are_titled_and_of_the_promised_length(documents: Documents) -> None:
    for slug, (title, body) in documents.items():
        assert title.startswith("# "), slug
        assert 150 <= len(body.split()) <= 400, slug
        assert body.isascii(), slug


def test_documents_have_different_titles_and_share_no_sentence(documents: Documents) -> None:
    titles = [title for title, _ in documents.values()]
    assert len(set(titles)) == len(titles)
    sentences = Counter(s for _, body in documents.values() for s in re.split(r"(?<=[.?!])\s+", body.strip()))
    assert [sentence for sentence, n in sentences.items() if n > 1] == []


def test_questions_are_well_formed_and_unique(questions: Questions) -> None:
    for q in questions:
        assert set(q) == FIELDS, q
        assert q["question"].endswith("?"), q
        assert q["answers"] and all(a == a.strip() and a for a in q["answers"]), q
        assert len(set(q["documents"])) == len(q["documents"]) in (1, 2), q
    assert len({q["id"] for q in questions}) == len(questions)
    assert len({q["question"].lower() for q in questions}) == len(questions)


def test_questions_name_existing_documents_and_cover_all(documents: Documents, questions: Questions) -> None:
    named = {slug for q in questions for slug in q["documents"]}
    assert named == set(documents)


def test_a_third_of_the_questions_need_two_documents(questions: Questions) -> None:
    two = [q for q in questions if len(q["documents"]) == 2]
    assert len(two) >= 22
    assert 3 * len(two) >= len(questions)


def test_single_document_answers_occur_in_their_document(documents: Documents, questions: Questions) -> None:
    for q in questions:
        if len(q["documents"]) != 1:
            continue
        (slug,) = q["documents"]
        for answer in q["answers"]:
            assert contains(documents[slug][1], answer), (q["id"], answer)


def test_two_document_answers_occur_in_one_of_the_two_only(documents: Documents, questions: Questions) -> None:
    # The other document holds the link: if it held the answer too, one document would be enough.
    for q in questions:
        if len(q["documents"]) != 2:
            continue
        for answer in q["answers"]:
            holders = [slug for slug in q["documents"] if contains(documents[slug][1], answer)]
            assert len(holders) == 1, (q["id"], answer, holders)


def test_no_question_contains_its_answer(questions: Questions) -> None:
    for q in questions:
        assert not any(contains(q["question"], answer) for answer in q["answers"]), q["id"]


# -------------------------------------------------------------------------------------------- graph


def reached(facts: list[Triple], start: str, relations: list[str]) -> set[str]:
    """Where a walk over these relations can end."""
    ends = {start}
    for relation in relations:
        name = relation.removesuffix(INVERSE)
        steps = [fact[::-1] if relation != name else fact for fact in facts if fact.relation == name]
        ends = {to for begin, _, to in steps if begin in ends}
    return ends


def test_facts_are_as_many_as_promised_and_stand_once(facts: list[Triple]) -> None:
    assert 180 <= len(facts) <= 260
    assert len(set(facts)) == len(facts)
    relations = {fact.relation for fact in facts}
    assert 25 <= len(relations) <= 40
    assert all(re.fullmatch(r"[a-z]+( [a-z]+)*", relation) for relation in relations)
    entities = {name for fact in facts for name in (fact.head, fact.tail)}
    assert len({name.lower() for name in entities}) == len(entities), "one spelling of each"


def test_both_ends_of_a_fact_stand_in_one_document(documents: Documents, facts: list[Triple]) -> None:
    texts = [f"{title}\n{body}" for title, body in documents.values()]
    apart = [fact for fact in facts if not any(contains(t, fact.head) and contains(t, fact.tail) for t in texts)]
    # The document of the gale says "a weather station was built at Cape Morrow".
    assert apart == [("Cape Morrow weather station", "built after", "Great Gale of 1927")]
    assert all(any(contains(t, name) for t in texts) for fact in apart for name in (fact.head, fact.tail))


def test_graph_questions_are_well_formed_and_half_of_them_take_two_hops(graph_questions: Questions) -> None:
    assert [q["id"] for q in graph_questions] == [f"g{n:02d}" for n in range(1, 25)]
    assert len({q["question"].lower() for q in graph_questions}) == len(graph_questions)
    for q in graph_questions:
        assert set(q) == GRAPH_FIELDS and q["question"].endswith("?"), q
        assert not any(contains(q["question"], answer) for answer in q["answers"]), q["id"]
    hops = Counter(len(path) // 2 for q in graph_questions for path in q["paths"][:1])
    assert hops == {1: 12, 2: 12}


def test_gold_paths_walk_the_facts_to_the_answers_alone(facts: list[Triple], graph_questions: Questions) -> None:
    for q in graph_questions:
        paths = [RelationPath(tuple(path)) for path in q["paths"]]
        walked = [list(triple) for path in paths for triple in path.triples]
        assert q["triples"] == walked and {tuple(triple) for triple in walked} <= set(facts), q["id"]
        ends = {path.entities[-1] for path in paths}
        assert ends <= set(q["answers"]), q["id"]
        for path in paths:
            assert reached(facts, path.steps[0], list(path.steps[1::2])) == ends, q["id"]


def test_a_graph_question_names_its_topic_and_no_other_entity(facts: list[Triple], graph_questions: Questions) -> None:
    lexicon, names = Lexicon(), {name for fact in facts for name in (fact.head, fact.tail)}
    for name in names:
        lexicon.add_entity(name)
    for q in graph_questions:
        assert [mention.entity for mention in lexicon.mentions(q["question"], names)] == q["topic_entities"], q["id"]
        assert {path[0] for path in q["paths"]} == set(q["topic_entities"]), q["id"]
