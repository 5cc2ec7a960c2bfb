"""The pipeline: verified after each pass, reported by level, the same text every time."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from support.tiny import tiny_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.pipeline import PASSES, lower
from tilewright.graph.errors import VerifyError
from tilewright.graph.text import print_graph


def test_passes_in_order() -> None:
    lowered = lower(tiny_graph(), Flags())
    assert [name for name, _ in lowered.seconds] == [p.name for p in PASSES]
    assert [p.name for p in PASSES] == ["canonicalize", "decompose", "fuse"]
    rules = {d.rule for d in lowered.decisions if d.stage == "decompose"}
    assert rules == {"expand_rms_norm"}


def test_lowering_is_repeatable() -> None:
    graph = tiny_graph()
    assert print_graph(lower(graph, Flags()).graph) == print_graph(lower(graph, Flags()).graph)


def test_every_level_says_more() -> None:
    sizes = []
    for level in range(6):
        log = io.StringIO()
        lower(tiny_graph(), Flags(debug=level), log=log)
        sizes.append(len(re.sub(r"\d+ ms", "", log.getvalue())))  # times vary
    assert sizes[0] == 0 < sizes[1] <= sizes[2] < sizes[3] <= sizes[4] < sizes[5]


def test_a_broken_graph_is_refused_before_any_pass() -> None:
    graph = tiny_graph()
    broken = replace(graph, nodes=graph.nodes[::-1])
    with pytest.raises(VerifyError, match="out of order"):
        lower(broken, Flags())
