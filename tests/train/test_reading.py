"""Samples of passages with several questions: files, what a model sees of them, and what it learns from a teacher.

The oracle writes such a sample out as texts, a byte a token, and says by name who sees whom.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import ConfigError, Message
from ragjax.models.decoder import rotation_table
from ragjax.models.trained import Adapter
from ragjax.prompting.chat import chat_prompt
from tests.support import tiny
from tests.support.plain import forward, tensors_of
from tests.support.reading import READING, copied, log_softmax, seen_of, written
from tests.support.tiny import byte_tokenizer
from tests.support.training import LORA, ROWS, SAMPLES, SMALL, adapters, one_device, weights_of
from train.answer import answered
from train.batch import Rows
from train.corpus import check_taught
from train.data import main as data_main
from train.example import Closing, Coder, Example, hits_of
from train.export import merge
from train.model import Model, gradient_program, loss_program
from train.reading import Question, Shape, from_questions, without
from train.sample import Asked, Passage, Sample, normal, read_samples, write_samples
from train.trainer import Trainer

CODER = Coder(byte_tokenizer())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("attention", ["dependency", "self"])
def test_each_passage_stands_alone_and_each_question_sees_all_of_them(attention: str, plain: bool) -> None:
    example = replace(CODER, attention=attention).example(READING, plain=plain)
    apart = attention == "dependency" and not plain
    token, position, seen, learned = written(READING, apart=apart)
    np.testing.assert_array_equal(example.token, token)
    np.testing.assert_array_equal(example.position, position)
    np.testing.assert_array_equal(seen_of(example.hide_from, example.hide_until), seen)
    target = np.full(len(token), -1)
    for row, what in learned:
        target[row] = what
    np.testing.assert_array_equal(example.target, target)
    assert example.teacher is not None
    own = np.flatnonzero(~copied(READING) if apart else np.ones(len(token), bool))
    _, position, seen, _ = written(READING, apart=False)
    np.testing.assert_array_equal(example.teacher.position[own], position)
    taught = seen_of(example.teacher.hide_from, example.teacher.hide_until)
    np.testing.assert_array_equal(taught[np.ix_(own, own)], seen)
    assert taught[own].sum() == seen.sum(), "the teacher sees no copy"


def test_a_long_passage_is_cut_as_knowledge_is() -> None:
    text = " ".join(f"Sentence {i} is here." for i in range(20))
    example = CODER.example(replace(READING, passages=(Passage("T", text),), also=()))
    text = bytes(int(x) for x in example.token if x < 256).decode()
    assert text.count("T\n") == 3, "three chunks, each under the title"


def test_earlier_turns_stand_before_the_passages() -> None:
    turns = (Message("user", "Hi."), Message("assistant", "Yes?"))
    example = CODER.example(replace(READING, history=turns, also=()))
    text = bytes(int(x) for x in example.token if x < 256).decode()
    assert text.index("Yes?") < text.index("She left.") < text.index("Question: Who?")


# ------------------------------------------------------------------------------------------ teacher


MODEL = Model(SMALL, one_device(), jnp.dtype("float32"), LORA, distil=True)
ROTATION = rotation_table(SMALL, 512)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_the_loss_is_the_divergence_from_full_attention(plain: bool) -> None:
    """Of two samples packed into one row: the dense float64 forward of both models, each with its own mask."""
    samples = (READING, replace(READING, id="s", passages=READING.passages[:2], also=READING.also[:1]))
    (microbatch,) = Rows.up_to(1024).pack([CODER.example(sample, plain=plain) for sample in samples])
    pairs, rotation = adapters(), rotation_table(SMALL, 1024)
    kl_N, same_N = (np.asarray(x) for x in loss_program(MODEL)(pairs, weights_of(SMALL), rotation, microbatch.batch))
    tensors = tensors_of(SMALL)
    for i, sample in enumerate(samples):
        token, position, seen, learned = written(sample, apart=not plain)
        student = log_softmax(forward(SMALL, merged(pairs), token, position, seen)[[row for row, _ in learned]])
        token, position, seen, learned = written(sample, apart=False)
        teacher = log_softmax(forward(SMALL, tensors, token, position, seen)[[row for row, _ in learned]])
        expected = (np.exp(teacher) * (teacher - student)).sum(1)
        np.testing.assert_allclose(kl_N[microbatch.example_N == i], expected, rtol=1e-3, atol=1e-5)
        assert (same_N[microbatch.example_N == i] == (teacher.argmax(1) == student.argmax(1))).all()
    assert kl_N[microbatch.example_N >= 0].min() > 0 and not kl_N[microbatch.example_N < 0].any()


def merged(pairs: dict) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """The model's tensors with their adapters, by the names that checkpoints have."""
    about = {part: {k: np.asarray(v) for k, v in pair.items()} for part, pair in pairs.items()}
    whole = merge(weights_of(SMALL), Adapter(about, LORA.rank, LORA.alpha, {}))
    return unstacked(whole)


