"""Triton contractions of integer codes in Triton's interpreter: every schedule gives the same bits,
weights that a kernel of their own decodes included, whoever else is in the batch.

Products add one value of k after the other here, so that bits tell which values meet, and in which
order. What a matrix instruction makes of that order is compared on a GPU (tests/device).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support import triton_run
from support.contract_graphs import experts, groups, linear, only_body, residual
from support.kernel_case import Case, distinct_bodies, errors, make_case
from support.tiny import tiny_graph
from tilewright.codegen.body import Body
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.numerics import derive
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import F32
from tilewright.targets.registry import resolve

TARGET = resolve("sm90")[0]
TEMPLATE = next(t for t in TARGET.kernels if t.name == "contract")
TOKENS = 139  # in tiles of 128 rows a whole one and a tail


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_run.correct_interpreter()
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", triton_run.dot_in_order)


def specs_of(body: Body, segments: int = 1) -> list[KernelSpec]:
    """A spec for every schedule of few rows and of many that differs in more than warps."""
    assert TEMPLATE.accepts(body.graph) is None
    numerics = replace(derive("contract", body.graph, TARGET), segments=segments)
    found: dict[Schedule, None] = {}
    for rows in (1, 64, 512):
        for schedule in TEMPLATE.schedules(body.graph, numerics, rows):
            found.setdefault(Schedule.of(**{**schedule.values, "warps": 4, "stages": 2}))
    return [
        KernelSpec("contract", body.graph, "contract", numerics, s, body.buffers) for s in found
    ]


def decoded(specs: list[KernelSpec]) -> list[KernelSpec]:
    return [s for s in specs if s.schedule.values.get("decoded")]


def run(spec: KernelSpec, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    return triton_run.run_spec(spec, TEMPLATE, case, folder)


def bits(spec: KernelSpec, arguments: dict[str, torch.Tensor]) -> list[bytes]:
    """Of the outputs, every NaN alike: which of two NaNs a sum keeps is up to the machine."""
    found = [arguments[v] for _, v in spec.body.outputs]
    return [torch.where(t.isnan(), torch.nan, t).view(torch.uint8).numpy().tobytes() for t in found]


def close(case: Case, got: dict[str, torch.Tensor]) -> None:
    for name, error in errors(case, got):
        assert error <= (2.0**-8 if got[name].dtype == torch.bfloat16 else 2e-5), (name, error)


def floats() -> Graph:
    """Rows of fp32, whose products with codes are taken in fp32."""
    b = GraphBuilder("floats")
    x = b.input("x", F32, b.dim("tokens", Role.BATCH, upper=512), 160)
    w = b.weight("w", linear([("q4_1", 40)], 160).weights[0].type.dtype, 40, 160)
    b.output("y", b.linear(x, w))
    return b.build()


GRAPHS: dict[str, tuple[Callable[[], Graph], int]] = {
    "two that meet, one alone": (lambda: linear(
        [("q4_1", 40), ("q4_1", 40), ("q8_0", 24)], 160, gated=True), 1),
    "formats that meet": (lambda: linear([("q8_0", 72), ("q4_1", 72)], 96, gated=True), 1),
    "segments": (lambda: linear([("q4_1", 24), ("q8_0", 72)], 544), 2),
    "residual": (lambda: residual(136, 288, "q8_0"), 1),
    "groups of 16": (lambda: linear([("q8_g16[g=16,axis=1,scale=f32]", 72)], 208), 1),
    "beside values": (lambda: linear([("q4_1", 24), ("bf16", 40)], 96), 1),
    "fp32": (floats, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_every_schedule_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Rows, columns and k that fill neither tiles nor steps; sums that show their order."""
    build, segments = GRAPHS[name]
    specs = specs_of(only_body(build()), segments)
    assert len(specs) >= 8
    assert bool(decoded(specs)) == (name not in ("beside values", "fp32"))
    case = make_case(specs[0], {"tokens": 37 if segments > 1 else TOKENS}, seed=3)
    found = {}
    for spec in specs:
        got = run(spec, case, tmp_path)
        close(case, got)
        found[repr(spec.schedule)] = bits(spec, got)
    first = found[repr(specs[0].schedule)]
    assert [s for s, other in found.items() if other != first] == []


