"""Sampling against known distributions, and text with stop strings against its naive definition."""

import codecs
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import RequestError, Sampling
from ragjax.schedule.sampling import Generation, Sampler, token_logprob
from tests.support import tiny

EOS, PAD, VOCAB = 257, 258, 260
TOKENIZER = tiny.byte_tokenizer()

PROBABILITIES = {3: 0.4, 0: 0.25, 5: 0.15, 1: 0.1, 4: 0.06, 2: 0.04}


def known_logits(shift=0.0):
    return np.log([PROBABILITIES[i] for i in range(6)]).astype(np.float32) + np.float32(shift)


def one_hot(token):
    logits = np.zeros(VOCAB, np.float32)
    logits[token] = 10.0
    return logits


def generation(limit=10**6, eos=(EOS,), **sampling):
    return Generation(Sampling(**{"max_tokens": 10**6, **sampling}), TOKENIZER, eos, limit)


def feed(tokens, **options):
    """Push tokens until the generation ends; the generation and its deltas, None where there was none."""
    made = generation(**options)
    deltas = []
    for token in tokens:
        deltas.append(made.push(one_hot(token)))
        if made.finish_reason is not None:
            break
    return made, deltas


def texts(deltas):
    return [delta.text if delta else "" for delta in deltas]


# ---------------------------------------------------------------------------------------- sampling


def test_temperature_zero_takes_the_likeliest():
    sampler = Sampler(Sampling(temperature=0.0, top_k=2, top_p=0.5))
    assert {sampler.choose(known_logits()) for _ in range(20)} == {3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-307, 1e-308, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_the_least_temperature_takes_the_likeliest(temperature, options):
    sampler = Sampler(Sampling(temperature=temperature, **options))
    assert {sampler.choose(known_logits(50.0)) for _ in range(20)} == {3}


def test_a_seed_repeats_and_another_differs():
    def draws(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(known_logits()) for _ in range(64)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)


def reference(temperature, top_k, top_p):
    """Probability of each candidate: temperature, then top-k, then the nucleus."""
    weights = {token: p ** (1 / temperature) for token, p in PROBABILITIES.items()}
    ranked = sorted(weights, key=weights.get, reverse=True)[: top_k or None]
    total = sum(weights[token] for token in ranked)
    nucleus, score = [], 0.0
    for token in ranked:
        nucleus.append(token)
        score += weights[token] / total
        if score >= top_p:
            break
    total = sum(weights[token] for token in nucleus)
    return {token: weights[token] / total for token in nucleus}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "candidates"),
    [
        (1.0, 0, 1.0, {0, 1, 2, 3, 4, 5}),
        (2.0, 0, 1.0, {0, 1, 2, 3, 4, 5}),
        (0.5, 0, 1.0, {0, 1, 2, 3, 4, 5}),
        (1.0, 6, 1.0, {0, 1, 2, 3, 4, 5}),
        (1.0, 100, 1.0, {0, 1, 2, 3, 4, 5}),
        (1.0, 3, 1.0, {3, 0, 5}),
        (1.0, 1, 1.0, {3}),
        (1.0, 0, 1e-9, {3}),
        (1.0, 0, 0.39, {3}),
        (1.0, 0, 0.41, {3, 0}),
        (1.0, 0, 0.64, {3, 0}),
        (1.0, 0, 0.66, {3, 0, 5}),
        (1.0, 0, 0.97, {0, 1, 2, 3, 4, 5}),
        (1.0, 3, 0.7, {3, 0}),  # of what top-k left; the nucleus of all would have three
        (0.5, 0, 0.78, {3, 0}),  # of what the temperature sharpened; three without it
    ],
)
def test_frequencies_are_those_of_the_truncated_distribution(temperature, top_k, top_p, candidates):
    expected = reference(temperature, top_k, top_p)
    assert set(expected) == candidates
    sampler = Sampler(Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=3))
    n = 3000
    draws = [sampler.choose(known_logits(shift=50.0)) for _ in range(n)]
    assert set(draws) == candidates
    for token, p in expected.items():
        assert abs(draws.count(token) / n - p) <= 5 * math.sqrt(p * (1 - p) / n), token


def test_equal_logits_still_leave_exactly_k():
    sampler = Sampler(Sampling(temperature=1.0, top_k=3, seed=0))
    assert len({sampler.choose(np.zeros(50, np.float32)) for _ in range(300)}) == 3


def test_equal_weights_still_leave_the_smallest_nucleus():
    sampler = Sampler(Sampling(temperature=1.0, top_p=0.55, seed=0))
    assert len({sampler.choose(np.zeros(4, np.float32)) for _ in range(300)}) == 3


