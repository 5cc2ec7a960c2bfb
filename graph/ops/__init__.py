"""Op definitions by family. Importing this package fills `OPS`."""

from tilewright.graph.ops import attend, contract, elementwise, gather, layout, reduce, select
from tilewright.graph.ops.registry import OPS, Cost, Kind, OpDef, op_def, register

__all__ = [
    "OPS", "Cost", "Kind", "OpDef", "attend", "contract", "elementwise", "gather", "layout",
    "op_def", "reduce", "register", "select",
]
