"""The demonstration behind `make demo`: compile a model for this CPU, then stream its answer."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tilewright import runtime
from tilewright.codegen.compile import CompileJob, CompileReport, compile_graph
from tilewright.codegen.config import CompileConfig
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.graph.errors import TilewrightError
from tilewright.targets.registry import resolve
from tilewright.tools.prepare import prepare

QUESTION = "Explain in two sentences why the sky is blue."
MAX_TOKENS = 160


def main(arguments: list[str]) -> int:
    """Compile the model `arguments[0]` into the folder `arguments[1]` and talk to it."""
    model, path = arguments[0], Path(arguments[1])
    console = Console(highlight=False)
    try:
        report, seconds = build(model, path, console)
        console.print(
            f"{report.num_kernels} kernels, {report.num_compiled} of them compiled now, "
            f"{report.num_launches} launches per step, {seconds:.1f} s\n"
        )
        with runtime.load(path) as engine:
            answer(engine, console)
    except (TilewrightError, runtime.ArtifactError, runtime.RequestError) as error:
        print(error, file=sys.stderr)
        return 1
    console.print(next_steps(path), soft_wrap=True)
    return 0


def build(model: str, path: Path, console: Console) -> tuple[CompileReport, float]:
    """Compile with the first schedule of every kernel; return the report and the seconds taken."""
    start = time.perf_counter()
    target, toolchain = resolve("cpu")
    console.print(f"Compiling {model} for {target.name}:{target.variant} into {path}")
    prepared = prepare(model, CompileConfig())
    job = CompileJob(
        graph=prepared.graph,
        model=prepared.model,
        weights=prepared.weights,
        target=target,
        toolchain=toolchain,
        config=prepared.config,
        choose=first_candidate(target),
        flags=Flags.from_environment(),
        files=prepared.files,
        jobs=len(os.sched_getaffinity(0)),
    )
    columns = TextColumn("{task.description:<8}"), BarColumn(), TextColumn("{task.completed:.0f}")
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        report = compile_graph(job, path, show)
    return report, time.perf_counter() - start


def answer(engine: runtime.Engine, console: Console) -> None:
    """Stream the greedy answer to the question and print the rate of its tokens."""
    console.print(f"> {QUESTION}")
    prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}])
    params = runtime.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    start, first, count = time.perf_counter(), 0.0, 0
    for event in engine.stream(prompt, params):
        first = first or time.perf_counter()
        count += len(event.token_ids)
        print(event.text, end="", flush=True)
    rate = (count - 1) / (time.perf_counter() - first) if count > 1 else 0.0
    console.print(
        f"\n\n{count} tokens, the first after {first - start:.2f} s, then {rate:.1f} tokens/s; "
        f"numerics digest {engine.numerics_digest[:16]}",
        soft_wrap=True,
    )


def next_steps(path: Path) -> str:
    """Say where the artifact is and which commands go on from here."""
    commands = (
        f"tilewright chat {path}",
        f"tilewright generate {path} --chat --prompt 'Write a haiku about tiles.'",
        f"tilewright inspect {path} --html out/inspect.html",
        f"tilewright bench {path}",
    )
    listed = "\n".join(f"  .venv/bin/{command}" for command in commands)
    return f"The artifact is in {path}. Next:\n{listed}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
