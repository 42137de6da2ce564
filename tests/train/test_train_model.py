"""Training's forward, loss and gradient against a dense float64 forward; adapters; and the mesh.

The oracle knows no trees, segments or intervals: with one token a byte, a node of a prefix tree is a beginning of some
path's text, and it sees those beginnings that begin itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, rotation_table
from ragjax.models.trained import LORA_FORMAT, Adapter
from ragjax.prompting.chat import GRAPH_INSTRUCTION
from tests.support.matrix import with_smoke
from tests.support.oracle import Float
from tests.support.plain import forward, tensors_of
from tests.support.tiny import CONFIG, byte_tokenizer
from tests.support.training import LORA, QWEN, ROWS, SAMPLES, SMALL, adapters, one_device, weights_of
from train.example import Coder
from train.export import merge
from train.lora import Lora
from train.model import Model, Tree, axes_of, gradient_program, loss_program, stacked
from train.sample import Sample

# ------------------------------------------------------------------------------------------- oracle


@dataclass(frozen=True)
class Dense:
    """A sample token by token: seen [n, n], and each learned token with the row that predicts it."""

    token: np.ndarray
    position: np.ndarray
    seen: np.ndarray
    learned: list[tuple[int, int]]


def dense(sample: Sample, positions: str, chained: bool = False) -> Dense:
    """From the words of Algorithm 1."""
    trees: dict[str, list[str]] = {}
    for steps in sample.paths:
        arrows = "".join(f" -{x}-> " if i % 2 else x for i, x in enumerate(steps))
        trees.setdefault(steps[0], []).append(arrows + "\n")
    question = f"Question: {sample.question}" if sample.paths else sample.question
    system = b"\x00system\n" + GRAPH_INSTRUCTION.encode() + b"\x01\n"
    tail = b"\x00user\n" + question.encode() + b"\x01\n\x00assistant\n"
    head = system + tail[: tail.index(b"Question")] if sample.paths else b""
    # what no user says is in every chat, so it belongs to the system
    tail = tail[tail.index(b"Question") :] if sample.paths else tail
    tokens = [(c, i, None, "") for i, c in enumerate(head)]  # byte, position, tree, beginning
    for number, texts in enumerate(trees.values()):
        texts = sorted(texts)
        if chained:
            tokens += [(c, len(tokens) + i, None, "") for i, c in enumerate("".join(texts).encode())]
            continue
        made: dict[str, None] = {}
        for text in texts:
            made |= dict.fromkeys(text[: n + 1] for n in range(len(text)))
        for begun in preorder(list(made)):
            at = len(head) + len(begun) - 1 if positions == "path" else len(tokens)
            tokens.append((ord(begun[-1]), at, number, begun))
    tokens += [(c, len(tokens) + i, None, "") for i, c in enumerate(tail)]
    first = len(tokens) - 1
    answer = [*sample.answer.encode(), 257]
    tokens += [(c, len(tokens) + i, None, "") for i, c in enumerate(answer[:-1])]
    n = len(tokens)
    seen = np.zeros((n, n), bool)
    for i in range(n):
        for j in range(i + 1):
            (_, _, tree, begun), (_, _, other, before) = tokens[i], tokens[j]
            seen[i, j] = tree is None or other is None or (tree == other and begun.startswith(before))
    control = {0: 256, 1: 257}
    token = np.array([control.get(c, c) if tree is None else c for c, _, tree, _ in tokens])
    return Dense(token, np.array([t[1] for t in tokens]), seen, [(first + i, x) for i, x in enumerate(answer)])


def preorder(nodes: Sequence[str], root: str = "") -> list[str]:
    children = [x for x in nodes if x.startswith(root) and len(x) == len(root) + 1]
    return [y for x in children for y in (x, *preorder(nodes, x))]


def losses(config: ModelConfig, tensors: dict[str, np.ndarray], view: Dense) -> Float:
    """Negative log-probability of each learned token, float64."""
    rows = forward(config, tensors, view.token, view.position, view.seen)[[row for row, _ in view.learned]]
    return np.log(np.exp(rows).sum(1)) - rows[np.arange(len(rows)), [x for _, x in view.learned]]


# -------------------------------------------------------------------------------------------- loss


@cache
def programs(config: ModelConfig, lora: Lora | None = None, dtype: str = "float32", remat: str = "layers"):  # type: ignore[no-untyped-def]
    model = Model(config, one_device(), jnp.dtype(dtype), lora, remat)  # type: ignore[arg-type]
    return loss_program(model), gradient_program(model)


ROTATION = rotation_table(SMALL, 512)
ARMS = [("dependency", "path"), ("dependency", "preorder"), ("self", "path")]


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize(("attention", "positions"), with_smoke(ARMS, ARMS[0]))
def test_losses_equal_the_dense_forward(config: ModelConfig, attention: str, positions: str) -> None:
    """Of three samples packed into one row."""
    coder = Coder(byte_tokenizer(), attention, positions)  # type: ignore[arg-type]
    (microbatch,) = ROWS.pack([coder.example(sample) for sample in SAMPLES])
    nll_N, hit_N = (np.asarray(x) for x in programs(config)[0](weights_of(config), {}, ROTATION, microbatch.batch))
    for i, sample in enumerate(SAMPLES):
        what = losses(config, tensors_of(config), dense(sample, positions, attention == "self"))
        np.testing.assert_allclose(nll_N[microbatch.example_N == i], what, rtol=2e-5, atol=2e-5)
    padding = microbatch.example_N < 0
    assert padding.any() and not nll_N[padding].any() and not hit_N[padding].any()


def test_the_arms_differ() -> None:
    found = []
    for attention, positions in ARMS:
        coder = Coder(byte_tokenizer(), attention, positions)  # type: ignore[arg-type]
        (microbatch,) = ROWS.pack([coder.example(SAMPLES[0])])
        found.append(np.asarray(programs(SMALL)[0](weights_of(SMALL), {}, ROTATION, microbatch.batch)[0]).sum())
    assert np.abs(np.diff([*found, found[0]])).min() > 1e-3


def zeros(tree: Tree) -> tuple[Tree, jax.Array]:
    return jax.tree.map(jnp.zeros_like, tree), jnp.zeros(2)


@pytest.mark.slow
def test_gradient_equals_the_dense_slope() -> None:
    """Along a random direction of all weights at once, by central differences in float64."""
    coder = Coder(byte_tokenizer())
    (microbatch,) = ROWS.pack([coder.example(SAMPLES[0])])
    tensors = {name: x.astype(np.float64) for name, x in tensors_of(SMALL).items()}
    rng = np.random.default_rng(1)
    step = {name: rng.standard_normal(x.shape) * np.abs(x).mean() for name, x in tensors.items()}

    def total(size: float) -> float:
        moved = {name: x + size * step[name] for name, x in tensors.items()}
        return float(losses(SMALL, moved, dense(SAMPLES[0], "path")).sum())

    what = (total(1e-4) - total(-1e-4)) / 2e-4
    weights = weights_of(SMALL)
    gradient, counts = programs(SMALL)[1](weights, {}, ROTATION, microbatch.batch, zeros(weights))
    direction = stacked(Decoder.from_tensors(SMALL, step, jnp.dtype("float32")))
    got = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    assert got == pytest.approx(what, rel=2e-4)
    assert float(counts[0]) == pytest.approx(total(0.0), rel=1e-5)


@pytest.mark.slow
def test_gradients_of_microbatches_add_up() -> None:
    coder = Coder(byte_tokenizer())
    examples = [coder.example(sample) for sample in SAMPLES]
    weights = weights_of(SMALL)
    together = zeros(weights)
    for microbatch in ROWS.pack(examples):
        together = programs(SMALL)[1](weights, {}, ROTATION, microbatch.batch, together)
    apart = zeros(weights)
    for example in examples:
        batch = ROWS.pack([example])[0].batch
        apart = programs(SMALL)[1](weights, {}, ROTATION, batch, apart)
    for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_what_is_computed_anew_changes_nothing(remat: str) -> None:
    (microbatch,) = ROWS.pack([Coder(byte_tokenizer()).example(SAMPLES[1])])
    weights = weights_of(SMALL)
    found = [
        programs(SMALL, remat=kind)[1](weights, {}, ROTATION, microbatch.batch, zeros(weights))
        for kind in ("layers", remat)
    ]
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_only_answers_are_learned() -> None:
    tokenizer = byte_tokenizer()
    for sample in SAMPLES:
        example = Coder(tokenizer).example(sample)
        learned = example.target[example.target >= 0]
        assert tokenizer.decode(learned[:-1]) == sample.answer and learned[-1] == 257
        first = int(np.flatnonzero(example.target >= 0)[0])
        assert (example.target[first:] >= 0).all()
        np.testing.assert_array_equal(example.token[first + 1 :], example.target[first:-1])


@pytest.mark.slow
def test_no_other_token_has_a_gradient() -> None:
    """With an output head of its own: its gradient is that of the rows that answer, and of no other."""
    (microbatch,) = ROWS.pack([Coder(byte_tokenizer()).example(SAMPLES[2])])
    weights = weights_of(QWEN)
    gradient, _ = programs(QWEN)[1](weights, {}, ROTATION, microbatch.batch, zeros(weights))
    # a row's gradient is (probability - target) x its residual: rank at most the number of rows
    assert np.linalg.matrix_rank(np.asarray(gradient["head"]), tol=1e-4) <= len(SAMPLES[2].answer) + 1
    silent = replace(microbatch.batch, target_N=np.full_like(microbatch.batch.target_N, -1))
    gradient, counts = programs(QWEN)[1](weights, {}, ROTATION, silent, zeros(weights))
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradient)) and not np.asarray(counts).any()


# ----------------------------------------------------------------------------------------- adapters


def test_adapters_change_nothing_at_first_and_then_what_merging_does() -> None:
    (microbatch,) = ROWS.pack([Coder(byte_tokenizer()).example(sample) for sample in SAMPLES])
    weights = weights_of(SMALL)
    base = np.asarray(programs(SMALL)[0](weights, {}, ROTATION, microbatch.batch)[0])
    fresh = LORA.init(weights["layers"], 0)
    program = programs(SMALL, LORA)[0]
    np.testing.assert_array_equal(program(fresh, weights, ROTATION, microbatch.batch)[0], base)
    changed = adapters()
    got = np.asarray(program(changed, weights, ROTATION, microbatch.batch)[0])
    assert np.abs(got - base).max() > 0.01
    whole = merge(weights, Adapter(jax.tree.map(np.asarray, changed), LORA.rank, LORA.alpha, {}))
    np.testing.assert_allclose(got, programs(SMALL)[0](whole, {}, ROTATION, microbatch.batch)[0], rtol=1e-5, atol=1e-5)


def test_adapter_of_a_small_model_is_a_small_file() -> None:
    """SmolLM2-135M, rank 16: at most 15 MB in bfloat16."""
    smol = replace(
        CONFIG, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64,
    )  # fmt: skip
    layers = jax.eval_shape(lambda: stacked(Decoder(smol, rngs=nnx.Rngs(0))))["layers"]
    shapes = jax.eval_shape(lambda: Lora(16, 32.0).init(layers, 0))
    assert 2 * sum(x.size for x in jax.tree.leaves(shapes)) < 15e6


def test_adapter_file_round_trip(tmp_path) -> None:  # type: ignore[no-untyped-def]
    LORA.save(adapters(), tmp_path / "a.safetensors", {"model": "tiny"})
    read = Adapter.load(tmp_path / "a.safetensors")
    assert (read.rank, read.alpha, read.about) == (LORA.rank, LORA.alpha, {"model": "tiny"})
    for x, y in zip(jax.tree.leaves(dict(read.pairs)), jax.tree.leaves(adapters()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read as an adapter or packet"):
        Adapter.load(tmp_path / "b.safetensors")


@pytest.mark.parametrize(("name", "rank"), [("head.a", 4), ("head", 4), ("qkv.a", 0)])
def test_adapter_file_of_other_matrices_or_without_a_rank_is_refused(  # type: ignore[no-untyped-def]
    tmp_path, name: str, rank: int
) -> None:
    about = {"format": LORA_FORMAT, "lora": json.dumps({"rank": rank, "alpha": 8.0})}
    save_file({name: np.zeros((2, 4, 48), np.float32)}, tmp_path / "a.safetensors", about)
    with pytest.raises(ConfigError, match="cannot be read as a LoRA adapter"):
        Adapter.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("change", "message"), [({"matrices": ("qkv", "head")}, "not on head"), ({"rank": 0}, "rank")])
def test_bad_adapters_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LORA, **change)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- mesh


def test_every_weight_has_axes_and_vectors_are_whole() -> None:
    for config in (SMALL, QWEN):
        weights, axes = weights_of(config), axes_of(config)
        pairs = zip(
            jax.tree.leaves(weights), jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)), strict=True
        )
        assert all(x.ndim == len(of) for x, of in pairs)
