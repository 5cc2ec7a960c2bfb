"""Emitter for C++: gives templates their texts, renders them and wraps the result as
`KernelSource`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

import tilewright.templates
from tilewright.codegen.arguments import (
    ancestors,
    argument_names,
    int_names,
    matrix_weights,
)
from tilewright.codegen.body import root_of
from tilewright.codegen.emit.cpp_host import (
    cpp_extent,
    opening,
    tensor_checks,
    workspace_check,
)
from tilewright.codegen.emit.cpp_index import select_variables
from tilewright.codegen.emit.cpp_latent import latent_variables
from tilewright.codegen.emit.cpp_route import place, routing
from tilewright.codegen.emit.cpp_rows import RowPrinter, Sink
from tilewright.codegen.emit.cpp_types import PACKED, panel_format, storage
from tilewright.codegen.emit.row_calls import row_headers
from tilewright.codegen.emit.shapes import constant, has_rows, inner_shape
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.sections import sections_of
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Var
from tilewright.graph.types import BlockFormat

PREAMBLE = '#include "tw_host.h"\n#include "tw_vec.h"\n#include "tw_math.h"\n'
TEMPLATE_ROOT = Path(tilewright.templates.__file__).resolve().parent


@cache
def environment() -> jinja2.Environment:
    """Templates of all languages; an undefined variable is an error."""
    loader = jinja2.FileSystemLoader(TEMPLATE_ROOT)
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )


def emit(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
    """Render the kernel of a spec; raise LowerError for a body the template cannot express."""
    build = _TEXTS[template.path]
    variables = {"name": f"k_{spec.symbol}", "args": _members(spec.body), **build(spec)}
    text = environment().get_template(template.path).render({"preamble": "", **variables})
    headers = "".join(f'#include "{name}"\n' for name in row_headers(spec.body))
    return KernelSource(spec.symbol, "cpp", PREAMBLE + headers + text)


# --- arguments ----------------------------------------------------------------------------------


def _storage(body: Graph, name: str) -> Any:
    dtype = body.type_of(name).dtype
    packed = name in matrix_weights(body) or name in body.state and isinstance(dtype, BlockFormat)
    return PACKED if packed else storage(dtype)


def _members(body: Graph) -> str:
    """Members of the Args struct."""
    written = {value for _, value in body.outputs} | {s for s, _ in body.state_outputs}
    lines = []
    for name in argument_names(body):
        const = "" if name in written else "const "
        lines.append(f"  {const}{_storage(body, name).ctype}* __restrict {name};")
    lines += [f"  int64_t {name};" for name in int_names(body)]
    return "\n".join(lines)


def _entry(spec: KernelSpec, call: str) -> str:
    """The exported function: checks its arguments, then runs the kernel."""
    body, names, ints = spec.body, argument_names(spec.body), int_names(spec.body)
    lines = opening(spec)
    for position, name in enumerate(names):
        shape = None if name in matrix_weights(body) else spec.stored_type(name).shape
        lines += tensor_checks(name, position, _storage(body, name), shape)
    lines += workspace_check(spec)
    members = [f"({_const(body, n)}{_storage(body, n).ctype}*){n}->data" for n in names]
    lines.append(f"  k_{spec.symbol}::Args arguments = {{{', '.join([*members, *ints])}}};")
    return "\n".join([*lines, *("  " + line for line in call.splitlines()), "  return 0;", "}"])


def _const(body: Graph, name: str) -> str:
    written = {value for _, value in body.outputs} | {s for s, _ in body.state_outputs}
    return "" if name in written else "const "


def _rows_expression(rows: Dim) -> str:
    tree = to_json(rows)
    return f"args.{tree}" if isinstance(tree, str) else str(tree)


# --- row kernels --------------------------------------------------------------------------------


def _row(spec: KernelSpec) -> Mapping[str, Any]:
    body = spec.body
    rows = row_extent(body)
    sinks = {value: Sink("output", value) for _, value in body.outputs}
    printer = RowPrinter(body, [n.name for n in body.nodes], rows, sinks, spec.numerics.lanes)
    call = f"k_{spec.symbol}::run(arguments);"
    return {
        "statements": printer.text(),
        "rows_per_item": spec.schedule.values["rows_per_item"],
        "num_rows": _rows_expression(rows),
        "entry": _entry(spec, call),
    }


def row_extent(body: Graph) -> Dim:
    """The leading extent that the nodes of a row body share."""
    for node in body.nodes:
        if op_def(node.op).kind is Kind.STORE:
            return body.type_of(node.inputs[1]).shape[0]
    last = body.nodes[-1].type.shape
    if not last:
        raise LowerError(f"row kernel '{body.name}': result is a scalar: want a leading axis")
    return last[0]


# --- contractions -------------------------------------------------------------------------------


def _contract(spec: KernelSpec) -> Mapping[str, Any]:
    body, numerics = spec.body, spec.numerics
    anchors = [n for n in body.nodes if op_def(n.op).kind is Kind.CONTRACT]
    activation = anchors[0].inputs[0]
    k = constant(body.type_of(activation).shape[-1])
    rows = anchors[0].type.shape[0]
    prologue, direct = _prologue(spec, activation, rows)
    count = cpp_extent(to_json(rows))
    call = f"k_{spec.symbol}::run(arguments, {count}, (uint8_t*)workspace->data);"
    schedule = dict(spec.schedule.values)
    names = {"form": ("stream", "slab"), "split": ("rows", "panels")}
    chosen: dict[str, Any] = {
        key: names[key][value] if key in names else value for key, value in schedule.items()
    }
    chosen = {"few_rows": 0, **chosen}
    chosen["rows"] = "direct" if direct else ("inline", "phase")[schedule["phase"]]
    order = numerics.scale_order if numerics.scale_order != "none" else "dequantise"
    order = "exactly" if numerics.atom == "integer" else order
    return {
        "k": k,
        "order": order,
        "segments": numerics.segments,
        "prologue": "" if direct else prologue,
        "input_row": direct,
        "routing": routing(body, anchors[0]),
        "sections": [_section(spec, nodes, rows) for nodes in sections_of(body, anchors)],
        "schedules": [{"max_rows": None, **chosen}],
        "entry": _entry(spec, call),
    }


def _prologue(spec: KernelSpec, activation: str, rows: Dim) -> tuple[str, str]:
    """Return the text that writes one input row as fp32, or the pointer to rows that are fp32."""
    body, type_ = spec.body, spec.body.type_of(activation)
    k = constant(type_.shape[-1])
    if activation not in body.node:
        in_place = spec.numerics.scale_order != "factored"  # that order rescales its rows
        if type_.dtype.name == "f32" and in_place:
            return "", (
                "static inline const float* input_row(const Args& args, int64_t row) { "
                f"return args.{activation} + row * {k}; }}"
            )
        load = storage(type_.dtype).load.format(f"args.{activation}[row * {k} + j]")
        text = f"  for (int64_t j = 0; j < {k}; ++j) a[j] = {load};"
    else:
        before = ancestors(body, activation)
        sinks = {root_of(body, activation): Sink("array", "a")}  # a view has no loop of its own
        text = RowPrinter(body, before, rows, sinks, spec.numerics.lanes).text()
    head = "static inline void prologue(const Args& args, int64_t row, float* __restrict a) {"
    return f"{head}\n{text}\n}}", ""


def _section(spec: KernelSpec, nodes: list[Node], rows: Dim) -> Mapping[str, Any]:
    body = spec.body
    anchors = [n for n in nodes if op_def(n.op).kind is Kind.CONTRACT]
    n = constant(anchors[0].type.shape[-1])
    weights = [
        {"format": panel_format(body.type_of(a.inputs[1]).dtype), "pointer": f"args.{a.inputs[1]}"}
        for a in anchors
    ]
    known = {a.name: f"acc[{i}][l]" for i, a in enumerate(anchors)}
    outputs = {value for _, value in body.outputs}
    index, token = place(anchors[0])
    lines = _elementwise(body, nodes, known, rows, index=index, row=token)
    for node in nodes:
        if node.name in outputs:
            stored = storage(node.type.dtype).store.format(known[node.name])
            lines.append(f"args.{node.name}[row * {n} + col + l] = {stored};")
    loop = ["for (int64_t l = 0; l < {0}; ++l) {{", *("  " + line for line in lines), "}}"]
    full = [line.replace("{0}", "16").replace("{{", "{").replace("}}", "}") for line in loop]
    tail = [line.replace("{0}", "width").replace("{{", "{").replace("}}", "}") for line in loop]
    text = [
        "if (width == 16) {",
        *("  " + s for s in full),
        "} else {",
        *("  " + s for s in tail),
        "}",
    ]
    return {"n": n, "weights": weights, "epilogue": "\n".join("    " + s for s in text)}


def _elementwise(
    body: Graph,
    nodes: list[Node],
    known: dict[str, str],
    rows: Dim,
    *,
    index: tuple[str, ...],
    row: str,
) -> list[str]:
    """Statements for elementwise nodes at one element; `known` grows by their variables."""
    lines = []
    for node in nodes:
        definition = op_def(node.op)
        if node.name in known:
            continue
        if definition.kind is not Kind.ELEMENTWISE or definition.scalar is None:
            raise LowerError(f"{node.op} '{node.name}': is no epilogue: want an elementwise op")
        operands = {
            f"operand{i}": known.get(value) or _load(body, value, node, rows, index, row)
            for i, value in enumerate(node.inputs)
        }
        text = print_scalar(definition.scalar(node.attr, *map(Var, operands)), operands, "cpp")
        known[node.name] = f"t_{node.name}"
        lines.append(f"const float t_{node.name} = {text};")
    return lines


def _load(body: Graph, value: str, user: Node, rows: Dim, index: tuple[str, ...], row: str) -> str:
    """Return the load of an epilogue's operand from memory, broadcast by extents of 1."""
    at = element_offset(body, value, user, rows, index, row)
    return storage(body.type_of(value).dtype).load.format(f"args.{value}[{at}]")


