"""Contractions of integer codes on NVIDIA targets without a GPU: what leads, scratch, and the order
in which values reach the matrix unit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.contract_graphs import experts, groups, linear, only_body
from tilewright.codegen.emit.cuda_chip import SHARED_BYTES
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.targets.registry import resolve

TARGET, TOOLCHAIN = resolve("sm90")
TEMPLATE = next(t for t in TARGET.kernels if t.name == "contract")
TESTS = Path(__file__).parents[1]
LAYERS: dict[str, Callable[[], Graph]] = {
    "q": lambda: linear([("q4_1", 576)], 576),
    "gate, up": lambda: linear([("q4_1", 1536), ("q4_1", 1536)], 576, gated=True),
    "q8_0": lambda: linear([("q8_0", 200)], 608),
}  # fmt: skip


def specs_of(graph: Graph, rows: int) -> list[KernelSpec]:
    body = only_body(graph)
    numerics = derive("contract", body.graph, TARGET)
    return [
        KernelSpec("contract", body.graph, "contract", numerics, schedule, body.buffers)
        for schedule in TEMPLATE.schedules(body.graph, numerics, rows)
    ]


def are_decoded(specs: list[KernelSpec]) -> list[bool]:
    return [bool(s.schedule.values.get("decoded")) for s in specs]


def blocks(spec: KernelSpec, rows: int, columns: int) -> int:
    values = spec.schedule.values
    return -(-rows // values["bm"]) * -(-columns // values["bn"])


def test_weights_are_decoded_before_many_rows() -> None:
    """By tiles that leave the fewest cores idle, the tallest first."""
    for name, columns in (("q", 576), ("gate, up", 1536), ("q8_0", 200)):
        for rows in (1, 32, 128, 255):
            assert not any(are_decoded(specs_of(LAYERS[name](), rows)))
        for rows in (256, 512, 8192):
            specs = specs_of(LAYERS[name](), rows)
            found = are_decoded(specs)
            count = sum(found)
            assert 5 <= count < len(found) and all(found[:count])
            busy = [min(blocks(s, rows, columns), 132) for s in specs[:count]]
            assert busy == sorted(busy, reverse=True)
    assert specs_of(LAYERS["gate, up"](), 512)[0].schedule.values["bm"] == 128


def test_few_rows_have_low_tiles_and_more_have_tall_ones() -> None:
    lowest = {rows: specs_of(LAYERS["q"](), rows)[0].schedule.values["bm"] for rows in (1, 32, 33)}
    assert lowest == {1: 16, 32: 16, 33: 64}


@pytest.mark.parametrize("build", [
    lambda: linear([("q4_1", 40), ("bf16", 40)], 96),
    lambda: linear([("q4_1", 40), ("fp8", 40)], 96),
    lambda: experts("q4_1", n=40, k=96, shared=True, gated=False),
    lambda: groups("q8_0", n=40, k=96),
], ids=["bf16 beside", "fp8 beside", "experts", "groups"])  # fmt: skip
def test_other_contractions_decode_in_their_tiles(build: Callable[[], Graph]) -> None:
    assert not any(are_decoded(specs_of(build(), 512)))


def test_scratch_holds_both_parts_of_all_weights_and_is_bounded() -> None:
    """Columns fill up their blocks; weights larger than 32 MB are decoded in the tiles."""
    for spec in specs_of(linear([("q4_1", 72), ("q4_1", 72), ("q8_0", 24)], 160, gated=True), 512):
        values, bn = spec.schedule.values, spec.schedule.values["bn"]
        columns = 2 * -(-72 // bn) * bn + -(-24 // bn) * bn
        need = TEMPLATE.scratch_bytes(spec.body, spec.numerics, spec.schedule, {"tokens": 512})
        assert need == (columns * 160 * 4 if values.get("decoded") else 256)
    largest = specs_of(linear([("q4_1", 4096)], 2048), 512)
    assert any(are_decoded(largest))
    assert not any(are_decoded(specs_of(linear([("q4_1", 4096 + 16)], 2048), 512)))


def test_tiles_of_several_sections_fit_the_memory_of_a_block() -> None:
    """Q, K and V: a tall tile of decoded weights has no room for three sections' stages."""
    three = linear([("q4_1", 576), ("q4_1", 192), ("q4_1", 192)], 576)
    for rows in (1, 64, 512):
        specs = specs_of(three, rows)
        assert len(specs) >= 12
        for spec, decoded in zip(specs, are_decoded(specs), strict=True):
            v = spec.schedule.values
            rows_bytes, values = 3 * v["bm"] * v["bk"] * 2, 3 * 2 * v["bn"] * v["bk"] * 2
            least = v["stages"] * (rows_bytes + values) if decoded else v["stages"] * rows_bytes
            assert least <= SHARED_BYTES, v
    decoded = [s.schedule.values for s in specs_of(three, 512) if s.schedule.values.get("decoded")]
    assert {(v["bm"], v["bn"]) for v in decoded} == {(128, 32), (64, 32)}


@pytest.mark.cpu
def test_values_reach_the_matrix_unit_in_the_order_of_k(tmp_path: Path) -> None:
    """Two a thread, as `mma.sync` of bf16 takes them; more would be dealt out in another order than
    `wgmma` reads from shared memory."""
    for name, text in TOOLCHAIN.support_sources().items():
        (tmp_path / name).write_text(text)
    specs = [
        *specs_of(LAYERS["q"](), 1), *specs_of(LAYERS["q"](), 512)[:2],
        *specs_of(LAYERS["q8_0"](), 1)[:3], *specs_of(LAYERS["gate, up"](), 1)[:2],
    ]  # fmt: skip
    for spec in specs:
        (tmp_path / f"{spec.symbol}.py").write_text(emit(spec, TEMPLATE).text)
    names = dict.fromkeys(s.symbol for s in specs)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    environment.pop("TRITON_INTERPRET", None)
    printed = subprocess.run(
        [sys.executable, "-m", "support.operand_order", str(tmp_path),
         str(TOOLCHAIN.capability), *names],
        capture_output=True, text=True, check=True, env=environment,
    ).stdout  # fmt: skip
    found = {name: (widths, by) for name, widths, by in map(json.loads, printed.splitlines())}
    assert set(found) == set(names)
    assert {by for _, (by,) in found.values()} == {"mma.sync", "wgmma"}
    for widths, (by,) in found.values():
        assert widths == ([2] if by == "mma.sync" else [])
