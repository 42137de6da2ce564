"""Samples: makers, files and their bad lines, the split, and what a model sees of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.core import ConfigError, Message
from ragjax.retrieval.triples import RelationPath, Triple
from tests.support.tiny import byte_tokenizer
from train.batch import Order, Rows, pairs_of, targets_of
from train.data import main
from train.example import Coder, Example
from train.maker import from_graph, from_question, from_trivia
from train.sample import Sample, read_samples, write_samples
from train.split import split
from train.walk import Graph, Limits

QUESTION = {
    "id": "q1",
    "question": "What flows through the capital of France?",
    "answers": ["Seine"],
    "topic_entities": ["France"],
    "triples": [
        ["France", "capital", "Paris"],
        ["Paris", "river", "Seine"],
        ["Germany", "borders", "France"],
        ["Paris", "twin", "Rome"],
        ["Rome", "river", "Tiber"],
        ["Oslo", "in", "Norway"],
    ],
    "paths": [["France", "capital", "Paris", "river", "Seine"]],
}


def test_question_becomes_paths_around_its_entities() -> None:
    sample = from_question(QUESTION, Limits(), 0, 0)
    assert sample.answer == "Seine" and sample.gold == (("France", "capital", "Paris", "river", "Seine"),)
    assert set(sample.paths) >= {sample.gold[0], ("France", "borders (inverse)", "Germany")}
    # one of the two beyond Paris that do not lead to the Seine, or both hops
    assert sum("Rome" in steps for steps in sample.paths) == 1 and len(sample.paths) == 3
    assert all(steps[0] == "France" for steps in sample.paths)
    assert from_question(QUESTION, Limits(), 0, 0) == sample
    assert len({from_question(QUESTION, Limits(), seed, 0).paths for seed in range(8)}) > 1


@given(seed=st.integers(0, 10**6), paths=st.integers(1, 8), hops=st.integers(1, 3))
def test_paths_keep_to_their_limits(seed: int, paths: int, hops: int) -> None:
    random = np.random.default_rng(seed)
    names = [f"e{i}" for i in range(8)]
    triples = [Triple(*random.choice(names, 2, replace=False), f"r{random.integers(3)}") for _ in range(20)]
    triples = [Triple(t.head, t.tail, t.relation) for t in triples]  # the relation stands between
    gold = next((s for s in Graph(triples).walks(triples[0].head, 2) if len(s) == 5), None)
    path = list(gold or triples[0])
    value = {"question": "?", "answers": ["x"], "triples": [list(t) for t in triples], "paths": [path]}
    sample = from_question(value, Limits(paths, hops), seed, 0)
    known = set(triples)
    assert set(sample.gold) <= set(sample.paths) and len(sample.paths) <= paths
    for steps in sample.paths:
        assert set(RelationPath(steps).triples) <= known  # and it comes to no entity twice
        assert len(steps) <= 1 + 2 * max(hops, 2)
        assert not any(other != steps and other[: len(steps)] == steps for other in sample.paths)


def test_loops_are_left_out_of_given_paths() -> None:
    path = ["Singapore", "capital (inverse)", "Singapore", "demonym", "Singaporean"]
    sample = from_question(QUESTION | {"paths": [path]}, Limits(), 0, 0)
    assert sample.gold == (("Singapore", "demonym", "Singaporean"),)


def test_without_paths_the_shortest_to_an_answer_are_taken() -> None:
    sample = from_question(QUESTION | {"paths": []}, Limits(), 0, 0)
    assert sample.gold == (("France", "capital", "Paris", "river", "Seine"),)
    with pytest.raises(ValueError, match="no path leads to an answer"):
        from_question(QUESTION | {"paths": [], "answers": ["Volga"]}, Limits(), 0, 0)


def test_questions_of_a_graph_have_all_their_answers() -> None:
    random = np.random.default_rng(0)
    names = ("mother", "is in", "plays_for")
    drawn = [(random.choice(30, 2, replace=False), names[random.integers(3)]) for _ in range(120)]
    triples = [Triple(f"e{a}", name, f"e{b}") for (a, b), name in drawn]
    samples = from_graph(triples, 40, Limits(), 3)
    assert len(samples) == 40 and samples == from_graph(triples, 40, Limits(), 3)
    assert {len(sample.gold[0]) for sample in samples} == {3, 5}
    for sample in samples:
        relations = sample.gold[0][1::2]
        walks: list[tuple[str, ...]] = [(sample.gold[0][0],)]
        for relation in relations:
            steps = {(t.head, t.tail) for t in triples if t.relation == relation}
            walks = [(*w, tail) for w in walks for head, tail in steps if head == w[-1] and tail not in w]
        assert sample.answer.split(", ") == sorted({w[-1] for w in walks})
        assert all(r.replace("_", " ") in sample.question for r in relations) and sample.gold[0][0] in sample.question


TRIVIA = {"QuestionId": "t1", "Question": "Who wrote Emma?", "Answer": {"Value": "Jane Austen", "Aliases": ["Austen"]}}
FACTS = [Triple("Emma", "written by", "Jane Austen"), Triple("Jane Austen", "born in", "Steventon")]


def test_trivia_entry_becomes_a_sample() -> None:
    sample = from_trivia(TRIVIA, {"t1": FACTS}, {}, Limits(), 0)
    assert sample.answer == "Jane Austen" and sample.gold == (("Emma", "written by", "Jane Austen"),)
    assert sample.gold[0] in sample.paths
    assert from_trivia(TRIVIA, {"t1": FACTS}, {"t1": "It was she."}, Limits(), 0).answer == "It was she."
    with pytest.raises(ValueError, match="no triples are given for t1"):
        from_trivia(TRIVIA, {}, {}, Limits(), 0)


# -------------------------------------------------------------------------------------------- split


@given(seed=st.integers(0, 10**6), aside=st.integers(0, 30))
def test_split_shares_no_answering_path(seed: int, aside: int) -> None:
    random = np.random.default_rng(seed)

    def path() -> tuple[str, ...]:
        a, b, c = random.permutation(6)[:3]
        return (f"e{a}", "r", f"e{b}", "s (inverse)", f"e{c}")

    samples = [Sample(str(i), f"q{random.integers(60)}", "x", gold=(path(),)) for i in range(40)]
    left, put = split(samples, aside, seed)
    assert sorted(s.id for s in (*left, *put)) == sorted(s.id for s in samples) and len(put) <= aside
    assert not {s.question for s in left} & {s.question for s in put}

    def walked(part: Sequence[Sample]) -> set[frozenset[Triple]]:
        return {frozenset(RelationPath(steps).triples) for s in part for steps in s.gold}

    assert not walked(left) & walked(put)
    assert split(samples, aside, seed) == (left, put)


def test_a_path_walked_backwards_is_the_same_path() -> None:
    there, back = ("A", "r", "B"), ("B", "r (inverse)", "A")
    samples = [Sample(str(i), f"q{i}", "x", gold=(steps,)) for i, steps in enumerate([there, back, ("A", "r", "C")])]
    for seed in range(5):
        _, put = split(samples, 2, seed)
        assert {s.id for s in put} in ({"0", "1"}, {"2"})


# -------------------------------------------------------------------------------------------- files


def test_samples_survive_their_file(tmp_path: Path) -> None:
    samples = [
        Sample("a", "Who?", "Änne", (("B", "r", "C"),), (("B", "r", "C"),), (Message("system", "Be brief."),)),
        Sample("b", "Hi", "Hello"),
    ]
    write_samples(samples, tmp_path / "new" / "s.jsonl")
    assert read_samples([tmp_path / "new" / "s.jsonl"]) == samples


def test_lines_of_other_forms_are_read(tmp_path: Path) -> None:
    lines = [
        {"question": "Who?", "answers": ["A", "B", "A"], "triples": [["x", "r", "y"]]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
    ]
    (tmp_path / "s.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    first, second = read_samples([tmp_path / "s.jsonl"])
    assert (first.id, first.answer, first.paths) == ("s.jsonl:1", "A, B", (("x", "r", "y"),))
    assert (second.question, second.answer, second.history) == ("Hi", "Yes", ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[1]", "a line must be a JSON object"),
        ('{"question": " ", "answer": "x"}', "question must be a text"),
        ('{"question": "x"}', "answer or answers is missing"),
        ('{"question": "x", "answer": "y", "paths": [["a", "b"]]}', "a path must be a list of entity"),
        ('{"question": "x", "answer": "y", "paths": [["a", "", "b"]]}', "every step of a path"),
        ('{"question": "x", "answer": "y", "paths": "a"}', "paths must be a list"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "messages must end"),
        ('{"messages": [{"role": "tool", "content": "Hi"}]}', "one of system, user, assistant"),
        ('{"messages": [], "paths": []}', "field 'paths' beside messages"),
        ('{"question": "x", "answer": "y", "path": [["a", "r", "b"]]}', "unknown field 'path'"),
        ('{"question": "x", "answer": "y", "answers": ["z"]}', "answer and answers are both given"),
        (
            '{"question": "x", "answer": "y", "paths": [["a", "r", "b"]], "triples": [["a", "r", "c"]]}',
            "paths and triples are both given",
        ),
        ('{"question": "x", "answer": "y", "paths": [["a", "r", "a"]]}', "comes to entity 'a' twice"),
        ('{"question": "x", "answer": "y", "gold": [["a", "r", "\\ud800"]]}', "not valid Unicode"),
    ],
)
def test_bad_lines_are_named_and_skipped_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str, message: str
) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text('{"question": "q", "answer": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_samples([file])
    assert f"{file}, line 2" in str(error.value) and "\n" not in str(error.value)
    assert len(read_samples([file], max_bad=1)) == 1
    assert f"{file}, line 2 is skipped" in caplog.text


def test_files_without_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_samples([tmp_path / "none.jsonl"])
    (tmp_path / "s.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no samples in"):
        read_samples([tmp_path / "s.jsonl"])


def test_command_makes_splits_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, out = tmp_path / "q.jsonl", tmp_path / "s.jsonl"
    questions.write_text(
        "\n".join(json.dumps(QUESTION | {"question": f"q{i}", "paths": [["France", f"r{i}", "x"]]}) for i in range(6))
    )
    assert main(["kg", str(questions), "--out", str(out), "--aside", "2"]) == 0
    assert len(read_samples([out])) == 4 and len(read_samples([tmp_path / "s.aside.jsonl"])) == 2
    (tmp_path / "g.tsv").write_text("a\tr\tb\nb\ts\tc\n")
    assert main(["graph", str(tmp_path / "g.tsv"), "--out", str(out), "--count", "3"]) == 0
    (tmp_path / "t.json").write_text(json.dumps({"Data": [TRIVIA]}))
    (tmp_path / "t.jsonl").write_text(json.dumps({"id": "t1", "triples": [list(t) for t in FACTS]}))
    assert main(["trivia", str(tmp_path / "t.json"), "--triples", str(tmp_path / "t.jsonl"), "--out", str(out)]) == 0
    assert main(["samples", str(out), "--out", str(tmp_path / "again.jsonl")]) == 0
    capsys.readouterr()
    for wrong in (
        ["--frobnicate"],
        ["kg", str(questions), "--out", str(out), "--pathz", "3"],
        ["kg", "none", "--out", "x"],
    ):
        assert main(wrong) == 1
        assert capsys.readouterr().err.count("\n") == 1
    for line in ("a\tr\n", "a\t \tb\n"):
        (tmp_path / "g.tsv").write_text(line)
        assert main(["graph", str(tmp_path / "g.tsv"), "--out", str(out)]) == 1
        assert "g.tsv, line 1: a triple must be" in capsys.readouterr().err


def test_what_cannot_be_put_aside_is_an_error_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples([Sample(str(i), f"q{i}", "x") for i in range(4)], tmp_path / "s.jsonl")
    out = tmp_path / "new" / "out.jsonl"
    command = ["samples", str(tmp_path / "s.jsonl"), "--out", str(out)]
    for more, message in (
        (["--aside", "2", "--aside-out", str(out.parent / ".." / "new" / "out.jsonl")], "are both"),
        (["--aside", "100"], "puts all 4 samples aside"),
        (["--aside-out", str(tmp_path / "aside.jsonl")], "no effect without --aside"),
    ):
        assert main([*command, *more]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.jsonl"]


def test_bad_lines_of_every_kind_are_counted_over_files_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = str(tmp_path / "s.jsonl")
    files = [tmp_path / "1.tsv", tmp_path / "2.tsv"]
    for file in files:
        file.write_text("a\tr\tb\n\na\tr\n")
    graph = ["graph", *map(str, files), "--out", out, "--count", "1", "--max-bad"]
    assert main([*graph, "1"]) == 1 and f"{files[1]}, line 3: a triple must be" in capsys.readouterr().err
    caplog.clear()
    assert main([*graph, "2"]) == 0 and all(f"{file}, line 3 is skipped" in caplog.text for file in files)

    entries, facts = tmp_path / "t.json", tmp_path / "t.jsonl"
    entries.write_text(json.dumps({"Data": [TRIVIA, {}]}))
    facts.write_text(json.dumps({"id": "t1", "triples": [list(t) for t in FACTS]}))
    trivia = ["trivia", str(entries), str(entries), "--triples", str(facts), "--out", out, "--max-bad"]
    assert main([*trivia, "1"]) == 1 and f"{entries}, entry 2: QuestionId" in capsys.readouterr().err
    caplog.clear()
    assert main([*trivia, "2"]) == 0 and caplog.text.count(f"{entries}, entry 2 is skipped") == 2

    questions = tmp_path / "q.jsonl"
    empty = {"paths": [["a", "r", " (inverse)"]]}
    questions.write_text(json.dumps(QUESTION) + "\n" + json.dumps(QUESTION | empty))
    assert main(["kg", str(questions), "--out", out, "--max-bad", "1"]) == 0
    assert f"{questions}, line 2 is skipped" in caplog.text


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    (tmp_path / "g.tsv").write_text("a\tr\tb\n", encoding="utf-8-sig")
    assert main(["graph", str(tmp_path / "g.tsv"), "--out", str(out), "--count", "1", "--hops", "1"]) == 0
    assert read_samples([out])[0].gold == (("a", "r", "b"),)
    (tmp_path / "b.jsonl").write_text(out.read_text(), encoding="utf-8-sig")
    assert read_samples([tmp_path / "b.jsonl"]) == read_samples([out])
    (tmp_path / "t.json").write_text(json.dumps({"Data": [TRIVIA]}), encoding="utf-8-sig")
    (tmp_path / "t.jsonl").write_text(json.dumps({"id": "t1", "triples": [list(t) for t in FACTS]}))
    trivia = ["trivia", str(tmp_path / "t.json"), "--triples", str(tmp_path / "t.jsonl")]
    assert main([*trivia, "--out", str(out)]) == 0


def test_files_that_cannot_be_read_or_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.jsonl"
    write_samples([Sample("a", "\ud800?", "x")], file)
    assert "\\ud800" in file.read_text() and read_samples([file]) == [Sample("a", "\ud800?", "x")]
    (tmp_path / "t.json").write_text('{"Data": 5}')
    (tmp_path / "t.jsonl").write_text("")
    for wrong, message in (
        (["samples", str(file), "--out", str(tmp_path)], "cannot be written"),
        (["samples", str(file), "--out", str(file / "x")], "cannot be written"),
        (
            ["trivia", str(tmp_path / "t.json"), "--triples", str(tmp_path / "t.jsonl"), "--out", str(file)],
            "its Data must be a list",
        ),
    ):
        assert main(wrong) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_what_shares_a_path_or_a_question_with_others_is_left_out(tmp_path: Path) -> None:
    path, other = ("a", "r", "b"), ("a", "s", "c")
    aside = Sample("0", "Who is it?", "b", (path, other), (path,))
    samples = [
        Sample("1", "who  is IT?", "c", (other,), (other,)),
        Sample("2", "Which?", "a", (("b", "r (inverse)", "a"),), (("b", "r (inverse)", "a"),)),
        Sample("3", "Whose?", "c", (path, other), (other,)),
        Sample("4", "Whom?", "b", (path,)),  # without gold paths all count
    ]
    write_samples(samples, tmp_path / "s.jsonl")
    write_samples([aside], tmp_path / "aside.jsonl")
    command = ["samples", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main([*command, "--apart", str(tmp_path / "aside.jsonl")]) == 0
    assert [sample.id for sample in read_samples([tmp_path / "out.jsonl"])] == ["3"]


# ------------------------------------------------------------------------------------------- batches


def example(n: int, targets: int = 3) -> Example:
    zero = np.zeros(n, np.int32)
    target = np.full(n, -1, np.int32)
    target[n - targets :] = 7
    return Example("", zero + n, zero, zero, zero, target)


@given(lengths=st.lists(st.integers(1, 512), min_size=1, max_size=30), devices=st.integers(1, 3))
def test_packing_loses_nothing(lengths: list[int], devices: int) -> None:
    rows = Rows.up_to(512)
    examples = [example(n, min(n, 5)) for n in lengths]
    microbatches = rows.pack(examples, devices)
    assert sum(m.tokens for m in microbatches) == sum(lengths)
    seen: list[int] = []
    for m in microbatches:
        length = m.size // devices
        assert length in rows.lengths and m.batch.target_N.shape == (targets_of(length) * devices,)
        owners = m.example_N[m.example_N >= 0]
        seen += list(dict.fromkeys(owners.tolist()))
        request = m.batch.request_T.reshape(devices, length)
        token, row = m.batch.token_T.reshape(devices, length), m.batch.row_N.reshape(devices, -1)
        for d in range(devices):
            own = m.example_N.reshape(devices, -1)[d]
            assert [lengths[i] for i in own[own >= 0]] == token[d][row[d][own >= 0]].tolist()
            assert (request[d] >= 0).sum() == sum(lengths[i] for i in set(own[own >= 0].tolist()))
    assert sorted(seen) == list(range(len(lengths)))


def test_rows_are_whole_blocks() -> None:
    assert Rows.up_to(1024).lengths == (256, 512, 768, 1024)
    with pytest.raises(ConfigError, match="multiple of 512"):
        Rows.up_to(700)
    assert not Rows.up_to(512).fits(example(513)) and not Rows.up_to(512).fits(example(300, 129))


def test_pairs_are_counted_as_the_mask_has_them() -> None:
    paths = (("B", "r", "C"), ("B", "r", "Cd", "s", "E"), ("F", "q", "C"))
    made = Coder(byte_tokenizer()).example(Sample("a", "Who?", "Ann", paths))
    order = np.arange(len(made))[:, None]
    seen = (order >= order.T) & ~((made.hide_from <= order) & (order < made.hide_until))
    assert pairs_of(made) == seen.sum() < len(made) * (len(made) + 1) // 2


@pytest.mark.slow
@given(samples=st.integers(1, 50), batch=st.integers(1, 9), plain=st.floats(0, 0.9), pool=st.integers(1, 20))
def test_every_sample_comes_once_an_epoch(samples: int, batch: int, plain: float, pool: int) -> None:
    order = Order(samples, batch, 2, plain, pool, seed=5)
    epochs = [[i for n in range(order.per_epoch) for i in order.at(e * order.per_epoch + n)] for e in range(2)]
    for items in epochs:
        assert sorted(i.index for i in items if not i.plain) == list(range(samples))
        drawn = [i.index for i in items if i.plain]
        assert abs(len(drawn) - plain * len(items)) <= 1 and all(i < pool for i in drawn)
    assert order.steps == 2 * order.per_epoch and order.at(0) == order.at(0)
    assert samples < 5 or epochs[0] != epochs[1]


def test_earlier_turns_come_before_the_question_and_behind_no_tree() -> None:
    history = (Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Hello"))
    made = Coder(byte_tokenizer()).example(Sample("a", "Who?", "Ann", (("B", "r", "C"),), history=history))
    text = byte_tokenizer().decode(made.token)
    assert text.index("Be kind.") < text.index("Hello") < text.index("B -r-> C") < text.index("Question: Who?")
    tree = len(byte_tokenizer().decode(made.token)[: text.index("B -r-> C")])
    assert tree > 0
