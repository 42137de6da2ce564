"""Condensing: of every chunk of a knowledge base a share of the KV is chosen and kept, before anybody asks.

`ragjax.reuse.condense` says how tokens are chosen; here is what the model is made to read, and when. As preprocessing
it goes through the engine a few chunks at a time, behind all other requests, and goes on where it was stopped.

    with Engine.load("smollm2-135m-instruct", knowledge="docs/") as engine:
        print(condense(engine, share=1 / 3))
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from tqdm import tqdm

from ragjax.cache.keys import raw_of
from ragjax.core import Chunk, ConfigError, Hit, Kind, Prompt, Segment, Tokens
from ragjax.engine import Engine
from ragjax.engine.preprocessing import answers_of, head_of
from ragjax.prompting.chat import chunk_segment
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.reuse.condense import Condense, kept_of

Probe = Literal["repeat", "questions"]
"""What a chunk's tokens are scored by: the chunk read again ("repeat", KVzip's), or questions that the model asks."""

REPEAT = "\n\nRepeat the text above word for word:\n\n"
ASK = "\n\nThree questions that the text above answers:\n1."
ASKED = 48
"""Tokens of the questions that the model asks."""

_GROUP = 8  # chunks that are marked together: what a kill can cost

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CondenseReport:
    """What became of the chunks. seconds: of the whole run.

    condensed: chosen from now. kept: nothing had to be computed for. lost: their KV is not there any more at the end,
    because the tiers are too small. tokens, kept_tokens: of all chunks, and those whose KV is kept.
    """

    chunks: int
    condensed: int
    kept: int
    lost: int
    tokens: int
    kept_tokens: int
    seconds: float

    def __str__(self) -> str:
        share = f"{self.kept_tokens} of {self.tokens} tokens"
        return f"{self.chunks} chunks, {share}: {self.condensed} condensed, {self.kept} kept, in {self.seconds:.1f} s"


def condense_all(
    engine: Engine,
    system: Segment,
    chunks: Sequence[Segment],
    strategy: Condense,
    probe: Probe = "repeat",
    step: Callable[[], object] = lambda: None,
) -> list[tuple[int, ...]]:
    """Choose tokens of each chunk, and keep their KV; returns the `Segment.condensed` of each.

    Chunks that have a choice of the strategy's share, and whose KV is there, stay as they are. A chunk that leaves the
    context no room for its probe has an empty choice. step: called after each chunk.
    """
    kept = [segment.condensed for segment in chunks]
    todo = [i for i, is_held in enumerate(_held(engine, system, chunks, strategy)) if not is_held]
    for _ in range(len(chunks) - len(todo)):
        step()
    wanted = {raw_of(chunks[i].tokens): replace(chunks[i], condensed=()) for i in todo}
    prompts = list(_prompts(engine, system, list(wanted.values()), probe))
    for _ in answers_of(engine, prompts, strategy):
        pass
    for i in todo:
        kept[i] = strategy.chosen.get(raw_of(chunks[i].tokens), ())
        step()
    return kept


def condense(
    engine: Engine,
    knowledge: str | None = None,
    *,
    share: float,
    probe: Probe = "repeat",
    system: str | None = None,
    progress: bool = True,
) -> CondenseReport:
    """Condense every chunk of a knowledge base; requests of `naive`, `fusion` and `ragjax` use it from then on.

    May run while the engine serves others, which go first. May be stopped at any time and run again. With a share of 1
    the chunks are marked as not condensed, and requests use all of their KV again.

    Args:
        engine: where the KV is kept. Without a disk cache it is lost when the engine closes.
        knowledge: name of the knowledge base (None: the default one).
        share: of each chunk's tokens, in (0, 1].
        probe: what the tokens are scored by.
        system: the system message of requests that shall find the KV (None: that of requests which bring none).
        progress: show a progress bar.

    Raises:
        ConfigError: for a share outside of (0, 1], or an unknown probe.
        RequestError: if there is no such knowledge base.
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"a share of a chunk's tokens lies in (0, 1], not {share!r}")
    if probe not in get_args(Probe):
        raise ConfigError(f"unknown probe {probe!r}; choose one of {', '.join(get_args(Probe))}")
    began = time.perf_counter()
    base, head = engine.knowledge_base(knowledge), head_of(engine, system)
    numbers = base.numbers
    made = tokens = kept_tokens = 0
    with tqdm(total=len(numbers), desc="condensing", unit="chunk", disable=not progress) as bar:
        for begin in range(0, len(numbers), _GROUP):
            chunks = base.chunks(numbers[begin : begin + _GROUP])
            segments = [_segment(engine, chunk) for chunk in chunks.values()]
            if share == 1.0:
                kept: list[tuple[int, ...]] = [() for _ in segments]
                bar.update(len(segments))
            else:
                kept = condense_all(engine, head, segments, Condense(share), probe, bar.update)
            made += _mark(base, chunks, kept)
            tokens += sum(map(len, segments))
            kept_tokens += sum(len(places) or len(segment) for places, segment in zip(kept, segments, strict=True))
    lost = 0 if share == 1.0 else _lost(engine, base, head, share)
    if lost:
        _log.warning("the KV of %d chunks is not there: give the engine a disk cache, or a larger one", lost)
    seconds = time.perf_counter() - began
    return CondenseReport(len(numbers), made, len(numbers) - made, lost, tokens, kept_tokens, seconds)


