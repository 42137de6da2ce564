"""dependency: a knowledge graph's paths as trees, each token on its ancestors alone (DepCache, doi 10.1145/3769778).

The cached part of each path is read in place; the rest is computed in one pass together with the question, and admitted
branch by branch (sections 4.2.1 and 5, Algorithm 2). Under `dependency` a token's position is its depth on its own
path, so its KV is the same beside any siblings. `dependency-preorder` is the paper's: positions in order, and KV that
was computed at other positions is moved, which is exact only if no token of its path has moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragjax import core
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Outlook, Paths
from ragjax.cache.match import Match, Totals
from ragjax.cache.node import raw_of
from ragjax.cache.tree import Provenance
from ragjax.core.depprompt import Positions, begins_of, paths_of
from ragjax.core.tiers import Tier
from ragjax.reuse.base import Allocation, Strategy, indices, match_spans, report
from ragjax.reuse.exact import leading_part
from ragjax.reuse.head import keep_leading, system_length

Path = tuple[int, ...]
"""Indices of a tree's segments from its root to one of them."""

OWN_RUNS = 2
"""Runs of the request's own: a page that they share with the context, and one that they share among themselves."""


@dataclass(frozen=True)
class Found:
    spans: tuple[core.Span, ...]
    tokens: int
    tier: Tier | None
    exact: bool


@dataclass(frozen=True)
class Scene:
    """A prompt as one scheme of positions sees it."""

    prompt: core.Prompt
    begins: tuple[int, ...]  # RoPE position of each segment's first token
    hidden: tuple[tuple[int, int], ...]  # indexes that must not see the segment, half-open

    @cached_property
    def paths(self) -> dict[int, Path]:
        """Root path of each node whose KV may be kept: its root depends on the system segments alone."""
        found = paths_of(self.prompt)
        return {i: path for i, path in found.items() if self.prompt.segments[path[0]].depends is None}

    @property
    def chain(self) -> bool:
        """True if dependency attention is full attention: no node, and no segment that names its dependencies."""
        return all(s.kind is not core.Kind.NODE and s.depends is None for s in self.prompt.segments)

    @property
    def leaves(self) -> list[Path]:
        inner = {j for path in self.paths.values() for j in path[:-1]}
        return [path for i, path in self.paths.items() if i not in inner]

    def spell(self, path: Path) -> tuple[core.Tokens, list[int]]:
        parts = [self.prompt.segments[i].tokens for i in path]
        return np.concatenate(parts), np.cumsum([len(part) for part in parts]).tolist()

    def spans(self, i: int, pieces: Iterable[tuple[core.Run, int]]) -> Iterator[core.Span]:
        """Segment i's first tokens at its place; pieces: runs, and the position each one's first key is stored at."""
        index, position = self.prompt.starts[i], self.begins[i]
        for run, local_start in pieces:
            yield core.Span.consecutive(index, run, position - local_start, self.hidden[i])
            index, position = index + run.length, position + run.length

    def places(self, path: Path) -> bytes:
        """The path's positions: (tokens before, position) at its start and wherever positions jump, int32 [n, 2]."""
        found: list[tuple[int, int]] = []
        depth = 0
        for i in path:
            if not found or self.begins[i] - depth != found[-1][1] - found[-1][0]:
                found.append((depth, self.begins[i]))
            depth += len(self.prompt.segments[i])
        return np.array(found, "<i4").tobytes()


