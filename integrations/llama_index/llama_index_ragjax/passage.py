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
    """What a search found, best first; metadata has `file_id`, `filename`, and the file's attributes."""
    return [NodeWithScore(node=_node(result), score=result.score) for result in results]


def _passage(given: BaseNode | NodeWithScore) -> dict[str, str]:
    node = given.node if isinstance(given, NodeWithScore) else given
    return {
        "id": node.node_id,
        "text": node.get_content(MetadataMode.NONE),
        "title": str(node.metadata.get("title", "")),
    }


def _node(result: VectorStoreSearchResponse) -> TextNode:
    text = "\n".join(part.text for part in result.content)
    about: dict[str, Any] = {"file_id": result.file_id, "filename": result.filename}
    # The same name whenever a text comes, so that accounts of reuse can be compared.
    name = f"{result.file_id}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return TextNode(id_=name, text=text, metadata={**(result.attributes or {}), **about})
