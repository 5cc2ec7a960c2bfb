"""The Ascend 950 as a target: parts, tiles that no batch can change, refused text."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kernel_case import distinct_bodies
from support.tiny import tiny_graph
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.numerics import derive
from tilewright.codegen.source import KernelSource
from tilewright.graph.errors import LowerError, TargetError
from tilewright.runtime.artifact import TargetRecord
from tilewright.runtime.devices import ascend950_model
from tilewright.runtime.errors import ArtifactError
from tilewright.targets.ascend950 import chip
from tilewright.targets.ascend950.target import PARTS, ascend950_target
from tilewright.targets.registry import resolve

SETTINGS = CompileConfig(dtype="bfloat16", max_context=64, block_size=8)


def test_parts_and_the_model() -> None:
    assert ascend950_target().variant == "950pr-32"
    assert ascend950_target("+model").variant == "950-4+model"
    assert {ascend950_target(p).invariance for p in PARTS} == {"unproven"}
    target, toolchain = resolve("ascend950:950dt-36")
    assert "tilelang" in toolchain.identity() and "functional model" not in toolchain.identity()
    assert target.peak_flops == pytest.approx(36 / 32 * 432e12)


def test_a_library_for_another_machine_is_refused() -> None:
    here = TargetRecord("ascend950", "950-4+model", (platform.machine(),), "g++", ())
    assert ascend950_model.accepts(here)
    with pytest.raises(ArtifactError) as error:
        ascend950_model.accepts(replace(here, features=("pdp11",)))
    assert str(error.value) == (
        f"variant '950-4+model' is for another architecture: got {platform.machine()}, want pdp11; "
        "compile the model again on this machine"
    )


def test_unknown_part() -> None:
    with pytest.raises(TargetError) as error:
        ascend950_target("910b")
    assert str(error.value) == (
        "ascend950 variant '910b': unknown: have 950pr-32, 950pr-28, 950dt-36, 950-8, 950-4, each "
        "also with +model for the functional model"
    )


@given(
    n=st.integers(1, 9000),
    k=st.integers(1, 9000),
    anchors=st.integers(1, 3),
    cores=st.sampled_from([4, 8, 28, 32, 36]),
)
def test_tiles_fit_the_memories(n: int, k: int, anchors: int, cores: int) -> None:
    tile = chip.best_tile(n=n, k=k, anchors=anchors, cores=cores)
    assert tile.fits(anchors)
    assert tile.bm % 32 == 0  # both vector cores take whole fractals


def test_matrix_cycles_are_near_the_published_gemm() -> None:
    """Huawei publishes 2,572 us for an 8192-cubed bf16 product on 32 cores; the matrix unit alone
    takes 2,542 us by the formula."""
    tile = chip.Tile(128, 256, 256)
    steps = 8192**3 / (tile.bm * tile.bn * tile.bk)
    fractals = tile.bm / 16 * tile.bn / 16 * tile.bk / 16
    microseconds = steps / 32 * (fractals + chip.MATRIX_START) / chip.CLOCK_HZ * 1e6
    assert microseconds == pytest.approx(2542, rel=0.05)


def test_schedules_do_not_see_the_batch() -> None:
    target = ascend950_target()
    for _, kind, body in distinct_bodies(tiny_graph("bf16", settings=SETTINGS)):
        template = next(t for t in target.kernels if t.kind == kind)
        numerics = derive(kind, body.graph, target)
        found = {template.schedules(body.graph, numerics, rows) for rows in (1, 3, 512)}
        assert len(found) == 1 and len(next(iter(found))) == 1


def test_fp32_activations_are_refused() -> None:
    target = ascend950_target()
    graph = tiny_graph("bf16", settings=CompileConfig(dtype="float32"))
    contract = next(t for t in target.kernels if t.kind == "contract")
    reasons = {
        contract.accepts(body.graph)
        for _, kind, body in distinct_bodies(graph)
        if kind == "contract"
    }
    assert reasons == {"activation is f32, want bf16 (compile with --dtype bfloat16)"}


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("ascendc", "asc_set_atomic_add(1);", "an atomic has no fixed order of accumulation"),
        ("ascendc", "x = asc_reduce_add(x);", "the order of the hardware's sum is not documented"),
        ("ascendc", "y = expf(x);", "its bits are the compiler's: use the functions of tw_asc"),
        ("tilelang_ascend", "T.atomic_add(y, x)", "an atomic has no fixed order of accumulation"),
        ("tilelang_ascend", "T.reduce_sum(a, b)", "its order is the compiler's"),
        ("tilelang_ascend", "y = T.exp(x)", "its bits are the compiler's"),
    ],
)
def test_unordered_text_is_refused(language: str, text: str, message: str) -> None:
    with pytest.raises(LowerError, match=f"kernel 'k': forbidden text .* in line 2: {message}"):
        KernelSource("k", language, f"\n{text}\n")
