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


HEAD = b"\x00system\n" + INSTRUCTION.encode() + b"\x01\n\x00user\n"


def written(sample: Sample, *, apart: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Tokens, positions, who sees whom [n, n], and each learned token with the row that predicts it.

    apart: each passage sees itself and the head, which is copied right before it; the copy is seen by it alone.
    """
    tokens: list[tuple[int, int, str]] = []  # byte, position, part
    control = {0: 256, 1: 257}

    def add(text: bytes, part: str, at: int, plain: bool = False) -> int:
        tokens.extend((c if plain else control.get(c, c), at + i, part) for i, c in enumerate(text))
        return at + len(text)

    at = add(HEAD, "head", 0)
    for i, passage in enumerate(sample.passages):
        heading = f"{passage.title}\n" if passage.title else ""
        if apart and i:
            add(HEAD, f"copy {i}", at - len(HEAD))
        at = add(f"{heading}{passage.text}\n\n".encode(), f"passage {i}", at, plain=True)
    learned = []
    for i, asked in enumerate(sample.asked):
        last = add(b"Question: " + asked.question.encode() + b"\x01\n\x00assistant\n", f"question {i}", at)
        answer = [*asked.answer.encode(), 257]
        learned += [(len(tokens) - 1 + j, x) for j, x in enumerate(answer)]
        tokens.extend((x, last + j, f"question {i}") for j, x in enumerate(answer[:-1]))

    def sees(row: int, key: int) -> bool:
        a, b = tokens[row][2], tokens[key][2]
        if key > row or a == b:
            return key <= row
        if b == "head":
            return not a.startswith("copy") and (not apart or a in ("head", "passage 0") or a.startswith("question"))
        if b.startswith("copy"):
            return a == b.replace("copy", "passage")
        return b.startswith("passage") and (a.startswith("question") or not apart)

    n = len(tokens)
    seen = np.array([[sees(i, j) for j in range(n)] for i in range(n)])
    return np.array([t[0] for t in tokens]), np.array([t[1] for t in tokens]), seen, learned


def copied(sample: Sample) -> np.ndarray:
    """Which tokens of the sample written apart are copies, bool [n]."""
    n = len(written(sample, apart=True)[0])
    first, *others = (len(f"{p.title}\n" if p.title else "") + len(p.text) + 2 for p in sample.passages)
    marks = np.zeros(n, bool)
    begin = len(HEAD) + first
    for length in others:
        marks[begin : begin + len(HEAD)] = True
        begin += len(HEAD) + length
    return marks


def seen_of(hide_from: np.ndarray, hide_until: np.ndarray) -> np.ndarray:
    order = np.arange(len(hide_from))
    hidden = (hide_from[None] <= order[:, None]) & (order[:, None] < hide_until[None])
    return (order[None] <= order[:, None]) & ~hidden


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
