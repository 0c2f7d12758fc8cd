"""A bar over the steps of a command that takes a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Steps:
    """A bar over the steps of a command, and under way what the present step does."""

    def __init__(self, progress: Progress, count: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=count)
        self._begun = 0

    def begin(self, title: str) -> None:
        """Another step; the one before is over."""
        self._progress.update(self._task, description=title, completed=self._begun)
        self._begun += 1

    def tell(self, line: str) -> None:
        """What the step does now."""
        self._progress.update(self._task, description=line)


@contextmanager
def steps_bar(count: int) -> Iterator[Steps]:
    """A bar over `count` steps, full in the end."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        steps = Steps(progress, count)
        yield steps
        steps.begin("")
