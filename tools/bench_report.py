"""The bench's report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_SCALES = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e9, "GFLOP/s"), "tokens/s": (1.0, "tokens/s")}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the figures, the fractions of the limits, load and memory, and time by kernel."""
    artifact, machine = report["artifact"], report["machine"]
    settings = report["settings"]
    console.print(
        f"{artifact['model']} ({artifact['dtype']}) on {machine['cpu']}, {artifact['target']}, "
        f"{settings['threads']} threads",
        highlight=False,
    )
    console.print(_figures(report))
    console.print(_fractions(report))
    console.print(_load_line(report["load"]), highlight=False)
    for step in report.get("steps", ()):
        console.print(_step_table(step))


def _figures(report: Mapping[str, Any]) -> Table:
    repeat = report["settings"]["repeat"]
    title = f"median of {repeat}, taken in turns" if repeat > 1 else "measured once: no spread"
    table, shown = Table(title=title), ("median", "low", "high") if repeat > 1 else ("median",)
    for column in ("who", "figure", "dtype"):
        table.add_column(column)
    for column in shown:
        table.add_column(column if repeat > 1 else "value", justify="right")
    table.add_column("unit")
    for result in report["results"]:
        scale, unit = _SCALES[result["unit"]]
        values = [f"{result[k] / scale:.1f}" for k in shown]
        name = figure_name(result["name"], report["settings"])
        table.add_row(result["who"], name, result["dtype"], *values, unit)
    return table


def figure_name(name: str, settings: Mapping[str, Any]) -> str:
    """Return a figure's name for people: its sizes spelt out."""
    if name.startswith("decode_"):
        return f"decode, batch {name.removeprefix('decode_')}"
    if name.startswith("prefill"):
        where = ", executor alone" if name == "prefill_executor" else ""
        return f"prefill of {settings['prompt_tokens']}{where}"
    return name.replace("_", " ")


def _fractions(report: Mapping[str, Any]) -> Table:
    table = Table(title="of the limit, and against peers")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in report["derived"].items():
        table.add_row(name.replace("_", " "), derived_text(name, value))
    return table


def derived_text(name: str, value: float) -> str:
    """Print a derived figure in the unit its name tells."""
    if "_of_" in name:
        return f"{value:.1%}"
    if name.endswith("_seconds"):
        return f"{value * 1e3:.1f} ms"
    if "_bytes_" in name:
        return f"{value / 1e6:.2f} MB"
    if name.endswith("_flops"):
        return f"{value / 1e9:.2f} GFLOP"
    return f"{value:.2f}x"


def _load_line(load: Mapping[str, Any]) -> str:
    line = (
        f"load: {load['seconds']:.2f} s after import torch "
        f"({load['import_seconds']:.2f} s imports, {load['load_seconds']:.2f} s the artifact)"
    )
    if load["peak_bytes"] is None:
        return f"{line}; peak memory: this system does not tell"
    return (
        f"{line}; peak memory beyond torch {load['peak_bytes'] / 1e6:.1f} MB, "
        f"{load['peak_over_weights_and_cache']:.2f}x weights "
        f"({load['weights_bytes'] / 1e6:.1f} MB) and cache ({load['cache_bytes'] / 1e6:.1f} MB)"
    )


def _step_table(step: Mapping[str, Any]) -> Table:
    whole = step["step_seconds"]
    table = Table(
        title=f"{step['name']} step, bucket {step['bucket']}: {whole * 1e3:.3f} ms, of which host "
        f"{step['host_seconds'] * 1e3:.3f} ms"
    )
    table.add_column("kernel")
    table.add_column("first group")
    for column in ("launches", "ms", "share", "GB/s", "GFLOP/s"):
        table.add_column(column, justify="right")
    for row in step["kernels"]:
        table.add_row(
            row["kernel"],
            row["group"],
            str(row["launches"]),
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['seconds'] / whole:.1%}",
            f"{row['gb_per_s']:.2f}",
            f"{row['gflop_per_s']:.2f}",
        )
    return table
