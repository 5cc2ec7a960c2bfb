"""The half of `device_step` that runs on the GPU: steps as CUDA graphs, the share of each launch,
and what bandwidth and operations alone would take.

Steps that the runtime captures are timed as it captures them, on several streams, and in order too.
In a short step a launch's time is that of a graph that ends with it, less that of the graph that
ends before it, so that the times of all launches add up to the step. In a long one it is the time
between events, launch by launch, each with a gap of 1 to 4 us. The L2 is flushed before a replay.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilewright.runtime.artifact_files import LoadedArtifact, read_manifest
from tilewright.runtime.devices.cuda import CudaDevice
from tilewright.runtime.devices.gpu import GRAPH_TOKENS
from tilewright.runtime.executor import Executor
from tilewright.tools.bench_engine import make_step
from tilewright.tools.dev.machine import machine
from tilewright.tools.dev.random_weights import fill_state, fill_weight
from tilewright.tools.dev.step_floor import Floors, Rates, StepShape
from tilewright.tools.plain_step import Step, page_dims

SHAPES = {
    **{f"decode, batch {b} at 8 k": StepShape(b, 8192, 1) for b in (1, 32, 128, 256)},
    "prefill of 8 k": StepShape(1, 8192, 8192),
    **{f"decode, batch {b} at 64 k": StepShape(b, 65536, 1) for b in (1, 32, 128, 256)},
}
REPEATS, SHARE_REPEATS = 15, 5
SHORT_MS = 4.0
FLUSHED = 160 << 20
Found = dict[str, Any]
Launches = list[Callable[[], None]]


@dataclass(frozen=True)
class Opened:
    """An artifact without weights, its weights random on the GPU."""

    executor: Executor
    session: Any
    flush: torch.Tensor
    rates: Rates


def run(folder: Path, output: Path, only: list[str] | None) -> None:
    """Time every step, or those whose names end with one of `only`; write JSON as it comes."""
    rates = json.loads((folder / "rates.json").read_text())
    found = open_random(folder / "artifact", Rates(**rates))
    report: Found = {
        "date": time.strftime("%Y-%m-%d"), "machine": machine(), "rates": rates, "steps": {}
    }  # fmt: skip
    for name, shape in SHAPES.items():
        if only and not name.endswith(tuple(only)):
            continue
        report["steps"][name] = measure(found, shape)
        _print(name, report["steps"][name])
        output.write_text(json.dumps(report, indent=1) + "\n")


def open_random(path: Path, rates: Rates) -> Opened:
    """Load kernels, take the memory, and fill the weights on the GPU."""
    manifest, device = read_manifest(path), CudaDevice(0)
    device.check(manifest)
    library = device.load_library(
        path.absolute() / manifest.library, [k.symbol for k in manifest.kernels]
    )
    artifact = LoadedArtifact(path, manifest, library, None, {}, device)
    executor = Executor(artifact, device)
    session: Any = executor._session
    for seed, weight in enumerate(manifest.weights):
        fill_weight(weight, session._memory["weight", weight.name], seed)
    torch.cuda.synchronize()
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    return Opened(executor, session, flush, rates)


def measure(found: Opened, shape: StepShape) -> Found:
    """Milliseconds of one step, of each launch in it, and their floors."""
    executor, session = found.executor, found.session
    manifest = executor.artifact.manifest
    executor.allocate_states(
        page_dims(manifest, requests=shape.requests, positions=shape.context)
    )
    for seed, state in enumerate(manifest.states):
        fill_state(state, session._memory["state", state.name], seed)
    step = make_step(
        manifest, requests=shape.requests, start=shape.context - shape.tokens, tokens=shape.tokens
    )
    outputs = executor.launch(step.inputs, step.dims)
    torch.cuda.synchronize()
    logits = outputs["logits"].clone()
    launches = _singly(found, step)
    in_order = _timed(found, _captured(found, launches), REPEATS)
    shares = _ends(found, launches) if in_order < SHORT_MS else _between(found, launches)
    whole = in_order
    if shape.requests * shape.tokens <= GRAPH_TOKENS:
        outputs["logits"].zero_()
        with session._chip.active():
            replay = session._chip.capture(session.recording(executor.bucket(step.dims)))
        whole = _timed(found, replay, REPEATS)
    experts = _experts_met(found, step, launches)
    bucket = executor.bucket(step.dims)
    floors = Floors(manifest, bucket, session._dims, shape, experts, found.rates)
    return {
        "ms": whole, "in_order_ms": in_order, "finite": bool(torch.isfinite(logits.float()).all()),
        "same_bits": torch.equal(_bits(logits), _bits(outputs["logits"])),
        "logits_digest": hashlib.sha256(_bits(logits).cpu().numpy().tobytes()).hexdigest()[:16],
        "floor_ms": floors.step_ms(), "launches": [
            {"group": launch.group, "kernel": launch.kernel, "us": us, **floors.launch(i)}
            for i, (launch, us) in enumerate(zip(floors.bucket.launches, shares, strict=True))
        ],
        "memory_bytes": torch.cuda.memory_allocated(),
    }  # fmt: skip


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _singly(found: Opened, step: Step) -> Launches:
    bucket = found.executor.bucket(step.dims)
    calls: Launches = found.session._table(bucket).singly(found.session._dims)
    return calls


def _captured(found: Opened, launches: Launches) -> Callable[[], None]:
    def launch() -> None:
        for each in launches:
            each()

    chip = found.session._chip
    with chip.active():
        replay: Callable[[], None] = chip.capture(launch)
    return replay


def _timed(found: Opened, replay: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of a replay that finds nothing of its own in the L2."""
    cuda: Any = torch.cuda
    samples = []
    with found.session._chip.active():
        for _ in range(repeats + 1):
            found.flush.zero_()
            start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            stop.record()
            stop.synchronize()
            samples.append(start.elapsed_time(stop))
    middle: float = median(samples[1:])
    return middle


