"""Emitter for Triton: gives templates their texts, renders them and wraps the result as
`KernelSource`. A source is a Python module: kernels, their launches as data, and the host function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.codegen.arguments import ancestors
from tilewright.codegen.body import root_of
from tilewright.codegen.emit.cpp import environment, row_extent, sections_of
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.emit.triton_attend import attend
from tilewright.codegen.emit.triton_host import (
    Launch,
    host_text,
    launch_table,
    parameters,
    workspace_pointers,
)
from tilewright.codegen.emit.triton_latent import latent
from tilewright.codegen.emit.triton_rows import RowPrinter
from tilewright.codegen.emit.triton_select import selection
from tilewright.codegen.emit.triton_values import Index, Scope, Values, triton_type
from tilewright.codegen.pack_gpu import block_layout
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, to_json
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat

IEEE = ', input_precision="ieee"'


def emit(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
    """Render the kernel of a spec; raise LowerError for a body the template cannot express."""
    build = _TEXTS[template.path]
    text = environment().get_template(template.path).render(name=spec.symbol, **build(spec))
    return KernelSource(spec.symbol, "triton", text)


def _row(spec: KernelSpec) -> Mapping[str, Any]:
    body = spec.body
    rows = row_extent(body)
    sinks = {value: value for _, value in body.outputs}
    printer = RowPrinter(body, [n.name for n in body.nodes], rows, sinks, spec.numerics.lanes)
    launch = Launch("rows", (to_json(rows), 1, 1), spec.schedule.values["warps"])
    return {
        "parameters": parameters(spec, launch),
        "statements": printer.text(),
        "launches": launch_table(spec, [launch]),
        "host": host_text(spec, [launch], 0),
    }


# --- contractions -------------------------------------------------------------------------------


def _contract(spec: KernelSpec) -> Mapping[str, Any]:
    body, schedule = spec.body, spec.schedule.values
    anchors = [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]
    value, rows = anchors[0].inputs[0], anchors[0].type.shape[0]
    type_ = body.type_of(value)
    k, dtype = constant(type_.shape[-1]), triton_type(type_.dtype)
    computed = value in body.node
    made = {"activation": (_short(dtype), ["mul", to_json(rows), k * type_.dtype.bits // 8])}
    work, scratch = workspace_pointers(made if computed else {})
    cast = operand_type(body, anchors)
    sections, blocks = _section_texts(spec, anchors, rows)
    launches = [
        Launch(
            "contract",
            (["ceildiv", to_json(rows), schedule["bm"]], blocks, 1),
            schedule["warps"],
            schedule["stages"],
            work,
        )
    ]
    prologue: list[str] = []
    if computed:
        before = Launch("prologue", (to_json(rows), 1, 1), schedule["row_warps"], 2, work)
        launches.insert(0, before)
        prologue = RowPrinter(
            body, ancestors(body, value), rows, {root_of(body, value): "activation"},
            spec.numerics.lanes,
        ).text()  # fmt: skip
    return {
        "parameters": parameters(spec, launches[-1]),
        "prologue_parameters": parameters(spec, launches[0]),
        "prologue": prologue,
        "k": k,
        "num_rows": to_json(rows),
        "activation": "activation" if computed else value,
        "cast": cast,
        "precision": IEEE if cast == "float32" else "",
        "bm": schedule["bm"],
        "bn": schedule["bn"],
        "bk": schedule["bk"],
        "sections": sections,
        "launches": launch_table(spec, launches),
        "host": host_text(spec, launches, scratch),
    }


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]


def operand_type(body: Graph, anchors: list[Node]) -> str:
    """Return the type in which products are taken without loss: bf16 codes and values, or fp32."""
    types = [body.type_of(i).dtype for a in anchors for i in a.inputs]
    exact = all(isinstance(t, BlockFormat) or t.name == "bf16" for t in types)
    return "bfloat16" if exact else "float32"


def _section_texts(
    spec: KernelSpec, anchors: list[Node], rows: Dim
) -> tuple[list[Mapping[str, Any]], int]:
    """Return the sections, each a range of blocks along the columns, and how many blocks."""
    bn, start = spec.schedule.values["bn"], 0
    found: list[Mapping[str, Any]] = []
    for nodes in sections_of(spec.body, anchors):
        mine = [n for n in nodes if op_def(n.op).kind is Kind.CONTRACT]
        n = constant(mine[0].type.shape[-1])
        stop = start + -(-n // bn)
        found.append(
            {
                "n": n,
                "start": start,
                "stop": stop,
                "ragged": n % bn != 0,
                "walks": _walks(spec, mine, n),
                "epilogue": _epilogue(spec, nodes, mine, n, rows),
            }
        )
        start = stop
    return found, start


def _walks(spec: KernelSpec, anchors: list[Node], n: int) -> list[Mapping[str, Any]]:
    """Weights of one format are walked together."""
    found: dict[str, dict[str, Any]] = {}
    padded = -(-n // 16) * 16
    ragged = padded % spec.schedule.values["bn"] != 0
    for anchor in anchors:
        weight = anchor.inputs[1]
        dtype = spec.body.type_of(weight).dtype
        walk = found.setdefault(str(dtype), {"form": "plain", "weights": []})
        if isinstance(dtype, BlockFormat):
            layout = block_layout(dtype.name)
            walk["form"] = "nibbles" if layout.code_bytes * 2 == layout.group else "bytes"
            walk["group"], walk["code_bytes"] = layout.group, layout.code_bytes
            here = [f"(cols[:, None, None] < {padded})"] if ragged else []
            groups = constant(spec.body.type_of(weight).shape[1]) // layout.group
            tail = groups % max(spec.schedule.values["bk"] // layout.group, 1)
            here += [f"(g0 + group < {groups})"] if tail else []
            walk["mask"] = f", mask={' & '.join(here)}, other=0"
        walk["weights"].append(
            {
                "acc": f"acc_{anchor.name}",
                "pointer": weight,
                "ragged": ragged,
            }
        )
    return list(found.values())


def _epilogue(
    spec: KernelSpec, nodes: list[Node], anchors: list[Node], n: int, rows: Dim
) -> list[str]:
    """Elementwise nodes on the sums, and the stores of what leaves the kernel."""
    body, scope = spec.body, Scope()
    known = {a.name: f"acc_{a.name}" for a in anchors}
    row = Index("row", f"row < {to_json(rows)}")
    ragged = n % spec.schedule.values["bn"] != 0
    col = Index("col", f"col < {n}" if ragged else "")
    values = Values(body, [m.name for m in nodes if m.name not in known], rows, row, known)
    for node in nodes:
        if node.name not in {value for _, value in body.outputs}:
            continue
        text = values.operand(scope, node.name, (col,), 2, row)
        dtype = triton_type(node.type.dtype)
        narrowed = text if dtype == "float32" else f"{text}.to(tl.{dtype})"
        mask = "here & (col < %d)" % n if ragged else "here"
        scope.lines.append(f"tl.store({node.name} + row * {n} + col, {narrowed}, mask={mask})")
    return scope.lines


_TEXTS: Mapping[str, Callable[[KernelSpec], Mapping[str, Any]]] = {
    "triton/row.py.j2": _row,
    "triton/contract.py.j2": _contract,
    "triton/attend.py.j2": attend,
    "triton/latent.py.j2": latent,
    "triton/select.py.j2": selection,
}
