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


class Worker:
    model: PreTrainedModel | None = None

    def load(self, family: str, config: Mapping[str, Any], device: str, dtype: str) -> Mapping[str, Any]:
        self.model = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        kind = getattr(torch, dtype)
        before = torch.get_default_dtype()
        torch.set_default_dtype(kind)
        try:
            with torch.device(device):
                shape = AutoConfig.for_model(family, **config)
                made = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(before)
        self.model = made.to(device=device, dtype=kind).eval()
        parameters = sum(p.numel() for p in self.model.parameters())
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"versions": versions, "parameters": parameters}

    @torch.inference_mode()
    def generate(self, context: int, batch: int, new: int, runs: int) -> Mapping[str, Any]:
        """Median milliseconds to the first token of random prompts, and the tokens a second of all after it."""
        assert self.model is not None
        draw = torch.Generator().manual_seed(context)
        tokens = torch.randint(3, self.model.config.vocab_size, (batch, context), generator=draw).to(self.model.device)
        self._took(tokens, min(new, 2))
        first = statistics.median(self._took(tokens, 1) for _ in range(runs))
        found: dict[str, Any] = {"ttft_ms": first * 1e3, "decode_tokens_per_s": None}
        if new > 1:
            whole = statistics.median(self._took(tokens, new) for _ in range(runs))
            if whole > first:  # on a busy machine with a tiny model it may not be
                found["decode_tokens_per_s"] = batch * (new - 1) / (whole - first)
        return found

    def _took(self, tokens: torch.Tensor, new: int) -> float:
        synchronize(tokens.device)
        began = time.perf_counter()
        lengths = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        self.model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **lengths)
        synchronize(tokens.device)
        return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    serve(Worker())
