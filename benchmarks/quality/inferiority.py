"""From which share on a strategy's choices are not inferior to full attention's.

A setting is not inferior if the 95% interval of its accuracy minus full attention's (paired bootstrap) lies above minus
two points, inferior if all of it lies below, and otherwise it cannot be told. Where few questions are answered
differently a bootstrap interval is too short, down to a point: below 150 questions nothing is called not inferior,
since what is not seen in n questions may still happen in 3/n of them (rule of three, Hanley and Lippman-Hand 1983), and
below 30 nothing is told at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MARGIN = 0.02
LEAST, FEWEST = math.ceil(3 / MARGIN), 30
"""Questions for a setting to be not inferior, and for any verdict."""

NOT_INFERIOR, INFERIOR, UNKNOWN = "not inferior", "inferior", "cannot tell"

Row = Mapping[str, Any]


def verdict(row: Row) -> str:
    """What a row's interval says."""
    lo, hi = row["accuracy_minus_full_lo"], row["accuracy_minus_full_hi"]
    if lo > -MARGIN and row["chosen"] >= LEAST:
        return NOT_INFERIOR
    return INFERIOR if hi < -MARGIN and row["chosen"] >= FEWEST else UNKNOWN


def needed(row: Row) -> int | None:
    """About how many questions would show that it is not inferior, if its difference is what it seems to be.

    None if the difference itself is two points or more.
    """
    value, lo = float(row["accuracy_minus_full"]), float(row["accuracy_minus_full_lo"])
    if value <= -MARGIN:
        return None
    return max(LEAST, math.ceil(int(row["chosen"]) * ((value - lo) / (value + MARGIN)) ** 2))


def smallest(made: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each set and strategy: the smallest ratio that is not inferior, or what the largest one shows.

    Ratios are those of the sweep where there is one. `ratio` is None for a strategy that takes none.
    """
    swept = {r["set"] for r in made if r["part"] == "sweep"}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in made:
        if row["part"] == ("sweep" if row["set"] in swept else "main") and "accuracy_minus_full" in row:
            groups.setdefault((row["set"], row["strategy"]), []).append(row)
    found = []
    for (name, strategy), rows in groups.items():
        if strategy == "full":
            continue
        by_ratio = sorted(rows, key=lambda r: -1.0 if r["ratio"] is None else r["ratio"])
        shown = next((r for r in by_ratio if verdict(r) == NOT_INFERIOR), by_ratio[-1])
        difference = {key: shown[key] for key in shown if key.startswith("accuracy_minus_full")}
        found.append(
            {
                "set": name,
                "strategy": strategy,
                "ratio": shown["ratio"],
                "verdict": verdict(shown),
                "chosen": shown["chosen"],
                **difference,
                "needed": needed(shown),
            }
        )
    return found
