"""The arithmetic of Cache-Craft, section 3: how much a chunk's KV depends on what was before it, which of its variants
serves in a prompt (3.3), and which chunks the question looks at (3.2.2, eq. 15, Algorithm 1).

Equations 3, 4 and 6 to 12 and 14 (arXiv:2502.15734), heads averaged. The system prompt, with the first token of all, is
left out of the prefix, because an attention sink would outweigh the rest. Every other segment before the chunk counts,
also an earlier turn, because the chunk's KV depends on it as well.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.lookahead import Keyed, Look
from ragjax.cache.tree import KnowledgeTree, Node
from ragjax.core import CraftVariants, Kind, Prompt, Tokens
from ragjax.core.tiers import Record

Floats = NDArray[np.float64]

_VERSION = 1
_HEAD = struct.Struct("<HHII")  # version, layers, segments before it, tokens
_DIGEST = 16

_DRIFT_VERSION = 2
_DRIFT_HEAD = struct.Struct("<HI")  # version, tokens; KV of earlier versions has a float16 for each token behind it


@dataclass(frozen=True)
class Influence:
    """The attention of a chunk while its KV was computed: eqs. 3, 4 and 14."""

    before: tuple[bytes, ...]  # digests of the segments before it, in order
    lengths: tuple[int, ...]  # their tokens
    inter_LZ: NDArray[np.float32]  # attention that the chunk's tokens gave to each of these segments, summed
    intra_L: NDArray[np.float32]  # attention that they gave to earlier tokens of the chunk, summed
    score_T: NDArray[np.float32]  # attention that each token gave to all segments before it, mean over layers

    def __len__(self) -> int:
        return len(self.score_T)

    @cached_property
    def cci(self) -> float:
        """Cache Context Impact, in [0.5, 1]: the sigmoid of a / b (eqs. 9 to 11); 0.5 if nothing stood before it."""
        if not self.before:
            return 0.5
        n = len(self)
        a = float(np.mean(self.inter_LZ.astype(np.float64) @ (1.0 / (n * np.array(self.lengths, np.float64)))))
        b = float(np.mean(self.intra_L, dtype=np.float64)) / n**2
        if a <= 0:
            return 0.5
        return 1.0 if b <= 0 else 1 / (1 + math.exp(-a / b))

    @cached_property
    def ranking(self) -> NDArray[np.intp]:
        """The chunk's tokens by attention to the segments before it, highest first (eq. 14); ties: the earlier one."""
        return np.argsort(-self.score_T, kind="stable")

    def overlap(self, before: Sequence[bytes]) -> float:
        """Prefix Overlap Score (eq. 6): share of the attention that went to segments which stand before it again.

        1 if nothing stood before it and nothing does; 0 if something does now.
        """
        inter_Z: Floats = self.inter_LZ.astype(np.float64).sum(0)
        total = float(inter_Z.sum())
        if total <= 0:
            return float(not before)
        there = set(before)
        again = np.array([digest in there for digest in self.before])
        return float(inter_Z[again].sum()) / total

    def novelty(self, before: Sequence[bytes]) -> float:
        return max(0.0, 1 - self.overlap(before) * (1 - disorder(self.before, before)))

    def mismatch(self, before: Sequence[bytes]) -> float:
        """CCI * (1 - adjusted overlap), in [0, 1]: what the Cache Fix Overhead is before it is scaled (eqs. 8, 12)."""
        return self.cci * self.novelty(before)

    def encode(self) -> bytes:
        head = _HEAD.pack(_VERSION, len(self.intra_L), len(self.before), len(self))
        lengths = np.array(self.lengths, "<u4").tobytes()
        arrays = (np.ascontiguousarray(array, "<f4") for array in (self.inter_LZ, self.intra_L, self.score_T))
        return b"".join((head, *self.before, lengths, *(array.tobytes() for array in arrays)))

    @staticmethod
    def decode(meta: bytes) -> Influence | None:
        if len(meta) >= _DRIFT_HEAD.size and _DRIFT_HEAD.unpack_from(meta)[0] == _DRIFT_VERSION:
            end = _DRIFT_HEAD.size + 2 * _DRIFT_HEAD.unpack_from(meta)[1]
            if len(meta) < end:
                raise ValueError(f"the notes of a chunk have {len(meta)} bytes, and the drift alone takes {end}")
            meta = meta[end:]
        if len(meta) < _HEAD.size or meta[:2] != _HEAD.pack(_VERSION, 0, 0, 0)[:2]:
            return None
        _, layers, segments, tokens = _HEAD.unpack_from(meta)
        sizes = (_DIGEST * segments, 4 * segments, 4 * layers * segments, 4 * layers, 4 * tokens)
        if len(meta) != _HEAD.size + sum(sizes):
            raise ValueError(f"the attention kept with a chunk has {len(meta)} bytes, not {_HEAD.size + sum(sizes)}")
        cuts = np.cumsum((_HEAD.size, *sizes))
        digests, lengths, inter, intra, score = (meta[a:b] for a, b in pairwise(cuts))
        return Influence(
            tuple(digests[at : at + _DIGEST] for at in range(0, len(digests), _DIGEST)),
            tuple(int(n) for n in np.frombuffer(lengths, "<u4")),
            np.frombuffer(inter, "<f4").reshape(layers, segments),
            np.frombuffer(intra, "<f4"),
            np.frombuffer(score, "<f4"),
        )


