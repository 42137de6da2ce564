"""A strategy looked at from outside: how long its passes took, which tokens it recomputed, the KV it left behind.

A probe stands in for the strategy it wraps: it hands on every pass and result, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Outlook
from ragjax.core import NEVER, Asked, Kind, Pass, Plan, Prefill, Prompt, Results, Tokens
from ragjax.reuse.base import Allocation, Strategy

Floats = NDArray[np.float32]

READ = 512  # slots are read in multiples of this: each number of slots is a shape that is compiled
Reader = Callable[[NDArray[np.int32]], tuple[Floats, Floats]]
"""Keys and values of slots, float32 [layers, slots, KV heads, head dim] each: `Runner.read`."""


@dataclass(frozen=True)
class Lap:
    """One pass or move: what it was, and the seconds from its yield to its results."""

    item: Asked
    began: float
    seconds: float

    @property
    def opens(self) -> bool:
        """Whether it is a pass that begins with the first layer."""
        return isinstance(self.item, Pass) and (self.item.layers is None or self.item.layers[0] == 0)


class Probe(Strategy):
    """Wraps a strategy for one request at a time.

    laps: passes and moves of the last request. recomputed: orders of chunk tokens that it computed itself, int32 [n],
    ascending. kv: keys, all rotated to their order, and values of the chunks' tokens, float32 [L, n, K, D] each; only
    with a `read`.
    """

    def __init__(self, inner: Strategy, read: Reader | None = None, inv_freq_R: NDArray[np.float64] | None = None):
        """read: how KV is read when decoding has ended; then inv_freq_R, the model's RoPE frequencies, are needed."""
        self._inner, self._read, self._inv_freq_R = inner, read, inv_freq_R
        self.name, self.measures, self.selective = inner.name, inner.measures, inner.selective
        self.early_end, self.steady = inner.early_end, inner.steady
        self.laps: list[Lap] = []
        self.recomputed: NDArray[np.int32] = np.zeros(0, np.int32)
        self.kv: tuple[Floats, Floats] | None = None

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        return self._inner.outlook(prompt, cache, tenant)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        self.laps = []
        conversation = self._inner.prefill(prompt, allocation, ratio)
        try:
            item = next(conversation)
            while True:
                began = time.perf_counter()
                results: Results = yield item
                self.laps.append(Lap(item, began, time.perf_counter() - began))
                item = conversation.send(results)
        except StopIteration as end:
            plan: Plan = end.value
            return plan
        finally:
            conversation.close()

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        index_N, slot_N, offset_N, own_N = _slots(prompt, plan, allocation)
        self.recomputed = index_N[own_N]
        if self._read is not None:
            assert self._inv_freq_R is not None
            k_LNKD, v_LNKD = self._read(np.pad(slot_N, (0, -len(slot_N) % READ), mode="edge"))
            own = slice(len(slot_N))
            self.kv = rotated(k_LNKD[:, own], offset_N, self._inv_freq_R), v_LNKD[:, own]
        self._inner.finish(prompt, plan, generated, allocation)

    @property
    def selection_seconds(self) -> float:
        """From the first pass to the beginning of the last one that starts at layer 0: finding what to recompute."""
        opening = [lap for lap in self.laps if lap.opens]
        return opening[-1].began - self.laps[0].began


def _slots(prompt: Prompt, plan: Plan, allocation: Allocation) -> tuple[NDArray[Any], ...]:
    """Of each chunk token, by order: order, physical slot, RoPE offset, and whether the request computed it itself."""
    indices, slots, offsets, own = [], [], [], []
    pages = np.asarray(sorted(allocation.own_pages), np.int32)
    for span in plan.spans:
        seen = span.indices != NEVER
        slot = span.run.slots(allocation.page_size)[seen]
        indices.append(span.indices[seen])
        slots.append(slot)
        offsets.append(np.full(len(slot), span.offset, np.int32))
        own.append(np.isin(slot // allocation.page_size, pages))
    columns = [np.concatenate(column) for column in (indices, slots, offsets, own)]
    chunk = np.zeros(len(prompt), bool)
    for i, segment in enumerate(prompt.segments):
        chunk[slice(*prompt.bounds(i))] = segment.kind is Kind.CHUNK
    kept = np.flatnonzero((columns[0] < len(prompt)) & chunk[np.minimum(columns[0], len(prompt) - 1)])
    kept = kept[np.argsort(columns[0][kept], kind="stable")]
    return tuple(column[kept] for column in columns)


def rotated(k_LNKD: Floats, offset_N: NDArray[np.int32], inv_freq_R: NDArray[np.float64]) -> Floats:
    """Keys rotated on by `offset` positions (half-split RoPE, arXiv 2104.09864)."""
    angle_NR = offset_N[:, None] * inv_freq_R
    cos, sin = (f(angle_NR)[None, :, None, :].astype(np.float32) for f in (np.cos, np.sin))
    first, second = np.split(k_LNKD, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def deviation(full: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> tuple[list[float], list[float]]:
    """How far keys, and values, lie from full attention's, by layer: norm of the difference over norm of full's.

    FusionRAG's Δ_KV (equation 7), which is of a token and absolute; here it is of a layer and relative to full's norm.
    """
    found = []
    for exact, approximate in zip(full, other, strict=True):
        gap = np.square(approximate - exact).sum((1, 2, 3), dtype=np.float64)
        found.append([float(x) for x in np.sqrt(gap / np.square(exact).sum((1, 2, 3), dtype=np.float64))])
    return found[0], found[1]


def places(prompt: Prompt, chosen: NDArray[np.int32], bins: int = 10) -> tuple[list[float], list[float]]:
    """Where recomputed tokens lie (FusionRAG, Figure 8): their shares by place within the chunk, and by chunk.

    The second is by the chunk's place among the prompt's chunks; both in `bins` equal parts.
    """
    within, among = np.zeros(bins), np.zeros(bins)
    chunks = [i for i, segment in enumerate(prompt.segments) if segment.kind is Kind.CHUNK]
    for rank, i in enumerate(chunks):
        begin, end = prompt.bounds(i)
        mine = chosen[(chosen >= begin) & (chosen < end)]
        np.add.at(within, (mine - begin) * bins // (end - begin), 1)
        among[rank * bins // len(chunks)] += len(mine)
    total = max(1, len(chosen))
    return [float(x / total) for x in within], [float(x / total) for x in among]
