"""transformers' `generate` with random weights, as a worker of `e2e`."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from wire import serve


class State:
    """The loaded model."""

    model: PreTrainedModel | None = None


def load(family: str, config: Mapping[str, Any], device: str, dtype: str) -> Mapping[str, Any]:
    State.model = None
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    kind = getattr(torch, dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device(device):
            made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    State.model = made.to(device=device, dtype=kind).eval()
    parameters = sum(p.numel() for p in State.model.parameters())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"versions": versions, "parameters": parameters}


@torch.inference_mode()
def generate(context: int, batch: int, new: int, runs: int) -> Mapping[str, Any]:
    """Median milliseconds to the first token of random prompts, and the tokens a second of all after it."""
    assert State.model is not None
    draw = torch.Generator().manual_seed(context)
    tokens = torch.randint(3, State.model.config.vocab_size, (batch, context), generator=draw).to(State.model.device)
    took(tokens, min(new, 2))
    first = statistics.median(took(tokens, 1) for _ in range(runs))
    found: dict[str, Any] = {"ttft_ms": first * 1e3, "decode_tokens_per_s": None}
    if new > 1:
        whole = statistics.median(took(tokens, new) for _ in range(runs))
        if whole > first:  # on a busy machine with a tiny model it may not be
            found["decode_tokens_per_s"] = batch * (new - 1) / (whole - first)
    return found


def took(tokens: torch.Tensor, new: int) -> float:
    synchronize(tokens.device)
    began = time.perf_counter()
    State.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new, min_new_tokens=new,
        pad_token_id=0,
    )  # fmt: skip
    synchronize(tokens.device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    serve({"load": load, "generate": generate})
