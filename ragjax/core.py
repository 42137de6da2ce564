"""The nouns every room of ragjax may import. No jax here, and no logic beyond what a noun needs.

A prompt is a chain of segments with a tree of dependencies; a pass is one sweep of query rows over
key spans; a request goes in and events come out (docs/architecture.md walks one through).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token ids, int32 [n]."""

NEVER = np.int32(2**30)
"""An order no row ever has: the order of dead cells, and the end of an interval that never closes."""


# ------------------------------------------------------------------------------------------ errors


class RagjaxError(Exception):
    """Base of the errors a user can cause or must know of; the message says what to change."""


class RequestError(RagjaxError):
    """A request that cannot be served as asked. `param` names the field, `code` the OpenAI error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(RagjaxError):
    """A flag, model or setting that cannot work, found at start-up."""


class OverloadError(RagjaxError):
    """The queue is full; try again later."""


class ClosedError(RagjaxError):
    """The engine was closed: nothing is served any more."""


class OutOfPages(RagjaxError):
    """The device pool has no room left that is not pinned."""


class VisibilityError(RagjaxError):
    """A visibility that one hidden interval per key cannot say."""


# --------------------------------------------------------------------------------------- knowledge


@dataclass(frozen=True)
class Document:
    """One source text. `id` is unique within a knowledge base."""

    id: str
    text: str
    title: str = ""


@dataclass(frozen=True)
class Chunk:
    """A piece of a document as it enters a prompt: `tokens` is the exact token run of `text`.

    behind: digest of the neighbours that its fused KV was computed behind; empty if it was not preprocessed.
    """

    id: str
    document_id: str
    title: str
    text: str
    tokens: Tokens
    behind: bytes = b""


@dataclass(frozen=True)
class Hit:
    """A chunk for a prompt and its similarity to the question (cosine, higher is nearer).

    public: whether its KV may serve every tenant.
    """

    chunk: Chunk
    score: float
    public: bool = False


# ------------------------------------------------------------------------------------------ prompt


class Kind(StrEnum):
    """What a segment is to its prompt, which decides what it depends on."""

    SYSTEM = "system"
    """Depends on everything before it (it comes first)."""
    CHUNK = "chunk"
    """Knowledge: depends on the system segments alone when isolated."""
    NODE = "node"
    """A run of a dependency tree, of a knowledge-graph path for instance: depends on its ancestors (DepCache, 3.1)."""
    JOIN = "join"
    """Depends on everything before it: a question, or a finished turn."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens whose KV is made and kept as a unit (int32 [n]).

    public: whether its KV may serve every tenant, as long as all before it may.
    behind: as `Chunk.behind`.
    depends: indices of the earlier segments that it depends on directly, where its kind does not say (None: it does; a
        node without an ancestor depends on the leading system segments).
    """

    id: str
    kind: Kind
    tokens: Tokens
    title: str = ""
    score: float | None = None
    public: bool = False
    behind: bytes = b""
    depends: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Prompt:
    """Segments in pre-order. A token's order is its index in the concatenation."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise RequestError("the prompt is empty", param="messages")
        if any(len(s) == 0 for s in self.segments):
            raise RequestError("a segment of the prompt has no tokens", param="messages")
        for i, segment in enumerate(self.segments):
            if any(not 0 <= j < i for j in segment.depends or ()):
                raise ValueError(f"segment {i} depends on {segment.depends}: only on earlier ones can it")

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Order of each segment's first token, and the prompt's length as a last entry."""
        return tuple(int(n) for n in np.cumsum([0, *(len(s) for s in self.segments)]))

    @cached_property
    def dependencies(self) -> tuple[frozenset[int], ...]:
        """Indices of all segments that each one depends on, directly or not (DepCache, Algorithm 1, lines 8 and 9)."""
        system = frozenset(
            range(next((i for i, s in enumerate(self.segments) if s.kind is not Kind.SYSTEM), len(self)))
        )
        found: list[frozenset[int]] = []
        for i, segment in enumerate(self.segments):
            if segment.depends is not None:
                found.append(frozenset(segment.depends).union(*(found[j] for j in segment.depends)))
            else:
                found.append(system if segment.kind is Kind.NODE else frozenset(range(i)))
        return tuple(found)

    @cached_property
    def public(self) -> int:
        """Number of leading tokens whose KV may serve every tenant."""
        private = (i for i, segment in enumerate(self.segments) if not segment.public)
        return self.starts[next(private, len(self.segments))]

    @cached_property
    def tokens(self) -> Tokens:
        """All tokens, int32 [len(self)]."""
        return np.concatenate([s.tokens for s in self.segments])


# -------------------------------------------------------------------------------------- visibility


@dataclass(frozen=True)
class Visibility:
    """The one rule: key k is visible to row q of the same request iff
    `order[k] <= order[q] and not (hide_from[k] <= order[q] < hide_until[k])`.

    `hidden[i]` is the half-open interval of orders that must not see segment i's keys; an empty
    interval (0, 0) is plain causal attention.
    """

    hidden: tuple[tuple[int, int], ...]

    @staticmethod
    def causal(prompt: Prompt) -> Visibility:
        """Every key is visible to every later row."""
        return Visibility(((0, 0),) * len(prompt.segments))

    @staticmethod
    def dependency(prompt: Prompt) -> Visibility:
        """Every key is visible to the segments that depend on it, and within its own (DepCache, section 3.1).

        Chunks are part of the chain here: they depend on everything before them.

        A node of a tree is hidden from the end of its subtree to the start of the next segment that depends on it.

        Raises:
            VisibilityError: if one interval per key cannot say it.
        """
        total, starts = len(prompt.segments), prompt.starts
        seers: list[list[int]] = [[] for _ in range(total)]
        for j, seen in enumerate(prompt.dependencies):
            for i in seen:
                seers[i].append(j)
        hidden = []
        for i, who in enumerate(seers):
            follow = _unbroken(who, i, total)
            first, last = i + 1 + follow, total - len(who) + follow
            hidden.append((starts[first], starts[last]) if first < last else (0, 0))
        return Visibility(tuple(hidden))

    @staticmethod
    def isolated(prompt: Prompt, rows: Sequence[int] | None = None) -> Visibility:
        """Chunks depend on system segments and themselves; joins on everything before them.

        `rows` names the segments that have rows in the pass (all, if None): a hidden pair matters
        only if it has rows, which is how chunks of two turns stay sayable with one interval a key.

        Raises:
            VisibilityError: if one interval per key cannot say it; compute in several passes.
        """
        in_pass = range(len(prompt.segments)) if rows is None else sorted(rows)
        starts = prompt.starts
        return Visibility(tuple(_hidden_interval(prompt, i, in_pass, starts) for i in range(len(prompt.segments))))


def _unbroken(seers: Sequence[int], i: int, total: int) -> int:
    """How many of the segments that see segment i follow it without a gap.

    Raises:
        VisibilityError: if the others that see it are not the last of all.
    """
    first = next((n for n, j in enumerate(seers) if j != i + 1 + n), len(seers))
    if list(seers[first:]) != list(range(total - len(seers) + first, total)):
        raise VisibilityError(
            f"segment {i} would be hidden from two separate ranges of the prompt; reorder its segments"
        )
    return first


def _hidden_interval(prompt: Prompt, i: int, rows: Sequence[int], starts: Sequence[int]) -> tuple[int, int]:
    later = [j for j in rows if j > i]
    hiders = [j for j in later if not _depends(prompt.segments[j], prompt.segments[i])]
    if not hiders:
        return (0, 0)
    first, last = hiders[0], hiders[-1]
    if len([j for j in later if first <= j <= last]) != len(hiders):
        raise VisibilityError(
            f"segment {prompt.segments[i].id!r} would be hidden from two separate ranges of one pass; "
            "compute these segments in separate passes"
        )
    return (starts[first], starts[last + 1])


def _depends(row: Segment, key: Segment) -> bool:
    return row.kind is not Kind.CHUNK or key.kind is Kind.SYSTEM


# ------------------------------------------------------------------------------------ runs and passes


@dataclass(frozen=True, slots=True)
class Run:
    """Where `length` consecutive tokens live in the page pool: from cell `start` of `pages[0]` on."""

    pages: tuple[int, ...]
    start: int
    length: int

    def cells(self, page_size: int) -> NDArray[np.int32]:
        """Physical cell numbers `page * page_size + cell`, int32 [length]."""
        flat = self.start + np.arange(self.length, dtype=np.int32)
        return np.asarray(self.pages, np.int32)[flat // page_size] * np.int32(page_size) + flat % page_size

    def slice(self, begin: int, end: int, page_size: int) -> Run:
        """The sub-run of tokens [begin, end)."""
        if not 0 <= begin <= end <= self.length:
            raise ValueError(f"[{begin}, {end}) is outside a run of {self.length} tokens")
        if begin == end:
            return Run((), 0, 0)
        first = self.start + begin
        last = self.start + end - 1
        return Run(self.pages[first // page_size : last // page_size + 1], first % page_size, end - begin)


@dataclass(frozen=True)
class Span:
    """Keys a pass may read (or writes): tokens of one run, at one RoPE offset.

    orders: order of each token, int32 [run.length]; `NEVER` hides a token from the pass (a stale original, say).
    offset: the key of a token stored rotated at position p takes part at position `p + offset`.
    hidden: half-open interval of orders that must not see these keys.
    """

    orders: NDArray[np.int32]
    run: Run
    offset: int = 0
    hidden: tuple[int, int] = (0, 0)

    @staticmethod
    def consecutive(order: int, run: Run, offset: int = 0, hidden: tuple[int, int] = (0, 0)) -> Span:
        """Tokens of consecutive orders from `order` on."""
        return Span(np.arange(order, order + run.length, dtype=np.int32), run, offset, hidden)


class Want(StrEnum):
    """What a pass hands back to its strategy, as host arrays, over the layers of `Pass.measured`; heads are averaged.

    A pass may want LOGITS and at most one of the others; KEY_MASS and VALUED_MASS count as one.
    """

    LOGITS = "logits"
    """float32 [n, vocab] for the rows named in `Pass.logits`."""
    KEY_MASS = "key_mass"
    """float32 [layers, context]: probability that each order received, summed over the asking rows."""
    VALUED_MASS = "valued_mass"
    """float32 [layers, context]: the same, weighted by the L2 norm of the value received."""
    CHUNK_MASS = "chunk_mass"
    """float32 [layers, context]: as KEY_MASS, with the softmax over each segment of the prompt by itself."""
    SEGMENT_MASS = "segment_mass"
    """float32 [layers, rows, segments]: probability that each row gave to each segment, its own token left out."""
    DEVIATION = "deviation"
    """float32 [2, layers, rows]: squared distance of each row's key, and value, from the stale one at its order."""


