"""Preprocessing while no request runs: what is computed when, and what requests notice of it."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ragjax.core import Answer, Attachment, Document, Message, Prompt, Request, RequestError
from ragjax.engine import Engine, preprocessing
from ragjax.engine.build import free_memory
from ragjax.engine.preprocessing import preprocess
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.reuse.fusion import METHOD
from tests.support import tiny
from tests.support.disks import open_store
from tests.support.pace import Hold, resting, until

WORDS = ("island", "honey", "copper", "silk", "amber", "wool", "wax", "tin", "oil", "rope")
ROOMY = 600
"""Pages of a device that holds all that is prepared here."""

pytestmark = pytest.mark.engine(pages=ROOMY)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocessing, "PERIOD", 0.01)


def documents(count: int = 6, name: str = "d") -> list[Document]:
    return [Document(f"{name}{n}", f"{name} {n}: {WORDS[n % 10]} {WORDS[3 * n % 10]}.") for n in range(count)]


class Computed:
    """Last segments of the prompts that an engine computed with neighbours, in order."""

    def __init__(self, engine: Engine):
        self.fused: list[str] = []
        begin = engine.begin_prompt

        def watch(prompt: Prompt, **options: Any) -> Future[Answer]:
            if options.get("background") and len(prompt.segments) > 2:
                self.fused.append(prompt.segments[-1].id)
            return begin(prompt, **options)

        engine.begin_prompt = watch


def done(engine: Engine) -> bool:
    progress = engine.preprocessed()
    return progress is not None and not progress.running


def prepared(engine: Engine) -> tuple[int, int]:
    progress = engine.preprocessed()
    return progress.prepared, progress.passages


def all_marked(engine: Engine) -> bool:
    base = engine.knowledge_base()
    return all(chunk.behind for chunk in base.chunks(base.numbers).values())


@pytest.fixture
def engine(engine: Engine) -> Engine:
    engine.add_documents(documents())
    return engine


def test_all_passages_are_prepared_and_found(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ragjax")
    engine.begin_preprocessing()
    until(lambda: done(engine))
    assert prepared(engine) == (6, 6) and all_marked(engine)
    assert engine.stats()["passages"] == {"prepared": 6, "waiting": 0, "beyond": 0}
    assert "preparing passages of default" in caplog.text and "prepared 6 of 6 passages of default" in caplog.text
    answer = engine.answer("island", strategy="fusion", top_k=3, max_tokens=1)
    assert [one.reused > 0 for one in answer.segments if one.score is not None] == [True] * 3


def test_a_strategy_whose_passages_are_still_to_come_gives_way_to_prefix(engine: Engine) -> None:
    asked: Any = {"strategy": "fusion", "top_k": 3, "max_tokens": 1}
    engine.pending.head = preprocessing.head_of(engine, None).tokens
    answer = engine.answer("island", **asked)
    assert answer.strategy == "prefix" and answer.exact_to == "full"
    assert answer.notices == ("passages for fusion are still being prepared: the request ran prefix, which is exact",)
    other = [Message("system", "Be brief."), Message("user", "island")]  # nothing is prepared for its passages
    assert engine.answer(other, **asked).strategy == "fusion"
    given = engine.answer("island", documents=[Document("given", "Given.")], strategy="fusion", max_tokens=1)
    assert given.strategy == "fusion"
    engine.begin_preprocessing()
    until(lambda: engine.pending.head is None)
    assert prepared(engine) == (6, 6) and engine.answer("island", **asked).strategy == "fusion"


def test_an_engine_prepares_nothing_unless_it_is_asked_to(engine: Engine) -> None:
    assert engine.preprocessed() is None and "passages" not in engine.stats()


def test_answers_during_it_are_those_without_it(engine: Engine) -> None:
    alone = engine.answer("island", max_tokens=8, strategy="full").tokens
    computed = Computed(engine)
    engine.begin_preprocessing()
    until(lambda: computed.fused)
    for _ in range(3):
        assert engine.answer("island", max_tokens=8).tokens == alone
    until(lambda: done(engine))
    assert engine.answer("island", max_tokens=8).tokens == alone


def test_it_rests_while_a_request_runs(engine: Engine) -> None:
    loop, iterations = engine._loop, Counter[str]()
    hold = Hold(engine, when=lambda: loop.requests.in_background)
    with resting(engine):
        engine.begin_preprocessing()
        with hold:
            request = engine.begin_prompt(tiny.prompt(), max_tokens=4)
        until(lambda: loop.requests.in_front and loop.requests.in_front[0].decoding)
        before, look = engine.stats()["steps_total"], loop._check_loads
        loop._check_loads = lambda now: (iterations.update(["seen"]), look(now))[1]
        until(lambda: iterations["seen"] > 3)
        assert engine.stats()["steps_total"] == before and loop.requests.in_background
    assert len(request.result(60).tokens) == 4
    until(lambda: done(engine))
    assert prepared(engine) == (6, 6)


def test_programs_that_are_still_made_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, left = Counter[str](), [3]
    monkeypatch.setattr(Engine, "programs_left", property(lambda self: looks.update(["look"]) or left[0]))
    with tiny.engine(pages=ROOMY) as engine:
        engine.add_documents(documents(3))
        engine.begin_preprocessing()
        until(lambda: looks["look"] > 3)
        assert prepared(engine) == (0, 3) and not engine._loop.requests.live
        left[0] = 0
        until(lambda: done(engine))
        assert prepared(engine) == (3, 3)


def test_an_upload_is_prepared(engine: Engine) -> None:
    engine.begin_preprocessing()
    until(lambda: done(engine))
    engine.add_documents(documents(3, "new"))
    until(lambda: done(engine) and prepared(engine) == (9, 9))
    assert all_marked(engine)


def test_tenants_see_nothing_of_each_other(engine: Engine) -> None:
    """Stores of the same texts: each tenant's KV is computed for itself, and counted for itself alone."""
    stores = {}
    for tenant in ("acme", "globex"):
        library = engine.library
        stores[tenant] = library.create(tenant, "store").id
        for name in ("a", "b", "c"):
            file = library.upload(tenant, f"{name}.txt", "assistants", f"The island {name} exports wax.".encode()).id
            library.attach(tenant, [Attachment(stores[tenant], file, 0)])
    until(lambda: not engine.library.reading)
    engine.begin_preprocessing()
    until(lambda: done(engine) and prepared(engine) == (12, 12))
    own = engine.preprocessed(tenants=False)
    assert (own.prepared, own.passages) == (6, 6)
    held = [node.tenant for node in engine._cache.tree.nodes() if node.method == METHOD]
    assert Counter(held) == {"": 6, "acme": 3, "globex": 3}
    for tenant in stores:
        answer = engine.answer(
            "island", knowledge=stores[tenant], tenant=tenant, strategy="fusion", top_k=2, max_tokens=1
        )
        assert [one.reused > 0 for one in answer.segments if one.score is not None] == [True] * 2
    with pytest.raises(RequestError, match="unknown knowledge base"):
        engine.answer("island", knowledge=stores["acme"], tenant="globex", max_tokens=1)


