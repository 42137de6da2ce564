"""Preprocessing: the KV is that of a dense computation, made once, and gone when what it was made of is gone."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache, neighbours_digest
from ragjax.cache.match import Candidate
from ragjax.cache.tree import Node, Provenance
from ragjax.commands import preprocess as module
from ragjax.commands.preprocess import main
from ragjax.core import Answer, Document, EngineOptions, Kind, Message, Prefill, Prompt, RequestError, Segment
from ragjax.engine import Engine
from ragjax.engine.preprocessing import Job, PreprocessReport, fuse_all, preprocess
from ragjax.prompting.chat import chat_prompt
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.reuse.base import Allocation
from ragjax.reuse.fuse import Fuse
from ragjax.reuse.fusion import METHOD
from ragjax.reuse.influence import Influence
from ragjax.reuse.naive import Naive
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.disks import open_store
from tests.support.executor import Executor, model

Array = NDArray[np.float64]
GIGA = 2**30


def segments(seed: int, lengths: Sequence[int] = (20, 30, 17, 41, 25)) -> tuple[Segment, ...]:
    """A system segment, and chunks."""
    random = np.random.default_rng(seed)
    kinds = (Kind.SYSTEM, *(Kind.CHUNK for _ in lengths[1:]))
    return tuple(
        Segment(f"{kind}{i}", kind, random.integers(0, 256, n).astype(np.int32))
        for i, (kind, n) in enumerate(zip(kinds, lengths, strict=True))
    )


def dense_fused(system: Segment, chunk: Segment, others: Sequence[Segment]) -> tuple[Array, Array]:
    """Keys, rotated, and values [L, T, K, D] of a chunk behind isolated neighbours: equation 10, dense, float64."""
    llama = model()
    alone = [llama.dense(np.concatenate([system.tokens, other.tokens])) for other in others]
    base = llama.dense(system.tokens)
    k, v, place = [base.k], [base.v], len(system)
    for one, other in zip(alone, others, strict=True):
        moved = np.full(len(other), place - len(system))
        k.append(np.stack([llama.rotate(layer, moved) for layer in one.k[:, len(system) :]]))
        v.append(one.v[:, len(system) :])
        place += len(other)
    tokens = np.concatenate([system.tokens, *(other.tokens for other in others), chunk.tokens])
    room = np.zeros((len(base.k), len(chunk), *base.k.shape[2:]))
    kept = (np.concatenate([*k, room], axis=1), np.concatenate([*v, room], axis=1))
    done = llama.dense(tokens, rows=np.arange(place, len(tokens)), kept=kept)
    return done.k[:, place:], done.v[:, place:]


def node_of(cache: KnowledgeCache, chunk: Segment, method: str, behind: bytes = b"") -> Node:
    (node,) = [node for node in cache.matcher.find_variants(chunk.tokens, method) if node.behind == behind]
    return node


# ----------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("warm", [0, 1, 4])
def test_a_chunk_is_computed_behind_isolated_neighbours(count: int, warm: int) -> None:
    system, chunk, *others = segments(count)[: 2 + count]
    executor, prompt = Executor(), Job(system, chunk, tuple(others)).prompt
    for other in [*others, chunk][:warm] if others else []:
        executor.run(Fuse(), Prompt((system, other)))
    done = executor.run(Fuse(), prompt)
    behind = neighbours_digest(other.tokens for other in others)
    node = node_of(executor.cache, chunk, METHOD if others else Naive.name, behind)
    assert node.provenance is (Provenance.APPROXIMATE if others else Provenance.ISOLATED)
    assert node.local_start == prompt.starts[-2] and node.run is not None
    k, v = dense_fused(system, chunk, others)
    slots = node.run.slots(executor.page_size)
    np.testing.assert_allclose(executor.k[:, slots], k, atol=1e-9)
    np.testing.assert_allclose(executor.v[:, slots], v, atol=1e-9)
    assert len(done.passes) == (1 if 0 < count < warm else 2)
    assert done.plan.exact_to == (None if others else "full")


def test_neighbours_are_kept_as_naive_finds_them() -> None:
    """And what naive kept is what a chunk is fused behind."""
    system, chunk, *others = segments(7)
    question = Segment("question", Kind.QUERY, np.arange(9, dtype=np.int32))
    executor = Executor()
    executor.run(Fuse(), Job(system, chunk, tuple(others)).prompt)
    after = executor.run(Naive(), Prompt((system, *others, question)))
    assert [report.reused for report in after.plan.reports] == [len(system), *map(len, others), 0]
    other = Executor()
    other.run(Naive(), Prompt((system, *others, question)))
    other.run(Naive(), Prompt((system, chunk, question)))
    assert len(other.run(Fuse(), Job(system, chunk, tuple(others)).prompt).passes) == 1
    assert node_of(other.cache, chunk, METHOD, neighbours_digest(o.tokens for o in others)).local_start == 133 - len(
        chunk
    )


def test_the_order_of_fusing_does_not_matter() -> None:
    """Each chunk is a neighbour of all others, so some are fused already when they are neighbours."""
    system, *chunks = segments(3, (20, 30, 17, 41))
    outcomes = []
    for order in permutations(range(3)):
        executor = Executor()
        for i in order:
            others = tuple(chunk for j, chunk in enumerate(chunks) if j != i)
            executor.run(Fuse(), Job(system, chunks[i], others).prompt)
        nodes = [node_of(executor.cache, c, METHOD, node.behind) for c in chunks
                 for node in executor.cache.matcher.find_variants(c.tokens, METHOD)]  # fmt: skip
        assert len(nodes) == 3
        outcomes.append(np.concatenate([executor.k[:, n.run.slots(executor.page_size)] for n in nodes], axis=1))
    for outcome in outcomes[1:]:
        np.testing.assert_allclose(outcome, outcomes[0], atol=1e-9)


def test_the_order_of_the_neighbours_does() -> None:
    system, chunk, one, two = segments(4)[:4]
    executor = Executor()
    for others in ((one, two), (two, one)):
        executor.run(Fuse(), Job(system, chunk, others).prompt)
    assert len(executor.cache.matcher.find_variants(chunk.tokens, METHOD)) == 2


def test_keys_name_what_is_used_and_kept() -> None:
    system, chunk, *others = segments(5)
    executor, prompt = Executor(), Job(system, chunk, tuple(others)).prompt
    keys = Fuse().keys(prompt, executor.cache, "")
    executor.run(Fuse(), prompt)
    assert set(keys) == {node.key for node in executor.cache.tree.nodes()}
    assert keys[-1] == node_of(executor.cache, chunk, METHOD, neighbours_digest(o.tokens for o in others)).key
    assert len(set(keys) & set(Fuse().keys(prompt, executor.cache, "acme"))) == 1  # the public system prompt


def recorded(executor: Executor, chunk: Segment, others: Sequence[Segment]) -> Influence | None:
    return Influence.decode(node_of(executor.cache, chunk, METHOD, neighbours_digest(o.tokens for o in others)).meta)


def test_attention_to_the_neighbours_is_recorded_if_asked_for() -> None:
    system, chunk, *others = segments(6)
    executor, prompt = Executor(), Job(system, chunk, tuple(others)).prompt
    executor.run(Fuse(), prompt)
    assert recorded(executor, chunk, others) is None
    executor.run(Fuse(record=True), prompt)
    influence = recorded(executor, chunk, others)
    assert influence.lengths == tuple(map(len, others)) and len(influence) == len(chunk)
    assert (influence.inter_LZ > 0).all() and (influence.score_T > 0).all()
    executor.run(Fuse(), prompt)
    assert recorded(executor, chunk, others) is not None, "what is known is not forgotten"
    alone = Executor()
    alone.run(Fuse(record=True), Prompt((system, chunk)))
    assert all(node.meta == b"" for node in alone.cache.tree.nodes())


def test_an_influence_behind_the_drift_that_earlier_versions_kept_is_read() -> None:
    drift = struct.pack("<HI", 2, 3) + np.array([0.0, 1.5, 9.0], "<f2").tobytes()
    score = np.ones(3, np.float32)
    influence = Influence((b"x" * 16,), (2,), np.ones((1, 1), np.float32), np.ones(1, np.float32), score)
    assert Influence.decode(drift) is None and Influence.decode(b"") is None
    for meta in (influence.encode(), drift + influence.encode()):
        read = Influence.decode(meta)
        assert read.encode() == influence.encode()
    with pytest.raises(ValueError, match="the drift alone takes 12"):
        Influence.decode(drift[:-1])


@pytest.mark.parametrize("wrong", [(0,), (1, 2), (0, 1, 5)], ids=["system alone", "no system", "a join"])
def test_other_prompts_are_refused(wrong: Sequence[int]) -> None:
    parts = (*segments(0), Segment("question", Kind.QUERY, np.arange(4, dtype=np.int32)))
    with pytest.raises(ValueError, match="to fuse takes"):
        Executor().run(Fuse(), Prompt(tuple(parts[i] for i in wrong)))


# --------------------------------------------------------------------------------------- the engine


class Finder(Naive):
    """naive, but it notes which chunks' fused KV a request finds."""

    name = "finder"
    found: ClassVar[dict[str, bool]] = {}

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        context = allocation.prefix(prompt.segments[0].tokens)
        for segment in prompt.segments:
            if segment.kind is Kind.CHUNK:
                fused = Candidate(Provenance.APPROXIMATE, METHOD, segment.behind)
                match = allocation.first(context, segment.tokens, [fused])
                self.found[segment.id] = match is not None
        return (yield from super().prefill(prompt, allocation, ratio))