def element_offset(
    body: Graph, value: str, user: Node, rows: Dim, index: tuple[str, ...], row: str
) -> str:
    """Return where the element of an operand that meets one of `user` lies: text of C."""
    type_ = body.type_of(value)
    rank = user.type.rank
    shape = inner_shape(type_, rank, rows)
    offset, stride = "", 1
    for name, extent in zip(
        reversed(index[len(index) - len(shape) :]), reversed(shape), strict=True
    ):
        if extent != 1:
            term = name if stride == 1 else f"{name} * {stride}"
            offset = term + (f" + {offset}" if offset else "")
        stride *= extent
    if value not in body.weight and has_rows(type_, rank, rows):
        offset = f"{row} * {stride}" + (f" + {offset}" if offset else "")
    return offset or "0"


# --- attention ----------------------------------------------------------------------------------


def _attend(spec: KernelSpec) -> Mapping[str, Any]:
    body = spec.body
    (anchor,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    q, k, v, positions, request_rows, tables = anchor.inputs
    _, kv_heads, block_size, width = body.type_of(k).shape
    heads = constant(anchor.type.shape[1])
    tokens = anchor.type.shape[0]
    stride = _rows_expression(body.type_of(tables).shape[1])
    call = (
        f"k_{spec.symbol}::run(arguments, {cpp_extent(to_json(tokens))}, "
        "(uint8_t*)workspace->data);"
    )
    caches = {"f32": "float32", "bf16": "bfloat16"}
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "width": width,
        "block_size": block_size,
        "chunk": spec.numerics.chunk,
        "cache": caches[str(body.type_of(k).dtype)],
        "load_q": _load_q(body, q, heads, width, tokens),
        "epilogue": _attend_epilogue(body, anchor, heads, width, tokens),
        "scale": print_scalar_const(float(str(anchor.attr["scale"]))),
        "positions": f"args.{positions}",
        "request_rows": f"args.{request_rows}",
        "block_tables": f"args.{tables}",
        "table_stride": stride,
        "k_cache": f"args.{k}",
        "v_cache": f"args.{v}",
        "schedules": [{"max_tokens": None, **spec.schedule.values}],
        "entry": _entry(spec, call),
    }


