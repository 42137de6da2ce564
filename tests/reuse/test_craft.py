"""Cache-Craft as a strategy, against a literal float64 shadow that knows nothing of pages, nodes or passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.cache.cache import neighbours_digest
from ragjax.cache.policy.craft import LOWEST_CFO
from ragjax.core import (
    Answer,
    ConfigError,
    CraftVariants,
    EngineOptions,
    Kind,
    Measure,
    Move,
    Pass,
    Prompt,
    RequestError,
    Segment,
)
from ragjax.core.options import VariantMode
from ragjax.core.passes import sections
from ragjax.reuse import strategies
from ragjax.reuse.craft import Craft
from ragjax.reuse.fuse import Fuse
from ragjax.reuse.influence import (
    VARIANT,
    Focus,
    Influence,
    before,
    digest,
    disorder,
    find_focus,
    quotas,
    record,
    variant_digest,
)
from tests.support import tiny
from tests.support.audit import audit_cache
from tests.support.disks import open_store
from tests.support.executor import Array, Done, Executor, Model, model, softmax

TOLERANCE = 1e-9  # one is float64 throughout, and so is the other
FOCUSED = CraftVariants("off", focus=True)
LENGTHS = (9, 14, 11, 7, 12)
SYSTEM = Segment("system", Kind.SYSTEM, np.arange(30, 36, dtype=np.int32), public=True)


def chunk(i: int) -> Segment:
    tokens = np.random.default_rng(100 + i).integers(0, 256, LENGTHS[i % len(LENGTHS)]).astype(np.int32)
    return Segment(f"chunk{i}", Kind.CHUNK, tokens, public=True)


def ask(*chunks: int, question: int = 0, history: bool = False) -> Prompt:
    random = np.random.default_rng(1000 + question)
    turn = Segment("history", Kind.QUERY, np.arange(80, 85, dtype=np.int32))
    asked = Segment("question", Kind.QUERY, random.integers(0, 256, 6).astype(np.int32))
    return Prompt((SYSTEM, *((turn,) if history else ()), *map(chunk, chunks), asked))


def rows_of(done: Done) -> set[int]:
    return {int(row) for item in done.passes if isinstance(item, Pass) for row in item.rows}


def full(prompt: Prompt) -> Array:
    return model().dense(prompt.tokens).logits[-1]


# -------------------------------------------------------------------------------------------- the shadow


@dataclass
class Kept:
    """A variant: k as rotated at `start`, v, and what was measured."""

    start: int
    k: Array
    v: Array
    before: tuple[bytes, ...]
    influence: Influence


@dataclass
class Shadow:
    """Cache-Craft over whole arrays: lists of variants by chunk, literal choices, one dense forward a request."""

    alpha: float = 1.0
    tau: float = 1.0
    kept: dict[bytes, list[Kept]] = field(default_factory=dict)
    reused: dict[int, Kept] = field(default_factory=dict)

    def run(self, prompt: Prompt, ratio: float | None = None) -> tuple[set[int], Array]:
        """Rows it computes besides the system prompt's, and the logits of the last token."""
        m, n = model(), len(prompt)
        chunks = [i for i, s in enumerate(prompt.segments) if s.kind is Kind.CHUNK]
        best = {i: self._best(prompt, i) for i in chunks}
        known = [i for i in chunks if best[i] is not None and self._serves(prompt, i, best[i])]
        overheads = [best[i].influence.mismatch(before(prompt, i)) for i in known]
        sizes = [len(prompt.segments[i]) for i in known]
        counts = [math.ceil(min(1, self.alpha * x) * size) for x, size in zip(overheads, sizes, strict=True)]
        if ratio is not None:
            counts = quotas(overheads, sizes, math.ceil(ratio * sum(sizes)))
        todo = dict(zip(known, counts, strict=True))
        shape = (len(m.layers), n, m.config.num_kv_heads, m.config.head_dim)
        k, v, rows = np.zeros(shape), np.zeros(shape), set(range(n))
        self.reused = {}
        for i in known:
            begin, end = prompt.starts[i], prompt.starts[i + 1]
            if todo[i] >= end - begin:
                continue
            old = self.reused[i] = best[i]
            v[:, begin:end] = old.v
            for layer in range(len(m.layers)):
                k[layer, begin:end] = m.rotate(old.k[layer], np.full(end - begin, begin - old.start))
            scores = [float(s) for s in old.influence.score_T]
            order = sorted(range(end - begin), key=lambda t: -scores[t])
            rows -= {begin + t for t in order[todo[i] :]}
        dense = m.dense(prompt.tokens, rows=np.array(sorted(rows)), kept=(k, v))
        for i in set(chunks) - set(self.reused):
            self._keep(prompt, i, dense.k, dense.v, dense.prob)
        return rows - set(range(prompt.starts[1])), dense.logits[-1]

    def _serves(self, prompt: Prompt, i: int, kept: Kept) -> bool:
        now = before(prompt, i)
        return kept.before == now or kept.influence.mismatch(now) <= self.tau

    def _best(self, prompt: Prompt, i: int) -> Kept | None:
        now = before(prompt, i)
        found = self.kept.get(digest(prompt.segments[i].tokens), [])
        rated = [(kept.influence.mismatch(now), kept.before != now, at) for at, kept in enumerate(found)]
        return found[min(rated)[2]] if rated else None

    def _keep(self, prompt: Prompt, i: int, k: Array, v: Array, prob: Array) -> None:
        begin, end = prompt.starts[i], prompt.starts[i + 1]
        found = self.kept.setdefault(digest(prompt.segments[i].tokens), [])
        if any(kept.before == before(prompt, i) for kept in found):
            return
        score = np.zeros((prob.shape[0], len(prompt), len(prompt.segments)))
        for q in range(begin, end):
            for s in range(len(prompt.segments)):
                keys = [t for t in range(prompt.starts[s], prompt.starts[s + 1]) if t != q]
                score[:, q, s] = prob[:, q][:, :, keys].mean(1).sum(-1)
        influence = record(prompt, i, np.arange(len(prompt)), score.astype(np.float32))
        found.append(Kept(begin, k[:, begin:end].copy(), v[:, begin:end].copy(), before(prompt, i), influence))


