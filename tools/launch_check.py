"""Compare single launches with the reference: the same inputs, the same casts, wide arithmetic.

differences.py says what may differ in floats and codes, selection_check.py what may in selections.
Integers are exact otherwise. States of block formats are compared by the values of rows written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.codegen.arguments import argument_names, int_names
from tilewright.codegen.body import Body, extract
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate
from tilewright.graph.reference import Precision, run_node
from tilewright.graph.types import BlockFormat
from tilewright.runtime.artifact import LaunchRecord
from tilewright.runtime.executor import as_torch
from tilewright.tools.differences import Difference, coded_difference, difference, exact, worse
from tilewright.tools.launch_weights import weight_values
from tilewright.tools.packed_rows import row_values
from tilewright.tools.selection_check import RANKINGS, SETS, choice_difference

Array = NDArray[Any]
Values = Mapping[str, torch.Tensor]

WIDE = Precision(torch.float64, honour_casts=True)


class LaunchCheck:
    """An observer of the executor that compares every launch with the reference."""

    def __init__(
        self, graph: Graph, launched: Callable[[], None] = lambda: None, *, packing: str = "cpu"
    ) -> None:
        """`graph`: the fused graph of the artifact. `launched` is called after every launch.
        `packing`: whose kernels read the weights, one of launch_weights.PACKED_FOR.
        """
        self._graph = graph
        self._packing = packing
        self._groups = {g.name: g for g in graph.groups}
        self._launched = launched
        self._bodies: dict[str, Body] = {}
        self._before: list[Array] = []
        self.worst: dict[str, Difference] = {}

    def before(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Keep what the launch may overwrite."""
        body = self._body(launch).graph
        named = zip(argument_names(body), tensors, strict=False)  # a workspace may follow
        self._before = [array if name in body.weight else array.copy() for name, array in named]

    def after(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Compute the launch from what it was given, and compare all it wrote."""
        body = self._body(launch)
        graph, names = body.graph, argument_names(body.graph)
        dims = dict(zip(int_names(graph), ints, strict=True))
        given = dict(zip(names, self._before, strict=True))
        values = _reference(graph, given, dims, packing=self._packing)
        now = dict(zip(names, tensors, strict=False))
        results = [(value, value) for _, value in graph.outputs] + list(graph.state_outputs)
        found = []
        for argument, value in results:
            got = _given(graph, argument, now[argument], dims, packing=self._packing)
            found.append(_compared(graph, argument, value, got, values))
        self._note(launch, found)
        self._before = []
        self._launched()

    def _body(self, launch: LaunchRecord) -> Body:
        if launch.group not in self._bodies:
            self._bodies[launch.group] = extract(self._graph, self._groups[launch.group])
        return self._bodies[launch.group]

    def _note(self, launch: LaunchRecord, results: Sequence[Difference]) -> None:
        found = replace(functools.reduce(worse, results), kernel=launch.kernel,
                        group=launch.group, num_launches=1)  # fmt: skip
        before = self.worst.get(launch.kernel)
        self.worst[launch.kernel] = found if before is None else worse(before, found)


def _compared(
    graph: Graph, argument: str, value: str, got: torch.Tensor, values: Values
) -> Difference:
    """Compare one result of a body: `argument` is the state it goes to, or `value` itself."""
    node, want, dtype = graph.node[value], values[value], graph.type_of(value).dtype
    if node.op in (*RANKINGS, *SETS):
        return choice_difference(node, [values[i] for i in node.inputs], got, want)
    if not isinstance(dtype, BlockFormat):
        return difference(got, want, rounds=_rounds(graph))
    if argument != value:
        old = values[argument]
        written = _differ(want, old).any(-1)
        if bool(_differ(got, old).any(-1)[~written].any()):
            return exact(False)  # a row that was not to be written
        got, want = got[written], want[written]
    return coded_difference(got, want, dtype)


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def _rounds(body: Graph) -> bool:
    """Say whether a kernel rounds to bf16 or less, or reads what was rounded."""
    return any(
        str(t.dtype) == "bf16" or isinstance(t.dtype, BlockFormat) for n, t in body.types.items()
        if n not in body.weight or str(t.dtype) == "bf16"
    )  # fmt: skip


def _reference(
    body: Graph, given: Mapping[str, Array], dims: Mapping[str, int], *, packing: str
) -> Values:
    """Run the body's nodes on what the launch was given; return all values."""
    outputs = {value for _, value in body.outputs}
    values = {
        name: _given(body, name, array, dims, packing=packing)
        for name, array in given.items()
        if name not in outputs
    }
    for node in body.nodes:
        values[node.name] = run_node(node, [values[i] for i in node.inputs], WIDE)
    return values


def _given(
    body: Graph, name: str, array: Array, dims: Mapping[str, int], *, packing: str
) -> torch.Tensor:
    """Return an argument's values in the shape the body sees, floats as fp64."""
    type_ = body.type_of(name)
    weight = weight_values(body, name, array, packing=packing)
    if weight is not None:
        return torch.from_numpy(weight)
    shape, dtype = [evaluate(d, dims) for d in type_.shape], str(type_.dtype)
    if isinstance(type_.dtype, BlockFormat):
        if array.dtype == np.uint8:  # a state: packed rows
            rows = row_values(type_.dtype, array, shape[-1])
            return torch.from_numpy(rows).double().reshape(shape)
        dtype = "bf16"  # between kernels, which holds the values exactly
    tensor = as_torch(array, dtype).reshape(shape)
    return tensor.double() if tensor.is_floating_point() else tensor
