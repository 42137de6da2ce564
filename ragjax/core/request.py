"""Requests and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ragjax.core.check import is_list, is_number, put, whole
from ragjax.core.compression import Compression
from ragjax.core.errors import RequestError
from ragjax.core.passes import Exactness, SegmentReport
from ragjax.core.prompt import Document, Prompt, Tokens

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
    """One chat message. tool_calls: of an assistant. tool_call_id: which of them a tool's message answers.

    Raises:
        RequestError: for an unknown role, or a content that is no text.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        roles = get_args(Role)
        _check(self.role in roles, f"unknown role {self.role!r}; choose one of {', '.join(roles)}", "messages")
        _check_text(self, "content", "messages")


@dataclass(frozen=True)
class Tool:
    """A function that the answer may call. parameters: JSON Schema of its arguments, an object, as JSON text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True)
class Tools:
    """Functions that the answer may call, one of them and once. required: it must. named: it must call this one."""

    offered: tuple[Tool, ...]
    required: bool = False
    named: str | None = None


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token. temperature 0 is greedy; top_k 0 means no limit.

    stop: texts, or one, before which the answer ends.
    logit_bias: what is added to the logits of tokens, by id. presence_penalty, frequency_penalty: what is taken off the
    logit of a generated token, once and for each time. repetition_penalty: what the logits of tokens of the prompt and
    the answer are divided by if above 0, and multiplied by otherwise.

    Raises:
        RequestError: for a value out of its range, or of another type.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Number of alternatives to report per token (0: the chosen token alone; None: no report)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: str | None = None
    """JSON Schema, as JSON text, of which the answer is an instance in JSON."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            _take_whole(self, name, name)
        _take_whole(self, "logprobs", "top_logprobs")
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            _check_number(self, name, name)
        put(self, "stop", _stops(self.stop))
        put(self, "logit_bias", _biases(self.logit_bias))
        what = "json_schema must be JSON text: give json.dumps(schema)"
        _check(self.json_schema is None or isinstance(self.json_schema, str), what, "response_format")
        _check(self.max_tokens >= 1, "max_tokens must be at least 1", "max_tokens")
        _check(0.0 <= self.temperature <= 2.0, "temperature must lie in [0, 2]", "temperature")
        _check(0.0 < self.top_p <= 1.0, "top_p must lie in (0, 1]", "top_p")
        _check(self.top_k >= 0, "top_k must be at least 0 (0: no limit)", "top_k")
        _check(self.seed is None or self.seed >= 0, "seed must be at least 0", "seed")
        _check(len(self.stop) <= 4 and all(self.stop), "stop takes at most 4 non-empty strings", "stop")
        _check(self.logprobs is None or 0 <= self.logprobs <= 20, "top_logprobs must lie in [0, 20]", "top_logprobs")
        biases = self.logit_bias.items()
        _check(all(token >= 0 for token, _ in biases), "ids of logit_bias must be at least 0", "logit_bias")
        _check(all(-100 <= x <= 100 for _, x in biases), "values of logit_bias must lie in [-100, 100]", "logit_bias")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2.0 <= getattr(self, name) <= 2.0, f"{name} must lie in [-2, 2]", name)
        repetition = 0.0 < self.repetition_penalty < float("inf")
        _check(repetition, "repetition_penalty must be above 0, and finite", "repetition_penalty")


def _check(ok: bool, message: str, param: str) -> None:
    if not ok:
        raise RequestError(message, param=param, code="invalid_value")


def _take_whole(of: object, name: str, param: str) -> None:
    given = getattr(of, name)
    if given is None and name not in ("max_tokens", "top_k"):
        return
    taken = whole(given)
    _check(taken is not None, f"{name} must be a whole number, not {given!r}", param)
    put(of, name, taken)


def _check_number(of: object, name: str, param: str) -> None:
    given = getattr(of, name)
    _check(is_number(given), f"{name} must be a number, not {given!r}", param)


def _check_text(of: object, name: str, param: str) -> None:
    given = getattr(of, name)
    _check(isinstance(given, str), f"{name} must be a text, not {given!r}", param)