REQUESTS = [
    *((0, 1, 2), (2, 1, 0), (0, 1, 3), (1, 2), (3, 0, 2, 1), (0,), (4, 0), (0, 4, 1), (1, 0, 2), (0, 1, 2)),
    *((4, 3, 2, 1, 0), (0, 2, 1), (1, 1, 0), (2,), (3, 4), (0, 3, 1)),
]


@pytest.mark.parametrize(
    ("alpha", "tau", "ratios"),
    [
        (0.4, 1.0, (None,)),
        (1.6, 1.0, (None,)),
        (1.0, 1.0, (0.15, None, 0.5, 1.0, 0.0)),
        (1.0, 0.3, (None,)),
        (1.0, 0.3, (0.15, None, None, 1.0, 0.0)),
    ],
)
def test_a_sequence_of_requests_is_what_the_shadow_says(
    alpha: float, tau: float, ratios: Sequence[float | None]
) -> None:
    executor, shadow = Executor(pages=400), Shadow(alpha, tau)
    craft = Craft(alpha=alpha, variants=CraftVariants("above", tau))
    for n, chunks in enumerate(REQUESTS):
        prompt, ratio = ask(*chunks, question=n, history=n % 5 == 4), ratios[n % len(ratios)]
        done = executor.run(craft, prompt, ratio)
        rows, logits = shadow.run(prompt, ratio)
        head = prompt.starts[1 + (n % 5 == 4)]  # of its rows, each is computed once in all
        fresh = set() if n > 4 else set(range(len(SYSTEM) if n > 0 else 0, head))
        assert rows_of(done) == rows - set(range(head)) | fresh
        np.testing.assert_allclose(done.logits, logits, atol=TOLERANCE * 1e3, rtol=1e-5)
        for i, segment in enumerate(prompt.segments):
            begin, end = prompt.starts[i], prompt.starts[i + 1]
            if i:
                computed = rows - set(range(head)) | fresh
                assert done.plan.reports[i].recomputed == len(computed & set(range(begin, end)))
            if segment.kind is Kind.CHUNK:
                nodes = executor.cache.matcher.find_variants(segment.tokens, VARIANT)
                kept = shadow.kept[digest(segment.tokens)]
                read = [Influence.decode(node.meta) for node in nodes]
                assert [r.before for r in read] == [old.before for old in kept]
                for r, old, node in zip(read, kept, nodes, strict=True):
                    assert node.local_start == old.start
                    np.testing.assert_allclose(r.score_T, old.influence.score_T, atol=1e-6)
                    assert r.cci == pytest.approx(old.influence.cci, abs=1e-5)