@dataclass(frozen=True)
class Pass:
    """One sweep: compute `rows` over the keys of `spans`.

    rows: orders to compute, int32 [n], ascending; each lies in a span of offset 0 in pages of the request's own,
        and its K/V is written there. Cached pages are never written.
    positions: RoPE position of each row, int32 [n].
    spans: every key the pass may read, disjoint in order; those of `rows` included.
    wants: what to hand back.
    logits: orders among `rows` whose next-token logits are wanted; only if the pass ends with the last layer.
    layers: half-open range of layers to run (None: all). Beyond layer 0 it goes on from the pass before, which ended
        there: `rows` are among its rows. It begins at a boundary of `Holding.stages` and may end anywhere.
    measured: half-open range of layers in which wants other than LOGITS are measured (None: all that run). Measuring
        fewer stages (`Holding.stages`) is faster.
    asking: orders among `rows` whose attention counts in masses by key (None: all).
    stale: cached keys that DEVIATION compares with, by order; a row without one has deviation 0.
    """

    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    spans: tuple[Span, ...]
    wants: frozenset[Want] = frozenset()
    logits: tuple[int, ...] = ()
    layers: tuple[int, int] | None = None
    measured: tuple[int, int] | None = None
    asking: NDArray[np.int32] | None = None
    stale: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Move:
    """Copy cached KV into cells of the request's own, keys rotated to their new place, in some layers.

    orders: which tokens, int32 [n]. source: spans that hold them at any offset. target: spans of offset 0 in pages of
    the request's own. layers: half-open, at boundaries of `Holding.stages`.
    """

    orders: NDArray[np.int32]
    source: tuple[Span, ...]
    target: tuple[Span, ...]
    layers: tuple[int, int]


