"""llama.cpp as a worker of `ttft`, through its Python binding. Runs in the environment `llamacpp`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from wire import serve

CONTEXT = 4096


class State:
    """The loaded model."""

    model: llama_cpp.Llama


def load(model: str, threads: int) -> Mapping[str, Any]:
    """Load a .gguf file; flash attention is on, as llama.cpp has it where it can, and faster here."""
    State.model = llama_cpp.Llama(
        model, n_ctx=CONTEXT, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )
    features = llama_cpp.llama_print_system_info().decode()
    return {"versions": {"llama-cpp-python": llama_cpp.__version__}, "features": features}


def requantize(source: str, target: str, threads: int) -> Mapping[str, Any]:
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


def generate(tokens: list[int], new: int, keep: int = 0) -> Mapping[str, Any]:
    """Greedy tokens after a prompt: milliseconds to the first, and tokens a second from then on.

    keep: how many tokens at the start are in the cache from the call before, and are not computed again.
    """
    model = State.model
    start = time.perf_counter()
    model.n_tokens = keep  # `eval` drops what the cache holds behind
    model.eval(tokens[keep:])
    chosen = [greedy(model)]
    first = time.perf_counter()
    while len(chosen) < new:
        model.eval(chosen[-1:])
        chosen.append(greedy(model))
    seconds = time.perf_counter() - first
    rate = (new - 1) / seconds if new > 1 else None
    return {"ttft_ms": (first - start) * 1e3, "decode_tokens_per_s": rate, "tokens": chosen}


def greedy(model: llama_cpp.Llama) -> int:
    row = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(row, shape=(model.n_vocab(),)).argmax())


if __name__ == "__main__":
    serve({"load": load, "requantize": requantize, "generate": generate})
