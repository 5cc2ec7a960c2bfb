"""Attention as AscendC, on the vector cores: variables of templates/ascendc/attend.asc.j2."""

from __future__ import annotations

from tilewright.codegen.arguments import ancestors
from tilewright.codegen.emit.ascendc_host import Launch
from tilewright.codegen.emit.ascendc_memory import UB_BYTES, aligned
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment, print_scalar_const
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Var


def attend(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch."""
    body, name = spec.body, f"k_{spec.symbol}"
    (anchor,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
    q, k, v, positions, rows, tables = anchor.inputs
    (out,) = (value for _, value in body.outputs)
    heads, (_, kv_heads, block_size, width) = anchor.type.shape[1], body.type_of(k).shape
    held, cache, made = (storage(body.type_of(n).dtype) for n in (q, k, out))
    sizes = {
        "heads": constant(heads),
        "kv_heads": constant(kv_heads),
        "width": constant(width),
        "block_size": constant(block_size),
        "chunk": spec.numerics.chunk,
    }
    types = {
        "q_type": held.ctype, "kv_type": cache.ctype, "out_type": made.ctype,
        "q_bytes": SIZES[held.ctype], "cache_bytes": SIZES[cache.ctype],
        "out_bytes": SIZES[made.ctype], "q_load": held.load, "kv_load": cache.load,
    }  # fmt: skip
    named = {"q": q, "k": k, "v": v, "positions": positions, "request_rows": rows}
    pointers = [(held.ctype, q), (cache.ctype, k), (cache.ctype, v)]
    pointers += [("int32_t", n) for n in (positions, rows, tables)] + [(made.ctype, out)]
    text = environment().get_template("ascendc/attend.asc.j2").render(
        name=name, pointers=pointers, out=out, block_tables=tables,
        scale=print_scalar_const(float(str(anchor.attr["scale"]))),
        epilogue=attend_epilogue(body, anchor, out), offsets=_offsets(spec, sizes, types),
        **named, **sizes, **types,
    )  # fmt: skip
    tokens, stride = (
        cpp_extent(to_json(d)) for d in (anchor.type.shape[0], body.type_of(tables).shape[1])
    )
    given = [f"({ctype}*){tensor}->data" for ctype, tensor in pointers]
    call = f"{name}({', '.join([*given, f'(int32_t)({tokens})', f'(int32_t)({stride})'])})"
    return [text], [Launch(name, "vector", call)]


def _offsets(spec: KernelSpec, sizes: dict[str, int], types: dict[str, object]) -> dict[str, int]:
    group = sizes["heads"] // sizes["kv_heads"]
    chunk, width = sizes["chunk"], sizes["width"]
    cached = chunk * width * int(str(types["cache_bytes"]))
    parts = {
        "q": group * width * int(str(types["q_bytes"])),
        "k": cached,
        "v": cached,
        "scores": group * chunk * 4,
        "sums": group * width * 4,
        "state": group * 12,
        "out": group * width * int(str(types["out_bytes"])),
    }
    offsets, at = {}, 0
    for part, num_bytes in parts.items():
        offsets[part] = at
        at += aligned(num_bytes)
    if at > UB_BYTES:
        raise LowerError(
            f"attend kernel '{spec.symbol}': a chunk does not fit the unified buffer: got {at} "
            f"bytes, want at most {UB_BYTES}"
        )
    return offsets


def attend_epilogue(body: Graph, anchor: Node, out: str) -> str:
    """Elementwise nodes after the attention, none of which reads another tensor."""
    known = {anchor.name: "value"}
    before = set(ancestors(body, anchor.name))
    lines = []
    for node in (n for n in body.nodes if n.name not in before):
        definition = op_def(node.op)
        unknown = [i for i in node.inputs if i not in known]
        if definition.scalar is None or unknown:
            raise LowerError(
                f"{node.op} '{node.name}': is no epilogue here: want an elementwise op of the "
                "attention alone"
            )
        names = {f"operand{i}": known[value] for i, value in enumerate(node.inputs)}
        text = print_scalar(definition.scalar(node.attr, *map(Var, names)), names, "cpp")
        known[node.name] = f"t_{node.name}"
        lines.append(f"    const float t_{node.name} = {text};")
    stored = storage(body.type_of(out).dtype)
    lines.append(f"    const {stored.ctype} result = {stored.store.format(known[out])};")
    return "\n".join(lines)
