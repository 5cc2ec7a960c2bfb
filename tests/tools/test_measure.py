"""Measuring: operands that make sense, candidates timed in turns, and records that last."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tilewright.codegen.arguments import argument_names
from tilewright.codegen.body import Body, extract
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import Bucket, buckets_of
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph
from tilewright.graph.types import TensorType, element_type
from tilewright.targets.registry import resolve
from tilewright.tools import measure as measuring
from tilewright.tools.bench_machine import MachineProbe
from tilewright.tools.measure import CpuMeasure, joined, time_in_turns
from tilewright.tools.prepare import prepare
from tilewright.tools.synthetic import MAX_COPIES, operands, plausible_step, random_panels

from .conftest import CONTEXT, LAYERS, VOCAB, Call

TARGET = "cpu:x86-64-v3"


@pytest.fixture(scope="module")
def lowered(model: Path) -> Graph:
    prepared = prepare(str(model), CompileConfig(max_tokens_per_step=32))
    return lower(prepared.graph, Flags()).graph


def body_of(graph: Graph, group: str) -> Body:
    return extract(graph, next(g for g in graph.groups if g.name == group))


def specs_of(graph: Graph, group: str, rows: int, count: int) -> list[KernelSpec]:
    target, _ = resolve(TARGET)
    found = next(g for g in graph.groups if g.name == group)
    body = extract(graph, found)
    template = select(found, body, target).template
    numerics = derive(template.kind, body.graph, target)
    return [
        KernelSpec(template.kind, body.graph, template.name, numerics, schedule, body.buffers)
        for schedule in template.schedules(body.graph, numerics, rows)[:count]
    ]


def bounds_of(graph: Graph, name: str) -> Bucket:
    target, _ = resolve(TARGET)
    return next(b for b in buckets_of(graph, target, CompileConfig(max_tokens_per_step=32))
                if b.name == name)  # fmt: skip


@pytest.mark.parametrize(
    ("bucket", "requests"), [("tokens_1", 1), ("tokens_4", 4), ("tokens_32", 1)]
)
def test_attention_sees_requests_with_a_context(lowered: Graph, bucket: str, requests: int) -> None:
    (spec,) = specs_of(lowered, "layers.0.attend", 4, 1)
    step = plausible_step(spec.body, bounds_of(lowered, bucket).bounds, context=64)
    assert step.num_requests == requests and step.context == 64
    given = dict(zip(argument_names(spec.body), operands(spec, step, rotated_bytes=0), strict=True))
    (anchor,) = [n for n in spec.body.nodes if n.op == "attend"]
    q, k, _, positions, rows, tables = (given.get(i) for i in anchor.inputs)
    assert positions and rows and tables and k
    tokens = bounds_of(lowered, bucket).bounds["tokens"]
    assert positions.arrays[0].shape == (tokens,) and positions.arrays[0].max() == 63
    assert positions.arrays[0].min() == (63 if requests > 1 or tokens == 1 else 64 - tokens)
    assert set(rows.arrays[0].tolist()) == set(range(requests))
    blocks = tables.arrays[0].ravel()
    assert sorted(blocks.tolist()) == list(range(k.arrays[0].shape[0]))  # distinct, and all there


def test_context_is_cut_to_what_tables_hold(lowered: Graph) -> None:
    body, bucket = body_of(lowered, "layers.0.attend").graph, bounds_of(lowered, "tokens_1")
    assert plausible_step(body, bucket.bounds, context=512).context == CONTEXT


def test_stores_write_distinct_slots(lowered: Graph) -> None:
    (spec,) = specs_of(lowered, "layers.0.append_v", 4, 1)
    step = plausible_step(spec.body, bounds_of(lowered, "tokens_32").bounds, context=64)
    given = dict(zip(argument_names(spec.body), operands(spec, step, rotated_bytes=0), strict=True))
    store = next(n for n in spec.body.nodes if n.op == "append")
    slots = given[store.inputs[2]].arrays[0]
    cache = given[spec.body.states[0].name].arrays[0]
    assert len(set(slots.tolist())) == 32
    assert slots.max() < cache.shape[0] * cache.shape[2]


def test_ids_are_in_the_table(lowered: Graph) -> None:
    group = next(g.name for g in lowered.groups if "embedding" in g.nodes)
    (spec,) = specs_of(lowered, group, 4, 1)
    step = plausible_step(spec.body, bounds_of(lowered, "tokens_32").bounds, context=64)
    given = operands(spec, step, rotated_bytes=0)
    (ids,) = [o.arrays[0] for o in given if o.dtype == "i32"]
    assert 0 <= ids.min() and ids.max() < VOCAB and len(set(ids.tolist())) > 8


def test_weights_come_in_copies_beyond_the_cache(lowered: Graph) -> None:
    (spec,) = specs_of(lowered, "layers.0.down_proj", 1, 1)
    step = plausible_step(spec.body, bounds_of(lowered, "tokens_1").bounds, context=64)
    given = dict(zip(argument_names(spec.body), operands(spec, step, rotated_bytes=1 << 20),
                     strict=True))  # fmt: skip
    weight = given[spec.body.weights[0].name]
    assert sum(a.nbytes for a in weight.arrays) >= 1 << 20 and len(weight.arrays) < MAX_COPIES
    assert len({a.ctypes.data for a in weight.arrays}) == len(weight.arrays)
    assert all(a.ctypes.data % 64 == 0 for a in weight.arrays)
    assert all(np.array_equal(a, weight.arrays[0]) for a in weight.arrays)
    assert np.any(weight.arrays[0])
    assert all(len(o.arrays) == 1 for name, o in given.items() if name not in spec.body.weight)


def test_random_fp8_is_fast_on_every_core() -> None:
    """Neither NaN nor subnormals, for which some cores take a hundred cycles."""
    type_ = TensorType(element_type("fp8_e4m3[block=128x128,scale=ue8m0]"), (64, 256))
    groups = random_panels(type_, np.random.default_rng(0)).reshape(-1, 528)
    codes, scales = groups[:, 16:], groups[:, :16]
    assert set(np.unique(codes)) == set(range(8, 127))
    assert scales.min() >= 110 and scales.max() < 120


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_the_read_loop_walks_pages_like_those_of_weights(cache: Path) -> None:
    probe = MachineProbe(TARGET, Flags(cache=cache), threads=1)
    assert probe._buffer.ctypes.data % (2 << 20) == 0
    assert 1e8 < probe.read_bandwidth() < 1e13


class FakeRun:
    """Takes as long as it is told and counts its launches."""

    num_copies = 7

    def __init__(self, *times: float) -> None:
        self.times, self.launches = list(times), 0

    def seconds(self, num_launches: int) -> list[float]:
        self.launches += num_launches
        return [self.times.pop(0) if len(self.times) > 1 else self.times[0]] * num_launches


def test_times_are_medians_of_turns() -> None:
    noisy, steady, slow = FakeRun(9.0, 1.0, 50.0, 1.0), FakeRun(2.0), FakeRun(8.0)
    runs: Sequence[object] = [noisy, steady, slow]
    assert time_in_turns(runs, seconds=0.0) == [1.0, 2.0, 8.0]  # type: ignore[arg-type]
    assert (noisy.launches, steady.launches) == (2 + measuring.ROUNDS, 2 + measuring.ROUNDS)
    assert slow.launches == 2  # implausible after the first two


def test_time_is_spent_on_what_is_plausible() -> None:
    run = FakeRun(1.0)
    time_in_turns([run], seconds=4.0 * measuring.ROUNDS)  # type: ignore[list-item]
    assert run.launches == 2 + 4 * measuring.ROUNDS


@pytest.mark.cpu
def test_real_candidates(lowered: Graph, cache: Path) -> None:
    target, toolchain = resolve(TARGET)
    specs = specs_of(lowered, "layers.0.down_proj", 4, 3)
    told: list[str] = []
    measure = CpuMeasure(
        target, toolchain, cache, num_threads=1, seconds=0.05, rotated_bytes=1 << 20,
        progress=lambda stage, done, total: told.append(stage),
    )  # fmt: skip
    body = body_of(lowered, "layers.0.down_proj")
    seconds = measure(specs, body, bounds_of(lowered, "tokens_4"))
    assert len(seconds) == 3 and all(1e-8 < t < 0.1 for t in seconds)
    assert set(told) <= {"compile"}


def test_sources_are_joined(lowered: Graph) -> None:
    from tilewright.codegen.emit.cpp import emit

    target, _ = resolve(TARGET)
    template = next(t for t in target.kernels if t.name == "contract")
    specs = specs_of(lowered, "layers.0.down_proj", 4, 6)
    parts = joined([emit(s, template) for s in specs])
    assert [part.text.count("TW_KERNEL(") for part in parts] == [4, 2]
    assert len({part.name for part in parts}) == 2


def test_tune_measures_once(
    call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that prefers the last candidate: the record is kept, shown and found again."""

    def measured(
        self: object, specs: Sequence[KernelSpec], body: Body, bucket: Bucket
    ) -> list[float]:
        return [4e-6 / (1 + i) for i in range(len(specs))]

    monkeypatch.setattr(CpuMeasure, "__call__", measured)
    place = {"TILEWRIGHT_CACHE": str(tmp_path)}
    options = ("tune", model, "--max-tokens-per-step", "4")
    first = call(*options, "--json", environment=place)
    assert (first.code, first.err) == (0, "")
    (report,) = first.lines
    records = report["records"]
    assert isinstance(records, list) and report["path"] == str(tmp_path / "tuned.json")
    assert report["measured"] == sum({r["key"]: r["num_measured"] for r in records}.values())
    assert max(r["num_measured"] for r in records if "proj" in r["node"]) >= 8
    projections = [r["node"] for r in records if "proj" in r["node"]]
    assert not any(n.startswith(f"layers.{i}.") for n in projections for i in range(1, LAYERS))
    second = call(*options, environment=place)
    assert f"measured nothing: all {len(records)} records were there\n" in second.out
    title, *rows = second.out.splitlines()
    assert title.split() == "kernel bucket untuned us tuned us ratio candidates".split()
    ratio = {tuple(row.split()[:2]): float(row.split()[4]) for row in rows[: len(records)]}
    assert ratio["layers.0.down_proj", "tokens_1"] >= 8


def test_damaged_records_are_one_sentence(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text("[{]")
    done = call("tune", model, environment={"TILEWRIGHT_CACHE": str(tmp_path)})
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: tuning records '{tmp_path / 'tuned.json'}': not readable: ")
    assert done.err.endswith("; delete the file to tune again\n")


def test_a_gpu_target_is_not_measured_on_a_cpu(tmp_path: Path) -> None:
    from tilewright.graph.errors import TargetError

    target, toolchain = resolve("sm90")
    with pytest.raises(TargetError) as caught:
        CpuMeasure(target, toolchain, tmp_path)
    assert str(caught.value) == (
        "target 'sm90': cannot be measured: got kernels for another device, want target 'cpu'; "
        "compile without --tune"
    )
