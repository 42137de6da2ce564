"""Requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from numpy.typing import NDArray
from pydantic import InstanceOf

from ragjax.core.check import check_fields, put
from ragjax.core.compression import Compression
from ragjax.core.errors import invalid
from ragjax.core.passes import Exactness, SegmentReport
from ragjax.core.prompt import Document, Prompt, Tokens
from ragjax.core.registry import strategy_named

Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]

Role = Literal["system", "user", "assistant", "tool"]
"""Who says a message."""


@dataclass(frozen=True)
class ToolCall:
    """A tool that the assistant called: id of the call, name of the tool, and its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One chat message. tool_calls: of an assistant. tool_call_id: which of them a tool's message answers."""

    role: Role
    content: str
    tool_calls: tuple[InstanceOf[ToolCall], ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, lambda _, reason: invalid("messages", reason))


@dataclass(frozen=True)
class Tool:
    """A function that the answer may call. parameters: JSON Schema of its arguments, an object, as JSON text.

    strict: refuse a schema that a grammar cannot hold, rather than leave out of it what it cannot.
    """

    name: str
    description: str
    parameters: str
    strict: bool = False


@dataclass(frozen=True)
class Tools:
    """Functions that the answer may call. required: it must. named: it must call this one. several: also more than one
    time, if the model can.
    """

    offered: tuple[Tool, ...]
    required: bool = False
    named: str | None = None
    several: bool = True


CALL_ID = "\U000f8ff4" * 9
"""Stands for the id of a call in a `CallForm`: nine letters and digits."""


