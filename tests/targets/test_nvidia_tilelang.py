"""TileLang programs of NVIDIA targets without a GPU: what is taken, printing, cubins."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.contract_graphs import experts, linear, only_body, residual
from tilewright.codegen.cache import KernelCache
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.emit.tilelang import refuses_tilelang
from tilewright.codegen.emit.triton_contract import contractions
from tilewright.codegen.numerics import derive
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.tune import BUDGET
from tilewright.graph import Graph
from tilewright.graph.errors import LowerError, TargetError
from tilewright.targets.nvidia.build_cuda import find_nvcc
from tilewright.targets.nvidia.build_tilelang import read_print
from tilewright.targets.registry import resolve

TARGETS = ("sm90", "sm100")
NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None or find_nvcc() is None,
    reason="TileLang or CUDA's nvcc is not installed",
)
GRAPHS: dict[str, Callable[[], Graph]] = {
    "square": lambda: linear([("bf16", 4096)], 4096),
    "segments": lambda: linear([("bf16", 384)], 5120),
    "pair": lambda: linear([("bf16", 1536), ("bf16", 1536)], 576, gated=True),
    "residual": lambda: residual(200, 520),
}


def specs(name: str, target_name: str, rows: int, graph: Graph | None = None) -> list[KernelSpec]:
    target = resolve(target_name)[0]
    body = only_body(graph or GRAPHS[name]())
    template = next(t for t in target.kernels if t.name == "contract")
    numerics = derive("contract", body.graph, target)
    return [
        KernelSpec("contract", body.graph, "contract", numerics, schedule, body.buffers)
        for schedule in template.schedules(body.graph, numerics, rows)
    ]


def programs(name: str, target_name: str, rows: int) -> list[KernelSpec]:
    return [s for s in specs(name, target_name, rows) if s.schedule.values.get("tilelang")]


def source_of(spec: KernelSpec, target_name: str) -> KernelSource:
    template = next(t for t in resolve(target_name)[0].kernels if t.name == "contract")
    return emit(spec, template)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_tuner_meets_both_languages(name: str) -> None:
    for target in TARGETS:
        for rows in (1, 64, 512, 4096):
            tried = specs(name, target, rows)[:BUDGET]
            languages = {"tilelang" in s.schedule.values for s in tried}
            assert languages == {True, False}, (target, rows)
            assert len({s.numerics for s in tried}) == 1


def test_programs_lead_where_they_were_faster() -> None:
    """From k 2,048 on, and where two products of many rows meet; on SM100, where nobody has
    measured, for many rows alone. Tiles are those that a chip's cores are done with first."""
    leads = {
        (name, target, rows): specs(name, target, rows)[0].schedule.values
        for name in GRAPHS for target in TARGETS for rows in (1, 64, 4096)
    }  # fmt: skip
    led = {key for key, values in leads.items() if "tilelang" in values}
    assert led == {
        *(("square", "sm90", rows) for rows in (1, 64, 4096)),
        *(("segments", "sm90", rows) for rows in (1, 64, 4096)),
        *((name, "sm100", 4096) for name in ("square", "segments", "pair")),
        ("pair", "sm90", 4096),
    }
    tiles = [(v["bm"], v["bn"]) for v in (leads["square", "sm90", r] for r in (1, 64, 4096))]
    assert tiles == [(8, 64), (64, 32), (128, 256)]


def test_what_a_program_cannot_express_keeps_to_triton() -> None:
    def reason(graph: Graph) -> str | None:
        body = only_body(graph).graph
        return refuses_tilelang(body, derive("contract", body, resolve("sm90")[0]),
                                contractions(body))  # fmt: skip

    assert reason(GRAPHS["residual"]()) is None
    assert reason(linear([("fp8", 64)], 256)) == "operands are not all bf16"
    assert reason(linear([("f32", 64)], 256)) == "operands are not all bf16"
    assert reason(linear([("bf16", 64)], 100)) == "k = 100: rows are no multiple of 16 bytes"
    routed = experts("bf16", n=64, k=256, shared=True, gated=False)
    assert reason(routed) == "rows meet more than one matrix"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_program_is_python(name: str, target: str) -> None:
    for rows in (1, 64, 512, 4096):
        for spec in programs(name, target, rows):
            found = re.search(r"TILELANG = r'''(.*?)'''", source_of(spec, target).text, re.DOTALL)
            assert found is not None
            ast.parse(found[1])


