"""One bench: opens the artifact, the machine's loops and the peers, and takes all in turns."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tilewright import __version__
from tilewright.codegen.flags import Flags
from tilewright.runtime import Engine, RequestError
from tilewright.runtime.artifact import Manifest
from tilewright.tools.bench_engine import (
    CostTable,
    cache_bytes_per_token,
    decode_seconds,
    first_token_seconds,
    make_step,
    prefill_steps,
    run_seconds,
)
from tilewright.tools.bench_kernels import time_step
from tilewright.tools.bench_machine import READ_BYTES, MachineProbe, cpu_name
from tilewright.tools.bench_memory import measure_load
from tilewright.tools.bench_peer_process import PeerProcess, PeerRequest
from tilewright.tools.bench_run import Measure, Result, find, take_turns
from tilewright.tools.bench_settings import BenchSettings

OURS, MACHINE = "tilewright", "machine"
SCHEMA = 1
LOAD_REPEAT = 3
LOAD_TOKENS = 16
Progress = Callable[[int, int], None]


def run_bench(
    artifact: Path,
    settings: BenchSettings,
    peers: Sequence[PeerRequest],
    *,
    peer_python: str,
    by_kernel: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Measure everything asked for and return the report as JSON data."""
    loads = _measure_loads(artifact, settings)
    with ExitStack() as stack:
        engine = stack.enter_context(open_engine(artifact, settings))
        manifest = engine.manifest
        target = f"{manifest.target.name}:{manifest.target.variant}"
        probe = MachineProbe(target, Flags.from_environment(), threads=settings.threads)
        room = _room(settings)
        opened = [stack.enter_context(PeerProcess(p, peer_python, common=room)) for p in peers]
        measures = [
            *_machine_measures(probe),
            *_our_measures(engine, settings),
            *[m for p in opened for m in _peer_measures(p, settings)],
        ]
        results = take_turns(measures, repeat=settings.repeat, progress=progress)
        report = {
            **_heading(artifact, manifest, probe, settings),
            "load": _load_summary(loads, manifest, settings),
            "results": [r.to_json() for r in results],
            "derived": derive(results, manifest, settings, [p.label for p in opened]),
            "peers": {p.label: p.facts for p in opened},
        }
        if by_kernel:
            report["steps"] = _steps(engine, settings)
    return report


def _measure_loads(artifact: Path, settings: BenchSettings) -> list[dict[str, Any]]:
    prompt, tokens = settings.prompt_tokens, min(settings.decode_tokens, LOAD_TOKENS)
    return [
        measure_load(artifact, threads=settings.threads, prompt=prompt, tokens=tokens)
        for _ in range(min(settings.repeat, LOAD_REPEAT))
    ]


def _room(settings: BenchSettings) -> dict[str, int]:
    """What every peer is told when it is opened."""
    return {
        "threads": settings.threads,
        "positions": max(settings.prompt_tokens, settings.start + settings.decode_tokens) + 1,
        "sequences": max(settings.batches),
    }


