"""Philox against the published known answers, and against a plain integer version of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.philox import Draw, fresh_seed, keyed_words, philox4x32

ONES = 0xFFFFFFFF
# The vectors that Random123 publishes for "philox4x32 10".
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
WORD = st.integers(0, ONES)


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(10):
        product0, product1 = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1, word2, word3 = (
            (product1 >> 32) ^ word1 ^ key0,
            product1 & ONES,
            (product0 >> 32) ^ word3 ^ key1,
            product0 & ONES,
        )
        key0, key1 = (key0 + 0x9E3779B9) & ONES, (key1 + 0xBB67AE85) & ONES
    return word0, word1, word2, word3


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    table = np.array([counter], dtype=np.uint32).T
    assert tuple(philox4x32(table, key)[:, 0].tolist()) == words


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=20), WORD, WORD)
def test_table_equals_single_counters(
    counters: list[tuple[int, ...]], key0: int, key1: int
) -> None:
    words = philox4x32(np.array(counters, dtype=np.uint32).T, (key0, key1))
    for i, counter in enumerate(counters):
        assert tuple(words[:, i].tolist()) == plain_philox(counter, (key0, key1))


@given(st.integers(0, 2**64 - 1), WORD, WORD, WORD)
def test_key_is_the_seed_and_counter_is_what_is_drawn_for(
    seed: int, position: int, sample_index: int, token_id: int
) -> None:
    ids = np.array([token_id], dtype=np.int64)
    words = keyed_words(ids, np.array([7]), Draw(seed, position, sample_index))[:, 0]
    counter = (position, sample_index, token_id, 7)
    assert tuple(words.tolist()) == plain_philox(counter, (seed & ONES, seed >> 32))


def test_fresh_seeds_differ_and_survive_json_readers_with_doubles() -> None:
    seeds = {fresh_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)
