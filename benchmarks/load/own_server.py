"""ragjax's server as a process of its own: started with a cache folder, and asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from benchmarks.common import envs
from benchmarks.common.process import free_port, running
from benchmarks.common.report import MODEL


@contextmanager
def served(cache: Path, *flags: str) -> Iterator[tuple[Popen[bytes], str]]:
    """A server on the demo, and its URL, with this cache folder; it ends with the context."""
    port = free_port()
    command = [sys.executable, "-m", "ragjax.serve", "--port", str(port), "--model", MODEL, *flags]
    settings = {"RAGJAX_CACHE": str(cache), "PYTHONPATH": str(envs.HERE.parent)}
    with running(command, envs.clean_environment(settings)) as process:
        yield process, f"http://127.0.0.1:{port}"


def body(question: str, strategy: str | None = None, *, tokens: int = 32, stream: bool = False) -> Mapping[str, Any]:
    rag = {} if strategy is None else {"rag": {"strategy": strategy}}
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream, **rag}
