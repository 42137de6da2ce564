"""Questions over long prompts: the bundled documents, sets of a data folder, and needles in a haystack."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.lines import read_lines
from benchmarks.quality import dataset
from ragjax.commands.flags import DEMO
from ragjax.core import Message
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.chat import INSTRUCTION, chat_prompt

NEEDLE = "needle"
DEMO_SET = "demo"


@dataclass(frozen=True)
class Case:
    """A prompt's tokens, and reference answers."""

    tokens: NDArray[np.int32]
    answers: tuple[str, ...]


def cases(tokenizer: Tokenizer, data: Path | None, name: str, limit: int, context: int) -> Iterator[Case]:
    """Of a set, in its order; each prompt is filled with passages, or cut, to at most `context` tokens.

    A question's own passages are kept and stand among others of the set, at places that a seed chooses.

    Raises:
        ConfigError: if the folder has no such set.
    """
    random = np.random.default_rng(0)
    if name == NEEDLE and data is not None:
        for question, answers, text in _needles(data / NEEDLE, limit, context * 5):
            yield Case(_fitted(tokenizer, question, [text], 1, context), answers)
        return
    for question, answers, own, others in _demo(limit) if data is None else _of_set(data, name, limit):
        shuffled = [others[i] for i in random.permutation(len(others))]
        place = int(random.integers(0, 3))
        yield Case(_fitted(tokenizer, question, [*own, *shuffled], len(own), context, place), answers)


Item = tuple[str, tuple[str, ...], list[str], list[str]]
"""Question, answers, the passages that it needs, and others."""


def _demo(limit: int) -> Iterator[Item]:
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted((DEMO / "documents").iterdir())}
    for line in (DEMO / "questions.jsonl").read_text(encoding="utf-8").splitlines()[:limit]:
        asked = json.loads(line)
        own = [texts[name] for name in asked["documents"]]
        others = [text for name, text in texts.items() if name not in asked["documents"]]
        yield asked["question"], tuple(asked["answers"]), own, others


def _of_set(data: Path, name: str, limit: int) -> Iterator[Item]:
    loaded = dataset.load(data, name)
    for question in loaded.questions[:limit]:
        ids = {passage.id for passage in question.passages}
        own = [passage.text for passage in question.passages]
        others = [document.text for i, document in loaded.corpus.items() if i not in ids][:200]
        yield question.text, question.answers, own, others


def _needles(folder: Path, limit: int, characters: int) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """The needle behind the sentence that ends at its depth of the first so many characters of one text."""
    haystack = [entry["text"] for entry in read_lines(folder / "haystack.jsonl", "text")]
    for number, entry in enumerate(list(read_lines(folder / "needles.jsonl", "needle", "question", "answers"))[:limit]):
        hay = haystack[number % len(haystack)][:characters]
        ends = [0, *(match.end() for match in re.finditer(r"[.!?]\s", hay))]
        place = ends[round(entry["depth"] * (len(ends) - 1))]
        yield entry["question"], tuple(entry["answers"]), f"{hay[:place]}{entry['needle']} {hay[place:]}"


def _fitted(
    tokenizer: Tokenizer, question: str, passages: Sequence[str], own: int, context: int, place: int = 0
) -> NDArray[np.int32]:
    """As many passages as fit, the first `own` moved behind `place` others; a single one that is too long is cut."""

    def tokens(chosen: Sequence[str]) -> NDArray[np.int32]:
        moved = [*chosen[own : own + place], *chosen[:own], *chosen[own + place :]]
        messages = [Message("system", INSTRUCTION), Message("user", "\n\n".join([*moved, question]))]
        prompt = chat_prompt(tokenizer, messages, None)
        return np.concatenate([segment.tokens for segment in prompt.segments]).astype(np.int32)

    count = len(passages)
    while count > 1 and len(tokens(passages[:count])) > context:
        count -= 1
    found = tokens(passages[:count])
    text = passages[0]
    while len(found) > context:  # the question stays, the passage's end goes
        text = text[: int(len(text) * min(0.98, context / len(found)))]
        found = tokens([text])
    return found
