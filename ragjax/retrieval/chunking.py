"""Cut documents into chunks that fit a token budget, at the largest semantic boundary there is.

A chunk enters the prompt as its document's title on a line, its text, and a blank line, so that each passage says
what it is about even when it is computed without its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from semantic_text_splitter import TextSplitter

from ragjax.core import CHUNK_TOKENS, Chunk, ConfigError, Document, Tokens

MIN_TOKENS = 32
_BLOCK_CHARS = 10_000  # the splitter works a text without boundaries over and over
_EVEN_UP_TO = 8
_REMEMBERED = 256  # texts of a document: cuts of several sizes are tried, and ask for the same ones again
_STEP_BLOCKS = 32  # cut in a step: about a second
_STEP_CHUNKS = 1_000  # whose tokens are made in a step

Pieces = list[tuple[int, str]]
"""Parts of a text, each with its offset in characters."""


@dataclass(frozen=True)
class Chunker:
    """Cuts documents into chunks of at most `max_tokens` tokens, title and blank line included. Deterministic.

    encode: text → its tokens, int32 [n], without adding special tokens and without parsing any in the text.
    """

    encode: Callable[[str], Tokens]
    max_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        if self.max_tokens < MIN_TOKENS:
            raise ConfigError(f"chunks of {self.max_tokens} tokens are too small; use at least {MIN_TOKENS}")

    def checked(self, check: Callable[[], None]) -> Chunker:
        """Copy of this chunker that calls `check` before each text that it encodes; an error of it ends the work."""

        def encode(text: str) -> Tokens:
            check()
            return self.encode(text)

        return replace(self, encode=encode)

    def chunks(self, document: Document) -> tuple[Chunk, ...]:
        """The document's chunks in order, with ids "<document id>#<n>"; none if its text is blank.

        A title that would take more than a third of the budget is cut in the chunk's text.
        """
        return finish(self.chunk_steps(document))

    def chunk_steps(self, document: Document) -> Generator[None, None, tuple[Chunk, ...]]:
        return (yield from replace(self, encode=lru_cache(_REMEMBERED)(self.encode))._chunk_steps(document))

    def _chunk_steps(self, document: Document) -> Generator[None, None, tuple[Chunk, ...]]:
        heading = " ".join(document.title[:_BLOCK_CHARS].split())
        if heading:
            heading = TextSplitter.from_callback(self._count, self.max_tokens // 3).chunks(heading)[0] + "\n"
        pieces = yield from self._pieces(document.text, heading)
        made: list[Chunk] = []
        for n, (begin, piece) in enumerate(pieces):
            if n and not n % _STEP_CHUNKS:
                yield
            text, place = f"{heading}{piece}\n\n", document.place_at(begin)
            chunk = Chunk(
                f"{document.id}#{n}", document.id, document.title, text, np.asarray(self.encode(text), np.int32),
                filename=document.filename,
            )  # fmt: skip
            made.append(chunk if place is None else replace(chunk, page=place.page, heading=place.heading))
        return tuple(made)

    def exceeds(self, text: str, limit: int) -> bool:
        """Tell if a text has more than `limit` tokens; encodes no more of it than that takes.

        A text with fewer bytes has fewer tokens, whatever little a tokenizer puts in front of it or spells out.
        """
        if len(text.encode(errors="replace")) <= limit:
            return False
        count = 0
        for _, block in _blocks(text):
            count += self._count(block)
            if count > limit:
                return True
        return False

    def _pieces(self, text: str, heading: str) -> Generator[None, None, Pieces]:
        pieces: Pieces = []
        for n, (begin, block) in enumerate(_blocks(text)):
            if n and not n % _STEP_BLOCKS:
                yield
            pieces += [(begin + at, piece) for at, piece in self._split(block, heading, self.max_tokens)]
        if not 1 < len(pieces) <= _EVEN_UP_TO:
            return pieces
        return self._evenly(text, heading, len(pieces)) or pieces

    def _evenly(self, text: str, heading: str, n: int) -> Pieces | None:
        """Cut into n pieces of like size: a cut that fills each piece leaves a last one too short to be of use."""
        fixed = self._count(f"{heading}\n\n")
        share = math.ceil(self._count(text) / n)
        for slack in (1.05, 1.15, 1.3):
            budget = fixed + math.ceil(share * slack)
            pieces = self._split(text, heading, budget) if budget < self.max_tokens else []
            if len(pieces) == n:
                return pieces
        return None

    def _split(self, text: str, heading: str, budget: int) -> Pieces:
        splitter = TextSplitter.from_callback(lambda piece: self._count(f"{heading}{piece}\n\n"), budget)
        return [fit for begin, piece in splitter.chunk_indices(text) for fit in self._fit(begin, piece, heading)]

    def _fit(self, begin: int, piece: str, heading: str) -> Iterator[tuple[int, str]]:
        if len(piece) == 1 or self._count(f"{heading}{piece}\n\n") <= self.max_tokens:
            yield begin, piece
            return
        middle = len(piece) // 2
        for at, half in ((0, piece[:middle]), (middle, piece[middle:])):
            if half.strip():
                yield from self._fit(begin + at + len(half) - len(half.lstrip()), half.strip(), heading)

    def _count(self, text: str) -> int:
        return len(self.encode(text))


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Cut a huge text at the last paragraph, line or word that ends within each block; each with where it begins."""
    start = 0
    while len(text) - start > _BLOCK_CHARS:
        end = next(
            (cut + 1 for mark in ("\n\n", "\n", " ") if (cut := text.rfind(mark, start, start + _BLOCK_CHARS)) > start),
            start + _BLOCK_CHARS,
        )
        yield start, text[start:end]
        start = end
    yield start, text[start:]


T = TypeVar("T")


def finish(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made


def checked(steps: Generator[None, None, T], check: Callable[[], None]) -> Generator[None, None, T]:
    """Take the same steps and call `check` before each but the first; an error of it ends them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made
        yield
        check()
