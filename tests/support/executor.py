"""A slow, literal executor of strategies' conversations in float64 NumPy; nothing of it is shared with the runner.

`Model` is the tiny decoder read again: RoPE by complex numbers, attention by one softmax per row and head over the
keys that the visibility rule lets it see. `Executor` gives it pages and a real `KnowledgeCache`, runs any strategy on a
prompt and keeps what was passed and measured:

    executor = Executor()
    done = executor.run(Naive(), tiny.prompt())     # done.plan.logits, done.passes, done.results
    talk = executor.talk(Naive(), tiny.prompt(1))   # or pass by pass, several side by side
    while talk.step(): ...
    talk.close()

Slots that nobody wrote hold NaN, so that whoever reads them notices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.policy import POLICIES
from ragjax.cache.pool import PagePool
from ragjax.cache.profile import Profile
from ragjax.core import NEVER, Measure, Move, Pass, Plan, Prefill, Prompt, Results, Span, StepLimits
from ragjax.models.decoder import Decoder
from ragjax.reuse.base import Allocation, Strategy
from tests.support import oracle, tiny
from tests.support.audit import audit_cache

Array = NDArray[np.float64]


# -------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Dense:
    """What a dense forward computed: rotated k and v [L, T, K, D], prob [L, T, H, T], logits [T, V]."""

    k: Array
    v: Array
    prob: Array
    logits: Array


class Model:
    """The decoder's weights in float64 and the formulas of Llama over them."""

    def __init__(self, decoder: Decoder):
        config = decoder.config
        assert not config.qkv_bias and not config.qk_norm and config.rope_scaling is None
        self.config = config
        self.layers = [
            {
                name: np.asarray(getattr(layer, name)[...], np.float64)
                for name in ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
            }
            for layer in decoder.layers
        ]
        self.embedding = np.asarray(decoder.embedding[...], np.float64)
        self.norm = np.asarray(decoder.norm[...], np.float64)
        self.head = self.embedding if decoder.head is None else np.asarray(decoder.head[...], np.float64)

    def rotate(self, x: Array, position: NDArray[np.integer]) -> Array:
        """Rotate heads [n, heads, D] by the angles of positions [n]."""
        half = x.shape[-1] // 2
        return oracle.rotate(x, np.asarray(position), self.config.rope_theta ** (-np.arange(half) / half))

    def normed(self, x: Array, scale: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * scale

    def project(self, layer: int, x: Array, position: NDArray[np.integer]) -> tuple[Array, Array, Array]:
        """Queries [T, H, D] and keys [T, K, D] rotated at their positions, values [T, K, D]."""
        weights = self.layers[layer]
        k, n, d, e = weights["qkv"].shape
        all_ = (self.normed(x, weights["attention_norm"]) @ weights["qkv"].reshape(-1, e).T).reshape(-1, k, n, d)
        q = all_[:, :, :-2].reshape(len(x), -1, all_.shape[-1])
        return self.rotate(q, position), self.rotate(all_[:, :, -2], position), all_[:, :, -1]

    def finish(self, layer: int, x: Array, out: Array) -> Array:
        """Output projection and MLP behind attention's output [T, H, D]."""
        weights = self.layers[layer]
        x = x + out.reshape(len(x), -1) @ weights["out"].reshape(x.shape[1], -1).T
        h = self.normed(x, weights["mlp_norm"])
        gate, up = h @ weights["gate_up"][0].T, h @ weights["gate_up"][1].T
        return x + (gate / (1 + np.exp(-gate)) * up) @ weights["down"].T

    def unembed(self, x: Array) -> Array:
        return self.normed(x, self.norm) @ self.head.T

    def scores(self, q: Array, k: Array) -> Array:
        """Scaled products [T, H, S]; query heads share a KV head in groups."""
        groups = q.shape[1] // k.shape[1]
        q_HTD, k_HDS = q.transpose(1, 0, 2), np.repeat(k, groups, axis=1).transpose(1, 2, 0)
        return (q_HTD @ k_HDS).transpose(1, 0, 2) / np.sqrt(q.shape[-1])

    def mix(self, prob: Array, v: Array) -> Array:
        """Attention's output [T, H, D] of probabilities [T, H, S] and values [S, K, D]."""
        v_HSD = np.repeat(v, prob.shape[1] // v.shape[1], axis=1).transpose(1, 0, 2)
        return (prob.transpose(1, 0, 2) @ v_HSD).transpose(1, 0, 2)

    def dense(
        self,
        tokens: NDArray[np.integer],
        seen: NDArray[np.bool_] | None = None,
        position: NDArray[np.integer] | None = None,
        rows: NDArray[np.integer] | None = None,
        kept: tuple[Array, Array] | None = None,
    ) -> Dense:
        """A forward over whole arrays, for oracles: tokens [T], seen [T, T] (None: causal), position [T] (0 to T - 1).

        rows: which tokens are computed (all, if None); the others' k (at `position`) and v [L, T, K, D] are `kept`.
        prob and logits are zero in rows that were not computed.
        """
        n = len(tokens)
        seen = np.tril(np.ones((n, n), bool)) if seen is None else seen
        position = np.arange(n) if position is None else position
        rows = np.arange(n) if rows is None else rows
        shape = (len(self.layers), n, self.config.num_kv_heads, self.config.head_dim)
        all_k, all_v = (np.zeros(shape), np.zeros(shape)) if kept is None else (kept[0].copy(), kept[1].copy())
        prob = np.zeros((len(self.layers), n, self.config.num_heads, n))
        x = self.embedding[tokens[rows]]
        for layer in range(len(self.layers)):
            q, all_k[layer, rows], all_v[layer, rows] = self.project(layer, x, position[rows])
            prob[layer, rows] = softmax(self.scores(q, all_k[layer]), seen[rows][:, None])
            x = self.finish(layer, x, self.mix(prob[layer, rows], all_v[layer]))
        logits = np.zeros((n, len(self.head)))
        logits[rows] = self.unembed(x)
        return Dense(all_k, all_v, prob, logits)


def softmax(scores: Array, seen: NDArray[np.bool_]) -> Array:
    """Over the last axis, zero where not seen; all zeros where nothing is seen."""
    top = np.where(seen, scores, -np.inf).max(-1, keepdims=True)
    weight = np.where(seen, np.exp(scores - np.where(np.isfinite(top), top, 0.0)), 0.0)
    return weight / np.maximum(weight.sum(-1, keepdims=True), 1e-300)


@cache
def model(seed: int = 0) -> Model:
    """The model of `tiny.decoder(seed=seed)`."""
    return Model(tiny.decoder(seed=seed))


# ------------------------------------------------------------------------------------------ the executor


@dataclass
class Done:
    """What became of a conversation."""

    plan: Plan
    passes: list[Pass | Move]
    results: list[Results]

    @property
    def logits(self) -> NDArray[np.float32]:
        """float32 [V] of the prompt's last token."""
        return self.plan.logits


@dataclass(frozen=True)
class Keys:
    """All keys of a pass: index, slot, offset [S]; hidden [S, 2]."""

    index: NDArray[np.int64]
    slot: NDArray[np.int64]
    offset: NDArray[np.int64]
    hidden: NDArray[np.int64]

    @staticmethod
    def of(spans: tuple[Span, ...], page_size: int) -> Keys:
        """Every live token of the spans.

        Raises:
            AssertionError: if an index occurs twice.
        """
        entries = [
            (int(index), int(slot), span.offset, *span.hidden)
            for span in spans
            for index, slot in zip(span.indices, span.run.slots(page_size), strict=True)
            if index != NEVER
        ]
        table = np.array(entries, np.int64).reshape(-1, 5)
        assert len(set(table[:, 0])) == len(table), "an index occurs twice among the spans"
        return Keys(table[:, 0], table[:, 1], table[:, 2], table[:, 3:])

    def seen_by(self, index: int) -> NDArray[np.bool_]:
        """The visibility rule."""
        behind = self.index <= index
        return behind & ~((self.hidden[:, 0] <= index) & (index < self.hidden[:, 1]))

    def at(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Place of each token index in the table; -1 where there is none."""
        place = {int(index): i for i, index in enumerate(self.index)}
        return np.array([place.get(int(index), -1) for index in indices], np.int64)


@dataclass
class Talk:
    """A conversation under way."""

    executor: Executor
    prompt: Prompt
    allocation: Allocation
    conversation: Prefill
    passes: list[Pass | Move] = field(default_factory=list)
    results: list[Results] = field(default_factory=list)
    plan: Plan | None = None
    _residual: dict[int, Array] = field(default_factory=dict)
    _reached: int = 0

    def step(self) -> bool:
        """Carry out the next pass or move; False when the plan is there.

        Raises:
            OutOfPages: from the strategy.
        """
        try:
            item = self.conversation.send(self.results[-1]) if self.passes else next(self.conversation)
        except StopIteration as stop:
            self.plan = stop.value
            return False
        self.passes.append(item)
        self.results.append(self._move(item) if isinstance(item, Move) else self._pass(item))
        return True

    def end(self) -> Plan:
        """Carry out all that is left."""
        while self.step():
            pass
        assert self.plan is not None
        return self.plan

    def score(self, continuation: NDArray[np.integer]) -> Array:
        """Teacher-forced logits [n, V] that predict each token of the continuation, behind the finished prompt."""
        assert self.plan is not None
        n, size = len(continuation), len(self.prompt)
        if n > self.plan.tail.length:
            self.plan = replace(self.plan, tail=self.allocation.extend(self.plan.tail, n))
        tail = self.plan.tail.slice(0, n, self.executor.page_size)
        index = np.arange(size, size + n)
        span = Span.consecutive(size, tail)
        keys = Keys.of((*self.plan.spans, span), self.executor.page_size)
        x = self.executor.model.embedding[continuation]
        x, _ = self._layers(keys, x, index, index, tail.slots(self.executor.page_size), 0, self._depth)
        return np.concatenate([self.plan.logits[None], self.executor.model.unembed(x)[:-1]])

    def close(self) -> None:
        """Give everything back."""
        self.conversation.close()
        self.allocation.close()

    @property
    def _depth(self) -> int:
        return len(self.executor.model.layers)

    def _pass(self, asked: Pass) -> Results:
        page_size, model_ = self.executor.page_size, self.executor.model
        begin, end = asked.layers or (0, self._depth)
        first, last = asked.measured or (begin, end)
        bounds = {*self.allocation.stages, begin, end}
        assert begin in self.allocation.stages and 0 <= begin < end <= self._depth, "a pass begins at a stage"
        assert begin <= first < last <= end and {first, last} <= bounds, "measured layers are cut at stages"
        assert len(asked.rows) and (np.diff(asked.rows) > 0).all() and asked.rows[-1] < len(self.prompt)
        entries = len({(page, span.offset) for span in asked.spans for page in span.run.pages})
        assert entries <= self.allocation.limits.entries, f"{entries} entries"
        keys = Keys.of(asked.spans, page_size)
        at = keys.at(asked.rows)
        assert (at >= 0).all() and (keys.offset[at] == 0).all(), "each row lies in a span of offset 0"
        slots = keys.slot[at]
        assert {int(slot) // page_size for slot in slots} <= self.allocation.own_pages, "cached pages are not written"
        if begin == 0:
            x = model_.embedding[self.prompt.tokens[asked.rows]]
        else:
            assert self._reached == begin and set(asked.rows) <= set(self._residual), "goes on from the pass before"
            x = np.stack([self._residual[int(index)] for index in asked.rows])
        x, measured = self._layers(keys, x, asked.rows, asked.positions, slots, begin, end, asked)
        self._residual, self._reached = dict(zip(map(int, asked.rows), x, strict=True)), end
        results: dict[Measure, NDArray[np.float32]] = {
            what: np.stack(values[first - begin : last - begin])
            for what, values in measured.items()
            if what in asked.measures
        }
        if asked.logits:
            assert Measure.LOGITS in asked.measures and end == self._depth
            which = [list(asked.rows).index(index) for index in asked.logits]
            results[Measure.LOGITS] = model_.unembed(x[which])
        return {what: value.astype(np.float32) for what, value in results.items()}

    def _layers(
        self,
        keys: Keys,
        x: Array,
        indices: NDArray[np.integer],
        positions: NDArray[np.integer],
        slots: NDArray[np.integer],
        begin: int,
        end: int,
        asked: Pass | None = None,
    ) -> tuple[Array, dict[Measure, list[Array]]]:
        """Layers [begin, end) over the rows: the residual stream behind them, and each layer's measurements."""
        executor, measured = self.executor, {what: list[Array]() for what in Measure}
        seen = np.stack([keys.seen_by(int(index)) for index in indices])
        for layer in range(begin, end):
            q, k, v = executor.model.project(layer, x, positions)
            executor.k[layer, slots], executor.v[layer, slots] = k, v
            all_k = executor.model.rotate(executor.k[layer, keys.slot], keys.offset)
            all_v = executor.v[layer, keys.slot]
            assert np.isfinite(all_k[seen.any(0)]).all(), "a row sees a slot that nobody wrote"
            all_k, all_v = np.nan_to_num(all_k), np.nan_to_num(all_v)
            scores = executor.model.scores(q, all_k)
            prob = softmax(scores, seen[:, None])
            x = executor.model.finish(layer, x, executor.model.mix(prob, all_v))
            if asked is not None:
                for what, value in self._measure(asked, keys, layer, scores, seen, prob, k, v, all_v).items():
                    measured[what].append(value)
        return x, {what: values for what, values in measured.items() if values}

    def _measure(
        self,
        asked: Pass,
        keys: Keys,
        layer: int,
        scores: Array,
        seen: NDArray[np.bool_],
        prob: Array,
        k: Array,
        v: Array,
        all_v: Array,
    ) -> dict[Measure, Array]:
        size, starts = len(self.prompt), np.array(self.prompt.starts)
        asking = np.ones(len(asked.rows), bool) if asked.asking is None else np.isin(asked.rows, asked.asking)
        assert asked.asking is None or asking.sum() == len(asked.asking), "asking indices are among the rows"
        segment_of_key = np.searchsorted(starts, keys.index, side="right") - 1

        def by_index(value_S: Array) -> Array:
            out = np.zeros(size)
            out[keys.index] = value_S
            return out

        out: dict[Measure, Array] = {}
        if {Measure.KEY_SCORE, Measure.VALUED_SCORE} & asked.measures:
            score_HS = prob[asking].sum(0)
            length_SK = np.sqrt((all_v**2).sum(-1))
            length_HS = np.repeat(length_SK.T, prob.shape[1] // length_SK.shape[1], axis=0)
            out[Measure.KEY_SCORE] = by_index(score_HS.mean(0))
            if Measure.VALUED_SCORE in asked.measures:
                out[Measure.VALUED_SCORE] = by_index((score_HS * length_HS).mean(0))
        if Measure.SEGMENT_SCORE in asked.measures:
            score_TZ = np.zeros((len(asked.rows), len(starts) - 1))
            for t, index in enumerate(asked.rows):
                for s, segment in enumerate(segment_of_key):
                    if keys.index[s] != index:
                        score_TZ[t, segment] += prob[t, :, s].mean()
            out[Measure.SEGMENT_SCORE] = score_TZ
        if Measure.DEVIATION in asked.measures:
            out[Measure.DEVIATION] = self._deviation(asked, layer, k)
        return out

    def _deviation(self, asked: Pass, layer: int, k: Array) -> Array:
        stale = Keys.of(asked.stale, self.executor.page_size)
        at = stale.at(asked.rows)
        out = np.zeros(len(at))
        for t in np.flatnonzero(at >= 0):
            slot, offset = stale.slot[at[t]], stale.offset[at[t]]
            old_k = self.executor.model.rotate(self.executor.k[layer, slot][None], np.array([offset]))[0]
            out[t] = ((k[t] - old_k) ** 2).sum()
        return out

    def _move(self, move: Move) -> Results:
        page_size, executor = self.executor.page_size, self.executor
        source, target = Keys.of(move.source, page_size), Keys.of(move.target, page_size)
        there, here = source.at(move.indices), target.at(move.indices)
        assert (there >= 0).all() and (here >= 0).all() and (target.offset[here] == 0).all()
        assert set(move.layers) <= set(self.allocation.stages)
        slots = target.slot[here]
        assert {int(slot) // page_size for slot in slots} <= self.allocation.own_pages, "cached pages are not written"
        for layer in range(*move.layers):
            old = executor.k[layer, source.slot[there]]
            executor.k[layer, slots] = executor.model.rotate(old, source.offset[there])
            executor.v[layer, slots] = executor.v[layer, source.slot[there]]
        return {}


class Executor:
    """Pages in NumPy, a real cache over them, and conversations.

    k, v: float64 [L, pages * page_size, K, D]; NaN where nobody wrote.
    """

    def __init__(
        self,
        made: Model | None = None,
        *,
        pages: int = 200,
        page_size: int = tiny.PAGE,
        entries: int = 320,
        stages: tuple[int, ...] = (0, 1, 2, 3),
        policy: str = "lru",
        variants: int = 500,
    ):
        self.model = made or model()
        self.page_size, self.entries, self.stages = page_size, entries, stages
        assert stages[0] == 0 and stages[-1] == len(self.model.layers)
        profile = Profile((0, 1000), (1, 1000), ((0.01, 1.0), (0.02, 2.0)))
        self.cache = KnowledgeCache(
            b"executor", PagePool(pages, page_size), POLICIES[policy].for_device(profile), variants=variants
        )
        config = self.model.config
        shape = (len(self.model.layers), pages * page_size, config.num_kv_heads, config.head_dim)
        self.k, self.v = np.full(shape, np.nan), np.full(shape, np.nan)
        self._talks = 0

    def talk(
        self,
        strategy: Strategy,
        prompt: Prompt,
        ratio: float | None = None,
        *,
        decode_tokens: int = 8,
        tenant: str = "",
    ) -> Talk:
        """A conversation that has not begun."""
        self._talks += 1
        allocation = Allocation(
            self.cache,
            tenant=tenant,
            label=f"talk {self._talks}",
            decode_tokens=decode_tokens,
            limits=StepLimits(self.entries, self.page_size),
            stages=self.stages,
        )
        return Talk(self, prompt, allocation, strategy.prefill(prompt, allocation, ratio))

    def run(
        self,
        strategy: Strategy,
        prompt: Prompt,
        ratio: float | None = None,
        *,
        decode_tokens: int = 8,
        tenant: str = "",
    ) -> Done:
        """A whole conversation, and everything given back but what was admitted; audits the cache."""
        talk = self.talk(strategy, prompt, ratio, decode_tokens=decode_tokens, tenant=tenant)
        try:
            return Done(talk.end(), talk.passes, talk.results)
        finally:
            talk.close()
            audit_cache(self.cache)