Results = Mapping[Want, NDArray[np.float32]]
"""What a pass wanted, by name; a move brings nothing."""


@dataclass(frozen=True)
class SegmentReport:
    """What became of one segment: token counts, its retrieval score, and where its reused KV came from.

    tier: "device", "host" or "disk", the coldest of them; None if nothing was reused.
    """

    id: str
    title: str
    tokens: int
    reused: int
    recomputed: int
    tier: str | None = None
    score: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a strategy carried out: what decoding continues from, and the account of it.

    spans: every key of the prompt as generated tokens see it.
    tail: cells of the request's own for the generated tokens.
    exact_to: "full", "dependency" or None (approximate).
    logits: float32 [vocab] of the prompt's last token.
    figures: what else the strategy has to tell, by name.
    """

    spans: tuple[Span, ...]
    tail: Run
    exact_to: Literal["full", "dependency"] | None
    reports: tuple[SegmentReport, ...]
    logits: NDArray[np.float32]
    figures: Mapping[str, float] = field(default_factory=dict)


Conversation = Generator[Pass | Move, Results, Plan]
"""A strategy at work: it yields passes and moves, receives their results, and returns the plan carried out."""


# ------------------------------------------------------------------------------------ steps of a batch


@dataclass(frozen=True)
class Grid:
    """Shapes that are compiled ahead: row buckets, each with its block of rows, slot buckets, logit buckets.

    rows: (rows of a step, rows of a block), ascending; a block holds rows of one request.
    slots: slots of a step, ascending. logits: rows whose logits are computed together, ascending.
    segments: the least bucket of segments, where attention is measured by segment; others are 4, 16, ... times as many.
    """

    rows: tuple[tuple[int, int], ...] = ((2, 2), (8, 1), (32, 32), (128, 32), (336, 112), (512, 128))
    slots: tuple[int, ...] = (64, 256)
    logits: tuple[int, ...] = (2, 8, 32)
    segments: int = 16

    @staticmethod
    def gpu_rows(group: int) -> tuple[tuple[int, int], ...]:
        """Row buckets for a GPU: larger ones, in blocks that with `group` query heads a KV head fill 128 rows."""
        block = 128 // (1 << (min(group, 128) - 1).bit_length())
        return ((8, 1), (64, 1), (128, block), (512, block), (2048, block), (8192, block))

    @staticmethod
    def fit(values: Iterable[int], need: int) -> int:
        """The smallest of ascending `values` that holds `need`.

        Raises:
            ValueError: if none does.
        """
        for value in values:
            if value >= need:
                return value
        raise ValueError(f"{need} exceeds the largest compiled bucket")

    def fit_segments(self, need: int) -> int:
        """The smallest bucket that holds so many segments."""
        bucket = self.segments
        while bucket < need:
            bucket *= 4
        return bucket


@dataclass(frozen=True)
class Probe:
    """What a step measures in some of its layers (half-open), and the host arrays it takes, int32 [T] and [S, C].

    want: any but LOGITS; VALUED_MASS brings KEY_MASS along. segments: most segments of a prompt, a bucket of the grid;
        0 if the want has none.
    arrays: asking_T (masses by key): 1 for a row that counts. segment_SC (masses by segment): segment of each cell,
        -1 for none; segment_T (SEGMENT_MASS): of each row. stale_T, turn_T (DEVIATION): the cell that the row's KV is
        compared with, -1 for none, and the RoPE offset that moves its key to the row's position.
    """

    want: Want
    layers: tuple[int, int]
    arrays: Mapping[str, NDArray[np.int32]]
    segments: int = 0


@dataclass(frozen=True)
class Step:
    """Host arrays of one step over a batch of requests, int32, padded to buckets of the grid.

    token, order, position, request, cell: one per row [T]; order -1 is padding; cell = page * C + cell is where the
        row's KV is written (padding: page 0, which nobody reads).
    page, offset, request: one per slot [S]; request -1 is unused.
    order, hide_from, hide_until: one per cell [S, C].
    layers: half-open range to run, from the first layer of a stage on (None: all).
    residual_TE: what the rows bring from the layers before, if these are not the first.
    probe: what is measured, if anything.
    """

    token_T: NDArray[np.int32]
    order_T: NDArray[np.int32]
    position_T: NDArray[np.int32]
    request_T: NDArray[np.int32]
    cell_T: NDArray[np.int32]
    page_S: NDArray[np.int32]
    offset_S: NDArray[np.int32]
    request_S: NDArray[np.int32]
    order_SC: NDArray[np.int32]
    hide_from_SC: NDArray[np.int32]
    hide_until_SC: NDArray[np.int32]
    layers: tuple[int, int] | None = None
    residual_TE: NDArray[np.float32] | None = None
    probe: Probe | None = None


# ----------------------------------------------------------------------------- requests and answers


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 means no limit."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Number of alternatives to report per token (0: the chosen token alone; None: no report)."""

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens must be at least 1", "max_tokens")
        _check(0.0 <= self.temperature <= 2.0, "temperature must lie in [0, 2]", "temperature")
        _check(0.0 < self.top_p <= 1.0, "top_p must lie in (0, 1]", "top_p")
        _check(self.top_k >= 0, "top_k must be at least 0 (0: no limit)", "top_k")
        _check(len(self.stop) <= 4 and all(self.stop), "stop takes at most 4 non-empty strings", "stop")
        _check(self.logprobs is None or 0 <= self.logprobs <= 20, "top_logprobs must lie in [0, 20]", "top_logprobs")