def open_engine(artifact: Path, settings: BenchSettings) -> Engine:
    """Open the artifact with a cache that holds the largest batch."""
    engine = Engine(artifact, num_threads=settings.threads)
    size = engine.model.block_size
    needed = max(settings.batches) * (-(-(settings.start + settings.decode_tokens + 1) // size))
    held = engine.model.max_context * 4 // size
    if needed <= held:
        return engine
    engine.close()
    return Engine(artifact, num_threads=settings.threads, cache_tokens=needed * size)


def figures_dtype(manifest: Manifest) -> str:
    """Say what our figures were computed in: activations, and the format of most weight bytes."""
    sizes: dict[str, int] = {}
    for weight in manifest.weights:
        name = weight.format.partition("[")[0]
        sizes[name] = sizes.get(name, 0) + weight.num_bytes
    most = max(sizes, key=lambda name: sizes[name]) if sizes else "no"
    return f"{manifest.dtype}, {most} weights"


def _machine_measures(probe: MachineProbe) -> list[Measure]:
    return [
        Measure(MACHINE, "read_bandwidth", "bytes", "B/s", probe.read_bandwidth),
        Measure(MACHINE, "fma_rate", "float32", "FLOP/s", probe.fma_rate),
    ]


def _our_measures(engine: Engine, settings: BenchSettings) -> list[Measure]:
    dtype, prompt = figures_dtype(engine.manifest), settings.prompt_tokens
    steps = prefill_steps(engine.manifest, prompt)

    def below_engine() -> float:
        return prompt / run_seconds(engine.executor, steps)

    def decode(batch: int) -> Callable[[], float]:
        count = settings.decode_tokens
        return lambda: (
            batch * count / decode_seconds(engine, batch=batch, start=settings.start, tokens=count)
        )

    return [
        Measure(
            OURS, "prefill", dtype, "tokens/s", lambda: prompt / first_token_seconds(engine, prompt)
        ),
        Measure(OURS, "prefill_executor", dtype, "tokens/s", below_engine),
        *(Measure(OURS, f"decode_{b}", dtype, "tokens/s", decode(b)) for b in settings.batches),
    ]


def _peer_measures(peer: PeerProcess, settings: BenchSettings) -> list[Measure]:
    dtype, prompt = str(peer.facts["dtype"]), settings.prompt_tokens

    def decode(batch: int) -> Callable[[], float]:
        count = settings.decode_tokens
        return lambda: (
            batch * count / peer.decode_seconds(batch=batch, start=settings.start, tokens=count)
        )

    return [
        Measure(
            peer.label, "prefill", dtype, "tokens/s", lambda: prompt / peer.prefill_seconds(prompt)
        ),
        *(
            Measure(peer.label, f"decode_{b}", dtype, "tokens/s", decode(b))
            for b in settings.batches
        ),
    ]


def _heading(
    artifact: Path, manifest: Manifest, probe: MachineProbe, settings: BenchSettings
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_name(),
            "architecture": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "compiler": probe.compiler,
            "read_buffer_bytes": READ_BYTES,
        },
        "artifact": {
            "name": artifact.resolve().name,
            "model": manifest.model.name,
            "dtype": figures_dtype(manifest),
            "mode": manifest.mode,
            "target": f"{manifest.target.name}:{manifest.target.variant}",
            "weights_bytes": manifest.weights_bytes,
            "cache_bytes_per_token": cache_bytes_per_token(manifest),
            "numerics_digest": manifest.numerics_digest,
        },
        "settings": settings.to_json(),
    }


def _load_summary(
    loads: Sequence[Mapping[str, Any]], manifest: Manifest, settings: BenchSettings
) -> dict[str, Any]:
    """Medians of the fresh processes, and what weights and touched cache alone take."""
    size = manifest.model.block_size
    positions = settings.prompt_tokens + min(settings.decode_tokens, LOAD_TOKENS)
    cache = -(-positions // size) * size * cache_bytes_per_token(manifest)
    ordered = sorted(loads, key=lambda load: load["import_seconds"] + load["load_seconds"])
    middle = ordered[len(ordered) // 2]
    floor = manifest.weights_bytes + cache
    peaks = [load["peak_bytes"] for load in loads if load["peak_bytes"] is not None]
    return {
        "seconds": middle["import_seconds"] + middle["load_seconds"],
        "import_seconds": middle["import_seconds"],
        "load_seconds": middle["load_seconds"],
        "weights_bytes": manifest.weights_bytes,
        "cache_bytes": cache,
        "peak_bytes": max(peaks) if peaks else None,
        "peak_over_weights_and_cache": max(peaks) / floor if peaks else None,
        "samples": [dict(load) for load in loads],
    }


def derive(
    results: Sequence[Result], manifest: Manifest, settings: BenchSettings, peers: Sequence[str]
) -> dict[str, float]:
    """Return fractions of the machine's limits and ratios to the peers, from the medians."""
    found = _prefill_figures(results, manifest, settings.prompt_tokens)
    for batch in settings.batches:
        found |= _decode_figures(results, manifest, settings, batch)
    for peer in peers:
        for name in ("prefill", *(f"decode_{b}" for b in settings.batches)):
            ratio = _median(results, OURS, name) / _median(results, peer, name)
            found[f"{name}_over_{peer.replace(' ', '_')}"] = ratio
    return found


def _prefill_figures(
    results: Sequence[Result], manifest: Manifest, tokens: int
) -> dict[str, float]:
    steps, launches = prefill_steps(manifest, tokens), manifest.buckets[0].launches
    flops = sum(CostTable(manifest).step(launches, s.dims).flops for s in steps)
    rate = _median(results, OURS, "prefill")
    fma = _median(results, MACHINE, "fma_rate")
    below = _median(results, OURS, "prefill_executor")
    return {
        "time_to_first_token_seconds": tokens / rate,
        "prefill_flops": flops,
        "prefill_flops_of_fma_rate": flops * rate / tokens / fma,
        "prefill_executor_flops_of_fma_rate": flops * below / tokens / fma,
    }


def _decode_figures(
    results: Sequence[Result], manifest: Manifest, settings: BenchSettings, batch: int
) -> dict[str, float]:
    middle = settings.start + settings.decode_tokens // 2
    step = make_step(manifest, requests=batch, start=middle, tokens=1)
    cost = CostTable(manifest).step(manifest.buckets[0].launches, step.dims)
    total = _median(results, OURS, f"decode_{batch}")
    bandwidth = _median(results, MACHINE, "read_bandwidth")
    fma = _median(results, MACHINE, "fma_rate")
    figures = {
        "weight_bytes_per_step": cost.weight_bytes,
        "weight_bytes_per_token": cost.weight_bytes / batch,
        "weights_of_read_bandwidth": cost.weight_bytes * total / batch / bandwidth,
        "bytes_of_read_bandwidth": cost.num_bytes * total / batch / bandwidth,
        "flops_of_fma_rate": cost.flops * total / batch / fma,
    }
    if batch > 1:
        figures["over_decode_1"] = total / _median(results, OURS, "decode_1")
        figures["over_prefill"] = total / _median(results, OURS, "prefill")
    return {f"decode_{batch}_{name}": value for name, value in figures.items()}


def _median(results: Sequence[Result], who: str, name: str) -> float:
    result = find(results, who, name)
    if result is None:
        raise RequestError(f"bench '{name}': was not measured for {who}")
    return result.median


def _steps(engine: Engine, settings: BenchSettings) -> list[dict[str, Any]]:
    costs, manifest = CostTable(engine.manifest), engine.manifest
    middle = settings.start + settings.decode_tokens // 2
    cases = [
        (f"decode_{b}", make_step(manifest, requests=b, start=middle, tokens=1), 20)
        for b in settings.batches
    ]
    cases.append(("prefill", prefill_steps(manifest, settings.prompt_tokens)[0], 2))
    return [
        time_step(engine.executor, costs, name, step, repeat=settings.repeat * times).to_json()
        for name, step, times in cases
    ]
