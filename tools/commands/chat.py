"""`tilewright chat ARTIFACT`: talk to a model, in a terminal or line by line from a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands import options as o
from tilewright.tools.commands.notes import origin_note, speed_note, with_seed
from tilewright.tools.failures import FAILED

if TYPE_CHECKING:
    from tilewright.runtime import Engine

COMMANDS = ("/reset", "/exit")


def chat(
    call: typer.Context, artifact: o.Artifact,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: o.MaxTokens = None, temperature: o.Temperature = None, top_k: o.TopK = None,
    top_p: o.TopP = None, min_p: o.MinP = None, repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None, frequency_penalty: o.FrequencyPenalty = None,
    logit_bias: o.LogitBias = None, allowed_token_ids: o.AllowedTokenIds = None,
    bad_words: o.BadWords = None, seed: o.Seed = None, stop: o.Stop = None,
    stop_token_ids: o.StopTokenIds = None, ignore_eos: o.IgnoreEos = None,
    min_tokens: o.MinTokens = None, threads: o.Threads = None,
) -> None:  # fmt: skip
    """Talk to a model. /reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an
    answer. Lines of a pipe that cannot be answered make it fail at the end."""
    settings = o.sampling_settings(call.params)
    from tilewright import runtime
    from tilewright.tools.progress import waiting

    with waiting("loading"):
        engine = runtime.load(artifact, num_threads=threads)
    with engine:
        talk = Talk(engine, settings, system)
        talk.check()
        talk.run(_lines())
    if talk.failed and not sys.stdin.isatty():
        raise typer.Exit(FAILED)


def _lines() -> Iterator[str]:
    """Yield what the user says; a prompt is shown only where someone types."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  (line editing and history for input)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D to leave)", file=sys.stderr)


class Talk:
    """A conversation: what was said so far, and how to go on."""

    def __init__(self, engine: Engine, settings: dict[str, Any], system: str | None) -> None:
        from rich.console import Console

        self._engine, self._settings = engine, settings
        self._first = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._first)
        self.failed = False  # whether a line was refused, or its answer broke off
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)

    def check(self) -> None:
        """Raise RequestError for settings that no answer could be given with."""
        from tilewright.runtime import SamplingParams

        params, model = SamplingParams.from_mapping(self._settings), self._engine.model
        # An answer is cut to the room that a conversation leaves.
        params.validated(model.vocab_size, max(model.max_context, params.max_tokens))
        self._engine.chat_prompt([*self._first, {"role": "user", "content": "?"}])

    def run(self, lines: Iterator[str]) -> None:
        """Answer every line until the last one, or /exit."""
        for line in lines:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self._messages = list(self._first)
                self._note("the conversation starts anew")
            elif text.startswith("/"):
                self._note(f"command '{text.split()[0]}': unknown: have {', '.join(COMMANDS)}")
            elif text:
                self._answer(text)

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False)

    def _answer(self, text: str) -> None:
        """Stream an answer; what was refused is not kept, what was stopped is."""
        from tilewright.runtime import RequestError

        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            said = self._stream(self._engine.chat_prompt(messages))
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            self.failed = True
            return
        self._messages = [*messages, {"role": "assistant", "content": said}]

    def _stream(self, prompt: str) -> str:
        from tilewright.runtime import SamplingParams
        from tilewright.runtime.prompt import encode

        num_prompt = len(encode(prompt, self._engine.tokenizer, self._engine.model))
        room = self._engine.model.max_context - num_prompt
        most = min(self._settings.get("max_tokens", SamplingParams().max_tokens), room)
        params = with_seed(SamplingParams.from_mapping({**self._settings, "max_tokens": most}))
        events = self._engine.stream(prompt, params)
        pieces, count, start = [], 0, time.perf_counter()
        try:
            for event in events:
                print(event.text, end="", flush=True)
                pieces.append(event.text)
                count += len(event.token_ids)
                if event.error is not None:
                    self.failed = True
                    self._note(f"error: {event.error}")
        except KeyboardInterrupt:
            events.close()
        seconds = time.perf_counter() - start
        print(flush=True)
        origin = origin_note([params.seed], self._engine.numerics_digest)
        self._note(f"{speed_note(count, seconds)}, {origin}")
        return "".join(pieces)
