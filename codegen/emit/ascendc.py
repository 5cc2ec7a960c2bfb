"""Emitter for AscendC written directly: row programs and attention, on the vector cores.

The Ascend dialect of TileLang is the other way (tilelang_ascend.py). Row programs are here because
its layout inference refuses a row sum that is read back by elements ("no available layout found"),
and because a fixed tree of lanes, paged stores and rows chosen by an index have no form in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.codegen.emit.ascendc_host import Launch, entry
from tilewright.codegen.emit.ascendc_memory import fits
from tilewright.codegen.emit.ascendc_rows import SIZES, AscendRows
from tilewright.codegen.emit.ascendc_text import BARRIER, THREADS
from tilewright.codegen.emit.cpp import environment, row_extent
from tilewright.codegen.emit.cpp_host import cpp_extent
from tilewright.codegen.emit.cpp_types import storage
from tilewright.codegen.emit.shapes import constant
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph import Graph, Node
from tilewright.graph.dims import Dim, to_json
from tilewright.graph.errors import LowerError
from tilewright.graph.ops import Kind, op_def
from tilewright.graph.types import BlockFormat

ARGMAX_PART = 16384  # entries of a row in the buffer at once
MOST_ARGUMENTS = 12  # of a vector function; public kernels have more, no page names a limit


def emit(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
    """Render the kernel of a spec; raise LowerError for a body the template cannot express."""
    from tilewright.codegen.emit.ascendc_attend import attend
    from tilewright.codegen.emit.ascendc_attend_cube import attend_cube
    from tilewright.codegen.emit.ascendc_contract import contract
    from tilewright.codegen.emit.ascendc_latent import latent
    from tilewright.codegen.emit.ascendc_latent_cube import latent_cube
    from tilewright.codegen.emit.ascendc_mx import contract_mx
    from tilewright.codegen.emit.ascendc_select import select, select_cube

    build = {
        "ascendc/row.asc.j2": _row,
        "ascendc/argmax.asc.j2": _argmax,
        "ascendc/attend.asc.j2": attend,
        "ascendc/attend_cube.asc.j2": attend_cube,
        "ascendc/contract.asc.j2": contract,
        "ascendc/contract_mx.asc.j2": contract_mx,
        "ascendc/latent.asc.j2": latent,
        "ascendc/latent_cube.asc.j2": latent_cube,
        "ascendc/select.asc.j2": select,
        "ascendc/select_cube.asc.j2": select_cube,
    }
    devices, launches = build[template.path](spec)
    return KernelSource(spec.symbol, "ascendc", kernel_text(spec, devices, launches))


def kernel_text(spec: KernelSpec, devices: Sequence[str], launches: Sequence[Launch]) -> str:
    """Return a whole source: device kernels, then the host side."""
    body = entry(spec, launches, blocks=spec.schedule.values["cores"])
    host = f'#include "tw_ascend_host.h"\n{body}'
    template = environment().get_template("ascendc/kernel.asc.j2")
    return template.render(devices=devices, host=host)


def _row(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    body, rows, name = spec.body, row_extent(spec.body), f"k_{spec.symbol}"
    groups = _groups(spec, rows)
    programs = [
        row_program(
            name if len(groups) == 1 else f"{name}_{i}", body,
            _needed(body, group, sum(groups[:i], [])), rows, _sinks(body, group),
            spec.numerics.lanes,
        )
        for i, group in enumerate(groups)
    ]  # fmt: skip
    return [p.text for p in programs], [p.launch(rows) for p in programs]


def _groups(spec: KernelSpec, rows: Dim) -> list[list[str]]:
    """Results and stores of a body, together if the rows of all fit the buffer; else as few
    launches as it takes, each of which computes what its results need, or reads what an earlier
    launch left."""
    body = spec.body
    stores = [n.name for n in body.nodes if op_def(n.op).kind is Kind.STORE]
    results = list(dict.fromkeys([*(v for _, v in body.outputs), *stores]))
    if _fits_buffer(spec, rows, results, []):
        return [results]
    groups: list[list[str]] = []
    for result in results:
        for i, group in enumerate(groups):
            if _fits_buffer(spec, rows, [*group, result], sum(groups[:i], [])):
                group.append(result)
                break
        else:
            groups.append([result])
    return groups


def _sinks(body: Graph, results: Sequence[str]) -> dict[str, str]:
    made = {value for _, value in body.outputs}
    return {r: r for r in results if r in made}


def _needed(body: Graph, results: Sequence[str], done: Sequence[str]) -> list[str]:
    """What some results need in the order of the graph, but for results that are in memory."""
    found: set[str] = set()
    todo = list(results)
    while todo:
        name = todo.pop()
        if name in body.node and name not in found:
            found.add(name)
            todo += [i for i in body.node[name].inputs if i not in _sinks(body, done)]
    return [n.name for n in body.nodes if n.name in found]


def _fits_buffer(
    spec: KernelSpec, rows: Dim, results: Sequence[str], done: Sequence[str]
) -> bool:
    nodes = _needed(spec.body, results, done)
    sinks = _sinks(spec.body, results)
    program = _fitting(spec.body, nodes, rows, sinks, spec.numerics.lanes)
    return fits(list(program.regions.values()))


def _argmax(spec: KernelSpec) -> tuple[list[str], list[Launch]]:
    """Rows too long for the buffer, read in parts."""
    (node,) = spec.body.nodes
    (x,) = node.inputs
    rows, name = spec.body.type_of(x).shape[0], f"k_{spec.symbol}"
    width = constant(spec.body.type_of(x).shape[-1])
    text = environment().get_template("ascendc/argmax.asc.j2").render(
        name=name, x=x, out=node.name, width=width, part=ARGMAX_PART, threads=THREADS
    )  # fmt: skip
    given = f"(float*){x}->data, (int32_t*){node.name}->data"
    call = f"{name}({given}, (int32_t)({cpp_extent(to_json(rows))}))"
    return [text], [Launch(name, "vector", call)]


@dataclass(frozen=True)
class RowProgram:
    """The text of a row kernel; its parameters are pointers (type, tensor), the number of rows and
    further extents."""

    name: str
    text: str
    pointers: tuple[tuple[str, str], ...]
    extents: tuple[str, ...]

    def launch(self, rows: Dim, *, scratch: Sequence[str] = ()) -> Launch:
        """Return the call; tensors in `scratch` stand in the workspace."""
        given = [
            f"({ctype}*){'workspace' if tensor in scratch else tensor}->data"
            for ctype, tensor in self.pointers
        ]
        ints = [f"(int32_t)({text})" for text in (cpp_extent(to_json(rows)), *self.extents)]
        return Launch(self.name, "vector", f"{self.name}({', '.join([*given, *ints])})")


def row_program(
    name: str,
    body: Graph,
    nodes: Sequence[str],
    rows: Dim,
    sinks: Mapping[str, str],
    lanes: int,
) -> RowProgram:
    """Return the row kernel that computes some nodes of a body."""
    program = _fitting(body, nodes, rows, sinks, lanes)
    layout, regions = program.layout, program.regions
    found: dict[str, str] = {}
    shared, copies = _copies(body, program, found)
    found |= program.pointers
    stores, appends = [], []
    for node_name, tensor in sinks.items():
        region = regions[f"o_{node_name}"]
        found[tensor] = region.ctype
        stores.append((tensor, layout.offsets[region.name], region.width, region.row_bytes))
    for node in (body.node[n] for n in nodes if op_def(body.node[n].op).kind is Kind.STORE):
        appends.append(_append(body, node, program, found))
    tensors = [(ctype, tensor) for tensor, ctype in found.items()]
    text = environment().get_template("ascendc/row.asc.j2").render(
        name=name,
        threads=THREADS,
        pointers=tensors,
        extents=list(program.extents),
        phases=_phases(program),
        regions=[(r.ctype, r.name, layout.offsets[r.name], r.staged) for r in regions.values()],
        stage_bytes=layout.stage_bytes,
        stages=layout.stages,
        tile_rows=layout.rows,
        shared=shared,
        copies=copies,
        stores=stores,
        appends=appends,
    )  # fmt: skip
    return RowProgram(name, text, tuple(tensors), tuple(program.extents))


@dataclass(frozen=True)
class _Phase:
    """A vector function: its suffix, its text, the tensors it reads itself, further numbers."""

    suffix: str
    text: str
    far: tuple[tuple[str, str], ...]
    extents: tuple[str, ...]


def _phases(program: AscendRows) -> list[_Phase]:
    """Share a program among as few vector functions as their number of arguments allows. Between
    two of its barriers stands a block whose values live in the buffer, so that any barrier may be
    the end of one function instead."""
    parts: list[list[str]] = [[]]
    for line in program.function:
        if line == BARRIER:
            parts.append([])
        else:
            parts[-1].append(line)
    groups: list[list[str]] = []
    for part in parts:
        joined = [*groups[-1], BARRIER, *part] if groups else part
        if groups and _fits_call(program, joined):
            groups[-1] = joined
        else:
            groups.append(part)
    return [
        _Phase(f"_{i}" if len(groups) > 1 else "", "\n".join("  " + line for line in lines),
               *_arguments(program, lines))
        for i, lines in enumerate(groups)
    ]  # fmt: skip


def _arguments(
    program: AscendRows, lines: Sequence[str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    words = set(re.findall(r"\w+", "\n".join(lines)))
    far = tuple((n, t) for n, t in program.pointers.items() if n in words)
    return far, tuple(e for e in program.extents if e in words)


def _fits_call(program: AscendRows, lines: Sequence[str]) -> bool:
    far, extents = _arguments(program, lines)
    return 4 + len(far) + len(extents) <= MOST_ARGUMENTS


def _fitting(
    body: Graph, nodes: Sequence[str], rows: Dim, sinks: Mapping[str, str], lanes: int
) -> AscendRows:
    """Return the program; operands with the longest rows stay in global memory if one row of all
    does not fit the buffer, then the longest kept values are computed where they are read."""
    program = AscendRows(body, nodes, rows, sinks, lanes)
    again: frozenset[str] = frozenset()
    while not fits(list(program.regions.values())):
        brought = [(c.row_bytes, c.tensor) for c in program.copies.values() if c.how != "indexed"]
        if not brought:
            break
        far = program.far | {max(brought)[1]}
        program = AscendRows(body, nodes, rows, sinks, lanes, far=far)
    while not fits(list(program.regions.values())):
        longest = program.longest_kept()
        if longest is None:
            break
        again |= {longest}
        program = AscendRows(body, nodes, rows, sinks, lanes, far=program.far, again=again)
    return program


def _copies(
    body: Graph, program: AscendRows, found: dict[str, str]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """What is brought once, and what for each tile; `found` grows by the tensors and indices."""
    shared: list[tuple[Any, ...]] = []
    tiled: list[tuple[Any, ...]] = []
    for copy in program.copies.values():
        region, place = program.regions[copy.region], program.layout.offsets[copy.region]
        found[copy.tensor] = region.ctype
        if copy.how == "shared":
            shared.append((place, copy.tensor, copy.row_bytes))
            continue
        limit = ""
        if copy.index:
            found[copy.index] = "int32_t"
            if copy.tensor in body.weight:  # a table: an id outside it brings nothing
                limit = str(constant(body.type_of(copy.tensor).shape[0]))
        sizes = copy.row_bytes, region.row_bytes
        tiled.append((copy.how, copy.tensor, place, *sizes, copy.index, limit))
    return shared, tiled


def _append(body: Graph, node: Node, program: AscendRows, found: dict[str, str]) -> tuple[Any, ...]:
    """One store of rows: state, slot of row `first + r`, place in the buffer, how rows lie."""
    state, x, slots = node.inputs
    region = program.regions[f"o_{node.name}"]
    offset = program.layout.offsets[region.name]
    type_, heads, block_size, bytes_ = body.type_of(state), 1, 1, region.width
    if node.op == "append":
        heads, block_size, width = (constant(d) for d in type_.shape[1:])
        bytes_ = width * SIZES[storage(body.type_of(x).dtype).ctype]
    found[state] = "uint8_t" if isinstance(type_.dtype, BlockFormat) else region.ctype
    slot = _slot(body, node, program, found)
    return state, slot, offset, region.row_bytes, heads, bytes_, block_size


def _slot(body: Graph, node: Node, program: AscendRows, found: dict[str, str]) -> str:
    """Text of the scalar program for a row's slot: read, or found in the page tables."""
    slots = node.inputs[2]
    if slots not in program.inside:
        found[slots] = "int32_t"
        return f"{slots}[first + r]"
    made = program.inside[slots]
    if made.op != "page_slots" or any(i in program.inside for i in made.inputs):
        raise LowerError(f"{node.op} '{node.name}': slots come from '{made.op}': want page_slots "
                         "of operands, or an operand")  # fmt: skip
    positions, rows, tables = made.inputs
    found |= dict.fromkeys(made.inputs, "int32_t")
    pages = program.extent(tables, 1)
    where = f"{rows}[first + r], {positions}[first + r]"
    sizes = f"{made.attr['ratio']}, {made.attr['entries']}"
    return f"tw_scalar_page_slot({tables}, {pages}, {where}, {sizes})"
