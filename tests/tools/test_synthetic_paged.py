"""Latent attention and selection measured alone: steps make sense, and candidates run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.tiny import quick_target
from support.toolchain import QuickToolchain
from tilewright.codegen.body import Body, extract
from tilewright.codegen.emit.cpp import argument_names
from tilewright.codegen.flags import Flags
from tilewright.codegen.numerics import derive
from tilewright.codegen.pipeline import lower
from tilewright.codegen.plan import Bucket, bucket_rows
from tilewright.codegen.select import select
from tilewright.codegen.spec import KernelSpec
from tilewright.graph import Graph, GraphBuilder, Role
from tilewright.graph.types import F32, I32, element_type
from tilewright.tools.measure import CpuMeasure
from tilewright.tools.synthetic import operands, plausible_step

ROWS = element_type("fp8_e4m3[g=32,axis=1,scale=ue8m0]")
HEADS, WIDTH, WINDOW = 4, 32, 16
OPS = {
    "attend_window": {"scale": 0.5, "window": WINDOW},
    "attend_compressed": {"scale": 0.5, "window": WINDOW, "ratio": 4},
    "attend_selected": {"scale": 0.5, "window": WINDOW},
    "select_entries": {"k": 8, "ratio": 2},
    "select_with_blocks": {"k": 8, "ratio": 2, "blocks": 4, "block_size": 4},
    "select_within": {"k": 8, "ratio": 2, "block_size": 4},
}


def graph_of(op: str) -> Graph:
    b = GraphBuilder(op)
    tokens = b.dim("tokens", Role.BATCH, upper=64)
    requests = b.dim("requests", Role.BATCH, upper=8)
    blocks, pages = b.dim("blocks", Role.CONTEXT, upper=32), b.dim("pages", Role.BATCH, upper=999)
    q = b.input("q", F32, tokens, HEADS, WIDTH)
    step = [b.input(n, I32, tokens) for n in ("positions", "request_rows")]
    tables = b.input("tables", I32, requests, blocks)
    state = b.state("rows", ROWS, pages, 8, WIDTH)
    if op.startswith("select"):
        given = [q, b.input("w", F32, tokens, HEADS), state, *step, tables]
        given += [b.input("candidates", I32, tokens, 4)] if op == "select_within" else []
    else:
        near = b.dim("window_blocks", Role.CONTEXT, upper=32)
        kept = b.dim("window_pages", Role.BATCH, upper=999)
        window = b.state("window", ROWS, kept, 8, WIDTH)
        given = [q, window, *step, b.input("window_tables", I32, requests, near)]
        given.append(b.weight("sink", F32, HEADS))
        given += [] if op == "attend_window" else [state, tables]
        given += [b.input("selected", I32, tokens, 8)] if op == "attend_selected" else []
    b.output("out", b.op(op, *given, **OPS[op]))  # type: ignore[arg-type]
    return b.build()


def specs_of(op: str, rows: int, count: int) -> tuple[list[KernelSpec], Body]:
    lowered, target = lower(graph_of(op), Flags()).graph, quick_target()
    (group,) = lowered.groups
    body = extract(lowered, group)
    template = select(group, body, target).template
    numerics = derive(template.kind, body.graph, target)
    schedules = template.schedules(body.graph, numerics, rows)
    return [
        KernelSpec(template.kind, body.graph, template.name, numerics, s, body.buffers)
        for s in schedules[:count]
    ], body


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (4, 4), (32, 1)])
def test_requests_have_a_context_and_pages_of_their_own(
    op: str, tokens: int, requests: int
) -> None:
    (spec,), body = specs_of(op, tokens, 1)
    bounds = {"tokens": tokens, "requests": 8}
    step = plausible_step(spec.body, bounds, context=128)
    assert step.num_requests == requests and step.context == 128
    given = dict(zip(argument_names(spec.body), operands(spec, step, rotated_bytes=0), strict=True))
    names = {model: body_name for body_name, model in body.binding.items()}
    found = {model: given[name].arrays[0] for model, name in names.items() if name in given}
    assert found["positions"].max() == 127
    assert found["positions"].min() == (128 - tokens if requests == 1 else 127)
    assert set(found["request_rows"].tolist()) == set(range(requests))
    for tables, state in (("tables", "rows"), ("window_tables", "window")):
        if tables in found:
            assert sorted(found[tables].ravel().tolist()) == list(range(found[state].shape[0]))
    for chosen in ("selected", "candidates"):
        if chosen in found:
            assert 0 <= found[chosen].min() <= found[chosen].max() < 128
    assert bucket_rows(body, Bucket("b", bounds)) == tokens


@pytest.mark.cpu
@pytest.mark.parametrize("op", ["attend_selected", "select_with_blocks"])
def test_candidates_are_timed(op: str, kernel_cache: Path) -> None:
    specs, body = specs_of(op, 4, 2)
    target = quick_target()
    measure = CpuMeasure(
        target, QuickToolchain(target, kernel_cache), kernel_cache, num_threads=2, seconds=0.01,
        rotated_bytes=1 << 16,
    )  # fmt: skip
    seconds = measure(specs, body, Bucket("b", {"tokens": 4, "requests": 4}))
    assert len(seconds) == 2 and np.min(seconds) > 0


def test_states_of_rows_hold_what_a_step_appends() -> None:
    """A page has as many entries as its second extent says, whatever an entry is wide."""
    b = GraphBuilder("append")
    tokens, pages = (b.dim(n, Role.BATCH, upper=999) for n in ("tokens", "pages"))
    state = b.state("rows", F32, pages, 8, WIDTH)
    x, slots = b.input("x", F32, tokens, WIDTH), b.input("slots", I32, tokens)
    b.append(state, x, slots, op="append_rows")
    step = plausible_step(b.build(), {"tokens": 100}, context=512)
    assert step.dims["pages"] == 13
