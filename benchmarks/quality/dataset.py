"""Question sets with passages: `text/<set>` of a data folder, and files in TriviaQA's and MultiHop-RAG's formats.

A set has questions (each with its own passages and reference answers) and a corpus, every passage of the set, among
which a chunk's neighbours are looked for. Sets without a `corpus.jsonl` take the passages of all their questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.questions import read_lines
from ragjax.core import ConfigError, Document

SETS = ("musique", "hotpotqa", "2wikimultihopqa", "nq_open", "squad_xquad_en", "drop_small", "dialogsum")
"""Sets that the benchmark is made for; any other folder of the same form will do."""

MULTIHOP = "MultiHopRAG.json"
LETTERS = "ABCDEFGH"


@dataclass(frozen=True)
class Question:
    """A question, its reference answers (the first is the one teacher-forced) and the passages it is asked over.

    choices: the options of a set with multiple choice; the first answer is one of them.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    passages: tuple[Document, ...]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Questions in the file's order, and the corpus by document id."""

    name: str
    questions: tuple[Question, ...]
    corpus: Mapping[str, Document]


Search = Callable[[str], Sequence[Document]]  # finds passages for a question


def load(data: Path, name: str, search: Search | None = None) -> QuestionSet:
    """A set of a data folder; questions without an answer or without passages are left out.

    A set is a folder with `questions.jsonl`, or with MultiHop-RAG's two files. search: finds passages for questions
    that bring none. A question with `choices` may have the letter of the right one as its answer.

    Raises:
        ConfigError: if the folder has no such set, or it holds no question that can be used.
    """
    path = data / "text" / name / "questions.jsonl"
    if (path.parent / MULTIHOP).is_file():
        return multihop(path.parent)
    if not path.is_file():
        known = ", ".join(sorted(p.parent.name for p in data.glob("text/*/questions.jsonl"))) or "none"
        raise ConfigError(f"{data} has no set {name!r} (text/{name}/questions.jsonl); there is: {known}")
    found = [_question(entry) for entry in read_lines(path, "id", "question", "answers", "passages")]
    if search is not None:
        found = [q if q.passages else replace(q, passages=tuple(search(q.text))) for q in found]
    corpus = path.with_name("corpus.jsonl")
    documents = [_document(entry) for entry in read_lines(corpus, "id", "text")] if corpus.is_file() else []
    return _set(name, found, documents, path)


def triviaqa(path: Path) -> QuestionSet:
    """A file in TriviaQA's format, with the evidence in its `EntityPages` and `SearchResults`.

    TriviaQA's own files name the evidence and keep it in a folder beside them; here every page needs its text under
    "Text" (or "text"), as inlined copies have it. Pages without text are left out.

    Raises:
        ConfigError: if the file is not of this form, or no question has a page with text.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["Data"]
        found = [_trivia(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path} is not in TriviaQA\'s format ({{"Data": [{{"Question", "QuestionId", "Answer": {{"Value", '
            f'"Aliases"}}, "EntityPages" or "SearchResults"}}]}}): {type(error).__name__}: {error}'
        ) from error
    if not any(question.passages for question in found):
        raise ConfigError(
            f'{path}: no page has its text; put each evidence file\'s text under "Text" of its EntityPages or '
            "SearchResults entry"
        )
    return _set(path.stem, found, (), path)


def multihop(folder: Path) -> QuestionSet:
    """MultiHop-RAG (arXiv 2401.15391): a question's passages are the articles that its evidence is from.

    Raises:
        ConfigError: if its two files are not of this form.
    """
    try:
        entries = json.loads((folder / MULTIHOP).read_text(encoding="utf-8"))
        articles = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        corpus = {a["title"]: Document(a.get("url") or a["title"], a["body"], a["title"]) for a in articles}
        found = [_multihop(number, entry, corpus) for number, entry in enumerate(entries)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{folder} is not in MultiHop-RAG\'s format ({MULTIHOP}: [{{"query", "answer", "evidence_list": '
            f'[{{"title"}}]}}], corpus.json: [{{"title", "body"}}]): {type(error).__name__}: {error}'
        ) from error
    return _set(folder.name, found, corpus.values(), folder / MULTIHOP)


def _multihop(number: int, entry: Mapping[str, Any], corpus: Mapping[str, Document]) -> Question:
    titles = dict.fromkeys(evidence["title"] for evidence in entry["evidence_list"])
    passages = tuple(corpus[title] for title in titles if title in corpus)
    answers = (entry["answer"].strip(),) if entry["answer"].strip() else ()
    return Question(f"multihop-{number}", entry["query"].strip(), answers, passages)


def _set(name: str, found: Sequence[Question], documents: Iterable[Document], path: Path) -> QuestionSet:
    questions = tuple(question for question in found if question.answers and question.passages)
    if not questions:
        raise ConfigError(
            f"{path}: no question has both an answer and a passage; --corpus finds passages in another set"
        )
    passages = (passage for question in questions for passage in question.passages)
    return QuestionSet(name, questions, {d.id: d for d in (*documents, *passages)})


def _question(entry: Mapping[str, Any]) -> Question:
    answers = tuple(a.strip() for a in entry["answers"] if a.strip())
    passages = {p["id"]: _document(p) for p in entry["passages"] if p["text"].strip()}
    choices = tuple(dict.fromkeys(c.strip() for c in entry.get("choices") or () if c.strip()))
    if choices and answers and answers[0] not in choices:
        given = dict(zip(LETTERS, entry["choices"], strict=False))
        if given.get(answers[0], "").strip() not in choices:
            raise ConfigError(f"question {entry['id']}: the answer {answers[0]!r} is neither a choice nor its letter")
        answers = (given[answers[0]].strip(),)
    return Question(entry["id"], entry["question"].strip(), answers, tuple(passages.values()), choices)


def _document(entry: Mapping[str, Any]) -> Document:
    return Document(entry["id"], entry["text"], entry.get("title") or "")


def _trivia(entry: Mapping[str, Any]) -> Question:
    answer = entry["Answer"]
    answers = dict.fromkeys(a.strip() for a in (answer["Value"], *answer.get("Aliases", ())) if a.strip())
    pages = {page.id: page for page in _pages(entry)}
    return Question(entry["QuestionId"], entry["Question"].strip(), tuple(answers), tuple(pages.values()))


def _pages(entry: Mapping[str, Any]) -> Iterator[Document]:
    for field in ("EntityPages", "SearchResults"):
        for page in entry.get(field) or ():
            text = page.get("Text") or page.get("text") or ""
            title = page.get("Title") or ""
            if text.strip():
                yield Document(page.get("Filename") or page.get("Url") or title or text[:80], text, title)
