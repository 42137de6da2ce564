"""JSON lines over standard input and output, the worker's side. Standard library only: it runs in any interpreter."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Operation = Callable[..., Mapping[str, Any]]


def serve(operations: Mapping[str, Operation]) -> None:
    """Answer requests `{"op": name, …arguments}` until the input ends."""
    say = answering()
    for line in sys.stdin:
        say(_answer(operations, json.loads(line)))


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


def _answer(operations: Mapping[str, Operation], request: dict[str, Any]) -> Mapping[str, Any]:
    try:
        return operations[request.pop("op")](**request)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
