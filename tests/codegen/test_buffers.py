"""The arena: buffers alive at once never share a byte, and it is no larger than it must be."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tilewright.codegen.buffers import ALIGNMENT, Lifetime, clashing, place


@st.composite
def _lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    found = []
    for index in range(draw(st.integers(0, 40))):
        first = draw(st.integers(0, 30))
        last = first + draw(st.integers(0, 8))
        size = draw(st.one_of(st.integers(0, 300), st.just(64), st.integers(1000, 5000)))
        found.append(Lifetime(f"b{index}", size, first, last))
    return found


@given(_lifetimes())
@example([Lifetime("a", 0, 0, 0), Lifetime("b", 0, 0, 0)])
@example([Lifetime("a", 64, 0, 1), Lifetime("b", 64, 1, 2), Lifetime("c", 64, 2, 3)])
def test_live_buffers_never_overlap(lifetimes: list[Lifetime]) -> None:
    offsets, size = place(lifetimes, clashing(lifetimes))
    assert list(offsets.keys() ^ {b.name for b in lifetimes}) == []
    for a in lifetimes:
        assert offsets[a.name] % ALIGNMENT == 0
        assert 0 <= offsets[a.name] and offsets[a.name] + a.num_bytes <= size
        for b in lifetimes:
            alive_together = a.first <= b.last and b.first <= a.last
            if a.name < b.name and alive_together and a.num_bytes and b.num_bytes:
                apart = (
                    offsets[a.name] + a.num_bytes <= offsets[b.name]
                    or offsets[b.name] + b.num_bytes <= offsets[a.name]
                )
                assert apart, (a, b, offsets)


@given(_lifetimes())
def test_placement_ignores_the_given_order(lifetimes: list[Lifetime]) -> None:
    turned = lifetimes[::-1]
    assert place(lifetimes, clashing(lifetimes)) == place(turned, clashing(turned))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=20))
def test_a_chain_takes_the_largest_neighbours(sizes: list[int]) -> None:
    """In a chain each buffer meets only the next one: it must not cost the sum of all."""
    chain = [Lifetime(f"b{i}", size, i, i + 1) for i, size in enumerate(sizes)]
    _, total = place(chain, clashing(chain))
    padded = sorted((-(-s // ALIGNMENT) * ALIGNMENT for s in sizes), reverse=True)
    assert total <= sum(padded[:3])
