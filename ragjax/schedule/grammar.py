"""Constrained decoding: the tokens that may come next, so that an answer follows a grammar.

The package `llguidance` does the work: it lexes by derivatives of regular expressions, parses by Earley's algorithm,
and walks the tokens as a trie, to find at each step all tokens after which the text can still be completed. Its
grammars are in a dialect of Lark, in which a rule may be a JSON Schema.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import RequestError
from ragjax.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MEMORY = 512
"""MiB of address space for the process, of which Python and llguidance take 170."""

SECONDS = 2
"""Of processor time for the process; an ordinary schema takes a tenth of one."""

WAIT_S = 60.0
"""Seconds until the process is given up on a machine that is busy."""

CHECK_STACK = 8 * 2**20
"""Bytes of stack of the process that checks a grammar. Whoever reads the grammar afterwards needs at least as much."""

_READ = f"""
import resource, sys, threading
from llguidance import LLMatcher, LLTokenizer

def read():
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode()), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    print("read")

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY * 2**20},) * 2)
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
threading.stack_size({CHECK_STACK})
reader = threading.Thread(target=read)
reader.start()
reader.join()
"""


def check_readable(grammar: str, param: str) -> None:
    """Check that llguidance can read a grammar within the limits, in a process of its own; else RequestError.

    llguidance is native code. It follows references by recursion, and where its stack ends the process ends; a schema
    of a few hundred bytes can ask for any amount of memory. Neither is an error that Python sees. param: the field it
    comes from.
    """
    command = (sys.executable, "-I", "-c", _READ)
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.stdout == b"read\n":
        return
    if done is not None and done.returncode > 0:  # Python's own end: nothing that a schema does
        raise RuntimeError(f"grammars cannot be read: {done.stderr.decode(errors='replace')[-500:]}")
    raise RequestError(
        f"the schema takes more than {SECONDS} s, {MEMORY} MiB or the stack that there is to be read: "
        "nest less, and use fewer references and patterns",
        param=param,
        code="invalid_schema",
    )


STACK = 2 * CHECK_STACK
"""Bytes of stack with which a grammar is read; what a thread has otherwise depends on the machine."""

KEPT = 256
"""Grammars that are known to be readable, at most."""

Bits = NDArray[np.uint32]
"""A set of tokens, [W]: token t by bit t % 32 of word t // 32."""


