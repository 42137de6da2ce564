"""Passages are trained as they are served: what the engine says is what the arrangement of training says."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import Message, Wrapper
from ragjax.models.decoder import Decoder
from ragjax.models.trained import PacketFile
from ragjax.prompting.chat import chat_prompt
from ragjax.reuse.naive import Packet
from tests.support import tiny
from tests.support.plain import forward, tensors_of
from tests.support.reading import READING, seen_of
from train.example import Coder, Example, hits_of
from train.sample import Sample

WRAPPER = Wrapper.of(tiny.CONFIG.vocab_size, 2, 3)
SOFT_SE = np.random.default_rng(0).standard_normal((5, tiny.CONFIG.hidden_size)).astype(np.float32)
TURNS = (Message("user", "Hello."), Message("assistant", "Yes?"))
FEW = replace(READING, also=())


@pytest.mark.slow
@pytest.mark.parametrize("packets", [False, True])
@pytest.mark.parametrize(
    "sample",
    [FEW, replace(FEW, passages=FEW.passages[:1]), replace(FEW, history=TURNS)],
    ids=["three", "one", "behind turns"],
)
def test_the_engine_says_what_the_arrangement_of_training_says(sample: Sample, packets: bool) -> None:
    tokenizer = tiny.byte_tokenizer()
    coder = Coder(tokenizer, wrapper=WRAPPER if packets else None)
    example = coder.example(sample)
    expected = student(example)
    prompt = chat_prompt(
        tokenizer, (*sample.history, Message("user", sample.question)), hits_of(tokenizer, sample.passages)
    )
    target = example.target[example.target >= 0]
    decoder = Decoder.from_tensors(tiny.CONFIG, tensors_of(tiny.CONFIG), jnp.dtype("float32"))
    PacketFile(SOFT_SE[:2], SOFT_SE[2:], {}).apply(decoder)
    runner = tiny.make_runner(decoder)
    with tiny.engine(runner, extra=[Packet(WRAPPER)]) as engine:
        for _ in range(2):  # cold, and then from the cache
            answer = engine.answer_prompt(
                prompt, strategy="packet" if packets else "naive", continuation=target, max_tokens=1
            )
            assert answer.scores is not None
            np.testing.assert_allclose(answer.scores, expected, rtol=1e-3, atol=1e-4)


def student(example: Example) -> np.ndarray:
    """Logits [targets, vocabulary] that predict the learned tokens, from a dense forward."""
    tensors = dict(tensors_of(tiny.CONFIG))
    embedding = np.concatenate([tensors["model.embed_tokens.weight"], SOFT_SE])
    tensors["model.embed_tokens.weight"] = embedding
    seen = seen_of(example.hide_from, example.hide_until)
    logits = forward(tiny.CONFIG, tensors, example.token, example.position, seen)
    return logits[example.target >= 0][:, : tiny.CONFIG.vocab_size]
