"""LlamaIndex over a ragjax server."""

from llama_index_ragjax.engine import RagjaxQueryEngine
from llama_index_ragjax.llm import Ragjax
from llama_index_ragjax.retriever import RagjaxRetriever

__all__ = ["Ragjax", "RagjaxQueryEngine", "RagjaxRetriever"]
