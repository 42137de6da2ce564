"""Questions over long prompts: the bundled documents, sets of a data folder, and needles in a haystack."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.questions import read_lines
from benchmarks.quality import dataset
from ragjax.commands.flags import DEMO
from ragjax.core import Message
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.chat import INSTRUCTION, chat_prompt

NEEDLE = "needle"
DEMO_SET = "demo"


@dataclass(frozen=True)
class Case:
    """A prompt's tokens, reference answers, and how many tokens the question has."""

    tokens: NDArray[np.int32]
    answers: tuple[str, ...]
    question: int


def cases(tokenizer: Tokenizer, data: Path | None, name: str, limit: int, context: int) -> Iterator[Case]:
    """Of a set, in its order; each prompt is filled with passages, or cut, to at most `context` tokens.

    A question's own passages are kept and stand among others of the set, at places that a seed chooses.

    Raises:
        ConfigError: if the folder has no such set.
    """
    random = np.random.default_rng(0)
    if name == NEEDLE and data is not None:
        for question, answers, text in _needles(data / NEEDLE, limit):
            tokens = _shortened(tokenizer, question, text, context)
            yield Case(tokens, answers, len(tokenizer.encode(question, special=False)))
        return
    for question, answers, own, others in _demo(limit) if data is None else _of_set(data, name, limit):
        shuffled = [others[i] for i in random.permutation(len(others))]
        place = int(random.integers(0, 3))
        tokens = _fitted(tokenizer, question, [*own, *shuffled], len(own), context, place)
        yield Case(tokens, answers, len(tokenizer.encode(question, special=False)))


Item = tuple[str, tuple[str, ...], list[str], list[str]]  # question, answers, the passages that it needs, and others


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


def _needles(folder: Path, limit: int) -> Iterator[tuple[str, tuple[str, ...], Callable[[int], str]]]:
    """Questions, answers, and the text by its length: the needle behind the sentence that ends at its depth."""
    haystack = "\n\n".join(entry["text"] for entry in read_lines(folder / "haystack.jsonl", "text"))
    entries = list(read_lines(folder / "needles.jsonl", "needle", "question", "answers"))[:limit]
    for number, entry in enumerate(entries):
        begin = number * len(haystack) // len(entries)
        hay = haystack[begin:] + haystack[:begin]

        def text(characters: int, hay: str = hay, entry: Mapping[str, Any] = entry) -> str:
            cut = hay[:characters]
            ends = [0, *(match.end() for match in re.finditer(r"[.!?]\s", cut))]
            place = ends[round(entry["depth"] * (len(ends) - 1))]
            return f"{cut[:place]}{entry['needle']} {cut[place:]}"

        yield entry["question"], tuple(entry["answers"]), text


def _tokens(tokenizer: Tokenizer, passages: Sequence[str], question: str) -> NDArray[np.int32]:
    messages = [Message("system", INSTRUCTION), Message("user", "\n\n".join([*passages, question]))]
    prompt = chat_prompt(tokenizer, messages, None)
    return np.concatenate([segment.tokens for segment in prompt.segments]).astype(np.int32)


def _shortened(tokenizer: Tokenizer, question: str, text: Callable[[int], str], context: int) -> NDArray[np.int32]:
    characters = 5 * context
    found = _tokens(tokenizer, [text(characters)], question)
    while len(found) > context:
        characters = int(characters * min(0.98, context / len(found)))
        found = _tokens(tokenizer, [text(characters)], question)
    return found


def _fitted(
    tokenizer: Tokenizer, question: str, passages: Sequence[str], own: int, context: int, place: int
) -> NDArray[np.int32]:
    """A prompt with as many passages as fit, the first `own` behind `place` others; a long one alone loses its end."""
    count = len(passages)
    while count > 1 and len(found := _tokens(tokenizer, _moved(passages[:count], own, place), question)) > context:
        count -= 1
    if count > 1:
        return found
    return _shortened(tokenizer, question, lambda characters: passages[0][:characters], context)


def _moved(passages: Sequence[str], own: int, place: int) -> list[str]:
    return [*passages[own : own + place], *passages[:own], *passages[own + place :]]
