"""JSON lines over standard input and output, the worker's side. Standard library only: it runs in any interpreter."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def serve(worker: object) -> None:
    """Answer requests `{"op": name of a method, …arguments}` until the input ends."""
    say = answering()
    for line in sys.stdin:
        say(_answer(worker, json.loads(line)))


def greedy(new: int, first: Callable[[], int], following: Callable[[int], int]) -> dict[str, Any]:
    """`new` tokens, of which each takes the one before: milliseconds to the first, and tokens a second from then on."""
    start = time.perf_counter()
    chosen = [first()]
    there = time.perf_counter()
    while len(chosen) < new:
        chosen.append(following(chosen[-1]))
    rate = (new - 1) / (time.perf_counter() - there) if new > 1 else None
    return {"ttft_ms": (there - start) * 1e3, "decode_tokens_per_s": rate, "tokens": chosen}


def answering() -> Callable[[Mapping[str, Any]], None]:
    """Return what writes an answer. All else that is printed from now on goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return say


def arriving() -> queue.Queue[dict[str, Any] | None]:
    """Requests as they come in, at any time; None when the input ends."""
    asked: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(json.loads(line))
        asked.put(None)

    threading.Thread(target=read, daemon=True).start()
    return asked


def _answer(worker: object, request: dict[str, Any]) -> Mapping[str, Any]:
    try:
        answer: Mapping[str, Any] = getattr(worker, request.pop("op"))(**request)
        return answer
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
