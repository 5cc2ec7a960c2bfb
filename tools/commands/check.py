"""`tilewright check ARTIFACT`: verify the weights, then every launch against the reference."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.tools.commands import options
from tilewright.tools.failures import FAILED, CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilewright.runtime.artifact import Manifest
    from tilewright.runtime.artifact_files import LoadedArtifact
    from tilewright.runtime.devices.device import Device
    from tilewright.runtime.executor import Executor
    from tilewright.tools.differences import Difference
    from tilewright.tools.launch_check import LaunchCheck
    from tilewright.tools.progress import StageBars

NUM_TOKENS, NUM_DECODES = 24, 3


def check(
    artifact: options.Artifact,
    tokens: Annotated[str | None, typer.Option(
        "--tokens", metavar="1,2,3", help="The prompt; default: a fixed random one."
    )] = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Compare every kernel launch of a prefill and a few decodes with the reference."""
    ids = options.ids_of(tokens, "--tokens") if tokens is not None else None
    from tilewright.tools.progress import StageBars

    with StageBars(visible=not as_json) as bars:
        found = check_artifact(artifact, ids, bars)
    is_within = all(each.is_within for each in found)
    if as_json:
        print(json.dumps({
            "kernels": [{**asdict(each), "is_within": each.is_within} for each in found],
            "is_within": is_within,
        }))  # fmt: skip
    else:
        _print(found)
    if not is_within:
        raise typer.Exit(FAILED)


def check_artifact(path: Path, ids: Sequence[int] | None, bars: StageBars) -> list[Difference]:
    """Return the worst error of every kernel that ran, in order of first use."""
    from tilewright.graph.text import parse_graph
    from tilewright.runtime.artifact_files import load_artifact, verify_weights
    from tilewright.runtime.executor import Executor
    from tilewright.tools.launch_check import LaunchCheck
    from tilewright.tools.launch_weights import packing_of

    artifact = load_artifact(path, choose_device=_one_by_one)
    prompt = _prompt(artifact, ids)
    bars("weights", 0, 1)
    verify_weights(artifact)
    bars("weights", 1, 1)
    graph = parse_graph((path / "sources" / "fused.txt").read_text())
    starts = _spans(artifact, len(prompt))
    total = len(starts) * len(graph.groups)
    done = 0

    def launched() -> None:
        nonlocal done
        done += 1
        bars("launches", done, total)

    watch = LaunchCheck(graph, launched, packing=packing_of(artifact.manifest.target.name))
    with Executor(artifact, artifact.device) as executor:
        _run(executor, artifact, prompt, starts, watch)
    return list(watch.worst.values())


def _one_by_one(manifest: Manifest) -> Device:
    """Choose a device that shows launches as the reference can follow: one thread, no padding."""
    from tilewright.runtime.devices.registry import open_device

    if manifest.target.name in ("cpu", "ascend950"):
        return open_device(manifest, num_threads=1)
    return open_device(manifest, graphs=False)


def _prompt(artifact: LoadedArtifact, ids: Sequence[int] | None) -> list[int]:
    import numpy as np

    model = artifact.manifest.model
    most = model.max_context - NUM_DECODES
    if ids is None:
        rng = np.random.default_rng(0)
        return [int(i) for i in rng.integers(0, model.vocab_size, min(NUM_TOKENS, max(most, 1)))]
    if not 1 <= len(ids) <= most:
        raise CommandError(f"option '--tokens': got {len(ids)} tokens, want 1 to {most}")
    for token in ids:
        if not 0 <= token < model.vocab_size:
            raise CommandError(
                f"option '--tokens': got token {token}, want 0 to {model.vocab_size - 1}"
            )
    return list(ids)


def _spans(artifact: LoadedArtifact, num_tokens: int) -> list[tuple[int, int]]:
    """Cut the prompt into steps, then the decodes: (first position, number of tokens)."""
    most = next(d.upper for d in artifact.manifest.dims if d.name == "tokens")
    cuts = [(at, min(most, num_tokens - at)) for at in range(0, num_tokens, most)]
    return cuts + [(num_tokens + i, 1) for i in range(NUM_DECODES)]


def _run(
    executor: Executor, artifact: LoadedArtifact, prompt: Sequence[int],
    spans: Sequence[tuple[int, int]], watch: LaunchCheck,
) -> None:  # fmt: skip
    """Run the prompt and greedy decodes after it, as one request with its own blocks in order."""
    from tilewright.tools.plain_step import page_dims, plain_step

    manifest = artifact.manifest
    executor.allocate_states(page_dims(manifest, positions=spans[-1][0] + 1))
    tokens = list(prompt)
    for start, count in spans:
        step = plain_step(manifest, tokens[start : start + count], start=start, all_logits=True)
        outputs = executor.observe(step.inputs, step.dims, watch)
        if start + count >= len(tokens):
            tokens.append(int(outputs["argmax"][-1]))


def _print(found: Sequence[Difference]) -> None:
    from rich.table import Table

    from tilewright.tools.progress import result_console

    table = Table("kernel", "worst in", box=None, header_style="dim")
    for title in ("launches", "absolute", "relative", "bf16 steps", "tolerance", ""):
        table.add_column(title, justify="right")
    for each in found:
        units = "" if each.units is None else f"{each.units:.2f}"
        verdict = "ok" if each.is_within else "BEYOND"
        table.add_row(each.kernel, each.group, str(each.num_launches), f"{each.absolute:.1e}",
                      f"{each.relative:.1e}", units, f"{each.tolerance:.1e}", verdict)  # fmt: skip
    result_console().print(table)
    beyond = sum(not each.is_within for each in found)
    if beyond:
        print(f"{beyond} of {len(found)} kernels are beyond the tolerance")
    else:
        print(f"weights have their digest; {len(found)} kernels are within the tolerance")
    tipped, ties = sum(each.tipped for each in found), sum(each.ties for each in found)
    if tipped or ties:
        print(f"allowed: {tipped} quantised entries one code step off, {ties} selections that tie")
