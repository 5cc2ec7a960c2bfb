"""Few sums of long rows in Triton's interpreter: against fp64, and bit for bit over schedules and
batches; fp32 weights in three parts, exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support import triton_run
from support.contract_graphs import linear, only_body
from support.kernel_case import Case, errors, make_case
from tilewright.codegen.numerics import derive, segment_length
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, Group
from tilewright.targets.nvidia.thin import THIN, accepts_thin
from tilewright.targets.registry import resolve

TARGET = resolve("sm90")[0]


def specs(n: int, k: int) -> list[KernelSpec]:
    body = only_body(linear([("f32", n)], k))
    numerics = derive("contract", body.graph, TARGET)
    found = THIN.schedules(body.graph, numerics, 1)
    return [KernelSpec("contract", body.graph, "thin", numerics, s, body.buffers) for s in found]


def run(spec: KernelSpec, case: Case, folder: Path) -> dict[str, torch.Tensor]:
    return triton_run.run_spec(spec, THIN, case, folder)


@pytest.mark.parametrize(("n", "k"), [(24, 2560), (4, 2048), (33, 2176), (64, 2048)])
def test_sums_are_near_the_reference(n: int, k: int, tmp_path: Path) -> None:
    for tokens in (1, 19):
        spec = specs(n, k)[0]
        case = make_case(spec, {"tokens": tokens}, seed=n + tokens)
        for name, error in errors(case, run(spec, case, tmp_path)):
            assert error <= 2e-6, (name, error)


def test_schedules_and_batches_give_the_same_bits(tmp_path: Path) -> None:
    """Of whole numbers whose sums are exact: the interpreter has an order of its own."""
    found = specs(24, 2304)
    (name,) = (v for _, v in found[0].body.outputs)
    x, w = found[0].body.nodes[0].inputs
    case, r = make_case(found[0], {"tokens": 21}, seed=5), np.random.default_rng(5)
    case.arguments[x][...] = torch.from_numpy(r.integers(-3, 4, (21, 2304)))
    case.arguments[w][...] = torch.from_numpy(r.integers(-700, 700, (24, 2304)))
    whole = run(found[0], case, tmp_path)[name]
    assert torch.equal(whole, case.arguments[x].float() @ case.arguments[w].T)
    for spec in (found[0], found[4], found[-1]):
        for rows in ([20], [3, 1], list(range(17))):
            cut = Case({**case.arguments, x: case.arguments[x][rows].contiguous(),
                        name: torch.full((len(rows), 24), torch.nan)},
                       {"tokens": len(rows)}, {})  # fmt: skip
            got = run(spec, cut, tmp_path)[name]
            assert got.numpy().tobytes() == whole[rows].numpy().tobytes(), (spec.schedule, rows)


def test_parts_of_a_weight_add_up_to_it() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) > 1e-30)]

    def leading(values: np.ndarray) -> np.ndarray:
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    high = leading(x)
    rest = x - high
    middle = leading(rest)
    low = rest - middle
    assert np.array_equal(leading(low), low)
    assert np.array_equal(high.astype(np.float64) + middle + low, x.astype(np.float64))


def group_of(graph: Graph) -> str:
    body = only_body(graph)
    (node,) = body.graph.nodes[:1]
    return select(Group("g", "contract", (node.name,)), body, TARGET).template.name


@pytest.mark.parametrize("k", [2048, 2176, 20480])
def test_steps_end_where_the_rows_do(k: int) -> None:
    for spec in specs(24, k):
        assert k % spec.schedule.values["bk"] == 0
        assert segment_length(k, spec.numerics.segments) % spec.schedule.values["bk"] == 0


@pytest.mark.parametrize("choice", range(7))
def test_every_schedule_is_right_at_an_odd_length(choice: int, tmp_path: Path) -> None:
    spec = specs(33, 2176)[choice]
    case = make_case(spec, {"tokens": 19}, seed=choice)
    for name, error in errors(case, run(spec, case, tmp_path)):
        assert error <= 2e-6, (name, error)


def test_what_is_taken() -> None:
    assert group_of(linear([("f32", 24)], 2048)) == "thin"
    assert group_of(linear([("f32", 65)], 2048)) == "contract"
    assert group_of(linear([("f32", 24)], 1920)) == "contract"
    assert group_of(linear([("bf16", 24)], 2048)) == "contract"
    assert group_of(linear([("f32", 24), ("f32", 8)], 2048)) == "contract"
    body = only_body(linear([("f32", 24)], 2049))
    assert accepts_thin(body.graph) == (
        "weights are f32[24, 2049]: want at most 64 rows of at least 2048 values, "
        "a multiple of 128"
    )
