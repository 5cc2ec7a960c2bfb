"""The command line as a whole: start, help, usage errors, and that names stay those of the API."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright import __version__
from tilewright.codegen.config import DTYPES, MODES
from tilewright.runtime import SamplingParams
from tilewright.targets.registry import TARGETS
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


HEAVY = ("torch", "tvm_ffi", "triton", "tilelang")


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (["inspect"], (*HEAVY, "sympy", "networkx")),
        (["inspect", "--stage", "kernels"], (*HEAVY, "sympy", "networkx")),
        (["explain", "layers.0.q_proj"], HEAVY),
    ],
)
def test_reading_an_artifact_loads_no_heavy_package(
    artifact: Path, arguments: list[str], unused: tuple[str, ...]
) -> None:
    name, *rest = arguments
    code = (
        "import sys\nfrom tilewright.tools.cli import main\n"
        f"sys.argv = ['tilewright', {name!r}, {str(artifact)!r}, *{rest!r}]\n"
        "try: main()\nexcept SystemExit as done: assert not done.code, done.code\n"
        f"print('loaded', *sorted({set(unused)!r} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={"PYTHONPATH": str(root)}, check=True)  # fmt: skip
    assert len(done.stdout.splitlines()) > 5
    assert done.stdout.splitlines()[-1] == "loaded"


def test_version(call: Call) -> None:
    done = call("--version")
    assert (done.code, done.out, done.err) == (0, f"tilewright {__version__}\n", "")


def test_targets_are_named_in_the_help(call: Call) -> None:
    text = " ".join(call("compile", "--help").out.split())
    assert all(f"{name}, " in text for name in TARGETS), text


def test_sampling_options_are_those_of_the_api() -> None:
    assert options.SAMPLING == tuple(f.name for f in dataclasses.fields(SamplingParams))


def test_choices_are_those_of_the_compiler() -> None:
    assert options.MODES == MODES
    assert set(options.DTYPES) == {"auto", *DTYPES}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "a", "--tokens", "1,x"],
         "'--tokens': got '1,x', want token ids such as 1,2,3"),
        (("generate", "x", "--tokens", "1_0"),
         "'--tokens': got '1_0', want token ids such as 1,2,3"),
        (("generate", "x", "--tokens", "1,\u0663"),
         "'--tokens': got '1,\u0663', want token ids such as 1,2,3"),
        (("generate", "x", "--logit-bias", "1_0:2"),
         "'--logit-bias': got '1_0:2', want ID:VALUE such as 42:-1.5"),
        (("generate", "x", "--temperature", "1_0"), "'--temperature': got '1_0', want a number"),
        (("generate", "x", "--max-tokens", "1_0"),
         "'--max-tokens': got '1_0', want a whole number"),
        (["generate", "a", "--tokens", "1x" * 3000],
         f"'--tokens': got '{'1x' * 20}'..., want token ids such as 1,2,3"),
        (["generate", "a", "--prompt", "p", "--stop-token-ids", "x"],
         "'--stop-token-ids': got 'x', want token ids such as 1,2,3"),
        (["generate", "a", "--prompt", "p", "--logit-bias", "5=1"],
         "'--logit-bias': got '5=1', want ID:VALUE such as 42:-1.5"),
        (["generate", "a"], "no prompt given: want --prompt, --tokens or --prompt-file"),
        (["generate", "a", "--prompt", "p", "--system", "s"], "'--system': is for --chat only"),
        (["generate", "a", "--prompt", "p", "--tokens", "1", "--chat"],
         "'--tokens': got --chat too, and no chat template takes token ids"),
        (["generate", "a", "--prompt", "p", "--threads", "0"],
         "'--threads': got '0', want a whole number from 1 to 1024"),
        (["generate", "a", "--prompt", "p", "--seed", "x"],
         "'--seed': got 'x', want a whole number"),
        (["generate", "a", "--prompt", "p", "--top-k", "1" * 5000],
         f"'--top-k': got '{'1' * 40}'..., want a whole number"),
        (["generate", "a", "--prompt", "p", "--top-p", "x"], "'--top-p': got 'x', want a number"),
        (["generate", "", "--prompt", "p"], "'artifact': got '', want a path"),
        (["generate", "a", "--prompt-file", ""], "'--prompt-file': got '', want a path"),
    ],
)  # fmt: skip
def test_usage_errors(call: Call, arguments: list[str], sentence: str) -> None:
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    lead = "error: Invalid value for " if sentence.startswith("'") else "error: Invalid value: "
    said = done.err.replace("'ARTIFACT'", "'artifact'")  # as releases of typer spell it
    assert said == f"{lead}{sentence}; see tilewright generate --help\n"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [([], "tilewright"), (["fly"], "tilewright"), (["generate"], "tilewright generate"),
     (["generate", "a", "--top-q", "1"], "tilewright generate"),
     (["tune", "--fly"], "tilewright tune"), (["compile", "--fly"], "tilewright compile"),
     (["--loud"], "tilewright")],
)  # fmt: skip
def test_usage_errors_of_the_parser_say_where_help_is(
    call: Call, arguments: list[str], place: str
) -> None:
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.endswith(f"; see {place} --help\n")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("value", ["", "x", "-2", "140.0", "1" * 10])
def test_replay_tokens_are_a_number_or_the_default(call: Call, value: str, tmp_path: Path) -> None:
    done = call("compile", "m", "-o", tmp_path / "out", "--replay-tokens", value)
    assert done.code == 2
    assert done.err == (
        f"error: Invalid value for '--replay-tokens': got {value!r}, want an even number of "
        "tokens, or default; see tilewright compile --help\n"
    )


VALUES = {
    ("--mode", "slow"): "'--mode': got 'slow', want deterministic or fast",
    ("--dtype", "0.5x"): "'--dtype': got '0.5x', want auto or float32 or bfloat16",
    ("--jobs", "0"): "'--jobs' / '-j': got '0', want a whole number from 1 to 1024",
    ("-j", "x"): "'--jobs' / '-j': got 'x', want a whole number from 1 to 1024",
    ("--max-context", "0"): "'--max-context': got '0', want a whole number of at least 1",
    ("--max-tokens-per-step", "1.5"):
        "'--max-tokens-per-step': got '1.5', want a whole number of at least 1",
    ("-o", ""): "'--output' / '-o': got '', want a path",
    ("--config", ""): "'--config': got '', want a name or a path",
}  # fmt: skip


@pytest.mark.parametrize("given", VALUES, ids=" ".join)
def test_bad_values_are_usage_errors_that_say_what_was_got(
    call: Call, given: tuple[str, str], tmp_path: Path
) -> None:
    done = call("compile", "m", "-o", tmp_path / "out", *given)
    assert (done.code, done.out) == (2, "")
    want = f"error: Invalid value for {VALUES[given]}; see tilewright compile --help\n"
    assert done.err == want
    assert not any(tmp_path.iterdir())


def test_an_empty_model_is_not_the_current_folder(call: Call, tmp_path: Path) -> None:
    for command, *rest in (("compile", "-o", tmp_path / "out"), ("tune",)):
        done = call(command, "", *rest)
        assert done.code == 2
        assert "got '', want a name or a path; see tilewright" in done.err
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


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["generate", "--prompt", "x"], 1), (["generate"], 2), (["check"], 1), (["bench"], 1),
     (["inspect"], 1), (["inspect", "--stage", "x"], 2), (["compile", "-o", "out"], 1),
     (["compile"], 2), (["tune"], 1), (["tune", "--jobs", "0"], 2), (["fly"], 2)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_with_json_a_failure_is_json_on_stdout_too(
    call: Call, arguments: list[str], code: int, tmp_path: Path
) -> None:
    done = call(arguments[0], tmp_path / "nowhere", *arguments[1:], "--json")
    assert done.code == code
    (line,) = done.lines
    assert done.err == f"error: {line['error']}\n"


def test_the_module_runs_as_a_program() -> None:
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run([sys.executable, "-m", "tilewright.tools.cli", "fly"], text=True,
                          env={"PYTHONPATH": str(root)}, capture_output=True,
                          check=False)  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: No such command 'fly'")


def test_compile_model_is_the_same_command() -> None:
    run = "from tilewright.tools.cli import compile_model as m; m()"
    line: list[Any] = [sys.executable, "-c", run, "--mode", "x", "m", "-o", "o"]
    root = Path(__file__).parents[2] / "src"
    done = subprocess.run(line, capture_output=True, text=True, env={"PYTHONPATH": str(root)},
                          check=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: Invalid value for '--mode'")
