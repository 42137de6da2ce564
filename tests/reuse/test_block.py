"""naive under a model that was trained to read chunks that stand alone: what its answers are exact to."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import Prompt
from ragjax.engine import Engine
from ragjax.models.hub import LocalModel
from ragjax.models.trained import BLOCK, reads_blocks
from ragjax.reuse import strategies
from ragjax.reuse.naive import Naive
from tests.support import tiny
from train.lora import Lora

pytestmark = pytest.mark.engine(extra=[Naive("block")])


def test_answers_over_several_chunks_are_exact_to_block_attention(engine: Engine) -> None:
    system, a, b, c, question = tiny.prompt(5).segments
    cold = engine.answer_prompt(Prompt((system, a, b, c, question)), strategy="naive", max_tokens=2, want_logits=True)
    warm = engine.answer_prompt(Prompt((system, a, b, c, question)), strategy="naive", max_tokens=2, want_logits=True)
    assert cold.exact_to == warm.exact_to == "block" and warm.cached_tokens > cold.cached_tokens
    np.testing.assert_array_equal(cold.logits, warm.logits)
    moved = engine.answer_prompt(Prompt((system, c, a, question)), strategy="naive", max_tokens=1)
    assert moved.exact_to == "block" and moved.cached_tokens == moved.prompt_tokens - len(question)


def test_one_chunk_alone_is_exact_to_full_attention(engine: Engine) -> None:
    system, a, *_, question = tiny.prompt(6).segments
    assert engine.answer_prompt(Prompt((system, a, question)), strategy="naive", max_tokens=1).exact_to == "full"


def test_repaired_answers_and_other_models_promise_nothing(engine: Engine) -> None:
    prompt = tiny.prompt(7)
    assert engine.answer_prompt(prompt, strategy="blend", max_tokens=1).exact_to is None
    with tiny.engine() as untrained:
        assert untrained.answer_prompt(prompt, strategy="naive", max_tokens=1).exact_to is None


def test_the_adapter_says_what_it_was_trained_for(tmp_path: Path) -> None:
    lora = Lora(2, 4.0)
    pairs = {"out": {"a": jnp.zeros((1, 2, 3)), "b": jnp.zeros((1, 3, 2))}}
    trained, other = tmp_path / "trained.safetensors", tmp_path / "other.safetensors"
    lora.save(pairs, trained, {"attention": BLOCK})
    lora.save(pairs, other, {})
    assert reads_blocks(LocalModel("m", tmp_path, "huggingface", trained))
    assert not reads_blocks(LocalModel("m", tmp_path, "huggingface", other))
    assert not reads_blocks(LocalModel("m", tmp_path, "huggingface"))
    assert strategies(blocks=True)["naive"]._exact_to == "block" and strategies()["naive"]._exact_to is None
