"""The host side of a Triton source: its launches as data, and the exported C++ function that checks
its arguments, computes each grid and launches the embedded kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.codegen.arguments import argument_names, int_names, needs_scratch
from tilewright.codegen.emit.cpp_host import (
    cpp_extent,
    opening,
    tensor_checks,
    workspace_check,
)
from tilewright.codegen.emit.cpp_types import PACKED, storage
from tilewright.codegen.emit.triton_values import triton_type
from tilewright.codegen.emit.triton_weights import packed_sections
from tilewright.codegen.pack_gpu import packed_bytes
from tilewright.codegen.spec import KernelSpec
from tilewright.graph.dims import DimJson
from tilewright.graph.types import U8, BlockFormat

ELEMENT_BYTES = {"fp8e4nv": 1, "bf16": 2}
_POINTERS = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "uint8": "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Pointer:
    """A pointer parameter of a kernel: `offset` bytes into tensor argument `tensor`."""

    name: str
    tensor: str
    dtype: str  # Triton's name of the element type
    offset: DimJson = 0


@dataclass(frozen=True)
class Descriptor:
    """A matrix that a kernel loads by tiles, rows of `cols` elements without gaps, `offset` bytes
    into tensor argument `tensor`; `box` is rows and columns of a tile, 128 bytes wide."""

    name: str
    tensor: str
    dtype: str
    offset: DimJson
    rows: DimJson
    cols: int
    box: tuple[int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel of a source: function name, grid in blocks, options, extra pointers."""

    kernel: str
    grid: tuple[DimJson, DimJson, DimJson]
    num_warps: int
    num_stages: int = 2
    pointers: tuple[Pointer, ...] = field(default=())
    descriptors: tuple[Descriptor, ...] = field(default=())
    registers: int = 0  # at most so many a thread; 0: as many as it takes
    shared: int = 0  # bytes of a kernel that is in the source's text in CUDA; 0: not so
    # Of a kernel that is in the source's text in TileLang: its pointers by their own names, if any,
    # and its count of rows, `p_rows`. The toolchain defines TW_ORDER_<kernel>: the addresses of
    # maps, pointers and rows in the order in which the kernel takes them.
    named: tuple[Pointer, ...] = ()
    rows: DimJson = 0


def pointers(spec: KernelSpec) -> tuple[Pointer, ...]:
    """Return the pointers every kernel of a body takes, in the order of the ABI."""
    found = []
    for name in argument_names(spec.body):
        type_ = spec.stored_type(name)
        if not isinstance(type_.dtype, BlockFormat):
            found.append(Pointer(name, name, _POINTERS[triton_type(type_.dtype)]))
            continue
        for pointer, dtype, offset in packed_sections(name, type_):
            found.append(Pointer(pointer, name, dtype, offset))
    return tuple(found)


def parameters(spec: KernelSpec, launch: Launch) -> str:
    """Return the parameter list of a kernel function, after its descriptors if it has any."""
    names = [p.name for p in (*pointers(spec), *launch.pointers)]
    return ", ".join([*names, *int_names(spec.body)])


def launch_table(spec: KernelSpec, launches: Sequence[Launch]) -> str:
    """Return the launches as a Python literal, for the toolchain and for tests."""
    lines = ["LAUNCHES = ("]
    for launch in launches:
        found = (*pointers(spec), *launch.pointers)
        lines += [
            "    {",
            f'        "kernel": {repr(launch.kernel) if _is_text(launch) else launch.kernel},',
            f'        "grid": {list(launch.grid)!r},',
            f'        "pointers": {[(p.name, p.tensor, p.dtype, p.offset) for p in found]!r},',
            f'        "ints": {list(int_names(spec.body))!r},',
            f'        "num_warps": {launch.num_warps},',
            f'        "num_stages": {launch.num_stages},',
            *_rare(launch),
            "    },",
        ]
    return "\n".join([*lines, ")"])


def _is_text(launch: Launch) -> bool:
    return launch.shared > 0 or launch.rows != 0


def _rare(launch: Launch) -> list[str]:
    """What few launches have."""
    described = [tuple(vars(d).values()) for d in launch.descriptors]
    lines = [f'        "descriptors": {described!r},'] if described else []
    lines += [f'        "registers": {launch.registers},'] if launch.registers else []
    if launch.rows != 0:
        named = [(p.name, p.tensor, p.dtype, p.offset) for p in launch.named]
        lines += [f'        "named": {named!r},', f'        "rows": {launch.rows!r},']
    return lines + ([f'        "shared": {launch.shared},'] if launch.shared else [])


def host_text(spec: KernelSpec, launches: Sequence[Launch], scratch: DimJson) -> str:
    """Return the exported function; `scratch` bytes of workspace must be there."""
    names, lines = argument_names(spec.body), opening(spec)
    for position, name in enumerate(names):
        lines += _tensor_checks(spec, name, position)
    lines += workspace_check(spec)
    if needs_scratch(spec.kind):
        lines.append(f"  TW_AT_LEAST(workspace, {cpp_extent(scratch)});")
    for name in names[1:]:
        lines.append(f"  TW_SAME_DEVICE({name}, {names[0]});")
    for launch in launches:
        lines += _launch_lines(spec, launch, names[0])
    return "\n".join([*lines, "  return 0;", "}"])


