"""A sample of passages, written out a byte a token, and by name who sees whom."""

from __future__ import annotations

import numpy as np

from ragjax.prompting.chat import INSTRUCTION
from train.sample import Asked, Passage, Sample

READING = Sample(
    "r",
    "Who?",
    "Ann",
    passages=(Passage("Ann", "She left."), Passage("", "It rains in Bath."), Passage("C", "Bob stays.")),
    also=(Asked("Where?", "Bath"), Asked("And Bob?", "He stays.")),
)


def written(sample: Sample, *, apart: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Tokens, positions, who sees whom [n, n], and each learned token with the row that predicts it."""
    tokens: list[tuple[int, int, str]] = []  # byte, position, part
    control = {0: 256, 1: 257}

    def add(text: bytes, part: str, at: int | None = None, plain: bool = False) -> None:
        begin = len(tokens) if at is None else at
        tokens.extend((c if plain else control.get(c, c), begin + i, part) for i, c in enumerate(text))

    add(b"\x00system\n" + INSTRUCTION.encode() + b"\x01\n\x00user\n", "head")
    for i, passage in enumerate(sample.passages):
        heading = f"{passage.title}\n" if passage.title else ""
        add(f"{heading}{passage.text}\n\n".encode(), f"passage {i}", plain=True)
    behind, learned = len(tokens), []
    for i, asked in enumerate(sample.asked):
        add(b"Question: " + asked.question.encode() + b"\x01\n\x00assistant\n", f"question {i}", behind)
        answer = [*asked.answer.encode(), 257]
        learned += [(len(tokens) - 1 + j, x) for j, x in enumerate(answer)]
        last = tokens[-1][1] + 1
        tokens.extend((x, last + j, f"question {i}") for j, x in enumerate(answer[:-1]))

    def sees(row: int, key: int) -> bool:
        a, b = tokens[row][2], tokens[key][2]
        if key > row or a == b or b == "head":
            return key <= row
        return not (b.startswith("question") or (apart and a.startswith("passage")))

    n = len(tokens)
    seen = np.array([[sees(i, j) for j in range(n)] for i in range(n)])
    return np.array([t[0] for t in tokens]), np.array([t[1] for t in tokens]), seen, learned


def seen_of(hide_from: np.ndarray, hide_until: np.ndarray) -> np.ndarray:
    order = np.arange(len(hide_from))
    hidden = (hide_from[None] <= order[:, None]) & (order[:, None] < hide_until[None])
    return (order[None] <= order[:, None]) & ~hidden


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
