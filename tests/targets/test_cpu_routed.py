"""Schedules of products with chosen experts on the CPU."""

from __future__ import annotations

import pytest

from tilewright.codegen.spec import Schedule
from tilewright.codegen.tune import BUDGET
from tilewright.tools.dev.expert_rate import FORMATS, candidates, expert_product


def schedules_of(tokens: int) -> list[Schedule]:
    _, specs = candidates(expert_product(FORMATS["fp4"], 256, 128), tokens, BUDGET)
    return [spec.schedule for spec in specs]


def test_what_is_tried_for_one_token_differs() -> None:
    """A matrix meets one row: a larger tile of rows would be the same kernel once more."""
    found = [s.values for s in schedules_of(1)]
    assert len(found) == BUDGET
    assert {f["row_tile"] for f in found} == {1} and {f["form"] for f in found} == {0}
    assert {f["panel_tile"] for f in found} == {1, 2, 4}
    assert {f["prefetch"] for f in found} == {2048, 4096, 8192}
    assert {f["panels_per_item"] for f in found} == {8, 16}


@pytest.mark.parametrize("tokens", [1, 4])
def test_one_panel_is_streamed_unless_tuned(tokens: int) -> None:
    first = schedules_of(tokens)[0].values
    assert (first["form"], first["panel_tile"], first["prefetch"]) == (0, 1, 2048)
