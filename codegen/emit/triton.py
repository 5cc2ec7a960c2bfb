"""Emitter for Triton: gives templates their texts, renders them and wraps the result as
`KernelSource`. A source is a Python module: kernels, their launches as data, and the host function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.codegen.emit.cpp import environment, row_extent
from tilewright.codegen.emit.triton_attend import attend
from tilewright.codegen.emit.triton_contract import contract
from tilewright.codegen.emit.triton_host import Launch, host_text, launch_table, parameters
from tilewright.codegen.emit.triton_index import selection
from tilewright.codegen.emit.triton_latent import latent
from tilewright.codegen.emit.triton_rows import RowPrinter
from tilewright.codegen.emit.triton_thin import thin
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph.dims import to_json


def emit(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
    """Render the kernel of a spec; raise LowerError for a body the template cannot express."""
    build = _TEXTS[template.path]
    text = environment().get_template(template.path).render(name=spec.symbol, **build(spec))
    return KernelSource(spec.symbol, "triton", text)


def _row(spec: KernelSpec) -> Mapping[str, Any]:
    body = spec.body
    rows = row_extent(body)
    sinks = {value: value for _, value in body.outputs}
    printer = RowPrinter(body, [n.name for n in body.nodes], rows, sinks, spec.numerics.lanes)
    launch = Launch("rows", (to_json(rows), printer.programs, 1), spec.schedule.values["warps"])
    return {
        "parameters": parameters(spec, launch),
        "statements": printer.text(),
        "launches": launch_table(spec, [launch]),
        "host": host_text(spec, [launch], 0),
    }


_TEXTS: Mapping[str, Callable[[KernelSpec], Mapping[str, Any]]] = {
    "triton/row.py.j2": _row,
    "triton/contract.py.j2": contract,
    "triton/attend.py.j2": attend,
    "triton/latent.py.j2": latent,
    "triton/select.py.j2": selection,
    "triton/thin.py.j2": thin,
}
