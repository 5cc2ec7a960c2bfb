"""The sampler against plain definitions: whole-vocabulary argmax, integer top-p, frequencies."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewright.runtime.errors import RequestError
from tilewright.runtime.params import SamplingParams
from tilewright.runtime.philox import Draw, philox4x32
from tilewright.runtime.sample_filter import kept_tokens, largest
from tilewright.runtime.sample_logits import SampleRules, adjusted, bad_word_sequences
from tilewright.runtime.sample_math import log, total_weight, weights
from tilewright.runtime.sample_noise import draw_token, noise
from tilewright.runtime.sampler import log_softmax, sample, score_prompt

Logits = NDArray[np.float32]
NINF = -math.inf
# Recorded once: a change of any bit changes what every seed generates.
NOISE = [
    "0x1.7825d0b052e76p+0",
    "0x1.e44b044916212p-1",
    "0x1.6c7319b384b79p-1",
    "0x1.5119a9554bc96p+0",
    "0x1.b4307a8daee16p+0",
]


def rules(**values: Any) -> SampleRules:
    eos = values.pop("eos", ())
    bad = values.pop("bad", ())
    params = SamplingParams(**values).validated(1_000_000, 4096)
    return SampleRules.build(params, eos_token_ids=eos, bad_words=bad)


def array(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def normal(vocab_size: int, seed: int, scale: float = 3.0) -> Logits:
    values = np.random.default_rng(seed).standard_normal(vocab_size) * scale
    return values.astype(np.float32)


LOGITS = st.builds(
    lambda size, seed, scale, grain: (np.round(normal(size, seed, scale) * grain) / grain).astype(
        np.float32
    ),
    st.integers(1, 3000),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.1, 1.0, 8.0]),
    st.sampled_from([1, 4, 1000]),
)


# The functions of sample_math.


def test_log_is_close_to_the_exact_one() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        (
            np.exp(rng.uniform(-700, 700, 20_000)),
            1.0 - 2.0 ** -np.arange(1.0, 34.0),
            1.0 + rng.uniform(-0.3, 0.4, 20_000),
        )
    )
    exact = np.log(x.astype(np.longdouble))
    assert (np.abs(log(x) - exact) <= 1e-13 * np.abs(exact) + 1e-300).all()
    assert log(np.array([1.0]))[0] == 0.0


def test_weights_are_exponentials_in_units_of_2_to_minus_32() -> None:
    logits = np.concatenate((array(3.0, NINF, -1e38), normal(5000, 1))).astype(np.float32)
    top = logits.max()
    for temperature in (0.3, 1.0, 7.0):
        expected = np.exp((logits.astype(np.float64) - float(top)) / temperature) * 2.0**32
        with np.errstate(over="ignore"):
            got = weights(logits, top, temperature)
        assert np.abs(got - expected).max() <= 2.0**32 * 3e-6
        assert (np.abs(got - expected) <= expected * 3e-6 + 1).all()
        assert got.max() == 2**32 and got[1] == 0 and got[2] == 0


def test_total_weight_does_not_depend_on_order() -> None:
    logits = normal(30_000, 2)
    shuffled = np.random.default_rng(3).permutation(logits)
    assert total_weight(logits, logits.max(), 0.8) == total_weight(shuffled, logits.max(), 0.8)


# Bits that other devices must repeat.


def test_noise_is_a_fixed_function() -> None:
    values = noise(np.array([0, 1, 511, 512, 49151]), 49152, Draw(2**63 + 5, 17, 3))
    assert [value.hex() for value in values.tolist()] == NOISE


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_noise_follows_its_description(vocab_size: int) -> None:
    seed, position, sample_index = 0x1234567890ABCDEF, 77, 2

    def words(number: int, stream: int) -> list[int]:
        counter = np.array([[position], [sample_index], [number], [stream]], dtype=np.uint32)
        column: list[int] = philox4x32(counter, (0x90ABCDEF, 0x12345678))[:, 0].tolist()
        return column

    for token_id in range(0, vocab_size, 7):
        group = token_id % 512
        members = range(group, vocab_size, 512)
        of_group, which = words(group, 1)[:2]
        value = -math.log((of_group + 0.5) / 2**32) / len(members)
        if token_id != members[which * len(members) >> 32]:
            value += -math.log((words(token_id, 0)[0] + 0.5) / 2**32)
        got = noise(np.array([token_id]), vocab_size, Draw(seed, position, sample_index))
        assert float(got[0]) == pytest.approx(-math.log(value), rel=1e-12, abs=1e-12)


def test_noise_of_a_token_does_not_depend_on_the_others_asked_for() -> None:
    draw = Draw(9, 4)
    together = noise(np.arange(3000), 3000, draw)
    for ids in (np.array([5]), np.array([2999, 0, 700]), np.arange(500, 1500)):
        assert (noise(ids, 3000, draw) == together[ids]).all()


def test_noise_is_gumbel_and_independent_within_groups() -> None:
    draws = [noise(np.arange(1536), 1536, Draw(1, position)) for position in range(60)]
    values = np.exp(-np.stack(draws))  # exponential with mean 1, if the noise is Gumbel
    sample_size = values.size
    sorted_values = np.sort(values.reshape(-1))
    distance = np.abs(1 - np.exp(-sorted_values) - np.arange(sample_size) / sample_size).max()
    assert distance < 1.63 / math.sqrt(sample_size)  # Kolmogorov-Smirnov at 1 %
    groups = values.reshape(60, 3, 512)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        correlation = np.corrcoef(groups[:, a].reshape(-1), groups[:, b].reshape(-1))[0, 1]
        assert abs(correlation) < 0.025
    smallest = np.bincount(groups.argmin(axis=1).reshape(-1), minlength=3) / (60 * 512)
    assert np.abs(smallest - 1 / 3).max() < 0.01


# Drawing: pruning is exact, ties go to the lowest id.


@settings(max_examples=150, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([1e-6, 0.05, 0.7, 1.0, 5.0, 1e300]),
    position=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_pruned_draw_equals_argmax_over_the_vocabulary(
    logits: Logits, temperature: float, position: int, seed: int
) -> None:
    draw = Draw(seed, position, 1)
    top = logits.max()
    scores = (logits.astype(np.float64) - float(top)) / temperature
    scores = scores + noise(np.arange(len(logits)), len(logits), draw)
    with np.errstate(over="ignore", invalid="ignore"):
        assert draw_token(logits, None, top, temperature, draw) == int(scores.argmax())
        kept = np.flatnonzero(logits >= np.median(logits))
        best = int(kept[scores[kept].argmax()])
        assert draw_token(logits, kept, top, temperature, draw) == best


def test_pruned_draw_of_a_large_vocabulary() -> None:
    for vocab_size, scale in ((49_152, 3.0), (130_001, 0.5), (49_152, 0.0)):
        logits = normal(vocab_size, 5, scale)
        ids = np.arange(vocab_size)
        for position in range(6):
            draw = Draw(11, position)
            scores = logits.astype(np.float64) - float(logits.max())
            best = int((scores + noise(ids, vocab_size, draw)).argmax())
            assert draw_token(logits, None, logits.max(), 1.0, draw) == best


def test_draws_follow_softmax() -> None:
    logits = array(2.0, 1.0, 0.0, -1.0, 1.0, NINF)
    num_draws, warm = 3000, rules(temperature=0.8)
    tokens = [sample(logits, warm, Draw(3, position)).token_id for position in range(num_draws)]
    expected = np.exp(logits.astype(np.float64) / 0.8)
    expected *= num_draws / expected.sum()
    counts = np.bincount(tokens, minlength=6)
    assert counts[5] == 0
    chi_square = ((counts[:5] - expected[:5]) ** 2 / expected[:5]).sum()
    assert chi_square < 18.47  # 4 degrees of freedom, 0.1 %


def test_draws_from_a_wide_vocabulary_follow_softmax() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    logits[:5] = array(6.0, 5.5, 7.0, 6.0, 4.0)
    num_draws, plain = 1500, rules()
    tokens = [sample(logits, plain, Draw(8, i)).token_id for i in range(num_draws)]
    counts = np.bincount(np.minimum(tokens, 5), minlength=6)
    mass = np.exp(logits.astype(np.float64))
    expected = np.append(mass[:5], mass[5:].sum()) * num_draws / mass.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 20.52  # 5 degrees of freedom, 0.1 %


def test_samples_positions_and_seeds_draw_differently_and_repeatably() -> None:
    logits, plain = np.zeros(1000, dtype=np.float32), rules()
    draws = [Draw(1, 5, i) for i in range(8)] + [Draw(1, 6), Draw(2, 5), Draw(1 + 2**32, 5)]
    tokens = [sample(logits, plain, draw).token_id for draw in draws]
    assert len(set(tokens)) >= 10
    assert tokens == [sample(logits, plain, draw).token_id for draw in draws]


# Filters.


def plain_kept(logits: Logits, temperature: float, k: int, p: float, min_p: float) -> set[int]:
    top = logits.max()
    order = sorted(np.flatnonzero(logits > NINF).tolist(), key=lambda i: (-logits[i], i))
    if 0 < k < len(logits):
        order = order[:k]
    weight = weights(logits, top, temperature).tolist()
    if p < 1.0:
        target = Fraction(round(p * 2**32), 2**32) * sum(weight[i] for i in order)
        total, count = 0, 0
        while total < target:
            total += weight[order[count]]
            count += 1
        order = order[:count]
    if min_p > 0.0:
        order = [i for i in order if weight[i] >= math.floor(min_p * 2**32)]
    return set(order)


@settings(max_examples=250, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 20, 300, 2500, 10_000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    num_banned=st.integers(0, 5),
)
def test_filters_equal_their_definition(
    logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float, num_banned: int
) -> None:
    logits[1 : 1 + num_banned] = NINF
    kept = kept_tokens(
        logits, logits.max(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    expected = plain_kept(logits, temperature, top_k, top_p, min_p)
    if kept is None:
        assert expected == set(np.flatnonzero(logits > NINF).tolist())
    else:
        assert len(kept) == len(expected) and set(kept.tolist()) == expected


def test_ties_at_a_cut_go_to_the_lowest_ids() -> None:
    equal = np.zeros(2000, dtype=np.float32)
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, value, count in (("top_k", 7, 7), ("top_p", 0.25, 500), ("top_p", 0.001, 2)):
        kept = kept_tokens(equal, np.float32(0), **(options | {name: value}))
        assert kept is not None and sorted(kept.tolist()) == list(range(count))


def test_largest_is_ordered_and_leaves_out_banned_tokens() -> None:
    assert largest(array(1, 3, NINF, 3, 2), 3).tolist() == [1, 3, 4]
    assert largest(array(1, NINF, 2), 3).tolist() == [2, 0]


# Greedy, bans, penalties.


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-12, 9.99e-7])
def test_greedy_takes_the_lowest_id_of_the_largest_logit(temperature: float) -> None:
    logits = array(1, 5, 5, 2)
    greedy = rules(temperature=temperature, top_k=3, top_p=0.5, seed=3)
    assert {sample(logits, greedy, Draw(s, 0)).token_id for s in range(20)} == {1}
    assert sample(logits, greedy, Draw(0, 0), argmax=1).token_id == 1
    with pytest.raises(AssertionError, match="argmax 3 has 2.0, the largest is 5.0"):
        sample(logits, greedy, Draw(0, 0), argmax=3)


def test_penalties_by_hand() -> None:
    logits = array(2, -2, 4, 1, 3)
    changed = adjusted(logits, rules(repetition_penalty=2.0), [0, 1], [2, 2])
    assert changed.tolist() == [1, -4, 2, 1, 3]
    changed = adjusted(logits, rules(presence_penalty=1.0, frequency_penalty=0.5), [0], [2, 2, 1])
    assert changed.tolist() == [2, -3.5, 2, 1, 3]
    both = adjusted(logits, rules(repetition_penalty=2.0, logit_bias={2: 8.0, 4: NINF}), [2], [])
    assert both.tolist() == [2, -2, 10, 1, NINF]
    assert logits.tolist() == [2, -2, 4, 1, 3]


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = rules(allowed_token_ids=[7, 3])
    logits = np.arange(10, dtype=np.float32) / 10
    tokens = {sample(logits, allowed, Draw(1, i)).token_id for i in range(40)}
    assert tokens == {3, 7}


def test_bad_words_are_never_completed() -> None:
    logits = array(0, 5, 4, 3)
    bad = rules(temperature=0, bad=[(2, 1), (3, 3, 1)])

    def after(*output: int) -> int:
        return sample(logits, bad, Draw(0, 0), output_token_ids=output).token_id

    assert after() == 1 and after(1) == 1 and after(3, 1) == 1
    assert after(2) == 2 and after(0, 2) == 2 and after(3, 3) == 2
    single = rules(temperature=0, bad=[(1,)])
    assert sample(logits, single, Draw(0, 0)).token_id == 2


def test_bad_word_sequences_include_a_leading_space() -> None:
    def encode(text: str) -> list[int]:
        return [ord(char) for char in text]

    assert bad_word_sequences(["a", "a", " b"], encode) == (
        (97,),
        (32, 97),
        (32, 98),
        (32, 32, 98),
    )


def test_the_output_does_not_end_before_min_tokens() -> None:
    logits = array(5, 4, 3, 2)
    early = rules(temperature=0, min_tokens=2, stop_token_ids=[1], eos=[0])
    by_length = [
        sample(logits, early, Draw(0, 0), output_token_ids=[9] * count).token_id
        for count in range(3)
    ]
    assert by_length == [2, 2, 0]
    past_eos = rules(temperature=0, min_tokens=2, ignore_eos=True, eos=[0])
    assert sample(logits, past_eos, Draw(0, 0)).token_id == 0


# Broken logits, and log-probabilities.


@pytest.mark.parametrize("argmax", [None, 0])
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((1, math.nan, 2), "not finite: got nan for token 1, want numbers or -inf"),
        ((1, math.inf, 2), "not finite: got inf for token 1, want numbers or -inf"),
        (
            (NINF, NINF),
            "no token left to choose: got -inf for every token, want at least one finite logit",
        ),
    ],
)
def test_broken_logits_end_the_request(
    values: tuple[float, ...], sentence: str, argmax: int | None
) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(RequestError) as error:
            sample(array(*values), rules(temperature=temperature), Draw(0, 12), argmax=argmax)
        assert str(error.value) == f"logits 'position 12': {sentence}"


def test_nan_is_found_even_where_it_is_not_allowed() -> None:
    with pytest.raises(RequestError, match="got nan for token 1"):
        sample(array(1, math.nan), rules(allowed_token_ids=[0]), Draw(0, 0))


def test_banning_every_token_ends_the_request() -> None:
    everything = rules(allowed_token_ids=[1], logit_bias={1: NINF})
    with pytest.raises(RequestError) as error:
        sample(array(1, 2), everything, Draw(0, 3))
    assert str(error.value) == (
        "logits 'position 3 after penalties, biases and bans': no token left to choose:"
        " got -inf for every token, want at least one finite logit"
    )


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = array(1, 3, NINF, 3, 2)
    asked = rules(temperature=0.3, logit_bias={0: 100.0}, logprobs=3)
    chosen = sample(logits, asked, Draw(0, 0))
    exact = [float(value) - math.log(math.e + 2 * math.e**3 + math.e**2) for value in (1, 3, 2)]
    assert chosen.token_id == 0
    assert chosen.logprob == pytest.approx(exact[0], abs=1e-14)
    assert [token_id for token_id, _ in chosen.top_logprobs] == [1, 3, 4]
    assert chosen.top_logprobs[2][1] == pytest.approx(exact[2], abs=1e-14)
    assert sample(logits, rules(), Draw(0, 0)).logprob is None
    assert sample(logits, rules(logprobs=0), Draw(0, 0)).top_logprobs == ()


def test_log_softmax_sums_to_one() -> None:
    assert np.exp(log_softmax(normal(49_152, 1))).sum() == pytest.approx(1.0, abs=1e-12)


def test_prompt_logprobs() -> None:
    logits = np.stack((array(0, 0), array(math.nan, 5), array(1, 2)))
    (first, second) = score_prompt(logits, [1, 0], 1)
    assert first is None and second is not None
    assert (second.token_id, second.logprob) == (0, pytest.approx(-math.log(2)))
    assert second.top_logprobs == ((0, second.logprob),)
    with pytest.raises(RequestError) as error:
        score_prompt(logits, [1, 0, 1], 1)
    assert str(error.value) == (
        "logits 'position 2': not finite: got nan for token 0, want numbers or -inf"
    )
