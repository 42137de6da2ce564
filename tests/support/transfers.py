"""Fakes below the cache: a transfer engine and a disk index that move simulated KV, and a bench that plays requests.

Each slot of the simulated pool holds a hash of everything the KV there depends on, so a match whose slots hold the
hashes of its own tokens is proof that no page was lost, doubled, shifted, reused too early or read before its bytes
came. The lowest bit says that precision was lost. The fakes hold the cache to its contract: they complain (`Misuse`)
where a real transfer engine would corrupt something.
"""

from collections import Counter

import numpy as np

from ragjax.cache.cache import KnowledgeCache, neighbours_digest
from ragjax.cache.hierarchy import Storage
from ragjax.cache.match import Candidate
from ragjax.cache.policy.base import LRU
from ragjax.cache.pool import PagePool
from ragjax.cache.tree import Provenance
from ragjax.core.tiers import Copy, Done, Load, Save, Write
from tests.support.audit import audit_cache, audit_counts

PAGE = 4
GARBAGE = -1
BYTES = 8
"""Of a token at rest."""


class Misuse(AssertionError):
    """The cache broke the contract of `ragjax.core.tiers`."""


def tokens(*ids):
    return np.asarray(ids, np.int32)


# ------------------------------------------------------------------------------------------- content


def value(*what):
    return hash(what) & ~1


def causal_content(tenant, ids):
    """What the slots of a causal run hold: each token's whole path, hashed; int64 [n]."""
    return np.asarray([value(tenant, tuple(ids[: i + 1])) for i in range(len(ids))], np.int64)


def keyed_content(tenant, context, provenance, method, ids, behind=()):
    what = (tenant, tuple(context), str(provenance), method, tuple(map(tuple, behind)))
    return np.asarray([value(*what, tuple(ids[: i + 1])) for i in range(len(ids))], np.int64)


# --------------------------------------------------------------------------------------------- fakes


class FakeDiskIndex:
    """Entries on disk, shared by all caches that are given it. bad: keys whose bytes cannot be read."""

    def __init__(self):
        self.entries = {}
        self.bad = set()
        self.lossy = {}
        self.touched = []

    def find(self, key):
        return self.entries[key][0] if key in self.entries else None

    def children(self, place, tokens):
        return [
            record
            for record, _ in self.entries.values()
            if record.provenance in ("causal", "dependency")
            and record.place == place
            and record.tokens[:4] == tokens[:4]
        ]

    def chunks(self, place):
        records = (record for record, _ in self.entries.values())
        return [r for r in records if r.provenance == "approximate" and r.place == place]

    def touch(self, keys):
        self.touched += keys

    def put(self, record, data):
        if len(record) != len(data) or len(record.key) != 32 or len(record.place) != 32:
            raise Misuse(f"{record} does not describe {len(data)} tokens")
        if self.lossy.setdefault(record.key, record.lossy) != record.lossy:
            raise OSError("a reader might take these bytes for those that were here before")
        self.entries.setdefault(record.key, (record, data))

    def read(self, key, expected=None):
        if key in self.bad:
            self.entries.pop(key, None)  # set aside
            raise OSError("a damaged entry")
        record, data = self.entries[key]
        if expected is not None and record != expected:
            raise OSError("another entry")
        return data