@pytest.mark.parametrize(("alpha", "tau"), [(1.6, 1.0), (1.0, 0.3)])
def test_a_sequence_needs_variants_of_every_sort(alpha: float, tau: float) -> None:
    """What the test above goes through: several variants of a chunk, some mended, some as they are."""
    shadow = Shadow(alpha, tau)
    for n, chunks in enumerate(REQUESTS):
        shadow.run(ask(*chunks, question=n, history=n % 5 == 4))
    assert max(len(kept) for kept in shadow.kept.values()) > 2


def test_a_chunk_in_an_unseen_prefix_gets_a_variant_though_it_would_be_mended_in_part() -> None:
    """Cache-Craft, section 3.3: new variants are added for a unique chunk and prefix."""
    counts = []
    for tau in (0.0, 1.0):
        executor, craft = Executor(), Craft(alpha=0.5, variants=CraftVariants("above", tau))
        for chunks in ((0, 1, 2), (3, 4, 2), (2, 0)):
            done = executor.run(craft, ask(*chunks))
        counts.append(len(executor.cache.matcher.find_variants(chunk(2).tokens, VARIANT)))
    assert counts == [3, 1]
    again = executor.run(Craft(variants=CraftVariants("above", 0.0)), ask(0, 1, 2, question=1))
    assert len(rows_of(again)) == 6 and done.plan.exact_to is None


@pytest.mark.parametrize("ratio", [None, 0.0])
def test_a_ratio_says_nothing_of_new_variants(ratio: float | None) -> None:
    executor, craft = Executor(), Craft(variants=CraftVariants("above", 0.0))
    executor.run(craft, ask(0, 1, 2))
    known = executor.cache.metrics
    done = executor.run(craft, ask(0, 2), ratio)
    found = executor.cache.metrics
    assert found.approximate_hit_tokens - known.approximate_hit_tokens == LENGTHS[0], "what does not serve is no hit"
    assert found.missed_tokens - known.missed_tokens == LENGTHS[2]
    assert [report.recomputed for report in done.plan.reports[1:3]] == [0, LENGTHS[2]]


def test_prefixes_fill_the_room_for_variants_and_then_make_room_above_tau_alone() -> None:
    """Cache-Craft, section 3.3: N times M of them, and from then on the least f_r leaves."""
    orders = [*permutations((0, 1, 2), 3)]
    for tau in (0.0, 1.0):
        executor, craft = Executor(pages=400, variants=10), Craft(variants=CraftVariants("fill", tau))
        found = []
        for order in orders:
            executor.run(craft, ask(*order))
            kept = [executor.cache.matcher.find_variants(chunk(i).tokens, VARIANT) for i in range(3)]
            found.append(sum(map(len, kept)))
        assert found[:2] == [3, 5] and found[-1] == 10 and max(found) == 10
        done = executor.run(craft, ask(*orders[-1]))
        assert (len(rows_of(done)) == 6) is (tau == 0.0)  # made at the expense of others, or mended
        audit_cache(executor.cache, ())


@pytest.mark.parametrize("when", ["off", "fill"])
def test_the_mean_fix_overhead_falls_over_a_zipf_stream_if_variants_are_made(when: VariantMode) -> None:
    random, weight, found = np.random.default_rng(0), 1 / np.arange(1, 6), list[float]()
    executor, craft = Executor(pages=800), Craft(variants=CraftVariants(when))
    for n in range(60):
        chunks = random.choice(5, 3, replace=False, p=weight / weight.sum())
        prompt = ask(*map(int, chunks), question=n)
        done = executor.run(craft, prompt)
        # the share of a chunk that is computed is its CFO, or 1 if it is a new variant
        found.append(float(np.mean([one.recomputed / one.tokens for one in done.plan.reports[1:-1]])))
    early, late = np.mean(found[:15]), np.mean(found[-30:])
    assert (late > 0.75 * early) if when == "off" else (late < early / 3)
    assert when == "fill" or done.plan.figures["cfo"] == pytest.approx(found[-1], abs=0.1)  # of whole tokens


