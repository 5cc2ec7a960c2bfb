"""Compare artifacts of one model in one run, in turns: the cost of a mode, the gain of tuning.

python -m tilewright.tools.dev.mode_cost fast=out/fast det=out/det -o mode-cost.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tilewright import runtime
from tilewright.tools.bench_engine import make_step, run_seconds
from tilewright.tools.bench_machine import cpu_name

# name -> requests, tokens in the cache before, tokens of the step, steps timed at once
WORK: Mapping[str, tuple[int, int, int, int]] = {
    "decode, batch 1": (1, 100, 1, 24),
    "decode, batch 8": (8, 100, 1, 8),
    "prefill of 512": (1, 0, 512, 1),
}


def main() -> None:
    """Measure the artifacts named on the command line; print a table, write every sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifacts", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("-o", "--output", type=Path, default=None)
    asked = parser.parse_args()
    named = dict(text.split("=", 1) for text in asked.artifacts)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(runtime.load(folder, num_threads=asked.threads))
            for name, folder in named.items()
        }
        samples = measure(engines, asked.repeat)
        settings = {name: _settings(engine) for name, engine in engines.items()}
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "artifacts": settings,
        "tokens_per_second": samples,
        "over_first": ratios(samples),
    }
    for work, rates in report["over_first"].items():
        print(work, " ".join(f"{name} {value:.3f}" for name, value in rates.items()))
    if asked.output:
        asked.output.write_text(json.dumps(report, indent=1) + "\n")


def measure(
    engines: Mapping[str, runtime.Engine], repeat: int
) -> dict[str, dict[str, list[float]]]:
    """Return tokens/s of every turn, by kind of work and artifact, artifacts in turns."""
    found: dict[str, dict[str, list[float]]] = {w: {n: [] for n in engines} for w in WORK}
    for turn in range(repeat + 1):
        for work, (requests, start, tokens, count) in WORK.items():
            names = list(engines) if turn % 2 else list(engines)[::-1]
            for name in names:
                engine = engines[name]
                step = make_step(engine.manifest, requests=requests, start=start, tokens=tokens)
                seconds = run_seconds(engine.executor, [step] * count)
                if turn:  # the first turn warms caches
                    found[work][name].append(requests * tokens * count / seconds)
    return found


def ratios(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Return, per kind of work, each artifact's rate over the first one's: the median of the ratios
    within a turn, which a slow moment of the machine touches alike."""

    def over(a: Sequence[float], b: Sequence[float]) -> float:
        return median(x / y for x, y in zip(a, b, strict=True))

    return {
        work: {name: over(rates, next(iter(found.values()))) for name, rates in found.items()}
        for work, found in samples.items()
    }


def _settings(engine: runtime.Engine) -> dict[str, Any]:
    manifest = engine.manifest
    return {"mode": manifest.mode, "dtype": manifest.dtype, "variant": manifest.target.variant,
            "numerics_digest": manifest.numerics_digest}  # fmt: skip


if __name__ == "__main__":
    main()