@dataclass(frozen=True)
class CallForm:
    """The form in which a model writes calls: head, name, middle, arguments, tail.

    between: stands in place of the tail and the next call's head; None: an answer makes one call. mark: what the head
    begins with and no text has, so that a text may stand before it; empty: an answer is a text or calls. thinks: the
    model may think first, also where it must call.
    """

    head: str = '{"name": "'
    middle: str = '", "arguments": '
    tail: str = "}"
    between: str | None = None
    mark: str = ""
    thinks: bool = False

    def spelled(self, call: ToolCall) -> str:
        return f"{self.head}{call.name}{self.middle}{call.arguments or '{}'}{self.tail}"


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token. temperature 0 is greedy; top_k 0 means no limit.

    max_tokens: of the answer; None: as many as fit.
    stop: texts, or one, before which the answer ends.
    logit_bias: what is added to the logits of tokens, by id. presence_penalty, frequency_penalty: what is taken off the
    logit of a generated token, once and for each time. repetition_penalty: what the logits of tokens of the prompt and
    the answer are divided by if above 0, and multiplied by otherwise.
    """

    max_tokens: AtLeastOne | None = 128
    temperature: Annotated[float, Ge(0), Le(2)] = 0.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Count = 0
    seed: Count | None = None
    stop: Annotated[tuple[Annotated[str, MinLen(1)], ...], MaxLen(4)] = ()
    logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    """Number of alternatives to report per token (0: the chosen token alone; None: no report)."""
    logit_bias: Mapping[Count, Annotated[float, Ge(-100), Le(100)]] = field(default_factory=dict, hash=False)
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    repetition_penalty: Annotated[float, Gt(0), Lt(float("inf"))] = 1.0
    json_schema: str | None = None
    """JSON Schema, as JSON text, of which the answer is an instance in JSON."""
    strict: bool = False
    """Whether a schema that a grammar cannot hold is refused."""

    @property
    def room(self) -> int:
        """Tokens that the prompt leaves for the answer."""
        return self.max_tokens or 128

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        if not isinstance(self.json_schema, str | None):
            raise invalid("response_format", "json_schema must be JSON text: give json.dumps(schema)")
        check_fields(self, lambda name, reason: invalid("top_logprobs" if name == "logprobs" else name, reason))


def _check(ok: bool, message: str, param: str) -> None:
    if not ok:
        raise invalid(param, message)


@dataclass(frozen=True)
class Graph:
    """Facts of a knowledge graph that a request uses. name: of the graph (None: the engine's default).

    entities: whose facts (None: of those that the question names). relation_paths: paths brought along, used instead of
    retrieval; each is entity, relation, entity, … hops: triples of the longest path retrieved (None: 2). paths: most
    paths of an entity, those most similar to the question (None: 30).
    """

    name: str | None = None
    entities: tuple[str, ...] | None = None
    relation_paths: tuple[tuple[str, ...], ...] | None = None
    hops: int | None = None
    paths: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, lambda name, reason: invalid(f"rag.graph.{name}", reason))
        for name in ("name", "entities", "hops", "paths"):
            both = self.relation_paths is not None and getattr(self, name) is not None
            _check(not both, f"give {name} or relation_paths, not both", f"rag.graph.{name}")
        for name in ("entities", "relation_paths"):
            _check(getattr(self, name) != (), f"{name} is empty: give some, or leave it out", f"rag.graph.{name}")


@dataclass(frozen=True)
class Source:
    """A knowledge base that is searched (None: the engine's default). within: ids of documents that may be found."""

    knowledge: str | None
    within: frozenset[str] | None = None


@dataclass(frozen=True)
class Rag:
    """Knowledge that a request uses, and the reuse of its KV. None: the engine's default.

    top_k: chunks to retrieve. documents: passages used instead of retrieval: each an id of a document in the knowledge
    base, or a Document. recompute_ratio: share of the chunks' tokens that a selective strategy recomputes. graph:
    facts, used instead of chunks. compression: which of the prompt's tokens the answer sees; "none" keeps all. detail:
    hand back the tokens of the prompt in the answer. sources: knowledge bases that are searched together, instead of
    `knowledge`; a document that several of them have is found in the first. min_score: the least cosine similarity of a
    chunk.
    """

    knowledge: str | None = None
    top_k: Count | None = None
    strategy: str | None = None
    documents: tuple[str | InstanceOf[Document], ...] | None = None
    recompute_ratio: Annotated[float, Ge(0), Le(1)] | None = None
    graph: InstanceOf[Graph] | None = None
    compression: InstanceOf[Compression] | Literal["none"] | None = None
    detail: bool = False
    sources: tuple[InstanceOf[Source], ...] = ()
    min_score: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, lambda name, reason: invalid(f"rag.{name}", reason))
        if self.strategy is not None:
            put(self, "strategy", strategy_named(self.strategy))
        texts = self.knowledge is not None or bool(self.sources) or self.top_k is not None or self.documents is not None
        _check(self.graph is None or not texts, "give graph, or knowledge, top_k and documents, not both", "rag.graph")
        beside = self.knowledge is not None or self.documents is not None
        _check(not self.sources or not beside, "give sources, or knowledge or documents, not both", "rag.knowledge")
        _check(self.documents is None or self.top_k is None, "give documents or top_k, not both", "rag.top_k")

    @property
    def searched(self) -> tuple[Source, ...]:
        return self.sources or (Source(self.knowledge),)

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(source.knowledge for source in self.searched if source.knowledge is not None)


@dataclass(frozen=True)
class FactReport:
    entity: str
    steps: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class Citation:
    """A passage that stood in the prompt, and where it is from."""

    segment: int
    knowledge: str | None
    file_id: str
    filename: str
    title: str
    page: int | None
    heading: str | None
    score: float | None
    text: str
    earlier: bool = False


class Notice(str):
    """A notice of an answer with a code, by which programs know it."""

    code: str

    def __new__(cls, text: str, code: str) -> Notice:
        made = super().__new__(cls, text)
        made.code = code
        return made

    def __reduce__(self) -> tuple[type[Notice], tuple[str, str]]:  # other processes ground requests
        return Notice, (str(self), self.code)


@dataclass(frozen=True)
class Breakpoint:
    """A place up to which the prompt's KV leaves the cache after that of others, within a bound for each tenant.

    seconds: how long. message: the place is in this one, behind so many characters; None: at the end of the prompt.
    """

    seconds: Annotated[float, Ge(0)]
    message: int | None = None
    characters: Count = 0


@dataclass(frozen=True)
class Grounded:
    """The prompt of a request whose knowledge was retrieved: what is left to do needs a device."""

    prompt: Prompt
    strategy: str | None = None  # serves the request, whatever the request names; None: as the request says
    facts: tuple[FactReport, ...] = ()  # relation paths of the prompt
    notices: tuple[str, ...] = ()  # for the answer
    retrieve_ms: float = 0.0  # time that the retrieval took
    spent_ms: float = 0.0  # time since the request arrived, retrieval included, where another process grounded it
    sources: tuple[Citation, ...] = ()  # its passages that were retrieved or given, in order
    kept: tuple[tuple[int, float], ...] = ()  # tokens before each breakpoint, and its seconds


@dataclass(frozen=True)
class Request:
    """One question. Either `messages` (chat template applied) or `prompt` (raw text or token ids, no retrieval).

    tenant salts every cache key: requests of different tenants share no KV.
    want_logits: hand back the logits of the prompt's last token in the answer.
    continuation: tokens, int32 [n]: the logits that predict them are wanted as `Answer.scores`, before generation.
    background: runs only while no other request waits or runs, and is left out of the counters.
    tools: functions that the answer to messages may call; the call is its text (`prompting/tools.py`).
    grounded: the request's prompt, if it is made already; nothing is retrieved then.
    template: variables of the model's chat template, such as `enable_thinking`.
    echo: `Answer.logprobs` are those of the raw prompt, the first of which is NaN, as `sampling.logprobs` asks for
        them; its KV is computed anew, and what is generated has no meaning.
    """

    messages: tuple[InstanceOf[Message], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: InstanceOf[Sampling] = field(default_factory=Sampling)
    rag: InstanceOf[Rag] | None = field(default_factory=Rag)
    tenant: str = ""
    want_logits: bool = False
    continuation: Tokens | None = None
    background: bool = False
    tools: InstanceOf[Tools] | None = None
    grounded: InstanceOf[Grounded] | None = None
    template: Mapping[str, bool] = field(default_factory=dict, hash=False)
    breakpoints: tuple[InstanceOf[Breakpoint], ...] = ()
    echo: bool = False

    def __post_init__(self) -> None:
        check_fields(self, invalid, unchecked=("prompt", "continuation"))

    @property
    def question(self) -> str:
        return next((message.content for message in reversed(self.messages) if message.role == "user"), "")

    @property
    def continues(self) -> bool:
        """True if the answer goes on from a text: a raw prompt, or the beginning of what the assistant says."""
        return self.prompt is not None or (bool(self.messages) and self.messages[-1].role == "assistant")


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
    """Milliseconds. ttft runs from the request's arrival to its first token and includes everything.

    compile: what it waited for programs that were not made yet.

    search_exposed: the part of `retrieve` that passed before the generation with its results began; all of it, unless
    that began on a guess (`EngineOptions.speculate`).
    """

    retrieve: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    total: float = 0.0
    search_exposed: float = 0.0
    compile: float = 0.0


@dataclass(frozen=True)
class Divergence:
    """Distance of an answer from full attention's, per token: kl in nats, top1 the share of equal likeliest tokens."""

    kl: float
    top1: float


@dataclass(frozen=True, eq=False)
class Answer:
    """The outcome of a request. Two are equal only if they are the same object.

    segments: account for every segment of the prompt. notices: what did not go as configured, a fallback for example.
    recompute_ratio: what the strategy was asked for, or what a budget of the request took; None if it takes none, or
    went by its own.
    predicted: divergence from full attention that the quality report has for the setting; None if it is unknown.
    scores: float32 [n, vocab], logits that predict each token of `Request.continuation`.
    figures: as `Plan.figures`. facts: relation paths of the prompt. sources: its passages, in order.
    compression: how the prompt was compressed; None: it was not. kept: tokens of it that the answer saw in
        each layer, the mean where layers keep other numbers.
    prompt: its tokens, int32 [prompt_tokens], if `Rag.detail` asked for them; segments cover them in order.
    written: tokens of the prompt before its last breakpoint that were not cached.
    stop: the stop string that ended it, if one did.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    strategy: str
    exact_to: Exactness | None
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
    compression: Compression | None = None
    kept: int | None = None
    prompt: Tokens | None = None
    sources: tuple[Citation, ...] = ()
    stop: str | None = None
    written: int = 0


@dataclass(frozen=True)
class Embedded:
    """Vectors of texts, float32 [n, dim], rows of length one.

    tokens: of all texts, special ones included. cut: texts that were embedded in parts.
    """

    vectors: NDArray[np.float32]
    tokens: int
    cut: int = 0


@dataclass(frozen=True)
class Delta:
    """New text of a running request (already free of stop strings), with the tokens behind it.

    sources: passages of the prompt, in order; the first one of a request has them.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    sources: tuple[Citation, ...] = ()


Event = Delta | Answer
"""What `Engine.submit` yields: deltas, then exactly one answer."""
