"""Emitter for TileLang's Ascend dialect: contractions. A source is a Python module that builds its
kernels, with the AscendC of the prologue and the host side as text; the toolchain prints the rest.
Parameters are named by their place, so that kernels of equal shapes are equal texts, printed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.arguments import ancestors
from tilewright.codegen.body import root_of
from tilewright.codegen.emit.ascendc import row_program
from tilewright.codegen.emit.ascendc_host import Launch, entry
from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.expr import prelude, print_scalar
from tilewright.codegen.sections import sections_of
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Var

LANGUAGE = "tilelang_ascend"
_TYPES = {"f32": ("float32", "float"), "bf16": ("bfloat16", "bfloat16_t")}


def emit(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
    """Render the contraction of a spec; raise LowerError for a body it cannot express."""
    text = environment().get_template(template.path).render(**_contract(spec))
    return KernelSource(spec.symbol, LANGUAGE, text)


def _contract(spec: KernelSpec) -> Mapping[str, Any]:
    body, schedule = spec.body, spec.schedule.values
    anchors = [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]
    value, rows = anchors[0].inputs[0], anchors[0].type.shape[0]
    k = constant(body.type_of(value).shape[-1])
    activation = "activation" if value in body.node else value
    launches, ascendc = [], ""
    if value in body.node:
        ascendc, launch = _prologue(spec, value, rows)
        launches.append(launch)
    kernels, arguments = [], {}
    for number, nodes in enumerate(sections_of(body, anchors)):
        kernel = _section(spec, nodes, f"k_{spec.symbol}_{number}", rows)
        kernels.append(kernel)
        arguments[kernel["name"]] = _arguments(spec, kernel, activation, rows)
        launches.append(Launch(kernel["name"], "mix", f"@{kernel['name']}@"))
    host = '#include "tw_ascend_host.h"\n' + entry(spec, launches, blocks=schedule["cores"])
    return {
        "functions": prelude(LANGUAGE),
        "kernels": kernels,
        "k": k,
        "k_steps": -(-k // schedule["bk"]),
        **schedule,
        "ascendc": repr(ascendc),
        "host": repr(host),
        "arguments": repr(arguments),
    }


def _prologue(spec: KernelSpec, value: str, rows: Dim) -> tuple[str, Launch]:
    """The row program that makes the activation, into the workspace."""
    body = spec.body
    program = row_program(
        f"k_{spec.symbol}_prologue", body, ancestors(body, value), rows,
        {root_of(body, value): "activation"}, spec.numerics.lanes,
    )  # fmt: skip
    return program.text, program.launch(rows, scratch=("activation",))


def _arguments(
    spec: KernelSpec, kernel: Mapping[str, Any], activation: str, rows: Dim
) -> dict[str, str]:
    """C++ text of each parameter of a printed kernel, which may reorder them."""
    source = "workspace" if activation == "activation" else activation
    found = {
        "x": f"(bfloat16_t*){source}->data",
        "rows": f"(int32_t)({cpp_extent(to_json(rows))})",
    }
    for weight in kernel["weights"]:
        found[weight["name"]] = f"(bfloat16_t*){weight['tensor']}->data"
    for tensor in (*kernel["operands"], *kernel["outputs"]):
        found[tensor["name"]] = f"({tensor['ctype']}*){tensor['tensor']}->data"
    return found


def _section(spec: KernelSpec, nodes: list[Node], name: str, rows: Dim) -> dict[str, Any]:
    body = spec.body
    anchors = [n for n in nodes if op_def(n.op).kind is Kind.CONTRACT]
    n = constant(anchors[0].type.shape[-1])
    weights = [{"name": f"w{i}", "tensor": a.inputs[1]} for i, a in enumerate(anchors)]
    known = {a.name: f"ub_w{i}[i, j]" for i, a in enumerate(anchors)}
    operands: dict[str, dict[str, Any]] = {}
    for node in nodes:
        if node.name not in known:
            known[node.name] = _elementwise(body, node, known, operands, rows, n)
    outputs: list[dict[str, Any]] = []
    lines: list[str] = []
    for value in (v for _, v in body.outputs if v in {m.name for m in nodes}):
        dtype, ctype = _types(body, value)
        place = f"y{len(outputs)}"
        outputs.append({"name": place, "tensor": value, "dtype": dtype, "ctype": ctype})
        lines.append(f'ub_{place}[i, j] = T.cast({known[value]}, "{dtype}")')
    return {
        "name": name,
        "n": n,
        "tiles": -(-n // spec.schedule.values["bn"]),
        "weights": weights,
        "operands": list(operands.values()),
        "outputs": outputs,
        "epilogue": lines,
    }


def _types(body: Graph, value: str) -> tuple[str, str]:
    dtype = str(body.type_of(value).dtype)
    if dtype not in _TYPES:
        raise LowerError(f"tensor '{value}': got {dtype}, want f32 or bf16 beside a contraction")
    return _TYPES[dtype]


def _elementwise(
    body: Graph,
    node: Node,
    known: Mapping[str, str],
    operands: dict[str, dict[str, Any]],
    rows: Dim,
    n: int,
) -> str:
    """One element of a node as an expression; `operands` grows by the tensors it reads."""
    definition = op_def(node.op)
    if definition.kind is not Kind.ELEMENTWISE or definition.scalar is None:
        raise LowerError(f"{node.op} '{node.name}': is no epilogue: want an elementwise op")
    names = {}
    for place, value in enumerate(node.inputs):
        names[f"operand{place}"] = known.get(value) or _operand(
            body, value, operands, rows, n, node
        )
    return print_scalar(definition.scalar(node.attr, *map(Var, names)), names, LANGUAGE)


def _operand(
    body: Graph, value: str, operands: dict[str, dict[str, Any]], rows: Dim, n: int, user: Node
) -> str:
    type_ = body.type_of(value)
    rowwise = value not in body.weight and has_rows(type_, user.type.rank, rows)
    if inner_shape(type_, user.type.rank, rows) != (n,):
        raise LowerError(f"operand '{value}': got {type_}, want {n} columns or [rows, {n}]")
    dtype, ctype = _types(body, value)
    place = operands[value]["name"] if value in operands else f"r{len(operands)}"
    operands[value] = {
        "name": place, "tensor": value, "dtype": dtype, "ctype": ctype, "rows": rowwise
    }  # fmt: skip
    element = f"ub_{place}[{'i, ' if rowwise else ''}j]"
    return element if dtype == "float32" else f'T.cast({element}, "float32")'