class Constraint:
    """The tokens that one answer may go on with. It is told the tokens generated so far, so a restart needs nothing.

    failure: why the grammar was given up before the answer's end; empty if it was not.
    """

    def __init__(self, matcher: LLMatcher, eos_ids: Collection[int], vocabulary: int, notices: Sequence[str] = ()):
        self._matcher = matcher
        self.notices = tuple(notices)
        self._eos = frozenset(eos_ids)
        self._vocabulary = vocabulary
        self._followed = 0
        self._end: Bits = np.zeros(-(-vocabulary // 32), np.uint32)
        for token in self._eos:
            self._end[token // 32] |= np.uint32(1 << token % 32)
        self.failure = ""

    def masks(self, said: Sequence[int], proposed: Sequence[int]) -> list[Bits | None]:
        """The tokens that may come next, and those behind each proposed token if these are chosen.

        None behind a proposed token that cannot come: it will not be chosen. said: all tokens generated so far; those
        of the last call are the first of them.
        """
        new = [int(token) for token in said[self._followed :]]
        self._followed = len(said)
        if new and not self.failure and not self._matcher.consume_tokens(new):
            self._give_up()
        found: list[Bits | None] = [self._mask()]
        taken = 0
        for token in proposed:
            # an unknown one would break the matcher
            known = token not in self._eos and token < self._vocabulary and not self.failure
            if taken < len(found) - 1 or not known or self._matcher.try_consume_tokens([int(token)]) != 1:
                found.append(None)
                continue
            taken += 1
            found.append(self._mask())
        if taken:
            self._matcher.rollback(taken)
        return found

    def _mask(self) -> Bits:
        if self.failure:
            return self._end
        try:
            # llguidance gives a word too many where the tokens fill the last one
            found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._end)]
        except ValueError:
            found = self._end[:0]
        if not self._matcher.is_error() and found.any():
            return found
        self._give_up()
        return self._end

    def _give_up(self) -> None:
        reason = " ".join(self._matcher.get_error().split())[:200]
        self.failure = f"the answer ended before it was complete: its grammar could not be followed ({reason})"


class Grammars:
    """Reads grammars for one tokenizer, whose table is made when the first is asked for. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]):
        self._tokenizer = tokenizer
        self._eos = sorted(eos_ids)
        self._table: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._readable: OrderedDict[bytes, None] = OrderedDict()  # digests, salted by tenant: nobody learns of others'

    def constraint(
        self, grammar: str, param: str, schemas: Sequence[tuple[str, str, bool]] = (), *, tenant: str = ""
    ) -> Constraint:
        """The constraint of one answer, or RequestError if the grammar cannot be followed, naming why.

        Args:
            grammar: in Lark, with `@0` where the first schema stands.
            param: the field it comes from.
            schemas: of each what it belongs to, its JSON text, and whether it must be followed in all it says. What no
                grammar holds of any other is left out, with a notice.
            tenant: who asks.
        """
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            reason = "JSON answers and tools need the package llguidance: pip install '.[serve]' in ragjax's folder"
            raise RequestError(reason, param=param) from error
        with self._lock:
            if self._table is None:
                self._table = _table(self._tokenizer, self._eos)
            table = self._table
        matcher, notices = self._read(table, grammar, param, schemas, tenant)
        return Constraint(matcher, self._eos, table.vocab_size, notices)

    def _read(
        self, table: LLTokenizer, grammar: str, param: str, schemas: Sequence[tuple[str, str, bool]], tenant: str
    ) -> tuple[LLMatcher, list[str]]:
        """Read a grammar, and each of its schemas alone if something is wrong with one of them."""
        matcher, wrong, missed = self._attempt(table, _filled(grammar, [text for _, text, _ in schemas]), param, tenant)
        large = {text: [*_large(json.loads(text))] for _, text, _ in schemas}
        if not wrong and not missed and not any(large.values()):
            return matcher, []
        notices, kept = [], []
        for name, text, strict in schemas:
            _, wrong, missed = self._attempt(table, _filled("start: @0\n", [text]), param, tenant)
            missed = [*missed, *large[text]]
            if wrong and not strict:
                missed = [*missed, f"({wrong})"]
                text = json.dumps(_plain(json.loads(text), looking=False))
                _, wrong, more = self._attempt(table, _filled("start: @0\n", [text]), param, tenant)
                missed += more
            if wrong or (missed and strict):
                reason = wrong or ", ".join(missed)
                raise RequestError(f"{name} cannot be followed: {reason}", param=param, code="invalid_schema")
            notices += [f"{name}: left out what no grammar holds: {', '.join(missed)}"] if missed else []
            kept.append(text)
        matcher, wrong, _ = self._attempt(table, _filled(grammar, kept), param, tenant)
        if wrong:
            raise RequestError(f"the schema cannot be followed: {wrong}", param=param, code="invalid_schema")
        return matcher, notices

    def _attempt(self, table: LLTokenizer, grammar: str, param: str, tenant: str) -> tuple[LLMatcher, str, list[str]]:
        """Read a grammar; returns what is wrong with it (empty: nothing), and what of its schemas it does not hold."""
        from llguidance import LLMatcher

        self._check(grammar, param, tenant)

        def read() -> tuple[LLMatcher, str, list[str]]:
            matcher = LLMatcher(table, LLMatcher.grammar_from_lark(grammar), log_level=0)
            wrong = matcher.get_error()
            if not wrong:
                begun = matcher.deep_copy()
                with suppress(ValueError):
                    begun.compute_bitmask()
                wrong = begun.get_error() and "it has no instance"
            # by the standard a format only annotates
            return matcher, wrong, [one for one in matcher.get_grammar_warnings() if not one.startswith("Unknown form")]

        with ThreadPoolExecutor(1, "ragjax-grammar") as reader:
            with self._lock:  # the size is the whole process's
                usual = threading.stack_size(STACK)
                try:
                    reading = reader.submit(read)
                finally:
                    threading.stack_size(usual)
            matcher, wrong, missed = reading.result()
        return matcher, " ".join(wrong.split("\n   1 |")[0].split())[:500], missed

    def _check(self, grammar: str, param: str, tenant: str) -> None:
        """Read a grammar in a process of its own, unless it was lately; one at a time, so that few cores are enough."""
        key = hashlib.sha256(f"{tenant}\0{grammar}".encode()).digest()
        with self._checking:
            if key not in self._readable:
                check_readable(grammar, param)
                self._readable[key] = None
            self._readable.move_to_end(key)
            if len(self._readable) > KEPT:
                self._readable.popitem(last=False)


SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spelled: white space without end would be an answer without end."""
LENIENT = {**SPELLING, "lenient": True, "coerce_one_of": True}
"""The same, for a schema of which the reader is to leave out what it does not hold."""
_LOOKS = re.compile(r"\(\?<?[=!]|\\[1-9]")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _filled(grammar: str, schemas: Sequence[str]) -> str:
    def filled(found: re.Match[str]) -> str:
        schema = _plain(json.loads(schemas[int(found[1])]), looking=True)
        return f"%json {json.dumps({**schema, 'x-guidance': LENIENT})}"

    return re.sub("(?<=: )@([0-9]+)", filled, grammar) if schemas else grammar


def _rounds(key: str, value: Any) -> bool:
    """True for a keyword with an integer beyond 2^53: llguidance reads numbers as floats."""
    given = value if key == "enum" and isinstance(value, list) else [value] if key in _NUMBERS else []
    return any(type(one) is int and abs(one) > 2**53 for one in given)


def _large(schema: Any) -> Iterator[str]:
    """Names the keywords of a schema that would be rounded."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield from (f"{key} beyond 2^53",) if _rounds(key, value) else _large(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _large(one)


def _plain(schema: Any, looking: bool) -> Any:
    """A schema without `uniqueItems: false`, which says nothing, and without numbers that the reader would round.

    looking: keep references to elsewhere, and patterns that look around or back.
    """
    if isinstance(schema, list):
        return [_plain(one, looking) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        elsewhere = isinstance(value, str) and key == "$ref" and value[:1] != "#"
        looks = isinstance(value, str) and key == "pattern" and _LOOKS.search(value)
        if (key == "uniqueItems" and value is False) or _rounds(key, value) or (not looking and (elsewhere or looks)):
            continue
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _plain(one, looking) for name, one in value.items()}
        else:
            found[key] = value if key in ("enum", "const", "default", "examples") else _plain(value, looking)
    return found


class _Vocabulary:
    """The tokens as llguidance reads them: their bytes; those of control tokens are none, so that no text is one."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        size = max(tokenizer.vocab_size, eos_ids[-1] + 1)
        self.special_token_ids = [token for token in range(size) if tokenizer.is_control(token)]
        self.tokens = [b"" if tokenizer.is_control(token) else tokenizer.token_bytes(token) for token in range(size)]

    def __call__(self, text: str | bytes) -> list[int]:
        given = text if isinstance(text, str) else text.decode("utf-8", "replace")
        tokens: list[int] = self._tokenizer.encode(given, special=False, continued=True).tolist()
        return tokens


def _table(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos_ids:
        raise RequestError("the model has no token that ends an answer, so no grammar can be followed")
    vocabulary = _Vocabulary(tokenizer, eos_ids)
    wrapped = TokenizerWrapper(vocabulary)
    return LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=list(eos_ids))
