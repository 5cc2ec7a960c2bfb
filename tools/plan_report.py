"""What an artifact would take, before there are weights: a table, or JSON data."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tilewright.runtime.artifact import Manifest
from tilewright.tools.artifact_facts import memory_facts
from tilewright.tools.progress import result_console
from tilewright.tools.svg_memory import bytes_text

if TYPE_CHECKING:
    from tilewright.codegen.compile import PlanReport


def plan_summary(report: PlanReport, seconds: float) -> dict[str, Any]:
    """Return the plan as plain JSON data; bytes throughout."""
    manifest = report.manifest
    return {
        "model": manifest.model.name,
        "dtype": manifest.dtype,
        "mode": manifest.mode,
        "invariance": manifest.invariance,
        "target": manifest.target.variant,
        "max_tokens_per_step": next(d.upper for d in manifest.dims if d.name == "tokens"),
        "kernels": len(manifest.kernels),
        "kernels_compiled": report.num_compiled,
        "kernels_by_template": dict(sorted(Counter(k.template for k in manifest.kernels).items())),
        "launches_per_step": _launches(manifest),
        "memory": memory_facts(manifest),
        "seconds": round(seconds, 3),
    }


def _launches(manifest: Manifest) -> int:
    return max(len(b.launches) for b in manifest.buckets)


def mode_text(summary: dict[str, Any]) -> str:
    """Say the mode, and where the target's promise of equal bits is not proven."""
    unproven = summary["mode"] == "deterministic" and summary["invariance"] != "proven"
    mode = str(summary["mode"])
    return f"{mode} (unproven on this target)" if unproven else mode


def print_plan(summary: dict[str, Any]) -> None:
    """Print the tables of a plan."""
    console, memory = result_console(), summary["memory"]
    console.print(
        f"{summary['model']}: {summary['dtype']}, {mode_text(summary)}, {summary['target']}; "
        f"{summary['kernels']} kernels ({summary['kernels_compiled']} objects compiled), "
        f"{summary['launches_per_step']} launches a step; {summary['seconds']:.1f} s",
        markup=False,
    )
    for table in (_weights(memory), _states(memory), _sequence(memory), _steps(memory),
                  _kernels(summary)):  # fmt: skip
        console.print()
        console.print(table)


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim")
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i else "left")
    return table


def _weights(memory: dict[str, Any]) -> Table:
    table = _table("weights", "tensors", "size")
    for name, row in memory["weights"].items():
        table.add_row(name.replace("[", "\\["), str(row["tensors"]), bytes_text(row["bytes"]))
    table.add_row("all", "", bytes_text(memory["weights_bytes"]))
    return table


def _states(memory: dict[str, Any]) -> Table:
    table = _table("cache, by kind of state", "states", "lives", "bytes a position")
    for row in memory["states"]:
        lives = "whole request" if row["scope"] == "block" else f"{row['window']} positions"
        table.add_row(row["format"].replace("[", "\\["), str(len(row["states"])), lives,
                      f"{row['bytes_per_position']:g}")  # fmt: skip
    return table


def _sequence(memory: dict[str, Any]) -> Table:
    table, window = _table("cache, of a sequence", "size"), memory["window"]
    table.add_row("grows with each token", f"{memory['cache_bytes_per_token']} B")
    full = bytes_text(memory["cache_bytes_per_full_context"])
    table.add_row(f"full context of {memory['max_context']} tokens", full)
    if window:
        pages = f"{window['pages_per_sequence']} window pages of {window['page_positions']} tokens"
        table.add_row(f"{pages}, whatever its length", bytes_text(window["bytes_per_sequence"]))
        table.add_row("rows that a snapshot copies", bytes_text(window["snapshot_bytes"]))
    return table


def _steps(memory: dict[str, Any]) -> Table:
    table = _table("step", "arena", "buffers in it", "scratch a thread")
    for row in memory["buckets"]:
        sizes = (row["arena_bytes"], row["buffers_bytes"], row["scratch_bytes_per_thread"])
        table.add_row(row["bucket"], *map(bytes_text, sizes))
    inputs = sum(memory["inputs_and_outputs_bytes"].values())
    table.add_row("inputs and outputs, largest", bytes_text(inputs), "", "")
    return table


def _kernels(summary: dict[str, Any]) -> Table:
    table = _table("kernels, by template", "number")
    for name, count in summary["kernels_by_template"].items():
        table.add_row(name, str(count))
    return table
