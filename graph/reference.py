"""The reference interpreter: runs a graph op by op with torch. It is the living definition.

Modes: `ideal` computes every op in one wide dtype (fp32 or fp64) and treats casts as the identity;
`honour_casts` also rounds at cast nodes, as compiled kernels do. Both are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tilewright.graph.errors import VerifyError
from tilewright.graph.ir import Graph, Node, WeightExpr
from tilewright.graph.ops import ROUNDING_OPS, op_def

Tensors = Mapping[str, torch.Tensor]
Observer = Callable[[Node, torch.Tensor], None]


@dataclass(frozen=True)
class Precision:
    """Dtype computed in, and whether cast nodes round."""

    dtype: torch.dtype = torch.float64
    honour_casts: bool = False


IDEAL_F64 = Precision()
IDEAL_F32 = Precision(torch.float32)
HONOUR_CASTS = Precision(torch.float32, honour_casts=True)


@dataclass(frozen=True)
class Result:
    """Outputs by public name, next states by state name, and every value asked for."""

    outputs: Tensors
    states: Tensors
    values: Tensors


def run(
    graph: Graph,
    inputs: Tensors,
    *,
    states: Tensors,
    weights: Tensors,
    precision: Precision = IDEAL_F64,
    observe: Observer | None = None,
    keep_values: bool = False,
) -> Result:
    """Run one step.

    `inputs`, `states` and `weights` are tensors by name, weights already dequantised. Raises
    VerifyError for a missing one. `observe` is called with every node and its value.
    """
    values: dict[str, torch.Tensor] = {}
    for kind, declared, given in (
        ("input", graph.inputs, inputs),
        ("state", graph.states, states),
        ("weight", [w for w in graph.weights if w.expr.kind != "literal"], weights),
    ):
        for item in declared:
            if item.name not in given:
                have = ", ".join(given) or "none"
                raise VerifyError(f"{kind} '{item.name}': not given: have {have}")
            values[item.name] = _widened(given[item.name], precision.dtype)
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    for weight in graph.weights:
        if weight.expr.kind == "literal":
            values[weight.name] = literal(weight.expr, precision.dtype).to(device)
    last_use = {} if keep_values else _last_uses(graph)
    for index, node in enumerate(graph.nodes):
        values[node.name] = run_node(node, [values[i] for i in node.inputs], precision)
        if observe:
            observe(node, values[node.name])
        for name in last_use.get(index, ()):
            del values[name]
    return Result(
        outputs={public: values[value] for public, value in graph.outputs},
        states={state: values[value] for state, value in graph.state_outputs},
        values=values if keep_values else {},
    )


def run_node(node: Node, inputs: list[torch.Tensor], precision: Precision) -> torch.Tensor:
    """Apply one node's reference to operands already in the dtype computed in."""
    if node.op in ROUNDING_OPS:
        inputs = [inputs[0].to(precision.dtype)]  # an integer becomes a float here
        if not precision.honour_casts:
            return inputs[0]
    return op_def(node.op).reference(inputs, node.attr)


def literal(expr: WeightExpr, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a literal weight, rounded to fp32 first as kernels store it."""
    return torch.tensor(expr.args, dtype=torch.float32).to(dtype)


def _widened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _last_uses(graph: Graph) -> dict[int, list[str]]:
    """Map node index to the values nobody reads after it, so that big graphs stay in memory."""
    kept = graph.output_values | {w.name for w in graph.weights}
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for name in (node.name, *node.inputs):
            last[name] = index
    freed: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept:
            freed.setdefault(index, []).append(name)
    return freed
