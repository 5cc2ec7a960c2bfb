"""`tilewright bench ARTIFACT`: how fast an artifact is, as fractions of what the machine can do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from tilewright.tools.commands.options import Artifact, Json, Threads, count, place
from tilewright.tools.commands.values import name, refusal
from tilewright.tools.failures import CommandUsageError, writing

if TYPE_CHECKING:
    from tilewright.tools.bench_settings import BenchSettings

MAX_REPEAT = 1000
PEERS = ("llama.cpp", "transformers")


def batches_of(text: str) -> tuple[int, ...]:
    """Read `1,8`; batch 1 is always measured. Raises typer.BadParameter for anything else."""
    parts = text.split(",")
    if not all(p.isascii() and p.strip().isdecimal() and len(p) < 9 and int(p) > 0 for p in parts):
        raise refusal(text, "sizes of at least 1, such as 1,8", option="--batch")
    return tuple(sorted({1, *map(int, parts)}))


def check_peer(text: str) -> str:
    """Return `llama.cpp=FILE.gguf` or `transformers`; raise typer.BadParameter for another."""
    engine, _, file = text.partition("=")
    if engine not in PEERS or (engine == "llama.cpp") != bool(file):
        raise refusal(text, "llama.cpp=FILE.gguf or transformers", option="--peer")
    return text


PromptTokens = Annotated[
    int, count("--prompt-tokens", low=1, help="Tokens of the measured prompt.")
]
DecodeTokens = Annotated[
    int, count("--decode-tokens", low=1, help="Tokens each request generates.")
]
Start = Annotated[
    int, count("--context", low=1, help="Tokens in the cache when decoding starts.")
]
Repeat = Annotated[
    int,
    count("--repeat", low=1, high=MAX_REPEAT, help="Samples of every figure, taken in turns."),
]
Peers = Annotated[
    Optional[list[str]],
    typer.Option("--peer", help="llama.cpp=FILE.gguf (needs llama-cpp-python) or transformers "
                 "(needs transformers and torch); may be repeated."),
]  # fmt: skip
PeerPython = Annotated[
    Optional[str],
    typer.Option("--peer-python", metavar="<path>", parser=name, help="With --peer: interpreter "
                 "(3.11 or later) that has the peers; default: this one."),
]  # fmt: skip


def bench_command(
    artifact: Artifact,
    threads: Threads = None,
    prompt_tokens: PromptTokens = 512,
    decode_tokens: DecodeTokens = 64,
    batch: Annotated[str, typer.Option(help="Requests decoded together, as 1,8.")] = "1,8",
    context: Start = 64,
    repeat: Repeat = 5,
    output: Annotated[
        Optional[Path], place("--output", "-o", help="JSON file to write.")
    ] = None,
    png: Annotated[Optional[Path], place("--png", help="Picture to write.")] = None,
    peer: Peers = None,
    peer_python: PeerPython = None,
    by_kernel: Annotated[
        bool, typer.Option("--by-kernel", help="Also time every kernel of a step.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure an artifact beside the machine's own read bandwidth and multiply-add rate."""
    batches, peers = batches_of(batch), [check_peer(text) for text in peer or []]
    if peer_python is not None and not peers:
        raise CommandUsageError("option '--peer-python': is for peers: want --peer beside it")
    from tilewright.runtime.devices.cpu import default_num_threads
    from tilewright.tools.bench_plot import plot, require_matplotlib
    from tilewright.tools.bench_settings import BenchSettings

    settings = BenchSettings(
        threads=default_num_threads() if threads is None else threads,
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        batches=batches,
        start=context,
        repeat=repeat,
    )
    for asked in (output, png):
        if asked is not None:
            refuse_unwritable(asked)  # before minutes of measuring
    if png is not None:
        require_matplotlib()
    report = _measure(artifact, settings, peers, peer_python or sys.executable, by_kernel)
    if output is not None:
        with writing(output):
            output.write_text(json.dumps(report, indent=1) + "\n")
    if png is not None:
        with writing(png):
            plot(report, png)
    _show(report, as_json=as_json)


def refuse_unwritable(path: Path) -> None:
    """Raise OSError unless a file can be written there, which leaves one that is there as it is."""
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def _measure(
    artifact: Path, settings: BenchSettings, peers: list[str], peer_python: str, by_kernel: bool
) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    from tilewright.runtime.artifact_files import read_manifest
    from tilewright.tools.artifact_text import named
    from tilewright.tools.bench_peer_process import parse_peer
    from tilewright.tools.bench_session import run_bench
    from tilewright.tools.bench_settings import check_settings

    with named(artifact):
        manifest = read_manifest(artifact)
    check_settings(settings, manifest)
    requests = [r for text in peers for r in parse_peer(text, manifest.model.config)]
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("measure", total=None)
        return run_bench(
            artifact,
            settings,
            requests,
            peer_python=peer_python,
            by_kernel=by_kernel,
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    from rich.console import Console

    from tilewright.tools.bench_report import print_report

    if as_json:
        print(json.dumps(report))
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else 160))
