"""Random packed samples for tests of training's attention, and a float64 oracle of its results and gradients.

Padding is NaN throughout, in what goes in and in the gradients that come back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import KINDS, SEEDS, Writer, budget
from tests.support.oracle import NEVER, Float, Int, worst_error
from train.attention.mask import Mask, Tokens
from train.attention.op import BACKENDS, Backend, attend

XLA, REFERENCE = BACKENDS["xla"], BACKENDS["reference"]
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Shape:
    """One compiled shape."""

    dim: int
    kv_heads: int
    groups: int
    block_rows: int
    block_keys: int
    tokens: int = 96
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        return self.dim**-0.5


SHAPES = {
    "d16-g1": Shape(16, 2, 1, 8, 8),
    "d24-g2": Shape(24, 2, 2, 16, 32),
    "d64-g3": Shape(64, 1, 3, 32, 16),
    "d64-g4": Shape(64, 2, 4, 32, 32),
    "d128-g2-one-block": Shape(128, 1, 2, 96, 96),
    "d16-g2-bfloat16": Shape(16, 2, 2, 16, 16, dtype="bfloat16"),
    "d64-g4-bfloat16": Shape(64, 1, 4, 32, 16, dtype="bfloat16"),
    "d64-g1-float16": Shape(64, 2, 1, 16, 32, dtype="float16"),
}


TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Largest error of any array, relative to its norm (see `errors`). Found: 9e-7, 4e-3 and 5e-4."""


@dataclass(frozen=True)
class Sample:
    """How a packed sample is made: the lengths of its pieces, and the share of its tokens that are kept."""

    kind: str
    lengths: list[int]
    kept: float


@dataclass(frozen=True)
class Case:
    """What goes in. Padding is NaN in q, k, v, dout and dlse, which are float64 that the dtype can hold.

    tokens: index, request, hide_from, hide_until, int [T] each.
    """

    shape: Shape
    tokens: dict[str, Int]
    q_THD: Float
    k_TKD: Float
    v_TKD: Float
    dout_THD: Float
    dlse_TH: Float

    @property
    def live_T(self) -> np.ndarray:
        return self.tokens["request"] >= 0

    def to_kernel(self) -> Tokens:
        return Tokens(*(jnp.asarray(x, jnp.int32) for x in self.tokens.values()))

    def run(self, backend: Backend) -> list[np.ndarray]:
        """out, lse, dq, dk and dv by this backend."""
        shape = self.shape
        dtype = jnp.dtype(shape.dtype)
        arrays = (jnp.asarray(x, dtype) for x in (self.q_THD, self.k_TKD, self.v_TKD, self.dout_THD))
        results = gradients(*arrays, jnp.asarray(self.dlse_TH, jnp.float32), self.to_kernel(), shape, backend)
        assert [x.dtype for x in results] == [dtype, jnp.float32, dtype, dtype, dtype]
        return [np.asarray(x.astype(jnp.float32)) for x in results]

    def dense(self) -> list[np.ndarray]:
        """The same by the definition in float32; autodiff alone would spread the NaN of padding's gradient."""
        finite = {name: np.nan_to_num(x) for name, x in vars(self).items() if name.endswith(("D", "H"))}
        return replace(self, shape=replace(self.shape, dtype="float32"), **finite).run(REFERENCE)


@functools.partial(jax.jit, static_argnames=("shape", "backend"))
def gradients(q, k, v, dout, dlse, tokens, shape, backend):  # type: ignore[no-untyped-def]
    mask = Mask.build(tokens, block_rows=shape.block_rows, block_keys=shape.block_keys)
    results, back = jax.vjp(lambda *qkv: attend(backend, shape.scale, *qkv, mask), q, k, v)
    return *results, *back((dout, dlse))


def make_case(shape: Shape, samples: list[Sample], shuffled: bool, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, int, int]] = []
    for number, sample in enumerate(samples):
        writer = Writer(2 * number + 1, 0, 0)
        KINDS[sample.kind](writer, sample.lengths, rng)
        own = [(index, piece.request, *piece.hidden) for piece in writer.pieces for index in piece.indices]
        rows += [row for row in own if row[0] < NEVER and rng.random() < sample.kept]
    rows = rows[: shape.tokens]
    gaps = rng.integers(-1, 5, (shape.tokens - len(rows), 4))
    gaps[:, 1] = -1  # padding: request -1, all else at random
    table = np.concatenate([np.asarray(rows, np.int64).reshape(-1, 4), gaps])
    if shuffled:
        table = table[rng.permutation(len(table))]
    tokens = dict(zip(("index", "request", "hide_from", "hide_until"), table.T, strict=True))
    heads, t = shape.kv_heads * shape.groups, shape.tokens
    sizes = [(t, heads, shape.dim), *[(t, shape.kv_heads, shape.dim)] * 2, (t, heads, shape.dim), (t, heads)]
    arrays = [rng.standard_normal(size) for size in sizes]
    rounded = [np.asarray(jnp.asarray(x, shape.dtype).astype(jnp.float32), np.float64) for x in arrays]
    for x in rounded:
        x[tokens["request"] < 0] = np.nan
    return Case(shape, tokens, *rounded)


