"""Workloads of a small data folder: what is asked, over what, and in which tokens rivals get it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load.workload import Wish, Workload, poisson, questions, read_trace, rescaled, zipf
from ragjax.core import ConfigError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("nq_open", "musique"):
        folder = tmp_path / "text" / name
        folder.mkdir(parents=True)
        passages = [
            {"id": f"{name}-{n}", "title": f"T{n}", "text": f"Passage {n} of {name}. " * 30, "is_supporting": n == 0}
            for n in range(40)
        ]
        asked = [
            {"id": f"{name}-q{n}", "question": f"What is {n}?", "answers": [f"{n}"], "passages": passages[n : n + 2]}
            for n in range(10)
        ]
        (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
        (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, passages)))
    folder = tmp_path / "text" / "mmlu"
    folder.mkdir()
    entry = {"id": "m-0", "question": "Which?", "choices": ["one", "two"], "answers": ["B"], "passages": []}
    (folder / "questions.jsonl").write_text(json.dumps(entry))
    return tmp_path


def wish(data: Path, count: int = 50, **more: object) -> Wish:
    return Wish(data, count, pool=20, together=5, **more)  # type: ignore[arg-type]


def digest(made: Workload) -> str:
    return made.digest(made.asks)


def test_questions_are_asked_over_the_union_of_the_corpora(data: Path) -> None:
    made = questions(wish(data, sets=("nq_open", "musique"), top_k=3))
    assert len(made.asks) == 50 and len(made.documents) == 80
    assert {ask.top_k for ask in made.asks} == {3} and {ask.output for ask in made.asks} == {32}
    counts = Counter(ask.question for ask in made.asks).most_common()
    assert counts[0][1] > 50 / 20  # Zipf: some are asked again and again


def test_mmlu_has_its_choices_and_one_token_and_borrows_corpora(data: Path) -> None:
    made = questions(wish(data, count=2, sets=("mmlu",)))
    assert made.asks[0].question == "Which?\nA. one\nB. two" and made.asks[0].output == 1
    assert len(made.documents) == 80


def test_zipf_draws_passages_without_repetition_and_a_seed_is_a_workload(data: Path) -> None:
    made = zipf(wish(data, seed=1))
    assert all(len(set(ask.documents or ())) == 5 for ask in made.asks)
    known = {document.id for document in made.documents}
    assert len(known) == 20 and all(known.issuperset(ask.documents or ()) for ask in made.asks)
    counts = Counter(name for ask in made.asks for name in ask.documents or ())
    assert counts.most_common()[0][1] > 2 * 50 * 5 / 20
    assert digest(made) == digest(zipf(wish(data, seed=1))) != digest(zipf(wish(data, seed=2)))


def test_passages_in_order_share_prefixes_more_often_than_shuffled_ones(data: Path) -> None:
    def firsts(shuffled: bool) -> int:
        made = zipf(wish(data, count=200, shuffled=shuffled))
        return Counter((ask.documents or ())[:2] for ask in made.asks).most_common()[0][1]

    assert firsts(False) > 2 * firsts(True)


def test_a_pool_that_is_too_large_says_so(data: Path) -> None:
    with pytest.raises(ConfigError, match="takes twice as many"):
        zipf(Wish(data, 1, pool=1000))


def test_without_data_passages_are_the_demos_words() -> None:
    made = zipf(Wish(Path("none"), 4, pool=9, together=3, words=20, made=True))
    assert [len(document.text.split()) for document in made.documents] == [20] * 9
    assert all(len(set(ask.documents or ())) == 3 and ask.question for ask in made.asks)


def test_equal_documents_have_one_knowledge_base(data: Path) -> None:
    first, second = zipf(wish(data, seed=1)), zipf(wish(data, count=3, seed=2))
    assert first.knowledge == second.knowledge and digest(first) != digest(second)
    assert first.knowledge != zipf(Wish(data, 3, pool=19, together=5)).knowledge


def test_gaps_have_the_mean_and_the_variance_of_an_exponential() -> None:
    times = poisson(4.0, 40_000, seed=1)
    gaps = np.diff([0.0, *times])
    assert np.all(gaps > 0)
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.02)
    assert gaps.var() == pytest.approx(1 / 16, rel=0.05)


def test_arrivals_in_a_window_are_a_poisson_number() -> None:
    counts = np.histogram(poisson(5.0, 50_000, seed=2), bins=np.arange(0, 9000))[0]
    assert counts.mean() == pytest.approx(5, rel=0.02) and counts.var() == pytest.approx(5, rel=0.05)


def test_a_seed_is_a_sequence() -> None:
    assert poisson(1.0, 9, seed=3) == poisson(1.0, 9, seed=3) != poisson(1.0, 9, seed=4)


def test_azures_trace(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert read_trace(file) == pytest.approx([0.0, 4.314579], abs=1e-5)


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="columns"):
        read_trace(file)


def test_a_stretched_trace_has_the_rate_and_keeps_its_bursts(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    moments = [0, 0, 0, 900, 1000]
    entries = [{"timestamp": t, "input_length": 1, "output_length": 1, "hash_ids": []} for t in moments]
    file.write_text("\n".join(map(json.dumps, entries)))
    trace = read_trace(file)
    times = rescaled(trace, rate=2.0, count=5)
    assert times == pytest.approx([0, 0, 0, 1.8, 2.0])
    with pytest.raises(ConfigError, match="lower --requests"):
        rescaled(trace, rate=2.0, count=6)
