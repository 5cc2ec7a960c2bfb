"""From a graph and its weights to an artifact: the whole flow in one readable function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tilewright import __version__
from tilewright.codegen.body import memory_type
from tilewright.codegen.cache import Built, KernelCache, Progress
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.elementary import MATH_VERSION
from tilewright.codegen.emit.registry import emit
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack import (
    ALIGNMENT,
    PACKING_VERSION,
    WeightSource,
    pack_weights,
    weight_record,
)
from tilewright.codegen.pipeline import Decision, Lowered, lower
from tilewright.codegen.plan import (
    Chooser,
    GroupPlan,
    kernel_cost,
    plan_buckets,
    plan_groups,
    state_record,
    tensor_record,
)
from tilewright.codegen.source import SUFFIXES, KernelSource
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.spills import avoiding, lacking, spilling
from tilewright.codegen.staging import MANIFEST, refuse_foreign, staging
from tilewright.codegen.target import PrintsSources, Target, Toolchain
from tilewright.codegen.weight_plan import planned_weights
from tilewright.graph import Graph
from tilewright.graph.text import print_graph
from tilewright.runtime.artifact import (
    ABI,
    FORMAT,
    DimRecord,
    KernelRecord,
    Manifest,
    ModelRecord,
    TargetRecord,
    WeightRecord,
    to_json,
)

WEIGHTS = "weights.bin"


@dataclass(frozen=True)
class CompileJob:
    """All that an artifact is made from. `files` are copied into it: name -> content."""

    graph: Graph
    model: ModelRecord
    weights: WeightSource
    target: Target
    toolchain: Toolchain
    config: CompileConfig
    choose: Chooser
    flags: Flags = field(default_factory=Flags)
    files: Mapping[str, bytes] = field(default_factory=dict)
    jobs: int = 1
    log: TextIO | None = None
    schedules: str = "the first legal one"  # what chose them: told in the artifact


@dataclass(frozen=True)
class PlanReport:
    """What an artifact would be: its manifest, without digests of files, and kernels that had to
    be compiled."""

    manifest: Manifest
    num_compiled: int


@dataclass(frozen=True)
class CompileReport:
    """What was made: where, how many kernels, how many of them had to be compiled."""

    path: Path
    numerics_digest: str
    num_kernels: int
    num_compiled: int
    num_launches: int
    weights_bytes: int


def compile_graph(
    job: CompileJob, output: Path, progress: Progress, *, weights: bool = True
) -> CompileReport:
    """Lower, choose, build, pack and write; the artifact appears whole or not at all.

    Without `weights` their places are planned, none is read, and the file of weights is left out:
    such an artifact can be looked at, and does not load. Raises the compiler's errors; a full disk
    or a folder that is no artifact gives one sentence.
    """
    refuse_foreign(output)
    progress("lower", 0, 1)
    lowered = lower(job.graph, job.flags, log=job.log, beside=job.target.beside)
    progress("lower", 1, 1)
    cache = KernelCache(job.flags.cache, job.toolchain)
    plans, specs, sources, built = _build_kernels(job, lowered.graph, cache, progress)
    if job.log:
        _report(job.log, job.flags.debug, plans, sources)
    with staging(output) as stage:
        (stage / "kernels").mkdir()
        library = library_name(built.objects)
        job.toolchain.link(built.objects, stage / library)
        _write_sources(stage, job, lowered, plans, sources)
        if weights:
            records, digest, num_bytes = _write_weights(stage, lowered.graph, plans, job, progress)
        else:
            records, num_bytes = planned_weights(lowered.graph, plans, job.weights)
            digest = ""
        manifest = _manifest(
            job,
            lowered.graph,
            plans,
            specs,
            library=library,
            weights=records,
            weights_digest=digest,
            weights_bytes=num_bytes,
            support_digest=cache.support_digest,
            digests=_digests(stage),
        )
        (stage / MANIFEST).write_text(json.dumps(to_json(manifest), indent=1))
        if job.flags.dump is not None:
            _dump(job.flags.dump, sources, manifest)
    return CompileReport(
        output, manifest.numerics_digest, len(specs), built.num_compiled, len(plans), num_bytes
    )


def plan_graph(job: CompileJob, progress: Progress) -> PlanReport:
    """Lower, choose and build all kernels as `compile_graph` does, but read and write no weights.

    Raises the compiler's errors.
    """
    progress("lower", 0, 1)
    lowered = lower(job.graph, job.flags, log=job.log, beside=job.target.beside)
    progress("lower", 1, 1)
    cache = KernelCache(job.flags.cache, job.toolchain)
    plans, specs, _, built = _build_kernels(job, lowered.graph, cache, progress)
    records, num_bytes = planned_weights(lowered.graph, plans, job.weights)
    manifest = _manifest(
        job,
        lowered.graph,
        plans,
        specs,
        library=library_name(built.objects),
        weights=records,
        weights_digest="",
        weights_bytes=num_bytes,
        support_digest=cache.support_digest,
        digests={},
    )
    return PlanReport(manifest, built.num_compiled)


def _build_kernels(
    job: CompileJob, graph: Graph, cache: KernelCache, progress: Progress
) -> tuple[tuple[GroupPlan, ...], list[KernelSpec], list[KernelSource], Built]:
    """Choose a kernel for every group and build it; choose again for those that spill."""
    templates = {t.name: t for t in job.target.kernels}
    known, num_compiled = dict[str, int](), 0
    while True:
        choose = avoiding(job.choose, known, lacking(job.toolchain))
        plans = plan_groups(graph, job.target, job.config, choose)
        specs = distinct_specs(plans)
        sources = [emit(spec, templates[spec.template]) for spec in specs]
        built = cache.build(sources, jobs=job.jobs, progress=progress)
        num_compiled += built.num_compiled
        spilled = spilling(job.toolchain, sources, cache.object_of)
        if spilled.keys() <= known.keys():
            return plans, specs, sources, replace(built, num_compiled=num_compiled)
        known |= spilled


def library_name(objects: Sequence[Path]) -> str:
    """Name the library by what it is linked from: loaders go by name, so that a process with an
    older artifact of the same path would otherwise be given that one's kernels."""
    names = "\n".join(sorted(o.name for o in objects))
    return f"kernels/{hashlib.sha256(names.encode()).hexdigest()[:16]}.so"


