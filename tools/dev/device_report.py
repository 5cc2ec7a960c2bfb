"""Join reports of device_check of one day and card into a JSON file and a page of tables.

python -m tilewright.tools.dev.device_report out/h200.json -o docs/results/h200-smollm2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 32)
Report = Mapping[str, Any]


def main() -> None:
    """Write OUTPUT.json and OUTPUT.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    joined: dict[str, Any] = {}
    for path in asked.reports:
        joined.update(json.loads(path.read_text()))
    asked.output.with_suffix(".json").write_text(json.dumps(joined, indent=1) + "\n")
    name = asked.output.with_suffix(".json").name
    asked.output.with_suffix(".md").write_text("\n".join(page(joined, name)) + "\n")


def page(report: Report, name: str) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from _head(report, name)
    yield from _held(report)
    yield from _speed(report)
    yield from _sampling(report)
    yield from _kernels(report)


def _head(report: Report, name: str) -> Iterator[str]:
    machine, artifact = report["machine"], report["artifact"]
    version = machine["driver"].split("x86_64")[-1].split()[0]
    yield f"# SmolLM2-135M on one {machine['card']}"
    yield ""
    yield (
        f"{report['date']}, driver {version}, torch {machine['torch']} (for memory, streams and "
        f"graphs), TVM-FFI {machine['tvm_ffi']}. Q4_1 weights "
        f"({artifact['weights_bytes'] / 1e6:.1f} MB),"
    )
    yield (
        f"{artifact['dtype']} activations, {artifact['mode']} mode, compiled with "
        f"{artifact['target']['compiler'].split(';')[0]} on a machine without a GPU."
    )
    yield f"All numbers: [{name}]({name})."
    yield ""
    for note in report.get("notes", ()):
        yield note
        yield ""


def _held(report: Report) -> Iterator[str]:
    yield "## What held"
    yield ""
    greedy, launches = report["greedy"], report["launches"]
    worst = max(launches.values(), key=lambda v: v["relative"] / (v["tolerance"] or 1))
    yield f"- Greedy tokens against the fp32 evaluation, with graphs and without: {_ok(greedy)}."
    yield (
        f"- Kernels against their fp64 reference, {sum(v['launches'] for v in launches.values())} "
        f"launches: {_ok(launches)}; worst {worst['relative']:.1e} of its row's largest entry, "
        f"tolerance {worst['tolerance']:.1e}."
    )
    yield (
        "- Logits of one request, byte for byte, over cuts of its prompt, 0 to 63 other requests, "
        f"all buckets, graphs and no graphs: {_ok(report['invariance'])}."
    )
    yield (
        f"- Sampled ids against the CPU's sampler: {report['sampling']['rows']} random rows, "
        f"{len(report['sampling']['wrong'])} differ."
    )
    yield f"- Refusals, one sentence each: {_ok(report['refusals'])}."
    yield ""


def _ok(found: Mapping[str, Any]) -> str:
    return f"{sum(bool(v['ok']) for v in found.values())} of {len(found)}"


def _speed(report: Report) -> Iterator[str]:
    steps, peer, engine = report["steps"], report["torch"], report["engine"]
    bandwidth = report["limits"]["copy_tb_per_s"]
    floor = report["artifact"]["weights_bytes"] / bandwidth / 1e9
    yield "## Speed"
    yield ""
    yield (
        "Milliseconds a step, median (least to most) of 40, at 128 positions of context; one run. "
        "`torch` is a Llama written by hand, bf16, fused projections, CUDA graph; `transformers` "
        "generates with bf16 weights. Peers have random weights of the same shapes."
    )
    yield ""
    yield "| | Tilewright, graphs | Tilewright, launch by launch | torch, graph |"
    yield "|---|---|---|---|"
    for batch in BATCHES:
        name = f"decode, batch {batch}"
        cells = (steps[f"{name}, graphs"], steps[f"{name}, eager"], peer[name])
        yield f"| {name} | " + " | ".join(_spread(c) for c in cells) + " |"
    name = "prefill of 512"
    cells = (steps[f"{name}, graphs"], steps[f"{name}, eager"], peer[name])
    yield f"| {name} | " + " | ".join(_spread(c) for c in cells) + " |"
    yield ""
    yield (
        f"Floor of a decode step: the weights at the {bandwidth:.2f} TB/s of a large copy in that "
        f"run are {floor:.3f} ms."
    )
    yield ""
    yield "Tokens per second through the engine, 64 tokens each after a prompt of 16:"
    yield ""
    yield "| | greedy | temperature | top-k and top-p | with penalty | transformers, greedy |"
    yield "|---|---|---|---|---|---|"
    for batch in BATCHES:
        rates = [
            engine[f"batch {batch}, {kind}"]["tokens_per_s"]
            for kind in ("greedy", "temperature", "top-p", "penalty")
        ]
        peer_rate = report.get("transformers", {}).get(f"generate, batch {batch}")
        shown = [f"{r:,.0f}" for r in rates]
        shown.append(f"{peer_rate['tokens_per_s']:,.0f}" if peer_rate else "not run")
        yield f"| batch {batch} | " + " | ".join(shown) + " |"
    yield ""


def _spread(cell: Mapping[str, float]) -> str:
    return f"{cell['ms']:.2f} ({cell['least']:.2f}-{cell['most']:.2f})"


def _sampling(report: Report) -> Iterator[str]:
    yield "Milliseconds to choose the tokens of a step, ids back on the host (graphs):"
    yield ""
    yield "| | greedy | temperature | top-k and top-p | with penalty |"
    yield "|---|---|---|---|---|"
    for batch in BATCHES:
        found = report["steps"][f"sampling, batch {batch}, graphs"]
        yield f"| batch {batch} | " + " | ".join(f"{v:.2f}" for v in found.values()) + " |"
    yield ""


def _kernels(report: Report) -> Iterator[str]:
    if "kernels" in report:
        yield from _launches(report["kernels"])
    memory = report["graph memory"]
    yield ""
    yield (
        f"Graphs took {memory['per_launch'] / 1e3:.1f} KB of GPU memory a launch "
        f"({memory['graphs']} graphs of {memory['launches'] // memory['graphs']})."
    )


def _launches(kernels_by_step: Mapping[str, Any]) -> Iterator[str]:
    yield "## Launches"
    yield ""
    yield "Microseconds between events, launch by launch, so each includes a gap of 2 to 4 us."
    yield ""
    yield "| step | kernel | launches | us each | us |"
    yield "|---|---|---|---|---|"
    for step, kernels in kernels_by_step.items():
        for kernel, each in kernels.items():
            yield (
                f"| {step} | {kernel.replace('_', ' ').split()[-1][:6]} {kernel.split()[0]} | "
                f"{each['launches']} | {each['us_each']:.1f} | {each['us']:.0f} |"
            )


if __name__ == "__main__":
    main()
