"""The tool that times the functional model: bytes of each kind of kernel, and unknown kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from tilewright.tools.dev.ascend_speed import KINDS, Speed, kernel_of, main, measure

pytestmark = pytest.mark.cpu
ROWS = 3


@pytest.mark.parametrize("name", ["norm", "attention"])
def test_a_launch_moves_its_operands(
    name: str, kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(kernel_cache))
    speed = measure(kernel_of(KINDS[name][0](ROWS), tmp_path), ROWS, 0.0)
    assert len(speed.seconds) == 1 and speed.seconds[0] > 0
    if name == "norm":  # bf16 rows in and out, and the weight for each vector core that works
        assert speed.memory == speed.paths
        assert (speed.memory - ROWS * 1024 * 4) % (1024 * 4) == 0
    else:  # queries and results, and at least each token's rows
        assert speed.paths > speed.memory >= ROWS * (2 * 64 * 512 * 2 + 2 * 128 * 583)


def test_a_line_has_rates_of_the_median_and_the_best() -> None:
    found = Speed(2_000_000, 6_000_000, (0.04, 0.02, 0.03)).line("norm").split()
    assert found == ["norm", "3", "2.00", "6.00", "100.0", "66.7", "200.0"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'softmax': unknown: have elementwise"):
        main(rows=4, seconds=0.0, only="softmax")
