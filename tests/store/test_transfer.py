"""`KVTransfer`: whatever way KV takes between the tiers it is the same bytes, or an error; against a plain
dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock, Semaphore, Timer
from time import sleep
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ragjax.runner.weights
from ragjax.core import Run
from ragjax.core.tiers import Copy, Done, Load, Record, Save, Write
from ragjax.kernels.pages import Pages
from ragjax.runner.runner import Runner
from ragjax.store import device as page_store
from ragjax.store import host
from ragjax.store.transfer import KVTransfer
from tests.support import tiny
from tests.support.compiler import custom_calls, hopper_mesh, lower

PAGE = tiny.PAGE
LAYERS, HEADS, DIM = tiny.CONFIG.num_layers, tiny.CONFIG.num_kv_heads, tiny.CONFIG.head_dim
TOTAL = 40
"""Pages of the pool."""

KV = tuple[np.ndarray, np.ndarray]
"""Keys and values of some tokens, [L, K, n, D] each."""


@dataclass
class FakeDisk:
    """Entries in a dictionary, as copies; reads and writes can be made to fail, or to wait."""

    entries: dict[bytes, dict[str, np.ndarray]] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    reads: int = 0
    open: Event = field(default_factory=Event)
    reached: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.open.set()

    def pass_through(self) -> None:
        self.reached.set()
        self.open.wait()
        with self.lock:
            if self.failures:
                raise self.failures.pop(0)

    def write(self, record: Record, arrays: Mapping[str, np.ndarray]) -> int:
        self.pass_through()
        self.entries[record.key] = {name: x.copy() for name, x in arrays.items()}
        return sum(x.nbytes for x in arrays.values())

    def read_shares(self, key: bytes, count: int, expected: Record | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        self.reads += 1
        for i in range(count):
            self.pass_through()
            arrays = self.entries[key]
            yield {name: x[len(x) * i // count : len(x) * (i + 1) // count] for name, x in arrays.items()}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """In float32 one stage; in bfloat16 a stage per layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragjax.runner.weights, "STAGE_LAYERS", 8 if request.param == "float32" else 1)
        return tiny.runner(request.param, pages=TOTAL)


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


Start = Callable[..., KVTransfer]


@pytest.fixture
def start(runner: Runner, disk: FakeDisk) -> Iterator[Start]:
    """Make transfer engines of this runner and disk; each is closed at the end."""
    made: list[KVTransfer] = []

    def start_one(kind: Any = "raw", **options: Any) -> KVTransfer:
        made.append(KVTransfer(runner, kind, **({"disk": disk} | options)))
        return made[-1]

    yield start_one
    disk.open.set()
    for transfer in made:
        transfer.close()


@pytest.fixture
def transfer(start: Start) -> KVTransfer:
    return start()


# ------------------------------------------------------------------------------------------ helpers


def fill(runner: Runner, pages: Sequence[int], seed: int) -> KV:
    """Random numbers into whole pages; what is there now, [L, P, K, C, D]."""
    shape = (2, LAYERS, len(pages), HEADS, PAGE, DIM)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if runner.storage_dtype == np.uint16:
        values = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    k, v = values
    runner.insert(np.asarray(pages, np.int32), runner.upload(k, v))
    return k, v


copied = jax.jit(partial(jax.tree.map, jnp.copy))


def pool_of(runner: Runner) -> KV:
    """The whole pool, [L, P, K, C, D], read without the code under test."""
    pools = [copied(pool) for pool in runner._pools]
    return np.concatenate([p.k_LPKCD for p in pools]), np.concatenate([p.v_LPKCD for p in pools])


