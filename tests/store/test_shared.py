"""The shared tier: entries as on disk, damage, the queue, the breaker, and the server that is Redis."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from ragjax.core import ConfigError
from ragjax.core.tiers import Record
from ragjax.store import exchange
from ragjax.store.disk import Missing, WriteError
from ragjax.store.entry import Damaged, encode
from ragjax.store.exchange import Link
from ragjax.store.redis import MOST, Parcel, RedisServer, RemoteError
from ragjax.store.shared import SharedTier, open_shared
from tests.support.disks import open_store
from tests.support.pace import until
from tests.support.remotes import FakeRemote, answering, real_server, tier

fakeredis = pytest.importorskip("fakeredis", reason="run make setup: the lock has fakeredis")


def record(name: str, first: int = 7, provenance: str = "causal") -> Record:
    tokens = np.array([first, 2, 3, 4], "<i4").tobytes()
    return Record(name.encode().ljust(32), b"place".ljust(32), tokens, provenance, "", 0)


ARRAYS = {"k": np.arange(96, dtype=np.float32).reshape(2, 3, 4, 4), "v": np.ones((2, 3, 4, 4), np.float32)}
SIZE = sum(piece.nbytes for piece in encode(record("a"), ARRAYS, b"tiny"))


def read(shared: SharedTier, key: bytes, count: int = 2, expected: Record | None = None) -> dict[str, np.ndarray]:
    shares = list(shared.read_shares(key, count, expected))
    return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


def known(shared: SharedTier, look: Callable[[], object]) -> object:
    """What a look-up finds once its questions are answered."""
    shared.asked()
    look()
    asked = shared.asked()
    until(lambda: not shared.waits(asked))
    return look()


@pytest.fixture
def remote() -> FakeRemote:
    return FakeRemote()


@pytest.fixture
def shared(remote: FakeRemote) -> Iterator[SharedTier]:
    with closing(tier(remote)) as made:
        yield made


@pytest.fixture
def one(shared: SharedTier) -> Record:
    """An entry that the server has."""
    shared.write(record("a"), ARRAYS)
    assert shared.flush(60)
    return record("a")


# ------------------------------------------------------------------------------------------- entries


def test_an_entry_is_that_of_the_disk_tier_byte_for_byte(remote: FakeRemote, tmp_path: Path) -> None:
    one = record("a")
    disk = open_store(tmp_path, identity=b"tiny")
    shared = tier(remote, disk)
    shared.write(one, ARRAYS)
    assert shared.flush(60)
    parcel = remote.parcels[one.key]
    [file] = disk.folder.glob("entries/*/*.safetensors")
    assert parcel.head + parcel.body == file.read_bytes()
    disk.forget(one.key)
    assert all(np.array_equal(ARRAYS[name], x) for name, x in read(shared, one.key, expected=one).items())
    shared.close()


def test_the_index_answers_at_once_and_knows_more_later(remote: FakeRemote, shared: SharedTier) -> None:
    reader = tier(remote)
    ones = [record("a"), record("b", provenance="dependency"), record("c", provenance="approximate"), record("d", 8)]
    for one in ones:
        shared.write(one, ARRAYS)
    assert shared.flush(60)
    place = ones[0].place
    remote.held.clear()
    assert reader.find(ones[0].key) is None and not reader.children(place, ones[0].tokens)
    questions = reader.asked()
    assert len(questions) == 2 and reader.waits(questions)
    remote.held.set()
    until(lambda: not reader.waits(questions))
    assert reader.find(ones[0].key) == ones[0]
    assert {one.key for one in reader.children(place, ones[0].tokens)} == {ones[0].key, ones[1].key}
    assert known(reader, lambda: reader.children(place, ones[3].tokens)) == [ones[3]]
    assert known(reader, lambda: reader.chunks(place)) == [ones[2]]
    assert not reader.asked(), "what is known is not asked again"
    reader.close()


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_damaged_entry_is_never_given_and_removed_for_all(
    remote: FakeRemote, shared: SharedTier, one: Record, part: str
) -> None:
    head, body = bytearray(remote.parcels[one.key].head), bytearray(remote.parcels[one.key].body)
    (head if part == "head" else body)[-20] ^= 4
    remote.parcels[one.key] = Parcel(one.key, remote.parcels[one.key].place, bytes(head), bytes(body))
    with pytest.raises(Damaged):
        read(shared, one.key)
    assert not remote.parcels and shared.standing().counts["damaged"] == 1
    with pytest.raises(Missing):
        read(shared, one.key)
    assert known(shared, lambda: shared.find(one.key)) is None


def test_two_models_and_a_replaced_entry_never_meet(remote: FakeRemote, shared: SharedTier, one: Record) -> None:
    other = tier(remote, identity=b"other")
    with pytest.raises(Missing):
        read(shared, one.key, expected=record("a", first=9))
    assert read(shared, one.key, expected=one)
    with pytest.raises(Damaged, match="another format or model"):  # the keys' prefix keeps them apart before that
        read(other, one.key)
    other.close()


# --------------------------------------------------------------------------------------- queue and breaker


def test_the_queue_is_bounded_and_what_it_drops_is_counted(
    remote: FakeRemote, shared: SharedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "WAITING_BYTES", 3 * SIZE)
    remote.held.clear()
    written = 0
    for i in range(8):
        try:
            written += shared.write(record(f"entry {i}"), ARRAYS) > 0
        except WriteError as error:
            assert "too many wait" in str(error)
    remote.held.set()
    assert shared.flush(60)
    assert len(remote.parcels) == written < 8
    assert shared.standing().dropped["full"] == 8 - written


def test_a_full_server_is_still_read_from(remote: FakeRemote, shared: SharedTier, one: Record) -> None:
    remote.full = True
    shared.write(record("b"), ARRAYS)
    assert shared.flush(60)
    standing = shared.standing()
    assert standing.on and standing.dropped["failed"] == 1 and standing.counts["refused"] == 1
    assert read(shared, one.key)


def test_a_server_that_failed_is_probed_once_in_each_pause(caplog: pytest.LogCaptureFixture) -> None:
    link = Link("redis://x", pause=0.05)
    assert link.on and not link.takes_probe()
    with pytest.raises(OSError, match="gone"), link.call():
        raise OSError("gone")
    link.fail(OSError("still gone"))
    assert not link.on and link.error == "still gone" and not link.takes_probe()
    until(link.takes_probe)
    assert not link.takes_probe() and link.counts()[0]["changes"] == 1
    link.recover()
    link.recover()
    assert link.on and link.error is None and link.counts()[0] == {"changes": 2, "failures": 1}
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "the shared cache redis://x is off: gone",
        "the shared cache redis://x is on again",
    ]


def test_what_is_known_is_not_given_while_the_server_is_off(remote: FakeRemote, one: Record) -> None:
    """Its bytes could not be had: a request would load, fail, and start again."""
    shared = tier(remote, pause=60)
    assert known(shared, lambda: shared.find(one.key)) == one
    remote.down = True
    with pytest.raises(RemoteError):
        read(shared, one.key)
    assert shared.find(one.key) is None and not shared.asked()
    shared.close()


def test_a_dead_server_is_not_asked_until_it_is_back(remote: FakeRemote) -> None:
    remote.down = True
    shared = tier(remote, pause=0.2)
    assert not shared.standing().on and shared.find(b"k" * 32) is None and not shared.asked()
    with pytest.raises(WriteError, match="off"):
        shared.write(record("a"), ARRAYS)
    with pytest.raises(RemoteError, match="off"):
        read(shared, b"k" * 32)
    assert set(remote.calls) == {"ping"}
    remote.down = False
    until(lambda: shared.standing().on)
    shared.write(record("a"), ARRAYS)
    assert shared.flush(60) and remote.parcels
    assert shared.standing().counts["changes"] == 2 and shared.standing().dropped["off"] == 1
    shared.close()


# --------------------------------------------------------------------------------------------- Redis


@contextmanager
def fake_server() -> Iterator[int]:
    """A fake of Redis that listens; its port."""
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0))
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture(params=["fake", "real"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_server() if request.param == "fake" else real_server() as number:
        yield number


def redis_of(port: int, identity: bytes = b"tiny", kind: str = "raw", life: int = 100):
    url = f"redis://127.0.0.1:{port}/0"
    return RedisServer.open(url, identity, kind, life=life, timeout=20.0)


def parcel(name: str, size: int = 100) -> Parcel:
    return Parcel(name.encode().ljust(32), "c:aa:1", b"head " + name.encode(), b"\0" * size)


def test_redis_keeps_entries_by_key_and_place(port: int) -> None:
    remote = redis_of(port)
    remote.ping()
    a, b = parcel("a"), parcel("b")
    remote.put([a, b])
    assert remote.members(["c:aa:1", "c:aa:2"]) == [[b.key, a.key], []]
    assert remote.heads([a.key, b"?" * 32]) == [a.head, None]
    assert remote.fetch(b"?" * 32) is None and remote.fetch(b.key) == (b.head, b.body)
    remote.put([a])
    assert remote.members(["c:aa:1"]) == [[a.key, b.key]], "the one that was put again is the newest"
    for other in (redis_of(port, b"other model"), redis_of(port, kind="int8")):
        assert other.heads([a.key]) == [None] and other.members(["c:aa:1"]) == [[]]
        other.close()
    remote.delete(a.key)
    assert remote.heads([a.key]) == [None] and remote.fetch(b.key) is not None
    remote.close()


def test_a_place_names_its_newest_entries(port: int) -> None:
    remote = redis_of(port)
    parcels = [parcel(str(i)) for i in range(MOST + 3)]
    remote.put(parcels)
    assert remote.members(["c:aa:1"]) == [[one.key for one in parcels[:2:-1]]]
    remote.close()


def test_redis_lets_entries_expire_unless_they_are_used(port: int) -> None:
    remote = redis_of(port, life=2)
    remote.put([parcel("a"), parcel("b"), parcel("c")])
    for _ in range(6):
        time.sleep(0.5)
        assert remote.fetch(parcel("b").key) is not None
        remote.renew([parcel("c")])
    assert [head is None for head in remote.heads([parcel(name).key for name in "abc"])] == [True, False, False]
    remote.close()


def test_redis_tells_its_room() -> None:
    with real_server("--maxmemory", "64mb") as number:
        remote = redis_of(number)
        remote.put([parcel("a")])
        room = remote.room()
        assert (room.entries, room.max_bytes, room.evicted) == (2, 64 * 2**20, 0) and room.bytes > 0
        remote.close()


def test_a_password(caplog: pytest.LogCaptureFixture) -> None:
    with real_server("--requirepass", "secret") as number:
        with pytest.raises(ConfigError, match="refuses user and password") as error:
            tier_of(f"redis://:wrong@127.0.0.1:{number}/0")
        assert "wrong@" not in str(error.value)
        with pytest.raises(ConfigError, match="refuses user and password"):
            tier_of(f"redis://127.0.0.1:{number}/0")
        shared = tier_of(f"redis://:secret@127.0.0.1:{number}/0")
        assert shared.standing().on and "secret" not in shared.standing().address
        shared.close()
    assert "secret" not in caplog.text


def tier_of(url: str) -> SharedTier:
    return open_shared(url, b"tiny", "raw", None)


def test_limits_are_parameters_of_the_address() -> None:
    for query, timeout in (("", 0.25), ("?days=1&timeout=3", 3.0), ("?health_check_interval=9&days=1", 0.25)):
        shared = tier_of(f"redis://127.0.0.1:1/0{query}")
        assert shared.patience == timeout
        assert shared.standing().address == "redis://127.0.0.1:1/0"
        shared.close()


@pytest.mark.parametrize("limit", ["days=0", "days=-1", "timeout=soon", "days=", "days=inf", "days=nan"])
def test_a_limit_that_cannot_work_is_an_error(limit: str) -> None:
    name, _, value = limit.partition("=")
    with pytest.raises(ConfigError, match=f"--remote-cache: {name} must be a number above 0, up to 1e9, not '{value}'"):
        tier_of(f"redis://127.0.0.1:1/0?{limit}")


def test_a_bound_is_the_servers_own() -> None:
    with pytest.raises(ConfigError, match="leave gb out, and set its maxmemory"):
        tier_of("redis://127.0.0.1:1/0?gb=4")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "127.0.0.1:6379",
        "s3://bucket",
        "redis://127.0.0.1:port/0",
        "redis://127.0.0.1:1/0?time_out=1",
        "redis://127.0.0.1:1/0?protocol=9",
    ],
)
def test_another_address_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="address of the shared cache"):
        tier_of(url)


def test_what_is_no_redis_is_an_error() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as number, pytest.raises(ConfigError, match="as Redis does"):
        tier_of(f"redis://127.0.0.1:{number}/0")


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_a_server_that_is_not_there_leaves_the_tier_off(host: str, caplog: pytest.LogCaptureFixture) -> None:
    shared = tier_of(f"redis://{host}/0")
    assert not shared.standing().on
    assert f"the shared cache redis://{host}/0 is off" in caplog.text
    shared.close()
