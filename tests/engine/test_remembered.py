"""Vectors of documents that a start finds from the one before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.engine import knowledge
from ragjax.engine.knowledge import RememberedEncoder


class Counting:
    """Encodes a text as its length, and counts the texts."""

    dim = 1

    def __init__(self, identity: str = "one"):
        self.identity, self.texts = identity, 0

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += len(texts)
        return np.array([[len(text)] for text in texts], np.float32)


def again(folder: Path, texts: Sequence[str], identity: str = "one") -> int:
    """Texts that another start encodes."""
    encoder = Counting(identity)
    found = RememberedEncoder(encoder, folder).encode(texts)
    assert found.tolist() == [[len(text)] for text in texts]
    return encoder.texts


def test_the_same_texts_are_encoded_once(tmp_path: Path) -> None:
    assert [again(tmp_path, ["a", "bc"]) for _ in range(2)] == [2, 0]
    assert again(tmp_path, ["a", "bcd"]) == 2
    assert again(tmp_path, ["a", "bc"], "another") == 2


def test_a_question_is_not_kept(tmp_path: Path) -> None:
    assert [again(tmp_path, ["who?"]) for _ in range(2)] == [1, 1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"too short", b"x" * 40])
def test_a_damaged_file_is_made_again(tmp_path: Path, content: bytes) -> None:
    again(tmp_path, ["a", "bc"])
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert [again(tmp_path, ["a", "bc"]) for _ in range(2)] == [2, 0]


def test_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge, "MOST_REMEMBERED", 3 * (32 + 8))
    for n in range(5):
        again(tmp_path, ["a", "b" * n])
        (newest,) = (file for file in tmp_path.iterdir() if file.stat().st_mtime > 1000)
        os.utime(newest, (n, n))
    assert len(list(tmp_path.iterdir())) == 3
    assert again(tmp_path, ["a", "bbbb"]) == 0
