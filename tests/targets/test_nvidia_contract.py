"""Contractions of NVIDIA targets without a GPU: schedules, refusals, cubins of every form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.contract_graphs import experts, groups, linear, only_body
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.cuda_chip import SHARED_BYTES
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.numerics import derive, segment_length
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import BF16, I32, element_type
from tilewright.targets.registry import resolve

TARGETS = ("sm90", "sm100")
GRAPHS: dict[str, Callable[[], Graph]] = {
    "fp8": lambda: linear([("fp8", 1280), ("fp8", 512)], 5120),
    "fp8 128": lambda: linear([("fp8_128", 4096)], 4096),
    "fp4": lambda: linear([("fp4", 2304), ("fp4", 2304)], 5120, gated=True),
    "mixed": lambda: linear([("fp8", 64), ("bf16", 64), ("fp4", 72)], 2048),
    "q4_1": lambda: linear([("q4_1", 4096)], 4096),
    "q8_0": lambda: linear([("q8_0", 40), ("q8_0", 40)], 1024, gated=True),
    "bf16": lambda: linear([("bf16", 384)], 5120),
    "bf16 sections": lambda: linear([("bf16", 64), ("bf16", 64), ("bf16", 24)], 256),
    "bf16 wide": lambda: linear([("bf16", 4096)], 4096),
    "f32": lambda: linear([("f32", 24)], 20480),
    "experts": lambda: experts("fp4", n=2304, k=5120, shared=True, gated=True, count=384, slots=6),
    "experts w2": lambda: experts("fp4", n=5120, k=2304, shared=False, gated=False, count=384,
                                  slots=6),
    "experts fp8": lambda: experts("fp8", n=136, k=288, shared=True, gated=False),
    "experts fp8 128": lambda: experts("fp8_128", n=256, k=640, shared=True, gated=False),
    "groups": lambda: groups("fp8", n=1024, k=4096, count=8),
    "groups bf16": lambda: groups("bf16", n=40, k=96),
}  # fmt: skip


def specs(name: str, target_name: str, rows: int) -> list[KernelSpec]:
    target = resolve(target_name)[0]
    body = only_body(GRAPHS[name]())
    template = next(t for t in target.kernels if t.name == "contract")
    numerics = derive("contract", body.graph, target)
    return [
        KernelSpec("contract", body.graph, "contract", numerics, schedule, body.buffers)
        for schedule in template.schedules(body.graph, numerics, rows)
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_schedules_are_many_and_numerics_are_theirs_all(name: str) -> None:
    known = set()
    for rows in (1, 16, 64, 512, 4096):
        found = specs(name, "sm90", rows)
        assert len({s.schedule for s in found}) == len(found) >= 8
        known |= {s.numerics for s in found}
        splits = {s.schedule.values["split"] for s in found}
        assert splits == ({0} if found[0].numerics.segments == 1 else {0, 1})
        lists = {s.schedule.values["listed"] for s in found}
        assert lists == ({0, 1} if name.startswith("experts") else {0})
    assert len(known) == 1


@pytest.mark.parametrize(
    ("name", "segments", "length"),
    [("fp8", 8, 768), ("fp8 128", 1, 4096), ("bf16 wide", 1, 4096), ("q4_1", 8, 512),
     ("f32", 64, 512), ("experts", 1, 5120),
     ("experts w2", 1, 2304), ("groups", 4, 1024), ("groups bf16", 1, 256)],
)  # fmt: skip
def test_segments_are_as_many_as_fill_the_chip(name: str, segments: int, length: int) -> None:
    found = specs(name, "sm90", 1)[0]
    k = int(found.body.type_of(found.body.nodes[0].inputs[0]).shape[-1])
    assert found.numerics.segments == segments
    assert segment_length(k, segments) == -(-length // 256) * 256


def test_products_of_codes_have_an_atom_of_their_own() -> None:
    """Where rows are coded as well, and all weights of one launch are; on SM90 where a scale is
    for 128 values of k and not in experts, else what codes stand for is multiplied."""
    found = {
        (target, name): (n.atom, n.chunk, n.scale_order)
        for target in TARGETS
        for name in (
            "fp8", "fp8 128", "experts", "experts fp8 128", "mixed", "groups", "bf16"
        )
        for n in [specs(name, target, 1)[0].numerics]
    }
    values = ("mma", 0, "dequantise")
    assert found["sm90", "fp8"] == found["sm90", "experts"] == values
    assert found["sm90", "experts fp8 128"] == values
    assert found["sm100", "experts"] == ("mx", 0, "factored")
    assert found["sm90", "fp8 128"] == ("wgmma_e4m3", 128, "factored")
    assert found["sm100", "fp8"] == found["sm100", "fp8 128"] == ("mx", 0, "factored")
    assert found["sm90", "mixed"] == found["sm100", "groups"] == values
    assert found["sm90", "bf16"] == ("mma", 0, "none")


def in_triton(name: str, rows: int) -> list[KernelSpec]:
    """What leads beside programs in TileLang, which test_nvidia_tilelang.py is about."""
    return [s for s in specs(name, "sm90", rows) if "tilelang" not in s.schedule.values]


def test_many_rows_come_by_the_copy_engine_where_tiles_fit() -> None:
    for name, rows, wanted in (
        ("fp8 128", 4096, 3), ("fp8 128", 64, 1), ("fp8 128", 65, 3), ("fp8 128", 1, 2),
        ("bf16 wide", 4096, 1), ("bf16", 4096, 0), ("experts", 4096, 0), ("groups", 4096, 0),
        ("fp8", 1, 0),
    ):  # fmt: skip
        first, *rest = in_triton(name, rows)
        assert first.schedule.values.get("stream", 0) == wanted, (name, rows)
        streams = [s for s in (first, *rest) if s.schedule.values.get("stream")]
        assert bool(streams) == (name in ("fp8 128", "bf16 wide"))


@pytest.mark.parametrize("name", ["fp8", "fp4", "groups", "q4_1"])
def test_values_of_codes_are_multiplied_by_the_kernel_in_cuda(name: str) -> None:
    """Of fp8, by one warp each for few rows, by groups of warps for many; on SM90 alone."""
    few, many = (specs(name, "sm90", rows)[0].schedule.values.get("hopper") for rows in (1, 4096))
    assert (few, many) == ((None, None) if name in ("fp4", "q4_1") else (1, 2))
    assert all("hopper" not in s.schedule.values for s in specs(name, "sm100", 4096))


def test_few_columns_run_their_segments_beside_each_other() -> None:
    """Until tiles of whole rows are as many as the cores of the chip."""
    splits = {rows: in_triton("bf16", rows)[0].schedule.values["split"]
              for rows in (1, 64, 128, 256, 4096)}  # fmt: skip
    assert splits == {1: 1, 64: 1, 128: 1, 256: 1, 4096: 0}
    for rows in (256, 512):
        values = in_triton("bf16", rows)[0].schedule.values
        blocks = -(-rows // values["bm"]) * -(-384 // values["bn"]) * 8
        assert blocks >= 132, values


def test_tiles_fit_the_memory_of_a_block() -> None:
    for rows in (1, 64, 512):
        for spec in specs("bf16 sections", "sm90", rows):
            v = spec.schedule.values
            if "tilelang" in v:  # sections take turns
                assert v["stages"] * (v["bm"] + v["bn"]) * v["bk"] * 2 <= SHARED_BYTES, v
                continue
            assert v["stages"] * (3 * v["bm"] + 3 * v["bn"]) * v["bk"] * 2 <= SHARED_BYTES, v


def refused(graph: Graph) -> str | None:
    template = next(t for t in resolve("sm90")[0].kernels if t.name == "contract")
    return template.accepts(only_body(graph).graph)


def test_refusals() -> None:
    b = GraphBuilder("rank")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=8), 2, 64)
    b.output("y", b.linear(x, b.weight("w", BF16, 8, 64)))
    assert refused(b.build()) == "activation has rank 3, want 2"
    assert refused(linear([("q8_0", 8)], 48)) == "k = 48 is no multiple of the group of 32"
    b = GraphBuilder("rows")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=8), 64)
    table = element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]")
    b.output("y", b.linear(x, b.weight("w", table, 8, 64)))
    assert refused(b.build()) == f"weight format {table} has no packed layout"
    b = GraphBuilder("computed")
    x = b.input("x", BF16, b.dim("tokens", Role.BATCH, upper=8), 64)
    ids = b.input("ids", I32, *x.type.shape[:1], 2)
    w = b.input("w", BF16, 3, 8, 64)
    b.output("y", b.op("expert_linear", x, w, ids))
    assert refused(b.build()) == "second operand is computed, want a weight"


def compiled(names: list[str], target_name: str, rows: list[int], count: int, folder: Path) -> None:
    target, toolchain = resolve(target_name)
    template = next(t for t in target.kernels if t.name == "contract")
    sources = {}
    for name in names:
        for number in rows:
            for spec in specs(name, target_name, number)[:count]:
                sources[spec.symbol] = emit(spec, template)
    built = KernelCache(folder, toolchain).build(
        list(sources.values()), jobs=2, progress=lambda *_: None
    )
    toolchain.link(built.objects, folder / "kernels.so")
    assert set(toolchain.reports) >= set(sources)
    # On SM90 two products in turn put a few addresses into local memory, outside their loop; on
    # SM100 fp4 codes of many rows a word or two, and then another schedule is chosen.
    most = 256 if target_name == "sm90" else 8
    for symbol, kernels in toolchain.reports.items():
        for used in kernels:
            assert used.get("spilled_bytes", 0) <= most, (symbol, used)


@pytest.mark.cpu
@pytest.mark.parametrize("name", TARGETS)
def test_experts_compile(name: str, tmp_path: Path) -> None:
    compiled(["experts fp8", "experts fp8 128"], name, [1], 1, tmp_path)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_form_compiles(name: str, tmp_path: Path) -> None:
    compiled(list(GRAPHS), name, [1, 512], 1, tmp_path)
