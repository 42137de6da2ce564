"""A fake engine: the interface of `ragjax.engine.Engine`, with canned tokens, delays and errors instead of a model."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragjax import core
from ragjax.quality.report import Setting

if TYPE_CHECKING:
    from ragjax.retrieval.library import Library


@dataclass
class FakeEngine:
    """Answers every request with `tokens`.

    delay: seconds before each token.
    error: raised instead of the first event.
    breakdown: raised after `sound` tokens.
    """

    tokens: tuple[str, ...] = ("The", " light", "house", " is", " red", ".")
    delay: float = 0.0
    error: BaseException | None = None
    breakdown: BaseException | None = None
    sound: int = 2
    written: int = 0
    sources: tuple[core.Citation, ...] = ()
    max_queue: int = 64
    context_length: int = 64
    model_name: str = "fake"
    strategies: tuple[str, ...] = ("full", "prefix", "naive")
    selective: tuple[str, ...] = ("naive",)
    default_strategy: str = "prefix"
    knowledge_names: tuple[str, ...] = ("demo",)
    graph_names: tuple[str, ...] = ("facts",)
    requests: list[core.Request] = field(default_factory=list)
    running: int = 0
    finished: int = 0
    cancelled: int = 0
    closed: bool = False
    observers: list[Callable[[str, core.Divergence], None]] = field(default_factory=list)
    progress: core.Preprocessed | None = None
    programs_left: int = 2
    indexing: core.Indexing | None = None
    call_form: core.CallForm = field(default_factory=core.CallForm)

    @classmethod
    def load(cls, options: core.EngineOptions, early: bool = False) -> FakeEngine:
        """An engine with these options; `slow` is a model that takes 50 ms per token."""
        if options.model == "missing":
            raise core.ConfigError("no model is called 'missing'")
        assert options.knowledge is None or not isinstance(options.knowledge, str | Path)
        return cls(
            model_name=str(options.model),
            default_strategy=options.strategy,
            knowledge_names=tuple(options.knowledge or ()),
            max_queue=options.max_queue,
            delay=0.05 if options.model == "slow" else 0.0,
        )

    @cached_property
    def library(self) -> Library:
        """A library in memory, beside bases of these names that hold islands."""
        from tests.support.shelf import open_library

        return open_library(own=self.knowledge_names)[0]

    @property
    def default_setting(self) -> Setting:
        """The default strategy, with its own choice of a ratio."""
        return Setting(self.default_strategy)

    @property
    def strategy_summary(self) -> str:
        return self.default_strategy

    @property
    def shares(self) -> None:
        """There is no shared cache."""

    def preprocessed(self, tenants: bool = True) -> core.Preprocessed | None:
        return self.progress

    def replicas(self) -> None:
        """It serves alone."""

    def figures(self) -> dict[str, dict[str, Any]]:
        return {"": self.stats()}

    def observe_shadows(self, observer: Callable[[str, core.Divergence], None]) -> None:
        self.observers.append(observer)

    embedding_model: str = "fake-encoder"

    def embed(self, texts: Sequence[str | Sequence[int]], check: Callable[[], None] = lambda: None) -> core.Embedded:
        """Vectors of three numbers; a text of more than nine words is too long, and one of two letters is cut."""
        if any(not isinstance(text, str) for text in texts):
            raise core.RequestError("these are no tokens of the encoder's vocabulary", param="input")
        texts = [text for text in texts if isinstance(text, str)]
        if any(self.count_tokens(text) > 9 for text in texts):
            raise core.RequestError("text 0 has more tokens than the encoder reads (9)", param="input")
        rows = [[len(text), i, 1] for i, text in enumerate(texts)]
        return core.Embedded(
            np.array(rows, np.float32), sum(map(self.count_tokens, texts)), sum(len(t) == 2 for t in texts)
        )

    async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        """Deltas of one token each, then the answer."""
        self._check(request)
        self.requests.append(request)
        self.running += 1
        try:
            async for event in self._generate(request):
                yield event
            self.finished += 1
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _check(self, request: core.Request) -> None:
        if self.error is not None:
            raise self.error
        if self.running >= self.max_queue:
            raise core.OverloadError("the queue is full; try again later")
        strategy = request.rag and request.rag.strategy
        if strategy and strategy not in self.strategies:
            message = f"unknown strategy {strategy!r}; there are {', '.join(self.strategies)}"
            raise core.RequestError(message, param="rag.strategy", code="invalid_value")
        wanted = self._prompt_tokens(request) + (request.sampling.max_tokens or 0)
        if request.sampling.max_tokens is not None and wanted > self.context_length:
            message = f"prompt and answer need {wanted} tokens; the context has {self.context_length}"
            raise core.RequestError(message, param="messages", code="context_length_exceeded")

    async def _generate(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        begin = time.perf_counter()
        shown = self.tokens[: request.sampling.max_tokens]
        logprobs: list[core.TokenLogprob] = []
        for i, token in enumerate(shown):
            await asyncio.sleep(self.delay)
            if self.breakdown is not None and i == self.sound:
                raise self.breakdown
            logprobs.append(self._logprob(i, request.sampling.logprobs or 0))
            yield core.Delta(token, self._wanted(request, logprobs[-1:]), () if i else self.sources)
        approximate = request.rag is not None and request.rag.strategy == "naive"
        ttft = 1e3 * (time.perf_counter() - begin)
        yield core.Answer(
            text="".join(shown),
            finish_reason="stop" if len(shown) == len(self.tokens) else "length",
            tokens=tuple(range(len(shown))),
            prompt_tokens=self._prompt_tokens(request),
            cached_tokens=7,
            written=self.written,
            strategy=(request.rag and request.rag.strategy) or self.default_strategy,
            exact_to=None if approximate else "full",
            segments=(
                core.SegmentReport("system", "", 5, 5, 0, "device", None),
                core.SegmentReport("harbour#0", "The harbour", 4, 2, 2, None, 0.75, ((1, 2), (3, 4))),
            ),
            timings=core.Timings(1.0, 2.0, 3.0, ttft, ttft),
            logprobs=self._wanted(request, logprobs),
            recompute_ratio=request.rag and request.rag.recompute_ratio,
            predicted=core.Divergence(0.25, 0.75) if approximate else core.Divergence(0.0, 1.0),
            figures={"focus_ideal": 0.5} if approximate else {},
            sources=self.sources,
            notices=("attention not by triton: no such kernel",),
            prompt=np.arange(9, dtype=np.int32) if request.rag and request.rag.detail else None,
        )

    def _logprob(self, i: int, alternatives: int) -> core.TokenLogprob:
        token, begin = self.tokens[i], len("".join(self.tokens[:i]))
        top = ((token, i, -0.25), ("other", 99, float("-inf")))
        return core.TokenLogprob(token, i, -0.25, top[:alternatives], begin)

    @staticmethod
    def _wanted(request: core.Request, logprobs: list[core.TokenLogprob]) -> tuple[core.TokenLogprob, ...]:
        return () if request.sampling.logprobs is None else tuple(logprobs)

    def _prompt_tokens(self, request: core.Request) -> int:
        if isinstance(request.prompt, tuple):
            return len(request.prompt)
        text = request.prompt or " ".join(message.content for message in request.messages)
        return self.count_tokens(text)

    def prompt_tokens(self, request: core.Request) -> int:
        self.requests.append(request)
        return self._prompt_tokens(request)

    def token_bytes(self, token: int) -> bytes:
        """Of its answer's token with this number; what is a piece of a character there is its first byte."""
        text = self.tokens[token] if token < len(self.tokens) else "other"
        return text.encode() if "\ufffd" not in text else b"\xc3"

    def pieces(self, tokens: core.Tokens) -> list[str]:
        return [f" {token}" for token in tokens]

    def inventory(self, tenant: str) -> core.Inventory:
        """Two nodes, one below the other, that say whose they are."""
        first = core.Holding("aa", None, 20, 117, ("device", "host"), 3, True, "causal", "", f"system of {tenant}")
        second = core.Holding("bb", "aa", 97, 97, ("disk",), 0, False, "isolated", "naive", f"harbour of {tenant}")
        left = core.Departure(12.0, 40, "device", "host", f"ferry of {tenant}")
        served = [core.Served(float(age), "naive", 130, 117 - age, 60.0 + age) for age in range(len(self.requests))]
        used = {} if tenant else {"device": 0.25, "host": 0.5}
        tokens = {"device": 20, "host": 20}
        return core.Inventory("lru", tokens, used, 2, (first, second), True, (left,), tuple(served))

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def stats(self) -> Mapping[str, Any]:
        """All of an engine's counters and gauges; those that are not told of here are zero."""
        from ragjax.serve.metric import HELP

        count = len(self.requests)
        strategies = ((request.rag and request.rag.strategy) or self.default_strategy for request in self.requests)
        return {
            **dict.fromkeys(HELP, 0),
            "requests_total": Counter(strategies),
            "prompt_tokens_total": 9 * count,
            "reused_tokens_total": 7 * count,
            "recomputed_tokens_total": count,
            "generated_tokens_total": len(self.tokens) * self.finished,
            "cancelled_total": self.cancelled,
            "programs_left": self.programs_left,
            "shadow_replays_total": {"replayed": 1, "dropped": 0, "failed": 0},
            "shadow_escalations_total": {"raise": 0, "exact": 0, "fault": 0},
            "running": self.running,
            "pages_total": 128,
            "attention_calls_total": {"xla": 30 * count},
            "attention_fallbacks_total": {"triton: no such kernel": 30 * count},
        }

    def close(self) -> None:
        if "library" in vars(self):
            self.library.close()
        self.closed = True


class WordEncoder:
    """Embeds a text as the normalised sum of its words' random vectors, and counts what it was given."""

    dim = 48

    def __init__(self, identity: str = "words"):
        self.identity = identity
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str], query: bool = False) -> np.ndarray:
        self.encoded += texts
        return np.stack([self._embed(text) for text in texts]).astype(np.float32)

    def _embed(self, text: str) -> np.ndarray:
        total = np.sum([self._word(word) for word in re.findall(r"\w+", text.lower()) or [text]], axis=0)
        return total / np.linalg.norm(total)

    def _word(self, word: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8])
        return np.random.default_rng(seed).normal(size=self.dim)
