"""The README says what is true: its example runs, its tables list what the code has."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import string
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from support.tiny import quick_target, tiny
from support.toolchain import QuickToolchain
from tilewright import runtime
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.plan import first_candidate
from tilewright.models.registry import FAMILIES
from tilewright.runtime import SamplingParams
from tilewright.tools import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
VOCABULARY = f"?{string.ascii_letters}{string.digits} .<>"
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"


def section(title: str) -> str:
    """The text under a heading of the README."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(title: str) -> list[str]:
    """The code in the first column of a section's table."""
    return re.findall(r"^\| `([^`]+)`", section(title), re.MULTILINE)


def second_column(title: str) -> list[str]:
    rows = re.findall(r"^\| `[^`]+` \| ([^|]+) \|", section(title), re.MULTILINE)
    return [text.strip("` ") for text in rows]


def letters() -> Tokenizer:
    """A tokenizer with one token per character."""
    ids = {c: i for i, c in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def compile_talkative(output: Path, cache: Path) -> None:
    """Compile a tiny model that has a tokenizer and a chat template."""
    model, chip = tiny(), quick_target()
    record = dataclasses.replace(model.record(), chat_template=TEMPLATE, tokenizer="tokenizer.json")
    job = CompileJob(
        graph=model.graph,
        model=record,
        weights=model.weights,
        target=chip,
        toolchain=QuickToolchain(chip, cache),
        config=model.settings,
        choose=first_candidate(chip),
        flags=Flags(cache=cache),
        files={"tokenizer.json": letters().to_str().encode()},
    )
    compile_graph(job, output, lambda *_: None)


@pytest.mark.cpu
def test_python_example_runs(
    tmp_path: Path,
    kernel_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    (path,) = re.findall(r'runtime\.load\("([^"]+)"\)', code)
    compile_talkative(tmp_path / path, kernel_cache)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert getattr(names["logits"], "shape") == (3, len(VOCABULARY))
    assert "length" in capsys.readouterr().out


def test_flags_are_those_of_the_code() -> None:
    fields = dataclasses.fields(Flags)
    assert first_column("Flags") == [f"TILEWRIGHT_{f.name.upper()}" for f in fields]
    shown = ["none" if f.default is None else str(f.default) for f in fields]
    assert second_column("Flags") == shown


def test_sampling_parameters_are_those_of_the_code() -> None:
    shown = {"none": (), "drawn": None, "false": False}
    given = dict(zip(first_column("Sampling parameters"), second_column("Sampling parameters")))
    for field in dataclasses.fields(SamplingParams):
        text = given.pop(field.name)
        accepted = (str(field.default), "none" if field.default is None else "")
        assert text in accepted or shown.get(text, text) == field.default, field.name
    assert not given


def test_calls_are_those_of_the_code() -> None:
    """Every call of the table has its parameters, with the defaults that it has."""
    calls = first_column("Runtime API")
    assert {call.split("(")[0] for call in calls} >= {
        "runtime.load", "engine.submit", "engine.step", "engine.output", "engine.abort"
    }  # fmt: skip
    for text in calls:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute), text
        owner = {"runtime": runtime, "engine": runtime.Engine}[ast.unparse(call.func.value)]
        parameters = dict(inspect.signature(getattr(owner, call.func.attr)).parameters)
        parameters.pop("self", None)
        named = [ast.unparse(argument) for argument in call.args]
        defaults = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        assert set(named) | set(defaults) <= set(parameters), text
        for name, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty:
                assert name in named, text
            elif name in defaults:
                assert defaults[name] == parameter.default, text


def test_what_submit_gives_is_listed() -> None:
    (row,) = re.findall(r"gives a `Submitted` with (.*?), which have `is_finished`", README)
    assert re.findall(r"`(\w+)`", row) == [f.name for f in dataclasses.fields(runtime.Submitted)]


def test_commands_are_those_of_the_code() -> None:
    named = [line.split()[:2] for line in first_column("Command line")]
    listed = {words[1] for words in named if words[0] == "tilewright"} | {"compile"}
    assert listed == {command.name for command in cli.app.registered_commands}


def test_architectures_are_those_of_the_code() -> None:
    assert sorted(re.findall(r"`(\w+ForCausalLM)`", section("Models and formats"))) == sorted(
        FAMILIES
    )


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        anchors = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if heading else []
        slugs = [re.sub(r"[^\w -]", "", a).lower().replace(" ", "-") for a in anchors]
        assert not heading or heading in slugs, target


def test_quoted_tests_exist() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