def _mark(base: KnowledgeBase, chunks: Mapping[int, Chunk], kept: Sequence[tuple[int, ...]]) -> int:
    """Note what was chosen; returns how many chunks have another choice than before."""
    changed = [
        (number, places)
        for (number, chunk), places in zip(chunks.items(), kept, strict=True)
        if chunk.condensed != places
    ]
    return sum(base.mark_condensed(number, places) for number, places in changed)


def _lost(engine: Engine, base: KnowledgeBase, head: Segment, share: float) -> int:
    """How many chunks have no condensed KV of this share, or none that is there."""
    segments = [_segment(engine, chunk) for chunk in base.chunks(base.numbers).values()]
    return len(segments) - sum(_held(engine, head, segments, Condense(share)))


def _held(engine: Engine, system: Segment, chunks: Sequence[Segment], strategy: Condense) -> list[bool]:
    """Of which chunks a choice of the strategy's share is known, and its KV there."""
    known = [len(chunk.condensed) == kept_of(len(chunk), strategy.share) for chunk in chunks]
    prompts = [_probed(system, chunk, chunk.tokens[:1]) for chunk in chunks]
    there = engine.holds([prompt for prompt, is_known in zip(prompts, known, strict=True) if is_known], strategy)
    found = iter(there)
    return [is_known and next(found) for is_known in known]


def _prompts(engine: Engine, system: Segment, chunks: Sequence[Segment], probe: Probe) -> Iterator[Prompt]:
    """Each chunk before its probe; those that do not fit the context are left out."""
    opening = _encode(engine, REPEAT if probe == "repeat" else ASK)
    behind = max((len(chunk) for chunk in chunks), default=0) if probe == "repeat" else ASKED
    fitting = []
    for chunk in chunks:
        if len(system) + len(chunk) + len(opening) + behind < engine.context_length:
            fitting.append(chunk)
        else:
            _log.warning("a chunk of %d tokens is not condensed: its probe does not fit the context", len(chunk))
    if probe == "repeat":
        yield from (_probed(system, chunk, _joined(opening, chunk.tokens)) for chunk in fitting)
        return
    # "full" leaves nothing of the whole chunks in the cache
    asking = [_probed(system, chunk, opening) for chunk in fitting]
    begun = [
        engine.begin_prompt(prompt, strategy="full", background=True, max_tokens=ASKED, compression="none")
        for prompt in asking
    ]
    for chunk, future in zip(fitting, begun, strict=True):
        yield _probed(system, chunk, _joined(opening, future.result().tokens))


def _probed(system: Segment, chunk: Segment, probe: Tokens) -> Prompt:
    return Prompt((system, chunk, Segment("probe", Kind.QUERY, probe)))


def _encode(engine: Engine, text: str) -> Tokens:
    return engine.tokenizer.encode(text, special=False, continued=True)


def _joined(first: Tokens, then: Sequence[int] | Tokens) -> Tokens:
    return np.concatenate([first, np.asarray(then, np.int32)])


def _segment(engine: Engine, chunk: Chunk) -> Segment:
    return chunk_segment(Hit(chunk, 1.0, engine.share_knowledge))