class FakeCarrier:
    """Moves simulated KV when told to (`finish`), in whatever order. lag: jobs wait; otherwise `poll` finishes them.

    entries: host entries not forgotten, number: tokens. pending: jobs begun. calls: how often each kind was ordered.
    stages: how many of each load are said to have arrived, by number.
    """

    def __init__(self, pool, slots, disk_index=None, *, host_bytes=0, lossy=False, lag=False, overhead=0):
        self.lossy = lossy
        self.lag = lag
        self.backlog = 0
        self.entries = {}
        self.pending = []
        self.calls = Counter()
        self.refuse = {}
        self.stages = {}
        self._pool, self._slots, self._shelf = pool, slots, disk_index
        self._host_bytes, self._overhead = host_bytes, overhead
        self._data = {}
        self._seen = set()
        self._done = []

    def size(self, tokens):
        return tokens * BYTES + (self._overhead if tokens else 0)

    # ---- orders

    def save(self, jobs):
        for job in jobs:
            if job.entry in self._seen:
                raise Misuse(f"entry {job.entry} is saved twice")
            data = self._slots[job.run.slots(self._pool.page_size)]  # as it is now: a copy
            if job.run.length < 1 or (data == GARBAGE).any():
                raise Misuse(f"{job} reads slots that nobody wrote, or that were given away")
            self._seen.add(job.entry)
            self.entries[job.entry] = job.run.length
            self._data[job.entry] = data | self.lossy
            self._begin(job)

    def write(self, jobs):
        for job in jobs:
            self._require(job.copy)
            if self._shelf is None or isinstance(job.copy.entry, bytes):
                raise Misuse("a write takes a host entry and a disk")
            if len(job.record) != job.copy.length:
                raise Misuse(f"{job.record} does not describe {job.copy}")
            self._begin(job)

    def load(self, jobs):
        for job in jobs:
            length = sum(piece.length for piece in job.pieces)
            if job.run.start or length != job.run.length or len(job.run.pages) != self._pool.pages_for(length):
                raise Misuse(f"the pieces of {job} do not fill whole fresh pages")
            for piece in job.pieces:
                self._require(piece)
            self._require_held(job)
            self._slots[self._page_slots(job)] = GARBAGE
            self._begin(job)

    def give_up(self, number):
        under_way = [*self.pending, *(done.job for done in self._done)]
        [job] = [one for one in under_way if isinstance(one, Load) and one.number == number]
        self.pending = [one for one in self.pending if one is not job]
        self._done = [done for done in self._done if done.job is not job]
        self._tidy()

    def forget(self, entries):
        for entry in entries:
            if entry not in self.entries:
                raise Misuse(f"entry {entry} is not there, and forgotten")
            del self.entries[entry]
            self._tidy()

    def poll(self):
        if not self.lag:
            self.finish_all()
        done, self._done = self._done, []
        return done

    def clear(self, pages):
        if any(self._pool.counts[page] for page in pages):
            raise Misuse(f"{pages} are in use, and cleared")
        self._slots.reshape(-1, self._pool.page_size)[list(pages)] = GARBAGE

    def arrived(self):
        numbers = {job.number for job in self.pending if isinstance(job, Load)}
        return {number: stages for number, stages in self.stages.items() if number in numbers}

    # ---- what tests decide

    def finish(self, number=0, error=None):
        """The pending job of this number is done; what it waits for is done before it."""
        job = self.pending[number % len(self.pending)]
        for save in [p for p in self.pending if isinstance(p, Save) and p.entry in self._wanted(job) and p is not job]:
            self._end(save, None)
        self._end(job, error)

    def finish_all(self, error=None):
        while self.pending:
            self.finish(0, error)

    def fail(self, kind, times=1):
        """The next jobs of this kind will fail."""
        self.refuse[kind] = self.refuse.get(kind, 0) + times

    def check(self):
        """What must hold between operations."""
        held = sum(self.size(length) for length in self.entries.values())
        if held > self._host_bytes:
            raise Misuse(f"{held} bytes are in host memory, which has {self._host_bytes}")
        for job in self.pending:
            if isinstance(job, Load):
                self._require_held(job)

    # ---- inside

    def _begin(self, job):
        self.calls[type(job).__name__.lower()] += 1
        self.pending.append(job)

    def _end(self, job, error):
        kind = type(job).__name__.lower()
        if self.refuse.get(kind, 0) and error is None:
            self.refuse[kind] -= 1
            error = f"the {kind} failed"
        self.pending.remove(job)
        if error is None:
            try:
                self._carry_out(job)
            except (OSError, KeyError) as reason:
                error = f"the {kind} failed: {reason}"
        if error is not None and isinstance(job, Save):
            self._data[job.entry] = None
        length = job.copy.length if isinstance(job, Write) else job.run.length
        loss = 0.01 if self.lossy and isinstance(job, Save) and error is None else 0.0
        self._done.append(Done(job, error, 0 if error else length * BYTES, 0.001, loss))
        self._tidy()

    def _carry_out(self, job):
        if isinstance(job, Write):
            self._shelf.put(job.record, self._read(job.copy))
        elif isinstance(job, Load):
            self._require_held(job)
            slots = self._page_slots(job)
            data = np.concatenate([self._read(piece) for piece in job.pieces])
            self._slots[slots] = 0
            self._slots[slots[: len(data)]] = data

    def _read(self, piece):
        on_disk = isinstance(piece.entry, bytes)
        data = self._shelf.read(piece.entry, piece.record) if on_disk else self._data[piece.entry]
        if data is None or len(data) < piece.begin + piece.length:
            raise OSError("no such bytes")
        return data[piece.begin : piece.begin + piece.length]

    def _wanted(self, job):
        if isinstance(job, Save):
            return {job.entry}
        return {job.copy.entry} if isinstance(job, Write) else {piece.entry for piece in job.pieces}

    def _tidy(self):
        kept = set(self.entries).union(*(self._wanted(job) for job in self.pending))
        self._data = {entry: data for entry, data in self._data.items() if entry in kept}

    def _require(self, piece: Copy):
        if isinstance(piece.entry, bytes):
            return
        if piece.entry not in self.entries:
            raise Misuse(f"{piece} is of an entry that is not there")
        if not 0 <= piece.begin < piece.begin + piece.length <= self.entries[piece.entry]:
            raise Misuse(f"{piece} is outside of its entry of {self.entries[piece.entry]} tokens")

    def _require_held(self, job):
        if any(not self._pool._pinned[page] for page in job.run.pages):
            raise Misuse(f"the pages of {job} may be given away before its bytes come")

    def _page_slots(self, job):
        size = self._pool.page_size
        return (np.asarray(job.run.pages)[:, None] * size + np.arange(size)).reshape(-1)


