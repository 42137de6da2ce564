"""Order and eviction from one plan of the queue: longest prefix match, and the planned places told to the policy.

Ours, after DepCache (section 6.4.2), where scheduling and replacement look at the same queue and know nothing of each
other: its LACR takes the places of arrival for those of service. Here the request with the longest match starts, and
the others are lined up behind it, each time the one that will find most: what is cached, or computed by those before
it in the line. The policy counts with these places, so it keeps what is used next. Where the cache holds all that the
queue wants, that changes little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ragjax.schedule.order.base import W
from ragjax.schedule.order.lpm import LPM


class Joint(LPM):
    """As `lpm`, with a plan."""

    def plan(self, queue: Sequence[W], first: W) -> Sequence[W] | None:
        """O(requests ^ 2 + pieces that they share)."""
        missing = {waiting: waiting.look().missing for waiting in queue}
        found = {waiting: waiting.look().found for waiting in queue}
        line, computed = [first], set(missing[first])
        del found[first]
        _credit(found, missing, computed)
        while found:
            chosen = max(found, key=found.__getitem__)
            del found[chosen]
            line.append(chosen)
            new = missing[chosen].keys() - computed
            computed |= new
            _credit(found, missing, new)
        return line


def _credit(found: dict[W, int], missing: Mapping[W, Mapping[bytes, int]], new: Set[bytes]) -> None:
    """Pieces that one in the line computes are found by those behind it."""
    for waiting in found if new else ():
        lacks = missing[waiting]
        found[waiting] += sum(lacks[name] for name in new & lacks.keys())
