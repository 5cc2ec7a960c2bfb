"""`tilewright inspect ARTIFACT`: any stage as text or JSON, a kernel's source, or one page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from tilewright.tools.commands.options import Artifact, Json, place
from tilewright.tools.failures import CommandUsageError, writing
from tilewright.tools.inspect_text import STAGES, kernel_source, stage_facts, stage_text
from tilewright.tools.whole_file import write_whole


def inspect_command(
    artifact: Artifact,
    stage: Annotated[
        Optional[str],
        typer.Option(
            help=f"{', '.join(STAGES[:-1])} or {STAGES[-1]}; "
            "pipes: runs a step on the Ascend model; default: a summary."
        ),
    ] = None,
    kernel: Annotated[
        Optional[str], typer.Option(help="Print the source of a kernel, group or node.")
    ] = None,
    html: Annotated[
        Optional[Path], place("--html", help="Write one self-contained page.")
    ] = None,
    trace: Annotated[
        Optional[Path], place("--trace", help="With --stage pipes: write a timeline for Perfetto.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact holds. Needs neither its target nor a compiler."""
    from tilewright.tools.artifact_text import ArtifactText

    _check_asked(stage, kernel, html, trace, as_json=as_json)
    if stage == "pipes":
        _print_pipes(artifact, trace, as_json=as_json)
        return
    opened = ArtifactText(artifact)
    if html is not None:
        from tilewright.tools.inspect_html import page

        with writing(html):
            write_whole(html, page(opened).encode("utf-8"))
        if stage is None and kernel is None and not as_json:
            return
    if kernel is not None:
        sys.stdout.write(kernel_source(opened, kernel))
    elif as_json:
        print(json.dumps(stage_facts(opened, stage)))
    else:
        sys.stdout.write(stage_text(opened, stage))


def _check_asked(
    stage: str | None, kernel: str | None, html: Path | None, trace: Path | None, *, as_json: bool
) -> None:
    """Raise CommandUsageError for a stage that there is not, and for options that do not go
    together."""
    if stage not in (None, "pipes", *STAGES):
        raise CommandUsageError(f"stage '{stage}': unknown: have {', '.join(STAGES)}, pipes")
    for is_wrong, sentence in (
        (kernel is not None and (stage is not None or as_json),
         "inspect 'kernel': prints a source: want no --stage or --json beside it"),
        (trace is not None and stage != "pipes",
         "inspect 'trace': is of the Ascend model: want --stage pipes beside it"),
        (html is not None and stage == "pipes",
         "inspect 'html': a page has no pipes: want no --stage pipes beside it"),
    ):  # fmt: skip
        if is_wrong:
            raise CommandUsageError(sentence)


def _print_pipes(artifact: Path, trace: Path | None, *, as_json: bool) -> None:
    from tilewright.tools.ascend_facts import pipe_facts, pipe_lines

    facts = pipe_facts(artifact, trace=trace)
    print(json.dumps(facts) if as_json else "\n".join(pipe_lines(facts)))
