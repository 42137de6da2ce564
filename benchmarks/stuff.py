"""RAG programs that stuff passages into the user's message: tokens reused, time to the first token, divergence.

N questions of a set are asked one after the other over M passages: those that support the questions, and others of the
corpus. The packaged encoder finds K for each question, best first, and they are put into the message as LangChain's
"stuff" chain does it (`user`: its question-answering prompt; `system`: as `create_stuff_documents_chain`, passages in
the system message). Nothing else is told to the server: no ids, no `rag` field but the strategy.

Each system starts with an empty cache, its programs compiled (with --quick those alone that three requests run). From
the second request on: `reused` is the share of all prompt tokens whose KV came from the cache, `ttft_ms` the median and
`ttft_mean_ms` the mean time to the first token. `kl` (nats a token) and `top1` compare with full attention over the
whole text, over the reference answer's first 12 tokens: of exact systems they are 0 and 1 up to rounding. `full` and
`prefix` do not recognise passages, `naive` and `anchor` do. `--llamacpp` adds llama.cpp with its prompt cache (the
equal prefix of the prompt before) and the packaged file; it is installed on first use. `other_load`: cores that other
programs kept busy meanwhile.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import envs, report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.latency.system import OtherLoad
from benchmarks.quality import dataset
from benchmarks.quality.dataset import QuestionSet
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import integer
from ragjax.core import Answer, Document, Message, Tokens
from ragjax.engine import Engine
from ragjax.models import hub
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.chat import chat_prompt
from ragjax.quality.report import divergence
from ragjax.retrieval.knowledge import TextEncoder

STUFF = (
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
    "that you don't know, don't try to make up an answer.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:"
)
"""LangChain's question-answering prompt."""

STUFF_SYSTEM = "Use the following pieces of retrieved context to answer the question in one sentence.\n\n{context}"

COMPARED = 12  # tokens of the reference answer that divergence is over
THREADS = 2
WARM = 3
"""Requests that each system answers before its cache is emptied and it begins, so that its programs are compiled."""

COLUMNS = ("system", "recognise", "n", "prompt_tokens", "reused", "ttft_ms", "ttft_mean_ms", "kl", "top1", "other_load")


@dataclass(frozen=True)
class System:
    """A strategy of ours. recognise: whether passages in messages are recognised."""

    strategy: str
    recognise: bool


SYSTEMS = (System("full", False), System("prefix", False), System("naive", True), System("anchor", True))


@dataclass(frozen=True)
class Asked:
    """One request. answer: tokens of the reference, int32 [n]."""

    messages: tuple[Message, ...]
    answer: Tokens


@dataclass(frozen=True)
class Served:
    """What came of one. scores: logits that predict the answer's tokens, float32 [n, vocab]."""

    prompt_tokens: int
    reused: int
    ttft_ms: float
    scores_NV: NDArray[np.float32] | None = None


def pool(questions: QuestionSet, count: int, passages: int, found: int) -> list[Document]:
    """Passages of the first `count` questions, a few of each in turn, then others of the corpus."""
    kept: dict[str, Document] = {}
    for rank in range(found):
        for question in questions.questions[:count]:
            if rank < len(question.passages) and len(kept) < passages:
                kept.setdefault(question.passages[rank].text, question.passages[rank])
    for document in questions.corpus.values():
        if len(kept) >= passages:
            break
        kept.setdefault(document.text, document)
    return list(kept.values())


def stuffed(question: str, passages: Sequence[str], shape: str) -> tuple[Message, ...]:
    context = "\n\n".join(passages)
    if shape == "system":
        return Message("system", STUFF_SYSTEM.format(context=context)), Message("user", question)
    return (Message("user", STUFF.format(context=context, question=question)),)


def requests(questions: QuestionSet, chosen: Namespace, encoder: TextEncoder, tokenizer: Tokenizer) -> list[Asked]:
    documents = pool(questions, chosen.questions, chosen.passages, chosen.found)
    vectors_NE = encoder.encode([document.text for document in documents])
    asked = []
    for question in questions.questions[: chosen.questions]:
        near = np.argsort(-(vectors_NE @ encoder.encode([question.text])[0]), kind="stable")[: chosen.found]
        messages = stuffed(question.text, [documents[i].text for i in near], chosen.shape)
        answer = tokenizer.encode(f" {question.answers[0]}", special=False, continued=True)[:COMPARED]
        asked.append(Asked(messages, answer))
    return asked


def measured(engine: Engine, system: System, asked: Sequence[Asked]) -> Iterator[Served]:
    """Each request in turn, from an empty cache on; its divergence is measured behind it."""
    for one in asked[:WARM]:  # compiles what the strategy runs, cold and warm
        _answer(engine, system, one)
        _scores(engine, system, one)
    engine.clear_cache()
    for one in asked:
        answer = _answer(engine, system, one)
        scores = _scores(engine, system, one)
        yield Served(answer.prompt_tokens, answer.cached_tokens, answer.timings.ttft, scores)


