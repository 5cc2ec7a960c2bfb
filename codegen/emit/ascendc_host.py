"""The host side of AscendC kernels: on the model the exported function that checks arguments and
launches; for the chip a function that launches on a stream, for a program that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.arguments import (
    argument_names,
    int_names,
    matrix_weights,
    needs_scratch,
)
from tilewright.codegen.emit.cpp_host import opening, tensor_checks, workspace_check
from tilewright.codegen.emit.cpp_types import PACKED, Storage, storage
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.types import BlockFormat

KINDS = {"mix": 0, "vector": 1, "cube": 2}


@dataclass(frozen=True)
class Launch:
    """One device kernel of a source: name, cores it runs on, and the call with its arguments."""

    kernel: str
    kind: str
    call: str


def stored_as(body: Graph, name: str) -> Storage:
    """Return how a tensor argument is passed: matrices and states of packed rows as bytes."""
    dtype = body.type_of(name).dtype
    packed = name in body.state and isinstance(dtype, BlockFormat)
    return PACKED if packed or name in matrix_weights(body) else storage(dtype)


def entry(spec: KernelSpec, launches: Sequence[Launch], *, blocks: int) -> str:
    """Return the function that the runtime calls. A vector kernel has twice the blocks: every core
    of the chip has two vector cores."""
    body, names = spec.body, argument_names(spec.body)
    lines = ["#ifdef TW_MODEL", *opening(spec)]
    written = {value for _, value in body.outputs} | {s for s, _ in body.state_outputs}
    tensors = []
    for place, name in enumerate(names):
        shape = None if name in matrix_weights(body) else spec.stored_type(name).shape
        lines += tensor_checks(name, place, stored_as(body, name), shape)
        unit = 1 if name in body.state and stored_as(body, name) is PACKED else 2
        tensors.append(f'tw_gm("{name}", {name}, {str(name in written).lower()}, {unit})')
    lines += workspace_check(spec)
    if needs_scratch(spec.kind):
        tensors.append('tw_gm("workspace", workspace, true, 2)')
    lines.append(f"  const tw::Tensor tensors[] = {{{', '.join(tensors)}}};")
    for launch in launches:
        count, kind = _blocks(launch, blocks), KINDS[launch.kind]
        lines.append(f"  TW_RUN({launch.kernel}, {kind}, {count}, {launch.call})")
    return "\n".join([*lines, "  return 0;", "}", *_on_chip(spec, launches, blocks), "#endif"])


def _blocks(launch: Launch, blocks: int) -> int:
    return blocks * (2 if launch.kind == "vector" else 1)


def _on_chip(spec: KernelSpec, launches: Sequence[Launch], blocks: int) -> list[str]:
    """The function of a build for the chip: addresses of tensors in device memory in the order of
    the ABI, the workspace last, then extents."""
    names = [*argument_names(spec.body), *(["workspace"] if needs_scratch(spec.kind) else [])]
    lines = ["#else", f"TW_CHIP_KERNEL({spec.symbol}) {{"]
    lines += [f"  const TwAddress {n}[] = {{{{tensors[{i}]}}}};" for i, n in enumerate(names)]
    for place, extent in enumerate(int_names(spec.body)):
        lines.append(f"  const int64_t {extent} = extents[{place}];")
    for launch in launches:
        lines.append(f"  {chip_call(launch.call, _blocks(launch, blocks))};")
    return [*lines, "  return 0;", "}"]


def chip_call(call: str, blocks: int) -> str:
    """Return a call with its number of blocks and its stream. A name between @ stands for a call
    that is not known yet; it keeps the number beside it."""
    if call.startswith("@"):
        return f"@{call.strip('@')}:{blocks}@"
    name, opened, arguments = call.partition("(")
    return f"{name}<<<{blocks}, 0, stream>>>{opened}{arguments}"
