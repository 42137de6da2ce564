"""A knowledge base of four islands, on disk or in memory; its encoder and tokenizer are fakes."""

from pathlib import Path

import numpy as np

from ragjax.core import Document, Tokens
from ragjax.retrieval.knowledge import KnowledgeBase
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
    return KnowledgeBase.open(directory, **settings | changes)
