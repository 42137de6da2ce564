"""Multiple choice by log-likelihood: the options of a question, and which one a model finds likeliest.

The prompt does not show the options. Each is scored as the answer that follows the prompt, by the log-probabilities of
its tokens: their sum, and their mean (normalised by length, as Brown et al. 2020, arXiv:2005.14165, section 2.4, do).

Questions of a set with choices keep them. For others, distractors are drawn with a fixed seed from what the set has of
the answer's kind: other questions' answers, and out of the question's own passages their titles (for names) and numbers
and dates of the answer's form. Candidates that stand in the passages go first, of these the ones that stand in the
question if the answer does, and do not if it does not. Nothing that is an answer, holds one, lies in one or, but for
numbers, shares a word of four letters with one is a distractor; another name for the answer without such a word is not
recognised. A question answered by yes or no has these two options.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax  # type: ignore[import-untyped]

from benchmarks.quality.dataset import Question, QuestionSet
from benchmarks.quality.score import normalised
from ragjax.core import Tokens

OPTIONS = 4  # options of a question, the answer included
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_SMALL = frozenset({"the", "a", "an", "of", "and", "in", "on", "for", "to", "de", "la", "von", "van"})
_LONG = 4  # letters of a word that tells names apart

Kind = Literal["truth", "year", "date", "number", "name", "phrase"]
COUNTED = ("year", "date", "number")  # kinds whose forms are looked for in passages


@dataclass(frozen=True)
class Choice:
    """Options of a question, and the place of the right one among them."""

    options: tuple[str, ...]
    right: int


def choices(found: QuestionSet, count: int = OPTIONS, seed: int = 0) -> dict[str, Choice]:
    pool = list({normalised(q.answers[0]): q.answers[0] for q in found.questions}.values())
    made = {question.id: choice_of(question, pool, count, seed) for question in found.questions}
    return {name: choice for name, choice in made.items() if choice is not None}


def choice_of(question: Question, pool: Sequence[str], count: int, seed: int) -> Choice | None:
    """`count` options of a question, the right one at a random place; None if the pool has too few distractors."""
    if question.choices:
        return Choice(question.choices, question.choices.index(question.answers[0]))
    random = np.random.default_rng(_digest(f"{seed}/{question.id}"))
    answer = question.answers[0]
    if kind_of(answer) == "truth":
        options = ("yes", "no")
        return Choice(options, options.index(normalised(answer)))
    found: dict[str, str] = {}
    for text in (text for group in _groups(question, pool) for text in _shuffled(group, random)):
        found.setdefault(normalised(text), text)
    drawn = list(found.values())
    if len(drawn) < count - 1:
        return None
    right = int(random.integers(count))
    return Choice((*drawn[:right], answer, *drawn[right : count - 1]), right)


def kind_of(answer: str) -> Kind:
    if normalised(answer) in ("yes", "no"):
        return "truth"
    words = [word for word in re.findall(r"[^\s,]+", answer) if word.lower() not in _SMALL]
    months = [word for word in words if re.fullmatch(_MONTHS, word)]
    if any(letter.isdigit() for letter in answer) and not any(w[0].isupper() for w in words if w not in months):
        return "date" if months else "year" if re.fullmatch(r"\d{4}", answer) else "number"
    return "name" if words and all(word[0].isupper() for word in words if word[0].isalpha()) else "phrase"


def is_distractor(text: str, answers: Iterable[str]) -> bool:
    """Whether a text cannot be taken for one of the answers."""
    mine = normalised(text)
    return bool(mine) and not any(_alike(mine, normalised(answer), kind_of(answer)) for answer in answers)


def _alike(mine: str, other: str, kind: Kind) -> bool:
    if _holds(other, mine) or _holds(mine, other):
        return True
    return kind not in COUNTED and bool({w for w in mine.split() if len(w) >= _LONG} & set(other.split()))


def _holds(text: str, part: str) -> bool:
    return f" {part} " in f" {text} "


def _groups(question: Question, pool: Sequence[str]) -> Iterator[list[str]]:
    """Distractors, the best ones first: in the passages, of the kind, any."""
    answer = question.answers[0]
    kind, asked = kind_of(answer), normalised(question.text)
    passages = normalised("\n".join(f"{p.title}\n{p.text}" for p in question.passages))
    usable = [text for text in [*_near(question, answer), *pool] if is_distractor(text, question.answers)]
    of_kind = [text for text in usable if kind_of(text) == kind]
    read = [text for text in of_kind if _holds(passages, normalised(text))]
    in_question = _holds(asked, normalised(answer))
    yield [text for text in read if _holds(asked, normalised(text)) == in_question]
    yield read
    yield of_kind
    yield usable


def _near(question: Question, answer: str) -> Iterator[str]:
    if kind_of(answer) in COUNTED:
        form = re.compile(_form(answer))
        for passage in question.passages:
            yield from form.findall(passage.text)
    else:
        yield from (re.sub(r"\s*\(.*\)$", "", passage.title) for passage in question.passages)


def _form(answer: str) -> str:
    digits = re.sub(r"\d+", lambda run: r"\d{1,2}" if len(run[0]) < 3 else rf"\d{{{len(run[0])}}}", re.escape(answer))
    return rf"(?<![\w.,])(?:{re.sub(rf'({_MONTHS})', f'(?:{_MONTHS})', digits)})(?![\w%])"


def _shuffled(texts: Sequence[str], random: np.random.Generator) -> list[str]:
    return [texts[i] for i in random.permutation(len(texts))]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def token_scores(logits_NV: NDArray[np.float32], tokens_N: Tokens) -> NDArray[np.float64]:
    """Log-probability of each token of a continuation, float64 [N].

    logits_NV: what predicts each of them.

    Raises:
        ArithmeticError: if one is not finite.
    """
    logprob_NV: NDArray[np.float64] = log_softmax(np.asarray(logits_NV, np.float64), -1)
    found_N = logprob_NV[np.arange(len(tokens_N)), tokens_N]
    if not np.isfinite(found_N).all():
        raise ArithmeticError("the logits of an option are not finite")
    return found_N


def judged(scores: Sequence[NDArray[np.float64]], right: int) -> dict[str, Any]:
    """What a sample keeps of the token scores of each option.

    accuracy: 1 if the right option has the highest mean, accuracy_sum: the highest sum. right_p: its probability among
    the options. options: how many there are.
    """
    means, sums = [float(s.mean()) for s in scores], [float(s.sum()) for s in scores]
    return {
        "accuracy": float(np.argmax(means) == right), "accuracy_sum": float(np.argmax(sums) == right),
        "right_p": float(softmax(sums)[right]), "options": len(scores),
    }  # fmt: skip
