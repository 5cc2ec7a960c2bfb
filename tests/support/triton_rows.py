"""Row kernels of paged models in Triton's interpreter: one body with a step of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from support import triton_run
from support.rows import Step, pack_rows, paged_step, run_expected
from support.weights import RandomWeights
from support.zoo import joined
from tilewright.codegen.arguments import ancestors, argument_names, int_names
from tilewright.codegen.body import Body, extract, memory_type, root_of
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pack import pack_weight
from tilewright.codegen.pipeline import lower
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.dims import evaluate
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.reference import Result
from tilewright.graph.types import I32, BlockFormat, TensorType
from tilewright.targets.registry import resolve

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "u8": torch.uint8}
TARGET = resolve("sm90")[0]
TEMPLATE = next(t for t in TARGET.kernels if t.kind == "row")


def named_row_bodies(graph: Graph) -> list[tuple[str, Body]]:
    """Distinct bodies of the row kernels of a model, with the names of their first groups."""
    fused = lower(graph, Flags(), beside=True).graph
    found: dict[str, tuple[str, Body]] = {}
    for group in fused.groups:
        if group.kind == "row":
            body = extract(fused, group)
            found.setdefault(body.graph.digest + repr(body.buffers), (group.name, body))
    return list(found.values())


def prologue_bodies(graph: Graph) -> list[tuple[str, Body]]:
    """What makes the activations of contractions, as row kernels of their own."""
    fused = lower(graph, Flags(), beside=True).graph
    found: dict[str, tuple[str, Body]] = {}
    for group in (g for g in fused.groups if g.kind == "contract"):
        body = extract(fused, group)
        anchor = next(n for n in body.graph.nodes if op_def(n.op).kind is Kind.CONTRACT)
        if anchor.inputs[0] in body.graph.node:
            part = _only(body, root_of(body.graph, anchor.inputs[0]))
            found.setdefault(part.graph.digest, (group.name, part))
    return list(found.values())


def _only(body: Body, value: str) -> Body:
    """The part of a body that computes one value, which leaves it."""
    graph, names = body.graph, ancestors(body.graph, value)
    nodes = tuple(graph.node[n] for n in names)
    read = {i for n in nodes for i in n.inputs}
    part = replace(
        graph, name="row", nodes=nodes, outputs=((value, value),), state_outputs=(),
        inputs=tuple(i for i in graph.inputs if i.name in read),
        states=tuple(s for s in graph.states if s.name in read),
        weights=tuple(w for w in graph.weights if w.name in read),
    )  # fmt: skip
    binding = {n: b for n, b in body.binding.items() if n in read} | {value: value}
    stored = memory_type(graph, value)
    buffers = *((n, t) for n, t in body.buffers if n in read), (value, stored)
    return Body(part, binding, {n: n for n in names}, buffers)


def row_bodies(graph: Graph) -> list[Body]:
    return [body for _, body in named_row_bodies(graph)]


def text_of(spec: KernelSpec) -> str:
    return emit(spec, TEMPLATE).text


def row_spec(body: Body, choice: int = 0) -> KernelSpec:
    """The spec of a row body in one of its schedules."""
    refused = TEMPLATE.accepts(body.graph)
    assert refused is None, refused
    numerics = derive("row", body.graph, TARGET)
    schedule = TEMPLATE.schedules(body.graph, numerics, 1)[choice]
    return KernelSpec("row", body.graph, TEMPLATE.name, numerics, schedule, body.buffers)


@dataclass(frozen=True)
class RowCase:
    """A body as a graph of its own, a step of it, and its weights."""

    body: Body
    graph: Graph
    step: Step
    weights: RandomWeights
    names: Mapping[str, str]  # argument -> name in the graph

    def expected(self, *, wide: bool = False) -> Result:
        return run_expected(self.graph, self.step, self.weights, wide=wide)


def row_case(body: Body, model: Graph, rows: int, seed: int) -> RowCase:
    """Draw a step of `rows` tokens, some of which are padding."""
    graph = joined([body], model)
    ints = {i.name for i in model.inputs if i.type.dtype == I32}
    names = {v: body.binding[v] if body.binding.get(v) in ints else f"b0.{v}"
             for v in argument_names(body.graph)}  # fmt: skip
    return RowCase(body, graph, paged_step(graph, rows, seed), RandomWeights(graph), names)


def arguments_of(case: RowCase, spec: KernelSpec) -> dict[str, torch.Tensor]:
    """Arguments as they lie in memory, outputs poisoned."""
    body, found = case.body.graph, dict[str, torch.Tensor]()
    weights = case.weights.tensors()
    for name in argument_names(body):
        public, stored = case.names[name], spec.stored_type(name)
        if name in {value for _, value in body.outputs}:
            found[name] = _poison(stored, case.step.dims)
        elif name in body.state:
            found[name] = in_memory(case.step.states[public], body.state[name].type)
        elif name in body.weight and isinstance(stored.dtype, BlockFormat):
            packed = pack_weight(case.graph.weight[public], "scaled_rows", case.weights).data
            found[name] = torch.from_numpy(packed)
            continue
        elif name in body.weight:
            found[name] = weights[public].to(TORCH[stored.dtype.name])
        else:
            found[name] = case.step.inputs[public].to(TORCH[stored.dtype.name])
        shape = [evaluate(d, case.step.dims) for d in stored.shape]
        found[name] = found[name].reshape(shape).contiguous()
    return found


def _poison(type_: TensorType, dims: Mapping[str, int]) -> torch.Tensor:
    dtype = TORCH[type_.dtype.name]
    shape = [evaluate(d, dims) for d in type_.shape]
    return torch.full(shape, float("nan") if dtype.is_floating_point else -77, dtype=dtype)


def in_memory(values: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """A state as it lies in memory."""
    if isinstance(type_.dtype, BlockFormat):
        packed = pack_rows(values.flatten(0, -2).numpy(), type_.dtype)
        return torch.from_numpy(packed).reshape(*values.shape[:-1], -1)
    return values.to(TORCH[type_.dtype.name])


def run_interpreted(case: RowCase, folder: Path, choice: int = 0) -> dict[str, torch.Tensor]:
    """Run a body's kernel; outputs and states as they lie in memory."""
    spec = row_spec(case.body, choice)
    module: Any = triton_run.load(text_of(spec), spec.symbol, folder)
    arguments = arguments_of(case, spec)
    ints = {n: case.step.dims[n] for n in int_names(case.body.graph)}
    triton_run.run(module, arguments, ints)
    return arguments
