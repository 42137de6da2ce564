"""`python -m benchmarks.policies` and `.characterise`: the simulator against the real cache, and the reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from benchmarks import characterise, policies, report, storage, workload
from benchmarks.simulator import Block, Simulator, key_of
from benchmarks.workload import Corpus, Forest, Request, Workload
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.hierarchy import Storage
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import Access, Policy
from ragjax.cache.policy.lru import LRU
from ragjax.cache.pool import PagePool
from ragjax.cache.profile import Profile
from ragjax.core.tiers import Done, Job, Load, Save, Tier, Write

PROFILE = policies.modelled()
CEILINGS = report.Ceilings(copy_gb_s=10.0, gemm_f32_gflops=100.0, gemm_bf16_gflops=200.0)


def chains(seed: int, requests: int = 150, system: int = 5) -> Workload:
    """Chains of up to six runs below a system prompt, as RAG prompts are."""
    random, forest = np.random.default_rng(seed), Forest()
    made = []
    top = forest.child(-1, "system", system)
    for _ in range(requests):
        nodes = [top]
        for _ in range(int(random.integers(1, 6))):
            label = int(random.zipf(1.6)) % 7
            nodes.append(forest.child(nodes[-1], label, 1 + (5 * label + len(nodes)) % 6, document=True))
        made.append(Request(tuple(nodes), 0, len(nodes) - 1))
    return forest.workload("chains", made)


def trees(seed: int, requests: int = 120) -> Workload:
    """Whole random subtrees of a random tree."""
    random, forest = np.random.default_rng(seed), Forest()
    for node in range(60):
        forest.child(int(random.integers(-1, node)) if node else -1, node, int(random.integers(1, 8)), document=True)
    made = []
    for _ in range(requests):
        chosen: set[int] = set()
        for leaf in random.integers(60, size=4):
            while leaf >= 0:
                chosen.add(int(leaf))
                leaf = forest.parents[leaf]
        made.append(Request(tuple(sorted(chosen)), 2, len(chosen)))
    return forest.workload("trees", made)


# ---------------------------------------------------------------------- the simulator and the real cache


class Instant:
    """A carrier whose jobs are done at once; counts tokens."""

    lossy = False

    def __init__(self) -> None:
        self.moved = 0
        self._done: list[Done] = []

    def size(self, tokens: int) -> int:
        return tokens

    def save(self, jobs: Sequence[Save]) -> None:
        self._finish(jobs, sum(job.run.length for job in jobs))

    def write(self, jobs: Sequence[Write]) -> None:
        self._finish(jobs, 0)

    def load(self, jobs: Sequence[Load]) -> None:
        self._finish(jobs, sum(job.run.length for job in jobs))

    def forget(self, entries: object) -> None:
        """Nothing is kept."""

    def poll(self) -> Sequence[Done]:
        done, self._done = self._done, []
        return done

    def _finish(self, jobs: Sequence[Job], tokens: int) -> None:
        self.moved += tokens
        self._done += [Done(job) for job in jobs]


def replay(work: Workload, policy: Policy, device: int, host: int, lookahead: int) -> tuple[list[int], int]:
    """The same requests through the real cache, a token a page: tokens hit by each, and tokens moved in all."""
    carrier = Instant()
    cache = KnowledgeCache(b"x", PagePool(device + 1, 1), policy, Storage(carrier, host) if host else None)
    hits, announced = [], 0
    prompts = []
    for request in work.requests:
        tokens = np.repeat(np.array(request.nodes, np.int32), [work.sizes[n] for n in request.nodes])
        prompts.append((tokens, tuple(np.cumsum([work.sizes[n] for n in request.nodes]).tolist())))
    for at, (tokens, cuts) in enumerate(prompts):
        for ahead in range(announced, min(at + lookahead + 1, len(prompts))):
            cache.announce(str(ahead), cache.keys_of(*prompts[ahead]))
        announced = max(announced, at + lookahead + 1)
        cache.withdraw(str(at))
        match = cache.match_prefix(tokens)
        cache.poll()
        hits.append(match.length)
        if match.length < len(tokens):
            run = cache.reserve(len(tokens) - match.length)
            cache.admit_prefix(match, tokens, match.length, run, cuts)
            cache.free(run)
        match.release()
        cache.poll()
    cache.audit(live=())
    return hits, carrier.moved


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_simulator_decides_as_the_real_cache_does(name: str, seed: int) -> None:
    work = chains(seed)
    served = Simulator(work, POLICIES[name](PROFILE), 60).run(lookahead=8)
    hits, _ = replay(work, POLICIES[name](PROFILE), 60, 0, lookahead=8)
    assert [one.hit for one in served] == hits
    assert 0 < sum(hits) < sum(work.totals)


@pytest.mark.parametrize("name", POLICIES)
def test_two_tiers_hit_and_move_much_as_in_the_real_cache(name: str) -> None:
    """Not the same to the token: the real one replicates hot nodes, and tells apart what a load and a match hold."""
    work = chains(2, requests=300)
    served = Simulator(work, POLICIES[name](PROFILE), 50, 150).run(lookahead=8)
    hits, moved = replay(work, POLICIES[name](PROFILE), 50, 150, lookahead=8)
    assert sum(one.hit for one in served) == pytest.approx(sum(hits), rel=0.03)
    assert sum(one.moved for one in served) == pytest.approx(moved, rel=0.1)


@pytest.mark.parametrize("host", [0, 90])
@pytest.mark.parametrize("name", [*POLICIES, "belady"])
@pytest.mark.parametrize("make", [chains, trees])
def test_the_books_of_the_simulator_add_up(make: Any, name: str, host: int) -> None:
    work = make(3)
    simulator = Simulator(work, policies.policy_of(name, work, PROFILE), 70, host)
    for at in range(len(work.requests)):
        served = simulator.serve(at, lookahead=8)
        simulator.audit()
        assert 0 <= served.hit <= work.totals[at] - work.requests[at].other
        assert served.moved == 0 or host


def test_the_audit_sees_a_block_above_its_parent() -> None:
    simulator = Simulator(chains(0), LRU(), 1000, 1000)
    simulator.serve(0)
    blocks: dict[int, Block] = simulator._blocks
    leaf = next(block for block in blocks.values() if not block.children)
    leaf.there[Tier.DEVICE] = False
    with pytest.raises(AssertionError):
        simulator.audit()


def test_a_request_larger_than_the_device_is_kept_in_part() -> None:
    work = chains(4, requests=30)
    simulator = Simulator(work, LRU(), 8)
    hits = [simulator.serve(at).hit for at in range(len(work.requests))]
    simulator.audit()
    assert 5 <= max(hits) <= 8


def test_host_memory_serves_what_left_the_device_and_copies_it_once() -> None:
    forest = Forest()
    made = [Request((forest.child(-1, label, 10),)) for label in (0, 1, 0, 1, 0)]
    served = Simulator(forest.workload("turns", made), LRU(), 10, 20).run()
    assert [one.hit for one in served] == [0, 0, 10, 10, 10]
    # out; out and in; in alone, since the copies are there
    assert [one.moved for one in served] == [0, 10, 20, 10, 10]


def test_queue_and_lookahead_reach_the_policy_in_order() -> None:
    class Listener(LRU):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []

        def on_queue(self, request: str, keys: Any) -> Sequence[bytes]:
            assert keys == [key_of(n) for n in work.requests[int(request)].nodes]
            self.heard.append(f"+{request}")
            return ()

        def on_start(self, request: str) -> Sequence[bytes]:
            self.heard.append(f"-{request}")
            return ()

    work, policy = chains(0, requests=4), Listener()
    Simulator(work, policy, 100).run(lookahead=2)
    assert policy.heard == ["+0", "+1", "+2", "-0", "+3", "-1", "-2", "-3"]


def test_accesses_say_what_the_request_hit_and_computed() -> None:
    class Listener(LRU):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Access] = []

        def on_access(self, node: Any, access: Access) -> None:
            super().on_access(node, access)
            self.heard.append(access)

    forest, policy = Forest(), Listener()
    top = forest.child(-1, "system", 5)
    made = [Request((top, forest.child(top, label, 10)), other=3) for label in (0, 1)]
    Simulator(forest.workload("two", made), policy, 100).run()
    computed, hit = [Access(False, 0, 18)] * 2, Access(True, 5, 13)
    assert policy.heard == [*computed, hit, Access(False, 5, 13)]


def test_a_score_that_fell_is_read_again() -> None:
    class Fickle(Policy):
        fallen = b""

        def score(self, node: Any, tier: Tier) -> float:
            return -1.0 if node.key == self.fallen else float(node.number)

        def on_start(self, request: str) -> Sequence[bytes]:
            self.fallen = key_of(1) if request == "2" else b""
            return [key_of(1)]

    forest = Forest()
    made = [Request((forest.child(-1, label, 10),)) for label in (0, 1, 2, 0, 1)]
    served = Simulator(forest.workload("turns", made), Fickle(), 20).run()
    assert [one.hit for one in served] == [0, 0, 0, 10, 0]  # 1 left for 2, though it stood behind 0


def test_copies_below_a_block_that_is_forgotten_go_too() -> None:
    class Picky(LRU):
        def admit(self, node: Any, tier: Tier) -> bool:
            return bool(node.number != 0)

    forest = Forest()
    top = forest.child(-1, "top", 10)
    made = [Request((top, forest.child(top, "below", 10))), Request((forest.child(-1, "other", 20),))]
    simulator = Simulator(forest.workload("three", [*made, made[0]]), Picky(), 20, 100)
    served = simulator.run()
    simulator.audit()
    assert [one.hit for one in served] == [0, 0, 0]


@pytest.mark.parametrize(("device", "host"), [(0, 0), (5, -1)])
def test_capacities_must_hold_something(device: int, host: int) -> None:
    with pytest.raises(ValueError, match="device must hold at least 1 token"):
        Simulator(chains(0), LRU(), device, host)


# ------------------------------------------------------------------------------- figures of the papers


def entities(pattern: str) -> Workload:
    triples = [(f"e{i}", f"r{j}", f"e{(i * 7 + j * 13) % 200}") for i in range(200) for j in range(2)]
    return workload.entities(workload.graph_of(triples), pattern, count=200, queries=100)


def rate(work: Workload, name: str, share: float = 0.2) -> float:
    row = policies.serve(policies.Cell(work, round(share * work.distinct), 0), name, PROFILE)
    return float(row["token_hit_rate"])


def test_lacr_beats_what_knows_only_the_past_and_comes_near_all_knowledge() -> None:
    """DepCache, section 6.4.1, in small: 10.1% over LRU, 6.7% over LFU, 7.2% over PGDSF on average."""
    works = [entities(pattern) for pattern in workload.PATTERNS]
    mean = {name: np.mean([rate(w, name) for w in works]) for name in ("lacr", "lru", "lfu", "pgdsf", "belady")}
    assert mean["lacr"] > 1.10 * mean["lru"]
    assert mean["lacr"] > 1.06 * max(mean["lfu"], mean["pgdsf"])
    assert mean["lacr"] > 0.8 * mean["belady"]


def test_pgdsf_beats_lru_and_gdsf_on_repeated_questions() -> None:
    """RAGCache, section 7.3, in small; GDSF takes all tokens to cost alike, PGDSF knows what a step costs."""
    sizes = np.random.default_rng(0).lognormal(4.5, 0.8, 400) + 1  # long ones are rare
    texts = {f"d{i}": "word " * int(size) for i, size in enumerate(sizes)}
    asked = tuple("what is it?" for _ in range(500))
    corpus = Corpus("documents", texts, asked, ((),) * 500)
    random = np.random.default_rng(1)
    retrieved = [[f"d{i}" for i in random.choice(400, 2, replace=False)] for _ in asked]
    work = workload.documents(corpus, retrieved, 2)
    cell = policies.Cell(work, round(0.1 * work.distinct), 0)
    found = {name: policies.serve(cell, name, PROFILE)["document_hit_rate"] for name in ("pgdsf", "gdsf", "lru")}
    assert found["pgdsf"] > 1.06 * found["lru"]
    assert found["pgdsf"] > 1.01 * found["gdsf"]  # whose statistics outlive a node, too


def test_storage_comes_out_as_fusionrag_has_it() -> None:
    here, paper = storage.rows(storage.Setting())
    assert here["storage_saved"] == pytest.approx(paper["storage_saved"], abs=0.02)
    assert here["computations_avoided"] == pytest.approx(paper["computations_avoided"], abs=0.02)
    assert here["baseline_computed"] == pytest.approx(paper["baseline_computed"], rel=0.06)


def test_one_copy_a_chunk_serves_any_order() -> None:
    a, b, c = ("known", 0), ("shared", 0), ("unique", 1)
    found = storage.compare([[a, b], [b, a], [a, b, c]], known=[a])
    assert found["baseline_computed"] == 1 + 2 + 1 and found["baseline_stored"] == 1 + 4
    assert found["computed"] == 2 and found["stored"] == 3
    assert found["storage_saved"] == pytest.approx(1 - 3 / 5)
    assert found["hit_rate"] == pytest.approx(5 / 7)


def test_queries_of_the_storage_simulation_have_the_shares_they_should() -> None:
    setting = storage.Setting()
    drawn = list(storage.queries(setting, seed=1))
    kinds = [kind for query in drawn for kind, _ in query]
    assert {len(set(query)) for query in drawn} == {setting.chunks} and len(drawn) == setting.queries
    assert [kinds.count(k) / len(kinds) for k in ("known", "shared", "unique")] == pytest.approx(
        [0.6, 0.3, 0.1], abs=0.02
    )
    assert len({c for query in drawn for c in query if c[0] == "unique"}) == kinds.count("unique")


def test_modelled_costs_are_those_of_ragcaches_testbed() -> None:
    assert PROFILE.cost(0, 4000) == pytest.approx(1.0, abs=0.1)  # "reaches one second" beyond 4,000 tokens
    assert PROFILE.cost(0, 4096) / PROFILE.cost(4096 - 32, 32) > 11.5  # "up to 11.5 times", without a transfer
    assert PROFILE.cost(4000, 100) > PROFILE.cost(0, 100)


# --------------------------------------------------------------------------------------- commands


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a graph, two text sets and a trace, all made up and small."""
    monkeypatch.setattr(report, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(report, "STORE", tmp_path / "store")
    home = tmp_path / "data"

    def write(path: str, lines: list[Any]) -> None:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("".join(json.dumps(line) + "\n" for line in lines))

    triples = [(f"e{i}", f"r{j}", f"e{(i + 3 * j) % 40}") for i in range(40) for j in range(3)]
    paths = [[f"e{i}", "r0", f"e{i}"] for i in range(3)]
    write("kg/made/questions.jsonl", [{"topic_entities": ["e0"], "paths": paths, "triples": triples}] * 4)
    for name in ("one", "two"):
        texts = [{"id": f"{name}{i}", "title": f"{name}{i}", "text": f"thing{i} " * (i + 1)} for i in range(20)]
        write(f"text/{name}/corpus.jsonl", texts)
        passages = [{"id": f"{name}3", "is_supporting": True}]
        write(
            f"text/{name}/questions.jsonl", [{"question": f"which thing{i}?", "passages": passages} for i in range(12)]
        )
    blocks = [list(range(i % 4, i % 4 + 3)) for i in range(20)]
    chained = [[1000 * b[0] + j for j in range(3)] for b in blocks]
    write(
        "traces/mooncake_made_trace.jsonl",
        [{"timestamp": 0, "input_length": 1300, "output_length": 1, "hash_ids": b} for b in chained],
    )
    return home


def test_policies_reports_every_policy_beside_the_bound(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "new" / "plot.png"
    flags = ["--data", str(data), "--quick", "--limit", "15", "--json", str(out), "--plot", str(picture)]
    assert policies.main(flags) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["policy"] for r in rows} == set(policies.NAMES)
    assert {r["workload"] for r in rows} == {*workload.PATTERNS, "documents", "mooncake_made"}
    asked = {(r["top_k"], r["keep"]) for r in rows if r["workload"] == "documents"}
    assert asked == {(2, None), (5, None), (5, 3)}
    for row in rows:
        assert row["requests"] <= 15
        assert 0 <= row["token_hit_rate"] <= row["bound"] + 1e-9 and row["min"] <= row["bound"] + 1e-9
        assert row["document_hit_rate"] is None or row["document_hit_rate"] <= row["document_bound"] + 1e-9
        assert (row["moved_bytes"] == 0 or row["host_tokens"]) and row["decision_us"] > 0
        assert row["recomputed_tokens"] > 0 and row["prefill_s"] > 0
    assert any(row["moved_bytes"] for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
    words = capsys.readouterr().out
    assert words.index("ceiling") < words.index("lacr_gain") < words.index("decision_us")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_stopped_run_goes_on_where_it_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve, served = policies.serve, []

    def counted(cell: policies.Cell, name: str, profile: Profile) -> dict[str, Any]:
        if len(served) == 25:
            raise KeyboardInterrupt
        served.append(cell.name + name)
        return serve(cell, name, profile)

    monkeypatch.setattr(policies, "serve", counted)
    flags = ["--data", str(data), "--quick", "--limit", "10", "--json", str(tmp_path / "out.json")]
    with pytest.raises(KeyboardInterrupt):
        policies.main(flags)
    first, served[:] = list(served), []
    monkeypatch.setattr(policies, "serve", lambda *cell: served.append(cell[0].name + cell[1]) or serve(*cell))
    assert policies.main(flags) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(first) == 25 and not set(first) & set(served) and len(rows) == 25 + len(served)
    assert "continuing a stopped run: 25 samples" in capsys.readouterr().err


def test_a_stopped_run_is_not_continued_with_other_code(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    flags = ["--data", str(data), "--quick", "--limit", "10"]
    monkeypatch.setattr(policies, "plot", stopped)
    with pytest.raises(KeyboardInterrupt):
        policies.main([*flags, "--plot", "unused.png"])
    monkeypatch.setattr(policies, "code_digest", lambda: "other")
    assert policies.main(flags) == 0
    assert "continuing" not in capsys.readouterr().err


def test_a_recorded_trace_is_replayed(data: Path, tmp_path: Path) -> None:
    line = {
        "time": 0.0, "tenant": "ab", "strategy": "prefix", "output": 1,
        "segments": [["s" * 16, 10], ["a" * 16, 30], ["j" * 16, 5]], "kinds": ["system", "chunk", "join"],
    }  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for _ in range(5)))
    out = tmp_path / "out.json"
    assert policies.main(["--trace", str(trace), "--json", str(out)]) == 0
    assert {r["workload"] for r in json.loads(out.read_text())["rows"]} == {"trace"}


def test_a_measured_profile_is_used(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = Profile((0, 10), (1, 10), ((0.5, 0.5), (0.5, 0.5)), "a stopwatch")
    flat.save(tmp_path / "profile.json")
    out = tmp_path / "out.json"
    flags = ["--data", str(data), "--quick", "--limit", "5", "--profile", str(tmp_path / "profile.json")]
    assert policies.main([*flags, "--json", str(out)]) == 0
    assert "a stopwatch" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert all(row["prefill_s"] <= 0.5 * row["requests"] for row in rows)


def test_storage_and_characterise_report(data: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "plot.png"
    assert policies.main(["--storage", "--json", str(out)]) == 0
    assert [row["source"] for row in json.loads(out.read_text())["rows"]] == ["here", "paper"]
    assert characterise.main(["--data", str(data), "--quick", "--json", str(out), "--plot", str(picture)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["figure"].split()[0] for row in rows} == {"RAGCache", "Cache-Craft", "DepCache"}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--data"),
        (["--storage", "--trace", "x"], "not allowed with"),
        (["--data", "no-such-folder"], "no such folder: no-such-folder"),
        (["--trace", "."], "no such file: ."),
        (["--storage", "--limit", "0"], "--limit must be at least 1"),
        (["--storage", "--qui"], "--qui"),
    ],
)
def test_flags_that_make_no_sense_are_errors(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        policies.main(flags)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_data_is_an_error(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert policies.main(["--data", str(tmp_path / "empty")]) == 1
    assert "holds no requests" in capsys.readouterr().err
    assert characterise.main(["--data", str(tmp_path / "empty")]) == 1
    assert "holds no text sets" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- characterise


def test_curves_say_what_the_most_accessed_take() -> None:
    requests = [["a", "b"], ["a"], ["a", "c"], ["a", "b", "b"]]
    curve = characterise.Curve.of("f", "s", "x", requests, items=10)
    assert curve.counts == (4, 2, 1) and curve.items == 10
    assert curve.share(0.1) == pytest.approx(4 / 7)
    assert curve.share(0.15) == pytest.approx((4 + 0.5 * 2) / 7)
    assert curve.share(0.3) == curve.share(1.0) == 1.0
    assert curve.points() == ([0.0, 0.1, 0.2, 0.3], pytest.approx([0, 4 / 7, 6 / 7, 1]))
    assert curve.row()["uniform"] == pytest.approx(0.2 * 10 / 3)


def test_density_counts_recent_requests_with_the_same_beginning() -> None:
    requests = ["abc", "abd", "xbc", "abc", "a"]
    seen = [(0, 0, 0), (1, 1, 0), (0, 0, 0), (2, 2, 1), (3, 0, 0)]
    assert characterise.density(requests, longest=3) == pytest.approx([sum(s) / 5 for s in zip(*seen, strict=True)])
    window = characterise.density(requests, longest=1, recent=2)
    assert window == pytest.approx([(0 + 1 + 0 + 1 + 1) / 5])


def test_the_encoder_is_asked_once_for_all_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    from ragjax.models import encoder, hub

    class Letters:
        dim = 26
        calls = 0

        def encode(self, texts: Sequence[str]) -> Any:
            Letters.calls += 1
            counts = np.array([[t.lower().count(chr(97 + i)) for i in range(26)] for t in texts], np.float32)
            return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    class Found:
        path = Path()

    monkeypatch.setattr(hub, "resolve", lambda name: Found())
    monkeypatch.setattr(encoder.Encoder, "load", classmethod(lambda cls, path: Letters()))
    texts = {f"d{i}": chr(97 + i) * 5 + "z" for i in range(10)}
    corpus = Corpus("set", texts, ("aaaa", "bbbb"), (("d9",), ()))
    found = dict(characterise.encoded(corpus, most=6))
    assert list(found) == ["minilm flat", "minilm ivf", "minilm hnsw"] and Letters.calls == 2
    assert all(ids[0][0] == "d0" and ids[1][0] == "d1" for ids in found.values())
    assert {key for ids in found["minilm flat"] for row in ids for key in [row]} <= {"d9", *list(texts)[:5]}
