"""The bench as one picture: tokens per second of all engines, and fractions of the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.runtime import RequestError
from tilewright.tools.bench_report import figure_name

OURS, OTHERS, LIMIT = "#2563eb", ("#94a3b8", "#64748b", "#cbd5e1", "#475569"), "#e2e8f0"


def require_matplotlib() -> None:
    """Raise RequestError unless the picture can be drawn: asked before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError(
            "bench 'png': matplotlib is not installed; run pip install 'tilewright[bench]'"
        ) from None


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw a report and write it as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = _names(report)
    rows = len({r["who"] for r in report["results"]})
    figure = Figure(figsize=(4.1 * len(names) + 5.0, 2.4 + 0.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names) + 1, width_ratios=[1.0] * len(names) + [1.3])
    for axis, name in zip(axes, names, strict=False):
        _draw_rates(axis, report, name)
    _draw_fractions(axes[-1], report["derived"])
    artifact, machine = report["artifact"], report["machine"]
    figure.suptitle(
        f"{artifact['model']}, {report['settings']['threads']} threads of {machine['cpu']}, "
        f"{report['date'][:10]}",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _names(report: Mapping[str, Any]) -> list[str]:
    found = [r["name"] for r in report["results"] if r["who"] == "tilewright"]
    return [name for name in dict.fromkeys(found) if name != "prefill_executor"]


def _draw_rates(axis: Any, report: Mapping[str, Any], name: str) -> None:
    rows = [r for r in report["results"] if r["name"] == name]
    values, most = [r["median"] for r in rows], max(r["high"] for r in rows)
    spread = [[r["median"] - r["low"] for r in rows], [r["high"] - r["median"] for r in rows]]
    axis.barh(
        range(len(rows)),
        values,
        height=0.62,
        color=_colours([r["who"] for r in rows]),
        xerr=spread,
        capsize=3,
        ecolor="#334155",
    )
    for i, row in enumerate(rows):
        axis.text(row["high"] + most * 0.03, i, f"{row['median']:.0f}", va="center", fontsize=9)
    labels = [f"{r['who']}\n{r['dtype']}" for r in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=7.5)
    axis.set_title(f"{figure_name(name, report['settings'])}, tokens/s", fontsize=10)
    axis.set_xlim(0, most * 1.22)
    axis.set_ylim(len(rows) - 0.4 + max(0, 2 - len(rows)), -0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _colours(names: Sequence[str]) -> list[str]:
    others = [n for n in names if n != "tilewright"]
    return [OURS if n == "tilewright" else OTHERS[others.index(n) % len(OTHERS)] for n in names]


def _draw_fractions(axis: Any, derived: Mapping[str, float]) -> None:
    shown = {
        name: value
        for name, value in derived.items()
        if name.endswith(("weights_of_read_bandwidth", "flops_of_fma_rate"))
    }
    labels = [name.replace("_", " ").replace(" of ", "\nof ") for name in shown]
    places = range(len(shown))
    axis.barh(places, [1.0] * len(shown), color=LIMIT)
    axis.barh(places, list(shown.values()), color=OURS)
    for place, value in zip(places, shown.values(), strict=True):
        axis.text(min(value, 1.0) + 0.02, place, f"{value:.0%}", va="center", fontsize=9)
    axis.set_yticks(places, labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.1)
    axis.set_title("fraction of the machine's own limit", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