def _stops(given: str | Sequence[str]) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    _check(is_list(texts, str), f"stop must be a text, or a list of texts, not {given!r}", "stop")
    return tuple(texts)


def _biases(given: Mapping[int, float]) -> Mapping[int, float]:
    taken = {whole(token): bias for token, bias in given.items()} if isinstance(given, Mapping) else {None: None}
    ok = None not in taken and all(is_number(bias) for bias in taken.values())
    _check(ok, f"logit_bias must map token ids to numbers, not {given!r}", "logit_bias")
    return taken  # type: ignore[return-value]


@dataclass(frozen=True)
class Graph:
    """Facts of a knowledge graph that a request uses.

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
            _check(not isinstance(given, str), f"{name} must be a list, not the text {given!r}", f"rag.graph.{name}")
            _check(given is None or len(given) > 0, f"{name} is empty: give some, or leave it out", f"rag.graph.{name}")


@dataclass(frozen=True)
class Source:
    """A knowledge base that is searched (None: the engine's default). within: ids of documents that may be found."""

    knowledge: str | None
    within: frozenset[str] | None = None


@dataclass(frozen=True)
class Rag:
    """Knowledge that a request uses, and the reuse of its KV.

    knowledge: name of the knowledge base; None uses the engine's default, if it has one.
    top_k: chunks to retrieve; None uses the engine's default; 0 retrieves none.
    strategy: name of the reuse strategy; None uses the engine's default.
    documents: passages given with the request, used instead of retrieval: each an id of a document in
        the knowledge base, or a Document.
    recompute_ratio: share of the chunks' tokens, in [0, 1], that a selective strategy recomputes; None uses its own.
    graph: facts, used instead of chunks.
    compression: which of the prompt's tokens the answer sees; None uses the engine's default, "none" keeps all.
    recognise: whether passages in the messages are recognised, and reused at any place; None uses the engine's default.
    detail: hand back the tokens of the prompt in the answer.
    sources: knowledge bases that are searched together, instead of `knowledge`; a document that several of them have is
        found in the first. min_score: the least cosine similarity of a chunk.

    Raises:
        RequestError: for fields that exclude each other, or a value that cannot be.
    """

    knowledge: str | None = None
    top_k: int | None = None
    strategy: str | None = None
    documents: tuple[str | Document, ...] | None = None
    recompute_ratio: float | None = None
    graph: Graph | None = None
    compression: Compression | Literal["none"] | None = None
    detail: bool = False
    recognise: bool | None = None
    sources: tuple[Source, ...] = ()
    min_score: float | None = None

    def __post_init__(self) -> None:
        self._check_types()
        texts = self.knowledge is not None or bool(self.sources) or self.top_k is not None or self.documents is not None
        _check(self.graph is None or not texts, "give graph, or knowledge, top_k and documents, not both", "rag.graph")
        beside = self.knowledge is not None or self.documents is not None
        _check(not self.sources or not beside, "give sources, or knowledge or documents, not both", "rag.knowledge")
        _check(self.documents is None or self.top_k is None, "give documents or top_k, not both", "rag.top_k")
        _check(self.top_k is None or self.top_k >= 0, "top_k must be at least 0 (0: retrieve none)", "rag.top_k")
        ratio = self.recompute_ratio
        _check(ratio is None or 0.0 <= ratio <= 1.0, "recompute_ratio must lie in [0, 1]", "rag.recompute_ratio")
        found = bool(self.recognise)
        _check(not found or self.graph is None, "give recognise or graph, not both", "rag.recognise")

    def _check_types(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name in given.keys() & {"knowledge", "strategy"}:
            _check_text(self, name, f"rag.{name}")
        if self.top_k is not None:
            _take_whole(self, "top_k", "rag.top_k")
        for name in given.keys() & {"recompute_ratio", "min_score"}:
            _check_number(self, name, f"rag.{name}")
        if self.documents is not None:
            what = f"documents must be a list of ids and Documents, not {self.documents!r}"
            _check(is_list(self.documents, (str, Document)), what, "rag.documents")
            put(self, "documents", tuple(self.documents))
        ok = self.graph is None or isinstance(self.graph, Graph)
        _check(ok, f"graph must be a Graph, not {self.graph!r}", "rag.graph")
        ok = self.compression in (None, "none") or isinstance(self.compression, Compression)
        _check(ok, f"compression must be a Compression or 'none', not {self.compression!r}", "rag.compression")

    @property
    def searched(self) -> tuple[Source, ...]:
        """Where chunks are looked for, if they are."""
        return self.sources or (Source(self.knowledge),)

    @property
    def named(self) -> tuple[str, ...]:
        """The knowledge bases that the request names."""
        return tuple(source.knowledge for source in self.searched if source.knowledge is not None)


@dataclass(frozen=True)
class FactReport:
    """A relation path that stood in the prompt: whose it is, its steps, and its similarity to the question."""

    entity: str
    steps: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class Grounded:
    """The prompt of a request whose knowledge was retrieved: what is left to do needs a device."""

    prompt: Prompt
    strategy: str | None = None  # serves the request, whatever the request names; None: as the request says
    facts: tuple[FactReport, ...] = ()  # relation paths of the prompt
    notices: tuple[str, ...] = ()  # for the answer
    retrieve_ms: float = 0.0  # time that the retrieval took
    spent_ms: float = 0.0  # time since the request arrived, retrieval included, where another process grounded it


@dataclass(frozen=True)
class Request:
    """One question. Either `messages` (chat template applied) or `prompt` (raw text or token ids, no retrieval).

    tenant salts every cache key: requests of different tenants share no KV.
    want_logits: hand back the logits of the prompt's last token in the answer.
    continuation: tokens, int32 [n]: the logits that predict them are wanted as `Answer.scores`, before generation.
    background: runs only while no other request waits or runs, and is left out of the counters.
    tools: functions that the answer to messages may call; the call is its text (`prompting/tools.py`).
    grounded: the request's prompt, if it is made already; nothing is retrieved then.

    Raises:
        RequestError: for a value of another type.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    rag: Rag | None = field(default_factory=Rag)
    tenant: str = ""
    want_logits: bool = False
    continuation: Tokens | None = None
    background: bool = False
    tools: Tools | None = None
    grounded: Grounded | None = None

    def __post_init__(self) -> None:
        ok = is_list(self.messages, Message)
        _check(ok, f"messages must be a list of Message, not {self.messages!r}", "messages")
        put(self, "messages", tuple(self.messages))
        _check_text(self, "tenant", "tenant")
        ok = isinstance(self.sampling, Sampling)
        _check(ok, f"sampling must be a Sampling, not {self.sampling!r}", "sampling")
        _check(self.rag is None or isinstance(self.rag, Rag), f"rag must be a Rag, not {self.rag!r}", "rag")

    @property
    def question(self) -> str:
        """Last message of the user; empty if there is none."""
        return next((message.content for message in reversed(self.messages) if message.role == "user"), "")


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

    search_exposed: the part of `retrieve` that passed before the generation with its results began; all of it, unless
    that began on a guess (`EngineOptions.speculate`).
    """

    retrieve: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    total: float = 0.0
    search_exposed: float = 0.0


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
    figures: as `Plan.figures`. facts: relation paths of the prompt.
    compression: how the prompt was compressed; None: it was not. kept: tokens of it that the answer saw in
        each layer, the mean where layers keep other numbers.
    prompt: its tokens, int32 [prompt_tokens], if `Rag.detail` asked for them; segments cover them in order.
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


@dataclass(frozen=True)
class Embedded:
    """Vectors of texts, float32 [n, dim], rows of length one. tokens: of all texts, special ones included."""

    vectors: NDArray[np.float32]
    tokens: int


@dataclass(frozen=True)
class Delta:
    """New text of a running request (already free of stop strings), with the tokens behind it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


Event = Delta | Answer
"""What `Engine.submit` yields: deltas, then exactly one answer."""