def _tensor_checks(spec: KernelSpec, name: str, position: int) -> list[str]:
    type_ = spec.stored_type(name)
    if not isinstance(type_.dtype, BlockFormat):
        stored = PACKED if type_.dtype == U8 else storage(type_.dtype)
        return tensor_checks(name, position, stored, type_.shape)
    return tensor_checks(name, position, PACKED, (packed_bytes(type_),))


def _launch_lines(spec: KernelSpec, launch: Launch, first: str) -> list[str]:
    if launch.rows != 0:
        return ["  {", *_named_lines(launch), *_grid_lines(launch, first)]
    found = (*pointers(spec), *launch.pointers)
    lines = ["  {"]
    for i, d in enumerate(launch.descriptors):
        lines += _map_lines(i, d)
    for i, p in enumerate(found):
        offset = cpp_extent(p.offset)
        lines.append(f"    uint64_t p{i} = (uint64_t)(uintptr_t){p.tensor}->data + {offset};")
    ints = int_names(spec.body)
    lines += [f"    int32_t n{i} = (int32_t){name};" for i, name in enumerate(ints)]
    places = [f"&{part}{i}" for i in range(len(launch.descriptors)) for part in _MAP_PARTS]
    places += [f"&p{i}" for i in range(len(found))] + [f"&n{i}" for i in range(len(ints))]
    # Triton's kernels take two more pointers, to scratch that these kernels do not use.
    lines += [
        "    uint64_t none = 0;",
        f"    void* parameters[] = {{{', '.join([*places, '&none', '&none'])}}};",
    ]
    return lines + _grid_lines(launch, first)


def _named_lines(launch: Launch) -> list[str]:
    """Variables of a launch whose kernel says itself in which order it takes them."""
    lines = [line for d in launch.descriptors for line in map_text(d, d.name)]
    for p in launch.named:
        data = f"(uint64_t)(uintptr_t){p.tensor}->data + {cpp_extent(p.offset)}"
        lines.append(f"    uint64_t {p.name} = {data};")
    lines.append(f"    int32_t p_rows = (int32_t){cpp_extent(launch.rows)};")
    return [*lines, f"    void* parameters[] = {{TW_ORDER_{launch.kernel}}};"]


def _grid_lines(launch: Launch, first: str) -> list[str]:
    return [
        f"    const int64_t grid[] = {{{', '.join(cpp_extent(g) for g in launch.grid)}}};",
        f"    TW_LAUNCH({launch.kernel}, grid, parameters, {first}->device.device_id);",
        "  }",
    ]


_MAP_PARTS = ("map", "map_rows", "map_cols", "map_step", "map_one")  # what a kernel takes of one


def _map_lines(i: int, d: Descriptor) -> list[str]:
    return [
        f"    int32_t map_rows{i} = (int32_t){cpp_extent(d.rows)}, map_cols{i} = {d.cols};",
        f"    int64_t map_step{i} = {d.cols}, map_one{i} = 1;",
        *map_text(d, f"map{i}"),
    ]


def map_text(d: Descriptor, name: str) -> list[str]:
    """Return the host lines that encode a matrix as tensor map `name`."""
    data = f"(uint64_t)(uintptr_t){d.tensor}->data + {cpp_extent(d.offset)}"
    return [
        f"    tw_tensor_map {name};",
        f"    TW_TENSOR_MAP({name}, {data}, (int32_t){cpp_extent(d.rows)}, {d.cols}, "
        f"{ELEMENT_BYTES[d.dtype]}, {d.box[0]}, {d.box[1]});",
    ]


def workspace_pointers(
    parts: Mapping[str, tuple[str, DimJson]],
) -> tuple[tuple[Pointer, ...], DimJson]:
    """Place buffers (Triton type, bytes) one after the other in the workspace, 256-byte aligned."""
    found: list[Pointer] = []
    total: DimJson = 0
    for name, (dtype, num_bytes) in parts.items():
        found.append(Pointer(name, "workspace", dtype, total))
        rounded: DimJson = ["mul", ["ceildiv", num_bytes, 256], 256]
        total = rounded if total == 0 else ["add", total, rounded]
    return tuple(found), total


def softmax_parts(
    tokens: DimJson, heads: int, parts: DimJson, width: int
) -> tuple[tuple[Pointer, ...], DimJson]:
    """Place what attention in parts leaves for each token and head: the largest score, the sum of
    weights and `width` weighted values of every part, in fp32. Return pointers and bytes."""
    each: DimJson = ["mul", tokens, heads, parts, 4]
    return workspace_pointers(
        {
            "part_max": ("fp32", each),
            "part_sum": ("fp32", each),
            "part_mix": ("fp32", ["mul", each, width]),
        }
    )
