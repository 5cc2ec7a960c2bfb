"""Op definitions by family. Importing this package fills `OPS`."""

from tilewright.graph.ops import (
    attend,
    contract,
    elementwise,
    expert,
    gather,
    hyper,
    index,
    latent,
    layout,
    pages,
    quant,
    reduce,
    select,
)
from tilewright.graph.ops.registry import (
    OPS,
    ROUNDING_OPS,
    Kind,
    OpDef,
    op_def,
    register,
)

__all__ = [
    "OPS", "ROUNDING_OPS", "Kind", "OpDef", "attend", "contract", "elementwise", "expert",
    "gather", "hyper", "index", "latent", "layout", "op_def", "pages", "quant", "reduce",
    "register", "select",
]
