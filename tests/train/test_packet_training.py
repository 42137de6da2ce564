"""Soft tokens while they are trained: what the two models see, the loss and its slope, and a run that is served."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import Wrapper
from ragjax.engine import Engine
from ragjax.models.decoder import rotation_table
from ragjax.models.trained import PacketFile
from tests.support import tiny
from tests.support.plain import forward, tensors_of
from tests.support.reading import HEAD, READING, copied, log_softmax, seen_of, written
from tests.support.tiny import byte_tokenizer
from tests.support.training import ROWS, SMALL, lines, make_model, one_device, weights_of
from train.depft import main as depft_main
from train.example import Coder
from train.model import Model, gradient_program, loss_program
from train.packet import main
from train.sample import write_samples
from train.soft import Soft

SOFT = Soft(2, 3)
WRAPPER = SOFT.wrapper(SMALL.vocab_size)
CODER = Coder(byte_tokenizer(), wrapper=WRAPPER)
MODEL = Model(SMALL, one_device(), jnp.dtype("float32"), soft=SOFT, distil=True)
ROTATION = rotation_table(SMALL, 512)


SOFTLY, COPY = -1, -2


def places(wrapper: Wrapper = WRAPPER) -> np.ndarray:
    """Of READING's tokens with packets: the token of the plain text that each is, or `SOFTLY`, or `COPY`; int [n]."""
    token = written(READING, apart=False)[0]
    text = bytes(int(t) if t < 256 else 0 for t in token).decode(errors="replace")
    where: list[int] = []
    done = 0
    for number, passage in enumerate(READING.passages):
        body = (f"{passage.title}\n" if passage.title else "") + passage.text + "\n\n"
        begin = text.index(body, done)
        where += range(done, begin)
        done = begin + len(body)
        where += [COPY] * (len(HEAD) if number else 0)
        where += [*[SOFTLY] * len(wrapper.header), *range(begin, done), *[SOFTLY] * len(wrapper.trailer)]
    return np.array([*where, *range(done, len(token))])


def test_the_student_reads_packets_and_the_teacher_the_text() -> None:
    example, where = CODER.example(READING), places()
    soft, copy, bare = where == SOFTLY, where == COPY, np.flatnonzero(where >= 0)
    token, position, full, learned = written(READING, apart=False)
    text = ~copied(READING)
    apart = written(READING, apart=True)[2][np.ix_(text, text)]
    assert example.teacher is not None
    np.testing.assert_array_equal(example.token[bare], token)
    np.testing.assert_array_equal(where[bare], np.arange(len(token)))
    np.testing.assert_array_equal(example.token[soft], [*WRAPPER.header, *WRAPPER.trailer] * 3)
    np.testing.assert_array_equal(example.token[copy], [*token[: len(HEAD)]] * 2)
    np.testing.assert_array_equal(example.teacher.position[bare], position)
    taught = seen_of(example.teacher.hide_from, example.teacher.hide_until)
    np.testing.assert_array_equal(taught[np.ix_(bare, bare)], full)
    assert not taught[np.ix_(bare, np.flatnonzero(where < 0))].any(), "the teacher sees no soft token, and no copy"
    seen = seen_of(example.hide_from, example.hide_until)
    np.testing.assert_array_equal(seen[np.ix_(bare, bare)], apart)
    for row in bare[position >= position.max()]:
        assert seen[row][soft].all() and not seen[row][copy].any(), "questions see all packets whole, and no copy"
    first = int(bare[np.flatnonzero(np.diff(bare) > 1)[1]])  # the first passage's last token
    assert seen[first][soft].sum() == len(WRAPPER.header), "it sees its header and not its trailer"
    np.testing.assert_array_equal(np.flatnonzero(example.target >= 0), bare[[row for row, _ in learned]])
    assert example.position[bare[-1]] == position[-1] + 15, "soft tokens take positions of the student's"