def record(prompt: Prompt, index: int, rows: NDArray[np.int32], score: NDArray[np.float32]) -> Influence:
    """The influence on a chunk, from what the pass measured that computed the whole chunk.

    Args:
        prompt: the prompt of the pass.
        index: the chunk's segment in it.
        rows: token indexes of the pass's rows, int32 [T], ascending; they include the whole chunk.
        score: `Measure.SEGMENT_SCORE` of the pass over all layers, float32 [layers, T, segments].
    """
    begin, end = prompt.bounds(index)
    own = (rows >= begin) & (rows < end)
    if np.count_nonzero(own) != end - begin:
        raise ValueError(f"the pass has {np.count_nonzero(own)} rows of the segment's {end - begin} tokens")
    prior = _prior(prompt, index)
    score_LTZ = score[:, own]
    inter_LTZ = score_LTZ[..., list(prior)].astype(np.float64)
    return Influence(
        before=before(prompt, index),
        lengths=tuple(len(prompt.segments[i]) for i in prior),
        inter_LZ=inter_LTZ.sum(1).astype(np.float32),
        intra_L=score_LTZ[..., index].sum(1, dtype=np.float64).astype(np.float32),
        score_T=inter_LTZ.sum(2).mean(0).astype(np.float32),
    )


def before(prompt: Prompt, index: int) -> tuple[bytes, ...]:
    return tuple(digest(prompt.segments[i].tokens) for i in _prior(prompt, index))


def variant_digest(before: Sequence[bytes]) -> bytes:
    """Digest of segments that KV was computed behind, 32 bytes, from those of the last ten; b"" for none."""
    return hashlib.blake2b(b"".join(before[-10:]), digest_size=32).digest() if before else b""


def digest(tokens: Tokens) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=_DIGEST).digest()


def disorder(old: Sequence[bytes], new: Sequence[bytes]) -> float:
    """Order Penalty Score (eq. 7): Kendall's tau distance of what both have, over its maximum; 0 for fewer than two."""
    place = {name: i for i, name in reversed(list(enumerate(new)))}
    common_M = np.array([place[name] for name in dict.fromkeys(old) if name in place], np.int64)
    m = len(common_M)
    if m < 2:
        return 0.0
    discordant = np.count_nonzero(np.triu(common_M[:, None] > common_M, 1))
    return discordant / (m * (m - 1) / 2)


def quotas(overheads: Sequence[float], lengths: Sequence[int], count: int) -> list[int]:
    """Tokens to recompute of each chunk, `count` in all (or all there are): eq. 12 with the alpha that gives so many.

    A chunk's share is alpha times its unscaled overhead, at most 1; if all that have one are full, the rest is spread
    evenly over the others. Shares are rounded so that they add up: the largest remainders are rounded up.
    """
    overhead, length = np.array(overheads, np.float64), np.array(lengths, np.int64)
    count = min(count, int(length.sum()))
    share = np.zeros(len(length))
    for weight in (overhead, (overhead <= 0).astype(np.float64)):
        share = _filled(weight, length, share, count)
    whole = np.floor(share * length + 1e-9).astype(np.int64)
    remainder = np.where(whole < length, share * length - whole, -1.0)
    whole[np.argsort(-remainder, kind="stable")[: count - int(whole.sum())]] += 1
    return [int(n) for n in whole]


