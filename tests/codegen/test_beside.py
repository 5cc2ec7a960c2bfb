"""Buffers of launches that may run beside each other never share a byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilewright.codegen.beside import Order
from tilewright.codegen.buffers import Lifetime, clashing, place


@st.composite
def _steps(draw: st.DrawFn) -> list[list[str]]:
    """Values of each launch: one that is new, and some of those before."""
    found: list[list[str]] = []
    for index in range(draw(st.integers(1, 25))):
        known = st.sampled_from([f"b{i}" for i in range(index)] + ["cache"])
        found.append([f"b{index}", *draw(st.lists(known, max_size=3, unique=True))])
    return found


def _before(uses: list[list[str]]) -> list[set[int]]:
    """What comes before each launch: who wrote what it reads, and all that named its states."""
    found: list[set[int]] = []
    for index, names in enumerate(uses):
        direct = {int(n[1:]) for n in names if n != "cache"} - {index}
        if "cache" in names:
            direct |= {j for j in range(index) if "cache" in uses[j]}
        found.append(direct | {k for j in direct for k in found[j]})
    return found


@given(_steps(), st.data())
def test_a_buffer_is_taken_again_only_when_all_its_users_are_done(
    uses: list[list[str]], data: st.DataObject
) -> None:
    lives = []
    for index in range(len(uses)):
        last = max(j for j, names in enumerate(uses) if f"b{index}" in names)
        lives.append(Lifetime(f"b{index}", data.draw(st.integers(1, 500)), index, last))
    offsets, size = place(lives, clashing(lives, Order(uses, {"cache"}).clash))
    before = _before(uses)
    for a in lives:
        assert 0 <= offsets[a.name] and offsets[a.name] + a.num_bytes <= size
        for b in lives:
            apart = (
                offsets[a.name] + a.num_bytes <= offsets[b.name]
                or offsets[b.name] + b.num_bytes <= offsets[a.name]
            )
            if a.first < b.first and not apart:
                users = {j for j, names in enumerate(uses) if a.name in names}
                assert users <= before[b.first], (a, b, uses)


def test_a_chain_shares_as_it_does_in_order() -> None:
    uses = [[f"b{i}", *([f"b{i - 1}"] if i else [])] for i in range(8)]
    lives = [Lifetime(f"b{i}", 640, i, min(i + 1, 7)) for i in range(8)]
    assert clashing(lives, Order(uses, ()).clash) == clashing(lives)


def test_branches_have_memory_of_their_own() -> None:
    """In the order of launches `b` is done before `c` begins; beside each other it need not be."""
    uses = [["a"], ["a", "b"], ["b", "out"], ["a", "c"], ["c", "end"]]
    lives = [Lifetime("b", 64, 1, 2), Lifetime("c", 64, 3, 4)]
    assert place(lives, clashing(lives))[1] == 64
    assert place(lives, clashing(lives, Order(uses, {"out", "end"}).clash))[1] == 128
