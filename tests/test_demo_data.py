"""The bundled demo knowledge base keeps its promises: sizes, and questions its documents can answer."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

DEMO = files("ragjax") / "demo"
FIELDS = {"id", "question", "answers", "documents"}

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
    return [json.loads(line) for line in (DEMO / "questions.jsonl").read_text(encoding="utf-8").splitlines()]


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
