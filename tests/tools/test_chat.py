"""A conversation: history, an answer that is stopped, and one that is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tilewright.runtime import RequestError, SamplingParams, StreamEvent
from tilewright.tools.commands import chat
from tilewright.tools.commands.options import SAMPLING

from .conftest import Call


@dataclass
class FakeModel:
    max_context: int = 64
    vocab_size: int = 16


@dataclass
class FakeEngine:
    """Answers with three pieces; Ctrl-C comes in the middle where `stops` says so."""

    stops: set[int] = field(default_factory=set)
    prompts: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    model: FakeModel = field(default_factory=FakeModel)
    tokenizer: None = None
    numerics_digest: str = "0123456789abcdef"
    has_template: bool = True

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        if not self.has_template:
            raise RequestError("chat: model 'x' has no chat template: want a plain prompt")
        self.prompts.append(list(messages))
        if messages[-1]["content"] == "refuse":
            raise RequestError("chat: refused")
        return list(messages)

    def stream(self, prompt: object, params: SamplingParams) -> Iterator[StreamEvent]:
        self.params.append(params)
        for i in range(3):
            if i == 2 and len(self.params) in self.stops:
                raise KeyboardInterrupt
            yield StreamEvent(0, f"{i}", (i,))


@pytest.fixture(autouse=True)
def one_token_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.runtime.prompt.encode", lambda prompt, *rest: prompt)


def talk(engine: FakeEngine, *lines: str, system: str | None = None) -> None:
    chat.Talk(engine, {"temperature": 0.5}, system).run(iter(lines))  # type: ignore[arg-type]


def test_history_grows_and_is_reset(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    talk(engine, "a", "b", "/reset", "c", "/exit", "d", system="s")
    first = {"role": "system", "content": "s"}
    said = [[m["content"] for m in prompt] for prompt in engine.prompts]
    assert said == [["s", "a"], ["s", "a", "012", "b"], ["s", "c"]]
    assert all(prompt[0] == first for prompt in engine.prompts)
    assert capsys.readouterr().out == "012\n" * 3


def test_ctrl_c_ends_the_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(stops={1})
    talk(engine, "a", "b")
    assert [m["content"] for m in engine.prompts[1]] == ["a", "01", "b"]
    assert capsys.readouterr().out == "01\n012\n"


def test_a_refused_line_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    talk(engine, "refuse", "b")
    assert [m["content"] for m in engine.prompts[1]] == ["b"]
    assert "error: chat: refused\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1.0), ("top_p", 2.0), ("allowed_token_ids", [16])]
)
def test_settings_are_refused_before_anything_is_said(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"sampling parameter '{name}': "):
        chat.Talk(FakeEngine(), {name: value}, None).check()  # type: ignore[arg-type]


def test_a_model_without_template_is_refused_before_anything_is_said() -> None:
    engine = FakeEngine(has_template=False)
    with pytest.raises(RequestError, match="has no chat template"):
        chat.Talk(engine, {"max_tokens": 1000}, None).check()  # type: ignore[arg-type]


def test_answers_fit_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(model=FakeModel(max_context=4))
    talk(engine, "a", "b")
    assert [p.max_tokens for p in engine.params] == [3, 1]


@pytest.mark.cpu
def test_a_pipe_with_a_line_that_is_refused_fails_at_the_end(
    call: Call, artifact: Path
) -> None:
    few = ("--max-tokens", 2, "--seed", 1)
    good = call("chat", artifact, *few, given="a\n/reset\nb\n")
    assert (good.code, len(good.out.splitlines())) == (0, 2)
    long = call("chat", artifact, *few, given="a\n/reset\n" + "x" * 200 + "\n/reset\nb\n")
    assert (long.code, long.out) == (1, good.out)
    assert "error: prompt: is longer than the context: " in long.err


def test_every_answer_tells_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    talk(engine, "a", "b")
    told = re.findall(r", seed (\d+), numerics 0123456789ab\n", capsys.readouterr().err)
    assert told == [str(p.seed) for p in engine.params] and told[0] != told[1]


def test_chat_has_the_sampling_options_of_one_answer() -> None:
    """A conversation prints one answer's text: no samples beside it, and no log-probabilities."""
    given = set(inspect.signature(chat.chat).parameters)
    assert set(SAMPLING) - given == {"n", "logprobs", "prompt_logprobs"}


def test_ctrl_c_at_the_prompt_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: list[Any] = ["a", KeyboardInterrupt(), "b", EOFError()]

    def read(prompt: str) -> str:
        item = typed.pop(0)
        if isinstance(item, BaseException):
            raise item
        return str(item)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert list(chat._lines()) == ["a", "b"]
    assert capsys.readouterr().err == "\n(/exit or Ctrl-D to leave)\n"