def _latent(spec: KernelSpec) -> Mapping[str, Any]:
    body = spec.body
    (anchor,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    tokens, heads, width = anchor.type.shape[0], *(constant(d) for d in anchor.type.shape[1:])
    return {
        **latent_variables(spec),
        "load_q": _load_q(body, anchor.inputs[0], heads, width, tokens),
        "epilogue": _attend_epilogue(body, anchor, heads, width, tokens),
        "scale": print_scalar_const(float(str(anchor.attr["scale"]))),
        "entry": _entry(spec, _run_over_tokens(spec, tokens)),
    }


def _select(spec: KernelSpec) -> Mapping[str, Any]:
    tokens = spec.body.nodes[0].type.shape[0]
    return {**select_variables(spec), "entry": _entry(spec, _run_over_tokens(spec, tokens))}


def _run_over_tokens(spec: KernelSpec, tokens: Dim) -> str:
    count = cpp_extent(to_json(tokens))
    return f"k_{spec.symbol}::run(arguments, {count}, (uint8_t*)workspace->data);"


def print_scalar_const(value: float) -> str:
    """Print an fp32 literal exactly."""
    from tilewright.graph.scalar import Const

    return print_scalar(Const(value), {}, "cpp")


def _load_q(body: Graph, q: str, heads: int, width: int, tokens: Dim) -> str:
    known: dict[str, str] = {}
    lines: list[str] = []
    if q in body.node:
        nodes = [body.node[n] for n in ancestors(body, q)]
        lines = _elementwise(body, nodes, known, tokens, index=("head", "j"), row="token")
        value = known[q]
    else:
        load = f"args.{q}[(token * {heads} + head) * {width} + j]"
        value = storage(body.type_of(q).dtype).load.format(load)
    loop = [
        f"for (int64_t j = 0; j < {width}; ++j) {{",
        *("  " + s for s in lines),
        f"  q[j] = {value};",
        "}",
    ]
    return "\n".join("    " + s for s in loop)


def _attend_epilogue(body: Graph, anchor: Node, heads: int, width: int, tokens: Dim) -> str:
    known = {anchor.name: "out[j]"}
    before = set(ancestors(body, anchor.name))
    nodes = [n for n in body.nodes if n.name not in before]
    lines = _elementwise(body, nodes, known, tokens, index=("head", "j"), row="token")
    for _, value in body.outputs:
        stored = storage(body.type_of(value).dtype).store.format(known[value])
        lines.append(f"args.{value}[(token * {heads} + head) * {width} + j] = {stored};")
    loop = [f"for (int64_t j = 0; j < {width}; ++j) {{", *("  " + s for s in lines), "}"]
    return "\n".join("    " + s for s in loop)


_TEXTS: Mapping[str, Callable[[KernelSpec], Mapping[str, Any]]] = {
    "cpp/row.cpp.j2": _row,
    "cpp/contract.cpp.j2": _contract,
    "cpp/attend.cpp.j2": _attend,
    "cpp/latent.cpp.j2": _latent,
    "cpp/select.cpp.j2": _select,
}
