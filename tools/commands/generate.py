"""`tilewright generate ARTIFACT`: prompts in, texts or JSON lines out; results alone on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands import options as o
from tilewright.tools.commands.notes import origin_note, speed_note, with_seed
from tilewright.tools.commands.prompts import Asked, read_lines
from tilewright.tools.commands.records import records_of
from tilewright.tools.failures import FAILED

if TYPE_CHECKING:
    from tilewright.runtime import Engine, RequestOutput
    from tilewright.runtime.stream import Submitted

Result = "RequestOutput | Asked"


def generate(
    call: typer.Context,
    artifact: o.Artifact,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="Repeatable.")] = None,
    tokens: Annotated[list[str] | None, typer.Option("--tokens", metavar="1,2,3",
                                                     help="Prompt as ids; repeatable.")] = None,
    prompt_file: Annotated[Path | None, o.place("--prompt-file", help=(
        "JSON lines with prompt (text), tokens or messages (a chat), and params; - is stdin."
    ))] = None,
    chat: Annotated[bool, typer.Option("--chat", help=(
        "Make a text the user's message in the chat template. Messages always go through it."
    ))] = False,
    system: Annotated[str | None, typer.Option("--system", help=(
        "With --chat: system message of conversations that have none."
    ))] = None,
    max_tokens: o.MaxTokens = None, temperature: o.Temperature = None, top_k: o.TopK = None,
    top_p: o.TopP = None, min_p: o.MinP = None, repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None, frequency_penalty: o.FrequencyPenalty = None,
    logit_bias: o.LogitBias = None, allowed_token_ids: o.AllowedTokenIds = None,
    bad_words: o.BadWords = None, seed: o.Seed = None, stop: o.Stop = None,
    stop_token_ids: o.StopTokenIds = None, ignore_eos: o.IgnoreEos = None,
    logprobs: o.Logprobs = None, prompt_logprobs: o.PromptLogprobs = None, n: o.NumSamples = None,
    min_tokens: o.MinTokens = None, threads: o.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each sample.")
                       ] = False,
) -> None:  # fmt: skip
    """Generate for prompts: streamed text for one, else one result after the other."""
    settings = o.sampling_settings(call.params)
    asked = _asked(prompt or [], tokens or [], prompt_file, chat=chat, system=system)
    if _generate(artifact, asked, settings, threads, as_json):
        raise typer.Exit(FAILED)


def _asked(
    prompts: Sequence[str], tokens: Sequence[str], path: Path | None, *, chat: bool,
    system: str | None,
) -> list[Asked]:  # fmt: skip
    """Return all prompts; raise a usage error where there are none, or options do not fit."""
    if system is not None and not chat:
        raise typer.BadParameter("is for --chat only", param_hint="'--system'")
    if tokens and chat:
        raise typer.BadParameter(
            "got --chat too, and no chat template takes token ids", param_hint="'--tokens'"
        )
    found = [Asked(prompt=text) for text in prompts]
    found += [Asked(prompt=o.ids_of(ids, "--tokens")) for ids in tokens]
    found += read_lines(path, chat=chat) if path is not None else []
    if not found:
        want = "want --prompt, --tokens or --prompt-file" if path is None else "the file is empty"
        raise typer.BadParameter(f"no prompt given: {want}")
    return [_with_messages(each, system) for each in found] if chat else found


def _with_messages(asked: Asked, system: str | None) -> Asked:
    """Make a text the user's message of a conversation, and begin one with the system's."""
    messages = asked.messages
    if isinstance(asked.prompt, str):
        messages = [{"role": "user", "content": asked.prompt}]
    if messages is None:
        return asked
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Asked(messages=messages, params=asked.params, line=asked.line, problem=asked.problem)


def _generate(
    artifact: Path, asked: Sequence[Asked], settings: Mapping[str, Any], threads: int | None,
    as_json: bool,
) -> bool:  # fmt: skip
    """Print all results; say whether one of them failed."""
    from tilewright import runtime
    from tilewright.tools.progress import waiting

    with waiting("loading"):
        engine = runtime.load(artifact, num_threads=threads)
    with engine:
        single = len(asked) == 1 and asked[0].line is None and settings.get("n", 1) == 1
        if single and not as_json:
            return _stream(engine, asked[0], settings)
        failed, seeds = False, []
        for number, result in enumerate(run_all(engine, asked, settings), start=1):
            failed |= _print_result(result, number, as_json)
            seeds += [] if isinstance(result, Asked) else [result.seed]
        if seeds and not as_json:
            _note(origin_note(seeds, engine.numerics_digest))
        return failed


def _submit(engine: Engine, asked: Asked, settings: Mapping[str, Any]) -> Submitted:
    from tilewright import runtime

    params = runtime.SamplingParams.from_mapping({**settings, **asked.params})
    return engine.submit(prompt_of(engine, asked), params)


def prompt_of(engine: Engine, asked: Asked) -> str | Sequence[int]:
    """Return what the model reads: messages through the model's own template."""
    if asked.messages is not None:
        return engine.chat_prompt(asked.messages)
    assert asked.prompt is not None, asked
    return asked.prompt


