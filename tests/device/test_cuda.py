"""An artifact on a GPU: what tools/dev/device_check.py looks at, as tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilewright.tools.dev import device_checks

pytestmark = pytest.mark.device
GREEDY = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"


def assert_ok(found: dict[str, Any]) -> None:
    wrong = {name: each for name, each in found.items() if not each["ok"]}
    assert not wrong


def test_greedy_tokens_are_those_of_the_fp32_evaluation(smollm2: Path) -> None:
    assert_ok(device_checks.check_greedy(smollm2, GREEDY))


def test_every_launch_is_near_its_reference(smollm2: Path) -> None:
    assert_ok(device_checks.check_launches(smollm2))


@pytest.mark.parametrize("seed", [0, 1])
def test_bits_depend_on_the_request_alone(smollm2: Path, seed: int) -> None:
    assert_ok(device_checks.check_invariance(smollm2, seed=seed))


def test_sampled_tokens_are_those_of_the_host(smollm2: Path) -> None:
    found = device_checks.check_sampling(smollm2, rounds=10, seed=3)
    assert found["ok"], found["wrong"]


def test_what_cannot_work_is_told_in_one_sentence(smollm2: Path) -> None:
    assert_ok(device_checks.check_refusals(smollm2))
