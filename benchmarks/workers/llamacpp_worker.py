"""llama.cpp as a worker of `ttft`, through its Python binding. Runs in the environment `llamacpp`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from wire import greedy, serve

CONTEXT = 4096


class Worker:
    def load(self, model: str, threads: int) -> Mapping[str, Any]:
        """Load a .gguf file; flash attention is on, as llama.cpp has it where it can, and faster here."""
        settings: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self.model = llama_cpp.Llama(model, n_ctx=CONTEXT, n_batch=512, flash_attn=True, **settings)
        features = llama_cpp.llama_print_system_info().decode()
        return {"versions": {"llama-cpp-python": llama_cpp.__version__}, "features": features}

    def requantize(self, source: str, target: str, threads: int) -> Mapping[str, Any]:
        """Write the model `source` as Q4_0 to `target`, unless that is there already."""
        if Path(target).exists():
            return {}
        part = f"{target}.{os.getpid()}.part"
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.nthread = threads
        settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        settings.allow_requantize = True
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        if llama_cpp.llama_model_quantize(source.encode(), part.encode(), settings):
            raise RuntimeError(f"{source} cannot be requantised")
        Path(part).rename(target)
        return {}

    def generate(self, tokens: list[int], new: int, keep: int = 0) -> Mapping[str, Any]:
        """Greedy tokens after a prompt. keep: how many tokens at the start are in the cache from the call before."""

        def first() -> int:
            self.model.n_tokens = keep  # `eval` drops what the cache holds behind
            return self._likeliest(tokens[keep:])

        return greedy(new, first, lambda token: self._likeliest([token]))

    def _likeliest(self, tokens: list[int]) -> int:
        self.model.eval(tokens)
        row = llama_cpp.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.ctypeslib.as_array(row, shape=(self.model.n_vocab(),)).argmax())


if __name__ == "__main__":
    serve(Worker())