def test_the_last_ten_segments_name_a_variant() -> None:
    names = [bytes([i]) * 16 for i in range(12)]
    assert variant_digest(names) == variant_digest(names[1:]) != variant_digest(names[3:])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("off", CraftVariants("off")),
        ("fill", CraftVariants("fill", 0.5)),
        ("above=0.7", CraftVariants("above", 0.7)),
        ("fill:tau=0.6,focus=on,window=4", CraftVariants("fill", 0.6, True, 4)),
    ],
)
def test_settings_of_variants(given: str, wanted: CraftVariants) -> None:
    assert CraftVariants.parse(given) == wanted
    assert strategies(craft=wanted)["craft"].variants == wanted


@pytest.mark.parametrize("given", ["on", "fill:tau=2", "fill:width=3", "above=x", "fill:when=off"])
def test_settings_that_there_are_not_are_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        EngineOptions("tiny", craft_variants=given)


@pytest.mark.parametrize("name", ["craft-nobeta", "craft-nocci"])
def test_an_ablation_leaves_its_factor_out(name: str) -> None:
    """Cache-Craft, Figure 26."""
    executor, craft = Executor(), strategies()[name]
    executor.run(craft, ask(0, 1, 2))
    prompt = ask(1, 0, 2)
    [node] = executor.cache.matcher.find_variants(chunk(2).tokens, VARIANT)
    influence = Influence.decode(node.meta)
    adjusted = influence.overlap(before(prompt, 3)) * (1 - disorder(influence.before, before(prompt, 3)))
    expected = influence.cci if name == "craft-nobeta" else 1 - adjusted
    done = executor.run(craft, prompt)
    assert done.plan.reports[3].recomputed == math.ceil(expected * LENGTHS[2] - 1e-9)


# ----------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("name", ["craft", "craft-focus"])
@pytest.mark.parametrize("ratio", [0.0, 0.07, 0.15, 0.5, 0.93])
def test_the_measured_share_is_the_ratio(name: str, ratio: float) -> None:
    executor, craft = Executor(), Craft(name, variants=FOCUSED if name == "craft-focus" else CraftVariants("off"))
    executor.run(craft, ask(0, 1, 2, 3))
    for chunks in ((3, 1, 0, 2), (0, 1, 2, 3), (2,), (1, 0)):
        done = executor.run(craft, ask(*chunks), ratio)
        tokens = sum(LENGTHS[i] for i in chunks)
        assert sum(r.recomputed for r in done.plan.reports[1:-1]) == math.ceil(ratio * tokens - 1e-9)


@pytest.mark.parametrize("name", ["craft", "craft-focus"])
def test_everything_recomputed_is_full_and_so_is_the_first_time(name: str) -> None:
    executor, craft = Executor(), Craft(name, variants=FOCUSED if name == "craft-focus" else CraftVariants("off"))
    for chunks in ((0, 1, 2), (2, 3, 0, 1), (0, 1, 2)):
        prompt = ask(*chunks)
        done = executor.run(craft, prompt, 1.0)
        np.testing.assert_allclose(done.logits, full(prompt), atol=1e-6, rtol=1e-5)
        assert done.plan.exact_to == "full" and all(r.recomputed == r.tokens for r in done.plan.reports[1:])


@pytest.mark.parametrize("ratio", [None, 0.0, 0.3])
def test_one_chunk_alone_is_full_cold_and_warm(ratio: float | None) -> None:
    executor, craft = Executor(), Craft()
    for chunks in ((0,), (1, 0), (1,)):  # 0 is met behind 1 as well, and stays what it was behind the system prompt
        executor.run(craft, ask(*chunks))
    for i in (0, 1, 2):
        prompt = ask(i, question=7)
        executor.run(craft, prompt)
        done = executor.run(craft, prompt, ratio)
        np.testing.assert_allclose(done.logits, full(prompt), atol=1e-6, rtol=1e-5)
        assert done.plan.exact_to == "full" and done.plan.reports[1].reused > 0


def test_a_chunk_alone_that_is_known_behind_another_only_is_mended_and_not_called_exact() -> None:
    executor, craft = Executor(), Craft()
    executor.run(craft, ask(1, 0))
    done = executor.run(craft, ask(0))
    assert done.plan.exact_to is None and 0 < done.plan.reports[1].recomputed < LENGTHS[0]


