"""Routers of the tables: the less loaded of two replicas, and the one that was sent the longest beginning."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ragjax.cluster.router import ROUTERS, Need, Router, digest_of

BLOCK = 16
"""Tokens of a block of a prompt."""


@ROUTERS.register("two-choices")
class TwoChoices(Router):
    """Sends a request to the less loaded of two random replicas, as Ray Serve does by default.

    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        names = sorted(loads)
        self._random.shuffle(names)
        return (*sorted(names[:2], key=lambda name: loads[name]), *names[2:])


IMBALANCE = 5
"""Requests between the fullest and the emptiest queue beyond which loads alone decide."""
MATCH = 0.15
"""Share of the prompt that has to match, at least; else the replica with the smallest tree gets it."""
MOST_BLOCKS = 400_000
"""Blocks that are kept of a replica; the least recently used go first."""


@ROUTERS.register("prefix")
class PrefixRouter(Router):
    """Sends a request to the replica that was sent the longest beginning of its prompt.

    As Ray Serve LLM's PrefixCacheAffinityRouter does, with the thresholds of the example in Ray's documentation of
    "prefix-aware routing". Ray compares characters of the prompt; here they are blocks of tokens.
    """

    def __init__(self) -> None:
        self._by_load = TwoChoices()
        self._sent: dict[str, OrderedDict[bytes, None]] = {}

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        self._sent = {name: sent for name, sent in self._sent.items() if name in loads}
        by_load = self._by_load.order(need, loads)
        if not loads or max(loads.values()) - min(loads.values()) > IMBALANCE:
            return by_load
        blocks, matches = _blocks(need), {}
        for name in loads:
            sent: Mapping[bytes, None] = self._sent.get(name, {})
            matches[name] = next((i for i, block in enumerate(blocks) if block not in sent), len(blocks))
        if max(matches.values()) >= MATCH * max(1, len(blocks)):
            return sorted(by_load, key=lambda name: -matches[name])
        return sorted(by_load, key=lambda name: len(self._sent.get(name, ())))

    def sent(self, need: Need, replica: str) -> None:
        kept = self._sent.setdefault(replica, OrderedDict())
        for block in _blocks(need):
            keep(kept, block, None, MOST_BLOCKS)


def _blocks(need: Need) -> list[bytes]:
    """Digests of the prompt's beginnings, of `BLOCK` tokens, twice as many, and so on."""
    found = [b""]
    for end in range(BLOCK, len(need.tokens) + 1, BLOCK):
        found.append(digest_of(found[-1], need.tokens[end - BLOCK : end]))
    return found[1:]


T = TypeVar("T")


def keep(kept: OrderedDict[bytes, T], key: bytes, value: T, most: int) -> None:
    """Note a key as the last one used; beyond `most` of them the one used longest ago goes."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
