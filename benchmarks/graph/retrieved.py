"""PQCache's answers over paths written out, and the time that its index takes (DepCache, Figure 16)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax  # type: ignore[import-untyped]

from benchmarks.baseline.attention.pqcache import CENTROIDS, fit
from benchmarks.baseline.strategy.streaming import SHARE
from benchmarks.common.samples import Progress
from benchmarks.compression.laboratory import Laboratory
from benchmarks.graph.question import FORCED, Question
from benchmarks.quality import score
from benchmarks.quality.score import column, compared
from ragjax.models.tokenizer import Tokenizer


def rows(
    laboratory: Laboratory,
    tokenizer: Tokenizer,
    name: str,
    asked: Sequence[tuple[Question, NDArray[np.int32]]],
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """A row for all keys and one for those retrieved, a fifth; asked: questions and the tokens of their prompts."""
    found: dict[str, list[Mapping[str, float]]] = {"self": [], "pqcache": []}
    for question, tokens in asked:
        prefill = laboratory.prefill(tokens)
        count, budget = jnp.asarray(len(tokens)), jnp.asarray(int(SHARE * len(tokens)))
        for _ in range(2):  # the first compiles
            start = time.perf_counter()
            indexed = [jax.block_until_ready(fit(k_NKD, count, budget, CENTROIDS)) for k_NKD in prefill.k_LNKD]
            index_ms = (time.perf_counter() - start) * 1e3
        reference = tokenizer.encode(question.answers[0], special=False, continued=True)[:FORCED]
        for method, kept in (("self", laboratory.everything(prefill)), ("pqcache", indexed)):
            logits = laboratory.logits(prefill, kept, reference.tolist())[:-1]
            logprob = log_softmax(np.stack([prefill.logits_V, *logits]).astype(np.float64), axis=-1)
            said = tokenizer.decode(laboratory.answer(prefill, kept, frozenset(tokenizer.eos_ids)))
            found[method].append({
                "accuracy": score.answered(said, question.answers),
                "logprob": float(logprob[np.arange(len(reference)), reference].mean()),
                "top1": float((logprob.argmax(-1) == reference).mean()), "prompt_tokens": len(tokens),
                "index_ms": index_ms if method == "pqcache" else 0.0,
            })  # fmt: skip
        progress.step(f"{name}: {question.id}")
    for method, samples in found.items():
        yield {
            "part": "pqcache", "set": name, "method": method, "positions": None, "n": len(samples),
            "prompt_tokens": float(np.mean(column(samples, "prompt_tokens"))),
            "index_ms": float(np.median(column(samples, "index_ms"))),
            **compared(samples, ("accuracy", "logprob", "top1"), {"minus_self": found["self"]}),
        }  # fmt: skip
