"""The programs that a request needs: it waits by itself until they are made, while others go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ragjax.core import Compression
from ragjax.reuse import compaction
from ragjax.reuse.base import Strategy
from ragjax.runner.pool import MOVES
from ragjax.runner.programs import Name
from ragjax.runner.runner import Runner
from ragjax.runner.sampling import ADJUSTED
from ragjax.schedule.state import RequestState


def needed(runner: Runner, state: RequestState) -> Iterator[Name]:
    """The programs without which the request cannot be answered, in steps of the least shapes."""
    compression = state.compression if state.compresses else None
    segments, tokens = len(state.prompt.segments), len(state.prompt)
    yield from least(runner, [state.strategy], compression, segments=segments, tokens=tokens)
    if state.sampler is not None and state.sampler.constraint is not None:
        yield from (("allow", n) for n in runner.grid.logits)
    asked = state.request.sampling
    repeats = asked.repetition_penalty != 1.0
    fewest = len(asked.logit_bias) + (len(set(state.plain.tokens.tolist())) if repeats else 0)
    most = fewest
    if repeats or asked.presence_penalty or asked.frequency_penalty:
        most += state.decode_tokens
    for size in ADJUSTED if most else ():
        if size >= fewest:
            yield from (("sample", n, size) for n in runner.grid.logits)
        if size >= most:
            return


def least(
    runner: Runner,
    strategies: Iterable[Strategy],
    compression: Compression | None,
    *,
    segments: int = 0,
    tokens: int | None = None,
    whole: bool = False,
) -> list[Name]:
    """Names of programs for prompts of some strategies, in steps of the least shapes, or of the whole grid."""
    shapes = runner.grid.rows if whole else runner.grid.least
    compressing = frozenset() if compression is None else compaction.measures_of(compression)
    named: dict[Name, None] = {}
    for strategy in strategies:
        for measures, end in ((strategy.measures, strategy.early_end), (compressing, 0)):
            found = runner.programs(measures, end, compression, shapes=shapes, segments=segments, tokens=tokens)
            named |= dict.fromkeys(found)
    return list(named)


def planned(
    runner: Runner, default: Iterable[Strategy], offered: Mapping[str, Strategy], compression: Compression | None
) -> list[Name]:
    """Names of programs that are made after the start, most used first.

    Strategies that are not the default one have those of the least shapes, which serve prompts of any length.
    """
    largest = max((shape for shape in runner.grid.rows if not shape.mixed), key=lambda shape: shape.rows)
    served = list(default)
    names = runner.programs(shapes=[largest]) + least(runner, served, compression, whole=True)
    names += [("move", n) for n in MOVES]
    for strategy in offered.values():
        names += least(runner, [strategy], None)
    return names + [("allow", n) for n in runner.grid.logits]
