"""One kernel with operands of its own and what it must give: for kernels that run here (Triton's
interpreter) and for those that run on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from support.weights import RandomWeights
from tilewright.codegen.arguments import argument_names, int_names
from tilewright.codegen.body import Body, extract, memory_type
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack import PACKINGS, pack_weight
from tilewright.codegen.pack_gpu import pack_matrix
from tilewright.codegen.pipeline import lower
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node, Weight, WeightExpr
from tilewright.graph.dims import evaluate
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.ops.quant import quantise_dequantise
from tilewright.graph.reference import HONOUR_CASTS, Precision, run_node
from tilewright.graph.types import BlockFormat, TensorType
from tilewright.targets.nvidia.hopper_contract import CONTRACT_HOPPER

WIDE = Precision(torch.float64, honour_casts=True)
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}
POISON = float("nan")

__all__ = ["HONOUR_CASTS", "Case", "distinct_bodies", "make_case"]


@dataclass(frozen=True)
class Case:
    """Arguments by name as they lie in memory (outputs poisoned), ints, and expected values."""

    arguments: Mapping[str, torch.Tensor]
    dims: Mapping[str, int]
    expected: Mapping[str, torch.Tensor]  # outputs and states after the launch, fp64 or int

    def fresh(self) -> dict[str, torch.Tensor]:
        """Copies of the arguments, for one run."""
        return {name: tensor.clone() for name, tensor in self.arguments.items()}


def distinct_bodies(graph: Graph) -> list[tuple[str, str, Body]]:
    """Return (group, kind, body) of every kernel of a model."""
    lowered = lower(graph, Flags()).graph
    found: dict[str, tuple[str, str, Body]] = {}
    for group in lowered.groups:
        body = extract(lowered, group)
        found.setdefault(body.graph.digest + repr(body.buffers), (group.name, group.kind, body))
    return list(found.values())


def make_case(
    spec: KernelSpec,
    dims: Mapping[str, int],
    *,
    seed: int = 0,
    padded: int = 0,
    scale: float = 1.0,
    given: Mapping[str, torch.Tensor] | None = None,
) -> Case:
    """Draw operands; the last `padded` rows are padding: slot -1, position and request row 0.

    `given` replaces inputs by what a kernel of this kind can meet."""
    body, rng = spec.body, np.random.default_rng(seed)
    drawn = _with_stacks(body)
    weights = RandomWeights(drawn, seed=seed)
    found: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name in argument_names(body):
        type_ = body.type_of(name)
        if isinstance(type_.dtype, BlockFormat) and name in body.weight:
            found[name] = torch.from_numpy(_packed(drawn.weight[name], weights, spec))
            values[name] = weights.tensors()[name].double()
            continue
        shape = [evaluate(d, dims) for d in type_.shape]
        if name in dict(body.outputs).values():
            found[name] = _poison(spec.stored_type(name), dims)
            continue
        if given is not None and name in given:
            tensor = given[name]
        elif type_.dtype.name == "i32":
            tensor = torch.from_numpy(_indices(body, name, shape, dims, rng, padded))
        elif name in body.weight:
            tensor = weights.tensors()[name]
        else:
            tensor = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * scale)
        if isinstance(type_.dtype, BlockFormat):
            tensor = quantise_dequantise(tensor.float(), type_.dtype)
        tensor = tensor.to(TORCH[memory_type(body, name).dtype.name])
        stored = [evaluate(d, dims) for d in spec.stored_type(name).shape]
        found[name] = tensor.reshape(stored)
        values[name] = tensor.double() if tensor.is_floating_point() else tensor
    expected = _expected(spec, values)
    return Case(found, {n: dims[n] for n in int_names(body)}, expected)


def _with_stacks(body: Graph) -> Graph:
    """The body with a tensor for each matrix of a weight of rank 3."""
    found = []
    for w in body.weights:
        if w.type.rank == 3:
            parts = tuple(f"{w.name}.{i}" for i in range(int(w.type.shape[0])))
            w = replace(w, expr=WeightExpr("stack", parts))
        found.append(w)
    return replace(body, weights=tuple(found))


def _packed(weight: Weight, weights: RandomWeights, spec: KernelSpec) -> Any:
    """The matrices of a weight, one after the other, as the kernel reads them."""
    dtype = weight.type.dtype
    assert isinstance(dtype, BlockFormat)
    if spec.template == CONTRACT_HOPPER.name:
        return pack_weight(weight, PACKINGS["cuda"].layout(weight.type), weights).data
    parts = [pack_matrix(dtype, weights.unpacked(n, dtype)) for n in weight.expr.tensors]
    return np.concatenate(parts)


def _poison(type_: TensorType, dims: Mapping[str, int]) -> torch.Tensor:
    shape = [evaluate(d, dims) for d in type_.shape]
    dtype = TORCH[type_.dtype.name]
    return torch.full(shape, POISON if dtype.is_floating_point else -1, dtype=dtype)


def _indices(
    body: Graph, name: str, shape: list[int], dims: Mapping[str, int], rng: np.random.Generator,
    padded: int,
) -> Any:  # fmt: skip
    """Ints that fit the first node that reads them."""
    user: Node = body.node[body.users[name][0]]
    place = user.inputs.index(name)
    count = int(np.prod(shape))
    match user.op, place:
        case "attend", 3:
            numbers = rng.integers(0, dims["request_blocks"] * _block_size(body), count)
            numbers[0] = dims["request_blocks"] * _block_size(body) - 1
        case "attend", 4:
            numbers = rng.integers(0, dims["requests"], count)
        case "attend", 5:
            numbers = rng.permutation(count)
        case "append", 2:
            numbers = rng.permutation(dims["cache_blocks"] * _block_size(body))[:count]
        case ("embedding", 0) | ("gather_rows", 1):
            source = body.type_of(user.inputs[1 - place])
            numbers = rng.integers(0, evaluate(source.shape[0], dims), count)
        case _:
            numbers = rng.integers(0, 1000, count)
    if padded and shape[0] > padded and len(shape) == 1:
        numbers[-padded:] = -1 if user.op == "append" else 0
    return numbers.astype(np.int32).reshape(shape)


def _block_size(body: Graph) -> int:
    (size, *_) = [int(s.type.shape[2]) for s in body.states]
    return size


def _expected(spec: KernelSpec, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = dict(given)
    for node in spec.body.nodes:
        operands = [values[i] for i in node.inputs]
        if op_def(node.op).kind is Kind.STORE:
            kept = operands[2] >= 0
            operands[1:] = operands[1][kept], operands[2][kept]
        values[node.name] = run_node(node, operands, WIDE)
    outputs = {value: values[value] for _, value in spec.body.outputs}
    return outputs | {state: values[value] for state, value in spec.body.state_outputs}


def errors(case: Case, got: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, float]]:
    """Yield each result's largest error relative to the largest entry of its row."""
    for name, want in case.expected.items():
        have = got[name].reshape(want.shape)
        if not want.is_floating_point() or not have.is_floating_point():
            yield name, 0.0 if torch.equal(have.long(), want.long()) else float("inf")
            continue
        have = have.double()
        size = want.abs().nan_to_num(0.0, 0.0, 0.0)
        scale = size.amax(-1, keepdim=True) if want.dim() else size
        scale = scale.clamp(min=max(float(size.max()) * 1e-3, 1e-30)) if want.numel() else scale
        same = (have == want) | (have.isnan() & want.isnan())
        error = torch.where(same, 0.0, (have - want).abs() / scale)
        yield name, float(error.nan_to_num(float("inf")).max()) if want.numel() else 0.0
