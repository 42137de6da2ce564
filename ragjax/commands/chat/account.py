"""An account of reuse as a few lines of a terminal: a strip of segments, exactness in words, where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from ragjax.commands.chat.session import Account
from ragjax.core import SegmentReport

STYLES = {
    "device": ("█", "green"),
    "host": ("▓", "yellow"),
    "disk": ("▒", "magenta"),
    "remote": ("▚", "cyan"),
    "computed": ("░", "red"),
}
"""Sign and colour of tokens: reused from a tier, or computed."""

OTHER = ("▉", "blue")
"""Of a tier that a later server names."""

EXACTNESS = {
    "full": "exact: the answer of full attention",
    "dependency": "exact to dependency attention over the graph's paths",
    "block": "exact to block attention, for which the model was trained",
    "packet": "exact to block attention between soft tokens, for which the model was trained",
}


def lines(account: Account, width: int) -> list[Text]:
    """The whole account. width: columns of the terminal."""
    notices = [Text(f"note: {notice}", style="yellow") for notice in account.notices]
    return [strip(account.segments, width), legend(account.segments), outcome(account), times(account), *notices]


def strip(segments: Sequence[SegmentReport], width: int) -> Text:
    """Segments side by side with a gap between them, each as wide as its share of the tokens and at least one cell."""
    shown = [segment for segment in segments if segment.tokens]
    cells = max(width - max(len(shown) - 1, 0), len(shown))
    total = sum(segment.tokens for segment in shown)
    parts = [_cells(_kinds(segment), max(1, cells * segment.tokens // total)) for segment in shown]
    return Text(" ").join(parts)


def legend(segments: Sequence[SegmentReport]) -> Text:
    """How many tokens were reused from where, and computed; with the signs of the strip."""
    sums: Counter[str] = Counter()
    for segment in segments:
        sums.update(_kinds(segment))
    total, reused = sum(segment.tokens for segment in segments), sum(segment.reused for segment in segments)
    told = Text(f"{reused} of {total} tokens reused")
    for kind in dict.fromkeys((*STYLES, *sums)):
        if sums[kind]:
            sign, style = STYLES.get(kind, OTHER)
            told.append("  ").append(sign, style).append(f" {kind} {sums[kind]}")
    return told


def outcome(account: Account) -> Text:
    """The strategy, and how near the answer is to full attention's."""
    if account.exact_to is None:
        return Text(f"{account.strategy}: ").append("approximate", "yellow").append(", not what full attention gives")
    return Text(f"{account.strategy}: ").append(
        EXACTNESS.get(account.exact_to, f"exact to {account.exact_to}"), "green"
    )


def times(account: Account) -> Text:
    """The time to the first token, and its parts, milliseconds."""
    spent = account.timings
    parts = {"search": spent.search_exposed, "load": spent.load, "prefill": spent.prefill}
    parts["other"] = max(spent.ttft - sum(parts.values()), 0.0)
    named = ", ".join(f"{name} {value:.0f}" for name, value in parts.items() if value >= 0.5)
    return Text(f"first token after {spent.ttft:.0f} ms ({named}), all after {spent.total:.0f} ms", style="dim")


def _kinds(segment: SegmentReport) -> dict[str, int]:
    """Tokens of a segment by what became of them."""
    return {segment.tier or "device": segment.reused, "computed": segment.tokens - segment.reused}


def _cells(kinds: dict[str, int], width: int) -> Text:
    """A segment in `width` cells: the cell's middle says of which kind it is."""
    total = sum(kinds.values())
    bounds, end = [], 0
    for kind, count in kinds.items():
        end += count
        bounds.append((end, kind))
    row = [next(kind for end, kind in bounds if (2 * i + 1) * total < 2 * width * end) for i in range(width)]
    made = Text()
    for kind, run in groupby(row):
        sign, style = STYLES.get(kind, OTHER)
        made.append(sign * len(list(run)), style)
    return made