def test_impossible_tokens_are_never_chosen():
    logits = np.full(8, -np.inf, np.float32)
    logits[[2, 6]] = 1.0, 0.0
    sampler = Sampler(Sampling(temperature=2.0, seed=0))
    assert {sampler.choose(logits) for _ in range(300)} == {2, 6}


def test_choosing_leaves_the_logits_alone():
    logits = known_logits()
    Sampler(Sampling(temperature=0.3, top_k=2, top_p=0.9, seed=0)).choose(logits)
    assert np.array_equal(logits, known_logits())


# ------------------------------------------------------------------------------ bias and penalties


def penalized(logits, prompt, said, bias, presence, frequency, repetition):
    """The published formulas, one token at a time."""
    found = []
    for token, logit in enumerate(float(x) for x in logits):
        if token in prompt or token in said:
            logit = logit / repetition if logit > 0 else logit * repetition
        count = list(said).count(token)
        found.append(logit + bias.get(token, 0.0) - count * frequency - (count > 0) * presence)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=4),
    st.sampled_from([0.0, 0.4, 2.0, -2.0]),
    st.sampled_from([0.0, 0.3, 2.0, -2.0]),
    st.sampled_from([1.0, 1.3, 3.0, 0.5]),
)
def test_bias_and_penalties_are_their_formulas(seed, bias, presence, frequency, repetition):
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 12, 4).astype(np.int32)
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    greedy = Sampler(Sampling(logit_bias=bias, **penalties), prompt)
    drawn = Sampler(Sampling(logit_bias=bias, temperature=0.7, top_p=0.9, seed=seed, **penalties), prompt)
    plain = Sampler(Sampling(temperature=0.7, top_p=0.9, seed=seed))
    said, drawn_said = [], []
    for _ in range(12):
        logits = random.standard_normal(12).astype(np.float32)
        expected = penalized(logits, prompt, said, bias, presence, frequency, repetition)
        said.append(greedy.choose(logits))
        assert said[-1] == int(np.argmax(expected))
        expected = penalized(logits, prompt, drawn_said, bias, presence, frequency, repetition)
        drawn_said.append(drawn.choose(logits))
        assert drawn_said[-1] == plain.choose(np.array(expected))


def test_logprobs_do_not_know_of_bias_and_penalties():
    logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    made = generation(logit_bias={65: 100.0}, presence_penalty=2.0, repetition_penalty=2.0, logprobs=2)
    for _ in range(2):
        (found,) = made.push(logits).logprobs
        assert replace(found, begin=0) == token_logprob(logits, 65, 2, TOKENIZER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
    ],
)
def test_a_bad_value_names_its_field(field, value):
    with pytest.raises(RequestError) as caught:
        Sampling(**{field: value})
    assert caught.value.param == field


# ------------------------------------------------------------------------------- log-probabilities


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 20), st.integers(0, VOCAB - 1), st.sampled_from([0.0, -900.0, 3e4]))
def test_logprobs_are_log_softmax(seed, top, token, shift):
    logits = (np.random.default_rng(seed).standard_normal(VOCAB) * 5 + shift).astype(np.float32)
    expected = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    found = token_logprob(logits, token, top, TOKENIZER)
    assert (found.id, found.token) == (token, TOKENIZER.id_to_text(token))
    assert found.logprob == pytest.approx(expected[token], abs=1e-9)
    best = np.sort(expected)[::-1][:top]
    assert [value for _, _, value in found.top] == pytest.approx(list(best), abs=1e-9)
    assert len({i for _, i, _ in found.top}) == top
    for text, i, value in found.top:
        assert text == TOKENIZER.id_to_text(i)
        assert value == pytest.approx(expected[i], abs=1e-9)


def test_logprobs_do_not_know_of_temperature_and_truncation():
    logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    logits[65] = 9.0
    made = generation(temperature=0.3, top_k=1, top_p=0.5, seed=0, logprobs=2)
    delta = made.push(logits)
    assert delta.logprobs == (token_logprob(logits, int(logits.argmax()), 2, TOKENIZER),)


def test_no_logprobs_unless_asked_for():
    made, deltas = feed(b"ab")
    assert made.logprobs == [] and all(delta.logprobs == () for delta in deltas)
    made, _ = feed(b"ab", logprobs=0)
    assert [(found.id, found.top) for found in made.logprobs] == [(97, ()), (98, ())]


# --------------------------------------------------------------------------------------- the end


