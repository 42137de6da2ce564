"""LangChain over a ragjax server."""

from langchain_ragjax.chat import ChatRagjax
from langchain_ragjax.retriever import RagjaxRetriever

__all__ = ["ChatRagjax", "RagjaxRetriever"]
