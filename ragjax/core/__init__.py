"""The nouns that every room of ragjax may import. No jax here, and no logic beyond what a noun needs.

A prompt is a chain of segments with a tree of dependencies; a pass is one sweep of query rows over key spans; a request
goes in and events come out (docs/architecture.md walks one through).
"""

from ragjax.core.compression import Compression
from ragjax.core.draw import Adjusted, Chosen, Draw
from ragjax.core.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    OutOfPages,
    OverloadError,
    RagjaxError,
    RequestError,
    VisibilityError,
)
from ragjax.core.limits import StepLimits
from ragjax.core.options import DTYPES, ORDERS, AtRest, EngineOptions, StorageOptions
from ragjax.core.passes import (
    Asked,
    Compaction,
    Exactness,
    Known,
    Measure,
    Move,
    Pass,
    Plan,
    Prefill,
    Results,
    Run,
    SegmentReport,
    Span,
)
from ragjax.core.prompt import Chunk, Document, Hit, Kind, Prompt, Segment
from ragjax.core.request import (
    Answer,
    Delta,
    Divergence,
    Embedded,
    Event,
    FactReport,
    Graph,
    Message,
    Rag,
    Request,
    Sampling,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    Tools,
)
from ragjax.core.step import Grid, Residual, RowShape, Step, StepMeasure
from ragjax.core.tokens import NEVER, Tokens, is_unicode
from ragjax.core.visibility import Visibility
from ragjax.core.wrapper import Wrapper

__all__ = [
    "DTYPES",
    "NEVER",
    "ORDERS",
    "Adjusted",
    "Answer",
    "Asked",
    "AtRest",
    "Chosen",
    "Chunk",
    "ClosedError",
    "Compaction",
    "Compression",
    "ConfigError",
    "DeadlineError",
    "Delta",
    "Divergence",
    "Document",
    "Draw",
    "Embedded",
    "EngineOptions",
    "Event",
    "Exactness",
    "FactReport",
    "Graph",
    "Grid",
    "Hit",
    "Kind",
    "Known",
    "Measure",
    "Message",
    "Move",
    "OutOfPages",
    "OverloadError",
    "Pass",
    "Plan",
    "Prefill",
    "Prompt",
    "Rag",
    "RagjaxError",
    "Request",
    "RequestError",
    "Residual",
    "Results",
    "RowShape",
    "Run",
    "Sampling",
    "Segment",
    "SegmentReport",
    "Span",
    "Step",
    "StepLimits",
    "StepMeasure",
    "StorageOptions",
    "Timings",
    "TokenLogprob",
    "Tokens",
    "Tool",
    "ToolCall",
    "Tools",
    "Visibility",
    "VisibilityError",
    "Wrapper",
    "is_unicode",
]
