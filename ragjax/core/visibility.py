"""The one rule that says which keys a row sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragjax.core.errors import VisibilityError
from ragjax.core.prompt import Kind, Prompt


@dataclass(frozen=True)
class Visibility:
    """The one rule: key k is visible to row q of the same request iff
    `index[k] <= index[q] and not (hide_from[k] <= index[q] < hide_until[k])`.

    `hidden[i]` is the half-open interval of token indexes that must not see segment i's keys; an empty
    interval (0, 0) is plain causal attention.
    """

    hidden: tuple[tuple[int, int], ...]

    @staticmethod
    def dependency(prompt: Prompt) -> Visibility:
        """Every key is visible to the segments that depend on it, and within its own (DepCache, section 3.1).

        Chunks are part of the chain here: they depend on everything before them.

        A node of a tree is hidden from the end of its subtree to the start of the next segment that depends on it.
        VisibilityError if one interval per key cannot say it.
        """
        total, starts = len(prompt.segments), prompt.starts
        seers: list[list[int]] = [[] for _ in range(total)]
        for j, seen in enumerate(prompt.dependencies):
            for i in seen:
                seers[i].append(j)
        hidden = []
        for i, who in enumerate(seers):
            follow = _unbroken(who, i, total)
            first, last = i + 1 + follow, total - len(who) + follow
            hidden.append((starts[first], starts[last]) if first < last else (0, 0))
        return Visibility(tuple(hidden))

    @staticmethod
    def isolated(prompt: Prompt, rows: Sequence[int] | None = None) -> Visibility:
        """Chunks depend on system segments and themselves; query segments on everything before them.

        `rows` names the segments that have rows in the pass (all, if None): a hidden pair matters
        only if it has rows, which is how chunks of two turns stay sayable with one interval a key.
        VisibilityError if one interval per key cannot say it: compute in several passes.
        """
        in_pass = range(len(prompt.segments)) if rows is None else sorted(rows)
        starts = prompt.starts
        return Visibility(tuple(_hidden_interval(prompt, i, in_pass, starts) for i in range(len(prompt.segments))))


def _unbroken(seers: Sequence[int], i: int, total: int) -> int:
    first = next((n for n, j in enumerate(seers) if j != i + 1 + n), len(seers))
    if list(seers[first:]) != list(range(total - len(seers) + first, total)):
        raise VisibilityError(
            f"segment {i} would be hidden from two separate ranges of the prompt; reorder its segments"
        )
    return first


def _hidden_interval(prompt: Prompt, i: int, rows: Sequence[int], starts: Sequence[int]) -> tuple[int, int]:
    later = [j for j in rows if j > i]
    system = prompt.segments[i].kind is Kind.SYSTEM
    hiders = [j for j in later if prompt.segments[j].kind is Kind.CHUNK and not system]
    if not hiders:
        return (0, 0)
    first, last = hiders[0], hiders[-1]
    if len([j for j in later if first <= j <= last]) != len(hiders):
        raise VisibilityError(
            f"segment {prompt.segments[i].id!r} would be hidden from two separate ranges of one pass; "
            "compute these segments in separate passes"
        )
    return (starts[first], starts[last + 1])
