"""The command line as a whole: start, help, usage errors, and that names stay those of the API."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.codegen.config import DTYPES, MODES
from tilewright.runtime import SamplingParams
from tilewright.tools.commands import options

from .conftest import Call


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys\nfrom tilewright.tools.cli import main\nsys.argv = ['tilewright', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'sympy', 'numpy', 'tvm_ffi', 'networkx'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"PYTHONPATH": str(root)}, check=True)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"
    assert "compile" in done.stdout and "explain" in done.stdout


def test_sampling_options_are_those_of_the_api() -> None:
    assert options.SAMPLING == tuple(f.name for f in dataclasses.fields(SamplingParams))


def test_choices_are_those_of_the_compiler() -> None:
    assert tuple(options.Mode) == MODES
    assert set(options.Dtype) == {"auto", *DTYPES}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "a", "--tokens", "1,x"], "got '1,x', want token ids such as 1,2,3"),
        (["generate", "a", "--prompt", "p", "--logit-bias", "5=1"],
         "got '5=1', want ID:VALUE such as 42:-1.5"),
        (["generate", "a"], "no prompt given: want --prompt, --tokens or --prompt-file"),
        (["generate", "a", "--prompt", "p", "--system", "s"], "'--system': is for --chat only"),
    ],
)  # fmt: skip
def test_usage_errors(call: Call, arguments: list[str], sentence: str) -> None:
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    lead = "error: Invalid value for " if sentence.startswith("'") else "error: Invalid value: "
    assert done.err == f"{lead}{sentence}; see tilewright generate --help\n"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [([], "tilewright"), (["fly"], "tilewright"), (["generate"], "tilewright generate"),
     (["generate", "a", "--top-q", "1"], "tilewright generate"), (["tune"], "tilewright tune"),
     (["compile", "--fly"], "tilewright compile"), (["--loud"], "tilewright")],
)  # fmt: skip
def test_usage_errors_of_the_parser_say_where_help_is(
    call: Call, arguments: list[str], place: str
) -> None:
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.endswith(f"; see {place} --help\n")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("name", ["--mode", "--dtype", "--jobs", "--max-context"])
def test_unknown_option_values_are_usage_errors(call: Call, name: str, tmp_path: Path) -> None:
    done = call("compile", "m", "-o", tmp_path / "out", name, "0.5x")
    assert done.code == 2
    assert done.err.startswith(f"error: Invalid value for '{name}'") and done.err.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["generate", "--prompt", "x"], ["logits", "--tokens", "1", "-o", "x.npy"], ["check"],
     ["chat"], ["explain", "node"]],
)  # fmt: skip
def test_a_missing_artifact_is_one_sentence(
    call: Call, arguments: list[str], tmp_path: Path
) -> None:
    place = tmp_path / "nowhere"
    done = call(arguments[0], place, *arguments[1:])
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: artifact '{place}': there is no such directory\n"


def test_compile_model_is_the_same_command() -> None:
    run = "from tilewright.tools.cli import compile_model as m; m()"
    line: list[Any] = [sys.executable, "-c", run, "--mode", "x", "m", "-o", "o"]
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run(line, capture_output=True, text=True, env={"PYTHONPATH": str(root)},
                          check=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: Invalid value for '--mode'")
