"""Numbers that are known before the rest of a kernel's operands become a kernel of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.deepseek import v41_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.passes.early import part_early
from tilewright.codegen.pipeline import lower
from tilewright.graph import Graph, GraphBuilder, Group, Role
from tilewright.graph.types import BF16, F32


def owners(graph: Graph) -> dict[str, str]:
    return {name: group.name for group in graph.groups for name in group.nodes}


def test_mixes_leave_the_kernels_that_wait_for_attention_and_experts() -> None:
    graph = v41_graph(hc_sinkhorn_iters=4)
    whole, parted = (lower(graph, Flags(), beside=b).graph for b in (False, True))
    mixes = [n.name for n in whole.nodes if n.op == "hyper_mix"]
    after = owners(parted)
    assert mixes and set(owners(whole)) == set(after)
    assert sum(len(g.nodes) for g in parted.groups) == sum(len(g.nodes) for g in whole.groups)
    assert len(parted.groups) == len(whole.groups) + len(mixes)
    for name in mixes:
        assert after[name] == name  # it ends its kernel
        for user in whole.users[name]:
            assert after[user] != name
    # A second walk finds nothing more.
    assert part_early(parted)[0] == parted


def mixed(*, late: bool) -> Graph:
    """A mix and what it scales, with an operand that a kernel makes, or that is given."""
    b = GraphBuilder("mixed")
    tokens = b.dim("tokens", Role.BATCH, upper=8)
    m = b.input("m", F32, tokens, 24)
    streams, y = b.input("streams", BF16, tokens, 4, 64), b.input("y", BF16, tokens, 64)
    mix = b.op(
        "hyper_mix", m, b.weight("scale", F32, 3), b.weight("base", F32, 24), streams=4,
        iterations=2, eps=1e-6,
    )  # fmt: skip
    row = b.cast(b.linear(y, b.weight("w", BF16, 64, 64)), BF16) if late else y
    b.output("out", b.cast(b.op("hyper_update", streams, row, mix), BF16))
    return b.build()


@pytest.mark.parametrize("late", [False, True])
def test_a_mix_leaves_only_what_waits_for_more(late: bool) -> None:
    graph = lower(mixed(late=late), Flags(), beside=True).graph
    (mix,) = [n.name for n in graph.nodes if n.op == "hyper_mix"]
    (group,) = [g for g in graph.groups if mix in g.nodes]
    assert (group.nodes == (mix,)) == late


def test_nothing_leaves_whose_other_values_are_wanted() -> None:
    graph = lower(mixed(late=True), Flags()).graph
    (mix,) = [n.name for n in graph.nodes if n.op == "hyper_mix"]
    (group,) = [g for g in graph.groups if mix in g.nodes]
    kept = tuple(g for g in graph.groups if g is not group)
    alone = replace(graph, groups=(*kept, Group(mix, "row", (mix,)), replace(
        group, nodes=tuple(n for n in group.nodes if n != mix))))  # fmt: skip
    assert part_early(alone)[0] == alone
