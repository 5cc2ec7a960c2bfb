"""C++ texts of latent attention, and the types that decode rows of paged states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.spec import KernelSpec
from tilewright.graph.dims import to_json
from tilewright.graph.types import BlockFormat, DType

_LISTS = {
    "attend_window": "none",
    "attend_compressed": "all",
    "attend_selected": "selected",
}


def row_type(dtype: DType | BlockFormat, width: int) -> str:
    """Return the type of tw_packed_rows.h that decodes rows of a paged state."""
    if isinstance(dtype, BlockFormat):
        e4m3 = "true" if dtype.scale.name == "fp8_e4m3" else "false"
        facts = f"{dtype.code.bits}, {dtype.block[1]}, {e4m3}, {width}, {dtype.tail}"
        return f"tw::packed_rows<{facts}>"
    cell = {"f32": "float", "bf16": "uint16_t"}[dtype.name]
    return f"tw::plain_rows<{cell}, {width}>"


def extent_text(extent: object) -> str:
    """Return a row's extent: a number or an int of the kernel."""
    return f"args.{extent}" if isinstance(extent, str) else str(extent)


def latent_variables(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the variables of latent.cpp.j2 apart from queries, epilogue and entry."""
    body = spec.body
    node = next(n for n in body.nodes if n.op in _LISTS)
    q, window, positions, rows, window_tables, sink = node.inputs[:6]
    stored = body.type_of(window)
    width = int(stored.shape[2])
    found: dict[str, Any] = {
        "heads": int(node.type.shape[1]),
        "width": width,
        "window": int(str(node.attr["window"])),
        "chunk": spec.numerics.chunk,
        "window_per_page": int(stored.shape[1]),
        "per_page": 1,
        "ratio": int(str(node.attr.get("ratio", 1))),
        "entries": _LISTS[node.op],
        "window_rows": row_type(stored.dtype, width),
        "entry_rows": row_type(stored.dtype, width),
        "sink": storage(body.type_of(sink).dtype).load.format(f"args.{sink}[head]"),
        "positions": f"args.{positions}",
        "request_rows": f"args.{rows}",
        "window_tables": f"args.{window_tables}",
        "window_stride": extent_text(to_json(body.type_of(window_tables).shape[1])),
        "window_state": f"args.{window}",
        "tables": "nullptr",
        "table_stride": "1",
        "state": "nullptr",
        "selected": "nullptr",
        "num_selected": "0",
        "schedule": spec.schedule.values,
    }
    if len(node.inputs) > 6:
        state, tables = node.inputs[6:8]
        of_entries = body.type_of(state)
        found |= {
            "per_page": int(of_entries.shape[1]),
            "entry_rows": row_type(of_entries.dtype, width),
            "tables": f"args.{tables}",
            "table_stride": extent_text(to_json(body.type_of(tables).shape[1])),
            "state": f"args.{state}",
        }
    if len(node.inputs) > 8:
        selected = node.inputs[8]
        found |= {
            "selected": f"args.{selected}",
            "num_selected": extent_text(to_json(body.type_of(selected).shape[1])),
        }
    return found
