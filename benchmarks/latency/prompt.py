"""The prompt that latencies are measured on: real English text, cut into chunks and questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common.machine import ROOT
from ragjax.core import Kind, Prompt, Segment
from ragjax.engine.preprocessing import Job
from ragjax.models.tokenizer import Tokenizer

TEXTS = ROOT / "benchmarks" / "texts"
SYSTEM = "Read the passages below with care, then go on where the last of them breaks off. Be brief and exact."
CHUNKS, CHUNK_TOKENS, QUESTION_TOKENS, SHORT = 10, 200, 30, 512


@dataclass(frozen=True)
class Case:
    """One thing to measure. `long`: the 2K prompt; `decode`: also generate, to time the tokens after the first."""

    strategy: str
    state: str = "cold"
    order: str = "same"
    long: bool = True
    decode: bool = False

    @property
    def key(self) -> str:
        return f"{self.strategy}/{self.state}/{self.order}/{'long' if self.long else 'short'}"


LONG = Case("full", decode=True)
BRIEF = Case("full", long=False, decode=True)
COLD_PREFIX = Case("prefix")
WARM_PREFIX = Case("prefix", "warm")
OWN_CASES = (
    LONG, BRIEF, COLD_PREFIX, WARM_PREFIX, Case("prefix", "warm", "shuffled"), Case("naive"), Case("naive", "warm"),
    Case("naive", "warm", "shuffled"),
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Prompts of real English text. `before` is asked first where a case is warm, `prompt` is measured."""

    before: Prompt
    prompt: Prompt
    shuffled: Prompt
    short: Prompt

    def of(self, case: Case) -> Prompt:
        if not case.long:
            return self.short
        return self.shuffled if case.order == "shuffled" else self.prompt


def workload(tokenizer: Tokenizer) -> Workload:
    text = "\n\n".join(path.read_text().strip() for path in sorted(TEXTS.glob("*.txt")))
    words = tokenizer.encode(text, special=False)
    system = Segment("system", Kind.SYSTEM, tokenizer.encode(SYSTEM, special=False))
    end = CHUNKS * CHUNK_TOKENS
    chunks = [
        Segment(f"chunk-{i}", Kind.CHUNK, words[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS]) for i in range(CHUNKS)
    ]
    first, second = (
        Segment(f"question-{i}", Kind.QUERY, words[end + i * QUESTION_TOKENS : end + (i + 1) * QUESTION_TOKENS])
        for i in range(2)
    )
    order = np.random.default_rng(0).permutation(CHUNKS)
    last = SHORT - len(system) - 2 * CHUNK_TOKENS - QUESTION_TOKENS
    cut = replace(chunks[2], tokens=chunks[2].tokens[:last])
    return Workload(
        before=Prompt((system, *chunks, first)),
        prompt=Prompt((system, *chunks, second)),
        shuffled=Prompt((system, *(chunks[i] for i in order), second)),
        short=Prompt((system, *chunks[:2], cut, second)),
    )


def jobs(prompt: Prompt) -> list[Job]:
    """Each chunk behind all others, in the prompt's order."""
    chunks = [replace(segment, behind=b"") for segment in prompt.segments if segment.kind is Kind.CHUNK]
    return [Job(prompt.segments[0], chunk, tuple(c for c in chunks if c is not chunk)) for chunk in chunks]


def marked(prompt: Prompt, behind: Mapping[str, bytes]) -> Prompt:
    return Prompt(tuple(replace(segment, behind=behind.get(segment.id, b"")) for segment in prompt.segments))


def common_prefix(one: Prompt, other: Prompt) -> int:
    """How many tokens two prompts share from the start on."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(one.tokens[:n] != other.tokens[:n])
    return int(differs[0]) if len(differs) else n