def _check(ok: bool, message: str, param: str) -> None:
    if not ok:
        raise RequestError(message, param=param, code="invalid_value")


@dataclass(frozen=True)
class Graph:
    """Which facts of a knowledge graph a request uses.

    name: of the graph; None uses the engine's default.
    entities: whose facts; None: of those that the question names.
    relation_paths: paths brought along, used instead of retrieval; each is entity, relation, entity, …
    hops: triples of the longest path retrieved (None: 2). paths: most paths of an entity, those most similar to the
        question (None: 30).
    serialization: whole paths, or each triple once.

    Raises:
        RequestError: for a field that would have no effect.
    """

    name: str | None = None
    entities: tuple[str, ...] | None = None
    relation_paths: tuple[tuple[str, ...], ...] | None = None
    hops: int | None = None
    paths: int | None = None
    serialization: Literal["path", "triplet"] = "path"

    def __post_init__(self) -> None:
        for name in ("name", "entities", "hops", "paths"):
            both = self.relation_paths is not None and getattr(self, name) is not None
            _check(not both, f"give {name} or relation_paths, not both", f"rag.graph.{name}")
        for name in ("entities", "relation_paths"):
            given = getattr(self, name)
            _check(given is None or len(given) > 0, f"{name} is empty: give some, or leave it out", f"rag.graph.{name}")