def unstacked(whole: dict) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    tensors = dict(tensors_of(SMALL))
    for i in range(SMALL.num_layers):
        layer, at = {name: np.asarray(x[i]) for name, x in whole["layers"].items()}, f"model.layers.{i}."
        groups = SMALL.num_groups
        for name, part in (("q", slice(groups)), ("k", slice(groups, groups + 1)), ("v", slice(groups + 1, None))):
            tensors[f"{at}self_attn.{name}_proj.weight"] = layer["qkv"][:, part].reshape(-1, SMALL.hidden_size)
        tensors[f"{at}self_attn.o_proj.weight"] = layer["out"].reshape(SMALL.hidden_size, -1)
        gate_up = layer["gate_up"].reshape(2, -1, SMALL.hidden_size)
        tensors[f"{at}mlp.gate_proj.weight"], tensors[f"{at}mlp.up_proj.weight"] = gate_up
        tensors[f"{at}mlp.down_proj.weight"] = layer["down"]
    return tensors


def test_the_oracle_takes_merged_weights_apart_as_they_were() -> None:
    for name, x in unstacked(weights_of(SMALL)).items():
        np.testing.assert_array_equal(x, tensors_of(SMALL)[name], err_msg=name)


@pytest.mark.slow
def test_one_passage_and_plain_samples_teach_nothing_before_training() -> None:
    alone = replace(READING, passages=READING.passages[:1])
    fresh = LORA.init(weights_of(SMALL)["layers"], 0)
    for example in (CODER.example(alone), CODER.example(READING, plain=True), CODER.example(SAMPLES[2])):
        (microbatch,) = ROWS.pack([example])
        kl_N, _ = loss_program(MODEL)(fresh, weights_of(SMALL), ROTATION, microbatch.batch)
        np.testing.assert_allclose(np.asarray(kl_N), 0, atol=1e-6)


@pytest.mark.slow
def test_the_teacher_has_no_gradient() -> None:
    """The slope along a direction of the adapters, by differences of the loss itself."""
    (microbatch,) = ROWS.pack([CODER.example(READING)])
    weights, pairs, step = weights_of(SMALL), adapters(), adapters(1)
    zeros = ({n: {k: jnp.zeros_like(x) for k, x in p.items()} for n, p in pairs.items()}, jnp.zeros(2))
    gradient, counts = gradient_program(MODEL)(pairs, weights, ROTATION, microbatch.batch, zeros)

    def total(size: float) -> float:
        moved = {n: {k: x + jnp.float32(size) * step[n][k] for k, x in p.items()} for n, p in pairs.items()}
        return float(loss_program(MODEL)(moved, weights, ROTATION, microbatch.batch)[0].sum())

    got = sum(float((gradient[n][k] * step[n][k]).sum()) for n in step for k in step[n])
    assert got == pytest.approx((total(1e-2) - total(-1e-2)) / 2e-2, rel=2e-2)
    assert float(counts[0]) == pytest.approx(total(0.0), rel=1e-5)


def test_paths_have_no_teacher() -> None:
    with pytest.raises(ConfigError, match="sample a has paths"):
        check_taught([CODER.example(READING), CODER.example(SAMPLES[0])])
    check_taught([CODER.example(READING), CODER.example(SAMPLES[2])])


