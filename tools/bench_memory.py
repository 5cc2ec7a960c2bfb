"""Load time and peak memory of an artifact, in a process of its own, beyond `import torch`.

As a program it must import nothing of ours before it has seen what torch alone takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def measure_load(artifact: Path, *, threads: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Load in a fresh process and generate; return seconds and bytes.

    `import_seconds` is the import of the runtime, `load_seconds` opening the artifact, both after
    `import torch`; `peak_bytes` is the peak resident memory above that of a process that has
    imported torch, None where the system does not tell.
    """
    from tilewright.runtime import ArtifactError

    program = "from tilewright.tools.bench_memory import main; main()"
    numbers = map(str, (threads, prompt, tokens))
    done = subprocess.run(
        [sys.executable, "-c", program, str(artifact), *numbers],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ArtifactError(f"artifact '{artifact}': failed in a fresh process: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    """This process's environment, with its search path: a source tree need not be installed."""
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def resident_bytes(field: str) -> int | None:
    """Return VmRSS (now) or VmHWM (peak) of this process in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def main() -> None:
    """Print one JSON object; arguments: artifact, threads, prompt tokens, tokens."""
    import torch

    before = resident_bytes("VmRSS")
    start = time.perf_counter()
    from tilewright import runtime

    imported = time.perf_counter()
    artifact, threads, prompt, tokens = sys.argv[1], *map(int, sys.argv[2:])
    with runtime.load(artifact, num_threads=threads) as engine:
        loaded = time.perf_counter()
        after_load = resident_bytes("VmRSS")
        params = runtime.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.generate([i % engine.model.vocab_size for i in range(prompt)], params)
        peak = resident_bytes("VmHWM")
    known = before is not None and after_load is not None and peak is not None
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "import_seconds": imported - start,
                "load_seconds": loaded - imported,
                "torch_bytes": before,
                "load_bytes": after_load - before if known else None,  # type: ignore[operator]
                "peak_bytes": peak - before if known else None,  # type: ignore[operator]
            }
        )
    )