@dataclass(frozen=True)
class Rag:
    """What knowledge a request uses and how its KV is reused.

    knowledge: name of the knowledge base; None uses the engine's default, if it has one.
    top_k: chunks to retrieve; None uses the engine's default; 0 retrieves none.
    strategy: name of the reuse strategy; None uses the engine's default.
    documents: passages given with the request, used instead of retrieval: each an id of a document in
        the knowledge base, or a Document.
    recompute_ratio: share of the chunks' tokens, in [0, 1], that a selective strategy computes anew; None uses its own.
    graph: facts, used instead of chunks.

    Raises:
        RequestError: for fields that exclude each other, or a ratio that cannot be.
    """

    knowledge: str | None = None
    top_k: int | None = None
    strategy: str | None = None
    documents: tuple[str | Document, ...] | None = None
    recompute_ratio: float | None = None
    graph: Graph | None = None

    def __post_init__(self) -> None:
        texts = self.knowledge is not None or self.top_k is not None or self.documents is not None
        _check(self.graph is None or not texts, "give graph, or knowledge, top_k and documents, not both", "rag.graph")
        _check(self.documents is None or self.top_k is None, "give documents or top_k, not both", "rag.top_k")
        ratio = self.recompute_ratio
        _check(ratio is None or 0.0 <= ratio <= 1.0, "recompute_ratio must lie in [0, 1]", "rag.recompute_ratio")


