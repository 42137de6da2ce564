"""How many prefill rows may share a step with decoding tokens (chunked prefill: Sarathi-Serve, arXiv 2403.02310)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STRETCH = 3.0
"""How many times longer than the step of decoding tokens alone a step may take, for each prompt that is computed."""


@dataclass(frozen=True)
class StepBudget:
    """What a step may compute while requests decode, so that their next tokens do not wait long.

    tokens: rows of a step, decoding tokens included, if they read no more than a few keys.
    keys: keys whose attention costs as much as the rest of a row; rows that read many keys count for more.
    decode_keys: likewise for decoding tokens, which compute little on what they read (two cores: 6.6 µs a key, 0.8 ms a
        row).
    fixed: `tokens` holds whatever waits. Otherwise a step grows with the prompts that are being computed, and with what
        the decoding tokens read: requests that wait for their first token count as much as those that decode.
    """

    tokens: int = 64
    keys: int = 1536
    decode_keys: int = 128
    fixed: bool = False

    @staticmethod
    def fitted(decode_s: float, mixed_s: Mapping[int, float], key_s: float, keys: int) -> StepBudget:
        """The most tokens whose step takes no more than `STRETCH` times as long as one of decoding tokens.

        decode_s: seconds of a step of decoding tokens. mixed_s: seconds of steps by rows, of two numbers of rows at
        least; between and beyond them time is taken to grow evenly. key_s: seconds for each key that decoding tokens
        read.
        """
        (few, few_s), (many, many_s) = min(mixed_s.items()), max(mixed_s.items())
        row_s = max((many_s - few_s) / (many - few), 1e-9)
        tokens = max(few, min(int(few + (STRETCH * decode_s - few_s) / row_s), many))
        return StepBudget(tokens, keys, max(1, int(row_s / max(key_s, 1e-9))))

    def room(self, decoding: int, decode_keys: int, prompts: int) -> float:
        """Rows that so many decoding tokens, which read so many keys in all, leave to the prompts that are computed."""
        if self.fixed:
            return float(self.tokens - decoding)
        return self.tokens * prompts + (STRETCH * prompts - 1) * decode_keys / self.decode_keys - decoding

    def takes(self, room: float, lefts: Sequence[int], reads: Sequence[int]) -> list[int]:
        """Rows of each prompt that have room in a step, oldest first; the oldest gets one at least.

        lefts: rows that each has left. reads: keys that a row of each reads, at most.
        """
        takes = list[int]()
        for left, keys in zip(lefts, reads, strict=True):
            cost = 1 + keys / self.keys
            take = min(left, max(int(room / cost), 0 if takes else 1))
            if not take:
                break
            takes.append(take)
            room -= take * cost
        return takes
