"""ragjax: retrieval-augmented generation in JAX that prefills a piece of knowledge once and reuses its KV anywhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("ragjax does not run on Windows: use Linux, there under WSL 2")

from ragjax.core import (
    Answer,
    ClosedError,
    ConfigError,
    Divergence,
    Document,
    EngineOptions,
    Graph,
    Kind,
    Message,
    OverloadError,
    Prompt,
    Rag,
    RagjaxError,
    Request,
    RequestError,
    Sampling,
    Segment,
    SegmentReport,
    StorageOptions,
    Timings,
)

if TYPE_CHECKING:
    from ragjax.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "ClosedError",
    "ConfigError",
    "Divergence",
    "Document",
    "Engine",
    "EngineOptions",
    "Graph",
    "Kind",
    "Message",
    "OverloadError",
    "Prompt",
    "Rag",
    "RagjaxError",
    "Request",
    "RequestError",
    "Sampling",
    "Segment",
    "SegmentReport",
    "StorageOptions",
    "Timings",
]


def __getattr__(name: str) -> object:
    # the engine brings jax and faiss with it; the nouns do not need them
    if name == "Engine":
        from ragjax.engine import Engine

        return Engine
    raise AttributeError(f"module 'ragjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
