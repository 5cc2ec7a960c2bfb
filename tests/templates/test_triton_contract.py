"""Triton contractions of fp8 and fp4 weights, of experts and of groups, in Triton's interpreter:
against the fp64 reference, and bit for bit over schedules, batches and loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import triton_run
from support.contract_graphs import experts, groups, linear, only_body
from support.deepseek import v4_graph, v41_graph
from support.kernel_case import Case, distinct_bodies, errors, make_case
from tilewright.codegen.numerics import alternatives, derive, segment_length
from tilewright.codegen.spec import KernelSpec, Schedule
from tilewright.graph import Graph
from tilewright.targets.registry import resolve

TARGET = resolve("sm90")[0]
TEMPLATE = next(t for t in TARGET.kernels if t.name == "contract")
SMALL = {"bm": 16, "bn": 16, "bk": 128, "warps": 4, "stages": 2, "row_warps": 4, "split": 0,
         "listed": 0}  # fmt: skip


def spec_of(graph: Graph, segments: int = 1, **schedule: int) -> KernelSpec:
    body = only_body(graph)
    assert TEMPLATE.accepts(body.graph) is None
    numerics = replace(derive("contract", body.graph, TARGET), segments=segments)
    chosen = Schedule.of(**{**SMALL, **schedule})
    return KernelSpec("contract", body.graph, "contract", numerics, chosen, body.buffers)


def run(spec: KernelSpec, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    return triton_run.run_spec(spec, TEMPLATE, case, folder)


def bits(spec: KernelSpec, arguments: dict[str, torch.Tensor]) -> list[bytes]:
    outputs = [arguments[v].contiguous() for _, v in spec.body.outputs]
    return [t.view(torch.uint8).numpy().tobytes() for t in outputs]


def close(case: Case, got: dict[str, torch.Tensor], limit: float = 2e-5) -> None:
    for name, error in errors(case, got):
        assert error <= (2.0**-8 if got[name].dtype == torch.bfloat16 else limit), (name, error)


@pytest.mark.parametrize(
    ("stored", "n", "k"),
    [("fp8", 40, 96), ("fp8_128", 140, 160), ("fp4", 56, 288), ("fp8", 16, 32), ("fp4", 130, 128)],
)
def test_linear_matches_the_reference(stored: str, n: int, k: int, tmp_path: Path) -> None:
    for tokens in (1, 11):
        spec = spec_of(linear([(stored, n)], k), bn=64, bm=8)
        case = make_case(spec, {"tokens": tokens}, seed=tokens)
        close(case, run(spec, case, tmp_path))


@pytest.mark.parametrize("k", [256, 160])
def test_codes_in_chunks(k: int, tmp_path: Path) -> None:
    """Products of codes in whole spans and in one that is cut short."""
    spec = spec_of(linear([("fp8_128", 72)], k), bn=64, bm=8)
    assert (spec.numerics.atom, spec.numerics.chunk) == ("wgmma_e4m3", 128)
    case = make_case(spec, {"tokens": 5}, seed=4)
    close(case, run(spec, case, tmp_path))


@pytest.mark.parametrize(("stored", "k"), [("fp8", 160), ("fp8_128", 256), ("fp4", 288)])
def test_scales_that_enter_the_matrix_unit(stored: str, k: int, tmp_path: Path) -> None:
    """What SM100 has: fp4 codes lie in pairs, and so do the rows that meet them."""
    spec = spec_of(linear([(stored, 72)], k), bn=64, bm=8)
    mx = derive("contract", spec.body, resolve("sm100")[0])
    assert mx.atom == "mx"
    spec = replace(spec, numerics=replace(mx, segments=1))
    case = make_case(spec, {"tokens": 5}, seed=6)
    close(case, run(spec, case, tmp_path))


def test_values_decoded_to_bf16_give_the_same_sums(tmp_path: Path) -> None:
    """What `fast` mode may choose instead of products of codes."""
    spec = spec_of(linear([("fp8_128", 72)], 160), bn=64, bm=16)
    plain = replace(spec.numerics, atom="mma", chunk=0, scale_order="dequantise")
    assert plain in alternatives("contract", spec.body, TARGET)
    spec = replace(spec, numerics=plain)
    case = make_case(spec, {"tokens": 5}, seed=4)
    close(case, run(spec, case, tmp_path))


@pytest.mark.parametrize("weights", [[("bf16", 200)], [("bf16", 72), ("bf16", 72)]])
def test_tiles_of_values_by_the_copy_engine(weights: list[tuple[str, int]], tmp_path: Path) -> None:
    """Several tiles a program, rows and columns that do not fill them, a last step cut short."""
    graph = linear(weights, 104, gated=len(weights) > 1)
    spec = spec_of(graph, bm=16, bn=32, bk=64, stream=1, cores=3)
    case = make_case(spec, {"tokens": 37}, seed=5)
    close(case, run(spec, case, tmp_path))


def test_weights_of_several_formats_meet_one_activation(tmp_path: Path) -> None:
    spec = spec_of(linear([("fp8", 40), ("bf16", 24), ("fp4", 20), ("q4_1", 24)], 96))
    case = make_case(spec, {"tokens": 5}, seed=1)
    close(case, run(spec, case, tmp_path))


@pytest.mark.parametrize("stored", ["fp8", "fp4", "bf16", "q4_1", "q8_0"])
def test_segments_beside_each_other_give_the_bits_of_one_after_the_other(
    stored: str, tmp_path: Path
) -> None:
    k = 608
    assert segment_length(k, 2) == 512
    graph = linear([(stored, 40), (stored, 40), (stored, 24)], k, gated=True)
    found = []
    for split in (0, 1):
        spec = spec_of(graph, 2, split=split)
        case = make_case(spec, {"tokens": 5}, seed=3)
        got = run(spec, case, tmp_path)
        close(case, got)
        found.append(bits(spec, got))
    assert found[0] == found[1]


@pytest.mark.parametrize("stored", ["q4_1", "q8_0"])
@pytest.mark.parametrize("bk", [32, 64, 256])
def test_tiles_of_codes_of_any_height_and_depth(stored: str, bk: int, tmp_path: Path) -> None:
    """Rows that do not fill a tile, and steps that end past the last group. What the interpreter's
    own products round depends on the tile, so bits are compared on a GPU only."""
    graph = linear([(stored, 40), (stored, 40)], 96, gated=True)
    for bm in (16, 64, 128):
        spec = spec_of(graph, bm=bm, bn=16, bk=bk)
        case = make_case(spec, {"tokens": 139}, seed=6)
        close(case, run(spec, case, tmp_path))


@pytest.mark.parametrize("stored", ["q4_1", "q8_0"])
def test_weights_that_are_decoded_before(stored: str, tmp_path: Path) -> None:
    """Two that meet and one alone, columns and k that fill neither blocks nor steps."""
    spec = spec_of(linear([(stored, 40), (stored, 40), ("q4_1", 20)], 160, gated=True),
                   bm=64, bn=32, bk=64, decoded=1)  # fmt: skip
    case = make_case(spec, {"tokens": 75}, seed=9)
    close(case, run(spec, case, tmp_path))


@pytest.mark.parametrize("stored", ["q4_1", "q8_0"])
def test_every_code_of_a_word_keeps_its_place(stored: str, tmp_path: Path) -> None:
    """A row of activations with a single 1 gives the weights of that value of k alone."""
    spec = spec_of(linear([(stored, 24)], 64), bn=16)
    (x,) = [i.name for i in spec.body.inputs]
    case = make_case(spec, {"tokens": 64}, seed=8, given={x: torch.eye(64, dtype=torch.bfloat16)})
    close(case, run(spec, case, tmp_path))


LOADS: dict[str, Callable[[Any], Any]] = {
    "spread": lambda ids: ids,
    "all on one expert": lambda ids: np.full_like(ids, 3),
    "unknown ids": lambda ids: np.where(ids == 2, -1, np.where(ids == 4, 5, ids)),
}


def expert_case(spec: KernelSpec, tokens: int, load: str = "spread", seed: int = 0) -> Case:
    """Ids that name no expert give NaN."""
    r = np.random.default_rng(seed)
    ids = torch.from_numpy(LOADS[load](r.integers(0, 5, (tokens, 2))).astype(np.int32))
    known = (ids >= 0) & (ids < 5)
    named = {"x1": torch.where(known, ids, 0)}
    case = make_case(spec, {"tokens": tokens}, seed=seed, given=named)
    expected = {n: t.where(known[..., None], torch.nan) for n, t in case.expected.items()}
    return Case({**case.arguments, "x1": ids}, case.dims, expected)


@pytest.mark.parametrize("shared", [True, False])
def test_experts_match_the_reference_in_every_load(shared: bool, tmp_path: Path) -> None:
    """With lists of rows and without."""
    graph, found = experts("fp4", n=40, k=96, shared=shared, gated=shared), []
    for listed in (0, 1):
        spec = spec_of(graph, bn=64, listed=listed)
        for tokens, load in ((18, "all on one expert"), (7, "unknown ids"), (1, "spread")):
            case = expert_case(spec, tokens, load)
            got = run(spec, case, tmp_path)
            close(case, got)
            found.append(bits(spec, got))
    assert found[:3] == found[3:]


@pytest.mark.parametrize("stored", ["fp8", "bf16", "f32", "q4_1"])
def test_experts_of_any_format_match_the_reference(stored: str, tmp_path: Path) -> None:
    spec = spec_of(experts(stored, n=40, k=96, shared=True, gated=False), bn=64)
    case = expert_case(spec, 9, "unknown ids")
    close(case, run(spec, case, tmp_path))


def test_experts_in_segments(tmp_path: Path) -> None:
    graph = experts("fp4", n=40, k=288, shared=True, gated=True)
    found = []
    for split in (0, 1):
        spec = spec_of(graph, 2, split=split, bn=64)
        case = expert_case(spec, 5, "unknown ids")
        got = run(spec, case, tmp_path)
        close(case, got)
        found.append(bits(spec, got))
    assert found[0] == found[1]


@pytest.mark.parametrize(("stored", "n"), [("fp8", 32), ("bf16", 24), ("fp4", 40), ("f32", 16)])
def test_groups_match_the_reference(stored: str, n: int, tmp_path: Path) -> None:
    for split, segments in ((0, 1), (1, 2)):
        spec = spec_of(groups(stored, n=n, k=288), segments, split=split)
        case = make_case(spec, {"tokens": 5}, seed=2)
        close(case, run(spec, case, tmp_path))


@given(data=st.data())
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    data: st.DataObject, tmp_path: Path
) -> None:
    """Whatever its place in a tile, and whoever else meets its experts."""
    graph = experts("fp4", n=24, k=64, shared=True, gated=True)
    bm, listed = data.draw(st.sampled_from([16, 32])), data.draw(st.sampled_from([0, 1]))
    spec = spec_of(graph, bm=bm, bn=32, listed=listed)
    case = expert_case(spec, 12)
    whole = run(spec, case, tmp_path)
    picks = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=4))
    cut = {n: t[picks].contiguous() if n[0] in "xv" else t for n, t in case.arguments.items()}
    some = run(spec, Case(cut, {"tokens": len(picks)}, {}), tmp_path)
    for _, value in spec.body.outputs:
        assert torch.equal(some[value].view(torch.uint8), whole[value][picks].view(torch.uint8))


def test_a_row_of_nan_stays_alone(tmp_path: Path) -> None:
    spec = spec_of(linear([("fp8", 40)], 96))
    case = make_case(spec, {"tokens": 5}, seed=1)
    clean = run(spec, case, tmp_path)
    arguments = dict(case.arguments)
    arguments["x0"] = arguments["x0"].clone()
    arguments["x0"][2, 7] = float("nan")
    got = run(spec, Case(arguments, case.dims, {}), tmp_path)
    (out,) = [v for _, v in spec.body.outputs]
    assert got[out][2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(got[out][kept], clean[out][kept])


def _small_ids(body: Graph) -> dict[str, torch.Tensor]:
    """Ids of experts and of rows that exist, for bodies of small models with three tokens."""
    found = {}
    for node in body.nodes:
        if node.op == "expert_linear":
            found[node.inputs[2]] = torch.tensor([[0, 7], [3, 1], [7, 2]], dtype=torch.int32)
        if node.op == "gather_rows":
            found[node.inputs[1]] = torch.tensor([2, 0, 2], dtype=torch.int32)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("build", [v4_graph, v41_graph])
def test_contractions_of_small_models(build: Callable[[], Graph], tmp_path: Path) -> None:
    """With the row programs in front of them."""
    for name, kind, body in distinct_bodies(build()):
        if kind != "contract" or body.graph.states:
            continue
        assert TEMPLATE.accepts(body.graph) is None, name
        numerics = derive(kind, body.graph, TARGET)
        schedule = TEMPLATE.schedules(body.graph, numerics, 1)[0]
        spec = KernelSpec(kind, body.graph, "contract", numerics, schedule, body.buffers)
        dims = {d.name: 3 for d in body.graph.dims}
        case = make_case(spec, dims, seed=1, given=_small_ids(body.graph))
        close(case, run(spec, case, tmp_path), 1e-4)
