"""Prompt lookup: answers copy their passages, so what followed the last tokens before is proposed as what follows now.

The proposed tokens are computed in the step of the last token, one row each, and kept as far as they are the tokens
that would have been chosen anyway: the answer is the same, greedy or sampled. Source: inference with reference (LLMA,
arXiv 2304.04487), with the prompt as the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ragjax.core import Tokens

SIZES = (3, 2)  # last tokens that have to stand in the prompt or the answer before, longest first
MEMORY = 0.8  # weight of what was seen before in the accepted share, at each proposal
RETRY = 16  # steps without a proposal after which a request whose proposals fail gets another one


def propose(tokens: Tokens, most: int) -> Tokens:
    """Tokens that may follow, int32 [most] or [0]: those that followed the last time that the text ended alike.

    Where these reach the text's end, it repeats itself, and is taken to go on so. tokens: prompt and answer so far,
    int32 [n].
    """
    n = len(tokens)
    for size in SIZES:
        if n <= size or most <= 0:
            continue
        alike = np.ones(n - size, bool)
        for back in range(1, size + 1):
            alike &= tokens[size - back : n - back] == tokens[n - back]
        found = np.flatnonzero(alike)
        if len(found):
            begin = int(found[-1]) + size
            return np.resize(tokens[begin:], most) if n - begin < most else tokens[begin : begin + most]
    return tokens[:0]


@dataclass
class Lookup:
    """Chooses how many tokens to propose for a request, by how many of those before were accepted.

    most: tokens that are proposed at most. share: of proposed tokens that are accepted, as seen lately.
    """

    most: int
    share: float = 0.5
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    _idle: int = 0

    @property
    def per_step(self) -> float:
        """Tokens that a decode step brought, mean: those accepted, and the one behind them."""
        return 1 + self.accepted / max(self.steps, 1)

    def size(self) -> int:
        """Tokens to propose now: all that are allowed, half as many, or none where few are accepted."""
        if self.share >= 0.4:
            return self.most
        if self.share >= 0.15:
            return -(-self.most // 2)
        self._idle += 1
        return -(-self.most // 2) if self._idle % RETRY == 0 else 0

    def note(self, proposed: int, accepted: int) -> None:
        self.steps += 1
        if not proposed:
            return
        self.proposed += proposed
        self.accepted += accepted
        self.share = MEMORY * self.share + (1 - MEMORY) * accepted / proposed
