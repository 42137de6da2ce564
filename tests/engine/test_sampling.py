"""Sampled answers in the engine: their log-probabilities, and what decides the tokens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import RequestError
from ragjax.engine import Engine
from tests.support import tiny
from tests.support.forward import dense_logits

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 4},
    {"temperature": 1.2, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {65: 4.0}},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_log_probabilities_are_the_model_s(engine: Engine, options: dict[str, Any]) -> None:
    """Of a dense run over the prompt and the answer; bias, penalties and temperature do not count."""
    prompt = tiny.prompt(3)
    answer = engine.answer_prompt(prompt, strategy="full", max_tokens=24, logprobs=20, **options)
    tokens = np.concatenate([prompt.tokens, np.array(answer.tokens, np.int32)])
    dense_TV = np.asarray(dense_logits(tiny.decoder(), jnp.asarray(tokens)))[len(prompt) - 1 : -1].astype(np.float64)
    dense_TV -= np.logaddexp.reduce(dense_TV, axis=1, keepdims=True)
    assert [one.id for one in answer.logprobs] == list(answer.tokens)
    for one, log_V in zip(answer.logprobs, dense_TV, strict=True):
        assert one.logprob == pytest.approx(log_V[one.id], abs=5e-4)
        assert [value for _, _, value in one.top] == pytest.approx(np.sort(log_V)[::-1][:20].tolist(), abs=5e-4)


def test_a_seed_decides_the_tokens(engine: Engine) -> None:
    """Whoever else runs; without one, answers differ."""

    def ask(**options: Any) -> Any:
        return engine.begin_prompt(tiny.prompt(1), strategy="full", max_tokens=24, temperature=1.0, **options)

    alone = ask(seed=7).result().tokens
    together = [ask(seed=7), ask(seed=8), ask(), ask(), ask(seed=7, logprobs=1)]
    seven, eight, one, other, again = (future.result().tokens for future in together)
    assert alone == seven == again
    assert len({seven, eight, one, other}) == 4


def test_a_seed_below_zero_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="seed must be greater than or equal to 0"):
        engine.answer_prompt(tiny.prompt(), seed=-5, temperature=1.0, max_tokens=2)
