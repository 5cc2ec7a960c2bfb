"""The host side of AscendC kernels: the exported function that checks arguments and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.arguments import argument_names, int_names, matrix_weights, needs_scratch
from tilewright.codegen.emit.cpp_types import PACKED, Storage, storage
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.dims import DimJson, to_json
from tilewright.graph.errors import LowerError

KINDS = {"mix": 0, "vector": 1, "cube": 2}


@dataclass(frozen=True)
class Launch:
    """One device kernel of a source: name, cores it runs on, and the call with its arguments."""

    kernel: str
    kind: str
    call: str


def stored_as(body: Graph, name: str) -> Storage:
    """Return how a tensor argument is passed: matrices as bytes."""
    return PACKED if name in matrix_weights(body) else storage(body.type_of(name).dtype)


def extent(tree: DimJson) -> str:
    """Print an extent in the names of the kernel's ints."""
    if not isinstance(tree, list):
        return str(tree)
    head, *rest = tree
    texts = [extent(a) for a in rest]
    match head:
        case "add":
            return "(" + " + ".join(texts) + ")"
        case "mul":
            return "(" + " * ".join(texts) + ")"
        case "ceildiv":
            return f"(({texts[0]} + {texts[1]} - 1) / {texts[1]})"
        case _:
            raise LowerError(f"extent '{tree}': has no C++ form: want +, *, ceildiv")


def entry(spec: KernelSpec, launches: Sequence[Launch], *, blocks: int) -> str:
    """Return the function that the runtime calls. A vector kernel has twice the blocks: every core
    of the chip has two vector cores."""
    body, names, ints = spec.body, argument_names(spec.body), int_names(spec.body)
    scratch = needs_scratch(spec.kind)
    first = len(names) + scratch
    lines = [
        "#ifdef TW_MODEL",
        f"TW_KERNEL({spec.symbol}) {{",
        f"  TW_ARGUMENTS({first + len(ints)});",
    ]
    for place, decl in enumerate(body.dims, start=first):
        lines.append(f"  TW_INT({decl.name}, {place}, {decl.lower}, {decl.upper});")
    written = {value for _, value in body.outputs} | {s for s, _ in body.state_outputs}
    tensors = []
    for place, name in enumerate(names):
        kind, type_ = stored_as(body, name), spec.stored_type(name)
        packed = name in matrix_weights(body)
        ndim = 1 if packed else max(type_.rank, 1)
        lines.append(f"  TW_TENSOR({name}, {place}, {kind.code}, {kind.bits}, {ndim});")
        for axis, e in enumerate(() if packed else type_.shape):
            lines.append(f"  TW_EXTENT({name}, {axis}, {extent(to_json(e))});")
        tensors.append(f'tw_gm("{name}", {name}, {str(name in written).lower()})')
    if scratch:
        lines.append(f"  TW_TENSOR(workspace, {len(names)}, kDLUInt, 8, 1);")
        tensors.append('tw_gm("workspace", workspace, true)')
    lines.append(f"  const tw::Tensor tensors[] = {{{', '.join(tensors)}}};")
    for launch in launches:
        count = blocks * (2 if launch.kind == "vector" else 1)
        lines.append(f"  TW_RUN({launch.kernel}, {KINDS[launch.kind]}, {count}, {launch.call})")
    return "\n".join([*lines, "  return 0;", "}", "#endif"])
