"""Condensed chunks: the KV that is kept is that of the tokens which a dense computation chooses, and requests read it
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from ragjax.core.fit import Fit

from ragjax.cache.keys import raw_of
from ragjax.cache.tree import Node, Provenance
from ragjax.commands.preprocess import main
from ragjax.core import ConfigError, Document, Kind, Message, OutOfPages, Prompt, Segment
from ragjax.engine import Engine
from ragjax.engine.condensing import condense, condense_all
from ragjax.prompting.chat import chat_prompt
from ragjax.quality.report import Budget
from ragjax.reuse import strategies
from ragjax.reuse.condense import METHOD, Condense, kept_of
from ragjax.store.disk import DiskStore
from tests.support import tiny
from tests.support.executor import Executor, model
from tests.support.matrix import few

Array = NDArray[np.float64]


def segments(seed: int, lengths: Sequence[int] = (20, 30, 17, 41)) -> tuple[Segment, ...]:
    """A system segment, and chunks."""
    random = np.random.default_rng(seed)
    kinds = (Kind.SYSTEM, *(Kind.CHUNK for _ in lengths[1:]))
    return tuple(
        Segment(f"{kind}{i}", kind, random.integers(0, 256, n).astype(np.int32))
        for i, (kind, n) in enumerate(zip(kinds, lengths, strict=True))
    )


def query(seed: int, length: int = 9) -> Segment:
    return Segment("question", Kind.QUERY, np.random.default_rng(seed).integers(0, 256, length).astype(np.int32))


def condensed(executor: Executor, system: Segment, chunk: Segment, share: float = 1 / 3) -> Segment:
    """The chunk, marked, with its KV kept."""
    strategy = Condense(share)
    executor.run(strategy, Prompt((system, chunk, query(99, 25))))
    return replace(chunk, condensed=strategy.chosen[raw_of(chunk.tokens)])


def kept_nodes(executor: Executor) -> list[Node]:
    return [node for node in executor.cache.tree.nodes() if node.method == METHOD]


# ------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("share", [0.01, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("warm", [False, True])
def test_the_tokens_that_the_probe_looks_at_are_kept(share: float, warm: bool) -> None:
    system, chunk, *_ = segments(1)
    executor, probe, strategy = Executor(), query(2, 25), Condense(share)
    if warm:
        executor.run(strategies()["naive"], Prompt((system, chunk, query(3))))
    prompt = Prompt((system, chunk, probe))
    done = executor.run(strategy, prompt)
    begin, end = len(system), len(system) + len(chunk)
    dense = model().dense(prompt.tokens)
    received_LN = dense.prob[:, end:].sum(1).mean(1)[:, begin:end]
    score_N = (received_LN / received_LN.sum(1, keepdims=True)).sum(0)
    count = kept_of(len(chunk), share)
    places = np.sort(np.argsort(-score_N, kind="stable")[:count])
    assert strategy.chosen == {raw_of(chunk.tokens): tuple(places.tolist())}
    (node,) = kept_nodes(executor)
    assert node.run is not None and node.run.length == len(node) == count
    assert node.provenance is Provenance.APPROXIMATE and node.local_start == begin
    slots = node.run.slots(executor.page_size)
    np.testing.assert_allclose(executor.k[:, slots], dense.k[:, begin + places], atol=1e-9)
    np.testing.assert_allclose(executor.v[:, slots], dense.v[:, begin + places], atol=1e-9)
    np.testing.assert_allclose(done.logits, dense.logits[-1], atol=1e-4)
    whole = [node for node in executor.cache.tree.nodes() if node.method == "naive"]
    assert len(whole) == warm, "condensing leaves no KV of the whole chunk behind"


def dense_of(parts: Sequence[Segment], redone: Sequence[int] = ()) -> Array:
    """Logits of a prompt whose condensed chunks are isolated and read in part; `redone` tokens are recomputed."""
    system, *chunks, question = parts
    llama, place = model(), len(system)
    base = llama.dense(system.tokens)
    k, v, live = [base.k], [base.v], [np.ones(len(system), bool)]
    for chunk in chunks:
        alone = llama.dense(np.concatenate([system.tokens, chunk.tokens]))
        moved = np.full(len(chunk), place - len(system))
        k.append(np.stack([llama.rotate(layer, moved) for layer in alone.k[:, len(system) :]]))
        v.append(alone.v[:, len(system) :])
        live.append(np.isin(np.arange(len(chunk)), chunk.condensed) if chunk.condensed else np.ones(len(chunk), bool))
        place += len(chunk)
    room = np.zeros((len(base.k), len(question), *base.k.shape[2:]))
    kept = np.concatenate([*k, room], axis=1), np.concatenate([*v, room], axis=1)
    tokens = np.concatenate([segment.tokens for segment in parts])
    alive = np.concatenate([*live, np.ones(len(question), bool)])
    alive[list(redone)] = True
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool)) & alive
    rows = np.union1d(redone, np.arange(place, len(tokens))).astype(int)
    return llama.dense(tokens, seen, rows=rows, kept=kept).logits[-1]


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1, 2)])
def test_naive_reads_what_is_kept_and_no_more(which: tuple[int, ...]) -> None:
    system, *chunks = segments(4)
    executor, question = Executor(), query(5)
    chunks = [condensed(executor, system, c) if i in which else c for i, c in enumerate(chunks)]
    parts = (system, *chunks, question)
    done = executor.run(strategies()["naive"], Prompt(parts))
    np.testing.assert_allclose(done.logits, dense_of(parts), atol=1e-5)
    assert done.plan.exact_to is None
    for report, segment in zip(done.plan.reports, parts, strict=True):
        kept = len(segment.condensed)
        assert report.reused + report.recomputed + report.dropped == report.tokens == len(segment)
        assert report.dropped == (len(segment) - kept if kept else 0)
        if kept:
            assert report.reused == kept


@pytest.mark.parametrize("name", ["fusion", "ragjax"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
def test_tokens_of_condensed_chunks_are_recomputed_as_any_others(name: str, ratio: float) -> None:
    system, *chunks = segments(6)
    executor, question = Executor(), query(7)
    parts = (system, *(condensed(executor, system, chunk) for chunk in chunks), question)
    done = executor.run(strategies()[name], Prompt(parts), ratio)
    total = sum(map(len, chunks))
    last = done.passes[-1]
    redone = [int(row) for row in last.rows if row < len(system) + total]  # type: ignore[union-attr]
    assert len(redone) == -(-round(ratio * total * 100) // 100)
    np.testing.assert_allclose(done.logits, dense_of(parts, redone), atol=1e-5)
    reports = done.plan.reports
    assert all(r.reused + r.recomputed + r.dropped == r.tokens for r in reports)
    assert sum(r.recomputed for r in reports[1:-1]) == len(redone)
    assert done.plan.exact_to == ("full" if ratio == 1.0 else None)


def test_other_strategies_leave_condensed_chunks_alone() -> None:
    system, *chunks = segments(8)
    for name, strategy in strategies(fit=Fit({"start": 1.0}, 3)).items():
        if strategy.condensed or name.startswith("dependency"):
            continue
        plain, marked = Executor(), Executor()
        parts = tuple(condensed(marked, system, chunk) for chunk in chunks)
        first = plain.run(strategy, Prompt((system, *chunks, query(9))))
        second = marked.run(strategy, Prompt((system, *parts, query(9))))
        np.testing.assert_allclose(first.logits, second.logits, atol=1e-5, err_msg=name)


def test_kv_that_has_left_is_computed_whole() -> None:
    system, chunk, *_ = segments(10)
    executor = Executor()
    marked, question = condensed(executor, system, chunk), query(11)
    executor.cache.clear()
    done = executor.run(strategies()["naive"], Prompt((system, marked, question)))
    np.testing.assert_allclose(done.logits, dense_of((system, chunk, question)), atol=1e-5)
    assert [report.dropped for report in done.plan.reports] == [0, 0, 0]


def test_two_choices_of_a_chunk_are_two_entries() -> None:
    system, chunk, *_ = segments(12)
    executor = Executor()
    third, half = (condensed(executor, system, chunk, share) for share in (1 / 3, 1 / 2))
    assert len(kept_nodes(executor)) == 2
    for marked in (third, half):
        done = executor.run(strategies()["naive"], Prompt((system, marked, query(13))))
        assert done.plan.reports[1].reused == len(marked.condensed)


def test_keys_name_what_is_kept() -> None:
    system, chunk, *_ = segments(14)
    executor = Executor()
    marked = condensed(executor, system, chunk)
    key = Condense(1 / 3).keys(Prompt((system, marked, query(0))), executor.cache, "")[-1]
    (node,) = kept_nodes(executor)
    assert node.key == key
    for strategy in map(strategies().__getitem__, ("naive", "fusion", "ragjax")):
        prompt = Prompt((system, marked, query(0)))
        assert key in strategy.keys(prompt, executor.cache, "")
        assert executor.cache.peek(strategy.outlook(prompt, executor.cache, "")).found >= len(marked.condensed)


@pytest.mark.parametrize("wrong", [(0, 1), (1, 2), (0, 1, 2, 4), (0, 4)])
def test_other_prompts_are_refused(wrong: Sequence[int]) -> None:
    parts = (*segments(0), query(1))
    with pytest.raises(ValueError, match="to condense takes"):
        Executor().run(Condense(0.5), Prompt(tuple(parts[i] for i in wrong)))


def test_no_room_is_told_before_the_first_pass() -> None:
    system, chunk, *_ = segments(15)
    executor = Executor(pages=7)
    talk = executor.talk(Condense(0.5), Prompt((system, chunk, query(1, 30))))
    with pytest.raises(OutOfPages):
        talk.step()
    talk.close()
    executor.cache.audit()


# ------------------------------------------------------------------------------------------- the engine


def documents(count: int = 10, seed: int = 0) -> list[Document]:
    random = np.random.default_rng(seed)
    words = ["island", "honey", "copper", "silk", "amber", "wool", "wax", "tin", "oil", "rope"]
    return [Document(f"d{n}", f"{n}: {' '.join(random.choice(words, 6))}.") for n in range(count)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tiny.engine() as made:
        made.add_documents(documents())
        yield made
        made.audit()


def dropped(engine: Engine, strategy: str = "naive", **options: object) -> int:
    """Tokens of chunks that an answer was given without; the account of each chunk adds up."""
    answer = engine.answer("island", strategy=strategy, max_tokens=2, top_k=4, **options)  # type: ignore[arg-type]
    for report in answer.segments:
        assert report.reused + report.recomputed + report.dropped == report.tokens
    lost = sum(report.dropped for report in answer.segments)
    assert answer.exact_to is None or not lost
    return lost


@pytest.mark.parametrize("probe", ["repeat", "questions"])
def test_requests_find_what_a_dense_computation_gives(engine: Engine, probe: str) -> None:
    report = condense(engine, share=0.4, probe=probe, progress=False)  # type: ignore[arg-type]
    assert (report.chunks, report.condensed, report.kept, report.lost) == (10, 10, 0, 0)
    hits = engine.search("island", top_k=4)
    prompt = chat_prompt(engine.tokenizer, [Message("user", "Which island?")], hits)
    chunks = [segment for segment in prompt.segments if segment.kind is Kind.CHUNK]
    assert all(len(segment.condensed) == kept_of(len(segment), 0.4) for segment in chunks)
    base = engine.knowledge_base()
    assert report.kept_tokens == sum(kept_of(len(chunk.tokens), 0.4) for chunk in base.chunks(base.numbers).values())
    found = engine.answer_prompt(prompt, strategy="naive", max_tokens=1, want_logits=True)
    assert found.logits is not None and found.exact_to is None
    np.testing.assert_allclose(found.logits, dense_of(prompt.segments), atol=2e-3)
    assert engine.answer_prompt(prompt, strategy="full", max_tokens=1).exact_to == "full"


def test_strategies_that_take_them_and_others(engine: Engine) -> None:
    assert dropped(engine) == 0
    condense(engine, share=0.5, progress=False)
    taking = {name for name, strategy in strategies().items() if strategy.condensed}
    assert taking == {"naive", "fusion", "ragjax"}
    assert all(dropped(engine, name) > 0 for name in taking)
    assert all(dropped(engine, name) == 0 for name in ("full", "prefix", "blend", "craft"))
    assert dropped(engine, compression="snapkv:64") == 0  # it scores every token


def test_what_is_there_is_not_computed_again(engine: Engine) -> None:
    condense(engine, share=0.5, progress=False)
    again = condense(engine, share=0.5, progress=False)
    assert (again.condensed, again.kept, again.lost) == (0, 10, 0)
    other = condense(engine, share=0.25, progress=False)
    assert (other.condensed, other.kept) == (10, 0) and other.kept_tokens < again.kept_tokens
    engine.clear_cache()
    assert condense(engine, share=0.25, progress=False).lost == 0
    assert dropped(engine) > 0
    whole = condense(engine, share=1.0, progress=False)
    assert (whole.condensed, whole.lost, whole.tokens) == (10, 0, whole.kept_tokens)
    assert dropped(engine) == 0


def test_a_changed_document_is_whole_again(engine: Engine) -> None:
    condense(engine, share=0.5, progress=False)
    engine.add_documents([Document("d3", "3: island island island.")])
    chunks = engine.knowledge_base().chunks(engine.knowledge_base().numbers).values()
    assert {chunk.document_id for chunk in chunks if not chunk.condensed} == {"d3"}
    assert condense(engine, share=0.5, progress=False).condensed == 1


def test_it_comes_back_from_disk(tmp_path: Path) -> None:
    """At a share of the bytes, and whoever forgot the marks computes the chunks whole."""

    def start() -> Engine:
        disk = DiskStore.open(tmp_path / "kv", b"tiny", about={}, max_bytes=2**30)
        made = tiny.engine(disk=disk)
        made.add_documents(documents())
        return made

    with start() as engine:
        condense(engine, share=0.5, progress=False)
        chunks = list(engine.knowledge_base().chunks(engine.knowledge_base().numbers).values())
    with start() as engine:
        assert dropped(engine) == 0
        base = engine.knowledge_base()
        for number, chunk in zip(base.numbers, chunks, strict=True):
            assert base.mark_condensed(number, chunk.condensed)
        engine.clear_cache()
        assert dropped(engine) > 0
        assert engine._cache.metrics.tier_hit_tokens["disk"] > 0
        assert not base.mark_condensed(10**6, (0, 1))
        engine.audit()


def test_a_budget_is_kept_with_all_of_a_chunks_kv(engine: Engine) -> None:
    condense(engine, share=0.5, progress=False)
    answer = engine.answer("island", max_tokens=1, top_k=2)
    engine._contract._budget = Budget(kl=0.1)
    promised = engine.answer("island", max_tokens=1, top_k=2, strategy=None)
    assert engine._contract.budgeted and answer.segments and all(report.dropped == 0 for report in promised.segments)


@pytest.mark.parametrize("seed", few(range(3), [0]))
def test_books_are_clean_whatever_is_condensed_asked_and_cancelled(seed: int) -> None:
    random = np.random.default_rng(seed)
    system, *chunks = segments(seed, (20, 30, 17, 41, 25))
    with tiny.engine(pages=44, host_bytes=1 << 20) as engine:
        known, futures = list(chunks), []
        for i in range(30):
            if i % 8 == 0:
                share = float(random.choice([0.2, 0.5, 0.8]))
                places = condense_all(engine, system, chunks, Condense(share))
                known += [replace(chunk, condensed=one) for chunk, one in zip(chunks, places, strict=True)]
            picked = [known[at] for at in random.choice(len(known), int(random.integers(1, 4)), replace=False)]
            futures.append(
                engine.begin_prompt(
                    Prompt((system, *picked, query(i))),
                    strategy=str(random.choice(["naive", "fusion", "ragjax", "full", "blend"])),
                    compression="knorm:60" if random.random() < 0.2 else None,
                    max_tokens=int(random.integers(1, 30)),
                    tenant=str(i % 2),
                )
            )
            if random.random() < 0.25:
                futures[int(random.integers(len(futures)))].cancel()
            engine.audit()
        tiny.check_ended(engine, futures)


def test_given_segments_that_do_not_fit(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    system, *chunks = segments(0, (20, 30, 300))
    engine.context_length = 400
    kept = condense_all(engine, system, chunks, Condense(0.5))
    assert len(kept[0]) == 15 and kept[1] == () and "a chunk of 300 tokens is not condensed" in caplog.text


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_is_a_share(engine: Engine, share: float) -> None:
    with pytest.raises(ConfigError, match=r"lies in \(0, 1\]"):
        condense(engine, share=share, progress=False)
    with pytest.raises(ConfigError, match="unknown probe 'guess'"):
        condense(engine, share=0.5, probe="guess", progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--keep", "0"), "--keep: must be a number above 0"),
        (("--keep", "0.5", "--record"), "leave out --neighbours and --record"),
        (("--keep", "0.5", "--neighbours", "3"), "leave out --neighbours and --record"),
        (("--probe", "repeat"), "give --keep, too"),
        (("--keep", "0.5", "--probe", "guess"), "invalid choice: 'guess'"),
    ],
)
def test_flags(flags: Sequence[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--knowledge", "demo", "--index-dir", "i", "--disk-cache", "k", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_the_command(monkeypatch: pytest.MonkeyPatch, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--knowledge", "demo", "--index-dir", "i", "--disk-cache", "k"]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "load", lambda *_, **__: engine)
        patch.setattr(engine, "close", lambda: None)
        assert main([*flags, "--keep", "0.4"]) == 0
    assert "10 chunks, " in capsys.readouterr().out
    assert dropped(engine) > 0