def test_the_same_prefix_needs_no_mending_and_is_near_full_but_not_called_exact() -> None:
    executor, craft = Executor(), Craft()
    executor.run(craft, ask(0, 1, 2))
    prompt = ask(0, 1, 2, question=3)
    done = executor.run(craft, prompt)
    assert len(rows_of(done)) == 6 and done.plan.exact_to is None
    np.testing.assert_allclose(done.logits, full(prompt), atol=1e-6, rtol=1e-5)


def test_of_variants_that_need_no_mending_the_one_computed_behind_just_this_is_taken() -> None:
    executor, craft = Executor(), Craft()
    executor.run(craft, ask(0, 2))  # all that 2 looked at stands before it again below, and something else
    executor.run(craft, ask(0, 1, 2), 1.0)
    done = executor.run(craft, ask(0, 1, 2, question=1))
    assert len(rows_of(done)) == 6
    np.testing.assert_allclose(done.logits, full(ask(0, 1, 2, question=1)), atol=1e-6, rtol=1e-5)


def test_a_chunk_behind_an_earlier_turn_is_another_variant_and_private() -> None:
    executor, craft = Executor(), Craft()
    executor.run(craft, ask(0, history=True), tenant="a")
    [node] = executor.cache.matcher.find_variants(chunk(0).tokens, VARIANT, "a")
    assert node.tenant == "a" and executor.cache.matcher.find_variants(chunk(0).tokens, VARIANT, "b") == ()
    done = executor.run(craft, ask(0), tenant="b")
    np.testing.assert_allclose(done.logits, full(ask(0)), atol=1e-6, rtol=1e-5)
    [node] = executor.cache.matcher.find_variants(chunk(0).tokens, VARIANT, "b")
    assert node.tenant == "" and len(executor.cache.matcher.find_variants(chunk(0).tokens, VARIANT, "a")) == 2


def test_a_private_chunk_makes_those_behind_it_private() -> None:
    prompt = ask(0, 1)
    prompt = Prompt((prompt.segments[0], replace(prompt.segments[1], public=False), *prompt.segments[2:]))
    executor = Executor()
    executor.run(Craft(), prompt, tenant="a")
    for i in (0, 1):
        assert [node.tenant for node in executor.cache.matcher.find_variants(chunk(i).tokens, VARIANT, "a")] == ["a"]


def test_without_chunks_and_without_a_system_prompt() -> None:
    executor, craft = Executor(), Craft()
    for segments in (ask().segments, ask().segments[1:], ask(0, 1).segments[1:]):
        prompt = Prompt(segments)
        for _ in range(2):
            done = executor.run(craft, prompt, 0.15)
        np.testing.assert_allclose(done.logits, full(prompt), atol=1e-6, rtol=1e-5)


def test_keys_are_those_of_the_nodes_it_uses() -> None:
    executor, craft = Executor(), Craft()
    prompt = ask(0, 1, 2)
    expected = craft.keys(prompt, executor.cache, "")
    executor.run(craft, prompt)
    assert {node.key for node in executor.cache.tree.nodes()} == set(expected)
    assert craft.keys(prompt, executor.cache, "") == expected
    [variant] = executor.cache.matcher.find_variants(chunk(1).tokens, VARIANT)
    assert variant.key in craft.keys(ask(2, 1), executor.cache, "a")


# --------------------------------------------------------------------------------------- fused chunks


def fuse(executor: Executor, index: int, behind: Sequence[int], *, record: bool = True) -> Segment:
    """Preprocess a chunk; the segment that names its fused KV."""
    executor.run(Fuse(record=record), Prompt((SYSTEM, *map(chunk, behind), chunk(index))))
    return replace(chunk(index), behind=neighbours_digest(chunk(i).tokens for i in behind))


