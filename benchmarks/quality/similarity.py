"""Chunks of a corpus and their most similar others: FusionRAG's neighbours, and Cache-Craft's past requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import samples
from benchmarks.quality.dataset import Search
from ragjax.core import Chunk, Document
from ragjax.retrieval.knowledge import TextEncoder

TOGETHER = 5  # passages of a past request
NEAR = 10  # neighbours among which the others of a past request are drawn


class Similarity:
    """The chunks of a whole corpus by similarity (cosine)."""

    def __init__(self, chunks: Sequence[Chunk], vectors_NE: NDArray[np.float32]):
        """vectors_NE: a row of length one for each chunk."""
        self.chunks = tuple(chunks)
        self.vectors_NE = vectors_NE
        self._at = {chunk.id: i for i, chunk in enumerate(chunks)}
        self._raw = [chunk.tokens.tobytes() for chunk in chunks]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], encoder: TextEncoder, folder: Path | None = None) -> Similarity:
        """Encode the chunks; vectors are kept in `folder` for the next time."""
        digest = hashlib.sha256(encoder.identity.encode())
        for chunk in chunks:
            digest.update(hashlib.sha256(chunk.text.encode()).digest())
        file = (folder or samples.STORE / "embeddings") / f"{digest.hexdigest()[:16]}.npy"
        if file.exists():
            return cls(chunks, np.load(file))
        vectors_NE = encoder.encode([chunk.text for chunk in chunks])
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part.npy")
        np.save(partial, vectors_NE)
        partial.replace(file)
        return cls(chunks, vectors_NE)

    def neighbours(self, chunk_id: str, n: int) -> tuple[Chunk, ...]:
        """The n most similar chunks, best first, equal ones by their place in the corpus.

        Neither itself nor a chunk of the same tokens, and no two of the same tokens: a copy tells nothing.
        """
        own = self._at[chunk_id]
        scores_N, seen = self.vectors_NE @ self.vectors_NE[own], {self._raw[own]}
        found: list[Chunk] = []
        for i in np.argsort(-scores_N, kind="stable"):
            if len(found) == n:
                break
            if self._raw[i] not in seen:
                seen.add(self._raw[i])
                found.append(self.chunks[i])
        return tuple(found)

    def past_requests(self, needed: Sequence[str], seed: int = 0) -> Iterator[tuple[Chunk, ...]]:
        """Requests of five passages in a random order, until each of the `needed` chunks has stood in one.

        A needed chunk that no request had yet, in random order, and four others, drawn from its ten nearest; those that
        are needed too come first, so that requests are few.
        """
        random = np.random.default_rng(seed)
        left = dict.fromkeys(needed[i] for i in random.permutation(len(needed)))
        while left:
            first = self.chunks[self._at[next(iter(left))]]
            near = self.neighbours(first.id, NEAR)
            drawn = sorted((near[i] for i in random.permutation(len(near))), key=lambda chunk: chunk.id not in left)
            request = [first, *drawn[: TOGETHER - 1]]
            for chunk in request:
                left.pop(chunk.id, None)
            yield tuple(request[i] for i in random.permutation(len(request)))


def search_in(documents: Sequence[Document], encoder: TextEncoder, count: int = TOGETHER) -> Search:
    """A search among documents: the `count` most similar ones (cosine), best first."""
    vectors_NE = encoder.encode([f"{d.title} {d.text}" for d in documents])

    def search(text: str) -> tuple[Document, ...]:
        scores_N = vectors_NE @ encoder.encode([text])[0]
        return tuple(documents[i] for i in np.argsort(-scores_N, kind="stable")[:count])

    return search


def packaged_encoder() -> TextEncoder:
    from ragjax.core import ENCODER
    from ragjax.models.encoder import Encoder
    from ragjax.models.hub import resolve

    return Encoder.load(resolve(ENCODER).path)
