"""An observer of steps: compares every launch with the reference on what the launch was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from support.rows import unpack_rows
from tilewright.codegen.arguments import argument_names, int_names
from tilewright.codegen.body import Body, extract
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate
from tilewright.graph.reference import Precision, literal, run_node
from tilewright.graph.types import BlockFormat
from tilewright.runtime.artifact import LaunchRecord

Array = NDArray[Any]
Tensors = Mapping[str, torch.Tensor]
WIDE = Precision(torch.float64, honour_casts=True)


@dataclass
class Found:
    """How far one launch's results are from the reference: of each, the part of its values that
    differ by more than a thousandth of their row's largest, and the largest such difference."""

    group: str
    kernel: str
    value: str
    part: float
    worst: float


@dataclass
class StepCheck:
    """Compares launches of a fused graph; `weights` are values by name in the model's graph."""

    graph: Graph
    weights: Tensors
    found: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._groups = {g.name: g for g in self.graph.groups}
        self._before: dict[str, Array] = {}

    def before(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        body = extract(self.graph, self._groups[launch.group]).graph
        outputs = {value for _, value in body.outputs}
        self._before = {
            name: array.copy()
            for name, array in zip(argument_names(body), tensors, strict=False)
            if name not in body.weight and name not in outputs
        }

    def after(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        body = extract(self.graph, self._groups[launch.group])
        graph = body.graph
        dims = dict(zip(int_names(graph), ints, strict=True))
        now = dict(zip(argument_names(graph), tensors, strict=False))
        values = {n: given(body, n, a, dims) for n, a in self._before.items()}
        values |= {w.name: self._weight(body, w.name) for w in graph.weights}
        with np.errstate(all="ignore"):
            for node in graph.nodes:
                values[node.name] = run_node(node, [values[i] for i in node.inputs], WIDE)
        results = [(value, value) for _, value in graph.outputs] + list(graph.state_outputs)
        for argument, value in results:
            self._note(launch, argument, given(body, argument, now[argument], dims), values[value])

    def _weight(self, body: Body, name: str) -> torch.Tensor:
        model = body.binding[name]
        expr = self.graph.weight[model].expr
        tensor = literal(expr, torch.float64) if expr.kind == "literal" else self.weights[model]
        return tensor.double() if tensor.is_floating_point() else tensor

    def _note(self, launch: LaunchRecord, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not want.is_floating_point():
            part = float((got.long() != want.long()).double().mean()) if want.numel() else 0.0
            self.found.append(Found(launch.group, launch.kernel, name, part, part))
            return
        same = (got == want) | (got.isnan() & want.isnan())
        size = torch.where(want.isfinite(), want.abs(), 0.0)
        scale = size.amax(-1, keepdim=True).clamp_min(1e-30).expand_as(want)
        error = torch.where(same, 0.0, ((got - want).abs() / scale).nan_to_num(nan=torch.inf))
        part = float((error > 1e-3).double().mean()) if want.numel() else 0.0
        worst = float(error.max()) if want.numel() else 0.0
        self.found.append(Found(launch.group, launch.kernel, name, part, worst))


def given(body: Body, name: str, array: Array, dims: Mapping[str, int]) -> torch.Tensor:
    """Return an argument's values in the shape the body sees, floats as fp64."""
    type_ = body.graph.type_of(name)
    shape = [evaluate(d, dims) for d in type_.shape]
    if isinstance(type_.dtype, BlockFormat) and name in body.graph.state:
        flat = np.asarray(array).reshape(-1, type_.dtype.row_bytes(shape[-1]))
        return torch.from_numpy(unpack_rows(flat, type_.dtype, shape[-1])).double().reshape(shape)
    data = np.ascontiguousarray(array)
    if isinstance(type_.dtype, BlockFormat) or str(type_.dtype) == "bf16":
        bits = data.view(np.uint16).astype(np.uint32) << 16
        return torch.from_numpy(bits.view(np.float32).copy()).double().reshape(shape)
    tensor = torch.from_numpy(data.copy()).reshape(shape)
    return tensor.double() if tensor.is_floating_point() else tensor