def test_fused_chunks_are_mended_by_the_attention_to_their_neighbours() -> None:
    executor, craft = Executor(), Craft("fusion+craft", fused=True, alpha=0.6)
    segments = [fuse(executor, 0, (1, 2)), fuse(executor, 1, (3, 0))]
    prompt = ask(0, 1)
    prompt = Prompt((SYSTEM, *segments, prompt.segments[-1]))
    done = executor.run(craft, prompt)
    for i, behind in ((1, (1, 2)), (2, (3, 0))):
        dense = Prompt((SYSTEM, *map(chunk, behind), segments[i - 1]))
        own, at = dense.starts[3], len(SYSTEM)
        sees = np.tril(np.ones((len(dense), len(dense)), bool))
        sees[dense.starts[2] : own, dense.starts[1] : dense.starts[2]] = False
        position = np.concatenate([np.arange(at + LENGTHS[behind[0]]), np.arange(at, at + LENGTHS[behind[1]])])
        made = model().dense(dense.tokens[:own], sees[:own, :own], position)
        k, v = made.k.copy(), made.v.copy()
        for layer in range(3):
            k[layer] = model().rotate(k[layer], np.arange(own) - position)
        pad = ((0, 0), (0, len(dense) - own), (0, 0), (0, 0))
        prob = model().dense(dense.tokens, rows=np.arange(own, len(dense)), kept=(np.pad(k, pad), np.pad(v, pad))).prob
        score = prob[:, own:, :, at:own].mean(2).sum(-1).mean(0)
        cost = min(1.0, 0.6 * _literal_overhead(prob, dense, before(prompt, i)))
        begin = prompt.starts[i]
        chosen = sorted(range(len(score)), key=lambda t: -score[t])[: math.ceil(cost * len(score))]
        rows = {row - begin for row in rows_of(done) if begin <= row < prompt.starts[i + 1]}
        assert rows == set(chosen) and 0 < len(chosen) < len(score)
    assert executor.cache.matcher.find_variants(chunk(0).tokens, VARIANT) == ()


def _literal_overhead(prob: Array, dense: Prompt, now: Sequence[bytes]) -> float:
    own, n = dense.starts[3], len(dense.segments[3])
    inter = [prob[:, own:, :, dense.starts[j] : dense.starts[j + 1]].mean(2).sum((1, 2)) for j in (1, 2)]
    intra = sum(prob[:, own + t, :, own : own + t].mean(1).sum(-1) for t in range(n))
    a = sum(inter[j] / (n * len(dense.segments[1 + j])) for j in (0, 1)).mean()
    common = [j for j in (0, 1) if digest(dense.segments[1 + j].tokens) in now]
    beta = sum(inter[j].sum() for j in common) / sum(inter[j].sum() for j in (0, 1))
    return 1 / (1 + math.exp(-a / (intra.mean() / n**2))) * (1 - beta)


@pytest.mark.parametrize("ratio", [None, 0.25])
def test_a_use_of_a_fused_chunk_counts_by_the_fixing_that_it_takes(ratio: float | None) -> None:
    """It adds 1 / CFO to f_r of Cache-Craft's policy, and CFO is least where its neighbours stand before it."""
    executor, craft = Executor(policy="craft"), Craft("fusion+craft", fused=True, alpha=0.6)
    segment = fuse(executor, 0, (1, 2))
    [node] = [node for node in executor.cache.tree.nodes() if node.method == "fusion"]
    for prior, fixing in (((3,), None), ((1, 2), 0.0)):
        prompt = Prompt((SYSTEM, *map(chunk, prior), segment, ask().segments[-1]))
        influence = Influence.decode(node.meta)
        cfo = influence.mismatch(before(prompt, 1 + len(prior)))
        assert 0 < cfo < 1 if fixing is None else cfo == pytest.approx(fixing, abs=1e-6)
        noted = node.note
        executor.run(craft, prompt, ratio)
        assert node.note - noted == pytest.approx(1 / max(cfo, LOWEST_CFO))


def test_a_chunk_that_was_not_preprocessed_is_crafts_and_one_without_its_attention_is_refused() -> None:
    executor, craft = Executor(), Craft("fusion+craft", fused=True)
    segment = fuse(executor, 0, (1, 2))
    executor.run(craft, ask(3, 1))
    prompt = Prompt((*ask(1).segments[:2], segment, ask().segments[-1]))
    done = executor.run(craft, prompt, 0.25)
    assert [r.recomputed for r in done.plan.reports[1:-1]] != [0, 0]
    executor.cache.clear()
    executor.run(Craft(), ask(1))
    fuse(executor, 0, (1, 2), record=False)
    with pytest.raises(RequestError, match=r"chunk 'chunk0' was preprocessed without"):
        executor.run(craft, prompt)


