"""A server of the shared tier in memory, which can be slow, lose, damage and refuse, and die; and a real one's fake."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from benchmarks.common.process import free_port
from ragjax.core import ConfigError
from ragjax.engine import Engine
from ragjax.store.disk import DiskStore
from ragjax.store.exchange import Link
from ragjax.store.redis import MOST, Parcel, RedisServer, RefusedError, RemoteError, ServerRoom
from ragjax.store.shared import SharedTier
from tests.support.pace import until

GIGA = 2**30


class FakeRemote(RedisServer):
    """Entries in a dictionary that several tiers may share.

    down: every call fails. calls: names of those that came. held: while not set, calls wait.
    """

    def __init__(self) -> None:
        self.address = "fake://server"
        self.parcels: dict[bytes, Parcel] = {}
        self.calls: list[str] = []
        self.down = False
        self.full = False
        self.held = threading.Event()
        self.held.set()
        self._lock = threading.RLock()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.held.wait(60)
        if self.down:
            raise RemoteError("connection refused")

    def ping(self) -> None:
        self._call("ping")

    def members(self, places: Sequence[str]) -> list[list[bytes]]:
        self._call("members")
        with self._lock:
            return [[p.key for p in reversed(self.parcels.values()) if p.place == place][:MOST] for place in places]

    def heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._call("heads")
        with self._lock:
            return [self.parcels[key].head if key in self.parcels else None for key in keys]

    def fetch(self, key: bytes) -> tuple[bytes, bytes] | None:
        self._call("fetch")
        with self._lock:
            parcel = self.parcels.get(key)
        return None if parcel is None else (parcel.head, parcel.body)

    def put(self, parcels: Sequence[Parcel]) -> None:
        self._call("put")
        if self.full:
            raise RefusedError("OOM command not allowed when used memory > 'maxmemory'.")
        with self._lock:
            self.parcels |= {parcel.key: parcel for parcel in parcels}

    def renew(self, parcels: Sequence[Parcel]) -> None:
        self._call("renew")

    def delete(self, key: bytes) -> None:
        self._call("delete")
        with self._lock:
            self.parcels.pop(key, None)

    def room(self) -> ServerRoom:
        self._call("room")
        with self._lock:
            return ServerRoom(len(self.parcels), sum(parcel.size for parcel in self.parcels.values()), GIGA)

    def close(self) -> None:
        pass


class Unreliable(FakeRemote):
    """One that drops, delays, damages and dies at random.

    harmed: how many entries it took away or damaged.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.harmed = 0
        self.random = random.Random(seed)

    def _call(self, name: str) -> None:
        draw = self.random.random()
        if draw < 0.1:
            time.sleep(self.random.random() / 20)
        if self.down:
            self.down = draw < 0.5
        elif draw > 0.97:
            self.down = True
        elif draw > 0.92:
            raise RefusedError("not now")
        with self._lock:
            keys = list(self.parcels)
        if keys and 0.6 < draw < 0.7:
            self._harm(self.random.choice(keys))
        super()._call(name)

    def _harm(self, key: bytes) -> None:
        """Take an entry away, or change a bit of it."""
        with self._lock:
            self.harmed += 1
            parcel = self.parcels.pop(key, None)
            if parcel is None or self.random.random() < 0.3:
                return
            part = bytearray(parcel.head if self.random.random() < 0.4 else parcel.body)
            part[self.random.randrange(len(part))] ^= 1 << self.random.randrange(8)
            in_head = len(part) == len(parcel.head)
            head, body = (bytes(part), parcel.body) if in_head else (parcel.head, bytes(part))
            self.parcels[key] = Parcel(key, parcel.place, head, body)


def tier(
    remote: FakeRemote,
    disk: DiskStore | None = None,
    *,
    identity: bytes = b"tiny",
    timeout: float = 5.0,
    pause: float = 0.05,
) -> SharedTier:
    """A shared tier over a server; the next probe comes soon."""
    return SharedTier(remote, identity, disk, timeout=timeout, link=Link(remote.address, pause))


def settle(engine: Engine) -> None:
    """Wait until what the engine computed is on the server."""
    shared = engine._parts.shared
    assert isinstance(shared, SharedTier) and engine._transfer is not None
    deadline = time.monotonic() + 60
    while engine._cache._hierarchy._new or engine._cache._hierarchy._hot:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine._transfer.flush()
    assert shared.flush(60)


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A server that says the same to everybody; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1000)
                        connection.sendall(reply)
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@contextmanager
def real_server(*arguments: str, port: int = 0) -> Iterator[int]:
    """A Redis server of its own; its port."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("there is no redis-server or valkey-server")
    port = port or free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *arguments)
    with subprocess.Popen((program, *options), stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: _answers(port))
            yield port
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        RedisServer.open(f"redis://127.0.0.1:{port}", b"x", "raw", life=1, timeout=1).ping()
    except RemoteError:
        return False
    except ConfigError:  # it wants a password
        return True
    return True
