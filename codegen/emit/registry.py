"""Emitters by language: a template's folder decides which one renders it, never the chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilewright.codegen.emit import ascendc, cpp, cuda, tilelang_ascend, triton
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate
from tilewright.graph.errors import LowerError

EMITTERS: Mapping[str, Callable[[KernelSpec, KernelTemplate], KernelSource]] = {
    "cpp": cpp.emit,
    "triton": triton.emit,
    "cuda": cuda.emit,
    "ascendc": ascendc.emit,
    "tilelang_ascend": tilelang_ascend.emit,
}


def emit(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
    """Render the kernel of a spec; raise LowerError for a body the template cannot express."""
    if template.language not in EMITTERS:
        raise LowerError(
            f"template '{template.name}': language '{template.language}': no emitter: "
            f"have {', '.join(EMITTERS)}"
        )
    return EMITTERS[template.language](spec, template)
