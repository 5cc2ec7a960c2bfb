"""`tilewright tune MODEL`: measure what has no record yet, and show what tuning gains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands import options
from tilewright.tools.failures import CommandUsageError

BUDGET = 16  # that of codegen.tune, which is slow to import

if TYPE_CHECKING:
    from tilewright.codegen.body import Body
    from tilewright.codegen.config import CompileConfig
    from tilewright.codegen.plan import Bucket, Candidate, Chooser
    from tilewright.codegen.select import Choice
    from tilewright.codegen.tune import TuningRecord
    from tilewright.graph import Graph
    from tilewright.tools.commands.job import Asked, Resolved
    from tilewright.tools.progress import StageBars


Export = Annotated[
    Path | None, options.place("--export", metavar="DIR", help="Write candidates for a GPU.")
]
Import = Annotated[
    Path | None, options.place("--import", metavar="FILE", help="Keep what measure.py wrote.")
]
Budget = Annotated[
    int | None,
    options.count("--budget", low=1, high=BUDGET,
                  help=f"GPU targets: candidates of a kernel; default: {BUDGET}."),
]  # fmt: skip
Templates = Annotated[
    str | None,
    typer.Option("--templates", metavar="NAME,..", help="GPU targets: kernels of these alone."),
]


def tune(
    model: options.ModelToCompile = None,
    target: options.TargetName = "cpu",
    mode: options.ModeName = "deterministic",
    dtype: options.DtypeName = "auto",
    max_context: options.MaxContext = None,
    max_tokens_per_step: options.MaxTokensPerStep = 512,
    model_config: options.ModelConfigName = None,
    jobs: options.Jobs = None,
    export: Export = None,
    import_from: Import = None,
    budget: Budget = None,
    templates: Templates = None,
    as_json: options.Json = False,
) -> None:
    """Measure schedules of every kernel and bucket, and keep the fastest for later compiles.

    A GPU target is measured in place where there is a GPU, or in two halves: --export writes a
    folder, its measure.py runs where the GPU is, --import keeps the result. There a --config may
    stand in place of a model: weights are random. Other targets refuse --config, --export,
    --import, --budget and --templates.
    """
    from tilewright.tools.commands.device_tune import tune_device
    from tilewright.tools.commands.job import Asked, resolve_asked
    from tilewright.tools.device_candidates import Scope
    from tilewright.tools.progress import StageBars

    if export is not None and import_from is not None:
        raise CommandUsageError("option '--export': got --import too, want one of them")
    if (model is None) == (model_config is None):
        got = "neither" if model is None else "both"
        raise CommandUsageError(f"argument 'MODEL': got {got}, want a model or --config")
    asked = Asked(
        model=model, model_config=model_config, target=target, mode=mode, dtype=dtype,
        max_context=max_context, max_tokens_per_step=max_tokens_per_step, jobs=jobs,
    )  # fmt: skip
    with StageBars(visible=not as_json) as bars:
        found = resolve_asked(asked)
        if found.target.tuned:
            scope = Scope.build(found.target, budget or BUDGET, templates)
            rows = tune_device(asked, found, export, import_from, scope, bars)
        else:
            _refuse_unused(target, {
                "--config": model_config, "--export": export, "--import": import_from,
                "--budget": budget, "--templates": templates,
            })  # fmt: skip
            rows = _tune(asked, found, bars)
    if as_json:
        print(json.dumps({
            "records": [{"node": name, **asdict(record)} for name, record in rows],
            "found": found.records.num_found, "measured": found.records.num_measured,
            "path": str(found.records.path),
        }))  # fmt: skip
    elif export is None:
        _print(rows, found)


def _refuse_unused(target: str, given: Mapping[str, object]) -> None:
    """Refuse options that only the tuning of GPUs takes, by which target and which option."""
    unused = [name for name, value in given.items() if value is not None]
    if unused:
        raise CommandUsageError(
            f"target '{target}': is measured where it runs, with a model's weights: got "
            f"{', '.join(unused)}, want none of the options of GPU targets"
        )


def _tune(asked: Asked, found: Resolved, bars: StageBars) -> list[tuple[str, TuningRecord]]:
    """Choose for every body and bucket; return the records used, with the name of a group."""
    from tilewright.codegen.pipeline import lower
    from tilewright.codegen.plan import buckets_of, plan_groups
    from tilewright.tools.commands.job import make_job, open_model
    from tilewright.tools.measure import CpuMeasure

    prepared = open_model(asked)
    measure = CpuMeasure(found.target, found.toolchain, found.flags.cache, jobs=found.jobs,
                         progress=bars)  # fmt: skip
    job = make_job(prepared, found, measure)
    bars("lower", 0, 1)
    graph = lower(job.graph, job.flags, log=job.log, beside=found.target.beside).graph
    bars("lower", 1, 1)
    names = group_names(graph)
    total = len(names) * len(buckets_of(graph, found.target, job.config))
    watch = Watched(job.choose, found, job.config, names, bars, total)
    plan_groups(graph, found.target, job.config, watch)
    return watch.rows


def group_names(graph: Graph) -> Mapping[str, str]:
    """Map every distinct body to the first group that has it."""
    from tilewright.codegen.body import extract

    found: dict[str, str] = {}
    for group in graph.groups:
        found.setdefault(body_key(extract(graph, group)), group.name)
    return found


def body_key(body: Body) -> str:
    """Equal for bodies that share their kernels."""
    return body.graph.digest + repr(body.buffers)


class Watched:
    """A chooser that shows progress and remembers the record behind each choice."""

    def __init__(
        self, choose: Chooser, found: Resolved, config: CompileConfig, names: Mapping[str, str],
        bars: StageBars, total: int,
    ) -> None:  # fmt: skip
        self.rows: list[tuple[str, TuningRecord]] = []
        self._choose, self._found, self._config = choose, found, config
        self._names, self._bars, self._total, self._done = names, bars, total, 0
        bars("tune", 0, total)

    def __call__(self, body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        from tilewright.codegen.tune import record_key

        found = self._found
        chosen = self._choose(body, choice, bucket)
        record = found.records.get(record_key(
            body, choice, bucket, found.target, self._config, found.toolchain.identity(),
            found.machine,
        ))  # fmt: skip
        assert record is not None, f"no record for {bucket.name}"
        self.rows.append((self._names[body_key(body)], record))
        self._done += 1
        self._bars("tune", self._done, self._total)
        return chosen


def _print(rows: list[tuple[str, TuningRecord]], found: Resolved) -> None:
    from rich.table import Table

    from tilewright.tools.progress import result_console

    table = Table("kernel", "bucket", box=None, header_style="dim")
    for title in ("untuned us", "tuned us", "ratio", "candidates"):
        table.add_column(title, justify="right")
    for name, record in rows:
        table.add_row(name, record.bucket, *_numbers(record))
    if rows:
        result_console().print(table)
    records = found.records
    if records.num_measured:
        print(f"measured {records.num_measured} candidates; {records.num_found} records were there")
    else:
        print(f"measured nothing: all {records.num_found} records were there")
    print(f"records: {records.path}")


def _numbers(record: TuningRecord) -> tuple[Any, ...]:
    before, after = record.first_seconds, record.best_seconds
    return f"{before * 1e6:.1f}", f"{after * 1e6:.1f}", f"{before / after:.2f}", str(
        record.num_measured)  # fmt: skip
