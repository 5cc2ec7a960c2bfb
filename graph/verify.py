"""Say whether a graph keeps the rules of its stage; the first broken rule is the error.

Every pass is followed by this check, so a pass may rely on what it says and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from tilewright.graph.dims import symbols_of
from tilewright.graph.errors import ShapeError, VerifyError
from tilewright.graph.ir import WEIGHT_KINDS, Attr, Graph, Node, Weight
from tilewright.graph.ops import OPS, ROUNDING_OPS, Kind, op_def
from tilewright.graph.ops.layout import VIEWS
from tilewright.graph.types import F32, DType, TensorType

STATE_SCOPES = ("block", "window")
_W = "at least 1 for scope window, else 0"
_PASSES_TYPE_THROUGH = (Kind.LAYOUT, Kind.GATHER, Kind.STORE, Kind.ROW)


class Stage(Enum):
    """How far a graph has been lowered, hence what it may contain."""

    MODEL = "model"  # every op
    DECOMPOSED = "decomposed"  # no composite ops
    FUSED = "fused"  # and every node that computes is in exactly one group


def verify(graph: Graph, stage: Stage = Stage.MODEL) -> None:
    """Raise VerifyError naming the first node, value or group that breaks a rule of `stage`."""
    _check_names(graph)
    _check_dims(graph)
    _check_weights(graph)
    _check_nodes(graph, stage)
    _check_outputs(graph)
    _check_states(graph)
    _check_use(graph)
    if stage is Stage.FUSED:
        _check_groups(graph)
    elif graph.groups:
        raise _broken(f"graph '{graph.name}'", "has groups too early", len(graph.groups), "none")


def _broken(
    subject: str, problem: str, got: object, want: object, origin: str = ""
) -> VerifyError:
    where = f" ({origin})" if origin else ""
    return VerifyError(f"{subject}: {problem}: got {got}, want {want}{where}")


def _node_broken(node: Node, problem: str, got: object, want: object) -> VerifyError:
    return _broken(f"{node.op} '{node.name}'", problem, got, want, node.origin)


def _declared(graph: Graph) -> Iterator[tuple[str, str, TensorType]]:
    """Yield kind, name and type of every value the graph is given."""
    for i in graph.inputs:
        yield "input", i.name, i.type
    for s in graph.states:
        yield "state", s.name, s.type
    for w in graph.weights:
        yield "weight", w.name, w.type


def _check_names(graph: Graph) -> None:
    seen: dict[str, str] = {}
    values = [(kind, name, "") for kind, name, _ in _declared(graph)]
    values += [(n.op, n.name, n.origin) for n in graph.nodes]
    for kind, name, origin in values:
        if name in seen:
            want = "one value a name"
            raise _broken(f"{kind} '{name}'", "name taken", f"a second {name}", want, origin)
        seen[name] = kind
    for what, names in (
        ("dim", [d.name for d in graph.dims]),
        ("output", [public for public, _ in graph.outputs]),
        ("group", [g.name for g in graph.groups]),
    ):
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise _broken(f"{what} '{twice}'", "declared more than once", names.count(twice), 1)


def _check_dims(graph: Graph) -> None:
    """Every symbol of a declared type has a declaration; types of nodes follow from those."""
    for kind, name, type_ in _declared(graph):
        for symbol in sorted(symbols_of(type_.shape) - graph.dim.keys()):
            want = f"one of {_listed(graph.dim)}"
            raise _broken(f"{kind} '{name}'", "dim not declared", symbol, want)
    for state in graph.states:
        subject = f"state '{state.name}'"
        if state.scope not in STATE_SCOPES:
            raise _broken(subject, "unknown scope", state.scope, " or ".join(STATE_SCOPES))
        if state.positions_per_entry < 1:
            positions = state.positions_per_entry
            raise _broken(subject, "positions per entry out of range", positions, "at least 1")
        if (state.scope == "window") != (state.window > 0):
            raise _broken(subject, f"window of scope {state.scope} out of range", state.window, _W)


def _check_weights(graph: Graph) -> None:
    for weight in graph.weights:
        subject, expr = f"weight '{weight.name}'", weight.expr
        if not all(isinstance(d, int) for d in weight.type.shape):
            raise _broken(subject, "extents are not constant", weight.type, "ints")
        if expr.kind not in WEIGHT_KINDS:
            raise _broken(subject, "unknown expression", expr.kind, " or ".join(WEIGHT_KINDS))
        if expr.kind == "tensor" and not (len(expr.args) == 1 and isinstance(expr.args[0], str)):
            raise _broken(subject, "not one tensor's name", _listed(expr.args), "one name")
        if expr.kind == "literal":
            _check_literal(subject, weight)
        if expr.kind == "stack":
            _check_stack(subject, weight)


def _check_stack(subject: str, weight: Weight) -> None:
    parts, shape = weight.expr.args, weight.type.shape
    if not all(isinstance(part, str) for part in parts):
        raise _broken(subject, "not names of tensors", _listed(parts), "names")
    if len(shape) != 3 or shape[0] != len(parts):
        raise _broken(subject, "stack does not fit its type", f"{len(parts)} tensors", weight.type)


def _check_literal(subject: str, weight: Weight) -> None:
    type_, values = weight.type, weight.expr.args
    if not (isinstance(type_.dtype, DType) and type_.dtype.is_float):
        raise _broken(subject, "type cannot hold a literal", type_, "plain floats")
    if type_.shape != (len(values),):
        raise _broken(subject, "literal does not fit its type", f"{len(values)} values", type_)
    for value in values:
        if not isinstance(value, float):
            raise _broken(subject, "literal is not a float", repr(value), "floats")


def _check_nodes(graph: Graph, stage: Stage) -> None:
    types: dict[str, TensorType] = {name: type_ for _, name, type_ in _declared(graph)}
    every = graph.node
    for node in graph.nodes:
        for name in node.inputs:
            if name in types:
                continue
            if name in every:
                raise _node_broken(node, "out of order", f"operand {name} below it", "it above")
            raise _node_broken(node, "operand not defined", name, "a value of the graph")
        _check_node(node, [types[i] for i in node.inputs], stage)
        types[node.name] = node.type


def _check_node(node: Node, inputs: list[TensorType], stage: Stage) -> None:
    if node.op not in OPS:
        raise _node_broken(node, "unknown op", node.op, f"one of {_listed(sorted(OPS))}")
    op = op_def(node.op)
    if op.kind is Kind.COMPOSITE and stage is not Stage.MODEL:
        want = "only ops that are not defined by others"
        raise _node_broken(node, f"composite in a {stage.value} graph", node.op, want)
    names = [name for name, _ in node.attrs]
    if names != sorted(set(names)):
        want = "each once, by name"
        raise _node_broken(node, "attributes out of order", _listed(names), want)
    try:
        inferred = op.checked_type(inputs, node.attr)
    except ShapeError as error:
        where = f" ({node.origin})" if node.origin else ""
        raise VerifyError(f"{node.op} '{node.name}': {error}{where}") from None
    if inferred != node.type:
        raise _node_broken(node, "type does not follow from its operands", node.type, inferred)
    if not inferred.dtype.is_float or inferred.dtype == F32 or node.op in ROUNDING_OPS:
        return
    if not (op.kind in _PASSES_TYPE_THROUGH and inferred.dtype == inputs[0].dtype):
        raise _node_broken(node, "rounds its result", inferred.dtype, "f32, rounded by a cast")


def _check_outputs(graph: Graph) -> None:
    for public, value in graph.outputs:
        if value not in graph.types:
            raise _broken(f"output '{public}'", "value not defined", value, "a value of the graph")
    if not graph.outputs and not graph.state_outputs:
        raise _broken(f"graph '{graph.name}'", "computes nothing", "no output", "at least one")


def _check_states(graph: Graph) -> None:
    """A state's values form one chain of stores that ends in its declared next content."""
    newest = {s.name: s.name for s in graph.states}
    owner = {s.name: s.name for s in graph.states}  # of each value in the chain of a state
    for node in graph.nodes:
        if op_def(node.op).kind is not Kind.STORE:
            continue
        cache = node.inputs[0]
        if cache not in owner:
            raise _node_broken(node, "stores into a value that is no state", cache, "a state")
        if newest[owner[cache]] != cache:
            want = f"a chain after {newest[owner[cache]]}"
            raise _node_broken(node, "second writer of a state", cache, want)
        _check_replaced(graph, node, cache)
        owner[node.name] = owner[cache]
        newest[owner[cache]] = node.name
    following = dict(graph.state_outputs)
    for state, value in newest.items():
        if following.get(state) != value:
            got = following.get(state, "none")
            raise _broken(f"state '{state}'", "wrong next content", got, value)
    if len(graph.state_outputs) != len(graph.states):
        got, declared = _listed(s for s, _ in graph.state_outputs), _listed(newest)
        raise _broken(f"graph '{graph.name}'", "states and next contents differ", got, declared)