def ask(engine: Engine, question: str = "island", **options: Any) -> dict[str, bool]:
    """Chunks by whether a request finds their fused KV."""
    Finder.found = {}
    engine.answer(question, strategy="finder", max_tokens=1, **{"top_k": 8} | options)
    return Finder.found


def documents(count: int = 12, seed: int = 0) -> list[Document]:
    random = np.random.default_rng(seed)
    words = ["island", "honey", "copper", "silk", "amber", "wool", "wax", "tin", "oil", "rope"]
    return [Document(f"d{n}", f"{n}: {' '.join(random.choice(words, 5))}.") for n in range(count)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tiny.engine(extra=[Finder()]) as made:
        made.add_documents(documents())
        yield made


class Begun:
    """Watches what an engine is given to do; stops it in the middle if asked to."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, last: int = 10**9):
        self.prompts: list[Prompt] = []
        begin = engine.begin_prompt

        def watch(prompt: Prompt, **options: Any) -> Future[Answer]:
            if len(self.prompts) == last:
                raise KeyboardInterrupt
            self.prompts.append(prompt)
            return begin(prompt, **options)

        monkeypatch.setattr(engine, "begin_prompt", watch)

    @property
    def fused(self) -> list[str]:
        return [prompt.segments[-1].id for prompt in self.prompts if len(prompt.segments) > 2]

    @property
    def alone(self) -> list[str]:
        return [prompt.segments[-1].id for prompt in self.prompts if len(prompt.segments) == 2]


@pytest.mark.slow
def test_requests_find_what_a_dense_computation_gives(engine: Engine) -> None:
    """Which chunks stand before each, in which order, is read from the similarity of all pairs."""
    report = preprocess(engine, n=3, progress=False)
    assert (report.chunks, report.fused, report.kept, report.lost) == (12, 12, 0, 0) and report.seconds > 0
    encoder, found = tiny.HashedEncoder(), 0
    hits = engine.search("island", top_k=12)
    prompt = chat_prompt(engine.tokenizer, [Message("user", "Which island?")], hits)
    vectors = {hit.chunk.id: encoder.encode([hit.chunk.text])[0].astype(float) for hit in hits}
    by_id = {segment.id: segment for segment in prompt.segments[1:-1]}
    for segment in by_id.values():
        order = sorted(by_id, key=lambda other: (-(vectors[segment.id] * vectors[other]).sum(), int(other[1:-2])))
        others = [by_id[name] for name in order if name != segment.id][:3]
        assert segment.behind == neighbours_digest(other.tokens for other in others)
        node = node_of(engine._cache, segment, METHOD, segment.behind)
        assert node.parent.end == len(prompt.segments[0])
        k_LTKD, v_LTKD = engine._runner.read(node.run.slots(tiny.PAGE))
        k, v = dense_fused(prompt.segments[0], segment, others)
        np.testing.assert_allclose(k_LTKD, k, atol=2e-4)
        np.testing.assert_allclose(v_LTKD, v, atol=2e-4)
        found += 1
    assert found == 12
    assert all(ask(engine).values()) and len(ask(engine)) == 8
    assert all(ask(engine, tenant="acme").values())
    assert not any(ask(engine, [Message("system", "Be brief."), Message("user", "island")]).values())


def test_another_system_message(engine: Engine) -> None:
    preprocess(engine, n=2, system="Be brief.", progress=False)
    chat = [Message("system", "Be brief."), Message("user", "island")]
    assert all(ask(engine, chat).values()) and not any(ask(engine).values())


def test_nothing_is_computed_twice(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Begun(engine, monkeypatch)
    preprocess(engine, n=3, progress=False)
    assert sorted(begun.fused) == sorted(f"d{n}#0" for n in range(12))
    assert len(begun.alone) == len(set(begun.alone)) <= 12
    begun.prompts.clear()
    report = preprocess(engine, n=3, progress=False)
    assert (report.fused, report.kept, begun.prompts) == (0, 12, [])
    report = preprocess(engine, n=2, progress=False)  # other lists, other KV
    assert (report.fused, begun.alone) == (12, [])


def test_a_run_that_was_stopped_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        begun = Begun(engine, patch, last=20)
        with pytest.raises(KeyboardInterrupt):
            preprocess(engine, n=3, progress=False)
    first = begun.fused
    assert 8 <= len(first) < 12
    assert sum(ask(engine).values()) > 0
    begun = Begun(engine, monkeypatch)
    report = preprocess(engine, n=3, progress=False)
    assert report.kept >= 8 and report.fused + report.kept == 12
    assert set(first) | set(begun.fused) == {f"d{n}#0" for n in range(12)}
    assert len(set(first) & set(begun.fused)) <= len(first) - 8  # at most what was in flight
    assert all(ask(engine).values())


def test_only_what_changed_is_computed_anew(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess(engine, n=3, progress=False)
    base = engine.knowledge_base()

    def lists() -> dict[str, list[str]]:
        nearest = base.neighbours(3)
        chunks = base.chunks(nearest)
        return {chunks[own].text: [chunks[n].text for n in others] for own, others in nearest.items()}

    begun = Begun(engine, monkeypatch)
    for change in (
        lambda: engine.add_documents([*documents(2, seed=9), Document("new", "island honey silk wax")]),
        lambda: engine.delete_documents(["d3", "d7"]),
    ):
        before = lists()
        change()
        after = lists()
        changed = {text for text, others in after.items() if before.get(text) != others}
        assert 0 < len(changed) < len(after)
        begun.prompts.clear()
        report = preprocess(engine, n=3, progress=False)
        assert report.fused == len(changed) == len(begun.fused) and report.kept == len(after) - len(changed)
        chunks = {chunk.id: chunk.text for chunk in base.chunks(base.neighbours(1)).values()}
        assert {chunks[name] for name in begun.fused} == changed


def test_a_deleted_neighbour_tells_nothing_any_more(engine: Engine) -> None:
    preprocess(engine, n=3, progress=False)
    base = engine.knowledge_base()
    nearest, chunks = base.neighbours(3), base.chunks(base.neighbours(3))
    (gone,) = [number for number, chunk in chunks.items() if chunk.id == "d5#0"]
    users = {chunks[own].id for own, others in nearest.items() if gone in others}
    assert users and all(ask(engine).values())
    engine.delete_documents(["d5"])
    found = ask(engine, top_k=12)
    assert {name for name, there in found.items() if not there} == users & found.keys()
    assert {chunk.id for chunk in base.chunks(nearest).values() if not chunk.behind} == users


@pytest.mark.parametrize("marks", ["stored", "lost"])
def test_a_restart_finds_it_on_disk(marks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Engine:
        disk = open_store(tmp_path / "kv")
        made = tiny.engine(extra=[Finder()], disk=disk)
        if marks == "stored":
            place = {
                "encode_tokens": made.knowledge.chunker.encode,
                "encoder": tiny.HashedEncoder(),
                "model_key": "tiny",
            }
            opener = lambda name: KnowledgeBase(tmp_path / name, **place, max_tokens=64)  # noqa: E731
            monkeypatch.setattr(made.knowledge.bases, "_open", opener)
        made.add_documents(documents())
        return made

    with start() as engine:
        preprocess(engine, n=3, progress=False)
    with start() as engine:
        found = ask(engine)
        assert len(found) == 8 and set(found.values()) == {marks == "stored"}
        begun = Begun(engine, monkeypatch)
        report = preprocess(engine, n=3, progress=False)
        assert (report.fused, report.kept, report.lost, begun.prompts) == (0, 12, 0, [])
        assert all(ask(engine).values())
        audit_engine(engine)


def test_marks_without_kv_are_not_believed(engine: Engine) -> None:
    preprocess(engine, n=3, progress=False)
    engine.clear_cache()
    report = preprocess(engine, n=3, progress=False)
    assert report.fused == 12 and all(ask(engine).values())


def test_only_kv_that_is_there_is_marked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "noted", lambda key: None)
    assert preprocess(engine, n=3, progress=False).lost == 12
    assert {chunk.behind for chunk in engine.knowledge_base().chunks(range(1, 20)).values()} == {b""}


def test_kv_that_finds_no_room_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with tiny.engine(pages=70) as engine:
        engine.add_documents(documents(30))
        report = preprocess(engine, n=3, progress=False)
        assert report.fused == 30 and 0 < report.lost < 30
        assert f"the KV of {report.lost} chunks was driven out" in caplog.text


def test_neighbours_beyond_the_context_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with tiny.engine() as engine:
        engine.add_documents(documents(25))
        engine.context_length = 400
        report = preprocess(engine, n=20, progress=False)
        assert report.fused == 25 and report.lost == 0
        assert "25 chunks have less than 20 neighbours" in caplog.text and caplog.text.count("WARNING") == 1
        longest = max(len(hit.chunk.tokens) for hit in engine.search("wax", top_k=25))
        for node in (node for node in engine._cache.tree.nodes() if node.method == METHOD):
            room = 400 - 1 - node.local_start - len(node)
            assert 0 <= room < longest


def test_a_lone_chunk_has_nothing_to_be_fused_with() -> None:
    with tiny.engine() as engine:
        engine.add_documents(documents(1))
        assert preprocess(engine, progress=False).lost == 0
        assert [node.method for node in engine._cache.tree.nodes()] == ["", "naive"]
        assert engine.knowledge_base().document("d0")[0].behind == b""
        with pytest.raises(RequestError, match="unknown knowledge base 'other'"):
            preprocess(engine, "other")


@pytest.mark.slow
def test_attention_is_recorded_after_a_run_that_did_not(tmp_path: Path) -> None:
    """In memory, and on disk after a restart."""
    texts = [f"The keeper {name} climbs the stairs of tower number {i}." for i, name in enumerate("ABCD")]
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    for restart in (False, True):
        store = open_store(tmp_path / str(restart))
        with tiny.engine(disk=store) as engine:
            engine.add_documents(documents)
            assert preprocess(engine, n=2, progress=False).fused == 4
            if not restart:
                assert preprocess(engine, n=2, record=True, progress=False).fused == 4
                assert engine.answer("Who climbs?", strategy="fusion+craft", max_tokens=1).strategy == "fusion+craft"
        store = open_store(tmp_path / str(restart))
        with tiny.engine(disk=store) as engine:
            engine.add_documents(documents)
            again = preprocess(engine, n=2, record=True, progress=False)
            assert (again.fused, again.kept) == ((4, 0) if restart else (0, 4))
            assert engine.answer("Who climbs?", strategy="fusion+craft", max_tokens=1).strategy == "fusion+craft"


def test_an_empty_knowledge_base() -> None:
    with tiny.engine() as engine:
        engine.add_documents([])
        assert preprocess(engine, progress=False).chunks == 0


def test_a_document_deleted_meanwhile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = Begun(engine, monkeypatch), engine.begin_prompt

    def deleting(prompt: Prompt, **options: Any) -> Future[Answer]:
        if len(begun.prompts) == 15:
            engine.delete_documents(["d5", "d11"])
        return begin(prompt, **options)

    engine.begin_prompt = deleting
    preprocess(engine, n=3, progress=False)
    base = engine.knowledge_base()
    for chunk in base.chunks(base.neighbours(3)).values():
        others = [c.tokens for c in base.chunks(base.neighbours(3)).values()]
        assert not chunk.behind or any(chunk.behind == neighbours_digest(three) for three in permutations(others, 3))


# ----------------------------------------------------------------------------------- given segments


@pytest.mark.slow
def test_given_segments(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    system, *chunks = segments(11, (20, 30, 17, 41, 25, 33))
    jobs = [Job(system, chunk, tuple(c for c in chunks if c is not chunk)[:i]) for i, chunk in enumerate(chunks)]
    digests = fuse_all(engine, jobs)
    assert digests == [neighbours_digest(n.tokens for n in job.neighbours) for job in jobs] and digests[0] == b""
    for job, behind in zip(jobs[1:], digests[1:], strict=True):
        node_of(engine._cache, job.chunk, METHOD, behind)
    begun = Begun(engine, monkeypatch)
    assert fuse_all(engine, jobs) == digests and begun.prompts == []
    (behind,) = fuse_all(engine, [Job(system, chunks[0], tuple(chunks[1:]))])
    assert behind == neighbours_digest(c.tokens for c in chunks[1:])
    assert begun.fused == [chunks[0].id]


def test_a_chunk_beyond_the_context_is_an_error(engine: Engine) -> None:
    system, chunk = segments(12, (20, 1100))
    with pytest.raises(RequestError, match="the context holds 1024"):
        fuse_all(engine, [Job(system, chunk, ())])
    audit_engine(engine)


# ----------------------------------------------------------------------------------------- the command


def test_the_report_says_how_fast_it_went() -> None:
    told = str(PreprocessReport(10, 4, 6, 0, 2.0))
    assert told == "10 chunks: 4 fused, 6 kept, in 2.0 s (0.5 s per chunk, 2 chunks/s)"
    assert str(PreprocessReport(10, 0, 10, 0, 0.0)) == "10 chunks: 0 fused, 10 kept, in 0.0 s"


def command(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / "docs" / "a.txt").write_text("The island exports honey.")
    places = ("--index-dir", str(tmp_path / "index"), "--disk-cache", str(tmp_path / "kv"))
    return ["--knowledge", str(tmp_path / "docs"), *places, *more]


@pytest.mark.parametrize(("lost", "code"), [(0, 0), (2, 1)])
def test_the_command(
    lost: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def load(options: EngineOptions, **changes: Any) -> Engine:
        asked.update(vars(replace(options, **changes)))
        made = tiny.engine()
        made.add_documents(documents())
        return made

    def run(engine: Engine, **options: Any) -> PreprocessReport:
        asked.update(options)
        return PreprocessReport(12, 12, 0, lost, 3.0)

    monkeypatch.setattr(module.Engine, "load", load)
    monkeypatch.setattr(module, "preprocess", run)
    assert main(command(tmp_path, "--neighbours", "3", "--dtype", "float32", "--disk-cache-gb", "2")) == code
    assert "(0.25 s per chunk, 4 chunks/s)" in capsys.readouterr().out
    assert asked["n"] == 3 and asked["dtype"] == "float32" and asked["knowledge"] == {"docs": tmp_path / "docs"}
    assert asked["storage"].disk == str(tmp_path / "kv") and asked["storage"].disk_gb == 2
    assert asked["index_dir"] == str(tmp_path / "index") and not asked["compile"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--knowledge", "demo"], "--index-dir, --disk-cache"),
        (["--knowledge", "demo", "--index-dir", "i"], "required: --disk-cache"),
        (["--knowledge", "nowhere", "--index-dir", "i", "--disk-cache", "d"], "'nowhere' does not exist"),
        (["--knowledge", "demo", "--index-dir", "i", "--disk-cache", "d", "--neighbours", "0"], "whole number from 1"),
        (["--knowledge", "demo", "--index-dir", "i", "--disk-cache", "d", "--port", "1"], "unrecognized arguments"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_command_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> Engine:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Engine, "load", stop)
    assert main(command(tmp_path)) == 130
