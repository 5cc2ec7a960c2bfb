"""The command line of a check in two halves: `build` here, `run` on a machine with the GPU."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Halves:
    """The whole parser, and those of its two commands, to which more options may be added."""

    whole: argparse.ArgumentParser
    build: argparse.ArgumentParser
    run: argparse.ArgumentParser


def halves(description: str | None, only: str) -> Halves:
    """Return parsers of `build FOLDER [--target T]` and `run FOLDER -o FILE [--only ...]`; `only`
    says what may be named."""
    whole = argparse.ArgumentParser(description=description)
    commands = whole.add_subparsers(dest="command", required=True)
    build, run = commands.add_parser("build"), commands.add_parser("run")
    build.add_argument("folder", type=Path)
    build.add_argument("--target", default="sm90")
    run.add_argument("folder", type=Path)
    run.add_argument("-o", "--output", type=Path, required=True)
    run.add_argument("--only", nargs="*", help=only)
    return Halves(whole, build, run)
