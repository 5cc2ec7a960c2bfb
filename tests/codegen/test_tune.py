"""The tuner: enough legal schedules, records that last, equal budgets, bad files named."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny import SETTINGS, quick_target, tiny_graph
from tilewright.codegen.body import Body, extract
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import alternatives, derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import Bucket, Chooser, buckets_of, first_candidate, plan_groups
from tilewright.codegen.select import Choice, select
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.tune import BUDGET, TuningRecords, candidates, tuned_choice
from tilewright.graph import Graph
from tilewright.graph.errors import LowerError

TARGET = quick_target((1, 4))
WIDE = replace(SETTINGS, max_tokens_per_step=256)
FAST = replace(WIDE, mode="fast")


def fused(stored: str = "q4_1") -> Graph:
    return lower(tiny_graph(stored, settings=WIDE), Flags()).graph


def selected(graph: Graph) -> list[tuple[Body, Choice]]:
    found = [(g, extract(graph, g)) for g in graph.groups]
    return [(body, select(group, body, TARGET)) for group, body in found]


def test_contractions_have_eight_legal_schedules_in_every_bucket() -> None:
    graph = fused()
    for body, choice in selected(graph):
        if choice.template.kind != "contract":
            continue
        numerics = derive("contract", body.graph, TARGET)
        for bucket in buckets_of(graph, TARGET, WIDE):
            found = candidates(body, choice, bucket, TARGET, WIDE)
            assert len({c.schedule for c in found}) >= 8, bucket
            assert {c.numerics for c in found} == {numerics}


def test_both_modes_have_the_same_budget() -> None:
    """Fast mode tries other numerics with as many candidates in all, the untuned choice first."""
    graph = fused()
    for body, choice in selected(graph):
        for bucket in buckets_of(graph, TARGET, WIDE):
            exact = candidates(body, choice, bucket, TARGET, WIDE)
            fast = candidates(body, choice, bucket, TARGET, FAST)
            assert exact[0] == fast[0] == first_candidate(TARGET)(body, choice, bucket)
            assert len(exact) <= BUDGET and len(fast) <= BUDGET
            kinds = alternatives(choice.template.kind, body.graph, TARGET)
            assert {c.numerics for c in fast} == set(kinds)
            if choice.template.kind == "contract":
                assert len(fast) == len(exact) == BUDGET


class Clock:
    """Pretends that the last of the candidates is the fastest."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, specs: Sequence[KernelSpec], body: Body, bucket: Bucket) -> list[float]:
        self.calls += 1
        return [1.0 / (1 + i) for i in range(len(specs))]


def choose(
    records: TuningRecords, clock: Clock | None, *, config: CompileConfig = WIDE, machine: str = "m"
) -> Chooser:
    return tuned_choice(
        TARGET, config, records, toolchain="g++", machine=machine, measure=clock,
        fallback=first_candidate(TARGET),
    )  # fmt: skip


def test_a_second_run_measures_nothing(tmp_path: Path) -> None:
    graph, path, clock = fused(), tmp_path / "tuned.json", Clock()
    first = plan_groups(graph, TARGET, WIDE, choose(TuningRecords(path), clock))
    assert clock.calls > 0
    again, records = Clock(), TuningRecords(path)
    second = plan_groups(graph, TARGET, WIDE, choose(records, again))
    assert again.calls == 0 and records.num_measured == 0 and records.num_found >= clock.calls
    assert [p.specs for p in first] == [p.specs for p in second]
    untuned = plan_groups(graph, TARGET, WIDE, first_candidate(TARGET))
    assert [p.specs for p in first] != [p.specs for p in untuned]
    for record in records.all():
        assert record.best_seconds <= record.first_seconds
        assert 1 <= record.num_measured <= BUDGET


def test_tuning_keeps_the_numerics_in_deterministic_mode(tmp_path: Path) -> None:
    graph = fused()
    tuned = plan_groups(graph, TARGET, WIDE, choose(TuningRecords(tmp_path / "t"), Clock()))
    plain = plan_groups(graph, TARGET, WIDE, first_candidate(TARGET))
    for a, b in zip(tuned, plain, strict=True):
        assert {s.numerics for s in a.specs.values()} == {s.numerics for s in b.specs.values()}


def test_records_of_another_machine_or_mode_do_not_count(tmp_path: Path) -> None:
    graph, path, clock = fused(), tmp_path / "tuned.json", Clock()
    plan_groups(graph, TARGET, WIDE, choose(TuningRecords(path), clock))
    for settings, machine in ((WIDE, "other"), (FAST, "m")):
        other = Clock()
        chooser = choose(TuningRecords(path), other, config=settings, machine=machine)
        plan_groups(graph, TARGET, settings, chooser)
        assert other.calls == clock.calls


def test_without_a_clock_what_has_no_record_is_untuned(tmp_path: Path) -> None:
    graph, records = fused(), TuningRecords(tmp_path / "none.json")
    plans = plan_groups(graph, TARGET, WIDE, choose(records, None))
    plain = plan_groups(graph, TARGET, WIDE, first_candidate(TARGET))
    assert [p.specs for p in plans] == [p.specs for p in plain]
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[1]",
        "{}",
        '{"a": 1}',
        '[{"key": "k"}]',
        "null",
    ],
)
def test_a_corrupt_record_file_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    pattern = (
        f"^tuning records '{re.escape(str(path))}': not readable: "
        r"[^\n]*; delete the file to tune again$"
    )
    with pytest.raises(LowerError, match=pattern):
        TuningRecords(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("numerics", {"lanes": 8}),
        ("numerics", {}),
        ("schedule", {"tile": "x"}),
        ("schedule", {"rows_per_item": 3}),
    ],
)
def test_a_record_of_no_candidate_is_refused(field: str, value: object, tmp_path: Path) -> None:
    """An edited record cannot bring numerics or a schedule that the compiler would not try."""
    graph, path = fused(), tmp_path / "tuned.json"
    plan_groups(graph, TARGET, WIDE, choose(TuningRecords(path), Clock()))
    rows = json.loads(path.read_text())
    for row in rows:
        row[field] = value
    path.write_text(json.dumps(rows))
    with pytest.raises(LowerError) as caught:
        plan_groups(graph, TARGET, WIDE, choose(TuningRecords(path), None))
    pattern = (
        r"tuning record '[a-z]+_[0-9a-f]+' \(tokens_1\): is none of the candidates: "
        f"delete '{re.escape(str(path))}' to tune again"
    )
    assert re.fullmatch(pattern, str(caught.value))
