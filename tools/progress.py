"""Progress on stderr: bars where it is a terminal, nothing where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LABELS = {"lower": "lower", "compile": "compile kernels", "pack": "pack weights", "tune": "tune"}


class StageBars:
    """One bar per stage and one for the whole; call it with (stage, done, total)."""

    def __init__(self, *, visible: bool = True, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console, disable=not (visible and console.is_terminal),
        )  # fmt: skip
        self._tasks = {"": self._bars.add_task("total", total=None)}

    def __enter__(self) -> StageBars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        task = self._bars.tasks[0]
        self._bars.update(self._tasks[""], total=max(task.completed, 1), completed=task.completed)
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            label = LABELS.get(stage, stage)
            self._tasks[stage] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
        stages = [t for t in self._bars.tasks if t.id != self._tasks[""]]
        finished = sum(t.finished for t in stages)
        self._bars.update(self._tasks[""], completed=finished)


def result_console() -> Console:
    """Return the console of results: stdout, wide where it is no terminal that would wrap."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, width=200, soft_wrap=True)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a spinner on stderr while something without steps goes on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
