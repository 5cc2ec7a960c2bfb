"""The committed page of the H200 is what its JSON file says."""

from __future__ import annotations

import json
from pathlib import Path

from tilewright.tools.dev.device_report import page

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_page_follows_from_the_numbers() -> None:
    report = json.loads((RESULTS / "h200-smollm2.json").read_text())
    text = "\n".join(page(report, "h200-smollm2.json")) + "\n"
    assert text == (RESULTS / "h200-smollm2.md").read_text()
    checks = (report[name] for name in ("greedy", "launches", "invariance", "refusals"))
    assert all(each["ok"] for found in checks for each in found.values())
    assert report["sampling"]["ok"]