@dataclass(frozen=True)
class Request:
    """One question. Either `messages` (chat template applied) or `prompt` (raw text, no retrieval).

    tenant salts every cache key: requests of different tenants share no KV.
    want_logits: hand back the logits of the prompt's last token in the answer.
    continuation: tokens, int32 [n]: the logits that predict them are wanted as `Answer.scores`, before generation.
    background: runs only while no other request waits or runs, and is left out of the counters.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    rag: Rag | None = field(default_factory=Rag)
    tenant: str = ""
    want_logits: bool = False
    continuation: Tokens | None = None
    background: bool = False


@dataclass(frozen=True)
class FactReport:
    """A relation path that stood in the prompt: whose it is, its steps, and its similarity to the question."""

    entity: str
    steps: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token, its natural-log probability, and the likeliest alternatives.

    begin: characters of the answer before its text; tokens of one character share it.
    """

    token: str
    id: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()
    begin: int = 0


@dataclass(frozen=True)
class Timings:
    """Milliseconds. ttft runs from the request's arrival to its first token and includes everything."""

    retrieve: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Divergence:
    """How far an answer is from full attention's, per token: kl in nats, top1 the share of equal likeliest tokens."""

    kl: float
    top1: float


@dataclass(frozen=True)
class Answer:
    """The outcome of a request.

    segments: account for every segment of the prompt. notices: what did not go as configured, a fallback for example.
    recompute_ratio: what the strategy was asked for; None if it takes none, or went by its own.
    predicted: divergence from full attention that the quality report has for the setting; None if it is unknown.
    scores: float32 [n, vocab], logits that predict each token of `Request.continuation`.
    figures: as `Plan.figures`. facts: relation paths of the prompt.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    strategy: str
    exact_to: Literal["full", "dependency"] | None
    segments: tuple[SegmentReport, ...]
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    logits: NDArray[np.float32] | None = None
    notices: tuple[str, ...] = ()
    recompute_ratio: float | None = None
    predicted: Divergence | None = None
    scores: NDArray[np.float32] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    facts: tuple[FactReport, ...] = ()


@dataclass(frozen=True)
class Delta:
    """New text of a running request (already free of stop strings), with the tokens behind it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


Event = Delta | Answer
"""What `Engine.submit` yields: deltas, then exactly one answer."""


# ------------------------------------------------------------------------------------------ storage


AtRest = Literal["raw", "int8", "float8"]
"""How KV is encoded below the device."""


@dataclass(frozen=True)
class StorageOptions:
    """Where KV is kept below the device, and what leaves first.

    Raises:
        ConfigError: naming the field that cannot work.

    policy: name of the replacement policy. cost_profile: JSON of measured prefill times, which "pgdsf" needs.
    host_gb: host memory for KV, in 2^30 bytes (0: none). disk: folder of the disk tier (None: none), shared by any
    number of processes; disk_gb: its limit.
    at_rest: "raw" (exact), or "int8" or "float8": smaller, and all that comes back is labelled approximate.
    load_timeout: seconds after which a request computes KV rather than wait for it.
    quotas: most 2^30 bytes of KV that a tenant may hold on the device, and as much in host memory.
    variants: most variants of chunks that Cache-Craft's strategies keep, of all chunks together (its N times M).
    share_knowledge: whether tenants share the KV of the knowledge bases. What a request brings along stays its own; but
        how fast an answer comes then tells one tenant which documents others asked for.
    """

    policy: str = "lru"
    cost_profile: str | Path | None = None
    host_gb: float = 0.0
    disk: str | Path | None = None
    disk_gb: float = 8.0
    at_rest: AtRest = "raw"
    load_timeout: float = 10.0
    quotas: Mapping[str, float] = field(default_factory=dict)
    variants: int = 500
    share_knowledge: bool = False

    def __post_init__(self) -> None:
        if self.at_rest not in get_args(AtRest):
            raise ConfigError(f"unknown at_rest {self.at_rest!r}; choose one of {', '.join(get_args(AtRest))}")
        if not 0 <= self.host_gb <= 1e9:
            raise ConfigError(f"host_gb must be a number from 0 to 1e9, not {self.host_gb!r}")
        if self.variants < 1:
            raise ConfigError(f"variants must be at least 1, not {self.variants!r}")
        limits = {"disk_gb": self.disk_gb, "load_timeout": self.load_timeout}
        for name, value in limits.items() | {(f"quotas[{tenant!r}]", gb) for tenant, gb in self.quotas.items()}:
            if not 0 < value <= 1e9:
                raise ConfigError(f"{name} must be a number above 0, up to 1e9, not {value!r}")


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8; JSON and file names can hold halves of surrogate pairs, which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
