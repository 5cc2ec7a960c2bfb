"""Candidates for a GPU in a folder of their own: what `tune --export` writes, and what comes back.

The folder holds one library of all candidates, their operands as plain data, and `measure.py`,
which needs torch and tvm_ffi only. Equal rows of a body share a case, equal schedules a kernel.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.codegen.arguments import argument_names, int_names, matrix_weights, needs_scratch
from tilewright.codegen.body import Body
from tilewright.codegen.cache import KernelCache, Progress
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.pack_gpu import packed_bytes
from tilewright.codegen.plan import Bucket, Candidate
from tilewright.codegen.select import Choice
from tilewright.codegen.source import KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.target import Target, Toolchain
from tilewright.codegen.tune import TuningRecord, candidate_key, candidates
from tilewright.graph.dims import evaluate
from tilewright.graph.errors import LowerError, TargetError
from tilewright.graph.types import BlockFormat
from tilewright.tools import device_measure
from tilewright.tools.synthetic import Step, int_operand, plausible_step

CASES, LIBRARY, SCRIPT = "cases.json", "candidates.so", "measure.py"
SCHEMA = "tilewright-candidates-1"
CONTEXT = 512


@dataclass(frozen=True)
class Case:
    """One body in one bucket: the key of its record, and the kernels to choose from."""

    key: str
    group: str
    bucket: str
    specs: tuple[KernelSpec, ...]
    step: Step


@dataclass(frozen=True)
class Scope:
    """What is to be measured: candidates of a case, and templates; none: of all templates."""

    budget: int
    templates: frozenset[str] = frozenset()

    @classmethod
    def build(cls, target: Target, budget: int, names: str | None) -> Scope:
        """Read names with commas between them. Raises TargetError for one the target lacks."""
        wanted = frozenset[str]() if names is None else frozenset(names.split(","))
        have = [t.name for t in target.kernels]
        for name in sorted(wanted.difference(have)):
            raise TargetError(
                f"target '{target.name}': kernel template '{name}': unknown: have {', '.join(have)}"
            )
        return cls(budget, wanted)

    def holds(self, template: str) -> bool:
        """Whether kernels of a template are to be measured."""
        return not self.templates or template in self.templates


class Collector:
    """A chooser that measures nothing: it notes what would be measured, and takes the first."""

    def __init__(
        self, target: Target, config: CompileConfig, names: Mapping[str, str], scope: Scope
    ) -> None:
        """`names`: a group's name for every body, by `body_key`."""
        self.cases: dict[str, Case] = {}
        self.met: set[str] = set()  # templates with kernels that can be measured
        self._target, self._config, self._names, self._scope = target, config, names, scope

    def __call__(self, body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        tried = candidates(body, choice, bucket, self._target, self._config)
        key = candidate_key(body, choice, bucket, self._target, self._config)
        fits = not _finds_pages(body)
        if fits:
            self.met.add(choice.template.name)
        if key not in self.cases and fits and self._scope.holds(choice.template.name):
            specs = tuple(
                KernelSpec(choice.template.kind, body.graph, choice.template.name, c.numerics,
                           c.schedule, body.buffers)
                for c in tried[: self._scope.budget]
            )  # fmt: skip
            step = plausible_step(body.graph, bucket.bounds, context=CONTEXT)
            group = self._names[body.graph.digest + repr(body.buffers)]
            self.cases[key] = Case(key, group, bucket.name, specs, step)
        return tried[0]


def _finds_pages(body: Body) -> bool:
    """Whether rows find pages through tables: what fits states and tables together is not made up
    here, and such kernels take the first schedule."""
    return any(n.op in ("page_slots", "pool_window") for n in body.graph.nodes)


def export(
    cases: Sequence[Case], folder: Path, target: Target, toolchain: Toolchain, cache: Path, *,
    jobs: int, progress: Progress,
) -> int:  # fmt: skip
    """Build all candidates and write the folder; return how many kernels there are.

    Raises TargetError for a target without devices to be measured elsewhere.
    """
    if not target.tuned:
        raise TargetError(
            f"target '{target.name}': candidates are not exported: want sm90 or sm100; "
            "CPUs are measured where they are"
        )
    templates = {t.name: t for t in target.kernels}
    sources: dict[str, KernelSource] = {}
    rows, ints = [], {}
    for case in cases:
        for spec in case.specs:
            if spec.symbol not in sources:
                sources[spec.symbol] = emit(spec, templates[spec.template])
        row, found = _describe(case, templates)
        rows.append(row)
        ints.update(found)
    built = KernelCache(cache, toolchain).build(
        list(sources.values()), jobs=jobs, progress=progress
    )
    folder.mkdir(parents=True, exist_ok=True)
    toolchain.link(built.objects, folder / LIBRARY)
    np.savez_compressed(folder / "ints.npz", **ints)
    facts = {"schema": SCHEMA, "target": target.name, "toolchain": toolchain.identity(),
             "cases": rows}  # fmt: skip
    (folder / CASES).write_text(json.dumps(facts, indent=1) + "\n")
    shutil.copyfile(device_measure.__file__, folder / SCRIPT)
    return len(sources)


def _describe(case: Case, templates: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case as plain data, and its int operands."""
    first, dims = case.specs[0], case.step.dims
    body, packed = first.body, matrix_weights(first.body)
    rng = np.random.default_rng(0)
    arguments, ints = [], {}
    for name in argument_names(body):
        type_ = first.stored_type(name)
        entry: dict[str, Any] = {"kept": name in body.weight or name in body.state}
        if name in packed and isinstance(type_.dtype, BlockFormat):
            entry |= {"dtype": "codes", "shape": [packed_bytes(type_)]}
        elif str(type_.dtype) == "i32":
            entry |= {"dtype": "i32", "ints": f"{case.key}.{name}"}
            shape = [evaluate(d, dims) for d in type_.shape]
            ints[entry["ints"]] = int_operand(body, name, case.step, rng).reshape(shape)
        else:
            entry |= {"dtype": str(type_.dtype), "shape": [evaluate(d, dims) for d in type_.shape]}
        arguments.append(entry | {"name": name})
    outputs = [v for _, v in body.outputs]
    kernels = [
        {
            "symbol": spec.symbol,
            "scratch": templates[spec.template].scratch_bytes(
                spec.body, spec.numerics, spec.schedule, dims
            ) if needs_scratch(spec.kind) else None,
        }
        for spec in case.specs
    ]  # fmt: skip
    row = {
        "key": case.key, "group": case.group, "bucket": case.bucket, "arguments": arguments,
        "outputs": outputs, "ints": [dims[n] for n in int_names(body)], "kernels": kernels,
    }  # fmt: skip
    return row, ints


def adopt(measured: Path, cases: Mapping[str, Case]) -> list[TuningRecord]:
    """Return records of what `measure.py` wrote, for those of these cases that it measured.

    Raises LowerError for a file of another kind, for a case whose kernels are others, and where
    schedules of one case gave different bits: then none may be chosen by its time.
    """
    found = _read(measured)
    records = []
    for row in found["cases"]:
        case = cases.get(str(row.get("key")))
        if case is None:
            continue
        symbols = [spec.symbol for spec in case.specs]
        if row["symbols"] != symbols[: len(row["symbols"])]:
            raise LowerError(
                f"measurement '{measured}': kernels of '{case.group}' ({case.bucket}) are others "
                "than this version makes: export and measure again"
            )
        if wrong := _moved(case, row["different"]):
            raise LowerError(
                f"measurement '{measured}': '{case.group}' ({case.bucket}): schedules gave "
                f"different bits: {', '.join(wrong)}"
            )
        records.append(_record(case, row, found))
    if not records:
        raise LowerError(f"measurement '{measured}': holds no case of this model and these bounds")
    return records


def _moved(case: Case, different: Sequence[str]) -> list[str]:
    """Kernels with other bits than the first although they have its numerics; in fast mode others
    may have other bits."""
    first = case.specs[0].numerics
    other = {spec.symbol for spec in case.specs if spec.numerics != first}
    return [symbol for symbol in different if symbol not in other]


def _record(case: Case, row: Mapping[str, Any], found: Mapping[str, Any]) -> TuningRecord:
    seconds = row["seconds"]
    best = min(range(len(seconds)), key=seconds.__getitem__)
    spec = case.specs[best]
    return TuningRecord(
        key=case.key, kernel=spec.symbol, bucket=case.bucket, numerics=spec.numerics.to_json(),
        schedule=spec.schedule.to_json(), best_seconds=seconds[best], first_seconds=seconds[0],
        num_measured=len(seconds), machine=found["device"], driver=found["driver"],
        date=found["date"],
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or found.get("schema") != device_measure.SCHEMA:
            raise ValueError(f"want a file that {SCRIPT} wrote")
    except (OSError, ValueError) as error:
        raise LowerError(f"measurement '{path}': not readable: {error}") from None
    return found


