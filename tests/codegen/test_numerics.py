"""Numerics come from reduced extents, types and target alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny import SETTINGS, Tiny, build, quick_target, tiny, tiny_graph
from tilewright.codegen.body import Body, extract
from tilewright.codegen.compile import CompileJob, numerics_digest
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import alternatives, derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import Bucket, Candidate, Chooser, first_candidate, plan_groups
from tilewright.codegen.select import Choice
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.errors import LowerError
from tilewright.graph.types import F32
from tilewright.targets.cpu.toolchain import CppToolchain

TARGET = quick_target()


def reduction(role: Role) -> Graph:
    b = GraphBuilder("sums")
    x = b.input("x", F32, 4, b.dim("extent", role))
    b.output("y", b.op("reduce_sum", x))
    return b.build()


def test_a_batch_extent_is_refused() -> None:
    message = (
        "numerics of 'sums': a reduction runs over 'extent', which the other requests of the "
        "batch decide: want a constant or a context extent"
    )
    with pytest.raises(LowerError, match=f"^{re.escape(message)}$"):
        derive("row", reduction(Role.BATCH), TARGET)


def test_a_row_kernel_over_a_context_extent_is_refused() -> None:
    message = "row kernel 'sums': reduces a context extent: want a chunk"
    with pytest.raises(LowerError, match=f"^{re.escape(message)}$"):
        derive("row", reduction(Role.CONTEXT), TARGET)


def test_an_unknown_kind_is_refused() -> None:
    message = "kernel kind 'scan': unknown: have contract, attend, select, row"
    with pytest.raises(LowerError, match=f"^{re.escape(message)}$"):
        derive("scan", reduction(Role.CONTEXT), TARGET)


def kernels(stored: str) -> list[Body]:
    graph = lower(tiny_graph(stored), Flags()).graph
    return [extract(graph, g) for g in graph.groups]


def test_derivation_does_not_see_bounds_of_the_batch() -> None:
    """Models compiled for larger steps, more requests or a longer context get equal numerics."""
    wide = replace(SETTINGS, max_tokens_per_step=512, max_requests=64, max_context=4096)
    found = [
        [derive(g.kind, extract(graph, g).graph, TARGET) for g in graph.groups]
        for graph in (
            lower(tiny_graph("q8_0", settings=settings), Flags()).graph
            for settings in (SETTINGS, wide)
        )
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("stored", "contract"), [("f32", 1), ("bf16", 1), ("q4_1", 2), ("q8_0", 2)]
)
def test_alternatives_start_with_the_derived(stored: str, contract: int) -> None:
    counts = {"row": 1, "contract": contract, "attend": len(TARGET.attend_chunks)}
    for body in kernels(stored):
        kind = body.graph.name
        found = alternatives(kind, body.graph, TARGET)
        assert found[0] == derive(kind, body.graph, TARGET)
        assert len(set(found)) == len(found) == counts[kind]


def one_bucket_differs(kind: str) -> Chooser:
    first = first_candidate(TARGET)

    def choose(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        candidate = first(body, choice, bucket)
        if bucket.name != "tokens_4" or choice.template.kind != kind:
            return candidate
        return replace(candidate, numerics=alternatives(kind, body.graph, TARGET)[1])

    return choose


def test_a_plan_refuses_two_numerics_of_a_node() -> None:
    graph = lower(tiny_graph("q4_1"), Flags()).graph
    with pytest.raises(LowerError) as caught:
        plan_groups(graph, TARGET, SETTINGS, one_bucket_differs("attend"))
    text = str(caught.value)
    assert text.startswith(
        "plan of 'layers.0.attend': buckets differ in numerics: got tokens_1: {'accumulate': 'f32'"
    )
    assert text.endswith(", want one for all")
    fast = replace(SETTINGS, mode="fast")
    plans = plan_groups(graph, TARGET, fast, one_bucket_differs("attend"))
    attend = next(p for p in plans if p.group.kind == "attend")
    assert len({s.numerics for s in attend.specs.values()}) == 2


# --- the digest ------------------------------------------------------------------------------


def last_schedule() -> Chooser:
    first = first_candidate(TARGET)

    def choose(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        candidate = first(body, choice, bucket)
        found = choice.template.schedules(body.graph, candidate.numerics, 4)
        return replace(candidate, schedule=found[-1])

    return choose


def digest(
    model: Tiny, choose: Chooser | None = None, *, mode: str = "deterministic", weights: str = "w"
) -> str:
    """The digest of a model without building its kernels."""
    settings, chooser = replace(model.settings, mode=mode), choose or first_candidate(TARGET)
    graph = lower(model.graph, Flags()).graph
    plans = plan_groups(graph, TARGET, settings, chooser)
    job = CompileJob(
        model.graph, model.record(), model.weights, TARGET, CppToolchain(TARGET), settings, chooser
    )
    return numerics_digest(job, graph, plans, weights, "support")


@pytest.mark.cpu
def test_digest_covers_what_decides_bits() -> None:
    """Schedules do not count; weights, dtype, mode, graph and numerics do."""
    base = tiny("q4_1", num_hidden_layers=1)

    same = {digest(base), digest(base, last_schedule())}
    assert len(same) == 1
    others = [
        digest(base, mode="fast"),
        digest(base, weights="others"),
        digest(tiny("q8_0", num_hidden_layers=1)),
        digest(tiny("q4_1", num_hidden_layers=1, rms_norm_eps=1e-6)),
        digest(tiny("q4_1", num_hidden_layers=1, settings=replace(SETTINGS, dtype="bfloat16"))),
        digest(base, one_bucket_differs("contract"), mode="fast"),
    ]
    assert len({*same, *others}) == 7


@pytest.mark.cpu
def test_digest_of_artifacts(tmp_path: Path, kernel_cache: Path) -> None:
    found = [
        build(tiny("f32", seed=seed), tmp_path / f"{seed}", kernel_cache, target=TARGET)
        for seed in (0, 1)
    ]
    again = build(tiny("f32"), tmp_path / "again", kernel_cache, target=TARGET)
    assert found[0].numerics_digest == again.numerics_digest != found[1].numerics_digest
    assert again.num_compiled == 0