# -------------------------------------------------------------------------------------------- files


def test_samples_with_passages_survive_their_file(tmp_path: Path) -> None:
    write_samples([READING], tmp_path / "s.jsonl")
    assert read_samples([tmp_path / "s.jsonl"]) == [READING]


GOOD = {"question": "Q", "answer": "A", "passages": [{"title": "T", "text": "x"}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": [["a", "r", "b"]]}, "passages and paths are both given"),
        ({"passages": ["text"]}, "a passage must be an object"),
        ({"passages": [{"text": " "}]}, "text must be a text that is not empty"),
        ({"passages": [{"text": "x", "title": 3}]}, "title of a passage"),
        ({"passages": [], "also": [{"question": "Q", "answer": "A"}]}, "there are no passages"),
        ({"also": [{"question": "Q"}]}, "each of also must be"),
        ({"also": [{"question": "Q", "answer": ""}]}, "answer must be a text"),
    ],
)
def test_bad_samples_with_passages_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample.from_json({**GOOD, **change})


def questions(count: int) -> list[Question]:
    lines = [
        {
            "question": f"Q{i}?",
            "answers": [f"A{i}"],
            "passages": [
                {
                    "title": f"T{i}",
                    "text": f"Number {i} is the one that we look for here today.",
                    "is_supporting": True,
                },
                {"title": f"U{i}", "text": "Short."},
            ],
        }
        for i in range(count)
    ]
    return [Question.from_json(json.loads(json.dumps(line))) for line in lines]


def test_a_model_answers_for_itself() -> None:
    """Greedily, by full attention over the passages; the questions of a sample stay together."""
    steps: list[int] = []
    with tiny.engine() as engine:
        (made,) = answered(engine, [READING], 5, lambda: steps.append(1))
        assert steps == [1] and [one.question for one in made.asked] == [one.question for one in READING.asked]
        assert made.passages == READING.passages and made.id == READING.id
        hits = hits_of(engine.tokenizer, READING.passages)
        for one in made.asked:
            prompt = chat_prompt(engine.tokenizer, (Message("user", one.question),), hits)
            full = engine.answer_prompt(prompt, strategy="full", max_tokens=5)
            assert one.answer == full.text.strip() != ""


def test_questions_that_need_what_is_put_aside_are_not_learned() -> None:
    one, two, three = (Passage(name, f"Of {name}.") for name in ("A", "B", "C"))
    asked, again = Asked("Q?", "a"), Asked(" Of  WHAT?", "b")
    twin = Passage("Another title", "of  B.")
    aside = [Question(Asked("Of what?", "c"), (two,), ())]
    kept = without(
        [
            Question(asked, (one,), (two, twin, three)),
            Question(asked, (two, three), ()),
            Question(asked, (twin,), ()),
            Question(again, (one,), ()),
            Question(asked, (three,), (one,)),
        ],
        aside,
        {two},
    )
    assert kept == [Question(asked, (one,), (three,)), Question(asked, (three,), (one,))]


def test_what_the_template_writes_before_an_answer_is_learned_as_its_own_tokens() -> None:
    """Qwen3's template has an empty thought before the last answer, and not where generation starts."""
    tokenizer = byte_tokenizer()
    start, end, thought = (tokenizer.encode(name, special=True)[0] for name in ("<|start|>", "<|end|>", "<|pad|>"))
    closing = Closing("<|pad|>\n", int(end))
    assert closing.answer(tokenizer, "<|pad|>", int(start)).tolist() == [thought, 10, *b"<|pad|>", end]


