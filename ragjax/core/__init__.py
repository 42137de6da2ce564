"""The nouns that every room of ragjax may import. No jax here, and no logic beyond what a noun needs.

A prompt is a chain of segments with a tree of dependencies; a pass is one sweep of query rows over key spans; a request
goes in and events come out (docs/architecture.md walks one through).
"""

from ragjax.core.compression import Compression
from ragjax.core.errors import (
    ClosedError,
    ConfigError,
    DamageError,
    DeviceFullError,
    DiskFullError,
    EndpointError,
    LostError,
    MissingError,
    OutOfPages,
    OverloadError,
    RagjaxError,
    RequestError,
    VisibilityError,
    invalid,
)
from ragjax.core.filter import Attributes, Filter
from ragjax.core.inventory import Departure, Holding, Inventory, Preprocessed, Replicas, Served, SharedTierState
from ragjax.core.library import (
    CHUNK_TOKENS,
    PURPOSES,
    WHOLE,
    Attachment,
    Counts,
    File,
    Indexing,
    KeptResponse,
    Passage,
    Skipped,
    Slice,
    State,
    Store,
)
from ragjax.core.options import (
    DTYPES,
    ENCODER,
    INDEXES,
    NO_VARIANTS,
    AtRest,
    CraftVariants,
    EngineOptions,
    Guesses,
    StorageOptions,
)
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
from ragjax.core.prompt import (
    NEVER,
    Chunk,
    Document,
    Hit,
    Kind,
    Place,
    Prompt,
    Segment,
    Tokens,
    Wrapper,
    has_controls,
    intervals,
    is_unicode,
    readable,
)
from ragjax.core.request import (
    CALL_ID,
    Answer,
    Breakpoint,
    CallForm,
    Citation,
    Delta,
    Divergence,
    Embedded,
    Event,
    FactReport,
    Graph,
    Grounded,
    Message,
    Notice,
    Rag,
    Request,
    Sampling,
    Source,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    Tools,
)
from ragjax.core.step import Adjusted, Chosen, Draw, Grid, Residual, RowShape, Step, StepLimits, StepMeasure
from ragjax.core.visibility import Visibility
