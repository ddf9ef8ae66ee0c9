"""Progress of what takes over a second: on stderr, moving on a terminal only. Knows no commands."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from bigbrain_fx.cli.output import json_line

if TYPE_CHECKING:
    from rich.console import Console

    from bigbrain_fx.bundles import Line

FEW_STEPS = 20  # each has a line of its own
ONE_IN = 10  # of more


def _progress_console() -> Console:
    from rich.console import Console

    class Stderr(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True  # who looked on is gone: what is under way goes on

    return Stderr(stderr=True, highlight=False)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show that something is going on, on a terminal only; give a function that says how far."""
    if not sys.stderr.isatty():
        yield lambda said: None
        return
    from rich.markup import escape

    with _progress_console().status(escape(what)) as status:
        yield lambda said: status.update(escape(f"{what}: {said}"))


@contextmanager
def stepping(
    steps: int | None, as_json: bool, every: int | None = None
) -> Iterator[Callable[[Line], None]]:
    """Give a function that shows steps or batches: JSON lines, or plain lines and a progress bar.

    It shows each `every`-th line, the first and the last. Without `every` it shows all JSON lines,
    all lines of few steps, and one in ten of more than `FEW_STEPS`.
    """
    if as_json:
        show = _thinned(lambda line: click.echo(json_line(dataclasses.asdict(line))), every, steps)
        yield show
        return
    every = every or (ONE_IN if steps is not None and steps > FEW_STEPS else 1)
    if not sys.stderr.isatty():
        yield _thinned(lambda line: click.echo(_line_text(line)), every, steps)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    text = TextColumn("{task.fields[said]}")
    with Progress(*columns, text, console=_progress_console(), transient=True) as progress:
        say = progress.console.print if sys.stdout.isatty() else click.echo
        printed = _thinned(lambda line: say(_line_text(line)), every, steps)
        task = progress.add_task("steps", total=steps, said="")

        def show(line: Line) -> None:
            printed(line)
            progress.update(task, advance=1, said=_pace_text(line))

        yield show


def _thinned(
    show: Callable[[Line], None], every: int | None, steps: int | None
) -> Callable[[Line], None]:
    from bigbrain_fx.bundles import StepLine

    shown = 0

    def thinned(line: Line) -> None:
        nonlocal shown
        number = line.step if isinstance(line, StepLine) else line.batch
        if not shown or number % (every or 1) == 0 or number + 1 == steps:
            shown += 1
            show(line)

    return thinned


def _line_text(line: Line) -> str:
    from bigbrain_fx.bundles import StepLine

    if isinstance(line, StepLine):
        return f"step {line.step:5d}   loss {line.loss:.6f}   {line.step_s:.3f} s"
    return f"batch {line.batch:5d}   {line.rows} rows   {line.batch_s:.3f} s"


def _pace_text(line: Line) -> str:
    from bigbrain_fx.bundles import StepLine

    if isinstance(line, StepLine):
        return f"loss {line.loss:.4f}   {line.step_s:.3f} s a step"
    return f"{line.rows} rows   {line.batch_s:.3f} s a batch"
