"""Fusion: generic rules join nodes into groups that one kernel computes.

Rules look at op kinds, shapes and edges, never at names, and walk nodes in canonical order, so a
graph whose nodes were permuted or renamed fuses alike. A merge is taken only where it saves a
stored value. Casts stay where the model put them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilewright.codegen.passes.partition import Applied, Partition, row_extent
from tilewright.graph import Graph, Node
from tilewright.graph.ops import Kind, op_def

Find = Callable[[Partition, int], Iterator[frozenset[int]]]


@dataclass(frozen=True)
class Rule:
    """Proposes sets of groups to join, given one of them."""

    name: str
    find: Find
    doc: str


def fuse(graph: Graph) -> tuple[Graph, list[Applied]]:
    """Return the graph with its groups, and which rule joined what."""
    partition = Partition(graph)
    for rule in RULES:
        _apply(rule, partition)
    return replace(graph, groups=partition.groups()), partition.applied


def _apply(rule: Rule, partition: Partition) -> None:
    """Apply one rule until a walk over all groups finds nothing more."""
    merged = True
    while merged:
        merged = False
        for gid in partition.ids():
            while gid in partition.members:
                chosen = next(
                    (c for c in rule.find(partition, gid) if partition.merge(c, rule.name)), None
                )
                if chosen is None:
                    break
                gid, merged = min(chosen), True


def _is(node: Node, *kinds: Kind) -> bool:
    return op_def(node.op).kind in kinds


def _horizontal(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """Contractions of the same activation: read it, and apply its prologue, once."""
    first = p.nodes(gid)[0]
    if not _is(first, Kind.CONTRACT):
        return
    activation = first.inputs[0]
    for user in p.graph.users[activation]:
        other = p.group.get(user)
        single = other is not None and other != gid and len(p.members[other]) == 1
        node = p.graph.node[user]
        if single and other is not None and node.op == first.op:
            # Beyond the weights all operands are shared: the experts chosen, if there are any.
            if (node.inputs[0], *node.inputs[2:]) == (activation, *first.inputs[2:]):
                yield frozenset((gid, other))


def _epilogue(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """Elementwise ops on the outputs of a contraction or an attention, element by element."""
    if p.kind(gid) not in ("contract", "attend"):
        return
    produced = {n.name: n.type.shape for n in p.nodes(gid)}
    for user in p.users(gid):
        nodes = p.nodes(user)
        if len(nodes) != 1 or not _is(nodes[0], Kind.ELEMENTWISE):
            continue
        node = nodes[0]
        shapes = [p.graph.type_of(i).shape for i in node.inputs if p.root(i) in produced]
        direct = all(i in produced for i in node.inputs if p.root(i) in produced)
        if not direct or any(shape != node.type.shape for shape in shapes):
            continue
        if _better_in_rows(p, node, set(produced)):
            continue
        saved = len(p.stored(p.members[gid])) - len(p.stored(p.joined((gid, user))))
        if saved >= 0:
            yield frozenset((gid, user))


def _better_in_rows(p: Partition, node: Node, produced: set[str]) -> bool:
    """Say whether a row kernel makes another operand for this node alone, and only row kernels read
    the result: then the node can join that kernel, which would else be a launch before this one."""
    readers = {p.group[r] for r in p.readers.get(node.name, ())}
    if not readers or any(p.kind(r) != "row" for r in readers):
        return False
    for name in node.inputs:
        maker = p.group.get(p.root(name))
        if maker is None or p.root(name) in produced or p.kind(maker) != "row":
            continue
        if p.users(maker) == [p.group[node.name]]:
            return True
    return False


def _same_rows(p: Partition, ids: frozenset[int]) -> bool:
    """Say whether row kernels of these groups could be one: equal rows, values read at their own
    row."""
    nodes = [p.graph.node[name] for name in p.joined(ids)]
    extents = {row_extent(p.graph, n) for n in nodes}
    if len(extents) != 1 or None in extents:
        return False
    inside = {n.name: n for n in nodes}
    written = {p.state_of(n.name) for n in nodes if _is(n, Kind.STORE)}
    read = {p.state_of(i) for n in nodes if not _is(n, Kind.STORE) for i in n.inputs}
    return written.isdisjoint(read) and all(_reads_own_row(p, node, inside) for node in nodes)


def _reads_own_row(p: Partition, node: Node, inside: dict[str, Node]) -> bool:
    for position, name in enumerate(node.inputs):
        producer = inside.get(p.root(name))
        if producer is None:
            continue
        if _is(producer, Kind.STORE) or position in op_def(node.op).far:
            return False
        if _is(node, Kind.STORE) and position == 0:
            return False
        if not _views_keep_rows(p, name):
            return False
        if _is(node, Kind.ELEMENTWISE) and p.graph.type_of(name).rank != node.type.rank:
            return False
    return True


def _views_keep_rows(p: Partition, name: str) -> bool:
    """Say whether the views between a value and its root leave the leading extent alone."""
    rows = p.graph.type_of(p.root(name)).shape[:1]
    while p.root(name) != name:
        if p.graph.type_of(name).shape[:1] != rows:
            return False
        name = p.graph.node[name].inputs[0]
    return True


def _join_reader(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """A row group and its only reader. Before groups with many readers gather them: a table row
    that one layer reads shall be made in that layer's kernel, not in one with all layers' rows."""
    users = p.users(gid) if p.kind(gid) == "row" else []
    if len(users) == 1 and p.kind(users[0]) == "row":
        pair = frozenset((gid, *users))
        if _same_rows(p, pair):
            yield pair


def _join_consumers(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """A row group and all its readers, where its values then need no buffer."""
    if p.kind(gid) != "row":
        return
    users = p.users(gid)
    if not users or any(p.kind(u) != "row" for u in users):
        return
    chosen = frozenset((gid, *users))
    before = sum(len(p.stored(p.members[g])) for g in chosen)
    if len(p.stored(p.joined(chosen))) < before and _same_rows(p, chosen):
        yield chosen


def _siblings(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """Row groups between the same two neighbours: one launch instead of several."""
    users = set(p.users(gid))
    for other in _rows_beside(p, gid):
        pair = frozenset((gid, other))
        if users & set(p.users(other)) and _same_rows(p, pair):
            yield pair


def _rows_beside(p: Partition, gid: int) -> Iterator[int]:
    """Row groups that read a value of a kernel this row group reads too, but those that could never
    be one with it."""
    if p.kind(gid) != "row":
        return
    for other in dict.fromkeys(u for source in p.sources(gid) for u in p.users(source)):
        if other != gid and p.kind(other) == "row" and not p.apart(gid, other):
            yield other


def _row_chain(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """A row group and a row group that reads it: a launch less, even where its values are kept."""
    if p.kind(gid) != "row":
        return
    for user in p.users(gid):
        pair = frozenset((gid, user))
        if p.kind(user) == "row" and not p.apart(gid, user) and _same_rows(p, pair):
            yield pair


def _row_cousins(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """Row groups after the same kernel, whoever reads them."""
    pairs = (frozenset((gid, other)) for other in _rows_beside(p, gid))
    yield from (pair for pair in pairs if _same_rows(p, pair))


_PROLOGUE_KINDS = (Kind.ELEMENTWISE, Kind.REDUCE, Kind.LAYOUT, Kind.GATHER, Kind.ROW)


def _contract_prologue(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """A row group that only makes the activation of one contraction group."""
    target = _only_reader(p, gid, "contract")
    if target is None or not all(_is(n, *_PROLOGUE_KINDS) for n in p.nodes(gid)):
        return
    (value,) = p.stored(p.members[gid])
    uses = [
        (n, i) for n in p.nodes(target) for i, name in enumerate(n.inputs) if p.root(name) == value
    ]
    as_activation = all(_is(n, Kind.CONTRACT) and i == 0 for n, i in uses)
    # Neither rows of groups nor rows sorted by their experts are made one by one.
    matrix = all(len(n.inputs) == 2 and n.type.rank == 2 for n, _ in uses)
    if as_activation and matrix and all(_views_keep_rows(p, n.inputs[0]) for n, _ in uses):
        yield frozenset((gid, target))


def _attend_prologue(p: Partition, gid: int) -> Iterator[frozenset[int]]:
    """An elementwise group that only makes the queries of one attention."""
    target = _only_reader(p, gid, "attend")
    if target is None or not all(_is(n, Kind.ELEMENTWISE) for n in p.nodes(gid)):
        return
    (value,) = p.stored(p.members[gid])
    rank3 = all(n.type.shape == p.graph.type_of(value).shape for n in p.nodes(gid))
    if rank3 and all(
        n.inputs.index(value) == 0 and n.inputs.count(value) == 1
        for n in p.nodes(target)
        if value in n.inputs
    ):
        if any(value in n.inputs for n in p.nodes(target) if _is(n, Kind.ATTEND)):
            yield frozenset((gid, target))


def _only_reader(p: Partition, gid: int, kind: str) -> int | None:
    """The one group that reads this row group's one value, if it is of that kind."""
    users = p.users(gid) if p.kind(gid) == "row" else []
    if len(users) != 1 or p.kind(users[0]) != kind or len(p.stored(p.members[gid])) != 1:
        return None
    (value,) = p.stored(p.members[gid])
    if value in p.kept:
        return None
    return users[0]


RULES = (
    Rule("horizontal_contract", _horizontal, "contractions of one activation share a kernel"),
    Rule("epilogue", _epilogue, "elementwise ops join the contraction or attention they follow"),
    Rule("join_reader", _join_reader, "a row kernel joins its only reader"),
    Rule("join_consumers", _join_consumers, "a row kernel joins all its readers"),
    Rule("row_siblings", _siblings, "row kernels between the same neighbours become one"),
    Rule("contract_prologue", _contract_prologue, "a row kernel joins the contraction it feeds"),
    Rule("attend_prologue", _attend_prologue, "an elementwise kernel joins the attention it feeds"),
    Rule("row_chain", _row_chain, "a row kernel joins a row kernel that reads it"),
    Rule("row_cousins", _row_cousins, "row kernels that read one kernel become one"),
)