def _report(
    log: TextIO, debug: int, plans: Sequence[GroupPlan], sources: Sequence[KernelSource]
) -> None:
    """Say what was chosen, as much of it as the debug level asks for."""
    texts = {s.name: s.text for s in sources}
    seen: set[str] = set()
    for plan in plans:
        for bucket, spec in plan.specs.items():
            if debug >= 1 and spec.symbol not in seen:
                log.write(f"kernel {spec.symbol}: {plan.group.name}, {bucket}\n")
                if debug >= 2:
                    numerics = " ".join(f"{k}={v}" for k, v in spec.numerics.to_json().items())
                    log.write(f"  numerics: {numerics}\n  schedule: {spec.schedule}\n")
                if debug >= 4:
                    log.write(texts[spec.symbol])
            seen.add(spec.symbol)


def distinct_specs(plans: Sequence[GroupPlan]) -> list[KernelSpec]:
    """Return every kernel once, in order of first use."""
    found: dict[str, KernelSpec] = {}
    for plan in plans:
        for spec in plan.specs.values():
            found.setdefault(spec.symbol, spec)
    return list(found.values())


# --- files --------------------------------------------------------------------------------------


def _write_sources(
    stage: Path,
    job: CompileJob,
    lowered: Lowered,
    plans: Sequence[GroupPlan],
    sources: Sequence[KernelSource],
) -> None:
    """Write the readable side: generated text, the graphs, what every rule decided."""
    folder = stage / "sources"
    folder.mkdir()
    for source in sources:
        (folder / source.file_name).write_text(source.text)
        if isinstance(job.toolchain, PrintsSources):
            for name, text in job.toolchain.printed(source.file_name, source.text).items():
                (folder / name).write_text(text)
    (folder / "model.txt").write_text(print_graph(job.graph))
    (folder / "fused.txt").write_text(print_graph(lowered.graph))
    (folder / "decisions.json").write_text(json.dumps(_decisions(lowered.decisions, plans)))
    for name, content in job.files.items():
        (stage / name).write_bytes(content)


def _decisions(decisions: Sequence[Decision], plans: Sequence[GroupPlan]) -> dict[str, Any]:
    rules = [{"stage": d.stage, "rule": d.rule, "nodes": list(d.nodes)} for d in decisions]
    groups = [
        {
            "group": p.group.name,
            "kind": p.group.kind,
            "nodes": list(p.group.nodes),
            "template": p.choice.template.name,
            "refusals": [{"template": t, "reason": r} for t, r in p.choice.refusals],
            "kernels": {bucket: spec.symbol for bucket, spec in p.specs.items()},
        }
        for p in plans
    ]
    return {"rules": rules, "groups": groups}