def test_figures_of_a_whole_answer_need_examples_of_one() -> None:
    one, many = CODER.example(SAMPLES[0]), CODER.example(READING)
    assert (one.answers, many.answers) == (1, len(READING.asked))

    def told(examples: list[Example]) -> dict[str, float]:
        whole = SimpleNamespace(
            _rows=Rows((1024,)),
            _model=SimpleNamespace(devices=1, distil=False),
            _losses=lambda trained, frozen, rotation, batch: (np.full_like(batch.target_N, 2.0, float),) * 2,
            _frozen=None,
            _rotation=None,
        )
        return Trainer.evaluate(whole, {}, examples)  # type: ignore[arg-type]

    assert told([one]) == {"dev_loss": 2, "dev_accuracy": 2, "dev_logprob": -2 * one.targets, "dev_exact": 0}
    assert told([one, many]) == {"dev_loss": 2, "dev_accuracy": 2}


def test_samples_ask_what_their_passages_answer() -> None:
    made = from_questions(questions(9), Shape(passages=6, asked=6), 6, seed=1)
    assert made == from_questions(questions(9), Shape(passages=6, asked=6), 6, seed=1)
    assert made != from_questions(questions(9), Shape(passages=6, asked=6), 6, seed=2)
    for sample in made:
        texts = {p.title: p.text for p in sample.passages}
        assert len(sample.asked) == 6 and len(set(sample.passages)) == len(sample.passages) <= 6
        real = [a for a in sample.asked if a.question.startswith("Q")]
        assert len(real) == 3 and all(f"T{a.question[1:-1]}" in texts for a in real)
        for asked in sample.asked:
            if asked not in real:
                assert any(asked.answer in text for text in texts.values())
    asked = [a.question for sample in made[:3] for a in sample.asked if a.question.startswith("Q")]
    assert sorted(asked) == sorted(f"Q{i}?" for i in range(9)), "none twice before all have been asked"


def test_command_makes_samples_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "Q?", "answers": ["A"], "passages": [{"text": "A b c."}]}) + "\n")
    assert data_main(["text", str(file), "--out", str(tmp_path / "out.jsonl"), "--count", "3", "--asked", "4"]) == 0
    made = read_samples([tmp_path / "out.jsonl"])
    assert len(made) == 3 and {len(sample.asked) for sample in made} == {4}
    file.write_text(json.dumps({"question": "Q?", "answers": [], "passages": [{"text": "A b c."}]}) + "\n")
    assert data_main(["text", str(file), "--out", str(tmp_path / "out.jsonl")]) == 1
    assert "answers is missing" in capsys.readouterr().err


def test_questions_are_put_aside_and_not_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A question comes back in many samples, so samples that share one could not be told apart."""
    file, out = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"question": f"Q{i}?", "answers": ["A"], "passages": [{"title": f"T{i}", "text": f"Fact {i}."}]}
        for i in range(9)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["text", str(file), "--out", str(out), "--count", "20", "--asked", "4"]
    assert data_main([*command, "--aside", "2"]) == 0
    asked = [
        {a.question for sample in read_samples([found]) for a in sample.asked if a.question.startswith("Q")}
        for found in (out, tmp_path / "out.aside.jsonl")
    ]
    assert len(asked[0]) == 5 and len(asked[1]) == 4 and not asked[0] & asked[1]
    assert len(read_samples([out])) == 20 and len(read_samples([tmp_path / "out.aside.jsonl"])) == 2
    titles = {p.title for sample in read_samples([out]) for p in sample.passages}
    assert len(titles) == 5, "passages of the questions put aside are not learned either"
    assert data_main([*command, "--aside", "5"]) == 1
    assert "--aside 5 takes 10 of 9 questions" in capsys.readouterr().err


def test_templates_do_not_ask_what_is_put_aside(tmp_path: Path) -> None:
    """Paragraphs of an article have its title, so templates of two of them may ask the same."""
    file, out = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    passages = [{"title": f"Article {i % 3}", "text": f"He was born in town {i} of the north."} for i in range(12)]
    lines = [{"question": f"Q{i}?", "answers": ["A"], "passages": [p]} for i, p in enumerate(passages)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert data_main(["text", str(file), "--out", str(out), "--count", "20", "--asked", "6", "--aside", "2"]) == 0
    found = (out, tmp_path / "out.aside.jsonl")
    learned, held = ({normal(a.question) for s in read_samples([f]) for a in s.asked} for f in found)
    assert any(question.startswith("what do the passages say") for question in held)
    assert not learned & held
