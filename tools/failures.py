"""The border of the command line: what went wrong becomes one sentence and an exit code."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tilewright.tools.streams import STDOUT, drop_stdout

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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in an error that does not: the system gives names where files are opened, not
    where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        why = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, why, str(path)) from None


def sentence_of(error: BaseException) -> str | None:
    """Return the sentence a user reads for an error, or None for one that is a fault of ours."""
    if isinstance(error, _UsageError):
        call = getattr(error, "ctx", None)
        text = str(getattr(error, "format_message")()).rstrip(".")
        return f"{text}; see {call.command_path} --help" if call else text
    if isinstance(error, OSError):
        name = "reading or writing" if error.filename is None else f"'{error.filename}'"
        name = STDOUT if error.filename == STDOUT else name
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
        drop_stdout()  # the reader left, which is no news to anyone
        return FAILED
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        if isinstance(error, OSError) and error.filename == STDOUT:
            drop_stdout()
        elif as_json:
            _print_json(sentence)
        return USAGE if isinstance(error, (_UsageError, CommandUsageError)) else FAILED
    if code == INTERRUPTED:  # also how typer reports Ctrl-C
        print("interrupted", file=sys.stderr)
        if as_json:
            _print_json("interrupted")
    return code


def _print_json(sentence: str) -> None:
    """Print a failure for a program; stdout may be closed or full besides."""
    try:
        print(json.dumps({"error": sentence}), flush=True)
    except OSError:
        drop_stdout()


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
