"""Numbers of a row that are known early become kernels of their own, where launches may run beside
each other: the mix of a hyper-connection is a long chain of dependent operations on what is there
before the attention or the experts, whose result the rest of its kernel waits for.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.body import root_of
from tilewright.codegen.passes.partition import Applied, anchor_name
from tilewright.graph import Graph, Group

_CHAINS = ("hyper_mix",)  # long chains with small results


def part_early(graph: Graph) -> tuple[Graph, list[Applied]]:
    """Return the graph with such groups in two parts, and which nodes were taken out."""
    owner = {name: i for i, group in enumerate(graph.groups) for name in group.nodes}
    found: list[Group] = []
    applied: list[Applied] = []
    depths: list[int] = []
    for group in graph.groups:
        early = _early(graph, group, owner, depths)
        depths.append(1 + _depth(graph, group.nodes, owner, depths))
        if early:
            nodes = [graph.node[n] for n in group.nodes if n in early]
            rest = tuple(n for n in group.nodes if n not in early)
            found.append(Group(anchor_name(nodes), group.kind, tuple(n.name for n in nodes)))
            found.append(replace(group, nodes=rest))
            applied.append(Applied("early", tuple(n.name for n in nodes)))
        else:
            found.append(group)
    return replace(graph, groups=tuple(found)), applied


def _early(
    graph: Graph, group: Group, owner: dict[str, int], depths: list[int]
) -> frozenset[str]:
    """Chains of a group and what they are computed from, if the rest of it waits for more than they
    do and nothing else of them is wanted."""
    inside = set(group.nodes)
    chains = [n for n in group.nodes if graph.node[n].op in _CHAINS]
    if group.kind != "row" or not chains:
        return frozenset()
    taken, todo = set[str](), list(chains)
    while todo:
        name = todo.pop()
        if name in inside and name not in taken:
            taken.add(name)
            todo += graph.node[name].inputs
    rest = inside - taken
    wanted = {i for n in graph.nodes if n.name not in taken for i in n.inputs}
    wanted |= {value for _, value in (*graph.outputs, *graph.state_outputs)}
    if not rest or wanted & taken != set(chains):
        return frozenset()
    first, last = (_depth(graph, tuple(part), owner, depths) for part in (taken, rest))
    return frozenset(taken) if first < last else frozenset()


def _depth(
    graph: Graph, nodes: tuple[str, ...], owner: dict[str, int], depths: list[int]
) -> int:
    """The longest chain of groups before those that nodes read."""
    mine = {owner[n] for n in nodes}
    read = (owner.get(root_of(graph, i)) for n in nodes for i in graph.node[n].inputs)
    return max((depths[o] for o in read if o is not None and o not in mine), default=0)
