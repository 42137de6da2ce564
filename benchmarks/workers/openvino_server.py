"""OpenVINO GenAI under load: requests as JSON lines come in at any time, tokens go out as they are made.

    python openvino_server.py MODEL THREADS PRECISION CACHE_GB MOST_AT_ONCE

Continuous batching with the prefix cache on. Runs in the environment `openvino`.
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai
import wire

FINISHED = "FINISHED"


def load(
    model: str, threads: str, precision: str, gigabytes: str, most: str
) -> openvino_genai.ContinuousBatchingPipeline:
    """The pipeline; a step holds up to 512 tokens, of prompts and of answers together."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = max(1, round(float(gigabytes)))
    scheduler.max_num_seqs = int(most)
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    settings = {"INFERENCE_NUM_THREADS": int(threads), "INFERENCE_PRECISION_HINT": precision}
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings)


def main() -> None:
    say = wire.answering()
    pipeline = load(*sys.argv[1:])
    say({"ready": {"openvino-genai": openvino_genai.__version__, "openvino computes in": sys.argv[3]}})
    asked = wire.arriving()
    running: dict[int, tuple[Any, int, int]] = {}
    while True:
        while running or not asked.empty() or not running:
            try:
                request = asked.get(block=not running)
            except queue.Empty:
                break
            if request is None:
                return
            running[request["id"]] = begin(pipeline, request)
        pipeline.step()
        for number, (handle, prompt, made) in list(running.items()):
            while handle.can_read():
                made += sum(len(output.generated_ids) for output in handle.read().values())
                say({"id": number, "text": True})
            running[number] = (handle, prompt, made)
            status = handle.get_status().name
            if status != "RUNNING":
                del running[number]
                done = {"done": {"output": made, "prompt": prompt}}
                say({"id": number, **(done if status == FINISHED else {"error": f"status {status}"})})


def begin(pipeline: openvino_genai.ContinuousBatchingPipeline, request: dict[str, Any]) -> tuple[Any, int, int]:
    """Greedy tokens, all of them: (handle, tokens of the prompt, tokens made)."""
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens, settings.ignore_eos, settings.do_sample = request["new"], True, False
    ids = openvino.Tensor(np.asarray([request["tokens"]], np.int64))
    return pipeline.add_request(request["id"], ids, settings), len(request["tokens"]), 0


if __name__ == "__main__":
    main()
