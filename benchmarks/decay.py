"""The curve of reuse over novel questions: tokens found, time to the first token and stored KV, by strategy.

N questions, none of which comes twice, each over K of the documents in an order that never came before. The store is
the device alone, and holds a fifth of the KV that all prompts have together: a cache of prefixes would need five times
as much to forget nothing, while the documents' own KV fits. A prompt is a system prompt, the documents as chunks, and a
question, which is not kept (`--keep documents`). Every strategy begins with an empty cache; `full` answers each tenth
question besides, for the ratio.

A row is a strategy and a tenth of the questions: `found` is the share of the prompts' tokens whose KV came from the
cache, `ttft_ms` the median time to the first token, `faster` that of `full` by it, `stored` the tokens that the cache
holds then by those of all documents, `kept` the ratio of `faster` to that of the first tenth. `--tiny` asks a random
model of three small layers, in the real engine and cache: found and stored tokens depend on no model, times say nothing
then. `--rivals` adds llama.cpp, which keeps the prefix shared with the prompt before, and OpenVINO GenAI and vLLM with
their prefix caches, over the first tenth of the questions. Passages are not preprocessed.
"""

from __future__ import annotations

import os
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import envs, report
from benchmarks.common.questions import excerpt
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.latency.prompt import common_prefix
from benchmarks.latency.system import THREADS, OtherLoad
from benchmarks.load.server import in_bfloat16
from benchmarks.quality import dataset
from ragjax.commands.flags import integer
from ragjax.core import Kind, Prompt, Segment, StorageOptions, Tokens
from ragjax.engine import Engine
from ragjax.models import hub
from ragjax.models.tokenizer import Tokenizer
from ragjax.reuse import strategies
from tests.support import tiny

COLUMNS = ("system", "questions", "prompt_tokens", "found", "ttft_ms", "faster", "kept", "stored", "other_load")
SYSTEM = "Answer the question in one short sentence, using the passages."
TOO_SMALL = 5
"""How many times the KV of all prompts is larger than the store."""

PARTS = 10  # of the questions, a row each
WARM = 4  # questions before the cache is emptied, so that programs are compiled
TEXTS = ("jefferson", "carroll", "melville", "lincoln", "austen")


def made(number: int, words: int) -> str:
    """A made document: words of one of the texts in an order of its own, so that no two share a run of words."""
    draw = random.Random(number)
    found = excerpt(TEXTS[number % len(TEXTS)], 2000).split()
    return f"Document {number}. " + " ".join(draw.choice(found) for _ in range(words))


def documents(tokenizer: Tokenizer, chosen: Namespace) -> list[Tokens]:
    """The documents' tokens, int32 [chosen.length] each."""
    if chosen.data is None:
        texts: Iterator[str] = (made(number, chosen.length) for number in count())
    else:
        texts = (one.text for one in dataset.load(chosen.data, chosen.set).corpus.values())
    encoded = (tokenizer.encode(text, special=False, continued=True) for text in texts)
    long = (tokens[: chosen.length] for tokens in encoded if len(tokens) >= chosen.length)
    return [tokens for _, tokens in zip(range(chosen.documents), long, strict=False)]


def prompts(tokenizer: Tokenizer, texts: Sequence[Tokens], chosen: Namespace) -> list[Prompt]:
    """A prompt for each question; no combination and order of documents comes twice."""
    draw, seen = random.Random(chosen.seed), set[tuple[int, ...]]()
    head = Segment("system", Kind.SYSTEM, tokenizer.encode(SYSTEM, special=False), public=True)
    found: list[Prompt] = []
    while len(found) < chosen.questions:
        order = tuple(draw.sample(range(len(texts)), chosen.found))
        if order in seen:
            continue
        seen.add(order)
        asked = f"\nQuestion {len(found)}: what do passages {draw.random():.6f} and {draw.random():.6f} say?\nAnswer:"
        question = Segment("question", Kind.QUERY, tokenizer.encode(asked, special=False, continued=True))
        found.append(Prompt((head, *(Segment(f"d{i}", Kind.CHUNK, texts[i]) for i in order), question)))
    return found