def test_a_fused_chunk_alone_is_computed_whole_and_exact() -> None:
    executor, craft = Executor(), Craft("fusion+craft", fused=True)
    segment = fuse(executor, 0, (1, 2))
    for reused in (0, LENGTHS[0]):
        prompt = Prompt((SYSTEM, segment, ask(question=reused).segments[-1]))
        done = executor.run(craft, prompt, 0.0)
        np.testing.assert_allclose(done.logits, full(prompt), atol=1e-6, rtol=1e-5)
        assert done.plan.exact_to == "full" and done.plan.reports[1].reused == reused


def test_keys_of_fused_chunks_are_those_of_what_is_kept() -> None:
    executor, craft = Executor(), Craft("fusion+craft", fused=True)
    segment = fuse(executor, 0, (1, 2))
    [node] = [node for node in executor.cache.tree.nodes() if node.method == "fusion"]
    prompt = Prompt((SYSTEM, segment, *ask(1).segments[1:]))
    assert node.key in craft.keys(prompt, executor.cache, "")
    assert node.key not in craft.keys(Prompt((SYSTEM, segment, ask().segments[-1])), executor.cache, "")


# ------------------------------------------------------------------------------------------------ focus


@cache
def deep(seed: int) -> Model:
    """Nine layers."""
    return Model(tiny.decoder(config=replace(tiny.CONFIG, num_layers=9), seed=seed))


def by_layers(made: Model, tokens: NDArray[np.int32], rows: Sequence[NDArray[np.int64]], k: Array, v: Array) -> Array:
    """Logits of the last token where layer l computes rows[l], a subset of the layer's before, over kept k and v."""
    x = made.embedding[tokens[rows[0]]]
    for layer, now in enumerate(rows):
        x = x[np.isin(rows[max(layer - 1, 0)], now)]
        q, k[layer, now], v[layer, now] = made.project(layer, x, now)
        seen = np.tril(np.ones((len(tokens), len(tokens)), bool))[now]
        x = made.finish(layer, x, made.mix(softmax(made.scores(q, k[layer]), seen[:, None]), v[layer]))
    return made.unembed(x)[-1]


@pytest.mark.parametrize("stages", [(0, 3, 6, 9), tuple(range(10))])
@pytest.mark.parametrize("seed", [0, 3])
def test_chunks_out_of_focus_take_their_old_kv_from_the_next_section_on(stages: tuple[int, ...], seed: int) -> None:
    made = deep(seed)
    plain, early = (Executor(made, stages=stages) for _ in range(2))
    for executor in (plain, early):
        executor.run(Craft(), ask(0, 1, 2, 3))
    new = 4 if seed == 3 else 3  # with and without a chunk that is computed whole
    prompt = ask(2, 0, new, 1, question=seed)
    whole = plain.run(Craft(), prompt, 0.4)
    done = early.run(Craft("craft-focus", variants=FOCUSED), prompt, 0.4)
    assert rows_of(done) == rows_of(whole)
    passes = [p for p in done.passes if isinstance(p, Pass)]
    moves = [p for p in done.passes if isinstance(p, Move)]
    begin = prompt.starts[-2]
    inter = np.concatenate(
        [
            r[Measure.SEGMENT_SCORE][:, p.rows >= begin][..., 1:5].sum(1)
            for p, r in zip(done.passes, done.results, strict=True)
            if isinstance(p, Pass) and Measure.SEGMENT_SCORE in p.measures
        ]
    )
    picked = np.array(sorted(rows_of(done) - {*range(begin, len(prompt))}))
    if new == 4:
        picked = picked[~np.isin(picked, np.arange(prompt.starts[3], prompt.starts[4]))]
    focus = find_focus(inter) or Focus(frozenset(range(4)), 9)
    at = min(s for s in sections(9) if s >= focus.layer)
    out = [r for r in picked if np.searchsorted(prompt.starts, r, "right") - 2 not in focus.chunks]
    figures = done.plan.figures
    assert figures["focus_ideal"] == pytest.approx(len(out) / len(picked) * (1 - focus.layer / 9))
    assert figures["focus_realised"] == pytest.approx(len(out) / len(picked) * (1 - at / 9))
    assert [m.layers for m in moves] == ([(at, 9)] if out and at < 9 else [])
    assert [p.layers for p in passes][-1] == ((at, 9) if at < 9 else sections(9)[-2:])
    rows = [np.setdiff1d(passes[0].rows, out if layer >= at else []) for layer in range(9)]
    k, v = _kept(early, prompt, made)
    np.testing.assert_allclose(done.logits, by_layers(made, prompt.tokens, rows, k, v), atol=1e-6, rtol=1e-5)
    assert len(early.cache.matcher.find_variants(chunk(4).tokens, VARIANT)) == (new == 4)