def _ends(found: Opened, launches: Launches) -> list[float]:
    """Microseconds by which each launch makes a graph longer."""
    ends = [
        _timed(found, _captured(found, launches[:i]), SHARE_REPEATS)
        for i in range(len(launches) + 1)
    ]
    return [(b - a) * 1e3 for a, b in zip(ends, ends[1:], strict=False)]


def _between(found: Opened, launches: Launches) -> list[float]:
    """Microseconds between events around each launch."""
    chip = found.session._chip
    with chip.active():
        runs = [chip.timed(launches) for _ in range(SHARE_REPEATS)]
    return [median(times) * 1e6 for times in zip(*runs, strict=True)]


def _experts_met(found: Opened, step: Step, launches: Launches) -> dict[int, int]:
    """How many experts the tokens of a step meet, by launch."""
    bucket, met = found.executor.bucket(step.dims), dict[int, int]()
    for i, launch in enumerate(bucket.launches):
        ids = [a for a in launch.arguments if a.kind == "buffer" and "top_k" in a.name]
        with found.session._chip.active():
            launches[i]()
            if "experts_w" in launch.group and ids:
                chosen = found.session._copied(ids[0], bucket)
                met[i] = len(set(chosen[: step.dims["tokens"]].reshape(-1).tolist()))
    return met


def _print(name: str, found: Found) -> None:
    total = sum(each["us"] for each in found["launches"])
    print(f"{name}: {found['ms']:.3f} ms, in order {found['in_order_ms']:.3f}, "
          f"floor {found['floor_ms']:.3f} ({found['floor_ms'] / found['ms']:.0%}), "
          f"finite {found['finite']}, same bits {found['same_bits']}, "
          f"logits {found['logits_digest']}, "
          f"sum of launches {total / 1e3:.3f}", flush=True)  # fmt: skip
