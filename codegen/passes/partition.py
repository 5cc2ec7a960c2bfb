"""The partition under construction: groups of nodes, their edges, and merges that keep them
acyclic.

Views keep a buffer as it is, so they belong to no group and edges pass through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

from tilewright.graph import Graph, Group, Node
from tilewright.graph.dims import Dim
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.layout import VIEWS


@dataclass(frozen=True)
class Applied:
    """One rule application: which rule joined which nodes."""

    rule: str
    nodes: tuple[str, ...]


class Reach(NamedTuple):
    """Nodes of a group, those before and those after them, as bits of one int."""

    own: int
    before: int
    after: int


def _reaches(graph: Graph, index: Mapping[str, int]) -> dict[int, Reach]:
    """Return the reach of every node, views left out: they are in no group."""
    own = {n.name: 0 if n.op in VIEWS else 1 << index[n.name] for n in graph.nodes}
    before: dict[str, int] = {}
    after = dict.fromkeys(own, 0)
    for node in graph.nodes:
        found = [before[i] | own[i] for i in node.inputs if i in own]
        before[node.name] = reduce(or_, found, 0)
    for node in reversed(graph.nodes):
        for name in node.inputs:
            if name in own:
                after[name] |= after[node.name] | own[node.name]
    return {index[name]: Reach(own[name], before[name], after[name]) for name in own}


class Partition:
    """Groups by id (the index of their first node). Ids change only by merging."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index = {n.name: i for i, n in enumerate(graph.nodes)}
        self.group: dict[str, int] = {}
        self.members: dict[int, tuple[str, ...]] = {}
        self.applied: list[Applied] = []
        self._root: dict[str, str] = {}
        for node in graph.nodes:
            if node.op in VIEWS:
                self._root[node.name] = self.root(node.inputs[0])
            else:
                gid = self.index[node.name]
                self.group[node.name], self.members[gid] = gid, (node.name,)
        self.readers = self._readers()
        self.kept = frozenset(self.root(v) for v in graph.output_values)
        self._reach = _reaches(graph, self.index)
        self._kinds: dict[int, tuple[str, ...]] = {
            gid: (kind_of(graph.node[names[0]]),) for gid, names in self.members.items()
        }

    def root(self, value: str) -> str:
        """The value whose buffer `value` is a view of, itself for all others."""
        return self._root.get(value, value)

    def state_of(self, value: str) -> str | None:
        """The state whose memory a value is, or None."""
        value = self.root(value)
        while value in self.graph.node and op_def(self.graph.node[value].op).kind is Kind.STORE:
            value = self.root(self.graph.node[value].inputs[0])
        return value if value in self.graph.state else None

    def _readers(self) -> Mapping[str, tuple[str, ...]]:
        """Nodes that read each value, through views."""
        found: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            if node.op not in VIEWS:
                for name in dict.fromkeys(self.root(i) for i in node.inputs):
                    found.setdefault(name, []).append(node.name)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def nodes(self, gid: int) -> list[Node]:
        return [self.graph.node[name] for name in self.members[gid]]

    def ids(self) -> list[int]:
        return sorted(self.members)

    def kind(self, gid: int) -> str:
        """`contract`, `attend` or `select` where such a node is in the group, else `row`."""
        kinds = self._kinds[gid]
        return next((k for k in ("contract", "attend", "select") if k in kinds), "row")

    def users(self, gid: int) -> list[int]:
        """Groups that read a value of this one, in order."""
        found = {
            self.group[reader]
            for name in self.members[gid]
            for reader in self.readers.get(name, ())
        }
        return sorted(found - {gid})

    def sources(self, gid: int) -> list[int]:
        """Groups this one reads a value of, in order."""
        roots = {self.root(i) for node in self.nodes(gid) for i in node.inputs}
        return sorted({self.group[r] for r in roots if r in self.group} - {gid})

    def stored(self, members: Iterable[str]) -> list[str]:
        """Values of `members` that must exist outside of a kernel that computes them."""
        inside = set(members)
        return [
            name
            for name in members
            if name in self.kept or any(r not in inside for r in self.readers.get(name, ()))
        ]

    def joined(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Members of several groups, in graph order."""
        names = [name for gid in ids for name in self.members[gid]]
        return tuple(sorted(names, key=self.index.__getitem__))

    def acyclic(self, ids: frozenset[int]) -> bool:
        """Say whether one group made of `ids` would not depend on itself through another."""
        last = max(self.index[name] for gid in ids for name in self.members[gid])
        todo = [u for gid in ids for u in self.users(gid) if u not in ids]
        seen = set(todo)
        while todo:
            for user in self.users(todo.pop()):
                if user in ids:
                    return False
                if user not in seen and user <= last:
                    seen.add(user)
                    todo.append(user)
        return True

    def apart(self, one: int, other: int) -> bool:
        """Say whether a node outside of both groups lies on a path between them: never one kernel.

        Quick, and enough to spare most pairs the search that `merge` does.
        """
        a, b = self._reach[one], self._reach[other]
        between = a.after & b.before | b.after & a.before
        return bool(between & ~(a.own | b.own))

    def merge(self, ids: Iterable[int], rule: str) -> bool:
        """Join groups unless that would make a cycle; say whether it was done."""
        chosen = frozenset(ids)
        if len(chosen) < 2 or not self.acyclic(chosen):
            return False
        names = self.joined(chosen)
        kinds = tuple(k for gid in sorted(chosen) for k in self._kinds[gid])
        reach = [self._reach.pop(gid) for gid in chosen]
        for gid in chosen:
            del self.members[gid], self._kinds[gid]
        gid = self.index[names[0]]
        self._reach[gid] = Reach(*(reduce(or_, part) for part in zip(*reach, strict=True)))
        self.members[gid], self._kinds[gid] = names, kinds
        self.group.update(dict.fromkeys(names, gid))
        self.applied.append(Applied(rule, names))
        return True

    def groups(self) -> tuple[Group, ...]:
        """The finished groups, in an order in which they can run."""
        done: dict[int, None] = {}
        stack = self.ids()[::-1]
        while stack:
            gid = stack[-1]
            waiting = [s for s in self.sources(gid) if s not in done]
            if gid in done:
                stack.pop()
            elif waiting:
                stack += waiting[::-1]
            else:
                done[stack.pop()] = None
        return tuple(
            Group(anchor_name(self.nodes(gid)), self.kind(gid), self.members[gid]) for gid in done
        )


def kind_of(node: Node) -> str:
    """Kind of kernel a node alone needs."""
    match op_def(node.op).kind:
        case Kind.CONTRACT:
            return "contract"
        case Kind.ATTEND:
            return "attend"
        case Kind.SELECT if len(node.inputs) > 1:  # scores entries of a state: no row routine
            return "select"
        case _:
            return "row"


def anchor_name(nodes: list[Node]) -> str:
    """A group is named by its first contraction or attention, else by its last node."""
    for node in nodes:
        if kind_of(node) != "row":
            return node.name
    return nodes[-1].name


def row_extent(graph: Graph, node: Node) -> Dim | None:
    """The leading extent a row kernel walks for this node, or None for a scalar."""
    of = graph.type_of(node.inputs[1]) if op_def(node.op).kind is Kind.STORE else node.type
    return of.shape[0] if of.shape else None
