"""Knowledge bases by name, with fakes for encoder and tokenizer, and a library over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ragjax.core import Document, RequestError, Tokens
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.library import QUOTA, Library
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


class Shelf:
    """As the engine's registry of knowledge bases; `own` are the server's, and hold islands."""

    def __init__(self, own: tuple[str, ...] = (), directory: Path | None = None):
        self.directory = directory
        self.held: dict[str, KnowledgeBase] = {}
        self.owners: dict[str, str] = {}
        for name in own:
            self.make(name).add(ISLANDS)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self.held if name not in self.owners)

    def get(self, name: str | None = None) -> KnowledgeBase:
        if name not in self.held:
            raise RequestError(f"unknown knowledge base {name!r}", code="not_found")
        return self.held[name]

    def make(self, name: str | None = None, owner: str | None = None) -> KnowledgeBase:
        assert name is not None
        if name not in self.held:
            if owner is not None:
                self.owners[name] = owner
            self.held[name] = open_base(None if self.directory is None else self.directory / name, name=name)
        return self.held[name]

    def drop(self, name: str) -> None:
        self.get(name).close()
        del self.held[name]
        self.owners.pop(name, None)

    def close(self) -> None:
        for base in self.held.values():
            base.close()


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
