"""Attention over paged keys and values: on the vector cores alone, and what both ways share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.codegen.arguments import ancestors
from tilewright.codegen.emit.ascendc_host import Launch
from tilewright.codegen.emit.ascendc_memory import UB_BYTES, stacked, stacked_bytes
from tilewright.codegen.emit.ascendc_rows import SIZES
from tilewright.codegen.emit.cpp import environment, print_scalar_const
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.cpp_types import Storage, storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.expr import print_scalar
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Node
from tilewright.graph.dims import to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.scalar import Var


@dataclass(frozen=True)
class Paged:
    """One attention over a paged cache of keys and values."""

    body: Graph
    anchor: Node

    @classmethod
    def of(cls, body: Graph) -> Paged:
        (anchor,) = [n for n in body.nodes if op_def(n.op).kind is Kind.ATTEND]
        return cls(body, anchor)

    @property
    def sizes(self) -> dict[str, int]:
        heads, (_, kv_heads, block_size, width) = (
            self.anchor.type.shape[1],
            self.body.type_of(self.anchor.inputs[1]).shape,
        )
        names = ("heads", "kv_heads", "block_size", "width")
        return dict(zip(names, map(constant, (heads, kv_heads, block_size, width)), strict=True))

    @property
    def out(self) -> str:
        ((_, value),) = self.body.outputs
        return value

    def stored(self, value: str) -> Storage:
        return storage(self.body.type_of(value).dtype)

    def render(
        self, symbol: str, template: str, kind: str, **more: Any
    ) -> tuple[list[str], list[Launch]]:
        """Return the device text and its launch; `kind` of cores."""
        body, anchor, name = self.body, self.anchor, f"k_{symbol}"
        q, k, v, positions, rows, tables = anchor.inputs
        named = {"q": q, "k": k, "v": v, "positions": positions, "request_rows": rows}
        made = self.stored(self.out)
        pointers = [(self.stored(n).ctype, n) for n in (q, k, v)]
        pointers += [("int32_t", n) for n in (positions, rows, tables)] + [(made.ctype, self.out)]
        text = environment().get_template(template).render(
            name=name, pointers=pointers, out=self.out, block_tables=tables,
            scale=print_scalar_const(float(str(anchor.attr["scale"]))), out_type=made.ctype,
            out_bytes=SIZES[made.ctype], epilogue=attend_epilogue(body, anchor, self.out),
            **named, **self.sizes, **more,
        )  # fmt: skip
        tokens, stride = (
            cpp_extent(to_json(d)) for d in (anchor.type.shape[0], body.type_of(tables).shape[1])
        )
        given = [f"({ctype}*){tensor}->data" for ctype, tensor in pointers]
        call = f"{name}({', '.join([*given, f'(int32_t)({tokens})', f'(int32_t)({stride})'])})"
        return [text], [Launch(name, kind, call)]


def attend(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Return the device text and its launch, for the vector cores alone."""
    found = Paged.of(spec.body)
    held, cache = (found.stored(n) for n in found.anchor.inputs[:2])
    types = {
        "q_type": held.ctype, "kv_type": cache.ctype,
        "q_bytes": SIZES[held.ctype], "cache_bytes": SIZES[cache.ctype],
        "q_load": held.load, "kv_load": cache.load,
    }  # fmt: skip
    sizes = {**found.sizes, "chunk": spec.numerics.chunk}
    out_bytes = SIZES[found.stored(found.out).ctype]
    return found.render(
        spec.symbol, "ascendc/attend.asc.j2", "vector", chunk=spec.numerics.chunk,
        offsets=_offsets(spec, sizes, {**types, "out_bytes": out_bytes}), **types,
    )  # fmt: skip


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
    total = stacked_bytes(parts)
    if total > UB_BYTES:
        raise LowerError(
            f"attend kernel '{spec.symbol}': a chunk does not fit the unified buffer: got {total} "
            f"bytes, want at most {UB_BYTES}"
        )
    return stacked(parts)


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
