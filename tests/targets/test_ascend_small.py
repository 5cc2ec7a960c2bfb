"""The small V4.1 model on the functional model, teacher-forced over a text it wrote: how often it
expects the next token that the fp64 reference and the CPU artifact expect.

No computation in fp32 can be asked for equality: a last bit tips a code of four bits now and then,
and what follows differs visibly. The reference with its own sums moved by one rounding shows by how
much; so the goal holds where the reference's two best logits are clearly apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.codegen.compile import compile_graph
from tilewright.tools.commands.job import Asked, make_job, open_model, resolve_asked
from tilewright.tools.dev.agreement import (
    MOVED,
    REFERENCE,
    Pair,
    artifact_logits,
    pairs,
    references,
    written,
)

pytestmark = [pytest.mark.cpu, pytest.mark.slow]
SMALL = Path(__file__).parent.parent.parent / "models" / "small"
LENGTH, GOAL = 144, 0.98


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    paths = {}
    for name, target in (("ascend", "ascend950:+model"), ("cpu", "cpu")):
        asked = Asked(model=str(SMALL), target=target, dtype="bfloat16", max_context=512)
        paths[name] = tmp_path_factory.mktemp(name) / "small"
        job = make_job(open_model(asked), resolve_asked(asked), None)
        compile_graph(job, paths[name], lambda *_: None)
    rows = written(paths["cpu"], texts=1, length=LENGTH)
    logits = {name: artifact_logits(path, rows) for name, path in paths.items()}
    return {pair.names: pair for pair in pairs(logits | references(SMALL, rows))}


def test_clear_positions_agree(found: dict[tuple[str, str], Pair]) -> None:
    for names in (("ascend", REFERENCE), ("ascend", "cpu")):
        assert found[names].clear > LENGTH / 2
        assert found[names].clear_part >= GOAL, found[names]


def test_what_differs_is_what_rounding_gives(found: dict[tuple[str, str], Pair]) -> None:
    """Neither farther from the reference than the CPU, nor than the reference's own sums put it,
    within what one text can tell."""
    ascend, cpu = found["ascend", REFERENCE], found["cpu", REFERENCE]
    floor = found[REFERENCE, MOVED]
    assert floor.distance > 0.01  # rounding alone changes the logits visibly
    assert ascend.distance < 1.5 * max(cpu.distance, floor.distance)
    assert ascend.same >= min(cpu.same, floor.same) - 0.02 * LENGTH
