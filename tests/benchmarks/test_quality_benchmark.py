"""The quality benchmark on miniatures: its scores against known values, its rows against arithmetic done by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import dataset, evaluation, plot_quality, probe, quality, repair, report, rival, score
from benchmarks.dataset import Question, QuestionSet
from benchmarks.evaluation import FULL, NAIVE, Evaluation, Setting, Style
from benchmarks.similarity import Similarity
from benchmarks.ttft import Workload
from ragjax.commands.preprocess import Job, fuse_all
from ragjax.core import Chunk, ConfigError, Document, Kind, Prompt
from ragjax.engine import Engine
from ragjax.models.config import inverse_frequencies
from ragjax.reuse import strategies as all_strategies
from tests.support import tiny

# ----------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("text", "references", "em", "f1"),
    [
        ("The Queen, Clarisse!", ["queen clarisse"], 1.0, 1.0),
        ("It is Paris.", ["Paris", "London"], 0.0, 0.5),
        ("yes", ["no"], 0.0, 0.0),
        ("", ["a"], 1.0, 0.0),
        ("one one two", ["one two two"], 0.0, 2 / 3),
    ],
)
def test_em_and_f1_are_squads(text: str, references: list[str], em: float, f1: float) -> None:
    assert score.exact_match(text, references) == em
    assert score.f1(text, references) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("text", "reference", "value"),  # by google-research's rouge-score 0.1.2, without stemming
    [
        ("The cat sat on the mat.", "A cat, sat down on that mat!", 0.6153846153846153),
        ("", "x", 0.0),
        ("Queen dowager Clarisse Renaldi", "The actress plays Queen Clarisse Renaldi in it.", 0.5),
        ("é1-2 b", "1 2 B c", 0.8571428571428571),
        ("x", "x", 1.0),
    ],
)
def test_rouge_l_is_googles(text: str, reference: str, value: float) -> None:
    assert score.rouge_l(text, ["unlike", reference]) == pytest.approx(value, abs=1e-12)


def test_jaccard_and_answered() -> None:
    assert score.jaccard("The red fox", "a red dog") == pytest.approx(1 / 3)
    assert score.jaccard("", "the") == 1.0
    assert score.answered("It was built in New York City.", ["new york"]) == 1.0
    assert score.answered("It was built in Newyork.", ["York"]) == 0.0


def test_divergence_is_kl_of_softmaxes() -> None:
    random = np.random.default_rng(0)
    full, other = random.normal(size=(2, 5, 11)).astype(np.float32) * 3
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (full, other))
    kl, top1 = score.divergence(full, other + 7)
    assert kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-5)
    assert top1 == np.mean(p.argmax(-1) == q.argmax(-1))
    assert score.divergence(full, full) == (0.0, 1.0)
    with pytest.raises(ValueError, match="shape"):
        score.divergence(full, other[:4])
    with pytest.raises(ValueError, match="finite"):
        score.divergence(full, np.where(other > 0, np.nan, other))


def test_bootstrap_pairs_figures_and_keeps_the_sets_in_proportion() -> None:
    base = np.arange(40.0)
    paired = score.Bootstrap(["s"] * 40).difference(base + 1, base)
    assert (paired.value, paired.lo, paired.hi) == (1.0, 1.0, 1.0)
    by_set = score.Bootstrap(["a"] * 5 + ["b"] * 15).mean([0.0] * 5 + [1.0] * 15)
    assert (by_set.value, by_set.lo, by_set.hi) == (0.75, 0.75, 0.75)
    noisy = np.random.default_rng(1).normal(size=400)
    mean = score.Bootstrap(["s"] * 400).mean(noisy)
    expected = 1.96 * noisy.std() / 20
    assert mean.lo is not None and mean.hi is not None
    assert mean.hi - mean.lo == pytest.approx(2 * expected, rel=0.1)


def test_normalised_f1_is_a_ratio_of_sums_and_says_where_it_is_undefined() -> None:
    bootstrap = score.Bootstrap(["s"] * 4)
    found = score.normalised_f1(bootstrap, [0.5, 0.5, 1, 1], [1.0, 1, 1, 1], [0.5, 0, 0.5, 1])
    assert found.value == pytest.approx(0.5)
    assert score.normalised_f1(bootstrap, [1.0] * 4, [0.2] * 4, [0.4] * 4) == score.Estimate(None, None, None)
    unbounded = score.normalised_f1(bootstrap, [0, 1.0, 0, 0], [1.0, 0, 0.3, 0], [0, 1.0, 0, 0])
    assert unbounded.value is not None and unbounded.hi is None


# ------------------------------------------------------------------------------------------- data

TOPICS = ("ferry", "bridge", "tower")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sets of three questions over three passages each, one of them without a corpus file."""
    for name in ("boats", "talks"):
        folder = tmp_path / "data" / "text" / name
        folder.mkdir(parents=True)
        passages = [
            {"id": f"{name}-{t}{i}", "title": t.title(), "text": f"The {t} of {name} number {i} opens at {i} o'clock."}
            for t in TOPICS
            for i in (1, 2, 3)
        ]
        questions = [
            {
                "id": f"q{i}",
                "question": f"When does the {t} open?",
                "answers": [f"at {i} o'clock"],
                "passages": [{**p, "is_supporting": False} for p in passages[3 * i : 3 * i + 3]],
            }
            for i, t in enumerate(TOPICS)
        ]
        questions.append({"id": "none", "question": "?", "answers": [], "passages": []})
        (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
        if name == "boats":
            extra = {"id": "extra", "title": "Pier", "text": "The pier is closed."}
            (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, [*passages, extra])))
    return tmp_path / "data"


