"""Attention over latent rows and selection of entries compile to cubins for both chips, in the
shapes of the released models; what the compiler says of registers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from device.cases_attend import TIMED, built
from support.contract_graphs import only_body
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.targets.registry import resolve

NAMES = ("V4.1 window", "V4.1 selected", "V4 selected", "V4 compressed", "V4-Pro selected",
         "V4 index", "V4.1 index, blocks", "V4.1 index, within")  # fmt: skip


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm90", "sm100"])
@pytest.mark.parametrize("name", NAMES)
def test_first_schedules_compile(chip: str, name: str, tmp_path: Path) -> None:
    """Nothing spills on SM90; on SM100 nothing where few tokens are split."""
    target, toolchain = resolve(chip)
    body = only_body(built(TIMED[name]))
    kind = "select" if name.count("index") else "attend"
    template = next(t for t in target.kernels if t.kind == kind and not t.accepts(body.graph))
    numerics = derive(kind, body.graph, target)
    specs = [
        KernelSpec(kind, body.graph, template.name, numerics,
                   template.schedules(body.graph, numerics, rows)[0], body.buffers)
        for rows in (1, 512)
    ]  # fmt: skip
    sources = [emit(s, template) for s in specs]
    cache = KernelCache(tmp_path, toolchain)
    cache.build(sources, jobs=1, progress=lambda *_: None)
    for spec in specs if chip == "sm90" else specs[:1]:
        for used in toolchain.reports[spec.symbol]:
            assert used.get("spilled_bytes", 0) == 0, (str(spec.schedule), used)
