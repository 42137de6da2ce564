"""Stretches of tokens that nodes hold, found wherever they stand in a prompt, by blocks of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ragjax.cache.node import PUBLIC, Node, Provenance, common_prefix

BLOCK = 16
"""Tokens of a block. A stretch of 31 holds a whole one of its node's, and so does a node of 16 that stands whole."""

MOVED = "moved"
"""The method of KV that was computed behind stretches which stood elsewhere before."""


class Stretch(NamedTuple):
    """Tokens of a prompt from `begin` on that stand in a node from its token `at` on."""

    begin: int
    node: Node
    at: int
    length: int


class Stretches:
    """Blocks of the nodes whose KV saw all that stood before it; of equal blocks the latest counts."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, tuple[Node, int]] = {}

    def keep(self, node: Node) -> None:
        for at, block in _blocks(node):
            self._blocks[block] = node, at

    def drop(self, node: Node) -> None:
        for _, block in _blocks(node):
            if self._blocks.get(block, (None, 0))[0] is node:
                del self._blocks[block]

    def find(self, raw: bytes, begin: int, end: int, tenant: str) -> Iterator[Stretch]:
        """Stretches of tokens [begin, end) that the tenant may read, ascending and apart, each as long as it goes."""
        owners = tuple(dict.fromkeys((tenant.encode(), PUBLIC.encode())))
        at = begin
        while at + BLOCK <= end:
            block = raw[4 * at : 4 * (at + BLOCK)]
            found = next((kept for owner in owners if (kept := self._blocks.get(block + owner)) is not None), None)
            if found is None:
                at += 1
                continue
            node, place = found
            back = 0
            while back < min(place, at - begin) and _same(raw, at - back - 1, node, place - back - 1):
                back += 1
            forth = common_prefix(node.raw[4 * place :], raw[4 * at : 4 * end])
            yield Stretch(at - back, node, place - back, back + forth)
            begin = at = at + forth


def _blocks(node: Node) -> Iterator[tuple[int, bytes]]:
    if node.provenance is not Provenance.CAUSAL and node.method != MOVED:
        return
    owner = node.tenant.encode()
    for at in range(0, len(node) - BLOCK + 1, BLOCK):
        yield at, node.raw[4 * at : 4 * (at + BLOCK)] + owner


def _same(raw: bytes, index: int, node: Node, place: int) -> bool:
    return raw[4 * index : 4 * index + 4] == node.raw[4 * place : 4 * place + 4]