def test_sets_are_read_and_refused(data: Path) -> None:
    boats, talks = dataset.load(data, "boats"), dataset.load(data, "talks")
    assert [q.id for q in boats.questions] == ["q0", "q1", "q2"]
    assert len(boats.corpus) == 10 and len(talks.corpus) == 9
    with pytest.raises(ConfigError, match=r"no set 'cars'.*boats, talks"):
        dataset.load(data, "cars")


def test_triviaqa_files_need_their_evidence(tmp_path: Path) -> None:
    page = {"Title": "Rome", "Filename": "rome.txt", "Text": "Rome is old."}
    entry = {"Question": "Old?", "QuestionId": "t1", "Answer": {"Value": "Rome", "Aliases": ["Rome", "Roma"]}}
    file = tmp_path / "trivia.json"
    file.write_text(json.dumps({"Data": [{**entry, "EntityPages": [page], "SearchResults": [{"Url": "u"}]}]}))
    found = dataset.triviaqa(file)
    assert found.name == "trivia" and found.questions[0].answers == ("Rome", "Roma")
    assert found.questions[0].passages == (Document("rome.txt", "Rome is old.", "Rome"),)
    file.write_text(json.dumps({"Data": [{**entry, "EntityPages": [{"Title": "Rome", "Filename": "rome.txt"}]}]}))
    with pytest.raises(ConfigError, match="no page has its text"):
        dataset.triviaqa(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="not in TriviaQA's format"):
        dataset.triviaqa(file)


