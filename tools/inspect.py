"""`tilewright inspect ARTIFACT`: any stage as text or JSON, a kernel's source, or one page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer


def inspect_command(
    artifact: Annotated[Path, typer.Argument(help="Directory that compile-model wrote.")],
    stage: Annotated[
        Optional[str],
        typer.Option(
            help="model, fused, plan, kernels, numerics, memory, coverage or manifest; "
            "pipes: runs a step on the Ascend model; default: a summary."
        ),
    ] = None,
    kernel: Annotated[
        Optional[str], typer.Option(help="Print the source of a kernel, group or node.")
    ] = None,
    html: Annotated[Optional[Path], typer.Option(help="Write one self-contained page.")] = None,
    trace: Annotated[
        Optional[Path], typer.Option(help="With --stage pipes: write a timeline for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the stage as JSON.")] = False,
) -> None:
    """Show what an artifact holds. Needs neither its target nor a compiler."""
    from tilewright.runtime import RequestError
    from tilewright.tools.artifact_text import ArtifactText
    from tilewright.tools.inspect_text import kernel_source, stage_facts, stage_text

    if kernel is not None and (stage is not None or as_json):
        raise RequestError("inspect 'kernel': prints a source: want no --stage or --json beside it")
    if trace is not None and stage != "pipes":
        raise RequestError("inspect 'trace': is of the Ascend model: want --stage pipes beside it")
    if html is not None and stage == "pipes":
        raise RequestError("inspect 'html': a page has no pipes: want no --stage pipes beside it")
    if stage == "pipes":
        _print_pipes(artifact, trace, as_json=as_json)
        return
    opened = ArtifactText(artifact)
    if html is not None:
        from tilewright.tools.inspect_html import page

        html.write_text(page(opened), encoding="utf-8")
        if stage is None and kernel is None and not as_json:
            return
    if kernel is not None:
        sys.stdout.write(kernel_source(opened, kernel))
    elif as_json:
        print(json.dumps(stage_facts(opened, stage)))
    else:
        sys.stdout.write(stage_text(opened, stage))


def _print_pipes(artifact: Path, trace: Path | None, *, as_json: bool) -> None:
    from tilewright.tools.ascend_facts import pipe_facts, pipe_lines

    facts = pipe_facts(artifact, trace=trace)
    print(json.dumps(facts) if as_json else "\n".join(pipe_lines(facts)))
