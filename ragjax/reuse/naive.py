"""naive: every chunk is computed once behind the system prompt alone and reused anywhere, unrepaired.

Sources: TurboRAG (arXiv 2410.07590) and PromptCache (2311.04934), the full reuse of FusionRAG section 2.2. A chunk
attends to the system prompt and to itself; it is computed at the position right behind the system prompt and moved
to its place by a RoPE offset when it is read. Only joins (history and question) are computed for a known chunk.
"""

from __future__ import annotations

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lease import Lease
from ragjax.cache.tree import PUBLIC, Provenance
from ragjax.core import Conversation, Kind, Pass, Plan, Prompt, Run, Span, Tokens, Visibility, Want
from ragjax.reuse.base import Holding, lease_spans, most_slots, orders, report, segments_of, usable


class Naive:
    """Full reuse of isolated chunks; approximate as soon as two chunks stand together."""

    name = "naive"
    wants = frozenset({Want.LOGITS})

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the system prompt, and each chunk behind it."""
        head = prompt.tokens[: _system_length(prompt)]
        chunks = [prompt.segments[i] for i in segments_of(prompt, Kind.CHUNK)]
        return (
            *cache.keys_of(head, (), tenant),
            *(
                cache.key_of(head, chunk.tokens, Provenance.ISOLATED, self.name, PUBLIC if chunk.public else tenant)
                for chunk in chunks
            ),
        )

    def carry_out(self, prompt: Prompt, holding: Holding) -> Conversation:
        """At most two passes: the system prompt and chunks that are missing, then the joins."""
        if prompt.segments[-1].kind is not Kind.JOIN:
            raise ValueError("a prompt ends with a join")
        system = _system_length(prompt)
        matched = context = holding.prefix(prompt.tokens[:system])
        rest = most_slots(len(prompt) - system + holding.decode_tokens, len(prompt.segments), holding.page_size)
        runs, system_hit = usable(context, system, holding.slots - rest, holding.page_size)
        found, missing = _match_chunks(prompt, context, holding)
        fresh_system = holding.reserve(system - system_hit) if system > system_hit else None
        fresh = {i: holding.reserve(len(prompt.segments[i])) for i in missing}
        joins = list(segments_of(prompt, Kind.JOIN))
        join_tokens = sum(len(prompt.segments[i]) for i in joins)
        run = holding.reserve(join_tokens + holding.decode_tokens)

        system_spans = lease_spans(context, 0, runs=runs)
        if fresh_system is not None:
            system_spans = (*system_spans, Span.consecutive(system_hit, fresh_system))
        if fresh_system is not None or missing:
            yield _compute(prompt, system_hit, system, fresh, system_spans)
            if fresh_system is not None:
                head = prompt.tokens[:system]
                holding.cache.admit_prefix(context, head, system_hit, fresh_system, (), min(prompt.public, system))
                context = holding.prefix(prompt.tokens[:system])
            for i, piece in fresh.items() if context.complete else ():
                tokens, public = prompt.segments[i].tokens, prompt.segments[i].public
                holding.cache.admit_segment(
                    context, tokens, piece, system, Provenance.ISOLATED, self.name, public=public
                )

        chunks = {i: ((piece, system),) for i, piece in fresh.items()} | {i: lease.spans for i, lease in found.items()}
        spans, tail = _assemble(prompt, system_spans, chunks, joins, run, holding.page_size)
        rows = np.concatenate([orders(*_range(prompt, i)) for i in joins])
        results = yield Pass(rows, rows, spans, self.wants, (len(prompt) - 1,))

        reused = {i: len(prompt.segments[i]) for i in found}
        tiers = {i: lease.tier() for i, lease in found.items()}
        for i in segments_of(prompt, Kind.SYSTEM):
            begin, end = _range(prompt, i)
            reused[i] = max(0, min(end, system_hit) - begin)
            tiers[i] = matched.tier(begin, end)
        exact = _is_exact(prompt, system) and not holding.lossy
        account, logits = report(prompt, reused, tiers), results[Want.LOGITS][0]
        return Plan(spans, tail, "full" if exact else None, account, logits)

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, holding: Holding) -> None:
        """Answers depend on all chunks at once and are not kept."""


def _match_chunks(prompt: Prompt, context: Lease, holding: Holding) -> tuple[dict[int, Lease], list[int]]:
    found, missing = {}, []
    for i in segments_of(prompt, Kind.CHUNK):
        lease = holding.segment(context, prompt.segments[i].tokens, Provenance.ISOLATED, Naive.name)
        if lease is None:
            missing.append(i)
        else:
            found[i] = lease
    return found, missing


def _compute(
    prompt: Prompt, system_hit: int, system: int, fresh: dict[int, Run], system_spans: tuple[Span, ...]
) -> Pass:
    """Missing system tokens, and missing chunks at the position right behind the system prompt."""
    hidden = Visibility.isolated(prompt, rows=tuple(fresh)).hidden
    spans, rows, positions = list(system_spans), [orders(system_hit, system)], [orders(system_hit, system)]
    for i, run in fresh.items():
        begin, end = _range(prompt, i)
        spans.append(Span.consecutive(begin, run, 0, hidden[i]))
        rows.append(orders(begin, end))
        positions.append(orders(system, system + end - begin))
    return Pass(np.concatenate(rows), np.concatenate(positions), tuple(spans))


def _assemble(
    prompt: Prompt,
    system_spans: tuple[Span, ...],
    chunks: dict[int, tuple[tuple[Run, int], ...]],
    joins: list[int],
    run: Run,
    page_size: int,
) -> tuple[tuple[Span, ...], Run]:
    """Everything the joins see, each chunk moved to its place, and the cells left for decoding."""
    spans, used = list(system_spans), 0
    for i in range(len(prompt.segments)):
        order = prompt.starts[i]
        for piece, local_start in chunks.get(i, ()):
            spans.append(Span.consecutive(order, piece, order - local_start))
            order += piece.length
        if i in joins:
            n = len(prompt.segments[i])
            spans.append(Span.consecutive(order, run.slice(used, used + n, page_size)))
            used += n
    return tuple(spans), run.slice(used, run.length, page_size)


def _system_length(prompt: Prompt) -> int:
    """Tokens of the leading system segments.

    Raises:
        ValueError: if a system segment stands behind another kind.
    """
    system = segments_of(prompt, Kind.SYSTEM)
    if system != tuple(range(len(system))):
        raise ValueError("system segments come first")
    return prompt.starts[len(system)]


def _is_exact(prompt: Prompt, system: int) -> bool:
    """Isolation changes nothing if at most one chunk stands there, right behind the system prompt."""
    chunks = segments_of(prompt, Kind.CHUNK)
    return len(chunks) == 0 or (len(chunks) == 1 and prompt.starts[chunks[0]] == system)


def _range(prompt: Prompt, i: int) -> tuple[int, int]:
    return prompt.starts[i], prompt.starts[i + 1]
