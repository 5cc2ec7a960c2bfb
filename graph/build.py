"""The DSL: a builder that checks types at once and records the model source line of every node."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeAlias

from tilewright.graph.dims import Dim, DimDecl, Role
from tilewright.graph.errors import ShapeError
from tilewright.graph.ir import Attr, Graph, Group, Input, Node, State, Weight, WeightExpr
from tilewright.graph.ops import op_def
from tilewright.graph.types import DType, ElementType, TensorType


@dataclass(frozen=True)
class Value:
    """A named value of a graph under construction; arithmetic on it adds elementwise nodes."""

    builder: GraphBuilder
    name: str
    type: TensorType

    def __add__(self, other: Operand) -> Value:
        return self.builder.binary("add", "shift", self, other)

    def __mul__(self, other: Operand) -> Value:
        return self.builder.binary("mul", "scale", self, other)

    def __sub__(self, other: Value) -> Value:
        return self.builder.op("sub", self, other)

    def __truediv__(self, other: Value) -> Value:
        return self.builder.op("div", self, other)

    def __neg__(self) -> Value:
        return self.builder.op("neg", self)


Operand: TypeAlias = "Value | float"


class GraphBuilder:
    """Collects the parts of one graph. Names are made unique within nested scopes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._dims: dict[str, DimDecl] = {}
        self._inputs: list[Input] = []
        self._states: list[State] = []
        self._weights: dict[str, tuple[Weight, Value]] = {}
        self._nodes: list[Node] = []
        self._outputs: list[tuple[str, str]] = []
        self._next_state: dict[str, str] = {}
        self._scope: tuple[str, ...] = ()
        self._taken: set[str] = set()

    def dim(self, name: str, role: Role, *, lower: int = 1, upper: int = 1 << 31) -> Dim:
        """Declare a symbolic extent and return its symbol."""
        decl = DimDecl(name, role, lower, upper)
        if self._dims.setdefault(name, decl) != decl:
            raise ShapeError(f"dim '{name}': declared twice: got {decl}, want {self._dims[name]}")
        return decl.symbol

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes made inside with `name.`."""
        self._scope = (*self._scope, name)
        try:
            yield
        finally:
            self._scope = self._scope[:-1]

    def input(self, name: str, dtype: DType, *shape: Dim) -> Value:
        """Declare a tensor given at every step."""
        declared = Input(self._claim(name), TensorType(dtype, shape))
        self._inputs.append(declared)
        return Value(self, declared.name, declared.type)

    def state(
        self,
        name: str,
        dtype: ElementType,
        *shape: Dim,
        scope: str = "block",
        positions_per_entry: int = 1,
        window: int = 0,
    ) -> Value:
        """Declare a cache or history that outlives a step."""
        kind = TensorType(dtype, shape)
        declared = State(self._claim(name), kind, scope, positions_per_entry, window)
        self._states.append(declared)
        self._next_state[declared.name] = declared.name
        return Value(self, declared.name, declared.type)

    def weight(self, name: str, dtype: ElementType, *shape: Dim) -> Value:
        """Declare a weight of the checkpoint; the same name twice is one weight."""
        return self._weight(name, TensorType(dtype, shape), WeightExpr("tensor", (name,)))

    def stack(self, name: str, dtype: ElementType, parts: Sequence[str], n: Dim, k: Dim) -> Value:
        """Declare the weight [len(parts), n, k] made of the checkpoint's matrices `parts`."""
        kind = TensorType(dtype, (len(parts), n, k))
        return self._weight(name, kind, WeightExpr("stack", tuple(parts)))

    def literal(self, name: str, values: Sequence[float], dtype: ElementType) -> Value:
        """Declare a vector of constants that the model's configuration gives."""
        kind = TensorType(dtype, (len(values),))
        return self._weight(name, kind, WeightExpr("literal", tuple(float(v) for v in values)))

    def op(self, op: str, *inputs: Value, name: str | None = None, **attrs: Attr) -> Value:
        """Add a node; raise ShapeError naming it and the model source line if types do not fit."""
        origin = _origin()
        unique = self._unique(name or op)
        try:
            type_ = op_def(op).checked_type([i.type for i in inputs], attrs)
        except ShapeError as error:
            raise ShapeError(f"{op} '{unique}': {error} ({origin})") from None
        ordered = tuple(sorted(attrs.items()))
        node = Node(unique, op, tuple(i.name for i in inputs), ordered, type_, origin)
        self._nodes.append(node)
        return Value(self, unique, type_)

    def binary(self, op: str, with_constant: str, a: Value, b: Operand) -> Value:
        """Add `op`, or its form with a constant operand."""
        if isinstance(b, Value):
            return self.op(op, a, b)
        if with_constant == "scale":
            return self.op("scale", a, factor=float(b))
        return self.op("shift", a, amount=float(b))

    def cast(self, x: Value, dtype: DType) -> Value:
        """Round to `dtype`: the only rounding points of a graph. A cast to its own type is none."""
        return x if x.type.dtype == dtype else self.op("cast", x, dtype=dtype.name)

    def quantise(self, x: Value, target: ElementType) -> Value:
        """Round to the groups of an activation format: a rounding point like `cast`."""
        return self.op("quantise", x, dtype=str(target))

    def linear(self, x: Value, w: Value, *, name: str = "linear") -> Value:
        """x [.., k] times w [n, k] transposed."""
        return self.op("linear", x, w, name=name)

    def rms_norm(self, x: Value, w: Value, *, eps: float, name: str = "rms_norm") -> Value:
        """x / sqrt(mean(x^2) + eps) * w over the last axis."""
        return self.op("rms_norm", x, w, name=name, eps=float(eps))

    def silu(self, x: Value) -> Value:
        """x * sigmoid(x)."""
        return self.op("silu", x)

    def append(
        self, cache: Value, x: Value, slots: Value, *, name: str = "append", op: str = "append"
    ) -> Value:
        """Store rows of x in the cache (`op` append or append_rows); returns its next content."""
        owner = next((s for s, v in self._next_state.items() if v == cache.name), None)
        if owner is None:
            have = ", ".join(self._next_state.values()) or "none"
            raise ShapeError(
                f"append '{name}': stores into a value that is not the newest of a state: "
                f"got '{cache.name}', want one of {have} ({_origin()})"
            )
        result = self.op(op, cache, x, slots, name=name)
        self._next_state[owner] = result.name
        return result

    def output(self, name: str, value: Value) -> None:
        """Declare a value the caller gets after every step."""
        self._outputs.append((name, value.name))

    def build(self) -> Graph:
        """Return the graph."""
        return Graph(
            name=self._name,
            dims=tuple(self._dims.values()),
            inputs=tuple(self._inputs),
            states=tuple(self._states),
            weights=tuple(w for w, _ in self._weights.values()),
            nodes=tuple(self._nodes),
            outputs=tuple(self._outputs),
            state_outputs=tuple(self._next_state.items()),
            groups=(),
        )

    def _weight(self, name: str, type_: TensorType, expr: WeightExpr) -> Value:
        if name in self._weights:
            weight, value = self._weights[name]
            if (weight.type, weight.expr) != (type_, expr):
                raise ShapeError(
                    f"weight '{name}': declared twice: got {type_}, want {weight.type} "
                    f"({_origin()})"
                )
            return value
        value = Value(self, self._claim(name), type_)
        self._weights[name] = (Weight(name, type_, expr), value)
        return value

    def _claim(self, name: str) -> str:
        if name in self._taken:
            raise ShapeError(f"value '{name}': declared twice ({_origin()})")
        self._taken.add(name)
        return name

    def _unique(self, stem: str) -> str:
        base = ".".join((*self._scope, stem))
        name, count = base, 1
        while name in self._taken:
            name, count = f"{base}_{count}", count + 1
        self._taken.add(name)
        return name


def _origin() -> str:
    """Return folder/file:line of the nearest caller outside this file."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    path = PurePath(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


__all__ = ["GraphBuilder", "Group", "Value"]
