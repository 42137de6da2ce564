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
    """What a search found, best first.

    Metadata has `file_id`, `filename`, `page` and `heading` if the server knows them, `score`, `passage_id`, and the
    file's attributes.
    """
    return [_document(result) for result in results]


def _passage(document: Document) -> dict[str, str]:
    text = document.page_content
    return {"id": document.id or _digest(text), "text": text, "title": _title(document)}


def _title(document: Document) -> str:
    """Of the metadata. What a search found has its title in its text, and an attribute `title` is not a second one."""
    about = document.metadata
    # Told by the metadata, not by the document's id, which some rerankers do not copy.
    as_found = about.get("passage_id") == _name(about.get("file_id"), document.page_content)
    title = about.get("title")
    return "" if title is None or as_found else str(title)


def _document(result: VectorStoreSearchResponse) -> Document:
    text = "\n".join(part.text for part in result.content)
    name = _name(result.file_id, text)
    about: dict[str, Any] = {"file_id": result.file_id, "filename": result.filename, "score": result.score}
    return Document(
        text, id=name, metadata={**(result.attributes or {}), **about, **_place(result), "passage_id": name}
    )


def _place(result: VectorStoreSearchResponse) -> dict[str, Any]:
    """Where the passage begins in its file."""
    known = result.model_extra or {}
    return {name: known[name] for name in ("page", "heading") if known.get(name) is not None}


def _name(file: Any, text: str) -> str:
    """The id of a text that a search found in a file."""
    return f"{file}-{_digest(text)}"


def _digest(text: str) -> str:
    """A name for a text: the same whenever it comes, so that accounts of reuse can be compared."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