def at(pool: KV, run: Run) -> KV:
    """What a run holds, by its slots."""
    slots = run.slots(PAGE)
    k, v = (np.moveaxis(x[:, slots // PAGE, :, slots % PAGE], 0, 2) for x in pool)
    return k, v


def join(parts: Sequence[KV]) -> KV:
    k, v = (np.concatenate([part[i] for part in parts], axis=2) for i in range(2))
    return k, v


def sliced(kv: KV, begin: int, end: int) -> KV:
    return kv[0][:, :, begin:end], kv[1][:, :, begin:end]


def same(one: KV, other: KV) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(one, other, strict=True))


def finish(transfer: KVTransfer) -> list[Done]:
    """Everything begun so far, finished."""
    transfer.flush()
    return list(transfer.poll())


def succeed(transfer: KVTransfer) -> list[Done]:
    done = finish(transfer)
    assert [d.error for d in done] == [None] * len(done)
    return done


def record(name: int, tokens: int) -> Record:
    return Record(name.to_bytes(32, "big"), b"p" * 32, b"t" * 4 * tokens, "exact", "full", 0)


def fresh(first: int, length: int) -> Run:
    """A run from a page's first slot on."""
    return Run(tuple(range(first, first - (-length // PAGE))), 0, length)


MIDDLE = Run((9, 4, 5, 17), 11, 48)
"""From the middle of a page on, over pages in no order."""


# ------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize(
    "run",
    [Run((3,), 0, 1), Run((3,), 15, 1), Run((3,), 2, 9), Run((3, 8), 15, 2), Run((3, 8), 0, 2 * PAGE), MIDDLE,
     Run(tuple(range(1, 20)), 5, 18 * PAGE + 2)],
    ids=lambda run: f"{run.start}+{run.length}",
)  # fmt: skip
@pytest.mark.parametrize("through", ["host", "disk"])
def test_round_trip_is_bit_for_bit(runner: Runner, transfer: KVTransfer, run: Run, through: str) -> None:
    fill(runner, range(1, TOTAL), 1)
    kept = at(pool_of(runner), run)
    transfer.save([Save(7, run)])
    transfer.write([Write(record(1, run.length), Copy(7, 0, run.length))])
    fill(runner, range(1, TOTAL), 2)
    transfer.flush()
    if through == "disk":
        transfer.forget([7])
    before = pool_of(runner)
    target = fresh(20, run.length)
    transfer.load([Load(1, target, (Copy(7 if through == "host" else record(1, 0).key, 0, run.length),))])
    transfer.flush()
    assert same(pool_of(runner), before)  # the pool changes in poll() alone
    done = transfer.poll()
    assert [type(d.job) for d in done] == [Save, Write, Load] and all(d.error is None for d in done)
    after = pool_of(runner)
    assert same(at(after, target), kept)
    others = np.setdiff1d(np.arange(TOTAL), target.pages)
    assert same((after[0][:, others], after[1][:, others]), (before[0][:, others], before[1][:, others]))


def test_nothing_is_moved_for_no_tokens(runner: Runner, transfer: KVTransfer) -> None:
    transfer.save([])
    transfer.save([Save(1, Run((), 0, 0))])
    transfer.load([Load(1, Run((), 0, 0), (Copy(1, 0, 0),))])
    assert len(succeed(transfer)) == 2


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("int4", 0.1)])
def test_lossy_kinds_say_so(runner: Runner, start: Start, kind: str, bound: float) -> None:
    transfer = start(kind)
    assert transfer.lossy
    fill(runner, range(1, TOTAL), 1)
    run = Run(tuple(range(1, 14)), 0, 13 * PAGE)
    kept = at(pool_of(runner), run)
    transfer.save([Save(1, run)])
    transfer.write([Write(record(1, run.length), Copy(1, 0, run.length))])
    saved, written = succeed(transfer)
    assert 0.2 * bound < saved.loss < bound
    assert saved.bytes == written.bytes == transfer.size(run.length)
    transfer.load(
        [Load(1, fresh(20, 20), (Copy(1, 30, 20),)), Load(2, fresh(30, 20), (Copy(record(1, 0).key, 30, 20),))]
    )
    succeed(transfer)
    pool = pool_of(runner)
    assert same(at(pool, fresh(20, 20)), at(pool, fresh(30, 20)))
    for got, what in zip(at(pool, fresh(20, 20)), sliced(kept, 30, 50), strict=True):
        got, what = (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x for x in (got, what))
        got, what = got.astype(np.float64), what.astype(np.float64)
        assert 0 < np.linalg.norm(got - what) < 1.5 * bound * np.linalg.norm(what)


@pytest.mark.parametrize(("written", "configured"), [("int8", "raw"), ("int4", "raw"), ("raw", "int4")])
def test_an_entry_of_another_kind_is_read(runner: Runner, start: Start, written: str, configured: str) -> None:
    one, other = start(written), start(configured)
    fill(runner, range(1, TOTAL), 1)
    one.save([Save(1, MIDDLE)])
    one.write([Write(record(1, 48), Copy(1, 0, 48))])
    succeed(one)
    for transfer, number, first in ((one, 1, 20), (other, 2, 30)):
        transfer.load([Load(number, fresh(first, 48), (Copy(record(1, 0).key, 0, 48),))])
        succeed(transfer)
    pool = pool_of(runner)
    assert same(at(pool, fresh(20, 48)), at(pool, fresh(30, 48)))
    assert same(at(pool, fresh(20, 48)), at(pool, MIDDLE)) == (written == "raw")


# ------------------------------------------------------------------------------------------ order of things


def test_a_load_waits_for_its_save_and_is_reported_after_it(
    runner: Runner, transfer: KVTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(runner, range(1, TOTAL), 1)
    kept = at(pool_of(runner), MIDDLE)
    real, gate = host.to_numpy, Event()

    def slow(*args: Any) -> np.ndarray:
        gate.wait()
        return real(*args)

    monkeypatch.setattr(host, "to_numpy", slow)
    transfer.save([Save(1, MIDDLE)])
    transfer.load([Load(i, fresh(20 + 4 * i, 48), (Copy(1, 0, 48),)) for i in range(4)])
    transfer.write([Write(record(1, 48), Copy(1, 0, 48))])
    transfer.forget([1])
    assert not transfer.poll()
    gate.set()
    done = succeed(transfer)
    assert isinstance(done[0].job, Save) and len(done) == 6
    pool = pool_of(runner)
    assert all(same(at(pool, fresh(20 + 4 * i, 48)), kept) for i in range(4))
    assert not transfer.host._entries


def test_loads_pass_slow_writes(runner: Runner, transfer: KVTransfer, disk: FakeDisk) -> None:
    fill(runner, range(1, TOTAL), 1)
    transfer.save([Save(1, MIDDLE)])
    succeed(transfer)
    disk.open.clear()
    transfer.write([Write(record(i, 48), Copy(1, 0, 48)) for i in range(5)])
    disk.reached.wait()
    transfer.load([Load(1, fresh(20, 48), (Copy(1, 0, 48),))])
    while not (done := transfer.poll()):
        sleep(0.001)
    assert [type(d.job) for d in done] == [Load]
    disk.open.set()
    assert len(succeed(transfer)) == 5


def test_notice_is_given_for_all_that_can_be_polled(runner: Runner, start: Start) -> None:
    """A loop that sleeps until it is told hears of every job."""
    notice = Event()
    transfer = start()
    transfer.notify = notice.set
    fill(runner, range(1, TOTAL), 1)
    transfer.save([Save(1, MIDDLE), Save(2, Run((1,), 0, 2))])
    transfer.write([Write(record(1, 48), Copy(1, 0, 48))])
    transfer.load([Load(1, fresh(20, 48), (Copy(1, 0, 48),)), Load(2, fresh(30, 2), (Copy(b"missing", 0, 2),))])
    seen: list[Done] = []
    while len(seen) < 5:
        notice.wait()
        notice.clear()
        seen += transfer.poll()
    assert [d.job for d in seen if d.error] == [Load(2, fresh(30, 2), (Copy(b"missing", 0, 2),))]
    assert all(d.seconds > 0 for d in seen)
    transfer.flush()
    notice.clear()
    transfer.load([Load(3, fresh(30, 2), (Copy(b"missing", 0, 2),))])
    transfer.flush()
    assert notice.is_set()  # also where a failure is all there is to hear of


# ------------------------------------------------------------------------------------------ stages

STAGES = tiny.CONFIG.num_layers
"""Of the runner with a stage per layer."""


@pytest.fixture
def staged(runner: Runner) -> Runner:
    if len(runner.stages) == 2:
        pytest.skip("one stage")
    return runner


class Gates:
    """A disk whose every share waits until it is let through, and may fail instead."""

    def __init__(self, disk: FakeDisk) -> None:
        self.disk = disk
        self.through = Semaphore(0)
        self.failures: list[Exception | None] = []
        disk.pass_through = self.wait  # type: ignore[method-assign]

    def wait(self) -> None:
        self.through.acquire()
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure


def poll_until(transfer: KVTransfer, stages: int) -> None:
    """Until so many stages of load 1 are in the pool, and no more are on their way."""
    while transfer.arrived().get(1, 0) < stages:
        assert not transfer.poll()
        sleep(0.001)


@pytest.fixture
def gated(staged: Runner, transfer: KVTransfer, disk: FakeDisk) -> tuple[Gates, KV]:
    """Entry 1 on disk, read a share at a time."""
    kept = on_disk(staged, transfer)
    fill(staged, FROM_DISK.run.pages, 5)
    return Gates(disk), kept


def test_stages_arrive_one_after_the_other(staged: Runner, transfer: KVTransfer, gated: tuple[Gates, KV]) -> None:
    gates, kept = gated
    before = at(pool_of(staged), FROM_DISK.run)
    transfer.load([FROM_DISK])
    for stage in range(STAGES):
        poll_until(transfer, stage)
        found = at(pool_of(staged), FROM_DISK.run)
        for x, new, old in zip(found, kept, before, strict=True):
            assert np.array_equal(x[:stage], new[:stage]) and np.array_equal(x[stage:], old[stage:])
        gates.through.release()
    succeed(transfer)
    assert same(at(pool_of(staged), FROM_DISK.run), kept)
    assert transfer.arrived() == {}


def test_host_entries_arrive_by_stages_too(staged: Runner, transfer: KVTransfer) -> None:
    kept = on_disk(staged, transfer)
    seen: list[int] = []
    transfer.notify = lambda: seen.append(len(transfer._ready))
    transfer.load([Load(1, fresh(20, 48), (Copy(1, 0, 48),))])
    succeed(transfer)
    assert len(seen) == STAGES + 1  # each stage, and the end
    assert same(at(pool_of(staged), fresh(20, 48)), kept)


@pytest.mark.parametrize("end", ["fails", "is given up"])
def test_nothing_unchecked_stays_in_the_pages(
    staged: Runner, transfer: KVTransfer, gated: tuple[Gates, KV], end: str
) -> None:
    gates, _ = gated
    before = pool_of(staged)
    gates.failures = [None, OSError("checksum differs")]
    transfer.load([FROM_DISK])
    gates.through.release()
    poll_until(transfer, 1)
    if end == "is given up":
        transfer.give_up(1)
    gates.through.release(2)
    done = finish(transfer)
    assert [d.error for d in done] == ([] if end == "is given up" else ["OSError: checksum differs"])
    after, pages = pool_of(staged), list(FROM_DISK.run.pages)
    assert not any(x[:, pages].any() for x in after)
    others = np.setdiff1d(np.arange(TOTAL), pages)
    assert all(np.array_equal(x[:, others], y[:, others]) for x, y in zip(after, before, strict=True))
    assert transfer.arrived() == {}


def test_a_lost_pool_between_stages_fails_the_load(
    staged: Runner, transfer: KVTransfer, gated: tuple[Gates, KV], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, _ = gated

    def lost(*_: Any) -> None:
        raise RuntimeError("the pool is gone")

    transfer.load([FROM_DISK])
    gates.through.release()
    poll_until(transfer, 1)
    monkeypatch.setattr(staged, "insert", lost)
    monkeypatch.setattr(staged, "clear", lost)
    gates.through.release(STAGES)
    [done] = finish(transfer)
    assert done.error == "RuntimeError: the pool is gone"


# ------------------------------------------------------------------------------------------ failures


def on_disk(runner: Runner, transfer: KVTransfer) -> KV:
    """Entry 1 with MIDDLE's KV, in host memory and on disk."""
    fill(runner, range(1, TOTAL), 1)
    transfer.save([Save(1, MIDDLE)])
    transfer.write([Write(record(1, 48), Copy(1, 0, 48))])
    succeed(transfer)
    return at(pool_of(runner), MIDDLE)


FROM_DISK = Load(1, fresh(20, 48), (Copy(record(1, 0).key, 0, 48),))
PIECES = Load(2, fresh(20, 58), (Copy(1, 0, 10), Copy(record(1, 0).key, 0, 48)))


@pytest.mark.parametrize("job", [FROM_DISK, PIECES], ids=["alone", "one piece"])
def test_a_load_that_fails_for_good_changes_nothing(
    runner: Runner, transfer: KVTransfer, disk: FakeDisk, job: Load
) -> None:
    on_disk(runner, transfer)
    before = pool_of(runner)
    disk.failures = [OSError("checksum differs")]
    transfer.load([job])
    (done,) = finish(transfer)
    assert (done.job, done.error, done.bytes) == (job, "OSError: checksum differs", 0)
    assert same(pool_of(runner), before)
    transfer.load([job])  # and the next one is fine
    succeed(transfer)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda a: {name: x[:, :, :-1] for name, x in a.items()}, "47 tokens, of which 48"),
        (lambda a: a | {"v": a["v"][:, :, :-1]}, "array v"),
        (lambda a: {name: x[1:] for name, x in a.items()}, "array k"),
        (lambda a: {name: x[..., :8] for name, x in a.items()}, "array k"),
        (lambda a: {name: x.astype(np.int64) for name, x in a.items()}, "int64"),
        (lambda a: {"k": a["k"]}, "no known encoding"),
        (lambda a: {f"{name}.int4": x for name, x in a.items()}, "no known encoding"),
    ],
)
def test_a_foreign_entry_is_an_error(
    runner: Runner, transfer: KVTransfer, disk: FakeDisk, harm: Callable[[dict[str, np.ndarray]], Any], named: str
) -> None:
    on_disk(runner, transfer)
    before = pool_of(runner)
    reads = disk.reads
    disk.entries[record(1, 0).key] = harm(disk.entries[record(1, 0).key])
    transfer.load([PIECES])
    (done,) = finish(transfer)
    assert done.error is not None and done.error.startswith("ValueError: ") and named in done.error
    assert same(pool_of(runner), before)
    assert disk.reads == reads + 1  # it would be no better the second time


def test_a_failed_write_is_reported_once(runner: Runner, transfer: KVTransfer, disk: FakeDisk) -> None:
    on_disk(runner, transfer)
    disk.failures = [OSError("no space left")]
    transfer.write([Write(record(i, 48), Copy(1, 0, 48)) for i in (2, 3)])
    first, second = finish(transfer)
    assert (first.error, second.error) == ("OSError: no space left", None)
    assert record(2, 0).key not in disk.entries


@pytest.mark.parametrize("where", ["extract", "to_numpy"])
def test_a_failed_save_fails_what_waits_for_it(
    runner: Runner, transfer: KVTransfer, disk: FakeDisk, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    fill(runner, range(1, TOTAL), 1)
    before = pool_of(runner)
    with monkeypatch.context() as patch:
        patch.setattr(*((runner, where) if where == "extract" else (host, where)), fail)
        transfer.save([Save(1, MIDDLE), Save(2, Run((1,), 0, 2))])
        transfer.load([Load(1, fresh(20, 48), (Copy(1, 0, 48),))])
        transfer.write([Write(record(1, 48), Copy(1, 0, 48))])
        errors = {d.job: d.error for d in finish(transfer)}
    assert len(errors) == 4 and all("device lost" in str(error) for error in errors.values())
    assert same(pool_of(runner), before) and not disk.entries
    transfer.forget([1, 2])
    assert not transfer.host._entries
    transfer.save([Save(1, MIDDLE)])
    succeed(transfer)


@pytest.mark.parametrize("where", ["upload", "insert"])
def test_a_load_that_the_device_refuses_is_an_error(
    runner: Runner, transfer: KVTransfer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    on_disk(runner, transfer)
    with monkeypatch.context() as patch:
        patch.setattr(runner, where, fail)
        transfer.load([FROM_DISK])
        (done,) = finish(transfer)
    assert done.error == "RuntimeError: out of memory" and done.bytes == 0


def test_kv_outlives_the_pool(runner: Runner, transfer: KVTransfer) -> None:
    """The device loses everything, also what was on its way; host and disk bring back theirs."""
    kept = on_disk(runner, transfer)
    for pool in runner._pools:
        pool.k_LPKCD.delete()
    assert runner.lost
    transfer.save([Save(2, MIDDLE)])
    transfer.load([Load(3, fresh(30, 48), (Copy(1, 0, 48),))])
    saved, loaded = finish(transfer)
    assert saved.error and loaded.error
    runner.reset()
    transfer.load([FROM_DISK, Load(3, fresh(30, 48), (Copy(1, 0, 48),))])
    succeed(transfer)
    assert all(same(at(pool_of(runner), run), kept) for run in (FROM_DISK.run, fresh(30, 48)))


# ------------------------------------------------------------------------------------------ end, counters


@pytest.mark.parametrize("wait", [True, False])
def test_close_finishes_or_drops_what_has_begun(
    runner: Runner, transfer: KVTransfer, disk: FakeDisk, wait: bool
) -> None:
    on_disk(runner, transfer)
    disk.open.clear()
    disk.reached.clear()
    transfer.write([Write(record(i, 48), Copy(1, 0, 48)) for i in range(2, 9)])
    disk.reached.wait()
    if wait:  # until all is written
        later = Timer(0.1, disk.open.set)
        later.start()
    transfer.close(wait)
    disk.open.set()
    transfer.flush()
    transfer.close()
    assert len(disk.entries) == (8 if wait else 2)
    for order in (
        lambda: transfer.save([Save(2, MIDDLE)]),
        lambda: transfer.load([FROM_DISK]),
        lambda: transfer.write([Write(record(2, 48), Copy(1, 0, 48))]),
    ):
        with pytest.raises(RuntimeError, match="the transfer engine is closed"):
            order()
    assert len(transfer.host._entries) == 1


def test_what_waits_for_a_save_when_the_engine_closes_is_dropped(
    runner: Runner, transfer: KVTransfer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(runner, range(1, TOTAL), 1)
    real, reached, gate = host.to_numpy, Event(), Event()

    def slow(*args: Any) -> np.ndarray:
        reached.set()
        gate.wait()
        return real(*args)

    monkeypatch.setattr(host, "to_numpy", slow)
    transfer.save([Save(1, MIDDLE)])
    transfer.load([Load(1, fresh(20, 48), (Copy(1, 0, 48),))])
    reached.wait()
    transfer.close(wait=False)
    gate.set()
    transfer.close()
    assert [type(d.job) for d in transfer.poll()] == [Save]
    assert not caplog.records


# ------------------------------------------------------------------------------------------ pinned memory


def test_arrays_go_through_pinned_memory(runner: Runner, transfer: KVTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: JAX knows pinned memory on CPU too, where it is of no use."""
    kinds: list[str] = []
    put = jax.device_put

    def watched(x: Any, sharding: Any) -> Any:
        kinds.append(sharding.memory_kind)
        return put(x, sharding)

    monkeypatch.setattr(host, "staging", lambda sharding: sharding.with_memory_kind(host.PINNED))
    monkeypatch.setattr(jax, "device_put", watched)
    kept = on_disk(runner, transfer)
    # 39 pages went up in parts of 16, 16, 1, 1, 1 and 4, keys and values; four came down in one
    arrays = 2 * len(runner._pools)
    assert kinds == ["pinned_host", "device"] * arrays * 6 + ["pinned_host"] * arrays
    transfer.load([FROM_DISK])
    succeed(transfer)
    assert same(at(pool_of(runner), FROM_DISK.run), kept)
    assert runner._pools[0].k_LPKCD.sharding.memory_kind == "device"


def test_cpu_needs_no_staging(runner: Runner) -> None:
    assert host.staging(runner._pools[0].k_LPKCD.sharding) is None


@pytest.mark.parametrize("device", ["gpu with pinned memory", "gpu without"])
def test_gpu_stages_where_it_can(device: str) -> None:
    @dataclass(frozen=True)
    class Fake:
        platform: str
        kinds: tuple[str, ...]

        def addressable_memories(self) -> list[Any]:
            return [type("Memory", (), {"kind": kind}) for kind in self.kinds]

    class Sharding:
        device_set = (Fake("gpu", ("device", "pinned_host") if device.endswith("memory") else ("device",)),)

        def with_memory_kind(self, kind: str) -> str:
            return kind

    assert host.staging(Sharding()) == ("pinned_host" if device.endswith("memory") else None)  # type: ignore[arg-type]


def test_programs_lower_for_cuda() -> None:
    """And what device_put asks for in pinned memory is what a GPU program calls host placement."""
    pool = jax.ShapeDtypeStruct((6, 100, 3, 64, 64), jnp.bfloat16)
    part = jax.ShapeDtypeStruct((6, 4, 3, 64, 64), jnp.bfloat16)
    page_P = jax.ShapeDtypeStruct((4,), jnp.int32)
    taken = lower(page_store.extract, Pages(pool, pool), page_P)
    assert taken.out_info.k_LPKCD.shape == part.shape
    assert lower(page_store.insert, Pages(pool, pool), page_P, Pages(part, part)).out_info.k_LPKCD.shape == pool.shape
    pinned = NamedSharding(hopper_mesh(), P(), memory_kind=host.PINNED)
    calls = custom_calls(lower(lambda x: jax.device_put(x, pinned), part))
    assert [target for target, _ in calls] == ["annotate_device_placement"]


# ------------------------------------------------------------------------------------------ the model


def random_run(random: np.random.Generator, pages: Sequence[int]) -> Run:
    start, length = int(random.integers(PAGE)), int(random.integers(1, 3 * PAGE))
    return Run(tuple(int(p) for p in pages[: (start + length - 1) // PAGE + 1]), start, length)


@pytest.mark.parametrize("seed", range(3))
def test_random_orders_against_a_dictionary(
    runner: Runner, transfer: KVTransfer, disk: FakeDisk, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any order of jobs, failures among them, polled at any time: what a load brings is what was saved."""
    random = np.random.default_rng(seed)
    fill(runner, range(TOTAL), seed)
    pool = [x.copy() for x in pool_of(runner)]
    entries: dict[int, KV] = {}
    files: dict[bytes, KV] = {}
    written: dict[Write, KV] = {}
    wanted: dict[Load, KV] = {}
    busy: set[int] = set()
    failed = loaded = 0

    def settle(done: Sequence[Done]) -> None:
        nonlocal failed, loaded
        for one in done:
            failed += one.error is not None
            if isinstance(one.job, Write) and one.error is None:
                files[one.job.record.key] = written[one.job]
            if isinstance(one.job, Load):
                busy.difference_update(one.job.run.pages)
                loaded += one.error is None
                if one.error is None:
                    # a load writes whole pages: the slots after its tokens are zeros
                    kv, run = wanted.pop(one.job), one.job.run
                    for x, new in zip(pool, kv, strict=True):
                        x[:, run.pages] = 0
                        slots = run.slots(PAGE)
                        x[:, slots // PAGE, :, slots % PAGE] = np.moveaxis(new, 2, 0)
                else:
                    pages = list(one.job.run.pages)
                    for x, now in zip(pool, pool_of(runner), strict=True):
                        if not now[:, pages].any():  # stages had arrived, and were taken back
                            x[:, pages] = 0

    def free() -> list[int]:
        return [int(p) for p in random.permutation(np.setdiff1d(np.arange(1, TOTAL), sorted(busy)))]

    def save(step: int) -> None:
        jobs = [Save(10 * step + i, random_run(random, free())) for i in range(int(random.integers(1, 4)))]
        entries.update({job.entry: at((pool[0], pool[1]), job.run) for job in jobs})
        transfer.save(jobs)

    def piece(source: dict[Any, KV]) -> tuple[Copy, KV]:
        name = list(source)[int(random.integers(len(source)))]
        begin, end = sorted(int(x) for x in random.integers(0, source[name][0].shape[2] + 1, 2))
        return Copy(name, begin, end - begin), sliced(source[name], begin, end)

    def write(step: int) -> None:
        if entries:
            copy, kv = piece(entries)
            job = Write(record(step, copy.length), copy)
            written[job] = kv
            transfer.write([job])

    def load(step: int) -> None:
        sources = [source for source in (entries, files) if source]
        if not sources:
            return
        parts = [piece(sources[int(random.integers(len(sources)))]) for _ in range(int(random.integers(1, 4)))]
        kv = join([kv for _, kv in parts])
        pages = free()[: -(-kv[0].shape[2] // PAGE)]
        if len(pages) * PAGE < kv[0].shape[2]:
            return
        job = Load(step, Run(tuple(pages), 0, kv[0].shape[2]), tuple(copy for copy, _ in parts))
        wanted[job] = kv
        busy.update(pages)
        transfer.load([job])

    def overwrite(step: int) -> None:
        pages = free()[:3]
        for x, new in zip(pool, fill(runner, pages, 1000 * seed + step), strict=True):
            x[:, pages] = new

    def forget(step: int) -> None:
        if entries:
            number = list(entries)[int(random.integers(len(entries)))]
            del entries[number]
            transfer.forget([number])

    def poll(step: int) -> None:
        settle(transfer.poll())

    def harm(step: int) -> None:
        with disk.lock:
            disk.failures.append(OSError(f"injected at {step}"))

    actions = [save, save, write, load, load, overwrite, forget, poll, harm]
    for step in range(150):
        actions[int(random.integers(len(actions)))](step)
        if step % 30 == 29:
            settle(finish(transfer))
            assert same(pool_of(runner), (pool[0], pool[1])), f"seed {seed}, step {step}"
            assert transfer.host._entries.keys() == entries.keys()
    assert failed > 2 and loaded > 10
    transfer.forget(list(entries))
    settle(finish(transfer))
    assert not transfer.host._entries and not busy