def test_multihop_rag_is_read_in_its_own_form(tmp_path: Path) -> None:
    folder = tmp_path / "text" / "multihop_rag"
    folder.mkdir(parents=True)
    articles = [{"title": t, "body": f"{t} is said.", "url": f"u/{t}"} for t in ("A", "B", "C")]
    evidence = [{"title": t, "fact": "x"} for t in ("C", "A", "C", "lost")]
    entries = [
        {"query": "Who?", "answer": "Ada", "question_type": "inference_query", "evidence_list": evidence},
        {"query": "When?", "answer": "Yes", "evidence_list": []},
    ]
    (folder / dataset.MULTIHOP).write_text(json.dumps(entries))
    (folder / "corpus.json").write_text(json.dumps(articles))
    found = dataset.load(tmp_path, "multihop_rag")
    assert [(q.id, q.text, q.answers) for q in found.questions] == [("multihop-0", "Who?", ("Ada",))]
    assert [p.title for p in found.questions[0].passages] == ["C", "A"] and len(found.corpus) == 3
    (folder / "corpus.json").write_text("{}")
    with pytest.raises(ConfigError, match="no question has both"):
        dataset.load(tmp_path, "multihop_rag")
    (folder / dataset.MULTIHOP).write_text('[{"question": "Who?"}]')
    with pytest.raises(ConfigError, match="not in MultiHop-RAG's format"):
        dataset.load(tmp_path, "multihop_rag")


def test_neighbours_leave_out_copies_and_vectors_are_kept(tmp_path: Path) -> None:
    texts = ["red fox", "red fox", "red fox runs", "blue whale", "red whale", "red whale"]
    chunks = [
        Chunk(str(i), str(i), "", t, np.frombuffer(t.encode(), np.uint8).astype(np.int32)) for i, t in enumerate(texts)
    ]
    encoder = tiny.HashedEncoder()
    similarity = Similarity.of(chunks, encoder, tmp_path)
    vectors = encoder.encode(texts).astype(np.float64)
    order = sorted((2, 3, 4), key=lambda i: -vectors[0] @ vectors[i])
    assert [c.id for c in similarity.neighbours("0", 9)] == [str(i) for i in order]
    assert [c.id for c in similarity.neighbours("0", 1)] == [str(order[0])]

    class Refusing(tiny.HashedEncoder):
        def encode(self, texts: Sequence[str]) -> Any:
            raise AssertionError("the vectors were not kept")

    assert Similarity.of(chunks, Refusing(), tmp_path).neighbours("0", 9) == similarity.neighbours("0", 9)


def test_past_requests_hold_every_needed_chunk(tmp_path: Path) -> None:
    chunks = [Chunk(str(i), str(i), "", f"w{i % 5} v{i % 7}", np.array([i], np.int32)) for i in range(30)]
    similarity = Similarity.of(chunks, tiny.HashedEncoder(), tmp_path)
    needed = [str(i) for i in range(0, 30, 3)]
    requests = list(similarity.past_requests(needed, "similar"))
    assert {c.id for request in requests for c in request} >= set(needed)
    assert all(len({c.id for c in request}) == 5 for request in requests)
    near = [{c.id for c in similarity.neighbours(c.id, 10)} | {c.id} for c in chunks]
    assert all(any({c.id for c in r} <= group for group in near) for r in requests)
    assert [[c.id for c in r] for r in requests] == [
        [c.id for c in r] for r in similarity.past_requests(needed, "similar")
    ]
    assert list(similarity.past_requests(needed, "none")) == []
    assert len(next(similarity.past_requests(needed, "random"))) == 5


# ------------------------------------------------------------------------------------- evaluation


