"""Launches on several streams: what they share keeps its order, what they do not may overlap."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.lanes import LANES, Touch, Turn, take_turns

ARENA, STATE = ("arena", ""), ("state", "cache")


def read(start: int, stop: int) -> Touch:
    return Touch(ARENA, start, stop, is_write=False)


def write(start: int, stop: int) -> Touch:
    return Touch(ARENA, start, stop, is_write=True)


@st.composite
def touch(draw: st.DrawFn) -> Touch:
    start = draw(st.integers(0, 40))
    region = draw(st.sampled_from([ARENA, STATE]))
    return Touch(region, start, start + draw(st.integers(1, 12)), draw(st.booleans()))


def earlier(turns: Sequence[Turn]) -> list[set[int]]:
    """What is done before each launch begins, by lanes and what turns wait for."""
    found: list[set[int]] = []
    for index, turn in enumerate(turns):
        mine = [j for j in range(index) if turns[j].lane == turn.lane][-1:]
        done = {k for j in (*mine, *turn.after) for k in (j, *found[j])}
        found.append(done)
    return found


@given(st.lists(st.lists(touch(), max_size=4), max_size=30))
def test_launches_that_meet_keep_their_order(touched: list[list[Touch]]) -> None:
    turns = take_turns(touched)
    done = earlier(turns)
    for index, mine in enumerate(touched):
        assert turns[index].lane in range(LANES)
        for before in range(index):
            if any(a.meets(b) for a in mine for b in touched[before]):
                assert before in done[index], (before, index, turns)


@given(st.lists(st.lists(touch(), max_size=4), max_size=30))
def test_turns_wait_for_other_lanes_only_and_once(touched: list[list[Touch]]) -> None:
    turns, last = take_turns(touched), {}
    for turn in turns:
        for j in turn.after:
            assert turns[j].lane != turn.lane
            assert j > last.get((turn.lane, turns[j].lane), -1)
            last[turn.lane, turns[j].lane] = j


def test_a_chain_stays_on_one_lane() -> None:
    chain = [[write(i, i + 1), *([read(i - 1, i)] if i else [])] for i in range(9)]
    assert take_turns(chain) == [Turn(0, ())] * 9


def test_branches_take_a_lane_each_and_join() -> None:
    turns = take_turns([
        [write(0, 1)],
        [read(0, 1), write(1, 2)], [read(1, 2), write(2, 3)],  # routed experts
        [read(0, 1), write(3, 4)], [read(3, 4), write(4, 5)],  # the shared one
        [read(2, 3), read(4, 5), write(5, 6)],
    ])  # fmt: skip
    assert [t.lane for t in turns] == [0, 0, 0, 1, 1, 1]
    assert [t.after for t in turns] == [(), (), (), (0,), (), (2,)]


def test_memory_that_is_taken_again_waits_for_its_readers() -> None:
    turns = take_turns([
        [write(0, 4)], [read(0, 4), write(4, 8)], [write(8, 9)],
        [read(8, 9), write(2, 3)],  # in the place of what launch 1 reads
    ])  # fmt: skip
    assert [t.lane for t in turns] == [0, 0, 1, 1]
    assert turns[3].after == (1,)


def test_readers_of_one_value_do_not_wait_for_each_other() -> None:
    turns = take_turns([[write(0, 1)], [read(0, 1)], [read(0, 1)]])
    assert turns[2] == Turn(1, (0,))
