"""C++ texts of the selection of entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.codegen.emit.cpp_latent import extent_text, row_type
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.spec import KernelSpec
from tilewright.graph.dims import to_json
from tilewright.graph.types import TensorType, element_type


def _codes(q: TensorType, keys: TensorType) -> bool:
    """Say whether products are of two mxfp4 codes, whose sums by group are exact integers."""
    mxfp4 = element_type("fp4_e2m1[g=32,axis=1,scale=ue8m0]")
    return q.dtype == mxfp4 and keys.dtype == mxfp4 and int(keys.shape[2]) % 32 == 0


def select_variables(spec: KernelSpec) -> Mapping[str, Any]:
    """Return the variables of select.cpp.j2 apart from the entry."""
    body = spec.body
    (node,) = body.nodes
    q, w, keys, positions, rows, tables = node.inputs[:6]
    heads, width = (int(d) for d in body.type_of(q).shape[1:])
    stored = body.type_of(keys)
    within = len(node.inputs) > 6
    found: dict[str, Any] = {
        "heads": heads,
        "width": width,
        "per_page": int(stored.shape[1]),
        "ratio": int(str(node.attr["ratio"])),
        "k": int(str(node.attr["k"])),
        "blocks": int(str(node.attr.get("blocks", 0))),
        "block_size": int(str(node.attr.get("block_size", 1))),
        "within": str(within).lower(),
        "codes": str(_codes(body.type_of(q), stored)).lower(),
        "rows": row_type(stored.dtype, width),
        "q": storage(body.type_of(q).dtype).load.format(
            f"args.{q}[(token * {heads} + head) * {width} + d]"
        ),
        "w": storage(body.type_of(w).dtype).load.format(f"args.{w}[token * {heads} + head]"),
        "keys": f"args.{keys}",
        "positions": f"args.{positions}",
        "request_rows": f"args.{rows}",
        "tables": f"args.{tables}",
        "table_stride": extent_text(to_json(body.type_of(tables).shape[1])),
        "output": f"args.{node.name}",
        "candidates": "nullptr",
        "num_candidates": "0",
        "schedule": spec.schedule.values,
    }
    if within:
        blocks = node.inputs[6]
        found |= {
            "candidates": f"args.{blocks}",
            "num_candidates": extent_text(to_json(body.type_of(blocks).shape[1])),
        }
    return found