def asked(engine: Engine, strategy: str, work: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Each question in turn, from an empty cache on."""
    for prompt in work[:WARM]:
        engine.answer_prompt(prompt, strategy=strategy, max_tokens=2)
    engine.clear_cache()
    for number, prompt in enumerate(work):
        full = None
        if number % 10 == 0:
            full = engine.answer_prompt(prompt, strategy="full", max_tokens=1).timings.ttft
        answer = engine.answer_prompt(prompt, strategy=strategy, max_tokens=2)
        yield {
            "tokens": len(prompt), "found": answer.cached_tokens, "ttft": answer.timings.ttft, "full": full,
            "stored": sum(engine.inventory(most=1).tokens.values()) if number % 10 == 9 else None,
        }  # fmt: skip


RIVALS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama.cpp": ("llamacpp", "llamacpp_worker.py", {"threads": THREADS}),
    "openvino": ("openvino", "openvino_worker.py", {"threads": THREADS, "precision": "bf16", "prefix": True}),
    "vllm": ("vllm", "vllm_worker.py", {"gigabytes": 1, "context": 1024}),
}
"""Environment, worker, and how it loads."""


def rivals(name: str, work: Sequence[Prompt], model: str) -> Iterator[dict[str, Any]]:
    """The same prompts by a rival with its own cache of prefixes; OpenVINO does not tell what it found."""
    home, script, settings = RIVALS[name]
    path = in_bfloat16(hub.resolve(model).path) if name == "vllm" else hub.resolve(model).path
    with envs.Worker([envs.python(home), envs.WORKERS / script]) as worker:
        worker.ask({"op": "load", "model": str(path), **settings})
        before: Prompt | None = None
        for number, prompt in enumerate(work):
            request = {"op": "generate", "tokens": prompt.tokens.tolist(), "new": 1}
            full = None
            if number % 10 == 0 and name != "openvino":
                alone = {"keep": 0} if name == "llama.cpp" else {"salt": f"full {number}"}
                full = worker.ask(request | alone)["ttft_ms"]
                before = None
            kept = 0 if before is None else min(common_prefix(before, prompt), len(prompt) - 1)
            told = worker.ask(request | ({"keep": kept} if name == "llama.cpp" else {}))
            found = kept if name == "llama.cpp" else told.get("found")
            yield {"tokens": len(prompt), "found": found, "ttft": told["ttft_ms"], "full": full, "stored": None}
            before = prompt


def rows_of(name: str, told: Sequence[Mapping[str, Any]], own: int, load: float) -> Iterator[dict[str, Any]]:
    """A row for each tenth of the questions. own: tokens of all documents."""
    first: float | None = None
    for part in np.array_split(np.arange(len(told)), PARTS):
        some = [told[i] for i in part]
        if not some:
            continue
        ttft, full = median(one["ttft"] for one in some), [one["full"] for one in some if one["full"] is not None]
        faster = median(full) / ttft if full else None
        first = first or faster
        known = all(one["found"] is not None for one in some)
        yield {
            "system": name, "questions": int(part[-1]) + 1,
            "prompt_tokens": sum(one["tokens"] for one in some) / len(some),
            "found": sum(one["found"] for one in some) / sum(one["tokens"] for one in some) if known else None,
            "ttft_ms": ttft, "faster": faster, "kept": None if faster is None or first is None else faster / first,
            "stored": max((one["stored"] / own for one in some if one["stored"] is not None), default=None),
            "other_load": load,
        }  # fmt: skip


def opened(chosen: Namespace, room: int) -> Engine:
    """An engine whose device holds so many tokens, and nothing below it."""
    if chosen.tiny:
        pages = room // tiny.PAGE
        return tiny.engine(tiny.make_runner(pages=pages), pages=pages, policy="lacr", keep="documents")
    return Engine.load(
        chosen.model, knowledge=None, dtype=chosen.dtype, device_cache_gb=room * chosen.kv_bytes / 2**30,
        storage=StorageOptions(host_gb=0.0, keep="documents"), progress=False, max_context=1024,
    )  # fmt: skip


def rows(chosen: Namespace, session: Session) -> Iterator[dict[str, Any]]:
    samples = session.samples()
    tokenizer = tiny.byte_tokenizer() if chosen.tiny else Tokenizer.load(hub.resolve(chosen.model).path)
    texts = documents(tokenizer, chosen)
    work, own = prompts(tokenizer, texts, chosen), sum(map(len, texts))
    names = [*chosen.systems, *(RIVALS if chosen.rivals else ())]
    lacking = [name for name in chosen.systems if samples.get(name) is None]
    if lacking:
        with opened(chosen, sum(map(len, work)) // TOO_SMALL) as engine:
            for name in lacking:
                load, told = OtherLoad(os.getpid()), list(asked(engine, name, work))
                samples.put(name, {"told": told, "load": load.so_far()})
                print(f"{name}: done", file=sys.stderr)
    for name in names:
        if samples.get(name) is None:
            told = list(rivals(name, work[: len(work) // PARTS], chosen.model))
            samples.put(name, {"told": told, "load": None})
        kept = samples.get(name) or {}
        yield from rows_of(name, kept["told"], own, kept["load"])


SYSTEMS = ("full", "prefix", "naive", "moved", "anchor", "craft", "fusion", "blend")


def options(flags: Parser) -> None:
    known = report.among(strategies(), "strategy")
    few = ["full", "prefix", "naive", "moved"]
    flags.add("--systems", type=known, default=[*SYSTEMS], quick=few, metavar="A,B", help="strategies")
    flags.add("--questions", type=integer(10), default=1000, quick=100, metavar="N", help="questions")
    flags.add("--documents", type=integer(4), default=200, quick=20, metavar="N", help="documents")
    flags.add("--length", type=integer(16), default=64, metavar="N", help="tokens of a document")
    flags.add("--found", type=integer(2), default=3, metavar="K", help="documents of a question")
    flags.add("--seed", type=integer(0), default=0, metavar="N", help="of the draws")
    flags.add("--kv-bytes", type=integer(1), default=23040, metavar="N", help="bytes of KV of a token of the model")
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="a folder with text/SET, for its passages")
    flags.add("--set", default="nq_open", metavar="NAME", help="the set of passages")
    flags.add("--tiny", action="store_true", help="a random model of three layers: found and stored tokens alone")
    flags.add("--rivals", action="store_true", help="ask llama.cpp, OpenVINO and vLLM, too")


main = Benchmark("decay", __doc__, COLUMNS, rows, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
