"""Entries of the shared tier on a Redis or Valkey server, which any number of processes read and write.

    ragjax:<format>:<identity>:<encoding>:e:<key>       hash: h the header, d the arrays, p the place; expires
    …:p:<place>                                         sorted set of keys by the time they were put; expires
    …:ages  …:sizes  …:bytes                            keys by last access, the bytes of each, and of all

The limit holds for all writers together: scripts, which the server runs one at a time, keep the last three and remove
what was used longest ago. A server that lets entries go by itself (`maxmemory`) leaves the books a little too full
until these entries come first; it should let go only what expires (`volatile-lru`), so that it keeps the books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from ragjax.core import AtRest, ConfigError
from ragjax.core.tiers import Record, first_of
from ragjax.store.entry import FORMAT, DiskError

if TYPE_CHECKING:
    from redis import Redis

MOST = 64
"""Entries of one place that are looked at, the newest ones: questions of thousands may follow one system prompt."""


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


def continuation_place(place: bytes, first: int) -> str:
    return f"c:{place.hex()}:{first}"


def chunk_place(place: bytes) -> str:
    return f"a:{place.hex()}"


def place_of(record: Record) -> str | None:
    """Where an entry lies; None: it is found by its key alone."""
    if record.provenance in ("causal", "dependency"):
        return continuation_place(record.place, first_of(record.tokens))
    return chunk_place(record.place) if record.provenance == "approximate" else None


_BOOKS = """
local now = redis.call('TIME')
local prefix, time = ARGV[1], now[1] + now[2] / 1000000
local ages, sizes, bytes = prefix .. 'ages', prefix .. 'sizes', prefix .. 'bytes'
local function drop(key)
    local place = redis.call('HGET', prefix .. 'e:' .. key, 'p')
    if place and place ~= '' then redis.call('ZREM', prefix .. 'p:' .. place, key) end
    redis.call('DEL', prefix .. 'e:' .. key)
    redis.call('ZREM', ages, key)
    local size = tonumber(redis.call('HGET', sizes, key) or 0)
    redis.call('HDEL', sizes, key)
    redis.call('DECRBY', bytes, size)
end
local function stay(key, life)
    if redis.call('EXPIRE', prefix .. 'e:' .. key, life) == 0 then return false end
    local place = redis.call('HGET', prefix .. 'e:' .. key, 'p')
    if place ~= '' then
        redis.call('ZADD', prefix .. 'p:' .. place, time, key)
        redis.call('ZREMRANGEBYSCORE', prefix .. 'p:' .. place, '-inf', time - life)
        redis.call('EXPIRE', prefix .. 'p:' .. place, life)
    end
    return true
end
"""

# ARGV: prefix, key, its bytes, limit, seconds to live
_PUT = (
    _BOOKS
    + """
local key, size, limit, life = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local before = tonumber(redis.call('HGET', sizes, key) or 0)
redis.call('ZADD', ages, time, key)
redis.call('HSET', sizes, key, size)
local total = redis.call('INCRBY', bytes, size - before)
stay(key, life)
local gone = 0
while true do
    local oldest = redis.call('ZRANGE', ages, 0, 0, 'WITHSCORES')
    if #oldest == 0 or (total <= limit and tonumber(oldest[2]) > time - life) then return gone end
    drop(oldest[1])
    total = tonumber(redis.call('GET', bytes) or 0)
    gone = gone + 1
end
"""
)

# ARGV: prefix, seconds to live, keys
_TOUCH = (
    _BOOKS
    + """
for i = 3, #ARGV do
    if stay(ARGV[i], ARGV[2]) then
        redis.call('ZADD', ages, 'XX', time + i / 10000000, ARGV[i])
    else
        drop(ARGV[i])
    end
end
"""
)

# ARGV: prefix, keys
_DELETE = (
    _BOOKS
    + """
for i = 2, #ARGV do drop(ARGV[i]) end
"""
)


class RedisServer:
    """The entries of one model and encoding on a server. Any thread may call anything; all calls wait for the server.

    Every method raises RemoteError, or RefusedError. address: without user and password.
    """

    def __init__(self, client: Redis, address: str, prefix: str, max_bytes: int, life: int):
        self.address = address
        self._client = client
        self._prefix = prefix
        self._max_bytes = max_bytes
        self._life = life

    @classmethod
    def open(cls, url: str, identity: bytes, kind: AtRest, *, max_bytes: int, life: int, timeout: float) -> RedisServer:
        """Name a server; nothing is asked of it yet.

        life: seconds that an entry stays after its last access. timeout: seconds that the server may take to accept a
        connection, and to send or take more bytes.
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
        prefix = f"ragjax:{FORMAT}:{identity.hex()}:{kind}:"
        return cls(client, address_of(url), prefix, max_bytes, life)

    def ping(self) -> None:
        """See whether the server answers; ConfigError: it is no Redis server, or wants another password."""
        import redis

        try:
            with _telling():
                self._client.ping()
                self._client.eval("return 1", 0)
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
        """Keys that were put at each place, `MOST` of them at most, newest first; some may be gone."""
        found = self._each(places, lambda pipe, place: pipe.zrevrange(f"{self._prefix}p:{place}", 0, MOST - 1))
        return [[bytes.fromhex(key.decode()) for key in keys] for keys in found]

    def heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._each(keys, lambda pipe, key: pipe.hget(self._entry(key), "h"))

    def fetch(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        found = self._each(keys, lambda pipe, key: pipe.hmget(self._entry(key), "h", "d"))
        return [None if head is None or body is None else (head, body) for head, body in found]

    def put(self, parcels: Sequence[Parcel]) -> int:
        """Keep entries, each instead of one of its key; returns how many others had to leave.

        An entry and what the books say of it come at once, or not at all.
        """
        gone = 0
        for parcel in parcels:
            with _telling(), self._client.pipeline(transaction=True) as pipe:
                pipe.hset(self._entry(parcel.key), mapping={"h": parcel.head, "d": parcel.body, "p": parcel.place})
                limits = (parcel.size, self._max_bytes, self._life)
                pipe.eval(_PUT, 0, *cast(Any, (self._prefix, parcel.key.hex(), *limits)))
                gone += pipe.execute()[-1]
        return gone

    def touch(self, keys: Sequence[bytes]) -> None:
        with _telling():
            self._client.eval(_TOUCH, 0, *cast(Any, (self._prefix, self._life, *(key.hex() for key in keys))))

    def delete(self, keys: Sequence[bytes]) -> None:
        with _telling():
            self._client.eval(_DELETE, 0, self._prefix, *(key.hex() for key in keys))

    def size(self) -> tuple[int, int]:
        with _telling(), self._client.pipeline(transaction=False) as pipe:
            pipe.zcard(self._prefix + "ages")
            pipe.get(self._prefix + "bytes")
            entries, size = pipe.execute()
        return entries, int(size or 0)

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


def address_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def _telling() -> Iterator[None]:
    import redis

    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError) as error:
        raise RemoteError(str(error) or type(error).__name__) from error
    except redis.RedisError as error:
        raise RefusedError(str(error)) from error