def test_the_deep_cases_above_are_cut_in_time() -> None:
    executor = Executor(deep(0), stages=tuple(range(10)))
    executor.run(Craft(), ask(0, 1, 2, 3))
    done = executor.run(Craft("craft-focus", variants=FOCUSED), ask(2, 0, 3, 1, question=0), 0.4)
    assert 0 < done.plan.figures["focus_realised"] <= done.plan.figures["focus_ideal"] < 1


def _kept(executor: Executor, prompt: Prompt, made: Model) -> tuple[Array, Array]:
    """Old k and v at their new places, read from the oldest variants' pages; zeros elsewhere."""
    shape = (len(made.layers), len(prompt), made.config.num_kv_heads, made.config.head_dim)
    k, v = np.zeros(shape), np.zeros(shape)
    head = made.dense(SYSTEM.tokens)
    k[:, : len(SYSTEM)], v[:, : len(SYSTEM)] = head.k, head.v
    for i in range(1, len(prompt.segments) - 1):
        begin, end = prompt.starts[i], prompt.starts[i + 1]
        node = executor.cache.matcher.find_variants(prompt.segments[i].tokens, VARIANT)[0]
        slots = node.run.slots(16)
        v[:, begin:end] = executor.v[:, slots]
        for layer in range(len(made.layers)):
            k[layer, begin:end] = made.rotate(executor.k[layer, slots], np.full(end - begin, begin - node.local_start))
    return k, v


# ------------------------------------------------------------------------------------------- the engine


@pytest.mark.slow
@pytest.mark.smoke
def test_the_engine_says_what_the_executor_says() -> None:
    """New, mended, new beside known, in one pass and by stages; then all at once over the same chunks."""
    name, craft = "craft-focus", Craft("craft-focus", variants=FOCUSED)
    requests = [((0, 1, 2), None), ((2, 1, 0), 0.3), ((1, 0, 2), 0.15), ((3, 2, 1), 0.5)]
    with tiny.engine(extra=[craft]) as engine:
        executor = Executor(stages=tiny.runner().stages)
        for n, (chunks, ratio) in enumerate(requests):
            prompt = ask(*chunks, question=n)
            done = executor.run(craft, prompt, ratio)
            answer = engine.answer_prompt(prompt, strategy=name, recompute_ratio=ratio, max_tokens=1, want_logits=True)
            assert answer.logits is not None and answer.exact_to == done.plan.exact_to
            assert [s.recomputed for s in answer.segments] == [r.recomputed for r in done.plan.reports]
            assert answer.figures == pytest.approx(done.plan.figures, abs=1e-4) and bool(answer.figures) == (n > 0)
            np.testing.assert_allclose(answer.logits, done.logits, atol=2e-4)
        together = [
            engine.begin_prompt(ask(*chunks), strategy=name, recompute_ratio=ratio, max_tokens=1, want_logits=True)
            for chunks, ratio in requests
        ]
        for future, (chunks, ratio) in zip(together, requests, strict=True):
            logits = future.result().logits
            np.testing.assert_allclose(logits, executor.run(craft, ask(*chunks), ratio).logits, atol=2e-4)


def test_a_variant_that_lies_on_disk_alone_is_mended_behind_other_chunks(tmp_path: Path) -> None:
    def serve(*chunks: int) -> tuple[Answer, Any]:
        with tiny.engine(disk=open_store(tmp_path)) as engine:
            answer = engine.answer_prompt(ask(*chunks), strategy="craft", recompute_ratio=0.3, max_tokens=1)
            return answer, engine.stats()["tier_hit_tokens_total"]

    serve(0, 1, 2)
    answer, hits = serve(3, 2, 1)
    system, new, *known, _ = answer.segments
    assert new.reused == 0 and all(0 < s.reused < s.tokens and s.tier == "disk" for s in known)
    assert hits == {"disk": system.tokens + sum(s.tokens for s in known)}
