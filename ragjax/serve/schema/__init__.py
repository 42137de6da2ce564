"""Bodies of requests, in the form of OpenAI's API reference, and what they ask of the engine.

A body is strict: an unknown field or a value of another type is an error, and null counts as absent: each field that
may be left out takes it. `rag: null` alone says more. Unless the server is strict too, `neutral.py` takes out before
what changes nothing.
"""

from ragjax.serve.schema.body import NAME_CHARS, Body, Count, Filled, FilledName, FunctionName, Name, One, Text
from ragjax.serve.schema.chat import ChatBody
from ragjax.serve.schema.completion import CompletionBody, Prompt
from ragjax.serve.schema.filter import Comparison, Compound, Filter
from ragjax.serve.schema.format import JsonSchema, ResponseFormat
from ragjax.serve.schema.generation import Generation, StreamOptions
from ragjax.serve.schema.item import (
    ITEMS,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    InputPart,
    Reasoning,
    SearchCall,
)
from ragjax.serve.schema.message import CalledFunction, CalledTool, ChatMessage, TextPart
from ragjax.serve.schema.rag import ChatRag, GraphRag, InlineDocument, Passage, TextRag
from ragjax.serve.schema.response import (
    LOGPROBS,
    RESULTS,
    Ranking,
    ResponseBody,
    ResponseChoice,
    ResponseTool,
    SearchTool,
    TextConfig,
    TextFormat,
)
from ragjax.serve.schema.tool import ChatTool, FunctionTool, NamedFunction, ToolChoice

__all__ = [
    "ITEMS",
    "LOGPROBS",
    "NAME_CHARS",
    "RESULTS",
    "Body",
    "CalledFunction",
    "CalledTool",
    "ChatBody",
    "ChatMessage",
    "ChatRag",
    "ChatTool",
    "Comparison",
    "CompletionBody",
    "Compound",
    "Count",
    "Filled",
    "FilledName",
    "Filter",
    "FunctionCall",
    "FunctionCallOutput",
    "FunctionName",
    "FunctionTool",
    "Generation",
    "GraphRag",
    "InlineDocument",
    "InputMessage",
    "InputPart",
    "JsonSchema",
    "Name",
    "NamedFunction",
    "One",
    "Passage",
    "Prompt",
    "Ranking",
    "Reasoning",
    "ResponseBody",
    "ResponseChoice",
    "ResponseFormat",
    "ResponseTool",
    "SearchCall",
    "SearchTool",
    "StreamOptions",
    "Text",
    "TextConfig",
    "TextFormat",
    "TextPart",
    "TextRag",
    "ToolChoice",
]
