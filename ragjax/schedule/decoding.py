"""Rows behind a prompt: generated tokens, proposed ones with them, and given continuations.

All functions change the request (`RequestState`): its plan's tail, its rows, and the tokens decoded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ragjax.core import NEVER, Draw, Run, Span, Tokens
from ragjax.schedule.batch import Batch
from ragjax.schedule.lookup import propose
from ragjax.schedule.rows import PendingRows, SpanTable, table_of
from ragjax.schedule.state import RequestState


def decode(state: RequestState, token: int) -> None:
    """Set the rows that compute a generated token; the next one comes as `rows.chosen[0]`.

    Tokens that may follow it are proposed and computed with it: `rows.chosen[i]` holds if the first i of them are
    accepted.

    Raises:
        OutOfPages: if the tail has no slot for it, and no page can be had; `grow` sees to both beforehand.
    """
    note_proposal(state)
    grow(state)
    table = _open_tail(state) if state.rows is None else state.rows.table
    number = len(state.decoded)
    state.decoded.append(token)
    tokens = np.array([token], np.int32)
    if state.lookup is not None and state.plan is not None:  # as many as have slots and may be generated
        room = min(state.plan.tail.length - number - 1, state.decode_tokens - 1)
        before = np.concatenate([state.plain.tokens, state.generated])  # soft tokens are never generated
        tokens = np.concatenate([tokens, propose(before, min(state.lookup.size(), room))])
    for i in range(number, number + len(tokens)):  # no earlier row sees a later index, so none has to be hidden
        table.show(i, len(state.full_prompt) + i)
    state.rows = _tail_rows(state, table, tokens, number)
    state.rows.proposed, state.rows.sampled = len(tokens) - 1, True


def accept(state: RequestState, token: int) -> bool:
    """True if the token just generated is the next one proposed, so that its KV and its logits exist."""
    assert state.rows is not None
    at = _accepted(state, state.rows) + 1
    if at >= len(state.rows.token) or state.rows.token[at] != token:
        return False
    state.decoded.append(token)
    return True


def note_proposal(state: RequestState) -> None:
    """A decode step is done, if one was: count how much of its proposal was accepted. Once a step."""
    if state.lookup is not None and state.rows is not None:
        state.lookup.note(len(state.rows.token) - 1, _accepted(state, state.rows))


def grow(state: RequestState, tokens: int = 1) -> None:
    """Reserve slots for so many tokens behind those decoded, or for all that it may still generate; else OutOfPages."""
    assert state.plan is not None and state.allocation is not None
    tail, needed = state.plan.tail, min(len(state.decoded) + tokens, state.allocation.decode_tokens)
    if needed <= tail.length:
        return
    grown = state.allocation.extend(tail, needed)
    state.plan = replace(state.plan, tail=grown)
    state.tail_N = grown.slots(state.allocation.page_size)
    if state.rows is not None:
        state.rows.table.grow(Run(grown.pages[len(tail.pages) :], 0, grown.length - tail.length))


def force(state: RequestState, tokens: Tokens) -> None:
    """Set the rows that compute given tokens, int32 [n], after the prompt, before anything is decoded.

    `rows.logits[i]` are the logits after token i. Set `rows` to None then, and decoding starts as if nothing had been
    computed: it writes over these tokens.
    """
    assert state.plan is not None and state.rows is None
    if not 0 < len(tokens) <= state.plan.tail.length:
        raise ValueError(f"{len(tokens)} tokens were given; there are slots for {state.plan.tail.length}")
    table, size = _open_tail(state), len(state.full_prompt)
    for number in range(len(tokens)):
        table.show(number, size + number)
    state.rows = _tail_rows(state, table, np.asarray(tokens, np.int32), 0)


def score(state: RequestState) -> bool:
    """Set the rows that compute the continuation, after the prompt; False if there is none or nothing to compute."""
    if not state.wants_scores:
        return False
    assert state.request.continuation is not None
    if len(state.request.continuation) == 1:
        take_scores(state)
        return False
    force(state, state.request.continuation[:-1])
    return True


def take_scores(state: RequestState) -> None:
    """Keep the logits that predict the continuation; what was computed for them is generated over."""
    assert state.plan is not None
    rows = [] if state.rows is None else [state.rows.logits[i] for i in range(len(state.rows.logits))]
    state.scores = np.stack([state.read(state.plan.logits, 0), *rows])
    state.rows = None


def draws(batch: Batch) -> list[Draw | None]:
    found: list[Draw | None] = []
    for part in batch.parts:
        state, rows = part.state, part.rows
        if rows.sampled:
            of_rows = _draws(state, rows.token[1:])
            found += [of_rows[row] for row in part.logit_rows]
            continue
        for row in part.logit_rows:
            first = rows.logits_at[row] == rows.first_at and state.wants_first
            found.append(first_draw(state) if first else None)
    return found


def first_draw(state: RequestState) -> Draw:
    return _draws(state, np.zeros(0, np.int32))[0]


def _draws(state: RequestState, proposed: Tokens) -> list[Draw]:
    assert state.sampler is not None and state.generation is not None
    return state.sampler.draws(state.generation.tokens, proposed.tolist())


def _accepted(state: RequestState, rows: PendingRows) -> int:
    return len(state.full_prompt) + len(state.decoded) - 1 - int(rows.index[0])


def _tail_rows(state: RequestState, table: SpanTable, tokens: Tokens, first: int) -> PendingRows:
    """Rows of tokens after the prompt, generated or given; `first` is the number of the first of them."""
    assert state.tail_N is not None
    n, begin = len(tokens), len(state.full_prompt) + first
    index, slot = np.arange(begin, begin + n, dtype=np.int32), state.tail_N[first : first + n]
    logits_at = {i: i for i in range(n)}
    return PendingRows(tokens, index, index, slot, table, logits_at, begin + n, state.all_layers)


def _open_tail(state: RequestState) -> SpanTable:
    """The prompt's keys as generated tokens see them, and these, hidden as yet."""
    assert state.plan is not None
    tail, allocation = state.plan.tail, state.held
    state.tail_N = tail.slots(allocation.page_size)
    table = table_of(state, (*state.plan.spans, Span(np.full(tail.length, NEVER), tail)))
    # what cannot be read to its end is refused before anything is sent
    later = -(-max(0, allocation.decode_tokens - tail.length) // allocation.page_size)
    allocation.limits.check(len(table) + later)
    return table
