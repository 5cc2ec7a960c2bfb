"""Tuning: measure legal candidates per body and bucket, keep the fastest in a persistent record.

In deterministic mode only schedules vary; `fast` mode also tries other numerics, with as many
candidates in total. A second run finds every answer in the record and measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tilewright.codegen.body import Body
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.numerics import alternatives, derive
from tilewright.codegen.plan import Bucket, Candidate, Chooser, bucket_rows
from tilewright.codegen.select import Choice
from tilewright.codegen.spec import KernelSpec, Numerics
from tilewright.codegen.target import Target
from tilewright.codegen.work_folder import locked
from tilewright.graph.errors import LowerError

BUDGET = 16  # candidates measured per body and bucket, in either mode

Measure = Callable[[Sequence[KernelSpec], Body, Bucket], Sequence[float]]


@dataclass(frozen=True)
class TuningRecord:
    """The winner for one body in one bucket, and what the first candidate took (seconds)."""

    key: str
    kernel: str
    bucket: str
    numerics: Mapping[str, int | str]
    schedule: Mapping[str, int]
    best_seconds: float
    first_seconds: float
    num_measured: int
    machine: str
    driver: str = ""
    date: str = ""


class TuningRecords:
    """Records in one JSON file, rewritten whole beside it and renamed into place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, TuningRecord] = {}
        self.num_measured = 0
        self.num_found = 0
        if path.exists():
            self._records = {r.key: r for r in _read(path)}

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> TuningRecord | None:
        return self._records.get(key)

    def add(self, record: TuningRecord) -> None:
        self._records[record.key] = record
        self._write()

    def all(self) -> tuple[TuningRecord, ...]:
        return tuple(self._records.values())

    def _write(self) -> None:
        """Write all records, and those that another process added in the meantime."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent):
                if self.path.exists():
                    self._records = {r.key: r for r in _read(self.path)} | self._records
                self._replace()
        except OSError as error:
            raise LowerError(
                f"tuning records '{self.path}': cannot be written: {error.strerror or error}; "
                "make room there, or name another folder in TILEWRIGHT_CACHE"
            ) from None

    def _replace(self) -> None:
        rows = [asdict(r) for _, r in sorted(self._records.items())]
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix="tuned-", suffix=".json")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(rows, file, indent=1)
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise


def _read(path: Path) -> list[TuningRecord]:
    try:
        rows = json.loads(path.read_text())
        if not isinstance(rows, list):
            raise TypeError(f"got {type(rows).__name__}, want a list")
        return [TuningRecord(**row) for row in rows]
    except (ValueError, TypeError) as error:
        raise LowerError(
            f"tuning records '{path}': not readable: {error}; delete the file to tune again"
        ) from None


def candidates(
    body: Body, choice: Choice, bucket: Bucket, target: Target, config: CompileConfig
) -> tuple[Candidate, ...]:
    """Return what may be measured: the untuned choice first, at most `BUDGET` in all."""
    template, rows = choice.template, bucket_rows(body, bucket)
    options: tuple[Numerics, ...] = (derive(template.kind, body.graph, target),)
    if config.mode == "fast":
        options = alternatives(template.kind, body.graph, target)
    lists = [
        [Candidate(template, n, s) for s in template.schedules(body.graph, n, rows)]
        for n in options
    ]
    share = BUDGET // len(lists)
    spare = BUDGET - share * len(lists)
    return tuple(
        c for i, found in enumerate(lists) for c in found[: share + (spare if i == 0 else 0)]
    )


def record_key(
    body: Body,
    choice: Choice,
    bucket: Bucket,
    target: Target,
    config: CompileConfig,
    toolchain: str,
    machine: str,
) -> str:
    """Return the key of a record: all that the answer depends on.

    Records that are committed hold for the chip: neither toolchain nor machine is in their keys.
    """
    if target.tuned:
        return candidate_key(body, choice, bucket, target, config)
    return candidate_key(body, choice, bucket, target, config, toolchain, machine)


def candidate_key(
    body: Body,
    choice: Choice,
    bucket: Bucket,
    target: Target,
    config: CompileConfig,
    *measured: str,
) -> str:
    """Return a key of a body in a bucket with its candidates, and of what `measured` names."""
    tried = [
        (c.numerics.to_json(), c.schedule.to_json())
        for c in candidates(body, choice, bucket, target, config)
    ]
    facts = [
        body.graph.digest,
        choice.template.name,
        bucket_rows(body, bucket),
        target.tuned or target.variant,
        config.mode,
        *measured,
        tried,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def tuned_choice(
    target: Target,
    config: CompileConfig,
    records: TuningRecords,
    *,
    toolchain: str,
    machine: str,
    measure: Measure | None,
    fallback: Chooser,
) -> Chooser:
    """Choose by record; measure what has none where `measure` is given, else take the first."""

    def choose(body: Body, choice: Choice, bucket: Bucket) -> Candidate:
        key = record_key(body, choice, bucket, target, config, toolchain, machine)
        record = records.get(key)
        if record is not None:
            records.num_found += 1
        elif measure is not None:
            record = _tune(body, choice, bucket, target, config, key, measure, machine)
            records.num_measured += record.num_measured
            records.add(record)
        if record is None:
            return fallback(body, choice, bucket)
        for candidate in candidates(body, choice, bucket, target, config):
            if _matches(candidate, record):
                return replace(candidate, measured=target.tuned in ("", target.name))
        raise LowerError(
            f"tuning record '{record.kernel}' ({record.bucket}): is none of the candidates: "
            f"delete '{records.path}' to tune again"
        )

    return choose


def _matches(candidate: Candidate, record: TuningRecord) -> bool:
    return (
        candidate.numerics.to_json() == record.numerics
        and candidate.schedule.to_json() == record.schedule
    )


def _tune(
    body: Body,
    choice: Choice,
    bucket: Bucket,
    target: Target,
    config: CompileConfig,
    key: str,
    measure: Measure,
    machine: str,
) -> TuningRecord:
    tried = candidates(body, choice, bucket, target, config)
    specs = [
        KernelSpec(
            choice.template.kind,
            body.graph,
            choice.template.name,
            c.numerics,
            c.schedule,
            body.buffers,
        )
        for c in tried
    ]
    seconds = list(measure(specs, body, bucket))
    best = min(range(len(tried)), key=seconds.__getitem__)
    return TuningRecord(
        key=key,
        kernel=specs[best].symbol,
        bucket=bucket.name,
        numerics=tried[best].numerics.to_json(),
        schedule=tried[best].schedule.to_json(),
        best_seconds=seconds[best],
        first_seconds=seconds[0],
        num_measured=len(tried),
        machine=machine,
    )
