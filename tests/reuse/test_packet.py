"""Chunks in packets: soft tokens whose embeddings are those of known tokens must act as these tokens do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from ragjax.core import ConfigError, Divergence, Kind, Prompt, RequestError, Wrapper
from ragjax.engine import Engine
from ragjax.models.trained import PACKET_FORMAT, PacketFile
from ragjax.quality.contract import Contract
from ragjax.quality.report import Setting, divergence
from ragjax.reuse.naive import Packet
from ragjax.runner.runner import Runner
from ragjax.schedule import decoding
from tests.support import tiny
from tests.support.serving import wait_for
from train.soft import Soft

WRAPPER = Wrapper.of(tiny.CONFIG.vocab_size, 2, 3)
LIKE = {
    WRAPPER.header[0]: 65,
    WRAPPER.header[1]: 66,
    WRAPPER.trailer[0]: 67,
    WRAPPER.trailer[1]: 68,
    WRAPPER.trailer[2]: 65,
}
"""Tokens of text that have the soft ones' embeddings."""
SOFT = np.random.default_rng(0).standard_normal((2, tiny.CONFIG.hidden_size)).astype(np.float32)


def wrapped(header: np.ndarray, trailer: np.ndarray) -> Runner:
    """A runner whose model has these embeddings of a packet."""
    decoder = tiny.decoder()
    PacketFile(header, trailer, {}).apply(decoder)
    return tiny.make_runner(decoder)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    rows = np.asarray(tiny.decoder().embedding[...], np.float32)[list(LIKE.values())]
    with tiny.engine(wrapped(rows[:2], rows[2:]), extra=[Packet(WRAPPER)]) as made:
        yield made


def spelled(prompt: Prompt) -> Prompt:
    """The prompt with every soft token written out."""

    def text(tokens: np.ndarray) -> np.ndarray:
        return np.array([LIKE.get(int(token), int(token)) for token in tokens], np.int32)

    return Prompt(tuple(replace(s, tokens=text(s.tokens)) for s in WRAPPER.dressed(prompt).segments))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_packets_read_as_their_embeddings_say(engine: Engine, seed: int) -> None:
    prompt = tiny.prompt(seed)
    written = engine.answer_prompt(spelled(prompt), strategy="naive", max_tokens=6, want_logits=True)
    cold = engine.answer_prompt(prompt, strategy="packet", max_tokens=6, want_logits=True)
    warm = engine.answer_prompt(prompt, strategy="packet", max_tokens=6, want_logits=True)
    np.testing.assert_allclose(cold.logits, written.logits, atol=1e-5)
    np.testing.assert_array_equal(cold.logits, warm.logits)
    assert cold.tokens == warm.tokens == written.tokens
    assert warm.prompt_tokens == len(prompt) + 3 * 5 and warm.cached_tokens == warm.prompt_tokens - 18
    bare = engine.answer_prompt(prompt, strategy="naive", max_tokens=1, want_logits=True)
    assert np.abs(bare.logits - cold.logits).max() > 1e-3, "the packets must matter for this test to tell"


def test_packets_serve_at_any_place_and_say_what_they_are_exact_to(engine: Engine) -> None:
    system, a, b, c, question = tiny.prompt(5).segments
    first = engine.answer_prompt(Prompt((system, a, b, c, question)), strategy="packet", max_tokens=1)
    moved = Prompt((system, c, a, question))
    answer = engine.answer_prompt(moved, strategy="packet", max_tokens=4, want_logits=True)
    assert answer.cached_tokens == answer.prompt_tokens - len(question)
    written = engine.answer_prompt(spelled(moved), strategy="naive", max_tokens=4, want_logits=True)
    np.testing.assert_allclose(answer.logits, written.logits, atol=1e-5)
    assert first.exact_to == answer.exact_to == "packet"


def test_a_chunk_that_stands_alone_needs_no_packet(engine: Engine) -> None:
    system, a, *_, question = tiny.prompt(6).segments
    answer = engine.answer_prompt(Prompt((system, a, question)), strategy="packet", max_tokens=4, want_logits=True)
    full = engine.answer_prompt(Prompt((system, a, question)), strategy="full", max_tokens=4, want_logits=True)
    assert answer.exact_to == "full" and answer.prompt_tokens == full.prompt_tokens
    np.testing.assert_allclose(answer.logits, full.logits, atol=1e-5)


def test_other_strategies_see_no_packet_and_nothing_says_one(engine: Engine) -> None:
    prompt = tiny.prompt(7)
    answer = engine.answer_prompt(prompt, strategy="prefix", max_tokens=8, want_logits=True)
    assert answer.prompt_tokens == len(prompt) and answer.logits is not None
    assert answer.logits.shape == (tiny.CONFIG.vocab_size,)
    with tiny.engine() as plain:
        other = plain.answer_prompt(prompt, strategy="prefix", max_tokens=8, want_logits=True)
        assert other.tokens == answer.tokens
        with pytest.raises(RequestError, match="the model has no packets"):
            plain.answer_prompt(prompt, strategy="packet", max_tokens=1)


