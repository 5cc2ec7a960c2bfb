"""Row kernels of paged models compiled for NVIDIA targets, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.deepseek import v4_graph, v41_graph
from support.triton_rows import TEMPLATE, named_row_bodies, row_spec
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.registry import emit
from tilewright.graph import Graph
from tilewright.graph.types import BF16
from tilewright.models.known_config import released_formats
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import family_of
from tilewright.targets.registry import resolve

SMALL = Path(__file__).parents[2] / "models" / "small" / "config.json"


def small_graph() -> Graph:
    """The small V4.1 model that comes with us."""
    config = json.loads(SMALL.read_text())
    family = family_of(config)
    read = family.read_config(config)
    plain = family.build("small", read, Formats({}, BF16), Limits())
    stored = released_formats(config, plain, BF16)
    return family.build("small", read, Formats(stored, BF16), Limits())


GRAPHS: dict[str, Callable[[], Graph]] = {
    "small": small_graph, "v4": lambda: v4_graph(), "v41": lambda: v41_graph(),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_every_row_group_has_a_kernel(name: str) -> None:
    bodies = named_row_bodies(GRAPHS[name]())
    assert len(bodies) > 15
    for group, body in bodies:
        text = emit(row_spec(body), TEMPLATE).text
        assert "def rows(" in text, group


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize("name", ["small", "v4"])
def test_every_row_group_compiles(name: str, target: str, tmp_path: Path) -> None:
    """To machine code, with PTX that passes the scan; no kernel spills."""
    _, toolchain = resolve(target)
    sources = [emit(row_spec(body), TEMPLATE) for _, body in named_row_bodies(GRAPHS[name]())]
    KernelCache(tmp_path, toolchain).build(sources, jobs=2, progress=lambda *_: None)
    assert set(toolchain.reports) == {s.name for s in sources}
    for symbol, kernels in toolchain.reports.items():
        for used in kernels:
            assert used.get("spilled_bytes", 0) == 0, (symbol, used)
