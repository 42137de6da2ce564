"""Cache-Craft's arithmetic against a literal transcription: double loops over tokens of dense attention matrices."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.core import Kind, Prompt, Segment
from ragjax.reuse.influence import Focus, Influence, before, digest, disorder, find_focus, quotas, record
from tests.support import tiny

LAYERS = 4


def attention(prompt: Prompt, seed: int) -> NDArray[np.float64]:
    """Random causal attention, [layers, T, T], rows that sum to one."""
    scores = np.random.default_rng(seed).gumbel(size=(LAYERS, len(prompt), len(prompt))) * 2
    scores = np.where(np.tril(np.ones((len(prompt), len(prompt)), bool)), scores, -np.inf)
    weight = np.exp(scores)
    return weight / weight.sum(-1, keepdims=True)


def segment_score(prompt: Prompt, a: NDArray[np.float64]) -> NDArray[np.float32]:
    """What `Measure.SEGMENT_SCORE` says of it, all rows."""
    out = np.zeros((LAYERS, len(prompt), len(prompt.segments)))
    for q in range(len(prompt)):
        for s in range(len(prompt.segments)):
            for k in range(prompt.starts[s], prompt.starts[s + 1]):
                if k != q:
                    out[:, q, s] += a[:, q, k]
    return out.astype(np.float32)


def measured(prompt: Prompt, index: int, seed: int = 0) -> Influence:
    score = segment_score(prompt, attention(prompt, seed))
    made = record(prompt, index, np.arange(len(prompt), dtype=np.int32), score)
    return Influence.decode(made.encode())  # through the bytes that a node keeps


class Literal:
    """Equations 3, 4, 6 to 12 and 14 as printed, token by token; chunk names instead of digests."""

    def __init__(self, prompt: Prompt, index: int, seed: int = 0):
        self.a = attention(prompt, seed)
        self.prompt, self.i = prompt, index
        self.prior = [j for j in range(index) if prompt.segments[j].kind is not Kind.SYSTEM]

    def tokens(self, j: int) -> range:
        return range(self.prompt.starts[j], self.prompt.starts[j + 1])

    def inter(self, layer: int, j: int) -> float:
        return sum(self.a[layer, l, k] for k in self.tokens(j) for l in self.tokens(self.i))  # noqa: E741

    def intra(self, layer: int) -> float:
        return sum(self.a[layer, l, k] for k in self.tokens(self.i) for l in self.tokens(self.i) if k < l)  # noqa: E741

    def cci(self) -> float:
        size = len(self.tokens(self.i))
        a = [sum(self.inter(m, j) / (size * len(self.tokens(j))) for j in self.prior) for m in range(LAYERS)]
        b = [self.intra(m) / size**2 for m in range(LAYERS)]
        return 1 / (1 + math.exp(-(sum(a) / LAYERS) / (sum(b) / LAYERS)))

    def beta(self, new: list[bytes]) -> float:
        if not self.prior:
            return 0.0 if new else 1.0
        inter = {j: sum(self.inter(m, j) for m in range(LAYERS)) for j in self.prior}
        common = [j for j in self.prior if digest(self.prompt.segments[j].tokens) in new]
        return sum(inter[j] for j in common) / sum(inter.values())

    def gamma(self, new: list[bytes]) -> float:
        old = [digest(self.prompt.segments[j].tokens) for j in self.prior]
        a_old = [c for c in old if c in new]
        a_new = [c for c in new if c in old]
        m = len(a_old)
        if m < 2:
            return 0.0
        pairs = list(combinations(a_old, 2))
        return sum(a_new.index(x) > a_new.index(y) for x, y in pairs) / (m * (m - 1) / 2)

    def cfo(self, new: list[bytes], alpha: float) -> float:
        adjusted = self.beta(new) * (1 - self.gamma(new))
        return min(1.0, max(0.0, alpha * self.cci() * (1 - adjusted)))

    def chosen(self, new: list[bytes], alpha: float) -> set[int]:
        size = len(self.tokens(self.i))
        scores = [
            sum(self.a[m, t, k] for m in range(LAYERS) for j in self.prior for k in self.tokens(j)) / LAYERS
            for t in self.tokens(self.i)
        ]
        order = sorted(range(size), key=lambda t: -scores[t])
        return set(order[: math.ceil(self.cfo(new, alpha) * size)])


PROMPT = tiny.prompt(5, system=6, chunks=(7, 5, 9, 8), question=4)
NAMES = before(PROMPT, 5)  # all four chunks


@pytest.mark.parametrize("index", [1, 2, 3, 4])
@pytest.mark.parametrize("order", [(), (0,), (1, 0), (0, 1, 2), (2, 1, 0), (9, 1), (9, 2, 9, 0), (1, 9, 2, 0)])
def test_scores_and_token_sets_are_the_papers(index: int, order: tuple[int, ...]) -> None:
    new = [NAMES[n] if n < 4 else bytes(15) + bytes([n]) for n in order]
    literal, made = Literal(PROMPT, index, seed=index), measured(PROMPT, index, seed=index)
    assert made.cci == pytest.approx(literal.cci(), abs=1e-5)
    assert made.overlap(new) == pytest.approx(literal.beta(new), abs=1e-5)
    assert disorder(made.before, new) == pytest.approx(literal.gamma(new))
    for alpha in (0.0, 0.3, 1.0, 1.7, 5.0):
        cfo = min(1.0, alpha * made.mismatch(new))
        assert cfo == pytest.approx(literal.cfo(new, alpha), abs=1e-5)
        count = math.ceil(cfo * len(made) - 1e-9)
        assert set(made.ranking[:count].tolist()) == literal.chosen(new, alpha)


def test_the_system_prompt_is_left_out_and_an_earlier_turn_is_not() -> None:
    turn = Segment("history", Kind.QUERY, np.arange(3, dtype=np.int32))
    prompt = Prompt((PROMPT.segments[0], turn, *PROMPT.segments[1:]))
    assert before(prompt, 1) == () and before(prompt, 3) == (digest(turn.tokens), NAMES[0])
    literal, made = Literal(prompt, 3), measured(prompt, 3)
    assert made.lengths == (3, 7) and made.cci == pytest.approx(literal.cci(), abs=1e-5)


def test_what_stood_behind_the_system_prompt_alone() -> None:
    made = measured(PROMPT, 1)
    assert made.before == () and made.cci == 0.5
    assert made.overlap(()) == 1 and made.overlap(NAMES[:1]) == 0
    assert made.mismatch(()) == 0 and made.mismatch(NAMES[:1]) == 0.5
    assert made.ranking.tolist() == list(range(7))  # all scores are zero: the first tokens


def test_a_chunk_met_twice_counts_where_it_stood_first() -> None:
    a, b, c = NAMES[:3]
    assert disorder((a, b, a), (a, b)) == 0 and disorder((a, b), (b, a, b)) == 1
    assert disorder((a, b, c), (c, b, a)) == 1 and disorder((a, b, c), (a, c, b)) == pytest.approx(1 / 3)


def test_a_single_token_that_sees_others_is_all_context() -> None:
    made = measured(tiny.prompt(1, system=3, chunks=(4, 1)), 2)
    assert made.intra_L.max() == 0 and made.cci == 1.0


def test_what_is_not_whole_is_refused() -> None:
    score = segment_score(PROMPT, attention(PROMPT, 0))
    rows = np.delete(np.arange(len(PROMPT), dtype=np.int32), PROMPT.starts[2])
    with pytest.raises(ValueError, match="4 rows of the segment's 5"):
        record(PROMPT, 2, rows, np.delete(score, PROMPT.starts[2], axis=1))


def test_bytes_of_another_version_are_no_influence_and_torn_ones_an_error() -> None:
    meta = measured(PROMPT, 3).encode()
    assert Influence.decode(b"") is None and Influence.decode(b"\x03" + meta[1:]) is None
    with pytest.raises(ValueError, match="bytes, not"):
        Influence.decode(meta[:-1])
    again = Influence.decode(meta)
    assert again.encode() == meta
    assert len(meta) < 12 + 20 * 2 + 4 * LAYERS * 3 + 4 * 9 + 1


# ---------------------------------------------------------------------------------- alpha by a request's ratio


@pytest.mark.parametrize("seed", range(30))
def test_quotas_hit_the_count_in_proportion(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 60, random.integers(1, 8))
    overheads = random.random(len(lengths)) * (random.random(len(lengths)) < 0.7)
    count = int(random.integers(0, lengths.sum() + 5))
    given = np.array(quotas(list(overheads), list(lengths), count))
    assert given.sum() == min(count, lengths.sum()) and (given >= 0).all() and (given <= lengths).all()
    open_ = (overheads > 0) & (given < lengths - 1)
    if (given[overheads <= 0] > 0).any():
        assert (given[overheads > 0] == lengths[overheads > 0]).all()
    elif open_.any():  # one alpha serves all that are not full, up to rounding
        scale = (overheads * lengths)[open_]
        low, high = (given[open_] - 1) / scale, (given[open_] + 1) / scale
        assert max(low) <= min(high)


def test_quotas_spread_evenly_where_nothing_needs_mending() -> None:
    assert quotas([0.0, 0.0], [30, 10], 8) == [6, 2]
    assert quotas([0.5, 0.0], [10, 40], 14) == [10, 4]
    assert quotas([], [], 0) == [] and quotas([0.2], [5], 0) == [0]


# --------------------------------------------------------------------------------------------- Algorithm 1


def algorithm_1(inter: NDArray[np.float64], w: int) -> Focus | None:
    """As printed, indices from 1; log of 0 counts as 0; chunks that nothing tells apart are all in focus."""
    layers, k = inter.shape
    f_all: list[frozenset[int]] = []
    cinter = {i: 0.0 for i in range(1, k + 1)}
    for layer in range(1, layers + 1):
        for i in cinter:
            cinter[i] += float(inter[layer - 1, i - 1])
        ranked = sorted(cinter, key=lambda i: (-cinter[i], i))
        diff = {i: cinter[ranked[i - 1]] - cinter[ranked[i]] for i in range(1, k)}
        total = sum(diff.values())
        if total <= 0:
            f_all.append(frozenset(i - 1 for i in cinter))
        else:
            p = {i: diff[i] / total for i in diff}
            h = {i: -sum(p[j] * math.log(p[j]) for j in range(1, i + 1) if p[j] > 0) for i in p}
            star = max(range(1, k - 1), key=lambda i: (h[i + 1] - h[i], -i))
            f_all.append(frozenset(i - 1 for i in ranked[:star]))
        if layer >= w and len(set(f_all[layer - w : layer])) == 1:
            return Focus(f_all[-1], layer)
    return None


@pytest.mark.parametrize("seed", range(40))
def test_focus_is_algorithm_1(seed: int) -> None:
    random = np.random.default_rng(seed)
    chunks = int(random.integers(3, 9))
    inter = random.random((12, chunks)) ** 3 * np.exp(random.normal(size=chunks) * (seed % 3))
    for w in (1, 2, 3, 5):
        assert find_focus(inter, w) == algorithm_1(inter, w)


def test_focus_where_there_is_nothing_to_tell() -> None:
    for chunks in (0, 1, 2):
        assert find_focus(np.ones((1, chunks))) == Focus(frozenset(range(chunks)), 0)
    assert find_focus(np.ones((5, 4))) == Focus(frozenset(range(4)), 3)
    assert find_focus(np.ones((2, 4))) is None
    restless = np.array([[9, 5, 0, 0.0], [0, 0, 20, 9], [40, 21, 0, 0], [0, 0, 70, 40]])
    assert find_focus(restless, 2) == algorithm_1(restless, 2)