def _write_weights(
    stage: Path, graph: Graph, plans: Sequence[GroupPlan], job: CompileJob, progress: Progress
) -> tuple[tuple[WeightRecord, ...], str, int]:
    """Write every weight packed and aligned; return records, digest and size."""
    records, hashed, offset = list[WeightRecord](), hashlib.sha256(), 0
    with (stage / WEIGHTS).open("wb") as file:
        progress("pack", 0, len(graph.weights))
        for count, packed in enumerate(pack_weights(graph, plans, job.weights), start=1):
            padding = bytes(-offset % ALIGNMENT)
            records.append(weight_record(packed, offset + len(padding)))
            file.write(padding)
            hashed.update(padding)
            for piece in packed.pieces():
                file.write(piece.data)
                hashed.update(piece.data)
            offset += len(padding) + packed.num_bytes
            progress("pack", count, len(graph.weights))
    return tuple(records), hashed.hexdigest(), offset


def _dump(folder: Path, sources: Sequence[KernelSource], manifest: Manifest) -> None:
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    for source in sources:
        (folder / "kernels" / source.file_name).write_text(source.text)
    plan = json.dumps(to_json(manifest)["buckets"], indent=1)
    (folder / "plan.txt").write_text(plan)
    (folder / MANIFEST).write_text(json.dumps(to_json(manifest), indent=1))


# --- manifest -----------------------------------------------------------------------------------


def _manifest(
    job: CompileJob,
    graph: Graph,
    plans: Sequence[GroupPlan],
    specs: Sequence[KernelSpec],
    *,
    library: str,
    weights: Sequence[WeightRecord],
    weights_digest: str,
    weights_bytes: int,
    support_digest: str,
    digests: Mapping[str, str],
) -> Manifest:
    buckets, buffers = plan_buckets(graph, plans, job.target, job.config)
    target = TargetRecord(
        name=job.target.name,
        variant=job.target.variant,
        features=job.target.features,
        compiler=job.toolchain.identity(),
        flags=job.target.flags,
    )
    return Manifest(
        format=FORMAT,
        abi=ABI,
        version=__version__,
        target=target,
        mode=job.config.mode,
        dtype=job.config.dtype,
        model=job.model,
        dims=tuple(DimRecord(d.name, d.role.value, d.lower, d.upper) for d in graph.dims),
        inputs=tuple(tensor_record(i.name, i.type) for i in graph.inputs),
        outputs=tuple(tensor_record(public, memory_type(graph, v)) for public, v in graph.outputs),
        states=tuple(state_record(graph, s) for s in graph.states),
        buffers=buffers,
        weights=tuple(weights),
        weights_file=WEIGHTS,
        weights_bytes=weights_bytes,
        weights_digest=weights_digest,
        kernels=_kernel_records(plans, specs, job.target),
        library=library,
        buckets=buckets,
        compile_config={**job.config.to_json(), "schedules": job.schedules},
        numerics_digest=numerics_digest(job, graph, plans, weights_digest, support_digest),
        invariance=job.target.invariance if job.config.mode == "deterministic" else "unproven",
        digests=digests,
    )


def _kernel_records(
    plans: Sequence[GroupPlan], specs: Sequence[KernelSpec], target: Target
) -> tuple[KernelRecord, ...]:
    suffixes = {t.name: SUFFIXES[t.language] for t in target.kernels}
    first: dict[str, GroupPlan] = {}
    for plan in plans:
        for spec in plan.specs.values():
            first.setdefault(spec.symbol, plan)
    records = []
    for spec in specs:
        records.append(
            KernelRecord(
                symbol=spec.symbol,
                template=spec.template,
                source=f"sources/{spec.symbol}{suffixes[spec.template]}",
                nodes=first[spec.symbol].group.nodes,
                numerics=spec.numerics.to_json(),
                schedule=spec.schedule.to_json(),
                **kernel_cost(spec),
            )
        )
    return tuple(records)


def numerics_digest(
    job: CompileJob, graph: Graph, plans: Sequence[GroupPlan], weights: str, support: str
) -> str:
    """Hash all that decides bits, and nothing that does not: schedules are left out.

    Two artifacts with equal digests must give equal bits.
    """
    per_group = [
        (p.body.graph.digest, sorted({json.dumps(s.numerics.to_json()) for s in p.specs.values()}))
        if job.config.mode == "deterministic"
        else (
            p.body.graph.digest,
            sorted((b, json.dumps(s.numerics.to_json())) for b, s in p.specs.items()),
        )
        for p in plans
    ]
    facts = [
        graph.digest, per_group, MATH_VERSION, job.target.variant, PACKING_VERSION,
        job.toolchain.identity(), support, weights, job.config.mode,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _digests(stage: Path) -> dict[str, str]:
    """SHA-256 of every file but the weights, by name relative to the artifact."""
    files = sorted(p for p in stage.rglob("*") if p.is_file() and p.name not in (WEIGHTS, MANIFEST))
    return {str(p.relative_to(stage)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
