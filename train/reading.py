"""Samples of passages with several questions each, from question sets: their own questions, and some from templates.

What is learned from such a sample is what full attention says, so a written answer is no more than the text along which
the two are compared. The templates ask for what a passage holds; their answers are its own sentences.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from train.sample import Asked, Passage, Sample, list_of, normal, passage_of, text_of

LONGEST = 40
"""Words of an answer from a passage."""
OPENING = 5
"""Words that a sentence is named by."""


@dataclass(frozen=True)
class Question:
    """An item of a question set: question, answer, the passages it needs, and distractors."""

    asked: Asked
    needed: tuple[Passage, ...]
    others: tuple[Passage, ...]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Question:
        """Read question, answers and passages, of which those with is_supporting are needed, or all if none has it."""
        answers = [text for text in list_of(value, "answers") if isinstance(text, str) and text.strip()]
        if not answers:
            raise ValueError("answers is missing")
        given = list_of(value, "passages")
        passages = [passage_of(each) for each in given]
        if not passages:
            raise ValueError("passages is missing")
        needed = [p for p, each in zip(passages, given, strict=True) if each.get("is_supporting")] or passages
        asked = Asked(text_of(value, "question"), answers[0].strip())
        return Question(asked, tuple(needed), tuple(p for p in passages if p not in needed))


@dataclass(frozen=True)
class Shape:
    """Size of a sample. passages: two up to so many, beyond those its questions need. asked: questions on them."""

    passages: int = 10
    asked: int = 8

    @property
    def own(self) -> int:
        """Questions of the set in a sample; the others are made from templates."""
        return max(1, self.asked // 2)


def from_questions(
    questions: Sequence[Question], shape: Shape, count: int, seed: int, taken: Set[str] = frozenset()
) -> list[Sample]:
    """`count` samples; half of what a sample asks are questions of the set, of which none comes twice before all have.

    Passages are those that its questions need and others of the set, in random order. taken: normal forms of what no
    template may ask; a sample then has fewer questions.
    """
    random = np.random.default_rng([seed, 2])
    pool = list(dict.fromkeys(p for question in questions for p in (*question.needed, *question.others)))
    order = _endless(len(questions), random)
    made = []
    for number in range(count):
        own = [questions[next(order)] for _ in range(min(shape.own, len(questions)))]
        passages = _context(own, pool, shape.passages, random)
        templates = _templates(passages, shape.asked - len(own), random)
        asked = [question.asked for question in own]
        asked += [one for one in templates if normal(one.question) not in taken]
        asked = [asked[i] for i in random.permutation(len(asked))]
        first, *also = asked
        made.append(Sample(f"text:{number}", *first, passages=tuple(passages), also=tuple(also)))
    return made


def without(questions: Sequence[Question], aside: Sequence[Question], passages: Set[Passage]) -> list[Question]:
    """The questions that are none of those aside and need none of these passages, whatever their titles; they come
    with none of them.
    """
    taken, texts = {normal(one.asked.question) for one in aside}, {normal(passage.text) for passage in passages}

    def free(passage: Passage) -> bool:
        return normal(passage.text) not in texts

    kept = (one for one in questions if normal(one.asked.question) not in taken and all(map(free, one.needed)))
    return [replace(one, others=tuple(filter(free, one.others))) for one in kept]


def _endless(count: int, random: np.random.Generator) -> Iterator[int]:
    while True:
        yield from (int(i) for i in random.permutation(count))


def _context(own: Sequence[Question], pool: Sequence[Passage], most: int, random: np.random.Generator) -> list[Passage]:
    """Up to `most` passages that the questions need, and others: two at least, if there are so many."""
    needed = list(dict.fromkeys(p for question in own for p in question.needed))[:most]
    size = int(random.integers(2, max(2, most) + 1))
    near = [p for question in own for p in question.others]
    drawn = [*(near[i] for i in random.permutation(len(near))), *(pool[i] for i in random.permutation(len(pool)))]
    others = [p for p in dict.fromkeys(drawn) if p not in needed]
    chosen = [*needed, *others[: max(0, size - len(needed))]]
    return [chosen[i] for i in random.permutation(len(chosen))]


def _templates(passages: Sequence[Passage], count: int, random: np.random.Generator) -> Iterator[Asked]:
    titles = Counter(passage.title for passage in passages)
    order = _endless(len(passages), random)
    for n in range(count):
        passage = passages[next(order)]
        sentences = [s for s in re.split(r"(?<=[.!?])\s+", " ".join(passage.text.split())) if s]
        sentence = sentences[int(random.integers(len(sentences)))]
        words = sentence.split()
        if n % 2 == 0 and n < len(passages) and passage.title and titles[passage.title] == 1:
            yield Asked(f"What do the passages say about {passage.title}?", _shortened(sentences[0]))
        elif len(words) > 2 * OPENING:
            begin = " ".join(words[:OPENING])
            rest = _shortened(" ".join(words[OPENING:]))
            yield Asked(f"How does the sentence go on that begins with “{begin}”?", rest)
        else:
            yield Asked(f"Which sentence has the words “{' '.join(words[:2])}”?", _shortened(sentence))


def _shortened(text: str) -> str:
    return " ".join(text.split()[:LONGEST])