def _check_replaced(graph: Graph, store: Node, cache: str) -> None:
    """Stores overwrite in place, so the value that one replaces may have no other reader."""
    users = [graph.node[u] for u in graph.users[cache]]
    readers = [f"{u.op} '{u.name}'" for u in users if not _writes(u, cache)]
    readers += [f"output '{public}'" for public, v in graph.outputs if v == cache]
    if readers:
        raise _node_broken(store, f"replaced value '{cache}' is read", readers[0], "no reader")


def _writes(node: Node, cache: str) -> bool:
    return op_def(node.op).kind is Kind.STORE and node.inputs[0] == cache


def _check_use(graph: Graph) -> None:
    """A checkpoint tensor that nothing reads was forgotten, by the model or by a pass."""
    for weight in graph.weights:
        if not graph.users[weight.name] and weight.name not in graph.output_values:
            raise _broken(f"weight '{weight.name}'", "is not used", "no reader", "at least one")


def _check_groups(graph: Graph) -> None:
    """Groups, in order, are kernels that can run one after the other.

    If every operand comes from the same group above, or from an earlier group, then no group can
    wait for itself through another: that is convexity.
    """
    position = {n.name: i for i, n in enumerate(graph.nodes)}
    group_id: dict[str, int] = {}
    for index, group in enumerate(graph.groups):
        subject = f"group '{group.name}'"
        if not group.nodes:
            raise _broken(subject, "is empty", "no node", "at least one")
        for name in group.nodes:
            if name not in position:
                raise _broken(subject, "node not defined", name, "a node of the graph")
            if name in group_id:
                taken = graph.groups[group_id[name]].name
                raise _broken(subject, f"node '{name}' is taken", f"also in {taken}", "one group")
            group_id[name] = index
        order = [position[n] for n in group.nodes]
        if order != sorted(order):
            want = _listed(n for n in position if n in group.nodes)
            raise _broken(subject, "nodes out of order", _listed(group.nodes), want)
    _check_group_order(graph, group_id)


def _check_group_order(graph: Graph, group_id: dict[str, int]) -> None:
    ready: dict[str, int] = {}  # latest group that a value outside all groups waits for
    for node in graph.nodes:
        sources = [(group_id.get(i, ready.get(i, -1)), i) for i in node.inputs]
        latest, operand = max(sources, default=(-1, ""))
        if node.name not in group_id:
            if node.op not in VIEWS:
                raise _node_broken(node, "is in no group", "none", "one group")
            ready[node.name] = latest
        elif latest > group_id[node.name]:
            mine, later = graph.groups[group_id[node.name]].name, graph.groups[latest].name
            raise _node_broken(
                node, f"group '{mine}' is out of order or not convex",
                f"operand {operand} of later group {later}", "earlier groups only",
            )


def _listed(names: Iterable[Attr]) -> str:
    return ", ".join(str(n) for n in names) or "none"
