"""Measure exported candidates on the machine with the GPU: needs torch and tvm_ffi only.

    python measure.py [-o measured.json] [--seconds 60]

Reads candidates.so, cases.json and ints.npz beside this script. Every case: the outputs of all
candidates compared bit for bit on poisoned memory, then the median time of a launch in a replayed
CUDA graph, over copies of weights and cache that no cache of the chip holds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

SCHEMA = "tilewright-measured-1"
LAUNCHES, REPEATS, ROTATED_BYTES, MOST_COPIES = 16, 7, 128 << 20, 16
CUDA: Any = torch.cuda  # partly untyped
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "u8": torch.uint8}


class Case:
    """Operands of one case on the device, in as many copies as hide them from caches."""

    def __init__(self, row: dict[str, Any], ints: Any) -> None:
        self.row = row
        generator = torch.Generator("cuda").manual_seed(0)
        made = {a["name"]: self._operand(a, ints, generator) for a in row["arguments"]}
        kept = {a["name"] for a in row["arguments"] if a["kept"]}
        size = sum(made[n].nbytes for n in kept)
        copies = max(1, min(MOST_COPIES, ROTATED_BYTES // size)) if size else 1
        self.tensors = [
            {n: t.clone() if n in kept and i else t for n, t in made.items()}
            for i in range(copies)
        ]
        need = max((k["scratch"] or 0 for k in row["kernels"]), default=0)
        self.workspace = torch.zeros(max(need, 256), dtype=torch.uint8, device="cuda")

    @staticmethod
    def _operand(entry: dict[str, Any], ints: Any, generator: torch.Generator) -> torch.Tensor:
        if "ints" in entry:
            return torch.from_numpy(ints[entry["ints"]]).cuda()
        shape = entry["shape"]
        if entry["dtype"] == "codes":  # small codes and scales: no NaN, no infinity
            return torch.randint(
                0, 60, shape, dtype=torch.uint8, device="cuda", generator=generator
            )
        if entry["dtype"] == "u8":
            return torch.randint(
                0x38, 0x48, shape, dtype=torch.uint8, device="cuda", generator=generator
            )
        values = torch.randn(shape, device="cuda", generator=generator)
        return values.to(TYPES[entry["dtype"]])

    def launch(self, module: Any, kernel: dict[str, Any], copy: int) -> None:
        """Launch one candidate on one copy of the operands."""
        tensors = self.tensors[copy % len(self.tensors)]
        arguments = [tensors[a["name"]] for a in self.row["arguments"]]
        if kernel["scratch"] is not None:
            arguments.append(self.workspace)
        module[kernel["symbol"]](*arguments, *self.row["ints"])

    def outputs(self, module: Any, kernel: dict[str, Any]) -> list[bytes]:
        """The bytes that one candidate leaves in poisoned outputs."""
        watched = [self.tensors[0][n] for n in self.row["outputs"]]
        for tensor in (*watched, self.workspace):
            tensor.view(torch.uint8).fill_(0xFF)
        self.launch(module, kernel, 0)
        torch.cuda.synchronize()
        return [t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in watched]

    def seconds(self, module: Any, kernel: dict[str, Any]) -> float:
        """The median time of one launch."""
        for i in range(3):
            self.launch(module, kernel, i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(LAUNCHES):
                self.launch(module, kernel, i)
        times = []
        for _ in range(REPEATS):
            start, stop = (CUDA.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) * 1e-3 / LAUNCHES)
        return float(median(times))


def measure(module: Any, row: dict[str, Any], ints: Any) -> dict[str, Any]:
    """Compare and time all candidates of one case."""
    case = Case(row, ints)
    kernels = row["kernels"]
    first = case.outputs(module, kernels[0])
    different = [k["symbol"] for k in kernels[1:] if case.outputs(module, k) != first]
    return {
        "key": row["key"], "group": row["group"], "bucket": row["bucket"],
        "symbols": [k["symbol"] for k in kernels], "different": different,
        "seconds": [case.seconds(module, k) for k in kernels],
    }  # fmt: skip


def driver_version() -> str:
    """The version of the GPU's driver, or an empty text."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def run(folder: Path, output: Path, seconds: float | None) -> int:
    """Measure what the time allows, write the file, and return how many cases failed."""
    import tvm_ffi

    facts = json.loads((folder / "cases.json").read_text())
    ints = np.load(folder / "ints.npz", allow_pickle=False)
    module = tvm_ffi.load_module(str(folder / "candidates.so"))
    start, found, failed = time.monotonic(), [], []
    with CUDA.stream(CUDA.Stream()):
        for done, row in enumerate(facts["cases"]):
            if seconds is not None and time.monotonic() - start > seconds:
                print(f"out of time: {len(facts['cases']) - done} cases not measured", flush=True)
                break
            try:
                found.append(measure(module, row, ints))
            except Exception as error:  # a candidate that fails must not hide the others
                failed.append({"key": row["key"], "group": row["group"], "error": str(error)[:500]})
                print(f"{row['group']} {row['bucket']}: failed: {error}", flush=True)
                continue
            times = found[-1]["seconds"]
            print(f"{done + 1}/{len(facts['cases'])} {row['group']} {row['bucket']}: first "
                  f"{times[0] * 1e6:.1f} us, best {min(times) * 1e6:.1f} us of {len(times)}"
                  + (f", {len(found[-1]['different'])} differ in bits" if found[-1]["different"]
                     else ""), flush=True)  # fmt: skip
    result = {
        "schema": SCHEMA, "target": facts["target"], "device": torch.cuda.get_device_name(),
        "driver": driver_version(), "torch": torch.__version__,
        "date": datetime.date.today().isoformat(), "cases": found, "failed": failed,
    }  # fmt: skip
    output.write_text(json.dumps(result, indent=1) + "\n")
    return len(failed)


def main() -> int:
    """Read the options, measure, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("measured.json"))
    parser.add_argument("--seconds", type=float, help="stop beginning cases after so long")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU: torch finds no CUDA device", file=sys.stderr)
        return 1
    return 1 if run(Path(__file__).parent, asked.output, asked.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
