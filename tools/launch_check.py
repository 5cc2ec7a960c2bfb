"""Compare single launches with the reference: the same inputs, the same casts, wide arithmetic.

An error is measured against the largest entry of its row: entries of a row are sums of terms that
may cancel, and rounding is relative to the terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilewright.codegen.arguments import argument_names, int_names, matrix_weights
from tilewright.codegen.body import Body, extract
from tilewright.codegen.emit.cpp_types import panel_format
from tilewright.codegen.pack_cpu import Unpacked, unpack_panels
from tilewright.codegen.pack_gpu import unpack_blocks
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate
from tilewright.graph.reference import Precision, run_node
from tilewright.graph.types import BlockFormat, TensorType
from tilewright.runtime.artifact import LaunchRecord
from tilewright.runtime.executor import as_torch

Array = NDArray[Any]
Unpack = Callable[[TensorType, Array], Unpacked | None]

WIDE = Precision(torch.float64, honour_casts=True)
TOLERANCE_F32 = 1e-4
TOLERANCE_BF16 = 2.0**-7  # one value may round to its other neighbour: a step of 2^-8 to 2^-7
FLOOR = 1e-3  # of a tensor's largest entry: rows smaller than this are measured against it


@dataclass(frozen=True)
class Difference:
    """The worst error of a kernel over its launches.

    `absolute`; `relative` to the largest entry of the row; `units`: absolute in steps of bf16 at
    that entry, None where the kernel rounds nothing to bf16.
    """

    kernel: str
    group: str
    num_launches: int
    absolute: float
    relative: float
    units: float | None
    tolerance: float

    @property
    def is_within(self) -> bool:
        return self.relative <= self.tolerance


class LaunchCheck:
    """An observer of the executor that compares every launch with the reference."""

    def __init__(
        self, graph: Graph, launched: Callable[[], None] = lambda: None, *, on_gpu: bool = False
    ) -> None:
        """`graph`: the fused graph of the artifact. `launched` is called after every launch.
        `on_gpu`: whether weights are packed as GPU kernels read them.
        """
        self._graph = graph
        self._unpack = unpack_gpu if on_gpu else unpack_cpu
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
        wanted = _reference(body, dict(zip(names, self._before, strict=True)), dims, self._unpack)
        now = dict(zip(names, tensors, strict=False))
        results = [(value, value) for _, value in graph.outputs] + list(graph.state_outputs)
        found = [
            difference(_given(body, argument, now[argument], dims, self._unpack), wanted[value],
                       rounds=_rounds(body.graph))
            for argument, value in results
        ]  # fmt: skip
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


def _rounds(body: Graph) -> bool:
    """Say whether a kernel rounds to bf16, or reads what was rounded."""
    return any(str(t.dtype) == "bf16" for t in body.types.values())


def worse(a: Difference, b: Difference) -> Difference:
    """Return the worst of both; group and tolerance are those of the larger relative error."""
    known = [u for u in (a.units, b.units) if u is not None]
    units = max(known, default=None)
    larger = a if (not a.is_within, a.relative) >= (not b.is_within, b.relative) else b
    return replace(
        larger, num_launches=a.num_launches + b.num_launches, units=units,
        absolute=max(a.absolute, b.absolute),
    )  # fmt: skip


def difference(got: torch.Tensor, want: torch.Tensor, *, rounds: bool) -> Difference:
    """Compare one result; integers must be equal, and what is not finite must be the same."""
    empty = Difference("", "", 1, 0.0, 0.0, 0.0 if rounds else None, 0.0)
    if not want.is_floating_point():
        wrong = 0.0 if torch.equal(got.long(), want.long()) else math.inf
        return replace(empty, absolute=wrong, relative=wrong, units=None)
    tolerance = TOLERANCE_BF16 if rounds else TOLERANCE_F32
    if want.numel() == 0:
        return replace(empty, tolerance=tolerance)
    same = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    size = torch.where(want.isfinite(), want.abs(), 0.0)
    scale = size.amax(-1, keepdim=True) if want.dim() else size
    scale = scale.clamp(min=max(float(size.max()) * FLOOR, 1e-30)).expand_as(error)
    units = float((error / torch.exp2(scale.log2().floor() - 7)).max()) if rounds else None
    return replace(empty, absolute=float(error.max()), relative=float((error / scale).max()),
                   units=units, tolerance=tolerance)  # fmt: skip


def _reference(
    body: Body, given: Mapping[str, Array], dims: Mapping[str, int], unpack: Unpack
) -> Mapping[str, torch.Tensor]:
    """Run the body's nodes on what the launch was given."""
    outputs = {value for _, value in body.graph.outputs}
    values = {
        name: _given(body, name, array, dims, unpack)
        for name, array in given.items()
        if name not in outputs
    }
    for node in body.graph.nodes:
        values[node.name] = run_node(node, [values[i] for i in node.inputs], WIDE)
    return values


def _given(
    body: Body, name: str, array: Array, dims: Mapping[str, int], unpack: Unpack
) -> torch.Tensor:
    """Return an argument's values in the shape the body sees, floats as fp64."""
    type_ = body.graph.type_of(name)
    if name in matrix_weights(body.graph):
        found = unpack(type_, array)
        if found is not None:
            return torch.from_numpy(dequantised(found))
    shape = [evaluate(d, dims) for d in type_.shape]
    tensor = as_torch(array, str(type_.dtype)).reshape(shape)
    return tensor.double() if tensor.is_floating_point() else tensor


def unpack_cpu(type_: TensorType, packed: Array) -> Unpacked | None:
    """Return a weight [n, k] out of its panels."""
    n, k = (evaluate(d, {}) for d in type_.shape)
    return unpack_panels(panel_format(type_.dtype), packed.reshape(-1), n, k)


def unpack_gpu(type_: TensorType, packed: Array) -> Unpacked | None:
    """Return a weight [n, k] out of its blocks, None if it lies row by row."""
    if not isinstance(type_.dtype, BlockFormat):
        return None
    n, k = (evaluate(d, {}) for d in type_.shape)
    return unpack_blocks(type_.dtype.name, packed.reshape(-1), n, k)


def dequantised(found: Unpacked) -> NDArray[np.float64]:
    """Return the values of a weight [n, k]: exact, block scales applied."""
    if found.values is not None:
        values = found.values
        if values.dtype == np.uint16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float64)
    assert found.codes is not None and found.d is not None
    group = found.codes.shape[1] // found.d.shape[1]
    result = found.codes * np.repeat(found.d.astype(np.float64), group, axis=1)
    return result if found.m is None else result + np.repeat(found.m.astype(np.float64), group, 1)
