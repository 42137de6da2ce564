"""JSON lines over standard input and output, the worker's side. Standard library only: it runs in any interpreter."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Operation = Callable[..., Mapping[str, Any]]


def serve(operations: Mapping[str, Operation]) -> None:
    """Answer requests `{"op": name, …arguments}` until the input ends.

    What the operations print goes to standard error, so that answers alone reach standard output.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(operations, json.loads(line))) + "\n")
        answers.flush()


def _answer(operations: Mapping[str, Operation], request: dict[str, Any]) -> Mapping[str, Any]:
    try:
        return operations[request.pop("op")](**request)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
