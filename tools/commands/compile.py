"""`compile-model MODEL -o DIR`: from a model to an artifact, with progress and a summary."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands import options
from tilewright.tools.failures import CommandUsageError

if TYPE_CHECKING:
    from tilewright.codegen.compile import CompileReport
    from tilewright.tools.commands.job import Asked, Resolved
    from tilewright.tools.progress import StageBars


def compile_model(
    model: options.ModelToCompile = None,
    output: Annotated[
        Path | None, options.place("--output", "-o", help="Directory to write.")
    ] = None,
    target: options.TargetName = "cpu",
    mode: options.ModeName = "deterministic",
    dtype: options.DtypeName = "auto",
    tune: Annotated[bool, typer.Option("--tune", help="Measure kernels without record.")] = False,
    max_context: options.MaxContext = None,
    max_tokens_per_step: options.MaxTokensPerStep = 512,
    model_config: options.ModelConfigName = None,
    plan_only: options.PlanOnly = False,
    no_cache_quantisation: options.NoCacheQuantisation = False,
    layers: options.Layers = None,
    replay_tokens: options.ReplayTokens = None,
    jobs: options.Jobs = None,
    simulate: options.Simulate = False,
    as_json: options.Json = False,
) -> None:
    """Compile a model into an artifact: kernels, weights, plan and tokenizer in one directory.

    With --plan-only, or a --config in place of a model, build the kernels and print what the
    artifact would take. A --config with --output writes an artifact without weights.
    """
    from tilewright.tools.commands.job import Asked
    from tilewright.tools.progress import StageBars

    _check_asked(model, output, model_config, plan_only=plan_only, tune=tune)
    start = time.perf_counter()
    chosen = options.simulated(target) if simulate else target
    asked = Asked(
        model=model, model_config=model_config, target=chosen, mode=mode, dtype=dtype,
        max_context=max_context, max_tokens_per_step=max_tokens_per_step, jobs=jobs,
        quantise_cache=not no_cache_quantisation, layers=layers,
        replay_tokens=options.replay_of(replay_tokens),
    )  # fmt: skip
    if output is None:
        _plan(asked, start, as_json=as_json)
        return
    with StageBars(visible=not as_json) as bars:
        report, found = _compile(asked, output, tune, bars)
    summary = summarise(report, found, time.perf_counter() - start)
    if as_json:
        print(json.dumps(summary))
    else:
        _print_summary(summary)


def _check_asked(
    model: str | None, output: Path | None, model_config: str | None, *, plan_only: bool,
    tune: bool,
) -> None:  # fmt: skip
    """Refuse what is neither a compilation nor a plan."""
    if (model is None) == (model_config is None):
        got = "neither" if model is None else "both"
        raise CommandUsageError(f"argument 'MODEL': got {got}, want a model or --config")
    if plan_only and output is not None:
        raise CommandUsageError(
            "option '--output': a plan is not written: got both, want one of them"
        )
    if not plan_only and model is not None and output is None:
        raise CommandUsageError("option '--output': missing: want the directory to write")
    if tune and output is None:
        raise CommandUsageError("option '--tune': a plan measures nothing: want it with --output")


def _plan(asked: Asked, start: float, *, as_json: bool) -> None:
    from tilewright.codegen.compile import plan_graph
    from tilewright.tools.commands.job import make_job, open_model, resolve_asked
    from tilewright.tools.plan_report import plan_summary, print_plan
    from tilewright.tools.progress import StageBars

    with StageBars(visible=not as_json) as bars:
        found = resolve_asked(asked)
        report = plan_graph(make_job(open_model(asked), found, None), bars)
    summary = plan_summary(report, time.perf_counter() - start)
    if as_json:
        print(json.dumps(summary))
    else:
        print_plan(summary)


def _compile(
    asked: Asked, output: Path, tune: bool, bars: StageBars
) -> tuple[CompileReport, Resolved]:
    from tilewright.codegen.compile import compile_graph
    from tilewright.codegen.staging import refuse_foreign
    from tilewright.tools.commands.job import make_job, open_model, resolve_asked
    from tilewright.tools.measure import CpuMeasure

    refuse_foreign(output)
    found, has_weights = resolve_asked(asked), asked.model is not None
    prepared = open_model(asked)
    measure = CpuMeasure(found.target, found.toolchain, found.flags.cache, jobs=found.jobs,
                         progress=bars) if tune else None  # fmt: skip
    job = make_job(prepared, found, measure)
    return compile_graph(job, output, bars, weights=has_weights), found


def summarise(report: CompileReport, found: Resolved, seconds: float) -> dict[str, Any]:
    """Return what was made, as plain JSON data. Launches are those of one step."""
    from tilewright.runtime.artifact_files import read_manifest

    manifest = read_manifest(report.path)
    layers: dict[str, int] = {}
    for launch in manifest.buckets[0].launches:
        parts = launch.group.split(".")
        if parts[0] == "layers" and len(parts) > 1:
            layers[parts[1]] = layers.get(parts[1], 0) + 1
    return {
        "path": str(report.path),
        "kernels": report.num_kernels,
        "kernels_compiled": report.num_compiled,
        "launches_per_step": report.num_launches,
        "launches_per_layer": max(layers.values(), default=0),
        "weights_bytes": report.weights_bytes,
        "has_weights": bool(manifest.weights_digest),
        "has_tokenizer": manifest.model.tokenizer is not None,
        "has_chat_template": manifest.model.chat_template is not None,
        "dtype": manifest.dtype,
        "mode": manifest.mode,
        "invariance": manifest.invariance,
        "target": manifest.target.variant,
        "numerics_digest": report.numerics_digest,
        "tuning": {"found": found.records.num_found, "measured": found.records.num_measured},
        "seconds": round(seconds, 3),
    }


def _prompts(summary: dict[str, Any]) -> str:
    """Say what may be asked of an artifact: a checkpoint may come without a tokenizer."""
    if not summary["has_tokenizer"]:
        return "token ids alone: the model came without a tokenizer, so that no text can be read"
    if not summary["has_chat_template"]:
        return "text and token ids; the model came without a chat template, so no chat"
    return "text, chat and token ids"


def _print_summary(summary: dict[str, Any]) -> None:
    from tilewright.tools.plan_report import mode_text
    from tilewright.tools.progress import result_console

    compiled, total = summary["kernels_compiled"], summary["kernels"]
    rows = (
        ("artifact", summary["path"]),
        ("kernels", f"{total} ({compiled} objects compiled, the others from the cache)"),
        ("launches", f"{summary['launches_per_step']} a step, "
                     f"{summary['launches_per_layer']} a layer"),
        ("weights", f"{summary['weights_bytes'] / 1e6:.1f} MB"
                    + ("" if summary["has_weights"] else ", left out")),
        ("prompts", _prompts(summary)),
        ("computes in", f"{summary['dtype']}, {mode_text(summary)}, {summary['target']}"),
        ("numerics", summary["numerics_digest"][:16]),
        ("time", f"{summary['seconds']:.1f} s"),
    )  # fmt: skip
    console = result_console()
    for name, text in rows:
        console.print(f"[dim]{name:>11}[/]  ", end="")
        console.print(text, markup=False)
