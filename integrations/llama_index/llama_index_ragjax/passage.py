"""Nodes of LlamaIndex as the passages of a request (`rag.documents`), and what a search found as nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, TextNode
from openai.types import VectorStoreSearchResponse


def passages(nodes: Iterable[str | BaseNode | NodeWithScore]) -> list[str | dict[str, str]]:
    """The field `rag.documents`. A string is the id of a document in the server's knowledge base."""
    return [node if isinstance(node, str) else _passage(node) for node in nodes]


def found(results: Sequence[VectorStoreSearchResponse]) -> list[NodeWithScore]:
    """What a search found, best first.

    Metadata has `file_id`, `filename`, `page` and `heading` if the server knows them, and the file's attributes.
    """
    return [NodeWithScore(node=_node(result), score=result.score) for result in results]


def _passage(given: BaseNode | NodeWithScore) -> dict[str, str]:
    node = given.node if isinstance(given, NodeWithScore) else given
    text = node.get_content(MetadataMode.NONE)
    return {"id": node.node_id, "text": text, "title": _title(node, text)}


def _title(node: BaseNode, text: str) -> str:
    """Of the metadata. What a search found has its title in its text, and an attribute `title` is not a second one."""
    as_found = node.node_id == _name(node.metadata.get("file_id"), text)
    title = node.metadata.get("title")
    return "" if title is None or as_found else str(title)


def _node(result: VectorStoreSearchResponse) -> TextNode:
    text = "\n".join(part.text for part in result.content)
    about: dict[str, Any] = {"file_id": result.file_id, "filename": result.filename}
    return TextNode(
        id_=_name(result.file_id, text), text=text, metadata={**(result.attributes or {}), **about, **_place(result)}
    )


def _place(result: VectorStoreSearchResponse) -> dict[str, Any]:
    """Where the passage begins in its file."""
    known = result.model_extra or {}
    return {name: known[name] for name in ("page", "heading") if known.get(name) is not None}


def _name(file: Any, text: str) -> str:
    """The id of a text that a search found in a file: always the same, so that accounts of reuse can be compared."""
    return f"{file}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