def test_no_more_is_computed_than_has_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ragjax")
    with tiny.engine(pages=140) as engine:
        engine.add_documents(documents(30))
        computed = Computed(engine)
        engine.begin_preprocessing()
        until(lambda: done(engine))
        progress = engine.preprocessed()
        assert 0 < progress.prepared == len(computed.fused) < 30
        assert progress.beyond == 30 - progress.prepared and "have no room in the cache" in caplog.text
        base = engine.knowledge_base()
        marked = [chunk for chunk in base.chunks(base.numbers).values() if chunk.behind]
        nodes = [node for node in engine._cache.tree.nodes() if node.method == METHOD]
        assert len(marked) == len(nodes) == progress.prepared, "none drove out another"


def test_what_was_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocessing, "_GROUP", 3)
    with tiny.engine(pages=ROOMY) as engine:
        engine.add_documents(documents(20))
        asked = {hit.chunk.id for hit in engine.search("honey", top_k=3)}
        computed = Computed(engine)
        engine.begin_preprocessing()
        until(lambda: done(engine))
        assert set(computed.fused[:3]) == asked and len(computed.fused) == 20


def test_what_was_driven_out_is_prepared_again_when_it_is_asked_for(engine: Engine) -> None:
    engine.begin_preprocessing()
    until(lambda: done(engine))
    engine.clear_cache()
    computed = Computed(engine)
    asked = {hit.chunk.id for hit in engine.search("honey", top_k=2)}
    until(lambda: len(computed.fused) == 2 and done(engine))
    assert set(computed.fused) == asked


