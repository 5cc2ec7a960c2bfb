"""Kernels that spill: other schedules are chosen, until none spills or all are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.tiny import SETTINGS, tiny_graph
from tilewright.codegen.body import Body
from tilewright.codegen.compile import CompileJob, distinct_specs, plan_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack import WeightSource
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import Bucket, Candidate, first_candidate, plan_groups
from tilewright.codegen.select import Choice
from tilewright.codegen.spec import Schedule
from tilewright.codegen.spills import avoiding
from tilewright.runtime.artifact import MAX_SCRATCH, ModelRecord
from tilewright.targets.nvidia.build import kept_report, read_report
from tilewright.targets.registry import resolve

TARGET = replace(resolve("sm90")[0], buckets=(1, 16))
BF16 = replace(SETTINGS, dtype="bfloat16")
MODEL = ModelRecord("tiny", "llama", 64, 64, 8, None, (), False, None, None)


class Spilling:
    """A toolchain that compiles nothing: kernels in `spilled` keep bytes outside registers."""

    def __init__(self, spilled: Sequence[str] = ()) -> None:
        self.spilled = set(spilled)
        self.built: dict[str, str] = {}

    def identity(self) -> str:
        return "none"

    def compile(self, source: Path, output: Path) -> None:
        output.write_text(source.stem)

    def link(self, objects: Sequence[Path], output: Path) -> None:
        raise AssertionError

    def support_sources(self) -> Mapping[str, str]:
        return {}

    def spilled_bytes(self, compiled: Path) -> int:
        return 8 if compiled.read_text() in self.spilled else 0


def job(toolchain: Any, folder: Path, choose: Any = None) -> CompileJob:
    weights: WeightSource = None  # type: ignore[assignment]
    return CompileJob(
        tiny_graph("bf16", settings=BF16), MODEL, weights, TARGET, toolchain, BF16,
        choose or first_candidate(TARGET), Flags(cache=folder),
    )  # fmt: skip


def kernels(made: CompileJob) -> dict[str, Mapping[str, Any]]:
    report = plan_graph(made, lambda *_: None)
    return {k.symbol: k.schedule for k in report.manifest.kernels}


def test_kernels_that_spill_get_other_schedules(tmp_path: Path) -> None:
    first = kernels(job(Spilling(), tmp_path))
    spilled = [s for s in first if s.startswith("contract")][:2]
    then = kernels(job(Spilling(spilled), tmp_path))
    assert not set(spilled) & set(then)
    assert set(first) - set(spilled) <= set(then)
    more = [s for s in then if s not in first]
    last = kernels(job(Spilling([*spilled, *more]), tmp_path))
    assert not {*spilled, *more} & set(last)


def test_the_first_stays_where_all_spill(tmp_path: Path) -> None:
    class All(Spilling):
        def spilled_bytes(self, compiled: Path) -> int:
            return 8 if compiled.read_text().startswith("row") else 0

    first = kernels(job(Spilling(), tmp_path))
    assert kernels(job(All(), tmp_path)) == first


def test_the_least_is_taken_where_all_spill(tmp_path: Path) -> None:
    class Counting(Spilling):
        def spilled_bytes(self, compiled: Path) -> int:
            name = compiled.read_text()
            if not name.startswith("row"):
                return 0
            return self.built.setdefault(name, 1000 - 8 * len(self.built))

    toolchain = Counting()
    taken = kernels(job(toolchain, tmp_path))
    rows = [s for s in taken if s.startswith("row")]
    tried = sorted(toolchain.built.values())
    assert rows and len(tried) > len(rows)
    assert min(toolchain.built[s] for s in rows) == tried[0]


def test_toolchains_that_do_not_say_are_believed(tmp_path: Path) -> None:
    class Plain:
        def __init__(self, inner: Spilling) -> None:
            for name in ("identity", "compile", "link", "support_sources"):
                setattr(self, name, getattr(inner, name))

    assert kernels(job(Plain(Spilling()), tmp_path)) == kernels(job(Spilling(), tmp_path))


def test_what_was_measured_on_the_chip_is_kept() -> None:
    graph = lower(tiny_graph("bf16", settings=BF16), Flags()).graph
    base = first_candidate(TARGET)
    chosen = {s.symbol for s in distinct_specs(plan_groups(graph, TARGET, BF16, base))}

    def measured(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        return replace(base(body, choice, bucket), measured=True)

    def nothing(schedule: Schedule) -> bool:
        return False

    for choose, kept in ((measured, True), (base, False)):
        avoid = avoiding(choose, dict.fromkeys(chosen, 8), nothing)
        plans = plan_groups(graph, TARGET, BF16, avoid)
        assert ({s.symbol for s in distinct_specs(plans)} == chosen) is kept


@pytest.mark.parametrize("is_measured", [False, True])
def test_what_cannot_be_built_here_is_not_chosen(is_measured: bool) -> None:
    graph = lower(tiny_graph("bf16", settings=BF16), Flags()).graph
    base = first_candidate(TARGET)

    def choose(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        return replace(base(body, choice, bucket), measured=is_measured)

    first = {s.schedule for s in distinct_specs(plan_groups(graph, TARGET, BF16, base))}
    lacked = next(s for s in first if "bm" in s.values)
    plans = plan_groups(graph, TARGET, BF16, avoiding(choose, {}, lambda s: s == lacked))
    found = {s.schedule for s in distinct_specs(plans)}
    assert lacked not in found and first - {lacked} <= found


@pytest.mark.parametrize("is_measured", [False, True])
def test_what_wants_too_much_scratch_is_not_chosen(is_measured: bool) -> None:
    graph = lower(tiny_graph("bf16", settings=BF16), Flags()).graph
    base = first_candidate(TARGET)
    groups = plan_groups(graph, TARGET, BF16, base)
    large = next(p.specs["tokens_16"].schedule for p in groups if p.group.kind == "attend")

    def greedy(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        found = base(body, choice, bucket)
        sized = replace(found.template, scratch_bytes=lambda body, numerics, schedule, bounds: (
            MAX_SCRATCH + (schedule == large)))  # fmt: skip
        return replace(found, template=sized, measured=is_measured)

    plans = plan_groups(graph, TARGET, BF16, avoiding(greedy, {}, lambda schedule: False))
    assert large not in {s.schedule for s in distinct_specs(plans)}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_reports_are_found_in_a_binary(count: int) -> None:
    reports = [[{"source": f"s{i}", "spilled_bytes": i}] for i in range(count)]
    text = "\0".join(
        kept_report(r).partition("= ")[2].rstrip(";").strip('"').replace('\\"', '"')
        for r in reports
    )
    binary = b"\x7fELF" + text.encode() + b"\0\xff"
    assert read_report(binary) == [part for r in reports for part in r]
