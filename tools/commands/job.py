"""From a command's options to a compile job: the same for compiling and for tuning."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tilewright import targets
from tilewright.codegen.compile import CompileJob
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.codegen.target import Target, Toolchain
from tilewright.codegen.tune import Measure, TuningRecords, tuned_choice
from tilewright.graph.errors import LowerError, TargetError
from tilewright.targets.registry import resolve
from tilewright.tools.failures import CommandUsageError
from tilewright.tools.measure import machine_name
from tilewright.tools.prepare import Prepared, prepare, prepare_config

RECORDS = "tuned.json"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the options of `compile` and `tune` say."""

    model: str | None = None
    model_config: str | None = None  # a configuration without weights, in place of a model
    target: str = "cpu"
    mode: str = "deterministic"
    dtype: str = "auto"
    max_context: int | None = None
    max_tokens_per_step: int = 512
    jobs: int | None = None
    quantise_cache: bool = True
    layers: str | None = None
    replay_tokens: int | str | None = None


@dataclass(frozen=True)
class Resolved:
    """Target, toolchain, flags and tuning records, before the model is opened."""

    target: Target
    toolchain: Toolchain
    flags: Flags
    records: TuningRecords
    jobs: int
    machine: str


def resolve_asked(asked: Asked) -> Resolved:
    """Find target and compiler first: a missing one should not cost the time to read a model.

    Raises CommandUsageError for a target that there is not.
    """
    flags = Flags.from_environment()
    try:
        target, toolchain = resolve(asked.target, cxx=flags.cxx)
    except TargetError as error:
        raise CommandUsageError(str(error)) from None
    toolchain.identity()
    jobs = asked.jobs or len(os.sched_getaffinity(0))
    records = TuningRecords(records_path(target, flags))
    return Resolved(target, toolchain, flags, records, jobs, machine_name())


def records_path(target: Target, flags: Flags) -> Path:
    """Where records are: committed ones beside their target, others in the cache."""
    if target.tuned:
        return Path(targets.__file__).parent / target.tuned / RECORDS
    return flags.cache.expanduser() / RECORDS


def schedule_source(target: Target) -> str:
    """Say what chose an artifact's schedules; it is written into the artifact."""
    if not target.tuned:
        return "measured on the compiling machine where it has a record, else the first legal one"
    found = f"measured on {target.tuned} where there is a record, else "
    if target.tuned == target.name:
        return f"{found}the first legal one"
    return (
        f"{found}the first by costs that were fitted to {target.tuned}; {target.name} was not "
        "measured"
    )


def open_model(asked: Asked) -> Prepared:
    """Open the model with the bounds that were asked for.

    Raises CommandUsageError for a setting that no model could be compiled with.
    """
    try:
        config = CompileConfig(
            mode=asked.mode,
            max_tokens_per_step=asked.max_tokens_per_step,
            quantise_cache=asked.quantise_cache,
            layers=asked.layers,
            replay_tokens=asked.replay_tokens,
        )
    except LowerError as error:
        raise CommandUsageError(str(error)) from None
    if asked.model is None:
        name = asked.model_config
        assert name is not None, "neither a model nor a configuration"
        return prepare_config(
            name, config, dtype_name=asked.dtype, max_context=asked.max_context
        )
    return prepare(asked.model, config, dtype_name=asked.dtype, max_context=asked.max_context)


def make_job(prepared: Prepared, found: Resolved, measure: Measure | None) -> CompileJob:
    """Return the job; records are used where there are any, `measure` fills in the others."""
    choose = tuned_choice(
        found.target, prepared.config, found.records, toolchain=found.toolchain.identity(),
        machine=found.machine, measure=measure, fallback=first_candidate(found.target),
    )  # fmt: skip
    log = sys.stderr if found.flags.debug else None
    return CompileJob(
        prepared.graph, prepared.model, prepared.weights, found.target, found.toolchain,
        prepared.config, choose, found.flags, prepared.files, found.jobs, log,
        schedule_source(found.target),
    )  # fmt: skip
