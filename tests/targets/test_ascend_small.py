"""The small V4.1 model on the functional model, teacher-forced over a text that it wrote: how often
it expects the next token that the fp64 reference and the CPU artifact expect.

No computation in fp32 can be asked for equality: a last bit tips a code of four bits now and then,
and what follows differs visibly. The reference with its own sums moved by up to one rounding shows
by how much. So equality is asked for where the reference's two best logits are apart by three times
that; elsewhere, to be no farther off than the reference is from itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.codegen.compile import compile_graph
from tilewright.tools.commands.job import Asked, make_job, open_model, resolve_asked
from tilewright.tools.dev.agreement import (
    MARGINS,
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
LENGTH, GOAL = 120, 0.98


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    paths = {}
    for name, target in (("ascend", "ascend950:+model"), ("cpu", "cpu")):
        asked = Asked(model=str(SMALL), target=target, dtype="bfloat16")
        paths[name] = tmp_path_factory.mktemp(name) / "small"
        job = make_job(open_model(asked), resolve_asked(asked), None)
        compile_graph(job, paths[name], lambda *_: None)
    rows = written(paths["cpu"], texts=1, length=LENGTH, first=1)
    logits = {name: artifact_logits(path, rows) for name, path in paths.items()}
    logits |= references(SMALL, rows, (REFERENCE, MOVED))
    return {pair.names: pair for pair in pairs(logits)}


def test_clear_positions_agree(found: dict[tuple[str, str], Pair]) -> None:
    for names in (("ascend", REFERENCE), ("ascend", "cpu")):
        pair = found[names]
        assert pair.tokens[-1] > LENGTH / 2 and MARGINS[-1] < 4 * found[REFERENCE, MOVED].distance
        assert pair.same[-1] >= GOAL * pair.tokens[-1], pair.text


def test_what_differs_is_what_rounding_gives(found: dict[tuple[str, str], Pair]) -> None:
    """The allowances are what one text of this length cannot tell apart."""
    ascend, cpu = found["ascend", REFERENCE], found["cpu", REFERENCE]
    floor = found[REFERENCE, MOVED]
    assert floor.distance > 0.01  # rounding alone changes the logits visibly
    assert ascend.distance < 1.5 * max(cpu.distance, floor.distance)
    assert ascend.same[0] >= min(cpu.same[0], floor.same[0]) - 0.04 * LENGTH, ascend.text
