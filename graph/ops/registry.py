"""Op definitions: the record that says what an op is, and the table of all ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from tilewright.graph.dims import Dim
from tilewright.graph.errors import ShapeError
from tilewright.graph.ir import Attrs
from tilewright.graph.scalar import Scalar
from tilewright.graph.types import TensorType

if TYPE_CHECKING:
    import torch

Types: TypeAlias = Sequence[TensorType]
Infer: TypeAlias = Callable[[Types, Attrs], TensorType]
Touched: TypeAlias = Callable[[Types, TensorType, Attrs], Dim]


class Kind(Enum):
    """Families of ops, by how their outputs depend on their inputs."""

    ELEMENTWISE = "elementwise"  # one output element from the same element of each operand
    REDUCE = "reduce"  # sums or maxima over the last axis
    LAYOUT = "layout"  # moves elements, computes nothing
    CONTRACT = "contract"  # sums of products over a shared axis
    ATTEND = "attend"  # softmax-weighted sums over cached entries
    GATHER = "gather"  # rows chosen by integer indices
    SELECT = "select"  # positions of the largest entries of a row
    ROW = "row"  # a routine over a whole row of each operand, in an order of its own
    STORE = "store"  # a new state value: disjoint slots overwritten
    COMPOSITE = "composite"  # defined by other ops; gone after `decompose`


ROUNDING_OPS = ("cast", "quantise")  # no pass may add, move or remove one


@dataclass(frozen=True)
class OpDef:
    """What an op means: type rule, torch reference, cost; `attrs` gives the type of each attribute.

    `reference(inputs, attrs)` computes in the dtype of its floating inputs (fp32 or fp64).
    `scalar(attrs, *operands)` is the lowering of an elementwise op. `expand(builder, inputs,
    attrs)` is the definition of a composite op. `reduced_axes` lists, per operand, the axes summed
    over. `far`: operands of which a result row reads other rows than its own. `touched`: by
    operand, the bytes an op reads of it (a store: writes), where that is not the whole of it.
    """

    name: str
    kind: Kind
    num_inputs: int
    infer: Infer
    reference: Callable[[Sequence[torch.Tensor], Attrs], torch.Tensor]
    flops: Callable[[Types, TensorType, Attrs], Dim]
    attrs: Mapping[str, type] = field(default_factory=dict)
    scalar: Callable[..., Scalar] | None = None
    expand: Callable[..., Any] | None = None
    reduced_axes: tuple[tuple[int, ...], ...] = ()
    far: tuple[int, ...] = ()
    touched: Mapping[int, Touched] = field(default_factory=dict)
    doc: str = ""

    def bytes_of(self, index: int, inputs: Types, output: TensorType, attrs: Attrs) -> Dim:
        """Bytes that the op touches of one operand."""
        if index in self.touched:
            return self.touched[index](inputs, output, attrs)
        return inputs[index].num_bytes

    def checked_type(self, inputs: Types, attrs: Attrs) -> TensorType:
        """Return the output type; raise ShapeError for a wrong operand, attribute or shape."""
        if len(inputs) != self.num_inputs:
            raise ShapeError(f"wrong number of operands: got {len(inputs)}, want {self.num_inputs}")
        for name in dict.fromkeys((*attrs, *self.attrs)):
            if name not in self.attrs:
                known = ", ".join(self.attrs) or "none"
                raise ShapeError(f"unknown attribute: got {name}, want {known}")
            if name not in attrs:
                have = ", ".join(attrs) or "none"
                raise ShapeError(f"attribute missing: got {have}, want {name}")
            if type(attrs[name]) is not self.attrs[name]:
                want = self.attrs[name].__name__
                got = type(attrs[name]).__name__
                raise ShapeError(f"attribute '{name}' has the wrong type: got {got}, want {want}")
            if attrs[name] != attrs[name]:
                raise ShapeError(f"attribute '{name}' is not a number: got nan, want a float")
        return self.infer(inputs, attrs)


OPS: dict[str, OpDef] = {}


def register(op: OpDef) -> OpDef:
    """Add an op to `OPS`; two ops of one name are a defect of ours."""
    assert op.name not in OPS, op.name
    OPS[op.name] = op
    return op


def op_def(name: str) -> OpDef:
    """Return the definition of an op; raise ShapeError listing the known ones."""
    if name not in OPS:
        raise ShapeError(f"op '{name}': unknown: have {', '.join(sorted(OPS))}")
    return OPS[name]


def floats(*operands: TensorType) -> None:
    """Raise ShapeError unless every operand is floating point."""
    for operand in operands:
        want(operand.dtype.is_float, f"operand is not floating point: got {operand}, want floats")


def want(condition: object, problem: str) -> None:
    """Raise ShapeError with `problem` unless the condition holds."""
    if not condition:
        raise ShapeError(problem)