def _answer(engine: Engine, system: System, one: Asked) -> Answer:
    return engine.answer(one.messages, strategy=system.strategy, recognise=system.recognise, max_tokens=1)


def _scores(engine: Engine, system: System, one: Asked) -> NDArray[np.float32] | None:
    return engine.answer(
        one.messages, strategy=system.strategy, recognise=system.recognise, continuation=one.answer, max_tokens=1
    ).scores


def llama_cpp(model: str, tokenizer: Tokenizer, asked: Sequence[Asked]) -> Iterator[Served]:
    """The same prompts by llama.cpp, which keeps what a prompt shares with the one before."""
    with envs.Worker([envs.python("llamacpp"), envs.WORKERS / "llamacpp_worker.py"]) as worker:
        worker.ask({"op": "load", "model": str(hub.resolve(model).path), "threads": THREADS})
        before = np.zeros(0, np.int32)
        for one in asked:
            tokens = chat_prompt(tokenizer, one.messages, None).tokens
            kept = common_prefix(before, tokens)
            told = worker.ask({"op": "generate", "tokens": tokens.tolist(), "new": 1, "keep": kept})
            yield Served(len(tokens), kept, told["ttft_ms"])
            before = tokens


def common_prefix(before: Tokens, tokens: Tokens) -> int:
    """Tokens (int32 [n]) that two prompts share at the start; the last of a prompt is always computed."""
    n = min(len(before), len(tokens) - 1)
    differ = np.flatnonzero(before[:n] != tokens[:n])
    return int(differ[0]) if len(differ) else n


def row(name: str, recognise: bool, served: Sequence[Served], exact: Sequence[Served], load: float) -> dict[str, Any]:
    later = served[1:]
    ttft = [one.ttft_ms for one in later]
    far = [
        divergence(full.scores_NV, one.scores_NV)
        for one, full in zip(later, exact[1:], strict=True)
        if one.scores_NV is not None and full.scores_NV is not None
    ]
    return {
        "system": name, "recognise": recognise, "n": len(later),
        "prompt_tokens": float(np.mean([one.prompt_tokens for one in later])),
        "reused": sum(one.reused for one in later) / sum(one.prompt_tokens for one in later),
        "ttft_ms": float(np.median(ttft)),
        "ttft_mean_ms": float(np.mean(ttft)),
        "kl": float(np.mean([one.kl for one in far])) if far else None,
        "top1": float(np.mean([one.top1 for one in far])) if far else None,
        "other_load": load,
    }  # fmt: skip


def rows(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    questions = dataset.load(chosen.data, chosen.set)
    with Engine.load(
        chosen.model, strategy="anchor", dtype=chosen.dtype, device_cache_gb=2.0, progress=False,
        compile=not chosen.quick,
    ) as engine:  # fmt: skip
        asked = requests(questions, chosen, packaged_encoder(), engine.tokenizer)
        work: list[tuple[str, bool, Callable[[], Iterator[Served]]]] = [
            (system.strategy, system.recognise, lambda system=system: measured(engine, system, asked))  # type: ignore[misc]
            for system in SYSTEMS
        ]
        if chosen.llamacpp:
            work.append(("llama.cpp", False, lambda: llama_cpp(chosen.model, engine.tokenizer, asked)))
        exact: list[Served] = []
        for name, recognise, run in work:
            load, busy, served = OtherLoad(os.getpid()), 0.0, []
            for one in run():
                served.append(one)
                busy = load.so_far()  # while a rival's process still runs, whose time is not others'
                print(f"{name}: {len(served)} of {len(asked)}", end="\r", file=sys.stderr)
            exact = exact or served
            yield row(name, recognise, served, exact, busy)


def options(flags: Parser) -> None:
    flags.add("--data", type=report.existing_folder, required=True, metavar="DIR", help="a folder with text/SET")
    flags.add("--set", default="nq_open", metavar="NAME", help="the set of questions")
    flags.add("--questions", type=integer(2), default=50, quick=8, metavar="N", help="questions asked")
    flags.add("--passages", type=integer(1), default=500, quick=24, metavar="M", help="passages to find some in")
    flags.add("--found", type=integer(1), default=4, metavar="K", help="passages of a message")
    flags.add("--shape", choices=("user", "system"), default="user", help="whose message has the passages")
    flags.add("--llamacpp", action="store_true", help="ask llama.cpp, too")


main = Benchmark("stuff", __doc__, COLUMNS, rows, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
