"""Logits of a prompt's last token by dense float64 computations that know nothing of pages, offsets or caches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Kind, Prompt
from tests.support.executor import model, softmax


def dense(prompt: Prompt) -> NDArray[np.float64]:
    return model().dense(prompt.tokens).logits[-1]


def dense_naive(prompt: Prompt) -> NDArray[np.float64]:
    """Isolated chunks at the position behind the system prompt, moved; joins attend to all; float64, dense."""
    made = model()
    starts, segments = prompt.starts, prompt.segments
    keys: list[dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]] = [{} for _ in made.layers]

    def forward(index: int, position: NDArray[np.int32], sees: list[int], moved: bool) -> NDArray[np.float64]:
        x_TE = made.embedding[segments[index].tokens]
        for layer, store in enumerate(keys):
            q, k, v = made.project(layer, x_TE, position)
            store[index] = (k, v)
            parts_k, parts_v = [], []
            for i in sees:
                ki, vi = store[i]
                if moved and segments[i].kind is Kind.CHUNK:
                    ki = made.rotate(ki, np.full(len(segments[i]), starts[i] - len(segments[0])))
                parts_k.append(ki)
                parts_v.append(vi)
            all_k, all_v = np.concatenate([*parts_k, k]), np.concatenate([*parts_v, v])
            past = len(all_k) - len(k)
            seen = np.tril(np.ones((len(k), len(all_k)), bool), past)
            prob = softmax(made.scores(q, all_k), seen[:, None])
            x_TE = made.finish(layer, x_TE, made.mix(prob, all_v))
        return made.unembed(x_TE)

    for i, segment in enumerate(segments):
        n = np.arange(len(segment), dtype=np.int32)
        if segment.kind is Kind.CHUNK:
            forward(i, n + len(segments[0]), [0], moved=False)
        else:
            out = forward(i, n + starts[i], list(range(i)), moved=True)
    return out[-1]
