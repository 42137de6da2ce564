"""ragjax as a worker of `ttft`: the engine in a process of its own, fed with ready prompts. Runs in our environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from wire import serve

from ragjax import core
from ragjax.engine import Engine


class Worker:
    def load(self, model: str, dtype: str) -> Mapping[str, Any]:
        """Start the engine without knowledge: retrieval is no part of what rivals do."""
        self.engine = Engine.load(model, knowledge=None, dtype=dtype, progress=False)
        return {}

    def clear(self) -> Mapping[str, Any]:
        self.engine.clear_cache()
        return {}

    def generate(self, segments: list[tuple[str, str, list[int]]], strategy: str, new: int) -> Mapping[str, Any]:
        """Greedy tokens after a prompt of (id, kind, tokens); the engine's own timings, from arrival on."""
        prompt = core.Prompt(
            tuple(core.Segment(name, core.Kind(kind), np.asarray(tokens, np.int32)) for name, kind, tokens in segments)
        )
        answer = self.engine.answer_prompt(prompt, strategy=strategy, max_tokens=new)
        after_first = len(answer.tokens) - 1
        seconds = (answer.timings.total - answer.timings.ttft) / 1e3
        return {
            "ttft_ms": answer.timings.ttft, "decode_tokens_per_s": after_first / seconds if after_first else None,
            "tokens": list(answer.tokens), "reused_tokens": answer.cached_tokens,
            "overhead_ms": self.engine.stats()["overhead_ms_last"],
        }  # fmt: skip


if __name__ == "__main__":
    serve(Worker())