def test_answers_say_of_how_many_passages_preprocessed_kv_was_missing(engine: Engine) -> None:
    ask = lambda: engine.answer("island", strategy="fusion", top_k=3, max_tokens=1)  # noqa: E731
    assert any("2 of 3 chunks were not preprocessed" in notice for notice in ask().notices)
    engine.begin_preprocessing()
    until(lambda: done(engine))
    assert not ask().notices


def test_kv_that_was_evicted_counts_as_not_preprocessed(engine: Engine) -> None:
    """What decides about a request asks the tiers, for each tenant and each system message."""
    preprocess(engine, progress=False)
    state = lambda *messages, tenant="": engine._preparation.state(  # noqa: E731
        Request(messages=(*messages, Message("user", "island")), tenant=tenant), lambda event: None, 0.0
    )
    assert state().prompt.preprocessed and state(tenant="acme").prompt.preprocessed
    assert not state(Message("system", "Be brief.")).prompt.preprocessed
    engine.clear_cache()
    assert all(chunk.behind for chunk in engine.knowledge_base().document("d1")), "the mark stays"
    assert not state().prompt.preprocessed


def test_one_that_was_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocessing, "_GROUP", 4)

    def start() -> tuple[Engine, Computed]:
        disk = open_store(tmp_path / "kv")
        made = tiny.engine(disk=disk, pages=ROOMY)
        settings = {"encode_tokens": made.knowledge.chunker.encode, "encoder": tiny.HashedEncoder()}
        opener = lambda name: KnowledgeBase(tmp_path / name, **settings, model_key="tiny", max_tokens=64)  # noqa: E731
        monkeypatch.setattr(made.knowledge.bases, "_open", opener)
        made.add_documents(documents(20))
        return made, Computed(made)

    engine, first = start()
    with engine:
        nodes = engine._cache.tree.nodes
        written = lambda: sum(node.method == METHOD and node.shelved for node in nodes())  # noqa: E731
        hold = Hold(engine, when=lambda: len(first.fused) >= 10 and written() >= 8)
        engine.begin_preprocessing()
        with hold:
            engine._preparing._over.set()
            engine._cache.flush = lambda: False  # what memory holds is lost
    assert 10 <= len(first.fused) < 20
    engine, second = start()
    with engine:
        engine.begin_preprocessing()
        until(lambda: done(engine))
        assert prepared(engine) == (20, 20)
        assert len(second.fused) <= 12, "what was on disk is not computed again"
        assert set(first.fused) | set(second.fused) == {f"d{n}#0" for n in range(20)}


def test_a_knowledge_base_that_is_deleted_meanwhile_is_forgotten(engine: Engine) -> None:
    store = engine.library.create("", "store").id
    engine.knowledge.bases.get(store).add(documents(5, "x"))
    engine.begin_preprocessing()
    until(lambda: done(engine) and prepared(engine) == (11, 11))
    engine.library.delete("", store)
    until(lambda: prepared(engine) == (6, 6))


def test_memory_that_is_free_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:    800 kB\n")
    assert free_memory(tmp_path) == 800 * 1024
    (tmp_path / "proc/self").mkdir()
    groups = tmp_path / "proc/self/cgroup"

    def limit(group: str, name: str, most: str, stat: str) -> None:
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{most}\n")
        (folder / "memory.stat").write_text(stat)

    groups.write_text("0::/\n")
    limit("", "memory.max", "max", "anon 100000\nfile 7\n")
    assert free_memory(tmp_path) == 800 * 1024
    limit("", "memory.max", "300000", "anon 100000\nfile 7\n")
    assert free_memory(tmp_path) == 200_000
    groups.write_text("0::/user.slice/own.scope\n")  # a group within others, each with a limit
    limit("user.slice", "memory.max", "90000", "anon 10000\n")
    limit("user.slice/own.scope", "memory.max", "max", "anon 10000\n")
    assert free_memory(tmp_path) == 80_000
    groups.write_text("5:cpu:/x\n4:memory:/outside/of/the/container\n0::/\n")  # version 1
    limit("memory", "memory.limit_in_bytes", "70000", "rss 5\ntotal_rss 60000\n")
    assert free_memory(tmp_path) == 10_000
    limit("memory", "memory.limit_in_bytes", "50000", "rss 5\ntotal_rss 60000\n")
    assert free_memory(tmp_path) == 0