def test_the_loss_is_the_divergence_of_packets_from_the_text() -> None:
    example = CODER.example(READING)
    (microbatch,) = ROWS.pack([example])
    soft_SE = np.random.default_rng(0).standard_normal((SOFT.tokens, SMALL.hidden_size)).astype(np.float32)
    trained, weights = {"soft": jnp.asarray(soft_SE)}, weights_of(SMALL)
    kl_N, same_N = (np.asarray(x) for x in loss_program(MODEL)(trained, weights, ROTATION, microbatch.batch))
    token, position, full, learned = written(READING, apart=False)
    teacher = log_softmax(forward(SMALL, tensors_of(SMALL), token, position, full)[[row for row, _ in learned]])
    tensors = dict(tensors_of(SMALL))
    tensors["model.embed_tokens.weight"] = np.concatenate([tensors["model.embed_tokens.weight"], soft_SE])
    seen = seen_of(example.hide_from, example.hide_until)
    rows = np.flatnonzero(example.target >= 0)
    logits = forward(SMALL, tensors, example.token, example.position, seen)[rows]
    student = log_softmax(logits[:, : SMALL.vocab_size])
    live = microbatch.example_N >= 0
    np.testing.assert_allclose(kl_N[live], (np.exp(teacher) * (teacher - student)).sum(1), rtol=1e-3, atol=1e-5)
    assert (same_N[live] == (teacher.argmax(1) == student.argmax(1))).all() and kl_N[live].min() > 1e-3


@pytest.mark.slow
def test_soft_tokens_alone_have_a_gradient() -> None:
    (microbatch,) = ROWS.pack([CODER.example(READING)])
    weights = weights_of(SMALL)
    trained = SOFT.init(weights["embedding"], seed=0)
    zeros = ({"soft": jnp.zeros_like(trained["soft"])}, jnp.zeros(2))
    gradient, counts = gradient_program(MODEL)(trained, weights, ROTATION, microbatch.batch, zeros)
    step = np.random.default_rng(1).standard_normal(trained["soft"].shape).astype(np.float32)

    def total(size: float) -> float:
        moved = {"soft": trained["soft"] + np.float32(size) * step}
        return float(loss_program(MODEL)(moved, weights, ROTATION, microbatch.batch)[0].sum())

    got = float((gradient["soft"] * step).sum())
    assert got == pytest.approx((total(1e-3) - total(-1e-3)) / 2e-3, rel=5e-3)
    assert float(counts[0]) == pytest.approx(total(0.0), rel=1e-5)
    assert np.abs(gradient["soft"]).min(1).max() > 0


@pytest.mark.slow
def test_a_run_learns_and_its_packets_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path / "cache"))
    model = make_model(tmp_path / "model")
    write_samples([READING], tmp_path / "s.jsonl")
    flags = [
        *("--model", str(model), "--data", str(tmp_path / "s.jsonl"), "--dev", str(tmp_path / "s.jsonl")),
        *("--row-tokens", "512", "--batch", "1", "--epochs", "24", "--lr", "0.3", "--dtype", "float32"),
        *("--no-progress", "--eval-every", "24"),
    ]
    out = tmp_path / "out"
    assert main([*flags, "--out", str(out), "--header", "2", "--trailer", "3"]) == 0
    devs = [line["dev_loss"] for line in lines(out) if "dev_loss" in line]
    assert devs[-1] < 0.9 * devs[0]
    assert len(PacketFile.load(out / "packet.safetensors").header_HE) == 2 and not (out / "model").exists()
    assert main([*flags, "--out", str(out)]) == 1, "a trained packet is not trained over"
    assert depft_main([*flags, "--out", str(tmp_path / "o"), "--target", "teacher"]) == 1, "without LoRA"
    with Engine.load(str(out / "packet.safetensors"), dtype="float32", compile=False) as engine:
        answer = engine.answer_prompt(tiny.prompt(), strategy="packet", max_tokens=2)
        assert answer.exact_to == "packet" and answer.tokens
        digests = {engine.identity}
    with Engine.load(str(model), dtype="float32", compile=False) as engine:
        digests.add(engine.identity)
    assert len(digests) == 2, "KV of a model with packets is its own"
    assert PacketFile.load(out / "packet.safetensors").about["model"] == str(model)
