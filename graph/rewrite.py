"""Pattern rules and their driver, and the generic passes built on it.

A rule replaces one node by others that compute the same; the driver keeps names, origins and the
rounding points, and says which rule touched which node.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

from tilewright.graph.errors import LowerError, ShapeError
from tilewright.graph.ir import Attr, Graph, Node
from tilewright.graph.ops import OPS, ROUNDING_OPS, Kind, OpDef, op_def
from tilewright.graph.types import TensorType
from tilewright.graph.verify import Stage, verify

_MAX_PER_NODE = 64


@dataclass(frozen=True)
class Ref:
    """A value of the graph as a rule sees it."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Applied:
    """A rule replaced this node."""

    rule: str
    node: str


Bound: TypeAlias = Mapping[str, Ref]


@dataclass(frozen=True)
class Rule:
    """Where `match(view, node)` binds values, `rewrite(edit, node, bound)` returns the replacement.

    The replacement has the node's type. A rule may neither make nor orphan a cast.
    """

    name: str
    match: Callable[[View, Node], Bound | None]
    rewrite: Callable[[Edit, Node, Bound], Ref]


@dataclass(frozen=True)
class Pattern:
    """A tree of ops that matches a node and the producers of its operands.

    An operand that is a string binds any value under that name; the same name twice must be the
    same value. `attrs` lists the attributes that must have exactly these values.
    """

    op: str
    operands: tuple[Pattern | str, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()

    def __call__(self, view: View, node: Node) -> Bound | None:
        bound: dict[str, Ref] = {}
        return bound if self._binds(view, node, bound) else None

    def _binds(self, view: View, node: Node, bound: dict[str, Ref]) -> bool:
        if node.op != self.op or len(node.inputs) != len(self.operands):
            return False
        if self.attrs and any(repr(node.attr.get(k)) != repr(v) for k, v in self.attrs):
            return False
        for name, operand in zip(node.inputs, self.operands, strict=True):
            if isinstance(operand, str):
                if bound.setdefault(operand, view.ref(name)).name != name:
                    return False
                continue
            producer = view.producer(name)
            if producer is None or not operand._binds(view, producer, bound):
                return False
        return True


def pattern(op: str, *operands: Pattern | str, **attrs: Attr) -> Pattern:
    """Return a pattern: `pattern("mul", pattern("silu", "gate"), "up")`."""
    return Pattern(op, operands, tuple(attrs.items()))


class View:
    """The graph as it stands, for rules to look at."""

    def __init__(self, graph: Graph) -> None:
        self._types = dict(graph.types)
        self._nodes = dict(graph.node)
        self._users = {name: dict.fromkeys(users) for name, users in graph.users.items()}
        self._kept = set(graph.output_values)

    def ref(self, name: str) -> Ref:
        return Ref(name, self._types[name])

    def producer(self, name: str) -> Node | None:
        """Return the node that makes a value; None for inputs, states and weights."""
        return self._nodes.get(name)

    def users(self, name: str) -> tuple[Node, ...]:
        return tuple(self._nodes[u] for u in self._users[name])

    def is_output(self, name: str) -> bool:
        """Say whether the value must exist after the step."""
        return name in self._kept


class Edit:
    """Makes the nodes of one replacement: `edit.op(op, *values, **attrs)`, as a builder does."""

    def __init__(self, node: Node, types: Mapping[str, TensorType], taken: Set[str]) -> None:
        self._node = node
        self._types = types
        self._taken = taken
        self.made: dict[str, Node] = {}

    def op(self, op: str, *inputs: Ref, **attrs: Attr) -> Ref:
        """Add a node; raise ShapeError if the operands do not fit."""
        for i in inputs:
            if i.name not in self._types and i.name not in self.made:
                raise ShapeError(f"{op}: operand not defined: got {i.name}, want a value in reach")
        type_ = op_def(op).checked_type([i.type for i in inputs], attrs)
        base = f"{self._node.name}.{op}"
        name, count = base, 1
        while name in self._taken or name in self.made:
            name, count = f"{base}_{count}", count + 1
        ordered = tuple(sorted(attrs.items()))
        operands = tuple(i.name for i in inputs)
        self.made[name] = Node(name, op, operands, ordered, type_, self._node.origin)
        return Ref(name, type_)


class _Driver(View):
    """Applies rules at one node after the other and keeps the view up to date."""

    def __init__(self, graph: Graph, rules: Sequence[Rule]) -> None:
        super().__init__(graph)
        self._graph = graph
        self._rules = rules
        self._root = {n.name: n.name for n in graph.nodes}  # the first graph's node it stands for
        self._taken = set(graph.types)  # names are never used twice: outputs are looked up by them
        self._count: Counter[str] = Counter()
        self._moved: dict[str, str] = {}  # replaced value -> the existing value that took its place
        self.applied: list[Applied] = []

    def run(self) -> Graph:
        """Sweep over the nodes, operands first, until no rule matches anywhere."""
        before, order = -1, [n.name for n in self._graph.nodes]
        while before != len(self.applied):
            before = len(self.applied)
            order = self._sweep(order)
        return replace(
            self._graph,
            nodes=tuple(self._nodes[name] for name in order),
            outputs=tuple((public, self._final(v)) for public, v in self._graph.outputs),
            state_outputs=tuple((s, self._final(v)) for s, v in self._graph.state_outputs),
        )

    def _sweep(self, order: list[str]) -> list[str]:
        waiting = deque(order)
        done: dict[str, None] = {}
        while waiting:
            name = waiting.popleft()
            if name not in self._nodes:
                continue
            for rule in self._rules:
                bound = rule.match(self, self._nodes[name])
                if bound is not None:
                    waiting.extendleft(reversed(self._apply(rule, self._nodes[name], bound)))
                    break
            else:
                done[name] = None
        return [name for name in done if name in self._nodes]

    def _apply(self, rule: Rule, node: Node, bound: Bound) -> list[str]:
        """Replace the node and return the names of the new ones, operands first."""
        root = self._root[node.name]
        self._count[root] += 1
        if self._count[root] > _MAX_PER_NODE:
            first = self._graph.node[root]
            raise _at(rule, first, "does not end", f"over {_MAX_PER_NODE} applications", "fewer")
        edit = Edit(node, self._types, self._taken)
        try:
            result = rule.rewrite(edit, node, bound)
        except ShapeError as error:
            raise LowerError(f"rule '{rule.name}': {error} (at {node.op} '{node.name}')") from None
        if result.type != node.type:
            raise _at(rule, node, "changes the type", result.type, node.type)
        if result.name not in edit.made and result.name not in self._types:
            raise _at(rule, node, "returns an unknown value", result.name, "a value of the graph")
        made = _named(edit.made, result.name, node.name)
        self._replace(rule, node, made, result.name)
        self._root.update(dict.fromkeys(made, root))
        self._taken.update(made)
        self.applied.append(Applied(rule.name, node.name))
        return list(made)

    def _replace(self, rule: Rule, node: Node, made: dict[str, Node], result: str) -> None:
        if node.op in ROUNDING_OPS or any(n.op in ROUNDING_OPS for n in made.values()):
            raise _at(rule, node, "moves a cast", "a cast made or replaced", "casts untouched")
        for name in made:
            self._users.setdefault(name, {})
        for new in made.values():
            self._nodes[new.name], self._types[new.name] = new, new.type
            for operand in new.inputs:
                self._users[operand][new.name] = None
        if node.name not in made:
            self._redirect(node.name, result)
            del self._nodes[node.name], self._types[node.name]
        inherited = made[node.name].inputs if node.name in made else ()
        for operand in dict.fromkeys(node.inputs):
            if operand not in inherited:
                del self._users[operand][node.name]
                self._drop_unused(rule, node, operand)
        for name in reversed(list(made)):
            self._drop_unused(rule, node, name)

    def _redirect(self, old: str, new: str) -> None:
        """Let every reader of `old` read `new`."""
        for user in self._users.pop(old):
            reader = self._nodes[user]
            inputs = tuple(new if i == old else i for i in reader.inputs)
            self._nodes[user] = replace(reader, inputs=inputs)
            self._users[new][user] = None
        self._moved[old] = new
        if old in self._kept:
            self._kept.add(new)

    def _drop_unused(self, rule: Rule, node: Node, name: str) -> None:
        """Remove a value that lost its last reader, and what only it needed."""
        stack = [name]
        while stack:
            name = stack.pop()
            if name not in self._nodes or self._users[name] or name in self._kept:
                continue
            if name == node.name:
                continue  # a node that nobody read before stays until `eliminate_dead`
            dead = self._nodes.pop(name)
            if dead.op in ROUNDING_OPS:
                raise _at(rule, node, "removes a cast", f"no reader of {name}", "casts untouched")
            del self._types[name], self._users[name]
            for operand in dict.fromkeys(dead.inputs):
                del self._users[operand][name]
                stack.append(operand)

    def _final(self, name: str) -> str:
        while name not in self._types:
            name = self._moved[name]
        return name


def _at(rule: Rule, node: Node, problem: str, got: object, want: object) -> LowerError:
    where = f" ({node.origin})" if node.origin else ""
    subject = f"rule '{rule.name}': {problem} at {node.op} '{node.name}'"
    return LowerError(f"{subject}: got {got}, want {want}{where}")


def _named(made: dict[str, Node], result: str, name: str) -> dict[str, Node]:
    """Give the result the name of the node it replaces."""
    if result not in made:
        return made
    named: dict[str, Node] = {}
    for node in made.values():
        inputs = tuple(name if i == result else i for i in node.inputs)
        new = replace(node, name=name if node.name == result else node.name, inputs=inputs)
        named[new.name] = new
    return named


def apply_rules(
    graph: Graph, rules: Sequence[Rule], *, stage: Stage = Stage.MODEL
) -> tuple[Graph, list[Applied]]:
    """Apply rules, the first that matches a node first, until none matches; verify the result.

    Raises LowerError naming the rule that does not end, changes a type, or makes, moves or removes
    a cast. A node that the rules leave without a reader is gone.
    """
    _refuse_groups(graph)
    driver = _Driver(graph, rules)
    result = driver.run()
    verify(result, stage)
    return result, driver.applied


def expand_composites(graph: Graph) -> tuple[Graph, list[Applied]]:
    """Replace every composite op by its definition."""
    composites = [op for op in OPS.values() if op.kind is Kind.COMPOSITE]
    rules = [_expansion(op) for op in sorted(composites, key=lambda op: op.name)]
    return apply_rules(graph, rules, stage=Stage.DECOMPOSED)


def _expansion(op: OpDef) -> Rule:
    expand = op.expand
    assert expand is not None, op.name

    def match(view: View, node: Node) -> Bound | None:
        if node.op != op.name:
            return None
        return {str(i): view.ref(name) for i, name in enumerate(node.inputs)}

    def rewrite(edit: Edit, node: Node, bound: Bound) -> Ref:
        result = expand(edit, list(bound.values()), node.attr)
        assert isinstance(result, Ref), op.name
        return result

    return Rule(f"expand_{op.name}", match, rewrite)


def eliminate_dead(graph: Graph) -> Graph:
    """Remove nodes no output needs, and literals nobody reads; checkpoint tensors stay declared."""
    _refuse_groups(graph)
    needed = set(graph.output_values)
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(node.inputs)
    weights = tuple(w for w in graph.weights if w.expr.kind != "literal" or w.name in needed)
    nodes = tuple(n for n in graph.nodes if n.name in needed)
    return replace(graph, weights=weights, nodes=nodes)


def merge_equal(graph: Graph) -> Graph:
    """Compute equal nodes once, under the first one's name; stores are never merged.

    Two casts of one value to one dtype are one rounding point, so they merge too.
    """
    _refuse_groups(graph)
    first: dict[tuple[str, tuple[str, ...], str], str] = {}
    name: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = tuple(name.get(i, i) for i in node.inputs)
        if op_def(node.op).kind is not Kind.STORE:
            # repr tells 0.0 from -0.0, which compare equal but compute different bits
            kept = first.setdefault((node.op, inputs, repr(node.attrs)), node.name)
            if kept != node.name:
                name[node.name] = kept
                continue
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    return replace(
        graph,
        nodes=tuple(nodes),
        outputs=tuple((public, name.get(v, v)) for public, v in graph.outputs),
        state_outputs=tuple((state, name.get(v, v)) for state, v in graph.state_outputs),
    )


def _refuse_groups(graph: Graph) -> None:
    if graph.groups:
        raise LowerError(
            f"graph '{graph.name}': fused already: got {len(graph.groups)} groups, want none; "
            "rewrite before fusing"
        )


def canonical_order(graph: Graph) -> Graph:
    """Order nodes so that the result depends on the graph's structure alone.

    Walks from the outputs, then the next states, operands first and in operand order: neither the
    given order nor node names count. Nodes that no output needs follow, by structural hash.
    """
    _refuse_groups(graph)
    order: dict[str, None] = {}
    for _, value in (*graph.outputs, *graph.state_outputs):
        _visit(graph, value, order)
    if len(order) < len(graph.nodes):
        hashes = _structural_hashes(graph)
        unread = [n.name for n in graph.nodes if not graph.users[n.name] and n.name not in order]
        for name in sorted(unread, key=hashes.__getitem__):
            _visit(graph, name, order)
    return graph.with_nodes(tuple(graph.node[name] for name in order))


def _visit(graph: Graph, root: str, order: dict[str, None]) -> None:
    """Append the nodes `root` needs, then itself, without recursion: chains are long."""
    stack = [(root, False)]
    while stack:
        name, operands_done = stack.pop()
        if name in order or name not in graph.node:
            continue
        if operands_done:
            order[name] = None
        else:
            stack.append((name, True))
            stack.extend((operand, False) for operand in reversed(graph.node[name].inputs))


def _structural_hashes(graph: Graph) -> Mapping[str, str]:
    """Hash every value by op, attributes and operands; given values by their (public) names."""
    hashes: dict[str, str] = {}
    for node in graph.nodes:
        facts = (node.op, node.attrs, [hashes.get(i, i) for i in node.inputs])
        hashes[node.name] = hashlib.sha256(repr(facts).encode()).hexdigest()
    return hashes
