"""Entries of the shared tier on a Redis or Valkey server, which any number of processes read and write.

    ragjax:<format>:<identity>:<encoding>:e:<key>       hash: h the header, d the arrays, p the place; expires
    …:p:<place>                                         sorted set of keys by the time they were put; expires

The server itself bounds what it keeps (`maxmemory`, with one of its LRU policies), so the keys of a place may name
entries that are gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ragjax.core import AtRest, ConfigError
from ragjax.core.tiers import Record, first_of
from ragjax.store.entry import FORMAT, DiskError

if TYPE_CHECKING:
    from redis import Redis

MOST = 64
"""Entries of one place, the newest ones: questions of thousands may follow one system prompt."""


class RemoteError(DiskError):
    """The server cannot be reached, or does not answer in time."""


class RefusedError(RemoteError):
    """The server answered, and would not do it: it is full, say."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """An entry on its way: header and arrays, byte for byte those of a file of the disk tier. place: see `place_of`."""

    key: bytes
    place: str
    head: bytes
    body: bytes

    @property
    def size(self) -> int:
        return len(self.head) + len(self.body)


@dataclass(frozen=True)
class ServerRoom:
    """Room of the whole server, for all who use it. max_bytes: 0 if it has no bound. evicted: keys that left for it."""

    entries: int = 0
    bytes: int = 0
    max_bytes: int = 0
    evicted: int = 0


def continuation_place(place: bytes, first: int) -> str:
    return f"c:{place.hex()}:{first}"


def chunk_place(place: bytes) -> str:
    return f"a:{place.hex()}"


def place_of(record: Record) -> str | None:
    """Where an entry lies; None: it is found by its key alone."""
    if record.provenance in ("causal", "dependency"):
        return continuation_place(record.place, first_of(record.tokens))
    return chunk_place(record.place) if record.provenance == "approximate" else None


class RedisServer:
    """The entries of one model and encoding on a server. Any thread may call anything; all calls wait for the server.

    Every method raises RemoteError, or RefusedError. address: without user and password. life: seconds that an entry
    stays after it was last put or fetched.
    """

    def __init__(self, client: Redis, address: str, prefix: str, life: int):
        self.address = address
        self._client = client
        self._prefix = prefix
        self._life = life

    @classmethod
    def open(cls, url: str, identity: bytes, kind: AtRest, *, life: int, timeout: float) -> RedisServer:
        """Name a server; nothing is asked of it yet.

        timeout: seconds that the server may take to accept a connection, and to send or take more bytes.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError("a shared cache needs its client: pip install '.[remote]' in ragjax's folder") from error
        try:
            client = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
            )
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # an unknown parameter shows here; nothing is sent
        except (ValueError, TypeError, redis.RedisError) as error:
            raise ConfigError(f"the address of the shared cache cannot be used: {error}") from None
        parts = urlsplit(url)
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        return cls(client, address, f"ragjax:{FORMAT}:{identity.hex()}:{kind}:", life)

    def ping(self) -> None:
        """See whether the server answers; ConfigError: it is no Redis server, or wants another password."""
        import redis

        try:
            with _telling():
                self._client.ping()
        except RemoteError as error:
            cause = error.__cause__
            refused = isinstance(cause, redis.AuthenticationError | redis.exceptions.NoPermissionError)
            if refused or str(cause).startswith(("NOAUTH", "WRONGPASS")):
                raise ConfigError(f"the shared cache {self.address} refuses user and password: {cause}") from None
            if isinstance(cause, redis.InvalidResponse | redis.ResponseError):
                raise ConfigError(
                    f"{self.address} cannot be a shared cache: it does not answer as Redis does ({cause})"
                ) from None
            raise

    def members(self, places: Sequence[str]) -> list[list[bytes]]:
        """Keys that were put at each place, newest first; some may be gone."""
        found = self._each(places, lambda pipe, place: pipe.zrevrange(f"{self._prefix}p:{place}", 0, MOST - 1))
        return [[bytes.fromhex(key.decode()) for key in keys] for keys in found]

    def heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._each(keys, lambda pipe, key: pipe.hget(self._entry(key), "h"))

    def fetch(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Header and arrays of an entry, whose life begins anew; None: there is none."""
        with _telling(), self._client.pipeline(transaction=False) as pipe:
            pipe.hmget(self._entry(key), "h", "d")
            pipe.expire(self._entry(key), self._life)
            (head, body), _ = pipe.execute()
        return None if head is None or body is None else (head, body)

    def put(self, parcels: Sequence[Parcel]) -> None:
        """Keep entries, each instead of one of its key."""
        for parcel in parcels:
            with _telling(), self._client.pipeline(transaction=True) as pipe:
                pipe.hset(self._entry(parcel.key), mapping={"h": parcel.head, "d": parcel.body, "p": parcel.place})
                self._stay(pipe, parcel)
                pipe.execute()

    def renew(self, parcels: Sequence[Parcel]) -> None:
        """Begin the life of entries that are there anew."""
        with _telling(), self._client.pipeline(transaction=False) as pipe:
            for parcel in parcels:
                self._stay(pipe, parcel)
            pipe.execute()

    def _stay(self, pipe: Any, parcel: Parcel) -> None:
        pipe.expire(self._entry(parcel.key), self._life)
        if parcel.place:
            place = f"{self._prefix}p:{parcel.place}"
            pipe.zadd(place, {parcel.key.hex(): time.time()})
            pipe.zremrangebyrank(place, 0, -MOST - 1)
            pipe.expire(place, self._life)

    def delete(self, key: bytes) -> None:
        with _telling():
            self._client.delete(self._entry(key))

    def room(self) -> ServerRoom:
        with _telling():
            told = self._client.info()
            return ServerRoom(self._client.dbsize(), told["used_memory"], told["maxmemory"], told["evicted_keys"])

    def close(self) -> None:
        self._client.close()

    def _entry(self, key: bytes) -> str:
        return f"{self._prefix}e:{key.hex()}"

    def _each(self, names: Sequence[Any], ask: Callable[[Any, Any], object]) -> list[Any]:
        if not names:
            return []
        with _telling(), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                ask(pipe, name)
            return list(pipe.execute())


@contextmanager
def _telling() -> Iterator[None]:
    import redis

    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError) as error:
        raise RemoteError(str(error) or type(error).__name__) from error
    except redis.RedisError as error:
        raise RefusedError(str(error)) from error