# --------------------------------------------------------------------------------------------- bench


class Bench:
    """A cache with its simulated pool; `host_bytes` or a `disk_index` give it the tiers below."""

    def __init__(
        self, pages=32, policy=None, host_bytes=0, disk_index=None, quota=None, variants=500, identity=b"model", **more
    ):
        """more: of the `FakeCarrier`."""
        self.pool = PagePool(pages, PAGE)
        self.slots = np.full(pages * PAGE, GARBAGE, np.int64)
        self.disk_index = disk_index
        self.transfer = None
        storage = None
        if host_bytes or disk_index is not None:
            self.transfer = FakeCarrier(self.pool, self.slots, disk_index, host_bytes=host_bytes, **more)
            storage = Storage(self.transfer, PAGE * BYTES, host_bytes, disk_index, quota or (lambda tenant: None))
        self.cache = KnowledgeCache(identity, self.pool, policy or LRU(), storage, variants=variants)

    # ---- what requests do

    def reserve(self, n, label=""):
        run = self.cache.reserve(n, label)
        self.slots[run.slots(PAGE)] = GARBAGE
        return run

    def write(self, run, content, lossy=False):
        self.slots[run.slots(PAGE)[: len(content)]] = content | lossy

    def read(self, match):
        return np.concatenate([np.zeros(0, np.int64), *(self.slots[run.slots(PAGE)] for run, _ in match.spans)])

    def match(self, ids, tenant="", **options):
        """A match whose bytes have arrived."""
        match = self.cache.matcher.match_prefix(tokens(*ids), tenant, **options)
        if self.transfer is not None and not self.transfer.lag:
            self.settle()
            assert match.ready
        return match

    def put(self, ids, cuts=(), tenant="", public=None, **options):
        """What a request does that computes and admits a prompt. options: of its look-up."""
        with self.match(ids, tenant, **options) as match:
            if match.complete:
                return
            run = self.reserve(len(ids) - match.length)
            self.write(run, causal_content(tenant, ids)[match.length :], match.lossy)
            self.cache.admitter.admit_prefix(match, tokens(*ids), match.length, run, cuts, public)
            self.cache.free(run)

    def put_segment(
        self, context, ids, provenance=Provenance.ISOLATED, method="naive", tenant="", *, behind=(), **options
    ):
        """What a request does that computes and admits a chunk; behind: the chunks before it."""
        with self.match(context, tenant) as match:
            run = self.reserve(len(ids))
            self.write(run, keyed_content(tenant, context, provenance, method, ids, behind), match.lossy)
            digest = neighbours_digest([tokens(*chunk) for chunk in behind])
            admit = self.cache.admitter.admit_segment
            admit(match, tokens(*ids), run, len(context), provenance, method, behind=digest, **options)
            self.cache.free(run)

    def put_path(self, context, ids, cuts=(), method="dep", tenant=""):
        """What a request does that computes and admits a dependency path."""
        with (
            self.match(context, tenant) as match,
            self.cache.matcher.match_dependency(match, tokens(*ids), method) as found,
        ):
            self.settle()
            if found.complete:
                return
            run = self.reserve(len(ids) - found.length)
            content = keyed_content(tenant, context, Provenance.DEPENDENCY, method, ids)
            self.write(run, content[found.length :], match.lossy or found.lossy)
            self.cache.admitter.admit_dependency(match, tokens(*ids), found.length, run, cuts, method)
            self.cache.free(run)

    def has_segment(
        self, context, ids, provenance=Provenance.ISOLATED, method="naive", tenant="", *, behind=(), origin=None, **more
    ):
        """Whether the chunk is found, as `origin` computed it."""
        digest = neighbours_digest([tokens(*chunk) for chunk in behind])
        with self.match(context, tenant) as match:
            found = match_segment(self.cache, match, tokens(*ids), provenance, method, behind=digest, **more)
            if found is None:
                return False
            self.settle()
            with found:
                assert found.ready and found.broken is None and found.complete
                origin = tenant if origin is None else origin
                content = keyed_content(origin, context, provenance, method, ids, behind)
                assert np.array_equal(self.read(found) & ~1, content)
                assert found.lossy or not (self.read(found) & 1).any()
            return True

    def length(self, ids, tenant="", origin=None):
        """How much of a prompt is found, as `origin` computed it."""
        with self.match(ids, tenant) as match:
            content = causal_content(tenant if origin is None else origin, ids)[: match.length]
            assert np.array_equal(self.read(match) & ~1, content)
            assert match.lossy or not (self.read(match) & 1).any()
            return match.length

    def path_length(self, context, ids, method="dep", tenant=""):
        with (
            self.match(context, tenant) as match,
            self.cache.matcher.match_dependency(match, tokens(*ids), method) as found,
        ):
            self.settle()
            content = keyed_content(tenant, context, Provenance.DEPENDENCY, method, ids)[: found.length]
            assert np.array_equal(self.read(found) & ~1, content)
            return found.length

    # ---- what tests do

    def settle(self):
        """All that was ordered is done."""
        if self.transfer is None:
            return
        while self.transfer.pending or self.transfer._done:
            self.transfer.finish_all()
            self.cache.poll()

    def squeeze(self):
        """Whatever nobody uses leaves the device."""
        if self.pool.reclaimable_pages:
            self.cache.free(self.reserve(self.pool.reclaimable_pages * PAGE))

    def flush(self):
        while self.cache.flush():
            self.settle()

    def audit(self, live=()):
        audit_cache(self.cache, live)
        audit_counts(self.cache)
        if self.transfer is not None:
            self.transfer.check()

    def node(self, ids, tenant=""):
        """The causal node that ends a path."""
        steps = self.cache.tree.walk(tokens(*ids).tobytes(), tenant)
        return steps[-1][0] if sum(used for _, used in steps) == len(ids) else None

    def state(self):
        """Everything a failed call must leave alone."""
        nodes = [
            (n.key, n.run, n.local_start, n.pins, n.note, tuple(c.key for c in n.children()))
            for n in self.cache.tree.nodes()
        ]
        leaving = {n.key for n in self.cache._hierarchy.device.nodes()}
        return nodes, self.pool.counts.tolist(), self.pool.free_pages, self.cache.metrics, leaving


def match_segment(cache, context, tokens, provenance, method, *, behind=b"", cold=True, variant=False, cfo=1.0):
    """Pin the KV of these tokens on exactly the matched context: the one candidate with these fields."""
    candidate = Candidate(provenance, method, behind, variant, cfo)
    return cache.matcher.match_first(context, tokens, [candidate], cold=cold)
