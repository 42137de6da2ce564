"""Documents of LangChain as the passages of a request (`rag.documents`), and what a search found as documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from openai.types import VectorStoreSearchResponse


def passages(documents: Iterable[str | Document]) -> list[str | dict[str, str]]:
    """The field `rag.documents`. A string is the id of a document in the server's knowledge base."""
    return [document if isinstance(document, str) else _passage(document) for document in documents]


def found(results: Sequence[VectorStoreSearchResponse]) -> list[Document]:
    """What a search found, best first; metadata has `file_id`, `filename`, `score`, and the file's attributes."""
    return [_document(result) for result in results]


def _passage(document: Document) -> dict[str, str]:
    text = document.page_content
    return {"id": document.id or _digest(text), "text": text, "title": str(document.metadata.get("title", ""))}


def _document(result: VectorStoreSearchResponse) -> Document:
    text = "\n".join(part.text for part in result.content)
    about: dict[str, Any] = {"file_id": result.file_id, "filename": result.filename, "score": result.score}
    return Document(text, id=f"{result.file_id}-{_digest(text)}", metadata={**(result.attributes or {}), **about})


def _digest(text: str) -> str:
    """A name for a text: the same whenever it comes, so that accounts of reuse can be compared."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