class Dependency(Strategy):
    """Dependency attention over trees of paths, under one scheme of positions."""

    exact = True

    def __init__(self, positions: Positions = "path"):
        self.name = "dependency" if positions == "path" else f"dependency-{positions}"
        self.positions: Positions = positions

    def outlook(self, prompt: core.Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        scene, head = self._scene(prompt), raw_of(prompt.tokens[: system_length(prompt)])
        paths, shared = [], prompt.public >= system_length(prompt)
        for path in scene.leaves:
            tokens, stops = scene.spell(path)
            leading = takewhile(lambda pair: shared and prompt.segments[pair[0]].public, zip(path, stops, strict=True))
            paths.append((raw_of(tokens), stops, max((stop for _, stop in leading), default=0)))
        return Outlook((leading_part(prompt, tenant, system_length(prompt)), Paths(head, paths, self.name, tenant)))

    def prefill(self, prompt: core.Prompt, allocation: Allocation, ratio: float | None = None) -> core.Prefill:
        scene, system, size = self._scene(prompt), system_length(prompt), allocation.page_size
        context = allocation.prefix(prompt.tokens[:system])
        limits, others = allocation.limits, len(prompt) - system + allocation.decode_tokens
        runs, hit = allocation.leading(context, system, others=others, pieces=OWN_RUNS)
        room = limits.room_beside(others, OWN_RUNS) - sum(len(run.pages) for run, _ in context.spans)
        known = self._match(scene, allocation, context)
        kept = limits.densest({i: part.spans for i, part in known.items()}, room)
        found = {i: part for i, part in known.items() if i in kept}
        starts = enumerate(prompt.starts[:-1])
        covered = {i: min(hit - start, len(prompt.segments[i])) for i, start in starts if start < hit}
        have = {i: part.tokens for i, part in found.items()} | covered
        own = allocation.reserve_with_tail(len(prompt) - sum(have.values()))

        fresh, used = dict[int, core.Span](), 0  # what is missing of each segment, in order
        for i, segment in enumerate(prompt.segments):
            first = have.get(i, 0)
            if first < len(segment):
                run = own.slice(used, used + len(segment) - first, size)
                fresh[i] = core.Span.consecutive(prompt.starts[i] + first, run, 0, scene.hidden[i])
                used += run.length
        context_spans = _within_segments(scene, match_spans(context, 0, runs=runs), size)
        read = [span for part in found.values() for span in part.spans]
        spans = (*context_spans, *read, *fresh.values())
        rows = np.concatenate([span.indices for span in fresh.values()])
        turn = np.array(scene.begins, np.int32) - np.array(prompt.starts[:-1], np.int32)
        positions = np.concatenate([span.indices + turn[i] for i, span in fresh.items()])
        results = yield core.Pass(rows, positions, spans, self.measures, (len(prompt) - 1,))

        self._admit(scene, allocation, context, hit, own, fresh, found)
        kind: Literal["full", "dependency"] = "full" if scene.chain else "dependency"
        exact = not (hit and context.lossy) and all(part.exact for part in found.values())
        tail = own.slice(used, own.length, size)
        account = _account(prompt, have, {i: part.tier for i, part in found.items()}, context)
        return core.Plan(spans, tail, kind if exact else None, account, results[core.Measure.LOGITS][0])

    def _scene(self, prompt: core.Prompt) -> Scene:
        return Scene(prompt, begins_of(prompt, self.positions), core.Visibility.dependency(prompt).hidden)

    def _match(self, scene: Scene, allocation: Allocation, context: Match) -> dict[int, Found]:
        found: dict[int, Found] = {}
        done: set[int] = set()
        for path in scene.leaves if context.complete else ():
            tokens, stops = scene.spell(path)
            seen = max((stop for i, stop in zip(path, stops, strict=True) if i in done), default=0)
            match = allocation.path(context, tokens, self.name, seen=seen, exact=self.positions == "path")
            for i, stop in zip(path, stops, strict=True):
                begin, end = stop - len(scene.prompt.segments[i]), min(stop, match.length)
                if i not in done and begin < end:
                    exact = not match.lossy and self._stays(scene, path, match, context, begin, end)
                    spans = tuple(scene.spans(i, _cut(match, begin, end, allocation.page_size)))
                    found[i] = Found(spans, end - begin, match.tier(begin, end), exact)
                done.add(i)
        return found

    def _stays(self, scene: Scene, path: Path, match: Match, context: Match, begin: int, end: int) -> bool:
        """True if the path's tokens [begin, end) and their ancestors were computed at the positions they have now."""
        if self.positions == "path":
            return True
        places = np.frombuffer(scene.places(path), "<i4").reshape(-1, 2)
        for node in match.node.path():
            if node.provenance is not Provenance.DEPENDENCY:
                return True
            first, last = node.start - context.length, min(node.end - context.length, end)
            meta = np.frombuffer(node.meta, "<i4").reshape(-1, 2)
            if first < end and begin < last and not np.array_equal(_until(meta, last), _until(places, last)):
                return False
        return True

    def _admit(
        self,
        scene: Scene,
        allocation: Allocation,
        context: Match,
        hit: int,
        own: core.Run,
        fresh: Mapping[int, core.Span],
        found: Mapping[int, Found],
    ) -> None:
        prompt, system = scene.prompt, system_length(scene.prompt)
        new = sum(len(span.indices) for span in fresh.values())
        totals = Totals(len(prompt) - new, new)
        if hit < system:
            head = own.slice(0, system - hit, allocation.page_size)
            context = keep_leading(prompt, allocation, context, hit, head, system, totals)
        for i, path in scene.paths.items() if context.complete else ():
            if i not in fresh:
                continue
            tokens, _ = scene.spell(path)
            run = fresh[i].run
            # what was computed on KV that was only turned to its place is exact nowhere: it has no places
            true = all(found[j].exact for j in path if j in found)
            allocation.cache.admitter.admit_dependency(
                context,
                tokens,
                len(tokens) - run.length,
                run,
                (),
                self.name,
                local_start=scene.begins[i] + len(prompt.segments[i]) - run.length,
                meta=scene.places(path) if self.positions == "preorder" and true else b"",
                public=prompt.segments[i].public,
                totals=totals,
            )


def _cut(match: Match, begin: int, end: int, page_size: int) -> Iterator[tuple[core.Run, int]]:
    at = 0
    for run, local_start in match.spans:
        low, high = max(begin - at, 0), min(end - at, run.length)
        if low < high:
            yield run.slice(low, high, page_size), local_start + low
        at += run.length


def _within_segments(scene: Scene, spans: Iterable[core.Span], page_size: int) -> Iterator[core.Span]:
    """Spans of the context cut where segments begin, each hidden from whom its segment is."""
    for span in spans:
        first = int(span.indices[0])
        for i, hidden in enumerate(scene.hidden):
            low, high = (max(0, min(start - first, span.run.length)) for start in scene.prompt.starts[i : i + 2])
            if low < high:
                run = span.run.slice(low, high, page_size)
                yield core.Span.consecutive(first + low, run, span.offset, hidden)


def _until(places: NDArray[np.int32], end: int) -> NDArray[np.int32]:
    return places[places[:, 0] < end]


def _account(
    prompt: core.Prompt, have: Mapping[int, int], tiers: Mapping[int, Tier | None], context: Match
) -> tuple[core.SegmentReport, ...]:
    known = {i: context.tier(prompt.starts[i], prompt.starts[i] + n) for i, n in have.items()} | dict(tiers)
    single = report(prompt, have, known)
    tree = [i if s.kind is not core.Kind.NODE else -1 for i, s in enumerate(prompt.segments)]
    groups = groupby(zip(single, tree, strict=True), lambda pair: (pair[1], pair[0].id))
    return tuple(_together([one for one, _ in group]) for _, group in groups)


def _together(parts: Sequence[core.SegmentReport]) -> core.SegmentReport:
    places, start = [indices(0, 0)], 0
    for part in parts:
        places += [indices(start + begin, start + end) for begin, end in part.recomputed_at]
        start += part.tokens
    coldest = max((Tier[part.tier.upper()] for part in parts if part.tier is not None), default=None)
    return replace(
        parts[0],
        tokens=sum(part.tokens for part in parts),
        reused=sum(part.reused for part in parts),
        recomputed=sum(part.recomputed for part in parts),
        tier=None if coldest is None else coldest.label,
        recomputed_at=core.intervals(np.concatenate(places)),
    )