@pytest.fixture
def boats(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> QuestionSet:
    monkeypatch.setattr(report, "STORE", tmp_path / "store")
    return dataset.load(data, "boats")


def evaluate(engine: Engine, questions: QuestionSet, limit: int = 9, **more: Any) -> Evaluation:
    style = Style(max_tokens=12)

    def fuse(engine: Engine, jobs: Sequence[Job], *, record: bool) -> Sequence[bytes]:
        return fuse_all(engine, jobs, record=record, progress=False)

    return Evaluation(engine, questions, limit, tiny.HashedEncoder(), style, all_strategies(), fuse, **more)


def test_prompts_are_those_of_chat_requests(boats: QuestionSet) -> None:
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        question = work.questions[0]
        answer = engine.answer(question.text, documents=question.passages, max_tokens=1)
        mine = engine.answer_prompt(work.prompt(question), strategy="prefix", max_tokens=1)
        assert mine.prompt_tokens == answer.prompt_tokens and mine.segments[-1].recomputed == 1
    assert bytes(work.continuation(question).tolist()).decode() == "at 0 o'clock"


def test_questions_too_long_for_the_context_are_left_out(boats: QuestionSet) -> None:
    question = boats.questions[0]
    long = [Document(f"long{i}", "word " * 30 + str(i)) for i in range(8)]
    sets = QuestionSet(
        "x", (Question("big", "?", ("a",), tuple(long)), question), {d.id: d for d in (*long, *question.passages)}
    )
    with tiny.engine() as engine:
        work = evaluate(engine, sets, limit=1)
        assert [q.id for q in work.questions] == [question.id] and work.left_out == 1


def test_samples_of_the_limits(boats: QuestionSet) -> None:
    """Full is itself; naive reuses everything; a ratio of one is full again; probes see what was recomputed."""
    fusion = Setting("fusion", 0.3, 2)
    settings = [FULL, NAIVE, Setting("prefix"), Setting("fusion", 1.0, 2), fusion, Setting("blend", 0.3)]
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        work.warm_up(settings)
        question = work.questions[1]
        found = dict(work.measure(question, settings, deviations=True))
        engine.audit()
        prompt = work.prompt(question)
    tokens = sum(len(s) for s in prompt.segments if s.kind is Kind.CHUNK)
    assert list(found) == settings
    assert (found[FULL]["kl"], found[FULL]["rougeL_vs_full"], found[FULL]["recomputed_share"]) == (0.0, 1.0, 1.0)
    assert found[NAIVE]["recomputed_share"] == 0 and found[NAIVE]["kl"] > 1e-4
    assert found[Setting("prefix")]["kl"] < 1e-6
    assert found[Setting("fusion", 1.0, 2)]["kl"] < 1e-6
    assert max(found[Setting("fusion", 1.0, 2)]["deviation_k"]) < 1e-4
    for setting in (fusion, Setting("blend", 0.3)):
        assert found[setting]["recomputed_share"] == np.ceil(0.3 * tokens) / tokens
        assert sum(found[setting]["place_in_chunk"]) == pytest.approx(1.0)
        assert found[setting]["deviation_k"][0] < 1e-5 < found[setting]["deviation_k"][2]


def test_fused_chunks_are_used_and_neighbours_count(boats: QuestionSet) -> None:
    kinds = [Setting("fusion", 0.0, n) for n in (0, 1, 3)]
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        found = dict(work.measure(work.questions[0], [*kinds, NAIVE]))
        behind = [[s.behind for s in work.prompt(work.questions[0], None, k.neighbours).segments[1:-1]] for k in kinds]
    assert found[kinds[0]]["kl"] == pytest.approx(found[NAIVE]["kl"], rel=1e-3)
    assert len({found[k]["kl"] for k in kinds}) == 3
    assert not any(behind[0]) and all(behind[1]) and not set(behind[1]) & set(behind[2])


def test_no_setting_profits_from_another(boats: QuestionSet) -> None:
    """What a measured request leaves behind is its tenant's own: the order of settings changes nothing."""
    settings = [Setting("prefix"), Setting("set-cache"), NAIVE, Setting("craft", 0.3), Setting("craft", 0.1)]
    runs = []
    for order in (settings, settings[::-1]):
        with tiny.engine() as engine:
            work = evaluate(engine, boats)
            assert list(work.teach(["craft"]))
            work.warm_up([NAIVE])
            runs.append({s: f["recomputed_share"] for s, f in work.measure(work.questions[2], order)})
    assert runs[0] == runs[1] and runs[0][Setting("prefix")] == 1.0
    assert 0 < runs[0][Setting("craft", 0.1)] < runs[0][Setting("craft", 0.3)]


def test_past_requests_are_answered_once_by_each_teacher(boats: QuestionSet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        monkeypatch.setattr(engine, "answer_prompt", lambda prompt, *, strategy, **more: asked.append(strategy))
        left = list(work.teach(["craft", "craft-focus", "set-cache", "naive"]))
        assert list(work.teach(["naive"])) == []
    assert left[-1][0] == left[-1][1] == len(left) and asked == ["craft", "set-cache"] * len(left)


def test_keys_are_compared_at_equal_rotation() -> None:
    random = np.random.default_rng(0)
    inv_freq_R = inverse_frequencies(1e4, 16, None)
    raw = random.normal(size=(2, 5, 1, 16)).astype(np.float32)
    early = probe.rotated(raw, np.arange(5, dtype=np.int32), inv_freq_R)
    late = probe.rotated(raw, np.arange(7, 12, dtype=np.int32), inv_freq_R)
    moved = probe.rotated(early, np.full(5, 7, np.int32), inv_freq_R)
    assert probe.deviation((late, raw), (moved, raw))[0] == pytest.approx([0, 0], abs=1e-6)
    keys, values = probe.deviation((late, raw), (early, raw * 1.5))
    assert min(keys) > 0.1 and values == pytest.approx([0.5, 0.5])


def test_a_stopped_run_goes_on_and_repeats_no_sample(boats: QuestionSet, tmp_path: Path) -> None:
    main, sweep = [FULL, NAIVE, Setting("random", 0.15)], [Setting("random", 0.5)]
    calls: list[str] = []
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        whole = work.measure

        def stopping(question: Question, settings: Sequence[Setting], deviations: bool = False) -> Any:
            calls.append(question.id)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return whole(question, settings, deviations)

        work.measure = stopping  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            quality.measure(work, main, sweep, report.Samples("quality", {}, tmp_path), report.Progress(3), swept=1)
        found = quality.measure(work, main, sweep, report.Samples("quality", {}, tmp_path), report.Progress(3), swept=1)
    assert calls == ["q0", "q1", "q2", "q2"]
    assert [sorted(q) for q in found] == [sorted(s.key for s in [*main, *sweep]), *[sorted(s.key for s in main)] * 2]


# ------------------------------------------------------------------------------------------- rows


def sample(kl: float, f1: float, share: float = 0.0, **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(quality.METRICS, 0.5), "kl": kl, "f1": f1, "recomputed_share": share, **more}


def measured(scale: float, fusion_kl: float = 0.1) -> list[dict[str, dict[str, Any]]]:
    """Four questions; blend's KL is four times fusion's, and half of the F1 is recovered. The first is swept too."""
    found = [
        {
            FULL.key: sample(0.0, 0.8, 1.0),
            NAIVE.key: sample(scale * i, 0.4, deviation_k=[0.0, i]),
            "blend/0.15/0": sample(4 * fusion_kl * i, 0.5, 0.15),
            "fusion/0.15/10": sample(fusion_kl * i, 0.6, 0.15),
        }
        for i in (1, 2, 3, 4)
    ]
    swept = {"fusion/0.0/10": 2.0, "blend/0.0/0": 3.0, "fusion/0.15/0": 1.0, "fusion/0.0/0": 1.0}
    found[0] |= {key: sample(kl, 0.4) for key, kl in swept.items()}
    return found


def settings() -> tuple[list[Setting], list[Setting]]:
    main = quality.main_settings(["full", "blend", "fusion"], frozenset({"blend", "fusion"}), 0.15, 10)
    return main, quality.sweep_settings(main, [0.15, 0.0], [0])


def test_settings_put_the_references_first_and_sweep_the_rest() -> None:
    main, sweep = settings()
    assert main == [FULL, NAIVE, Setting("blend", 0.15), Setting("fusion", 0.15, 10)]
    assert {s.key for s in sweep} == {"blend/0.0/0", "fusion/0.0/10", "fusion/0.15/0", "fusion/0.0/0"}


def test_rows_hold_paired_figures_by_part_and_set() -> None:
    main, sweep = settings()
    made = quality.rows({"a": measured(1.0), "b": measured(1.0, 0.3)}, main, sweep, "m")
    assert {(r["set"], r["part"]) for r in made} == {
        (s, p) for s in ("a", "b", "pooled") for p in ("main", "sweep", "neighbours")
    }
    rows = {(r["set"], r["part"], r["strategy"], r["ratio"], r["neighbours"]): r for r in made}
    blend = rows["a", "main", "blend", 0.15, None]
    assert blend["n"] == 4 and blend["kl"] == pytest.approx(1.0) and blend["kl_lo"] < 1 < blend["kl_hi"]
    assert [blend[f"kl_over_fusion{x}"] for x in ("", "_lo", "_hi")] == pytest.approx([4, 4, 4])
    assert blend["normalised_f1"] == pytest.approx(0.25) and blend["f1_minus_full"] == pytest.approx(-0.3)
    assert rows["pooled", "main", "fusion", 0.15, 10]["normalised_f1"] == pytest.approx(0.5)
    assert rows["pooled", "main", "fusion", 0.15, 10]["n"] == 8
    assert rows["a", "sweep", "fusion", 0.0, 10]["n"] == 1
    assert rows["a", "sweep", "blend", 0.0, None]["kl_over_fusion"] == pytest.approx(1.5)
    assert rows["a", "main", "naive", None, None]["deviation_k"] == [0.0, 2.5]
    assert rows["a", "neighbours", "fusion", 0.15, 0]["kl"] == 1.0


def test_verdicts_name_the_slots_that_miss() -> None:
    main, _ = settings()
    made = quality.rows({"a": measured(1.0), "b": measured(1.0)}, main, [], "m")
    claims = {(c["set"], c["strategy"]): c["holds"] for c in quality.verdicts(made)}
    assert claims == {
        ("a", "blend"): "True",
        ("b", "blend"): "True",
        ("pooled", "blend"): "True",
        ("pooled", "fusion"): "False",
    }


def test_figures_are_drawn_where_there_are_rows(tmp_path: Path) -> None:
    main, sweep = settings()
    made = quality.rows({"a": measured(1.0)}, main, sweep, "m")
    names = {file.stem for file in plot_quality.draw(made, tmp_path)}
    assert names == {"fusionrag_3", "fusionrag_13", "fusionrag_16", "fusionrag_17", "fusionrag_18"} | {
        f"cachecraft_{n}" for n in (15, 20, 26)
    }
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in names)


# ---------------------------------------------------------------------------------------- command


def test_the_command_measures_and_reports(
    data: Path, boats: QuestionSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "ceilings", lambda: report.Ceilings(1.0, 1.0, 1.0))
    monkeypatch.setattr(Engine, "load", lambda *a, **k: tiny.engine())
    monkeypatch.setattr(report, "weights_of", str)
    monkeypatch.setattr(quality, "packaged_encoder", tiny.HashedEncoder)
    out = tmp_path / "r.json"
    command = ["--data", str(data), "--sets", "boats,talks", "--limit", "2", "--sweep", "1", "--max-tokens", "12"]
    command += ["--strategies", "naive,random", "--ratios", "0.15,0.5", "--rivals", "map-reduce", "--json", str(out)]
    assert quality.main(command) == 0
    document = json.loads(out.read_text())
    assert document["benchmark"] == "quality"
    rows = {(r["set"], r["part"], r["strategy"], r["ratio"]): r for r in document["rows"]}
    assert {s for s, *_ in rows} == {"boats", "talks", "pooled"} and rows["pooled", "main", "random", 0.15]["n"] == 4
    for name in (
        "kl",
        "top1",
        "em",
        "f1",
        "rougeL",
        "rougeL_vs_full",
        "jaccard_vs_full",
        "recomputed_share",
        "ttft_ms",
    ):
        assert {name, f"{name}_lo", f"{name}_hi"} <= set(rows["boats", "main", "naive", None])
    assert rows["boats", "sweep", "random", 0.5]["recomputed_share"] > 0.5
    assert rows["talks", "main", "map-reduce", 0.15]["kl"] > 0
    assert not list((tmp_path / "store").glob("quality-*"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--strategies", "blent"], "unknown strategy 'blent'"),
        (["--rivals", "lingua"], "unknown rival 'lingua'"),
        (["--sets", "cars"], "no set 'cars'"),
    ],
)
def test_the_command_refuses_unknown_names(
    data: Path, arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "ceilings", lambda: report.Ceilings(1.0, 1.0, 1.0))
    monkeypatch.setattr(quality, "packaged_encoder", tiny.HashedEncoder)
    assert quality.main(["--data", str(data), *arguments]) == 1
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--ratios", "2"], ["--limit", "-1"], ["--limit", "0"], ["--neighbours", "x"], ["--sweeps", "1"], []]
)
def test_the_command_refuses_bad_flags(data: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        quality.options([*(["--data", str(data)] if arguments else []), *arguments])


def test_llmlingua_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> Path:
        raise rival.envs.RivalError("no network")

    monkeypatch.setattr(rival.envs, "python", failing)
    with tiny.engine() as engine, pytest.raises(ConfigError, match="Leave it out of --rivals"):
        rival.LLMLingua2(engine)


def test_names_of_strategies_exist() -> None:
    """The tables by strategy name go with the registry."""
    assert {*all_strategies(), "ragjax", "fusion+craft"} >= evaluation.FUSED
    assert {"naive", "full", "fusion", "blend"} <= set(all_strategies())


# ------------------------------------------------------------------------------------ what it costs


def small_work() -> Workload:
    one, other = tiny.prompt(1, chunks=(40,) * 4), tiny.prompt(2, chunks=(40,) * 4)
    rest = one.segments[:-1]
    return Workload(one, Prompt((*rest, other.segments[-1])), one, one)


def test_repair_measures_warm_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "workload", lambda tokenizer: small_work())
    names = ("full", "naive", "random", "fusion")
    known = {name: all_strategies()[name] for name in names}
    chosen = repair.options(["--runs", "2", "--ratio", "0.25"])
    with tiny.engine() as engine:
        made = {r["strategy"]: r for r in repair.run(engine, known, chosen)}
        engine.audit()
    shares = {name: made[name]["recomputed_share"] for name in names}
    assert shares == {"full": 1.0, "naive": 0.0, "random": 0.25, "fusion": 0.25}
    assert {name: made[name]["passes"] for name in names} == {"full": 1, "naive": 1, "random": 1, "fusion": 2}
    assert made["full"]["selection_share"] == made["naive"]["selection_share"] == 0.0
    assert 0 < made["fusion"]["selection_share"] < 1 and made["fusion"]["chunks_per_s"] > 0
    assert made["full"]["faster_than_full"] == 1.0 and all(made[name]["runs"] == 2 for name in names)


def test_repair_refuses_no_runs() -> None:
    with pytest.raises(SystemExit):
        repair.options(["--runs", "0"])


def test_break_even_is_the_cost_of_a_chunk_over_what_its_reuse_saves(capsys: pytest.CaptureFixture[str]) -> None:
    base = {"selection_ms": 10.0, "passes": 2.0, "recomputed_share": 0.15, "context_tokens": 9.0}
    found = {"full": [{**base, "ttft_ms": t} for t in (2000.0, 2100.0)], "fusion": [{**base, "ttft_ms": 50.0}] * 2}
    made = repair.rows(found, 0.15, frozenset({"fusion"}), repair.Preprocessing(0.3, 0.4))
    assert made[1]["break_even"] == pytest.approx(0.4 / (2.0 / repair.CHUNKS))
    assert made[1]["faster_than_full"] == pytest.approx(41) and made[1]["selection_share"] == pytest.approx(0.2)
    assert (made[0]["ratio"], made[1]["ratio"]) == (None, 0.15)
    repair.show(made)
    assert "after 2.0 reuses" in capsys.readouterr().out
