"""Stretches of tokens that nodes hold, found wherever they stand in a prompt, by blocks of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ragjax.cache.node import PUBLIC, Node, Provenance, common_prefix

BLOCK = 16
"""Tokens of a block. A stretch of 31 holds a whole one of its node's, and so does a node of 16 that stands whole.

The first block of a moved node begins with what stood before it, so that shorter ones are found where the same stands
before them again."""

_FACTORS = np.cumprod(np.full(BLOCK, 0x9E3779B97F4A7C15, np.uint64))

MOVED = "moved"
"""The method of KV computed behind stretches that stood elsewhere before. Its `behind` holds the last tokens there."""


class Stretch(NamedTuple):
    """Tokens of a prompt from `begin` on that stand in a node from its token `at` on."""

    begin: int
    node: Node
    at: int
    length: int


class Stretches:
    """Blocks of the nodes whose KV saw all that stood before it; of equal blocks the latest counts."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[int, tuple[Node, int]]] = {}  # by tenant, then by digest

    def keep(self, node: Node) -> None:
        own = self._blocks.setdefault(node.tenant, {})
        own.update({block: (node, at) for at, block in _blocks(node)})

    def drop(self, node: Node) -> None:
        own = self._blocks.get(node.tenant, {})
        for _, block in _blocks(node):
            if own.get(block, (None, 0))[0] is node:
                del own[block]

    def find(self, raw: bytes, begin: int, end: int, tenant: str) -> Iterator[Stretch]:
        """Stretches of tokens [begin, end) that the tenant may read, ascending and apart, each as long as it goes."""
        kept = [own for owner in dict.fromkeys((PUBLIC, tenant)) if (own := self._blocks.get(owner))]
        first = max(0, begin - BLOCK)
        digests = _digests(raw[4 * first : 4 * end]) if kept else []
        hits: dict[int, tuple[Node, int]] = {}
        for own in kept:  # the tenant's go before public ones
            hits |= {at: hit for at, hit in enumerate(map(own.get, digests), first) if hit}
        for at, (node, place) in sorted(hits.items(), key=lambda item: item[0]):
            before = max(0, -place)  # tokens of the block that stand before the node
            if at + before < begin:
                continue
            block = node.behind[len(node.behind) - 4 * before :] + node.raw[4 * max(0, place) :]
            forth = common_prefix(block, raw[4 * at : 4 * end])
            if forth < BLOCK:  # other tokens with the same digest
                continue
            at, place, forth = at + before, place + before, forth - before
            back = 0
            while back < min(place, at - begin) and _token(raw, at - back - 1) == _token(node.raw, place - back - 1):
                back += 1
            yield Stretch(at - back, node, place - back, back + forth)
            begin = at + forth


def _blocks(node: Node) -> Iterator[tuple[int, int]]:
    """Places and digests of a node's whole blocks, and of the one that begins with what stood before a moved node."""
    if node.provenance is not Provenance.CAUSAL and node.method != MOVED:
        return
    before = len(node.behind) // 4 if node.method == MOVED else 0
    if 0 < before < BLOCK:
        for digest in _digests(node.behind + node.raw[: 4 * (BLOCK - before)]):
            yield -before, digest
    for number, digest in enumerate(_digests(node.raw, BLOCK)):
        yield number * BLOCK, digest


def _digests(raw: bytes, step: int = 1) -> list[int]:
    """Digests of the blocks that begin at every so many tokens."""
    tokens = np.frombuffer(raw, "<i4").astype(np.uint64)
    if len(tokens) < BLOCK:
        return []
    found: list[int] = (sliding_window_view(tokens, BLOCK)[::step] * _FACTORS).sum(1).tolist()  # modulo 2 ** 64
    return found


def _token(raw: bytes, index: int) -> bytes:
    return raw[4 * index : 4 * index + 4]
