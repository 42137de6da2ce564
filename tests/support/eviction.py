"""Scores, budgets, GraphKV and the choice of tokens as the papers write them: NumPy, float64, loops over tokens."""

from __future__ import annotations

import math

import numpy as np

F = np.ndarray


def attention(k: F, q: F, count: int, scale: float | None = None, cap: float | None = None) -> F:
    """[H, W, N]: softmax of each window row over all keys up to its own."""
    rows, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros((heads, rows, len(k)))
    for h in range(heads):
        for w in range(rows):
            end = count - rows + w + 1
            logits = np.array([k[n, h // group].astype(float) @ q[w, h].astype(float) for n in range(end)])
            logits = logits * (1 / math.sqrt(width) if scale is None else scale)
            if cap is not None:
                logits = cap * np.tanh(logits / cap)
            p = np.exp(logits - logits.max())
            out[h, w, :end] = p / p.sum()
    return out


def pooled(s: F, size: int, how: str) -> F:
    """Along tokens, which is PyTorch's max_pool1d, or avg_pool1d with padding counted."""
    half = size // 2
    out = np.zeros_like(s)
    for n in range(len(s)):
        around = s[max(0, n - half) : n + half + 1]
        out[n] = around.max() if how == "max" else around.sum() / size
    return out


def grouped(per_head: F, kv_heads: int, total: int) -> F:
    """[H, n] to [total, K], zeros behind."""
    mean = per_head.reshape(kv_heads, -1, per_head.shape[-1]).mean(1)
    return np.pad(mean, ((0, 0), (0, total - mean.shape[1]))).T


def snapkv(k: F, q: F, count: int, scale: float | None = None, cap: float | None = None) -> F:
    before = attention(k, q, count, scale, cap)[:, :, : count - len(q)]
    per_head = np.array([pooled(head.mean(0), 7, "max") for head in before])
    return grouped(per_head, k.shape[1], len(k))


def cake(k: F, q: F, count: int, gamma: float = 200.0) -> tuple[F, float]:
    before = attention(k, q, count)[:, :, : count - len(q)]
    variance = before.var(1, ddof=1) if len(q) > 1 else np.zeros(before.shape[::2])
    per_head = np.array([pooled(m + gamma * v, 5, "mean") for m, v in zip(before.mean(1), variance, strict=True)])
    seen = before[before > 0]
    return grouped(per_head, k.shape[1], len(k)), float(-(seen * np.log(seen)).sum() * variance.sum())


def knorm(k: F, count: int) -> F:
    out = np.zeros(k.shape[:2])
    for n in range(count):
        out[n] = [1 / (math.sqrt(sum(float(x) ** 2 for x in head)) + 1e-6) for head in k[n]]
    return out


def keydiff(k: F, count: int) -> F:
    out = np.zeros(k.shape[:2])
    for h in range(k.shape[1]):
        units = [k[n, h] / np.linalg.norm(k[n, h]) if np.any(k[n, h]) else np.zeros(k.shape[2]) for n in range(count)]
        anchor = np.mean(np.array(units, float), 0)
        for n in range(count):
            out[n, h] = 1 - cosine(k[n, h], anchor)
    return out


def streaming(count: int, total: int) -> F:
    return np.array([[0 if n >= count else 2 if n < 4 else (n + 1) / count] for n in range(total)], float)


def cosine(a: F, b: F) -> float:
    a, b = a.astype(float).ravel(), b.astype(float).ravel()
    both = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / both) if both > 0 else 0.0


def ranked(s: F, tokens: list[int]) -> list[int]:
    """Highest first, the lower index among equals."""
    return sorted(tokens, key=lambda n: (-s[n], n))


def propagated(
    s: F,
    senders: F,
    receivers: F,
    tokens: list[int],
    number: int,
    *,
    neighbours: int = 32,
    rounds: int = 1,
    signal: str = "decay",
    order: str = "ordered",
    strength: float = 1.0,
) -> F:
    """Eqs. 1 to 5, round by round; `tokens` take part."""
    out = s.astype(float).copy()
    rank = ranked(s, tokens)
    sources = rank[:number]
    for _ in range(rounds):
        factor = np.ones(len(s))
        for i in sources:
            edges = {j: cosine(senders[i], receivers[j]) for j in tokens if j != i}
            for j in ranked_by(edges)[:neighbours]:
                e = strength * min(1.0, max(0.0, edges[j]))
                if order == "ordered" and rank.index(j) < rank.index(i):
                    continue
                if signal == "evict" and e > 0:
                    factor[j] = -math.inf
                elif signal != "evict":
                    factor[j] *= 1 + e if signal == "enhance" else 1 - e
        out = np.array([-math.inf if f == -math.inf else x * f for x, f in zip(out, factor, strict=True)])
    return out


def ranked_by(edges: dict[int, float]) -> list[int]:
    return sorted(edges, key=lambda j: (-edges[j], j))


def kept(s: F, first: F, count: int, size: int, recent: int) -> list[int]:
    """The indexes, ascending."""
    last = list(range(max(0, count - recent), count))
    others = sorted(range(count - len(last)), key=lambda n: (-s[n], -first[n], n))
    return sorted(last + others[: max(0, size - len(last))])
