"""What the assembler says of every kernel of GPU artifacts, with a modelled time: a table and JSON.

python -m tilewright.tools.dev.kernel_table ARTIFACT.. --measured STEPS.json -o OUT

The model: 1.3 us for the launch, and the floor (bytes over bandwidth or operations over the peak
rate) over the share of the floor that launches of the same template and number of tokens reached
where they were measured. It is no measurement.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tilewright.codegen.cost import roofline_seconds
from tilewright.codegen.target import Target
from tilewright.runtime.artifact import BucketRecord, KernelRecord, Manifest, evaluate
from tilewright.runtime.artifact_files import read_manifest
from tilewright.targets.nvidia.build import read_report
from tilewright.targets.registry import resolve

CONTEXT = 8192  # positions of each request in the model
LAUNCH_US = 1.3
Row = dict[str, Any]


def main() -> None:
    """Write OUT.json and OUT.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--measured", type=Path, help="what device_step run wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, help="without a suffix")
    asked = parser.parse_args()
    steps = json.loads(asked.measured.read_text())["steps"] if asked.measured else {}
    shares = reached_shares(steps)
    found = {path.name: rows_of(path, shares) for path in asked.artifacts}
    asked.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    text = "\n".join(line for name, rows in found.items() for line in table(name, rows))
    asked.output.with_suffix(".md").write_text(text + "\n")
    for name, rows in found.items():
        spilled = [r["kernel"] for r in rows if any(p.get("spilled_bytes") for p in r["parts"])]
        print(f"{name}: {len(rows)} kernels, {len(spilled)} with spills {' '.join(spilled)}")


@dataclass(frozen=True)
class Shares:
    """Shares of the floor that were reached, by template and tokens of the step."""

    found: Mapping[tuple[str, int], float]

    def of(self, template: str, tokens: int) -> float | None:
        """The share at the nearest number of tokens; None for a template without measurement."""
        near = [(abs(n - tokens), s) for (t, n), s in self.found.items() if t == template]
        return min(near)[1] if near else None


def reached_shares(steps: Mapping[str, Any]) -> Shares:
    """Median share of each template in each measured step."""
    found: dict[tuple[str, int], list[float]] = {}
    for name, step in steps.items():
        match = re.search(r"batch (\d+)", name)
        tokens = int(match[1]) if match else CONTEXT
        for launch in step["launches"]:
            if launch["us"] > LAUNCH_US:
                share = min(1.0, launch["floor_us"] / (launch["us"] - LAUNCH_US))
                found.setdefault((launch["template"], tokens), []).append(share)
    return Shares({key: max(0.01, median(each)) for key, each in found.items()})


def rows_of(path: Path, shares: Shares) -> list[Row]:
    """One row a kernel: what it uses, and its time at the bounds of the largest bucket it has."""
    manifest = read_manifest(path)
    target, _ = resolve(manifest.target.name)
    reports: dict[str, list[Any]] = {}
    for part in read_report((path / manifest.library).read_bytes()):
        reports.setdefault(part["source"], []).append(part)
    return [
        _row(manifest, target, kernel, reports.get(kernel.symbol, []), shares)
        for kernel in manifest.kernels
    ]


def _row(
    manifest: Manifest, target: Target, kernel: KernelRecord, parts: Sequence[Any], shares: Shares
) -> Row:
    uses = [
        (bucket, [x for x in bucket.launches if x.kernel == kernel.symbol])
        for bucket in manifest.buckets
    ]
    uses = [(bucket, launches) for bucket, launches in uses if launches]
    bucket, launches = max(uses, key=lambda use: use[0].bounds["tokens"])
    dims = _dims(manifest, bucket)
    flops, num_bytes = evaluate(kernel.flops, dims), evaluate(kernel.num_bytes, dims)
    floor = roofline_seconds(flops, num_bytes, target) * 1e6
    share = shares.of(kernel.template, dims["tokens"])
    return {
        "kernel": kernel.symbol, "group": launches[0].group, "launches": len(launches),
        "template": kernel.template, "buckets": [b.name for b, _ in uses],
        "schedule": kernel.schedule, "parts": parts, "tokens": dims["tokens"], "floor_us": floor,
        "modelled_us": LAUNCH_US + floor / share if share else None,
    }  # fmt: skip


def _dims(manifest: Manifest, bucket: BucketRecord) -> dict[str, int]:
    """The bucket's limits, with the context of the model in tables of pages."""
    size, dims = manifest.model.block_size, {}
    for dim in manifest.dims:
        limit = bucket.bounds.get(dim.name, dim.upper)
        dims[dim.name] = min(limit, -(-CONTEXT // size)) if dim.role == "context" else limit
    return dims


def table(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Lines of markdown."""
    yield f"## {name}"
    yield ""
    yield ("| kernel | group | tokens up to | warps | registers | shared KB | tensor memory "
           "| spilled bytes | floor us | modelled us |")  # fmt: skip
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        parts = row["parts"]
        cells = (
            row["kernel"], row["group"], row["tokens"],
            _each(parts, "threads", lambda n: n // 32), _each(parts, "registers"),
            _each(parts, "shared_bytes", lambda n: round(n / 1024, 1)),
            _each(parts, "tensor_memory_columns"), _each(parts, "spilled_bytes"),
            f"{row['floor_us']:.1f}",
            f"{row['modelled_us']:.1f}" if row["modelled_us"] else "-",
        )  # fmt: skip
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""


def _each(parts: Sequence[Any], key: str, shown: Callable[[int], Any] = int) -> str:
    """A number for each kernel of a source; of CUDA's own compiler not all are known."""
    return " / ".join(str(shown(p[key])) if key in p else "?" for p in parts) or "-"


if __name__ == "__main__":
    main()
