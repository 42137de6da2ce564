"""OpenVINO GenAI as a worker of `ttft`. Runs in the environment `openvino`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino
import openvino_genai
from wire import serve

CACHE_GB = 1


class Worker:
    def load(self, model: str, threads: int, precision: str, prefix: bool = False) -> Mapping[str, Any]:
        """Load a .gguf file to compute in `precision` ("bf16" or "f32"); KV is as OpenVINO chooses.

        prefix: whether what two prompts begin with is reused.
        """
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = prefix
        scheduler.cache_size = CACHE_GB
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **settings)
        kv = openvino.Core().get_property("CPU", "KV_CACHE_PRECISION").to_string()
        computes = f"{precision}, KV {kv}"
        return {"versions": {"openvino-genai": openvino_genai.__version__, "openvino computes in": computes}}

    def generate(self, tokens: list[int], new: int) -> Mapping[str, Any]:
        """Greedy tokens after a prompt: milliseconds to the first, and tokens a second from then on."""
        ids = np.asarray([tokens], np.int64)
        prompt = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = new, True, False
        start = time.perf_counter()
        answer = self.pipeline.generate(prompt, settings)
        total_ms = (time.perf_counter() - start) * 1e3
        first_ms = answer.perf_metrics.get_ttft().mean
        rate = (new - 1) / (total_ms - first_ms) * 1e3 if new > 1 else None
        return {"ttft_ms": first_ms, "decode_tokens_per_s": rate, "tokens": list(answer.tokens[0])}


if __name__ == "__main__":
    serve(Worker())