SAMPLES = st.lists(
    st.builds(
        Sample,
        st.sampled_from(sorted(KINDS)),
        st.lists(st.integers(1, 16), min_size=1, max_size=6),
        st.sampled_from([1.0, 0.5]),
    ),
    min_size=1,
    max_size=4,
)


def random_cases(shape: Shape, examples: int, holds: Callable[[Case], object]) -> None:
    """Try what has to hold of random cases of a shape."""

    @budget(examples)
    @given(SAMPLES, st.booleans(), SEEDS)
    def tried(samples: list[Sample], shuffled: bool, seed: int) -> None:
        holds(make_case(shape, samples, shuffled, seed))

    tried()


def rich_case(shape: Shape = SHAPES["d24-g2"]) -> Case:
    """Trees and chunks of three samples, none of which begins where a block does, and padding."""
    samples = [Sample("isolated", [7, 9, 8, 5], 1.0), Sample("tree", [4, 6, 5, 7, 6], 1.0), Sample("chain", [19], 1.0)]
    return make_case(shape, samples, False, 5)


def is_visible(tokens: dict[str, Int], t: int, s: int) -> bool:
    index = tokens["index"][t]
    hidden = tokens["hide_from"][s] <= index < tokens["hide_until"][s]
    same = tokens["request"][t] == tokens["request"][s] >= 0
    return bool(same and tokens["index"][s] <= index and not hidden)


def oracle(case: Case) -> list[Float]:
    """out, lse, dq, dk and dv, float64, row by row and head by head."""
    q, k, v, dout, dlse = case.q_THD, case.k_TKD, case.v_TKD, case.dout_THD, case.dlse_TH
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    lse = np.full(q.shape[:2], -np.inf)
    scale, groups = case.shape.scale, case.shape.groups
    for t in range(len(q)):
        seen = [s for s in range(len(q)) if is_visible(case.tokens, t, s)]
        for h in range(q.shape[1]) if seen else ():
            kv = h // groups
            logits = scale * (k[seen, kv] @ q[t, h])
            lse[t, h] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            prob = np.exp(logits - lse[t, h])
            out[t, h] = prob @ v[seen, kv]
            # d out / d logits is the softmax's Jacobian, d lse / d logits the softmax
            jacobian = np.diag(prob) - np.outer(prob, prob)
            dlogits = jacobian @ (v[seen, kv] @ dout[t, h]) + prob * dlse[t, h]
            dq[t, h] = scale * dlogits @ k[seen, kv]
            dk[seen, kv] += scale * np.outer(dlogits, q[t, h])
            dv[seen, kv] += np.outer(prob, dout[t, h])
    return [out, lse, dq, dk, dv]


def errors(got: list[np.ndarray], what: list[Float] | list[np.ndarray]) -> dict[str, float]:
    """Error of each array, relative to its norm; infinite for NaN, and where what sees nothing is not exactly so."""
    found = {}
    blind = np.isneginf(what[1])
    # of a row that sees a single token, dq and dk vanish; the terms that cancel to them do not, and round
    floor = max(0.3 * float(np.linalg.norm(what[4])), 1.0)
    for name, x, y in zip(NAMES, got, what, strict=True):
        if name == "lse":
            wrong = not np.array_equal(np.isneginf(x), blind)
            x, y = np.where(blind, 0.0, x), np.where(blind, 0.0, y)
        else:
            wrong = bool(x[~y.any((1, 2))].any()) if name in ("out", "dv") else False
        error = np.linalg.norm(x.astype(np.float64) - y) / max(np.linalg.norm(y), floor)
        found[name] = float("inf") if wrong or np.isnan(error) else float(error)
    return found


def check(case: Case, got: list[np.ndarray], what: list[Float] | list[np.ndarray]) -> None:
    found = errors(got, what)
    assert max(found.values()) <= TOLERANCE[case.shape.dtype], found
    assert worst_error(got[0], np.asarray(what[0], np.float64)) <= 4 * TOLERANCE[case.shape.dtype]
    for x in (got[0], *got[2:]):
        assert not x[~case.live_T].any(), "padding takes part"
