"""Build artifacts here; check and time them on a machine with the GPU; print a table, write JSON.

python -m tilewright.tools.dev.device_check build out/device
python -m tilewright.tools.dev.device_check run out/device -o out/h200.json

The machine with the GPU needs the runtime's packages, sympy, networkx and jinja2 for the
reference, and no compiler.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewright.tools.dev import device_checks, device_deepseek, device_speed
from tilewright.tools.dev.halves import halves
from tilewright.tools.dev.machine import machine

GREEDY = Path("tests/data/smollm2_greedy.json")
PEER_KEYS = {"rope_theta": 10000.0}


def main() -> None:
    """Build or run, as the command line says."""
    parsers = halves(__doc__, "names of sections")
    parsers.run.add_argument("--greedy", type=Path, default=GREEDY)
    asked = parsers.whole.parse_args()
    if asked.command == "build":
        build(asked.folder, asked.target)
    else:
        run(asked.folder, asked.output, asked.greedy, asked.only)


def build(folder: Path, target: str) -> None:
    """Compile what is to be checked."""
    import typer

    from tilewright.tools.cli import single

    command = typer.main.get_command(single)
    for args in (
        ["smollm2-135m", "-o", str(folder / "smollm2"), "--target", target],
        [device_deepseek.MODEL, "-o", str(folder / "small"), "--target", target],
        [device_deepseek.MODEL, "-o", str(folder / "small-cpu"), "--target", "cpu"],
    ):
        try:
            command.main(args=args, standalone_mode=False)
        except SystemExit as ended:  # the command line ends its process, also when all went well
            if ended.code:
                raise
    device_deepseek.write_expected(folder / "small-cpu", folder / "small.npz")


def run(folder: Path, output: Path, greedy: Path, only: list[str] | None) -> None:
    """Run every section, or those named; a section that breaks is reported, and the next runs."""
    path, small, expected = folder / "smollm2", folder / "small", folder / "small.npz"
    config = _config(path)
    sections: Mapping[str, Callable[[], Any]] = {
        "machine": machine,
        # First: later, captures reuse memory that earlier graphs left with the driver.
        "graph memory": lambda: device_speed.measure_graph_memory(path),
        "greedy": lambda: device_checks.check_greedy(path, greedy),
        "launches": lambda: device_checks.check_launches(path),
        "invariance": lambda: device_checks.check_invariance(path),
        "launch invariance": lambda: device_checks.find_difference(path),
        "sampling": lambda: device_checks.check_sampling(path),
        "refusals": lambda: device_checks.check_refusals(path),
        "small launches": lambda: device_checks.check_launches(small),
        "small greedy": lambda: device_deepseek.check_greedy(small, expected),
        "small logits": lambda: device_deepseek.check_logits(small, expected),
        "small invariance": lambda: device_deepseek.check_invariance(small, expected),
        "small rollback": lambda: device_deepseek.check_rollback(small, expected),
        "limits": device_speed.measure_limits,
        "steps": lambda: device_speed.measure_steps(path),
        "small steps": lambda: device_deepseek.measure_steps(small),
        "small kernels": lambda: device_speed.measure_launches(small),
        "engine": lambda: device_speed.measure_engine(path),
        "kernels": lambda: device_speed.measure_launches(path),
        "torch": lambda: device_speed.measure_torch(config),
        "transformers": lambda: device_speed.measure_transformers(config),
    }
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "artifact": _facts(path)}
    for name, section in sections.items():
        if only and name not in only:
            continue
        start = time.perf_counter()
        try:
            report[name] = section()
        except Exception:  # a broken section must not cost the device time of the others
            report[name] = {"broken": traceback.format_exc()}
        seconds = time.perf_counter() - start
        print(f"== {name} ({seconds:.1f} s)", flush=True)
        _print(report[name])
        output.write_text(json.dumps(report, indent=1) + "\n")


def _facts(path: Path) -> dict[str, Any]:
    tree = json.loads((path / "manifest.json").read_text())
    keys = ("mode", "dtype", "invariance", "numerics_digest", "weights_bytes")
    return {"target": tree["target"], **{k: tree[k] for k in keys}}


def _config(path: Path) -> dict[str, Any]:
    tree = json.loads((path / "manifest.json").read_text())
    return {**PEER_KEYS, **tree["model"]["config"]}


def _print(found: Any) -> None:
    """Print what failed in full, what is right as a count, and numbers as they are."""
    if not isinstance(found, dict):
        print(found)
        return
    if "broken" in found:
        print(found["broken"][-1500:])
        return
    good = [k for k, v in found.items() if isinstance(v, dict) and v.get("ok") is True]
    if good:
        print(f"ok: {len(good)} of {len(found)}")
    for key, value in found.items():
        if key not in good or "says" in value or "text" in value:
            print(f"  {key}: {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in list(value.items())[:16])
    return str(value)[:300]


if __name__ == "__main__":
    main()