def run_all(
    engine: Engine, asked: Sequence[Asked], settings: Mapping[str, Any]
) -> Iterator[RequestOutput | Asked]:
    """Yield results in the order asked, each as soon as it and all before are finished.

    A line of a file that is refused comes back as itself with its problem; a prompt given on the
    command line raises RequestError before anything runs.
    """
    from dataclasses import replace

    from tilewright.runtime import RequestError

    queue: list[Submitted | Asked] = []
    for each in asked:
        if each.problem is not None:
            queue.append(each)
            continue
        try:
            queue.append(_submit(engine, each, settings))
        except RequestError as error:
            if each.line is None:
                raise
            queue.append(replace(each, problem=f"line {each.line}: {error}"))
    for item in queue:
        if isinstance(item, Asked):
            yield item
            continue
        while not all(s.is_finished for s in item.samples):
            engine.step()
        yield engine.output(item)


def _print_result(result: RequestOutput | Asked, number: int, as_json: bool) -> bool:
    """Print one prompt's results; say whether it failed."""
    if isinstance(result, Asked):
        if as_json:
            print(json.dumps({"line": result.line, "error": result.problem}), flush=True)
        else:
            print(f"error: {result.problem}", file=sys.stderr)
        return True
    failed = False
    for record in records_of(result):
        failed |= "error" in record
        if as_json:
            print(json.dumps(record), flush=True)
            continue
        name = f"{number}.{record['index']}" if "index" in record else str(number)
        print(f"[{name}] {record['text']}", flush=True)
        if "error" in record:
            print(f"error: {record['error']}", file=sys.stderr)
    return failed


def _note(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="dim", markup=False)


def _stream(engine: Engine, asked: Asked, settings: Mapping[str, Any]) -> bool:
    """Print the text of one prompt as it comes; then, on stderr, how fast, and from what seed."""
    from tilewright import runtime

    params = with_seed(runtime.SamplingParams.from_mapping({**settings, **asked.params}))
    start, count, event = time.perf_counter(), 0, None
    for event in engine.stream(prompt_of(engine, asked), params):
        text = event.text if engine.tokenizer else "".join(f"{t} " for t in event.token_ids)
        print(text, end="", flush=True)
        count += len(event.token_ids)
    print(flush=True)
    if event is not None and event.error is not None:
        print(f"error: {event.error}", file=sys.stderr)
        return True
    speed = speed_note(count, time.perf_counter() - start)
    reason = event.finish_reason if event is not None else "none"
    origin = origin_note([params.seed], engine.numerics_digest)
    _note(f"{speed}, finish reason: {reason}, {origin}")
    return False