def _filled(weight: Floats, length: NDArray[np.int64], share: Floats, count: int) -> Floats:
    """Raise the shares of weighted chunks in proportion to their weights, none beyond 1, until they make `count`."""
    share, rising = share.copy(), weight > 0
    while rising.any():
        left = count - float(share[~rising] @ length[~rising])
        alpha = left / float(weight[rising] @ length[rising])
        full = rising & (alpha * weight >= 1)
        if not full.any():
            share[rising] = alpha * weight[rising]
            break
        share[full], rising = 1.0, rising & ~full
    return share


def _prior(prompt: Prompt, index: int) -> tuple[int, ...]:
    return tuple(i for i in range(index) if prompt.segments[i].kind is not Kind.SYSTEM)


VARIANT = "craft"
"""Method under which variants are kept, whichever of the strategies made them."""


@dataclass(frozen=True)
class ChunkVariants:
    """A part of an outlook: a chunk, preprocessed or as a variant."""

    fused: Keyed
    name: bytes  # of the variant that is computed if none is there
    tokens: int
    new: bytes  # key of a variant that is computed now
    ranked: Callable[[bool], list[Variant]]  # those that serve; the bool: also those below the device

    def look(self, tree: KnowledgeTree) -> Look:
        look = self.fused.look(tree)
        return Look({self.name: self.tokens}) if look.missing and self.ranked(False) else look

    def keys(self, tree: KnowledgeTree) -> tuple[bytes, ...]:
        *fused, _ = self.fused.keys(tree)
        return (*fused, next((variant.key for variant in self.ranked(True)), self.new))


@dataclass(frozen=True)
class Variant:
    """A variant of a chunk."""

    key: bytes
    behind: bytes  # digest of what it was computed behind
    overhead: float  # what mending it would take, before alpha


def rank(
    kept: Iterable[Node | Record],
    prior: Sequence[bytes],
    overhead: Callable[[Influence, Sequence[bytes]], float],
    tau: float,
) -> list[Variant]:
    """A chunk's variants that serve here, that which takes the least mending first.

    kept: oldest first. prior: digests of the segments that stand before the chunk now. tau: a variant that was computed
    behind others serves up to this overhead.
    """
    here = variant_digest(prior)
    read = ((each.key, Influence.decode(each.meta)) for each in kept)
    found = [Variant(key, variant_digest(i.before), overhead(i, prior)) for key, i in read if i is not None]
    serving = (variant for variant in found if variant.overhead <= tau or variant.behind == here)
    return sorted(serving, key=lambda variant: (variant.overhead, variant.behind != here))


@dataclass(frozen=True)
class Focus:
    chunks: frozenset[int]
    layer: int


def find_focus(inter_LZ: NDArray[np.floating], window: int = CraftVariants.window) -> Focus | None:
    """The first set of chunks that the window's layers agree on; None if they never do. Fewer than three are all in
    focus.

    inter_LZ: attention that the question's tokens gave to each chunk in each layer so far, [layers, chunks]. window:
    layers in a row that must agree (w).
    """
    if inter_LZ.shape[1] < 3:
        return Focus(frozenset(range(inter_LZ.shape[1])), 0)
    sets = [_foremost(cumulated_Z) for cumulated_Z in np.cumsum(inter_LZ, axis=0, dtype=np.float64)]
    for layer in range(window, len(sets) + 1):
        if len(set(sets[layer - window : layer])) == 1:
            return Focus(sets[layer - 1], layer)
    return None


def _foremost(cumulated_Z: NDArray[np.float64]) -> frozenset[int]:
    """Lines 4 to 9 for one layer: cut the descending scores where the entropy of their gaps grows most.

    As printed, with indices from 1: i* is the i in [1, k - 2] with the largest -p log p of gap i + 1, and the top i*
    chunks are in focus. Chunks that no gap tells apart are all in focus.
    """
    order = np.argsort(-cumulated_Z, kind="stable")
    gap = -np.diff(cumulated_Z[order])
    if gap.sum() <= 0:
        return frozenset(range(len(order)))
    share = gap / gap.sum()
    growth = -share[1:] * np.log(np.where(share[1:] > 0, share[1:], 1.0))
    return frozenset(int(i) for i in order[: 1 + int(np.argmax(growth))])
