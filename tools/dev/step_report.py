"""Tables of what `device_step run` measured, as markdown.

python -m tilewright.tools.dev.step_report docs/results/h200-v41-step.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Launches by what they do, by the end of a group's name; the first that fits.
PARTS = (
    ("experts", ("experts_w1", "experts_w2")),
    ("shared expert", (".w1", ".w2")),
    ("router", ("gate", "top_k_indices")),
    ("queries, keys and values in", ("wq_a", "wq_b")),
    ("output projections", ("wo_a", "wo_b")),
    ("attention", ("attend_window", "attend_selected")),
    ("selection", ("select_entries", "select_with_blocks", "select_within", "slice_last")),
    ("compressor, index keys and weights", ("wkv_1", "wk", "weights_proj")),
    ("Engram projection", ("wkv",)),
    ("numbers of hyper-connections", ("hc_attn_fn_1", "hc_ffn_fn_1")),
    ("logits", ("logits", "argmax")),
)
ROWS = "row kernels"
Step = Mapping[str, Any]


def main() -> None:
    """Print the tables of a file."""
    report = json.loads(Path(sys.argv[1]).read_text())
    print("\n".join(tables(report)))


def tables(report: Mapping[str, Any]) -> Iterator[str]:
    """All steps, then each by parts."""
    yield ("| step | ms | floor ms | floor / time | one stream, ms | launches, sum of ms "
           "| sum of their floors |")  # fmt: skip
    yield "|---|---|---|---|---|---|---|"
    for name, step in report["steps"].items():
        launches = step["launches"]
        total, floors = (sum(each[k] for each in launches) / 1e3 for k in ("us", "floor_us"))
        yield (
            f"| {name} | {step['ms']:.2f} | {step['floor_ms']:.2f} | "
            f"{step['floor_ms'] / step['ms']:.0%} | {step['in_order_ms']:.2f} | {total:.2f} "
            f"| {floors:.2f} |"
        )
    for name, step in report["steps"].items():
        yield ""
        yield f"**{name}**"
        yield ""
        yield from _parts(step["launches"])


def part_of(launch: Mapping[str, Any]) -> str:
    """What a launch does."""
    if launch["template"] == "row" and not launch["group"].endswith(("argmax", "top_k_indices")):
        return ROWS
    for part, ends in PARTS:
        if launch["group"].endswith(ends):
            return part
    return f"{launch['template']} {launch['group']}"


def _parts(launches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for each in launches:
        found = sums[part_of(each)]
        values = (1, each["us"], each["floor_us"], each["kept_bytes"], each["flops"])
        for i, value in enumerate(values):
            found[i] += value
    yield "| part | launches | us | floor us | floor / time | MB kept | GFLOP |"
    yield "|---|---|---|---|---|---|---|"
    for part, (count, us, floor, kept, flops) in sorted(sums.items(), key=lambda x: -x[1][1]):
        yield (
            f"| {part} | {count:.0f} | {us:.0f} | {floor:.0f} | {floor / max(us, 1e-9):.0%} | "
            f"{kept / 1e6:,.1f} | {flops / 1e9:,.1f} |"
        )


if __name__ == "__main__":
    main()
