"""`tilewright tune` for a GPU: candidates out, measurements back, records kept and committed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.tools.failures import CommandError, writing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tilewright.codegen.tune import TuningRecord
    from tilewright.tools.commands.job import Asked, Resolved
    from tilewright.tools.device_candidates import Case, Scope
    from tilewright.tools.progress import StageBars

MEASURED = "measured.json"


def tune_device(
    asked: Asked, found: Resolved, export_to: Path | None, import_from: Path | None, scope: Scope,
    bars: StageBars,
) -> list[tuple[str, TuningRecord]]:  # fmt: skip
    """Export, import, or measure here; return the records that are new.

    Raises CommandError where nothing was asked for and there is no GPU, and what measuring raises.
    """
    from tilewright.tools.device_candidates import adopt, export

    cases = _cases(asked, found, scope, bars)
    if import_from is not None:
        return _keep(adopt(import_from, cases), cases, found)
    missing = {k: c for k, c in cases.items() if found.records.get(k) is None}
    found.records.num_found = len(cases) - len(missing)
    if export_to is None and missing:
        _require_gpu(found)
    if not missing:
        if export_to is not None:
            print(f"nothing to measure: all {len(cases)} records are there", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="tilewright-") as spare:
        folder = export_to or Path(spare)
        with writing(folder):
            export(
                list(missing.values()), folder, found.target, found.toolchain, found.flags.cache,
                jobs=found.jobs, progress=bars,
            )  # fmt: skip
        if export_to is None:
            return _keep(adopt(_measure(folder), cases), cases, found)
    print(
        f"wrote {len(missing)} cases: on the machine with the GPU run\n"
        f"  python {export_to}/measure.py -o {MEASURED}\n"
        f"and here the same command with --import {MEASURED} in place of --export",
        file=sys.stderr,
    )
    return []


def _cases(
    asked: Asked, found: Resolved, scope: Scope, bars: StageBars
) -> Mapping[str, Case]:
    """Return everything that could be measured, by the key of its record."""
    from tilewright.codegen.pipeline import lower
    from tilewright.codegen.plan import plan_groups
    from tilewright.tools.commands.job import open_model
    from tilewright.tools.commands.tune import group_names
    from tilewright.tools.device_candidates import Collector

    prepared = open_model(asked)
    bars("lower", 0, 1)
    graph = lower(prepared.graph, found.flags, beside=found.target.beside).graph
    bars("lower", 1, 1)
    collector = Collector(found.target, prepared.config, group_names(graph), scope)
    plan_groups(graph, found.target, prepared.config, collector)
    if not collector.cases:
        raise CommandError(
            "option '--templates': no kernel of this model can be measured: got "
            f"{', '.join(sorted(scope.templates))}, want some of {', '.join(sorted(collector.met))}"
        )
    return collector.cases


def _keep(
    records: list[TuningRecord], cases: Mapping[str, Case], found: Resolved
) -> list[tuple[str, TuningRecord]]:
    for record in records:
        found.records.num_measured += record.num_measured
        found.records.add(record)
    return [(cases[r.key].group, r) for r in records]


def _require_gpu(found: Resolved) -> None:
    """Raise CommandError where torch finds no GPU of this target's kind."""
    import torch

    name = found.target.name
    have = "none"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        have = f"sm{major}{minor}"
    if have != name:
        raise CommandError(
            f"target '{name}': cannot be measured here: got GPU {have}, want {name}; use --export "
            "DIR, run DIR/measure.py on a machine that has one, then --import"
        )


def _measure(folder: Path) -> Path:
    """Run the exported script in a process of its own; return the file that it wrote."""
    output = folder / MEASURED
    done = subprocess.run(
        [sys.executable, str(folder / "measure.py"), "-o", str(output)], stdout=sys.stderr,
        check=False, env={**os.environ},
    )  # fmt: skip
    if not output.exists():
        raise CommandError(f"measure.py: failed: exit code {done.returncode}")
    return output
