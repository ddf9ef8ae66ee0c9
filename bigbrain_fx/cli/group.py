"""The group of commands, and the entry point of the shell.

Each command calls one public function and prints its result.

Conventions: with --json stdout holds JSON alone, one object a line, and all else goes to stderr.
Exit codes are 0 ok, 1 internal, 2 bad input, 3 no feasible plan, 4 capture failed, 5 verification
failed, 130 stopped. Each command imports the packages that it needs: `--help` is quick.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

import click

from bigbrain_fx.cli.command import Command
from bigbrain_fx.core import VERSION
from bigbrain_fx.errors import BigBrainError, FormatWarning

EPILOG = """Every option can come from the environment: --micro-batches of any command from
BIGBRAIN_FX_MICRO_BATCHES, --steps of `run` from BIGBRAIN_FX_RUN_STEPS. Exit codes: 0 ok,
1 internal, 2 bad input, 3 no feasible plan, 4 capture failed, 5 verification failed."""

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "auto_envvar_prefix": "BIGBRAIN_FX",
    "show_default": True,
}


# In the order in which a newcomer needs them; `--help` lists the others below.
FIRST = ("init", "doctor", "estimate", "split", "verify", "run", "export")


class PrintError(Exception):
    """Report that stdout has a reader no more: click would end the process without a word."""


class _Group(click.Group):
    """The group; a reader that is gone is told as a full disk is."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands of a first split in their order, then the others."""
        others = [name for name in self.list_commands(ctx) if name not in FIRST]
        width = max(map(len, self.commands))
        for title, names in (("First commands, in order", FIRST), ("More commands", others)):
            with formatter.section(title):
                found = [(name, self.commands[name]) for name in names if name in self.commands]
                limit = formatter.width - 6 - width
                formatter.write_dl(
                    [(n.ljust(width), c.get_short_help_str(limit)) for n, c in found]
                )

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if _is_of_printing(error):
                raise PrintError(error.strerror or str(error)) from error
            raise


@click.group(cls=_Group, context_settings=_SETTINGS, epilog=EPILOG)
@click.version_option(VERSION, prog_name="bigbrain-fx")
@click.option(
    "--debug", is_flag=True, help="Show the traceback of an error (anywhere on the line)."
)
def cli(debug: bool) -> None:
    """Split a PyTorch model over the devices of a cluster: plain Python, a program per device."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors meant for the user become one message and an exit code."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from bigbrain_fx.supervisor import hold_streams

        hold_streams()
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given or os.environ.get("BIGBRAIN_FX_DEBUG", "0") not in ("", "0")
    words = [word for word in given if word != "--debug"]
    gc.set_threshold(200_000, 20, 100)  # graphs and plans are many small objects that stay
    try:
        with _terminable(), _notes():
            cli.main(words, prog_name="bigbrain-fx", standalone_mode=False, obj=words)
    except BigBrainError as error:
        _fail(error, debug, error.exit_code, error.headline)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except Exception as error:  # a fault of ours
        if isinstance(error, PrintError) or (isinstance(error, OSError) and _is_of_printing(error)):
            _leave_stdout()
            why = f"stdout cannot be written ({_reason(error)}); what it would have said is lost"
            _fail(error, debug, 1, f"error[BX3590]: {why}\n  help: let stdout go elsewhere")
        from bigbrain_fx.supervisor import remedy_of

        if (remedy := remedy_of(error)) is not None:
            _fail(error, debug, 1, f"error[BX3591]: {error}\n  help: {remedy}")
        text = f"error[BX3592]: internal error: {type(error).__name__}: {error}"
        _fail(
            error, debug, 1, f"{text}\n  help: run it again with --debug and report what it shows"
        )


def _fail(error: BaseException, debug: bool, code: int, text: str) -> None:
    if debug:
        traceback.print_exception(error)
    click.echo(text, err=True)
    sys.exit(code)


def _reason(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _is_of_printing(error: OSError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(
        (frame.name == "echo" and "click" in frame.filename)
        or (frame.name == "_write_buffer" and "rich" in frame.filename)
        for frame in frames
    )


def _leave_stdout() -> None:
    """Let what still waits to be printed go nowhere: at the end it would fail once more."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


@contextmanager
def all_is_done() -> Iterator[None]:
    """Print what something came to that is done, and well: a reader that is gone fails no run."""
    try:
        yield
    except BrokenPipeError:
        _leave_stdout()
        click.echo("what it came to was not written: nobody read it", err=True)


@contextmanager
def _notes() -> Iterator[None]:
    """Print a file's earlier format as a note, once a command; other warnings as they were."""
    show, noted = warnings.showwarning, set[str]()

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, FormatWarning):
            show(message, category, filename, lineno, file, line)
        elif str(message) not in noted:
            noted.add(str(message))
            click.echo(f"note: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", FormatWarning)
        warnings.showwarning = shown
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does: a run ends its processes before it goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