def test_eos_ends_with_stop_and_is_no_token_of_the_answer():
    made, deltas = feed([*b"ab", EOS], logprobs=0)
    assert (made.finish_reason, made.text, made.tokens) == ("stop", "ab", [97, 98])
    assert deltas[-1] is None
    assert [found.id for found in made.logprobs] == [97, 98]


def test_any_of_several_eos_tokens_ends():
    for token in (PAD, EOS):
        assert feed([97, token], eos=(EOS, PAD))[0].finish_reason == "stop"


def test_eos_at_once_gives_an_empty_answer():
    made, deltas = feed([EOS], logprobs=3)
    assert (made.finish_reason, made.text, made.tokens, made.logprobs, deltas) == ("stop", "", [], [], [None])


@pytest.mark.parametrize(("max_tokens", "limit"), [(3, 100), (100, 3), (3, 3)])
def test_the_smaller_limit_ends_with_length(max_tokens, limit):
    made, _ = feed(b"abcdef", max_tokens=max_tokens, limit=limit)
    assert (made.finish_reason, made.text) == ("length", "abc")


def test_eos_wins_over_the_limit():
    assert feed([97, 98, EOS], max_tokens=3)[0].finish_reason == "stop"


def test_a_control_token_amid_the_answer_has_no_text():
    made, _ = feed([97, PAD, 98, EOS], logprobs=0)
    assert (made.text, made.tokens) == ("ab", [97, PAD, 98])
    assert [found.id for found in made.logprobs] == [97, PAD, 98]


# ---------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("data", "stops", "text", "deltas"),
    [
        (b"abXYcd", ("XY",), "ab", ["a", "b", "", ""]),  # across token boundaries
        (b"XYab", ("X",), "", [""]),  # the first token
        (b"XYab", ("XY",), "", ["", ""]),
        (b"abXcYd", ("Y", "X"), "ab", ["a", "b", ""]),  # several: the earliest
        (b"abcd", ("d", "bcd"), "a", ["a", "", "", ""]),  # two end together: the one that begins earlier
        (b"abcd", ("cd", "abcz"), "ab", ["", "", "", "ab"]),  # text held for another stop comes out
        (b"aab", ("ab",), "a", ["", "a", ""]),  # the overlap slides
        (b"ababac", ("abac",), "ab", ["", "", "", "ab", "", ""]),
        (b"aaab", ("aab",), "a", ["", "", "a", ""]),
        (b"axay", ("ay",), "ax", ["", "ax", "", ""]),  # held back, then shown to be no stop
    ],
)
def test_stop_strings(data, stops, text, deltas):
    made, found = feed(data, stop=stops, logprobs=0)
    assert (made.finish_reason, made.text) == ("stop", text)
    assert texts(found) == deltas
    assert [item.id for item in made.logprobs] == list(text.encode())
    assert len(made.tokens) == len(found), "the stop's tokens were generated, and count"


def test_a_stop_inside_one_token_cuts_its_text():
    """PAD, were it no control token, would be the seven bytes <|pad|> in one token."""
    definition_free = tiny.byte_tokenizer()
    definition_free._control = frozenset()
    made = Generation(Sampling(stop=("pad",), logprobs=0), definition_free, (EOS,), 100)
    made.push(one_hot(97))
    made.push(one_hot(PAD))
    assert (made.text, made.finish_reason) == ("a<|", "stop")
    assert [found.id for found in made.logprobs] == [97, PAD], "a token that is in the answer in part is reported"


def test_a_stop_that_ends_at_the_limit_is_a_stop():
    assert feed(b"abXY", stop=("XY",), max_tokens=4)[0].finish_reason == "stop"
    made, _ = feed(b"abX", stop=("XY",), max_tokens=3)
    assert (made.finish_reason, made.text) == ("length", "abX")


def test_held_text_comes_out_at_the_end():
    for tokens, limit, reason in (([*b"abX", EOS], 100, "stop"), (b"abX", 3, "length")):
        made, deltas = feed(tokens, stop=("XY",), max_tokens=limit, logprobs=0)
        assert (made.finish_reason, made.text, deltas[-1].text) == (reason, "abX", "X")
        assert [found.id for found in made.logprobs] == list(b"abX")


def test_a_character_comes_out_whole():
    made, deltas = feed("aé€😀".encode(), max_tokens=10)
    assert texts(deltas) == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    assert made.text == "aé€😀"


def test_an_unfinished_character_at_the_end_shows_as_replacement():
    for tokens, limit in ((b"a\xe2\x82", 3), ([*b"a\xe2\x82", EOS], 100)):
        made, _ = feed(tokens, max_tokens=limit, logprobs=0)
        assert made.text == "a\ufffd"
        assert len(made.logprobs) == 3


