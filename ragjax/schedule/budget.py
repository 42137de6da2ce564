"""How many prefill rows may share a step with decoding tokens (chunked prefill: Sarathi-Serve, arXiv 2403.02310)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STRETCH = 2.5
"""How many times longer than a step of decoding tokens alone a step with prefill may take."""


@dataclass(frozen=True)
class StepBudget:
    """What a step may compute while requests decode, so that their next tokens do not wait long.

    tokens: rows of a step, decoding tokens included, if they read no more than a few keys.
    keys: keys whose attention costs as much as the rest of a row; rows that read many keys count for more.
    """

    tokens: int = 64
    keys: int = 1536

    @staticmethod
    def fitted(decode_s: float, mixed_s: Mapping[int, float], keys: int) -> StepBudget:
        """The most tokens whose step takes no more than `STRETCH` times as long as one of decoding tokens.

        decode_s: seconds of a step of decoding tokens. mixed_s: seconds of steps by rows, of two numbers of rows at
        least; between and beyond them time is taken to grow evenly.
        """
        (few, few_s), (many, many_s) = min(mixed_s.items()), max(mixed_s.items())
        row_s = max((many_s - few_s) / (many - few), 1e-9)
        return StepBudget(max(few, min(int(few + (STRETCH * decode_s - few_s) / row_s), many)), keys)

    def takes(self, decoding: int, lefts: Sequence[int], reads: Sequence[int]) -> list[int]:
        """Rows of each prefill that may join so many decoding tokens, oldest first; the oldest gets one at least.

        lefts: rows that each has left. reads: keys that a row of each reads, at most.
        """
        room, takes = float(self.tokens - decoding), list[int]()
        for left, keys in zip(lefts, reads, strict=True):
            cost = 1 + keys / self.keys
            take = min(left, max(int(room / cost), 0 if takes else 1))
            if not take:
                break
            takes.append(take)
            room -= take * cost
        return takes
