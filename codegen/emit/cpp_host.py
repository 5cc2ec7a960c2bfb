"""What the exported C++ function of a kernel begins with, whatever runs the kernel: checks of its
arguments in the order of the ABI.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.arguments import argument_names, int_names, needs_scratch
from tilewright.codegen.emit.cpp_types import Storage
from tilewright.codegen.spec import KernelSpec
from tilewright.graph.dims import Dim, DimJson, to_json
from tilewright.graph.errors import LowerError


def cpp_extent(tree: DimJson) -> str:
    """Print an extent in the names of the kernel's ints."""
    if not isinstance(tree, list):
        return str(tree)
    head, *args = tree
    texts = [cpp_extent(a) for a in args]
    match head:
        case "add":
            return "(" + " + ".join(texts) + ")"
        case "mul":
            return "(" + " * ".join(texts) + ")"
        case "ceildiv":
            return f"(({texts[0]} + {texts[1]} - 1) / {texts[1]})"
        case "min" if len(texts) == 2:
            return f"({texts[0]} < {texts[1]} ? {texts[0]} : {texts[1]})"
        case _:
            raise LowerError(f"extent '{tree}': has no C++ form: want +, *, ceildiv, min of two")


def opening(spec: KernelSpec) -> list[str]:
    """Open the function; check the number of its arguments and its ints."""
    first_int = len(argument_names(spec.body)) + needs_scratch(spec.kind)
    count = first_int + len(int_names(spec.body))
    lines = [f"TW_KERNEL({spec.symbol}) {{", f"  TW_ARGUMENTS({count});"]
    for position, decl in enumerate(spec.body.dims, start=first_int):
        lines.append(f"  TW_INT({decl.name}, {position}, {decl.lower}, {decl.upper});")
    return lines


def tensor_checks(
    name: str, position: int, stored: Storage, shape: Sequence[Dim] | None
) -> list[str]:
    """Check one tensor; a `shape` of None is one axis of packed bytes."""
    ndim = 1 if shape is None else max(len(shape), 1)
    return [
        f"  TW_TENSOR({name}, {position}, {stored.code}, {stored.bits}, {ndim});",
        *(
            f"  TW_EXTENT({name}, {axis}, {cpp_extent(to_json(extent))});"
            for axis, extent in enumerate(shape or ())
        ),
    ]


def workspace_check(spec: KernelSpec) -> list[str]:
    """Check the workspace of a kernel that takes one."""
    if not needs_scratch(spec.kind):
        return []
    return [f"  TW_TENSOR(workspace, {len(argument_names(spec.body))}, kDLUInt, 8, 1);"]