def test_text_is_scanned() -> None:
    for text in ("T.atomic_add(c[0], 1)", "T.reduce_sum(a, b)", "y = T.exp(x)", "T.rng_init(1)"):
        with pytest.raises(LowerError, match="forbidden text"):
            KernelSource("k", "tilelang", text)


_TEXT = """#include <tl_templates/cuda/intrin.h>
extern "C" __global__ void __launch_bounds__(384, 1) contract_kernel(CUtensorMap a, float* y) {
  float acc[64];
  tl::warpgroup_fence_operand(reinterpret_cast<float*>(acc + 0), 128);
}
"""
_HOST = """
  T.call_packed("__tvm_tensormap_create_tiled", a, 9, 2, x, 64, m, 2, 128, 64, 8, 1, 1, 0, %d, 2, 0)
  T.call_packed("contract_kernel", a, y, T.min((m + 7) // 8, 132), 384, 1, 1, 2048)
"""


def test_what_is_printed_is_compared_with_our_host() -> None:
    """Fences count no more registers than there are, and our functions are included."""
    found = read_print(_TEXT, _HOST % 3)
    assert (found.parameters, found.boxes) == (("a", "y"), {"a": (8, 64)})
    assert (found.threads, found.shared_bytes) == (384, 2048)
    assert "float*>(acc + 0), 64)" in found.text and " contract(CUtensorMap" in found.text
    assert found.text.startswith('#include "tw_math.cuh"\n#include <tl_templates')
    with pytest.raises(TargetError, match="TileLang describes 'a' unlike this host"):
        read_print(_TEXT, _HOST % 2)


@NEEDED
@pytest.mark.cpu
def test_a_program_is_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    source = source_of(programs("residual", "sm90", 512)[0], "sm90")
    (text,) = resolve("sm90")[1].printed(source.file_name, source.text).values()
    assert "tl::wgmma_ss<" in text and "tl::tma_load(p_x_desc" in text
    other = resolve("sm90")[1]
    monkeypatch.setattr(other, "_triton", None)  # would be asked if nothing were kept
    assert other.printed(source.file_name, source.text) == {f"{source.name}.cu": text}
    assert other.printed("row.py", "no program") == {}


def compiled(names: list[str], target_name: str, rows: list[int], count: int, folder: Path) -> None:
    target, toolchain = resolve(target_name)
    chosen = {
        s.symbol: source_of(s, target_name)
        for name in names for number in rows
        for s in programs(name, target_name, number)[:count]
    }  # fmt: skip
    built = KernelCache(folder, toolchain).build(
        list(chosen.values()), jobs=2, progress=lambda *_: None
    )
    toolchain.link(built.objects, folder / "kernels.so")
    assert set(toolchain.reports) >= set(chosen)
    for symbol, kernels in toolchain.reports.items():
        for used in kernels:
            assert used.get("spilled_bytes", 0) == 0, (symbol, used)
    if target_name == "sm100":
        found = [k["tensor_memory_columns"] for s in chosen for k in toolchain.reports[s]]
        assert any(found), found


@NEEDED
@pytest.mark.cpu
@pytest.mark.parametrize("name", TARGETS)
def test_a_program_compiles(name: str, tmp_path: Path) -> None:
    compiled(["residual"], name, [512], 1, tmp_path)


@NEEDED
@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_program_compiles(name: str, tmp_path: Path) -> None:
    compiled(list(GRAPHS), name, [1, 512], 5, tmp_path)


def test_texts_have_no_chip() -> None:
    """A schedule says which instructions a program is for."""
    texts = {t: source_of(programs("residual", t, 512)[0], t).text for t in TARGETS}
    assert "wgmma_gemm" in texts["sm90"] and "tcgen05_gemm" in texts["sm100"]
    assert not re.search(r"sm_?\d+", texts["sm90"] + texts["sm100"])
