"""The engine: a model, its cache and its knowledge behind one Python API."""

from ragjax.engine.api import Engine

__all__ = ["Engine"]
