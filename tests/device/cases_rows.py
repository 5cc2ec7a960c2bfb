"""Row kernels of paged models for a machine with a GPU: those of small graphs are checked against
the bits of Triton's interpreter, those of the released sizes are timed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from device.cases_contract import DeviceCase
from support.deepseek import v4_graph, v41_graph
from support.kernel_case import Case
from support.row_graphs import append_graph, close_graph, exact_graph
from support.triton_rows import arguments_of, named_row_bodies, row_case, row_spec, run_interpreted
from tilewright.codegen.arguments import int_names
from tilewright.codegen.body import Body
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BF16, BlockFormat, TensorType
from tilewright.models.known_config import open_config, released_formats
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import family_of

ROWS = 9
ROWS_TIMED = (1, 32, 128, 1024, 4096)
LIMITS = Limits(max_tokens=4096, max_requests=4096, max_logit_rows=4096, max_context=1 << 17)
SMALL: dict[str, Callable[[], Graph]] = {
    "ops exact": exact_graph, "ops append": append_graph, "ops close": close_graph,
    "v4": lambda: v4_graph(hc_sinkhorn_iters=4), "v41": lambda: v41_graph(hc_sinkhorn_iters=4),
}  # fmt: skip
RELEASED = ("deepseek-v4.1-flash", "deepseek-v4-flash")


def row_cases(target: Any, *, timed: bool = True) -> Iterator[DeviceCase]:
    """Every row kernel of the small graphs and of the released sizes, in all schedules."""
    for label, build in SMALL.items():
        model = build()
        for name, body in named_row_bodies(model):
            specs = _specs(body)
            yield DeviceCase("rows", f"{label} {name}", specs, partial(_case, body, model, specs))
    for label in RELEASED if timed else ():
        for name, body in named_row_bodies(released(label)):
            specs = _specs(body)
            yield DeviceCase(f"rows {label}", name, specs, None, _facts(specs[0]))


def released(name: str) -> Graph:
    """The graph of a released configuration, with weights as its checkpoint stores them."""
    _, config = open_config(name)
    family = family_of(config)
    read: Any = family.read_config(config)
    plain = family.build(name, read, Formats({}, BF16), LIMITS)
    stored = released_formats(config, plain, BF16)
    return family.build(name, read, Formats(stored, BF16), LIMITS)


def _specs(body: Body) -> list[KernelSpec]:
    return [row_spec(body, choice) for choice in range(4)]


def _case(body: Body, model: Graph, specs: list[KernelSpec]) -> Case:
    """Operands, and results of the interpreter, which has the bits of the chip."""
    case = row_case(body, model, ROWS, seed=7)
    results = [*(v for _, v in body.graph.outputs), *(s for s, _ in body.graph.state_outputs)]
    with tempfile.TemporaryDirectory() as folder:
        got = run_interpreted(case, Path(folder))
    dims = {n: case.step.dims[n] for n in int_names(body.graph)}
    return Case(arguments_of(case, specs[0]), dims, {name: got[name] for name in results})


def _facts(spec: KernelSpec) -> dict[str, Any]:
    """Bytes that a row reads and writes, but for rows of other tokens; ids of experts."""
    body = spec.body
    row = body.outputs[0][1] if body.outputs else ""
    tokens = body.type_of(row).shape[0] if row else body.inputs[0].type.shape[0]
    total = 0
    for name in (*(v for _, v in body.outputs), *(i.name for i in body.inputs)):
        type_ = spec.stored_type(name)
        if type_.shape and type_.shape[0] == tokens:
            total += math.prod(int(d) for d in type_.shape[1:]) * type_.dtype.bits // 8
    for node in body.nodes:
        if op_def(node.op).kind is Kind.STORE:
            total += _row_bytes(body.type_of(node.inputs[0]))
    ids = {
        n.inputs[1]: int(body.type_of(n.inputs[0]).shape[-1])
        for n in body.nodes
        if n.op == "gather_last"
    }
    return {"rows": ROWS_TIMED, "bytes_per_row": total, "ids": ids}


def _row_bytes(state: TensorType) -> int:
    width = int(state.shape[-1])
    if isinstance(state.dtype, BlockFormat):
        return state.dtype.row_bytes(width)
    return width * state.dtype.bits // 8
