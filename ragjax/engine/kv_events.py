"""KV events in the form of vLLM 0.11 (`vllm.distributed.kv_events`), so that its routers can route to this server.

A PUB socket of ZeroMQ sends three frames: an empty topic, the batch's number in 8 bytes, and the batch in msgpack:
`[ts, [event, ...]]`, where an event is `["BlockStored", hashes, parent, tokens, block size, None, medium]`,
`["BlockRemoved", hashes, medium]` or `["AllBlocksCleared"]`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ragjax.cache.node import Node, Provenance
from ragjax.cache.tree import KnowledgeTree
from ragjax.core import ClosedError, ConfigError

if TYPE_CHECKING:
    from ragjax.engine.api import Engine

EVERY = 0.25
"""Seconds between two looks at the cache."""


class NodePlace(NamedTuple):
    """A causal node: its number and its parent's (0: the root), whose it is, its tokens, and if it is on the device."""

    number: int
    parent: int
    tenant: str
    raw: bytes
    on_device: bool


class TokenBlock(NamedTuple):
    """Tokens behind the block with the hash `parent`; on_device: the KV of all of them, else host memory has some."""

    parent: int | None
    raw: bytes
    on_device: bool


def places(tree: KnowledgeTree) -> list[NodePlace]:
    """Lists the causal nodes in memory, parents first. For the engine's thread."""
    numbers: dict[Node, int] = {tree.root: 0}
    found = []
    for node in tree.nodes():
        above = None if node.parent is None else numbers.get(node.parent)
        if above is None or node.provenance is not Provenance.CAUSAL or (node.run is None and node.host is None):
            continue
        numbers[node] = len(numbers)
        found.append(NodePlace(numbers[node], above, node.tenant, node.raw, node.run is not None))
    return found


def blocks(nodes: Sequence[NodePlace], size: int) -> dict[int, TokenBlock]:
    """Cuts prefixes into blocks of `size` tokens; returns them by the hash of their prefix, parents first."""
    found: dict[int, TokenBlock] = {}
    ends: dict[int, tuple[int | None, bytes, bool]] = {0: (None, b"", True)}
    for node in nodes:
        last, rest, near = ends[node.parent]
        raw, near = rest + node.raw, near and node.on_device
        while len(raw) >= 4 * size:
            piece, raw = raw[: 4 * size], raw[4 * size :]
            salt = f"{last} {node.tenant} ".encode()
            number = int.from_bytes(blake2b(salt + piece, digest_size=8).digest(), "big")
            found[number], last = TokenBlock(last, piece, near), number
        ends[node.number] = last, raw, near
    return found


class KVEvents:
    """Publishes what comes into the cache and what leaves it, in a thread of its own.

    Args:
        place: where routers connect to, such as tcp://*:5557.
    """

    def __init__(self, engine: Engine, place: str):
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise ConfigError("RAGJAX_KV_EVENTS needs pyzmq and msgpack: pip install '.[kv-events]'") from error
        self._engine, self._pack = engine, msgpack.packb
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(place)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"RAGJAX_KV_EVENTS={place}: {error}; give an address such as tcp://*:5557") from error
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragjax-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        known: Mapping[int, TokenBlock] = {}
        number, begun = 0, False
        while not self._closed.wait(EVERY):
            try:
                found, size = self._engine.kv_blocks()
            except ClosedError:
                break
            batch = [*changes(known, found, size)] if begun else [["AllBlocksCleared"], *changes(known, found, size)]
            if batch:
                self._socket.send_multipart([b"", number.to_bytes(8, "big"), self._pack([time.time(), batch])])
                number += 1
            known, begun = found, True
        self._socket.close()


def changes(known: Mapping[int, TokenBlock], found: Mapping[int, TokenBlock], size: int) -> Iterator[list[Any]]:
    """Yields the events between two states, removals first. A block that moves between device and host is removed."""
    for medium in ("GPU", "CPU"):
        gone = [n for n, one in known.items() if _medium(one) == medium and found.get(n) != one]
        if gone:
            yield ["BlockRemoved", gone, medium]
    stored: list[Any] | None = None
    for number, block in found.items():
        if known.get(number) == block:
            continue
        tokens, medium = np.frombuffer(block.raw, "<i4").tolist(), _medium(block)
        if stored is not None and stored[1][-1] == block.parent and stored[6] == medium:
            stored[1].append(number)
            stored[3] += tokens
            continue
        if stored is not None:
            yield stored
        stored = ["BlockStored", [number], block.parent, tokens, size, None, medium]
    if stored is not None:
        yield stored


def _medium(block: TokenBlock) -> str:
    return "GPU" if block.on_device else "CPU"
