"""The border of the command line: what went wrong becomes one sentence and an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_UsageError = typer.BadParameter.__mro__[1]  # of whichever click this typer brings
_OURS = (
    ("tilewright.graph.errors", "TilewrightError"),
    ("tilewright.runtime.errors", "ArtifactError"),
    ("tilewright.runtime.errors", "RequestError"),
    ("tilewright.runtime.errors", "LaunchError"),
)


class CommandError(Exception):
    """A command cannot do what was asked. The message is one sentence."""


class CommandUsageError(CommandError):
    """Arguments that do not make a command together; the message is one sentence."""


def sentence_of(error: BaseException) -> str | None:
    """Return the sentence a user reads for an error, or None for one that is a fault of ours."""
    if isinstance(error, _UsageError):
        call = getattr(error, "ctx", None)
        text = str(getattr(error, "format_message")()).rstrip(".")
        return f"{text}; see {call.command_path} --help" if call else text
    if isinstance(error, OSError):
        name = "reading or writing" if error.filename is None else f"'{error.filename}'"
        return f"{name}: {error.strerror or error}"
    if isinstance(error, CommandError) or any(isinstance(error, kind) for kind in _loaded()):
        return " ".join(str(error).split())
    return None


def _loaded() -> list[type[BaseException]]:
    """Error classes of modules that are imported already: no other can have been raised."""
    modules = [(sys.modules.get(module), name) for module, name in _OURS]
    return [getattr(module, name) for module, name in modules if hasattr(module, name)]


def run_reported(run: Callable[[], Any], *, as_json: bool = False) -> int:
    """Run a command; return its exit code, with one sentence on stderr where it failed.

    `as_json`: who reads JSON on stdout finds the sentence there too, as `{"error": ...}`.
    """
    try:
        code = run()
        sys.stdout.flush()
        code = code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader left; nothing more may be written, also not when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        if as_json:
            _print_json(sentence)
        return USAGE if isinstance(error, (_UsageError, CommandUsageError)) else FAILED
    if code == INTERRUPTED:  # also how typer reports Ctrl-C
        print("interrupted", file=sys.stderr)
        if as_json:
            _print_json("interrupted")
    return code


def _print_json(sentence: str) -> None:
    """Print a failure for a program; stdout may be what failed."""
    with suppress(OSError):
        print(json.dumps({"error": sentence}), flush=True)


def _wants_json(arguments: Sequence[str] | None) -> bool:
    return "--json" in (sys.argv[1:] if arguments is None else arguments)


class Commands(TyperGroup):
    """A group of commands whose failures are reported in one sentence."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **settings: Any) -> Any:
        settings["standalone_mode"] = False
        run, as_json = super().main, _wants_json(args)
        sys.exit(run_reported(lambda: run(args, *more, **settings), as_json=as_json))


class Command(TyperCommand):
    """A single command whose failures are reported in one sentence."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **settings: Any) -> Any:
        settings["standalone_mode"] = False
        run, as_json = super().main, _wants_json(args)
        sys.exit(run_reported(lambda: run(args, *more, **settings), as_json=as_json))