def test_penalties_look_at_the_text_alone(engine: Engine) -> None:
    prompt = tiny.prompt(9)
    given = {"strategy": "packet", "max_tokens": 6, "repetition_penalty": 1.5, "want_logits": True}
    answer = engine.answer_prompt(prompt, **given)
    assert len(answer.tokens) == 6 and answer.logits is not None
    penalised = np.where(answer.logits > 0, answer.logits / 1.5, answer.logits * 1.5)
    said = np.isin(np.arange(len(answer.logits)), prompt.tokens)
    assert answer.tokens[0] == np.argmax(np.where(said, penalised, answer.logits))


def test_a_dressed_prompt_forgets_what_its_chunks_have_without_packets() -> None:
    prompt = tiny.prompt(8)
    marked = Prompt(tuple(replace(s, behind=b"x") if s.kind is Kind.CHUNK else s for s in prompt.segments))
    chunks = [s for s in WRAPPER.dressed(marked).segments if s.kind is Kind.CHUNK]
    assert all(not s.behind for s in chunks)
    np.testing.assert_array_equal(chunks[0].tokens[2:-3], prompt.segments[1].tokens)


def test_a_file_of_packets_is_read_back_and_others_are_refused(tmp_path: Path) -> None:
    soft = Soft(2, 3)
    trained = soft.init(tiny.decoder().embedding[...], seed=1)
    soft.save(trained, tmp_path / "p.safetensors", {"model": "m"})
    packet = PacketFile.load(tmp_path / "p.safetensors")
    np.testing.assert_array_equal(np.concatenate([packet.header_HE, packet.trailer_HE]), trained["soft"])
    assert packet.about == {"model": "m"} and len(packet.wrapper(9).trailer) == 3 and packet.wrapper(9).header[0] == 9
    wide = {"header": np.zeros((1, 7), np.float32), "trailer": np.zeros((1, 7), np.float32)}
    with pytest.raises(ConfigError, match="have 7 components, the model's"):
        PacketFile(wide["header"], wide["trailer"], {}).apply(tiny.decoder())
    save_file(wide, tmp_path / "q.safetensors", {"format": "other"})
    with pytest.raises(ConfigError, match="not a packet"):
        PacketFile.load(tmp_path / "q.safetensors")
    save_file({"header": wide["header"]}, tmp_path / "r.safetensors", {"format": PACKET_FORMAT})
    with pytest.raises(ConfigError, match="cannot be read as a packet"):
        PacketFile.load(tmp_path / "r.safetensors")
    with pytest.raises(ConfigError, match="a packet needs soft tokens"):
        Soft(0, 0)


@pytest.mark.slow
def test_embeddings_of_text_stay_as_they_are() -> None:
    decoder = tiny.decoder("bfloat16")
    before = decoder.embed(jnp.arange(tiny.CONFIG.vocab_size))
    rows = np.full((5, tiny.CONFIG.hidden_size), 0.25, np.float32)
    PacketFile(rows[:2], rows[2:], {}).apply(decoder)
    after = decoder.embed(jnp.arange(tiny.CONFIG.vocab_size + 5))
    np.testing.assert_array_equal(after[:-5], before)
    np.testing.assert_array_equal(after[-5:], rows)


@pytest.mark.slow
def test_shadow_replay_reads_the_prompt_without_packets() -> None:
    seen: list[float] = []
    contract = Contract(Setting("packet"), "float32", shadow_rate=1.0)
    observe = contract.observe

    def note(setting: Setting, exact: bool, divergence: Divergence, covered: bool) -> None:
        observe(setting, exact, divergence, covered)
        seen.append(divergence.kl)

    contract.observe = note
    prompt = tiny.prompt(3)
    with tiny.engine(
        wrapped(SOFT, np.repeat(SOFT[:1], 3, 0)), extra=[Packet(WRAPPER)], contract=contract, strategy="packet"
    ) as made:
        answer = made.answer_prompt(prompt, strategy="packet", max_tokens=6)
        wait_for(lambda: len(seen) == 1)
        said = np.array([*answer.tokens, 0][:6], np.int32)
        full = made.answer_prompt(prompt, strategy="full", continuation=said, max_tokens=1)
        own = made.answer_prompt(prompt, strategy="packet", continuation=said, max_tokens=1)
    assert seen[0] == pytest.approx(divergence(full.scores, own.scores).kl, rel=1e-3)


def test_proposed_tokens_are_those_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft tokens stand in the prompt as it is read, and a grammar cannot follow them."""
    seen: list[np.ndarray] = []
    propose = decoding.propose

    def noted(tokens: np.ndarray, most: int) -> np.ndarray:
        seen.append(tokens)
        return propose(tokens, most)

    monkeypatch.setattr(decoding, "propose", noted)
    with tiny.engine(wrapped(SOFT, np.repeat(SOFT[:1], 3, 0)), extra=[Packet(WRAPPER)], lookup=4) as made:
        made.answer_prompt(tiny.prompt(4), strategy="packet", max_tokens=4)
    assert seen and all(tokens.max() < tiny.CONFIG.vocab_size for tokens in seen)