def test_a_replacement_character_at_the_end_may_be_a_stop():
    for tokens, limit in ((b"a\xe2\x82", 3), ([*b"a\xe2\x82", EOS], 100)):
        made, _ = feed(tokens, max_tokens=limit, stop=("\ufffd",), logprobs=0)
        assert (made.text, made.finish_reason, len(made.logprobs)) == ("a", "stop", 1)


def test_a_stop_may_be_a_character_of_several_tokens():
    made, deltas = feed("aé€b".encode(), stop=("€",), logprobs=0)
    assert (made.text, texts(deltas)) == ("aé", ["a", "", "é", "", "", ""])


def test_each_token_says_where_its_text_begins():
    made, _ = feed([*"aé€".encode(), PAD, *b"b", EOS], logprobs=0)
    assert made.text == "aé€b"
    assert [found.begin for found in made.logprobs] == [0, 1, 1, 2, 2, 2, 3, 3]


def test_logprobs_of_a_character_s_tokens_are_reported_with_it():
    """Not before it is known to be in the answer: a stop may begin with that very character."""
    made, deltas = feed("a€".encode(), stop=("€",), logprobs=0)
    assert made.text == "a"
    assert [found.id for found in made.logprobs] == [97]
    made, deltas = feed("a€b".encode(), max_tokens=5, logprobs=0)
    assert [[found.id for found in delta.logprobs] if delta else [] for delta in deltas] == [
        [97],
        [],
        [],
        list("€".encode()),
        [98],
    ]


# ------------------------------------------------------------------------------------- properties

ALPHABET = "abé€"
_bytes_of_alphabet = sorted(set(ALPHABET.encode()))
any_tokens = st.lists(st.sampled_from([*_bytes_of_alphabet, *_bytes_of_alphabet, 0xFF, PAD, EOS]), max_size=24)
stop_strings = st.lists(st.text(ALPHABET + "\ufffd", min_size=1, max_size=4), max_size=4).map(tuple)


def decoded(tokens, final):
    """Text of byte tokens all at once; without `final`, an unfinished character at the end is left out."""
    data = bytes(token for token in tokens if token < 256)
    return codecs.utf_8_decode(data, "replace", final)[0]


def first_stop(text, stops):
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def naive(tokens, stops, limit):
    """(text, reason, tokens used): decode everything there is so far, and cut at the first stop in it."""
    for n in range(len(tokens) + 1):
        ended = "length" if n == limit else "stop" if n < len(tokens) and tokens[n] == EOS else None
        text = decoded(tokens[:n], final=ended is not None)
        cut = first_stop(text, stops)
        if cut is not None:
            return text[:cut], "stop", n
        if ended:
            return text, ended, n
    return None, None, len(tokens)


@settings(max_examples=400, deadline=None)
@given(any_tokens, stop_strings, st.integers(1, 24))
def test_text_is_the_naive_definition_s(tokens, stops, limit):
    text, reason, used = naive(tokens, stops, limit)
    made, deltas = feed(tokens, stop=stops, max_tokens=limit, logprobs=0)
    assert made.finish_reason == reason
    assert made.text == "".join(texts(deltas))
    assert tuple(made.logprobs) == tuple(found for delta in deltas if delta for found in delta.logprobs)
    assert made.tokens == tokens[:used]
    if reason is not None:
        assert made.text == text
    if reason == "length":
        assert [found.id for found in made.logprobs] == tokens[:used]


@settings(max_examples=300, deadline=None)
@given(any_tokens, stop_strings)
def test_as_much_text_is_out_as_no_later_token_can_take_back(tokens, stops):
    made = generation(stop=stops)
    for n, token in enumerate(tokens, 1):
        made.push(one_hot(token))
        if made.finish_reason is not None:
            return
        text = decoded(tokens[:n], final=False)
        begins = [i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
        assert made.text == text[: min(begins, default=len(text))]


@settings(max_examples=300, deadline=None)
@given(st.text(ALPHABET, max_size=12), stop_strings, st.integers(1, 24), st.booleans())
def test_every_reported_token_is_in_the_answer(text, stops, limit, ends):
    tokens = [*text.encode(), *([EOS] if ends else [])]
    made, _ = feed(tokens, stop=stops, max_tokens=limit, logprobs=0)
    reported = [found.id for found in made.logprobs]
    if made.finish_reason is None:
        assert made.text.encode() == bytes(reported)
    elif made.text == decoded(made.tokens, final=True):
        assert reported == made.tokens
    else:  # cut at a stop
        assert made.text.encode() == bytes(reported)
