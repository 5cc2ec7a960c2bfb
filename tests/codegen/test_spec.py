"""Numerics and schedules hold plain values; specs are named by what their text depends on."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from support.tiny import tiny_graph
from tilewright.codegen.body import extract
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import lower
from tilewright.codegen.spec import KernelSpec, Numerics, Schedule
from tilewright.graph.dims import symbol
from tilewright.graph.errors import LowerError

TOKENS = symbol("tokens")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": TOKENS}, "numerics 'chunk': got tokens, want an int known when the kernel is "
                            "generated"),
        ({"segments": TOKENS // 4}, "numerics 'segments': got floor(tokens/4), want an int known "
                                    "when the kernel is generated"),
        ({"lanes": True}, "numerics 'lanes': got True, want an int known when the kernel is "
                          "generated"),
        ({"lanes": 0}, "numerics 'lanes': got 0, want an int known when the kernel is generated"),
        ({"segments": 1.0}, "numerics 'segments': got 1.0, want an int known when the kernel is "
                            "generated"),
        ({"combine": "thread_order"}, "numerics 'combine': got 'thread_order', want in_order or "
                                      "tree"),
        ({"scale_order": TOKENS}, "numerics 'scale_order': got tokens, want none or dequantise or "
                                  "factored"),
    ],
)  # fmt: skip
def test_numerics_refuse_anything_but_plain_values(settings: Any, message: str) -> None:
    with pytest.raises(LowerError) as caught:
        Numerics(**settings)
    got = re.sub(r"got Symbol\('tokens'.*?\)", "got tokens", str(caught.value))
    assert got == message


@pytest.mark.parametrize("value", [TOKENS, 1.0, True, "4", None])
def test_schedules_hold_ints_only(value: Any) -> None:
    with pytest.raises(LowerError, match=r"^schedule 'tile': got .*, want an int$"):
        Schedule.of(tile=value)


def test_schedules_are_ordered_by_name() -> None:
    assert Schedule.of(b=1, a=2) == Schedule.of(a=2, b=1)
    assert str(Schedule.of(b=1, a=2)) == "a=2 b=1"


def test_symbols_follow_everything_the_text_depends_on() -> None:
    graph = lower(tiny_graph("q4_1"), Flags()).graph
    group = next(g for g in graph.groups if g.kind == "attend")
    body = extract(graph, group)
    spec = KernelSpec("attend", body.graph, "attend", Numerics(chunk=64), Schedule.of(tile=1))
    other = next(extract(graph, g) for g in graph.groups if g.kind == "contract")
    symbols = {
        spec.symbol,
        replace(spec, numerics=Numerics(chunk=32)).symbol,
        replace(spec, schedule=Schedule.of(tile=2)).symbol,
        replace(spec, body=other.graph).symbol,
        replace(spec, template="attend2").symbol,
        replace(spec, buffers=(("x0", body.graph.type_of("x0")),)).symbol,
    }
    assert len(symbols) == len(fields(KernelSpec))
    assert spec.symbol == replace(spec).symbol
