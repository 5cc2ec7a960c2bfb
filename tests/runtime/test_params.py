"""Sampling parameters: what is accepted, and the full sentence for everything refused."""

import copy
import inspect
import math
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from tilewright.runtime.errors import RequestError
from tilewright.runtime.params import SamplingParams

VOCAB = 100
CONTEXT = 1000
NAN, INF = math.nan, math.inf

FINITE = "want a finite number"
REFUSED: list[tuple[str, Any, str]] = [
    ("temperature", NAN, f"out of range: got nan, {FINITE} of at least 0"),
    ("temperature", INF, f"out of range: got inf, {FINITE} of at least 0"),
    ("temperature", -0.5, f"out of range: got -0.5, {FINITE} of at least 0"),
    ("temperature", "1", f"wrong type str: got '1', {FINITE} of at least 0"),
    ("temperature", True, f"wrong type bool: got True, {FINITE} of at least 0"),
    ("temperature", None, f"wrong type NoneType: got None, {FINITE} of at least 0"),
    ("temperature", 10**400, f"out of range: got a 1329-bit integer, {FINITE} of at least 0"),
    ("top_k", -1, "out of range: got -1, want an integer of at least 0"),
    ("top_k", 2.0, "wrong type float: got 2.0, want an integer of at least 0"),
    ("top_p", 0.0, f"out of range: got 0.0, {FINITE} above 0 and at most 1"),
    ("top_p", 1.5, f"out of range: got 1.5, {FINITE} above 0 and at most 1"),
    ("top_p", NAN, f"out of range: got nan, {FINITE} above 0 and at most 1"),
    ("min_p", -0.1, f"out of range: got -0.1, {FINITE} of at least 0 and at most 1"),
    ("min_p", 1.01, f"out of range: got 1.01, {FINITE} of at least 0 and at most 1"),
    ("min_p", NAN, f"out of range: got nan, {FINITE} of at least 0 and at most 1"),
    ("repetition_penalty", 0, f"out of range: got 0, {FINITE} above 0"),
    ("repetition_penalty", -1.0, f"out of range: got -1.0, {FINITE} above 0"),
    ("repetition_penalty", NAN, f"out of range: got nan, {FINITE} above 0"),
    ("repetition_penalty", INF, f"out of range: got inf, {FINITE} above 0"),
    ("presence_penalty", 2.5, f"out of range: got 2.5, {FINITE} of at least -2 and at most 2"),
    ("presence_penalty", NAN, f"out of range: got nan, {FINITE} of at least -2 and at most 2"),
    ("frequency_penalty", -3, f"out of range: got -3, {FINITE} of at least -2 and at most 2"),
    ("frequency_penalty", INF, f"out of range: got inf, {FINITE} of at least -2 and at most 2"),
    ("seed", -1, "out of range: got -1, want an integer from 0 to 18446744073709551615"),
    (
        "seed",
        2**64,
        "out of range: got 18446744073709551616, want an integer from 0 to 18446744073709551615",
    ),
    ("seed", 1.0, "wrong type float: got 1.0, want an integer from 0 to 18446744073709551615"),
    ("seed", True, "wrong type bool: got True, want an integer from 0 to 18446744073709551615"),
    ("max_tokens", 0, "out of range: got 0, want an integer of at least 1"),
    ("max_tokens", True, "wrong type bool: got True, want an integer of at least 1"),
    ("max_tokens", 5.0, "wrong type float: got 5.0, want an integer of at least 1"),
    (
        "max_tokens",
        1001,
        "beyond the context: got 1001 after a prompt of 0 tokens, want at most 1000"
        " (context of 1000 tokens)",
    ),
    ("min_tokens", -1, "out of range: got -1, want an integer of at least 0"),
    ("min_tokens", 257, "above max_tokens: got 257, want at most 256"),
    ("n", 0, "out of range: got 0, want an integer from 1 to 128"),
    ("n", 129, "out of range: got 129, want an integer from 1 to 128"),
    ("logprobs", 21, "out of range: got 21, want an integer from 0 to 20"),
    ("logprobs", True, "wrong type bool: got True, want an integer from 0 to 20"),
    ("prompt_logprobs", -1, "out of range: got -1, want an integer from 0 to 20"),
    ("ignore_eos", 1, "wrong type: got 1, want True or False"),
    (
        "logit_bias",
        {100: 1.0},
        "token id outside the vocabulary: got 100, want an integer from 0 to 99",
    ),
    (
        "logit_bias",
        {-1: 1.0},
        "token id outside the vocabulary: got -1, want an integer from 0 to 99",
    ),
    ("logit_bias", {"5": 1.0}, "token id of wrong type str: got '5', want an integer from 0 to 99"),
    (
        "logit_bias",
        {True: 1.0},
        "token id of wrong type bool: got True, want an integer from 0 to 99",
    ),
    (
        "logit_bias",
        {3: NAN},
        "bad value for token 3: got nan, want -inf or a number from -10000 to 10000",
    ),
    (
        "logit_bias",
        {3: INF},
        "bad value for token 3: got inf, want -inf or a number from -10000 to 10000",
    ),
    (
        "logit_bias",
        {3: "x"},
        "bad value for token 3: got 'x', want -inf or a number from -10000 to 10000",
    ),
    ("logit_bias", 5, "wrong type int: got 5, want a mapping of token ids to numbers"),
    ("logit_bias", [5], "wrong type of entry: got 5, want a mapping of token ids to numbers"),
    (
        "logit_bias",
        [(5, 1.0), (5, 2.0)],
        "a token id given twice: got tuple of 2, want a mapping of token ids to numbers",
    ),
    ("logit_bias", {i: 0.0 for i in range(4097)}, "too many entries: got tuple of 4097, want at"),
    ("allowed_token_ids", [], "empty: got tuple of 0, want None or at least one token id"),
    ("allowed_token_ids", [0] * 101, "too many entries: got tuple of 101, want at most 100"),
    (
        "allowed_token_ids",
        [1.0],
        "token id of wrong type float: got 1.0, want an integer from 0 to 99",
    ),
    ("allowed_token_ids", {1, 2}, "wrong type set: got set of 2, want a list of token ids"),
    (
        "stop_token_ids",
        [100],
        "token id outside the vocabulary: got 100, want an integer from 0 to 99",
    ),
    ("stop_token_ids", [0] * 1025, "too many entries: got tuple of 1025, want at most 1024"),
    ("stop_token_ids", None, "wrong type NoneType: got None, want a list of token ids"),
    ("stop", "", "empty string: got '', want 1 to 1024 characters"),
    ("stop", ["a", ""], "empty string: got '', want 1 to 1024 characters"),
    ("stop", ["a"] * 65, "too many entries: got tuple of 65, want at most 64"),
    ("stop", [b"a"], "entry of wrong type bytes: got bytes, want a string"),
    ("stop", b"a", "wrong type bytes: got bytes, want a list of strings"),
    (
        "stop",
        "x" * 1025,
        f"string too long: got {'x' * 40!r}... of 1025 characters, want 1 to 1024 characters",
    ),
    ("stop", "a\ud800", "half of a surrogate pair at character 1: got 'a\\ud800', want "
     "valid Unicode text"),
    ("bad_words", "word", "wrong type str: got 'word', want a list of strings"),
    ("bad_words", [""], "empty string: got '', want 1 to 256 characters"),
    ("bad_words", [["a"]], "entry of wrong type tuple: got tuple of 1, want a string"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED)
def test_refused_with_one_sentence(name: str, value: Any, sentence: str) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(RequestError) as refusal:
        params.validated(VOCAB, CONTEXT)
    expected = f"sampling parameter '{name}': {sentence}"
    message = str(refusal.value)
    assert message == expected or (expected.endswith("want at") and message.startswith(expected))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"temperature": 1e-12},
        {"temperature": 1.7e308, "top_p": 1, "min_p": 1},
        {"seed": 2**64 - 1, "n": 128, "logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": {0: -INF, 99: 10000, 5: -1.5}, "allowed_token_ids": [0, 99]},
        {"stop": "\n", "bad_words": ["a", " b"], "stop_token_ids": [0, 99], "ignore_eos": True},
        {"max_tokens": 1000, "min_tokens": 1000},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-3},
    ],
)
def test_accepted(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    assert params.validated(VOCAB, CONTEXT) is params
    assert SamplingParams.from_mapping(settings) == params
    hash(params)


def test_prompt_and_output_must_fit_the_context() -> None:
    params = SamplingParams(max_tokens=10)
    assert params.validated(VOCAB, 15, num_prompt_tokens=5) is params
    with pytest.raises(RequestError) as refusal:
        params.validated(VOCAB, 15, num_prompt_tokens=6)
    assert str(refusal.value) == (
        "sampling parameter 'max_tokens': beyond the context: got 10 after a prompt of 6 tokens,"
        " want at most 9 (context of 15 tokens)"
    )


def test_unknown_names_list_the_known_ones() -> None:
    for build in (
        lambda: SamplingParams.from_mapping({"temprature": 0.5}),
        lambda: SamplingParams(temprature=0.5),  # type: ignore[call-arg]
        lambda: replace(SamplingParams(), temprature=0.5),  # type: ignore[call-arg]
    ):
        with pytest.raises(RequestError) as refusal:
            build()
        assert str(refusal.value) == (
            "sampling parameter 'temprature': unknown name: got 0.5, want one of max_tokens,"
            " temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,"
            " frequency_penalty, logit_bias, allowed_token_ids, bad_words, seed, stop,"
            " stop_token_ids, ignore_eos, logprobs, prompt_logprobs, n, min_tokens"
        )


def test_a_value_without_a_name_is_refused() -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(16)  # type: ignore[misc]
    assert str(refusal.value) == (
        "sampling parameters: got 16 without a name, want name=value"
    )


def test_settings_are_copied_and_shown_by_their_names() -> None:
    params = SamplingParams(top_k=3, stop="end")
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in fields(params)]


def test_settings_must_be_a_mapping() -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams.from_mapping([1])  # type: ignore[arg-type]
    assert str(refusal.value) == (
        "sampling parameter 'settings': wrong type: got list of 1,"
        " want a mapping of names to values"
    )


def test_lists_become_tuples_and_one_stop_string_a_tuple() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias={3: 1.0})
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.biases == ((3, 1.0),)
    assert params == SamplingParams(stop=["end"], stop_token_ids=(1, 2), logit_bias=((3, 1.0),))


def test_tiny_temperatures_are_greedy() -> None:
    greedy = [SamplingParams(temperature=value).is_greedy for value in (0, 0.0, 1e-12, 9e-7)]
    assert all(greedy)
    assert not SamplingParams(temperature=1e-6).is_greedy
