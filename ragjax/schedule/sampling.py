"""From logits to text: sampling, log-probabilities, stop strings. NumPy only.

Sampling order is the usual one: repetition penalty (CTRL, arXiv 1909.05858), logit bias, presence and frequency
penalties (OpenAI's API reference), temperature, then top-k, then top-p (nucleus, arXiv 1904.09751). Log-probabilities
are those of the model (temperature 1, nothing cut), as OpenAI's API reports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Delta, Sampling, TokenLogprob, Tokens
from ragjax.models.tokenizer import Stream, Tokenizer

FinishReason = Literal["stop", "length"]


class Sampler:
    """Chooses tokens for one request; a seed makes it repeatable.

    prompt: its tokens, int32 [n]; the repetition penalty counts them.
    """

    def __init__(self, sampling: Sampling, prompt: Tokens | None = None):
        self._sampling = sampling
        self._chosen: Counter[int] = Counter()
        self._prompt = frozenset(() if prompt is None or sampling.repetition_penalty == 1.0 else prompt.tolist())
        self._random = np.random.default_rng(sampling.seed)

    def choose(self, logits_V: NDArray[np.float32]) -> int:
        """The next token of float32 logits [V]; penalties count it from then on."""
        token = self._draw(self._penalized(logits_V))
        self._chosen[token] += 1
        return token

    def _penalized(self, logits_V: NDArray[np.float32]) -> NDArray[np.floating]:
        """The logits with bias and penalties, float64 [V]; as they are if the request has none."""
        asked = self._sampling
        penalized = asked.presence_penalty or asked.frequency_penalty or asked.repetition_penalty != 1.0
        if not (asked.logit_bias or penalized):
            return logits_V
        out_V = logits_V.astype(np.float64)
        if asked.repetition_penalty != 1.0:
            seen = np.array(sorted(self._prompt | self._chosen.keys()), np.intp)
            x = out_V[seen]
            out_V[seen] = np.where(x > 0, x / asked.repetition_penalty, x * asked.repetition_penalty)
        for token, bias in asked.logit_bias.items():
            out_V[token] += bias
        for token, count in self._chosen.items():
            out_V[token] -= asked.presence_penalty + count * asked.frequency_penalty
        return out_V

    def _draw(self, logits_V: NDArray[np.floating]) -> int:
        if self._sampling.temperature == 0.0:
            return int(np.argmax(logits_V))
        with np.errstate(over="ignore"):  # a tiny temperature makes all but the likeliest -inf, which is right
            scaled_V = (logits_V.astype(np.float64) - logits_V.max()) / self._sampling.temperature
        kept, logits = self._candidates(scaled_V)
        weights = np.exp(logits)
        weights /= weights.sum()
        if self._sampling.top_p < 1.0:
            ranked = np.argsort(-weights, kind="stable")
            # the nucleus: the smallest set whose mass reaches top_p
            size = int(np.searchsorted(np.cumsum(weights[ranked]), self._sampling.top_p)) + 1
            kept, weights = kept[ranked[:size]], weights[ranked[:size]]
            weights /= weights.sum()
        drawn = int(np.searchsorted(np.cumsum(weights), self._random.random(), side="right"))
        return int(kept[min(drawn, len(kept) - 1)])

    def _candidates(self, logits_V: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        k = self._sampling.top_k
        if k == 0 or k >= len(logits_V):
            return np.arange(len(logits_V)), logits_V
        kept = np.sort(np.argpartition(-logits_V, k - 1)[:k])
        return kept, logits_V[kept]


def token_logprob(logits_V: NDArray[np.float32], token: int, top: int, tokenizer: Tokenizer) -> TokenLogprob:
    """The token's natural-log probability and those of the `top` likeliest tokens, likeliest first."""
    logits = logits_V.astype(np.float64)
    log_V = logits - logits.max()
    log_V -= np.log(np.exp(log_V).sum())
    best = np.argpartition(-log_V, top)[:top] if top else np.zeros(0, np.intp)
    best = best[np.argsort(-log_V[best], kind="stable")]
    alternatives = tuple((tokenizer.id_to_text(int(i)), int(i), float(log_V[i])) for i in best)
    return TokenLogprob(tokenizer.id_to_text(token), token, float(log_V[token]), alternatives)


@dataclass
class _Held:
    """A token whose text is not yet out: where its text begins and ends, counted from the answer's start."""

    begin: int
    end: int
    logprob: TokenLogprob | None


class Generation:
    """The text of one request as it grows. Text that could be the start of a stop string is held back.

    continued: it goes on from a raw prompt's text, and keeps the space that it may begin with.
    prompt: tokens that the repetition penalty counts, int32 [n].
    """

    def __init__(
        self,
        sampling: Sampling,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        limit: int,
        *,
        continued: bool = False,
        prompt: Tokens | None = None,
    ):
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self.limit = min(limit, sampling.max_tokens)
        self._sampler = Sampler(sampling, prompt)
        self._stream = Stream(tokenizer, continued=continued)
        self._pending = ""
        self._held: list[_Held] = []

    def push(self, logits_V: NDArray[np.float32]) -> Delta | None:
        """Choose the next token; the text that is out with it, if any. Sets `finish_reason` at the end."""
        token = self._sampler.choose(logits_V)
        if token in self._eos:
            return self._finish("stop")
        self.tokens.append(token)
        begin = len(self.text) + len(self._pending)
        logprob = None
        if self._sampling.logprobs is not None:
            logprob = replace(token_logprob(logits_V, token, self._sampling.logprobs, self._tokenizer), begin=begin)
        self._pending += self._stream.push(token)
        # the bytes of an unfinished character belong to one that is yet to come
        end = len(self.text) + len(self._pending) + self._stream.unfinished
        self._held.append(_Held(begin, end, logprob))
        cut = _first_stop(self._pending, self._sampling.stop)
        if cut is not None:
            self._pending = self._pending[:cut]
            return self._finish("stop", cut=True)
        if len(self.tokens) >= self.limit:
            return self._finish("length")
        return self._emit(len(self._pending) - _stop_overlap(self._pending, self._sampling.stop))

    def _finish(self, reason: FinishReason, cut: bool = False) -> Delta | None:
        self.finish_reason = reason
        if not cut:
            self._pending += self._stream.finish()
            stop = _first_stop(self._pending, self._sampling.stop)
            if stop is not None:
                self._pending, self.finish_reason, cut = self._pending[:stop], "stop", True
        end = len(self.text) + len(self._pending)
        if cut:  # tokens that are stop text alone are not reported
            self._held = [held for held in self._held if held.begin < end]
        for held in self._held:
            held.end = min(held.end, end)
        return self._emit(len(self._pending))

    def _emit(self, length: int) -> Delta | None:
        out, self._pending = self._pending[:length], self._pending[length:]
        self.text += out
        done = [held for held in self._held if held.end <= len(self.text)]
        self._held = self._held[len(done) :]
        logprobs = tuple(held.logprob for held in done if held.logprob is not None)
        self.logprobs += logprobs
        return Delta(out, logprobs) if out or logprobs else None


def _first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found) if found else None


def _stop_overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
