"""The command line: `tilewright COMMAND` and `compile-model`. Commands load what they need."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from tilewright import __version__
from tilewright.tools.commands.chat import chat
from tilewright.tools.commands.check import check
from tilewright.tools.commands.compile import compile_model as compile_command
from tilewright.tools.commands.explain import explain
from tilewright.tools.commands.generate import generate
from tilewright.tools.commands.logits import logits
from tilewright.tools.commands.tune import tune
from tilewright.tools.failures import Command, CommandError, Commands
from tilewright.tools.streams import prepare_streams

_FORWARD = {
    "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": [],
}  # fmt: skip


def _typer(**settings: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **settings
    )


app = _typer(cls=Commands, help="Compile language models for this machine, and run them.")


def _version(asked: bool) -> None:
    if asked:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Compile language models for this machine, and run them."""


app.command("compile")(compile_command)
app.command("generate")(generate)
app.command("chat")(chat)
app.command("tune")(tune)
app.command("logits")(logits)
app.command("explain")(explain)
app.command("check")(check)


@app.command("bench", context_settings=_FORWARD)
def bench(call: typer.Context) -> None:
    """Measure an artifact's speed against the machine's limits."""
    _forward("tilewright.tools.bench", "bench_command", call)


@app.command("inspect", context_settings=_FORWARD)
def inspect(call: typer.Context) -> None:
    """Show an artifact: graphs, kernels, memory; --html writes a page."""
    _forward("tilewright.tools.inspect", "inspect_command", call)


def _forward(module: str, name: str, call: typer.Context) -> None:
    """Run a command that is imported only now, with its own options."""
    try:
        function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        name = str(call.info_name)
        raise CommandError(f"command '{name}': is not part of this installation") from None
    single = _typer()
    single.command()(function)
    command = typer.main.get_command(single)
    code = command.main(args=call.args, prog_name=call.command_path, standalone_mode=False)
    if isinstance(code, int) and code:
        raise typer.Exit(code)


single = _typer()
single.command("compile-model", cls=Command)(compile_command)


def main() -> None:
    """Run `tilewright`."""
    prepare_streams()
    app()


def compile_model() -> None:
    """Run `compile-model`."""
    prepare_streams()
    single()


if __name__ == "__main__":
    main()
