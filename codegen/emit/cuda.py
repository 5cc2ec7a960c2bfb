"""Emitter for CUDA C++: kernels that need instructions Triton does not give. A source holds its
kernels and, under `TW_HOST`, the host function that launches their embedded image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.codegen.emit.cpp import environment
from tilewright.codegen.emit.cuda_contract import contract
from tilewright.codegen.emit.cuda_index import index
from tilewright.codegen.emit.cuda_latent import latent
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import KernelTemplate


def emit(spec: KernelSpec, template: KernelTemplate) -> KernelSource:
    """Render the kernel of a spec."""
    texts = TEXTS[template.path](spec)
    text = environment().get_template(template.path).render(name=spec.symbol, **texts)
    # Symbols of an object must not meet those of another.
    text = text.replace("TW_LAUNCH(", f"TW_LAUNCH({spec.symbol}_")
    return KernelSource(spec.symbol, "cuda", text)


TEXTS: Mapping[str, Callable[[KernelSpec], Mapping[str, Any]]] = {
    "cuda/contract.cu.j2": contract,
    "cuda/latent.cu.j2": latent,
    "cuda/select.cu.j2": index,
}
