"""Knowledge bases by name, with fakes for encoder and tokenizer, and a library over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ragjax.core import Document, Tokens
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.library import QUOTA, Library
from ragjax.retrieval.registry import KnowledgeRegistry
from tests.support.fakes import WordEncoder

ISLANDS = [
    Document(f"isle/{n}", f"The island of {name} exports {goods} in {colour} boxes.", name)
    for n, (name, goods, colour) in enumerate(
        [("Tolva", "salt", "blue"), ("Merrin", "honey", "red"), ("Oske", "copper", "grey"), ("東京", "絹", "白い")]
    )
]


def encode_bytes(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def open_base(directory: Path | None = None, **changes) -> KnowledgeBase:
    settings = {"encode_tokens": encode_bytes, "encoder": WordEncoder(), "model_key": "bytes"}
    return KnowledgeBase(directory, **settings | changes)


class Shelf(KnowledgeRegistry[KnowledgeBase]):
    """`own` are the server's, and hold islands."""

    def __init__(self, own: tuple[str, ...] = (), directory: Path | None = None):
        def opened(name: str) -> KnowledgeBase:
            return open_base(None if directory is None else directory / name, name=name)

        super().__init__("knowledge base", "rag.knowledge", opened)
        for name in own:
            self.make(name).add(ISLANDS)


def open_library(
    directory: Path | None = None,
    own: tuple[str, ...] = (),
    now: Callable[[], float] = lambda: 1_000_000.0,
    quota: int = QUOTA,
) -> tuple[Library, Shelf]:
    """A library, opened; close it before its shelf."""
    shelf = Shelf(own, directory)
    library = Library(shelf, directory, now, quota)
    library.open()
    return library, shelf