@pytest.mark.parametrize("build", [
    lambda: experts("q4_1", n=40, k=96, shared=True, gated=True),
    lambda: groups("q8_0", n=40, k=96),
], ids=["experts", "groups"])  # fmt: skip
def test_experts_and_groups_decode_in_the_tile(build: Callable[[], Graph], tmp_path: Path) -> None:
    specs = specs_of(only_body(build()))
    assert decoded(specs) == []
    rng, found = np.random.default_rng(1), set()
    ids = torch.from_numpy(rng.integers(0, 5, (7, 2)).astype(np.int32))
    case = make_case(specs[0], {"tokens": 7}, seed=4, given={"x1": ids})
    for spec in specs:
        got = run(spec, case, tmp_path)
        close(case, got)
        found.add(repr(bits(spec, got)))
    assert len(found) == 1


def odd_rows(case: Case) -> Case:
    """Numbers of both signs over many powers of two, rows of zeros, infinities and NaN."""
    rng, arguments = np.random.default_rng(5), dict(case.arguments)
    x = arguments["x0"].clone()
    powers = torch.from_numpy(rng.integers(-20, 21, tuple(x.shape)))
    x = torch.ldexp(x.float(), powers).to(torch.bfloat16)
    x[2], x[3] = 0.0, -0.0
    x[4, 1::2] = -x[4, 0::2]
    x[5, 7], x[130, 95], x[6, 0] = float("inf"), float("-inf"), float("nan")
    x[7], x[8] = 3e38, 1e-40
    arguments["x0"] = x
    return Case(arguments, case.dims, {})


def some(case: Case, rows: list[int]) -> Case:
    """Some rows of a case alone."""
    cut = {n: t[rows].contiguous() if t.shape[:1] == (TOKENS,) else t
           for n, t in case.arguments.items()}  # fmt: skip
    return Case(cut, {"tokens": len(rows)}, {})


def chosen() -> Iterator[KernelSpec]:
    """One that decodes in low tiles, one in tall ones, one before."""
    specs = specs_of(only_body(linear([("q4_1", 40), ("q4_1", 40), ("q8_0", 24)], 160, gated=True)))
    before = decoded(specs)
    in_tiles = sorted((s for s in specs if s not in before), key=lambda s: s.schedule.values["bm"])
    yield from (in_tiles[0], in_tiles[-1], before[0])


def test_a_row_has_its_bits_alone_and_among_others_whatever_they_hold(tmp_path: Path) -> None:
    found = []
    for spec in chosen():
        case = odd_rows(make_case(spec, {"tokens": TOKENS}, seed=6))
        whole = run(spec, case, tmp_path)
        names = [v for _, v in spec.body.outputs]
        for name in names:
            odd = whole[name].isnan().any(-1)
            assert odd[[5, 6, 130]].all() and not odd[[0, 1, 2, 3, 4, 9, 129, 131, 138]].any()
            assert not whole[name][[2, 3]].any()
        for rows in ([0], [5], [138, 4], [131, 130, 129], list(range(0, TOKENS, 2))):
            part = run(spec, some(case, rows), tmp_path)
            cut = {n: whole[n][rows].contiguous() for n in names}
            assert bits(spec, part) == bits(spec, cut), (spec.schedule, rows)
        found.append(bits(spec, whole))
    assert found[1:] == found[:1] * 2


def test_no_byte_of_other_launches_decides(tmp_path: Path) -> None:
    """The workspace holds whatever the launch before left."""
    spec = list(chosen())[-1]
    case = make_case(spec, {"tokens": 5}, seed=7)
    found = set()
    module = triton_run.load(triton_run.emit(spec, TEMPLATE).text, spec.symbol, tmp_path)
    need = TEMPLATE.scratch_bytes(spec.body, spec.numerics, spec.schedule, case.dims)
    for byte in (0, 0x7F, 0xFF):
        arguments = case.fresh() | {"workspace": torch.full((need,), byte, dtype=torch.uint8)}
        triton_run.run(module, arguments, case.dims)
        found.add(repr(bits(spec, arguments)))
    assert len(found) == 1


def test_rows_that_a_prologue_makes_meet_decoded_weights(tmp_path: Path) -> None:
    settings = CompileConfig(
        max_context=64, max_tokens_per_step=512, max_requests=4, block_size=8, dtype="bfloat16"
    )
    graph = tiny_graph("q4_1", settings=settings)
    body = next(b for name, _, b in distinct_bodies(graph) if name == "layers.0.q_proj")
    specs = specs_of(body)
    few, before = specs[0], decoded(specs)[0]
    case = make_case(few, {d.name: 21 for d in body.graph.dims}, seed=8)
    assert few.body.nodes[0].op != "linear"
    found = []
    for spec in (few, before):
        got = run(spec, case, tmp_path)
        close(case, got)
        found.append(bits(spec, got))
    assert found[0] == found[1]
