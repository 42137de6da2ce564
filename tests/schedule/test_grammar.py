"""A constraint whose matcher fails: the answer may end, and nothing else."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from ragjax.core import RequestError
from ragjax.schedule.grammar import Constraint, Grammars, check_readable
from tests.support import tiny
from tests.support.vocabulary import gapped

EOS, VOCABULARY = 37, 40


class Matcher:
    """Takes every token until it fails as it is told to."""

    def __init__(self, how: str = ""):
        self.how = how
        self.taken: list[int] = []

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.taken += tokens
        return self.how != "consume"

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.taken += tokens
        return len(tokens)

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def compute_bitmask(self) -> bytes:
        if self.how == "raise":
            raise ValueError("no mask")
        return np.array([0 if self.how == "nothing" else 0b1010, 0], np.uint32).tobytes()

    def is_error(self) -> bool:
        return self.how == "error"

    def get_error(self) -> str:
        return f"{self.how}\nfailed " + "x" * 500


def allowed(mask: Any, tokens: int = 64) -> list[int]:
    return [token for token in range(tokens) if int(mask[token // 32]) >> token % 32 & 1]


@pytest.mark.parametrize("how", ["consume", "raise", "nothing", "error"])
def test_a_matcher_that_fails_leaves_the_end_alone(how: str) -> None:
    matcher: Any = Matcher()
    constraint = Constraint(matcher, {EOS}, VOCABULARY)
    assert allowed(constraint.masks([], [])[0]) == [1, 3] and not constraint.failure
    matcher.how = how
    (mask,) = constraint.masks([1], [])
    assert allowed(mask) == [EOS]
    assert constraint.failure.startswith("the answer ended before it was complete: its grammar could not be followed")
    assert f"({how} failed x" in constraint.failure and len(constraint.failure) < 300
    matcher.how = ""
    first, *behind = constraint.masks([1, EOS], [1, 3])
    assert allowed(first) == [EOS], "it is not taken up again"
    assert behind == [None, None], "no proposed token can come"


def test_a_mask_has_no_more_words_than_the_vocabulary() -> None:
    """As of a model with 49,152 tokens: 1,536 words, and one more from llguidance."""
    matcher: Any = Matcher()
    (mask,) = Constraint(matcher, {31}, 32).masks([], [])
    assert mask.shape == (1,) and [t for t in range(32) if int(mask[0]) >> t & 1] == [1, 3]


def test_a_failure_behind_proposed_tokens_ends_the_answer_where_they_begin() -> None:
    """The matcher fails at a token that was only proposed: what was taken is given back, and the answer may end."""
    matcher: Any = Matcher()
    constraint = Constraint(matcher, {EOS}, VOCABULARY)
    masks = constraint.masks([], [1, EOS, 3])
    assert [mask is None for mask in masks] == [False, False, True, True], "an end is never proposed"
    assert matcher.taken == []


def test_a_proposed_token_that_the_vocabulary_lacks_is_not_shown_to_the_matcher() -> None:
    matcher: Any = Matcher()
    masks = Constraint(matcher, {EOS}, VOCABULARY).masks([], [1, VOCABULARY, 3])
    assert [mask is None for mask in masks] == [False, False, True, True] and matcher.taken == []


def test_tokens_beyond_a_gap_may_be_chosen_and_ids_within_it_may_not() -> None:
    """After "a" comes "b" alone, which is token 700; 20 is an id without a token."""
    constraint = Grammars(gapped(), {1}).constraint('start: "ab"', "grammar")
    now, behind, in_gap = constraint.masks([], [0, 20])
    assert [allowed(mask, 701) for mask in (now, behind)] == [[0], [700]]
    assert in_gap is None and not constraint.failure
    (mask,) = constraint.masks([0, 700], [])
    assert allowed(mask, 701) == [1] and not constraint.failure


def lark(schema: object) -> str:
    return f"start: %json {json.dumps(schema)}\n"


def chained(links: int) -> str:
    """Definitions that each name the one before: every link takes the reader deeper."""
    made = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}]} for i in range(1, links + 1)}
    return lark({"$defs": {"d0": {"type": "string"}, **made}, "$ref": f"#/$defs/d{links}"})


def doubled(levels: int) -> str:
    """Every level copies the one before twice."""
    schema: dict[str, Any] = {"d0": {"type": "string"}}
    for i in range(1, levels + 1):
        merged = {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"minProperties": 0}]}
        schema[f"d{i}"] = {"type": "object", "properties": {"x": merged, "y": merged}}
    return lark({"$defs": schema, "$ref": f"#/$defs/d{levels}"})


def crossed(patterns: int) -> str:
    """Patterns of one text: their product has as many states as there are subsets."""
    return lark({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(patterns)]})


@pytest.mark.slow
@pytest.mark.parametrize("grammar", [chained(30_000), doubled(24), crossed(26)], ids=["chained", "doubled", "crossed"])
def test_a_schema_that_takes_too_much_is_refused(grammar: str) -> None:
    with pytest.raises(RequestError, match="nest less, and use fewer references and patterns") as refused:
        check_readable(grammar, "response_format")
    assert refused.value.param == "response_format" and refused.value.code == "invalid_schema"


@pytest.mark.parametrize("grammar", [chained(300), doubled(8), lark({"type": "object"})])
def test_an_ordinary_schema_is_read(grammar: str) -> None:
    Grammars(tiny.byte_tokenizer(), {257}).constraint(grammar, "response_format")


def test_a_grammar_is_checked_before_it_is_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr("ragjax.schedule.grammar.check_readable", lambda grammar, param: checked.append(grammar))
    monkeypatch.setattr("ragjax.schedule.grammar.KEPT", 2)
    grammars = Grammars(gapped(), {1})
    for text in ("a", "b", "a", "ab", "a", "b"):
        grammars.constraint(f'start: "{text}"', "tools")
    assert checked == [f'start: "{text}"' for text in ("a", "b", "ab", "b")]
    grammars.constraint('start: "b"', "tools", tenant="acme")
    assert checked[4:] == ['start: "b"'], "no tenant learns what others have asked for"
    assert all(len(key) == 32 for key in grammars._readable), "digests, whatever a schema's size"


def test_a_process_that_cannot_start_is_no_fault_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragjax.schedule.grammar._READ", "import nothing_of_that_name")
    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        check_readable('start: "a"', "tools")


def test_other_threads_keep_their_stack() -> None:
    before = threading.stack_size()
    Grammars(gapped(), {1}).constraint('start: "ab"', "grammar")
    assert threading.stack_size() == before
