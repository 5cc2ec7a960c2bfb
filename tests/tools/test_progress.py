"""Bars: drawn on terminals only, one per stage and one for the whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tilewright.tools.progress import StageBars, result_console, waiting


def drawn(*, terminal: bool, visible: bool = True) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=90, color_system=None)
    with StageBars(visible=visible, console=console) as bars:
        bars("compile", 0, 3)
        bars("compile", 3, 3)
        bars("pack", 1, 2)
    return text.getvalue()


def test_a_terminal_sees_every_stage() -> None:
    text = drawn(terminal=True)
    last = text[text.rindex("total") :]
    assert "compile kernels" in last and "3/3" in last and "pack weights" in last and "1/2" in last


@pytest.mark.parametrize(("terminal", "visible"), [(False, True), (True, False)])
def test_others_see_nothing(terminal: bool, visible: bool) -> None:
    assert drawn(terminal=terminal, visible=visible) == ""


def test_waiting_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("loading"):
        pass
    assert capsys.readouterr() == ("", "")


def test_results_are_not_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    result_console().print("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"
