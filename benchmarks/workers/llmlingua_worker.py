"""LLMLingua-2 as a worker of `quality`. Runs in the environment `llmlingua`; its model comes from Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmlingua import PromptCompressor
from wire import serve

MODEL = "microsoft/llmlingua-2-bert-base-multilingual-cased-meetingbank"
"""The smaller of the two that its authors publish."""


class State:
    """The loaded compressor."""

    compressor: PromptCompressor


def load() -> Mapping[str, Any]:
    State.compressor = PromptCompressor(MODEL, use_llmlingua2=True, device_map="cpu")
    return {}


def compress(texts: Sequence[str], rate: float) -> Mapping[str, Any]:
    return {"texts": [State.compressor.compress_prompt(text, rate=rate)["compressed_prompt"] for text in texts]}


if __name__ == "__main__":
    serve({"load": load, "compress": compress})
