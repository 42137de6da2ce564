"""From tokens to text: detokenizing, log-probabilities, stop strings, and the end of an answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Chosen, Delta, Sampling, TokenLogprob, Tokens
from ragjax.models.tokenizer import Stream, Tokenizer

FinishReason = Literal["stop", "length"]

LONGEST_ROUND = 64
"""Tokens of the longest passage whose repetition is noticed."""

ROUNDS, ROUND_TOKENS = 8, 256
"""An answer without `max_tokens` ends when a passage stands so often in a row, over so many tokens at least."""

LOOK_EACH = 32
"""Tokens between two looks for a passage that repeats."""


@dataclass
class _Held:
    """A token whose text is not yet out: where its text begins and ends, counted from the answer's start."""

    begin: int
    end: int
    logprob: TokenLogprob | None


class AnswerText:
    """The text of one request as it grows. Text that could be the start of a stop string is held back.

    A token is taken at once (`push`), so that it can be computed; its text may be made later (`deltas`), while the
    device works. If stop strings may end the answer, the text is made at once. continued: it goes on from a raw
    prompt's text, and keeps the space that it may begin with. shown: control tokens that stand in the text by name.
    finish_reason: set once all text is made. stop: the stop string that ended it. round: tokens of the passage whose
    repetition ended it (0: none did).
    """

    def __init__(
        self,
        sampling: Sampling,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        limit: int,
        *,
        continued: bool = False,
        shown: Collection[int] = (),
    ):
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None
        self.round = 0
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self.limit = min(limit, sampling.max_tokens or limit)
        self._stream = Stream(tokenizer, continued=continued, shown=shown)
        self._pending = ""
        self._held: list[_Held] = []
        self._ended = False  # by an end of text
        self._unread: list[Chosen] = []
        self._deltas: list[Delta] = []

    @property
    def over(self) -> bool:
        return self._ended or len(self.tokens) >= self.limit or self.finish_reason is not None

    def push(self, chosen: Chosen) -> None:
        if chosen.token in self._eos:
            self._ended = True
        else:
            self.tokens.append(chosen.token)
            self._unread.append(chosen)
            if self._sampling.max_tokens is None and len(self.tokens) % LOOK_EACH == 0:
                self.round = repeated(self.tokens)
                self.limit = len(self.tokens) if self.round else self.limit
        if self._sampling.stop:
            self._read()

    def deltas(self) -> list[Delta]:
        """The text that is out with the tokens pushed since the last call; sets `finish_reason` at the end."""
        self._read()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        made = [self._add(chosen, last=self.over and chosen is unread[-1] and not self._ended) for chosen in unread]
        if self._ended and self.finish_reason is None:
            made.append(self._finish("stop"))
        self._deltas += [delta for delta in made if delta is not None]

    def _add(self, chosen: Chosen, last: bool) -> Delta | None:
        begin = len(self.text) + len(self._pending)
        logprob = self._logprob(chosen, begin)
        self._pending += self._stream.push(chosen.token)
        # the bytes of an unfinished character belong to one that is yet to come
        end = len(self.text) + len(self._pending) + self._stream.unfinished
        self._held.append(_Held(begin, end, logprob))
        if self._cut():
            return self._finish("stop", cut=True)
        if last:
            return self._finish("length")
        return self._emit(len(self._pending) - _stop_overlap(self._pending, self._sampling.stop))

    def _logprob(self, chosen: Chosen, begin: int) -> TokenLogprob | None:
        if self._sampling.logprobs is None or chosen.logprob is None:
            return None
        text = self._tokenizer.id_to_text
        top = tuple((text(token), token, logprob) for token, logprob in chosen.top[: self._sampling.logprobs])
        return TokenLogprob(text(chosen.token), chosen.token, chosen.logprob, top, begin)

    def echo(self, tokens: Tokens, scores: NDArray[np.float32]) -> Iterator[TokenLogprob]:
        """Yields a raw prompt's tokens. scores: of all but the first, as `RequestState.read` makes them."""
        stream, begin, text = Stream(self._tokenizer, continued=True), 0, self._tokenizer.id_to_text
        for token, row in zip(tokens.tolist(), [[math.nan], *scores.tolist()], strict=True):
            ids, values = row[1 : 1 + len(row) // 2], row[1 + len(row) // 2 :]
            top = tuple((text(int(one)), int(one), value) for one, value in zip(ids, values, strict=True))
            yield TokenLogprob(text(token), token, row[0], top, begin)
            begin += 0 if self._tokenizer.is_control(token) else len(stream.push(token))

    def _finish(self, reason: FinishReason, cut: bool = False) -> Delta | None:
        self.finish_reason = reason
        if not cut:
            self._pending += self._stream.finish()
            if cut := self._cut():
                self.finish_reason = "stop"
        end = len(self.text) + len(self._pending)
        if cut:  # tokens that are stop text alone are not reported
            self._held = [held for held in self._held if held.begin < end]
        for held in self._held:
            held.end = min(held.end, end)
        return self._emit(len(self._pending))

    def _cut(self) -> bool:
        found = [(at, stop) for stop in self._sampling.stop if (at := self._pending.find(stop)) >= 0]
        if found:
            at, self.stop = min(found)
            self._pending = self._pending[:at]
        return bool(found)

    def _emit(self, length: int) -> Delta | None:
        out, self._pending = self._pending[:length], self._pending[length:]
        self.text += out
        done = [held for held in self._held if held.end <= len(self.text)]
        self._held = self._held[len(done) :]
        logprobs = tuple(held.logprob for held in done if held.logprob is not None)
        self.logprobs += logprobs
        return Delta(out, logprobs) if out or logprobs else None


def repeated(tokens: list[int]) -> int:
    """The length of the passage that the end of an answer repeats, in tokens; 0 if it repeats none."""
    last = np.asarray(tokens[-ROUNDS * LONGEST_ROUND :])
    for length in range(1, LONGEST_ROUND + 1):
        covered = max(ROUND_TOKENS, ROUNDS * length)
        if len(last) >= covered and np.array_equal(last[-covered + length :], last[-covered:-length]):
            return length
    return 0


def _stop_overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    lengths = range(min(longest, len(text)), 0, -1)
    return next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)
