"""Command: status; and what `run --background` does: start itself again, on its own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bigbrain_fx.cli.group import cli
from bigbrain_fx.cli.options import PATH, json_option, option
from bigbrain_fx.cli.output import emit
from bigbrain_fx.errors import InputError, os_error_as

if TYPE_CHECKING:
    from bigbrain_fx.bundles import Status

FLAG = "--background"
LOG = "run.log"
STARTED_S, LOOK_S = 60.0, 0.05
_PACKAGES = Path(__file__).resolve().parents[2]


def start_aside(bundle: Path, logs: Path | None, as_json: bool) -> None:
    """Start the same command in a session of its own, its lines in a file of its logs folder.

    It goes on when the terminal is closed; SIGTERM ends it after its step, as any run.
    """
    from bigbrain_fx.bundles import run_folder

    with os_error_as("the run cannot be started", code="BX3535", help="give --logs FOLDER"):
        folder = (logs or run_folder(bundle)).absolute()
    words: list[str] = click.get_current_context().find_root().obj
    again = [word for word in words if word != FLAG]
    given = [] if logs else ["--logs", str(folder)]
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("BIGBRAIN_FX_RUN_BACKGROUND", None)
    with os_error_as("the run cannot be started", code="BX3500", help="give --logs FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG).open("ab") as log:
            begun = log.tell()
            process = subprocess.Popen(
                # -P: a file of the user's here that is called like a module of Python's is not one
                [sys.executable, "-P", "-m", "bigbrain_fx", *again, *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
    _require_started(process, folder, begun)
    process.returncode = 0  # it outlives us: nobody here waits for it
    emit(
        as_json,
        {"pid": process.pid, "logs": str(folder)},
        f"process {process.pid} runs {bundle}; its output is in {folder / LOG}\n"
        f"progress: bigbrain-fx status {folder}; end it after its step: kill {process.pid}",
    )


def _require_started(process: subprocess.Popen[bytes], folder: Path, begun: int) -> None:
    """Wait until the run has started a device's process; end as it does if it ends before.

    A host that is so busy that it takes longer is not waited for.
    """
    from bigbrain_fx.bundles import read_status

    until = time.monotonic() + STARTED_S
    while time.monotonic() < until:
        code = process.poll()
        if code:
            with (folder / LOG).open("rb") as log:
                log.seek(begun)
                click.echo(log.read().decode(errors="replace"), err=True, nl=False)
            sys.exit(code if code > 0 else 1)
        with suppress(InputError):
            found = read_status(folder)
            if found.pid == process.pid and found.devices:
                return
        if code is not None:
            return
        time.sleep(LOOK_S)


@cli.command(short_help="Progress of a run: steps, loss, devices, restarts, last checkpoint.")
@click.argument("run", type=PATH)
@option(
    "--metrics",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Go on, and answer Prometheus on this port of the loopback interface until Ctrl-C.",
)
@json_option
def status(run: Path, metrics: int | None, as_json: bool) -> None:
    """Show the progress of RUN: its logs folder, or a bundle, for the newest run without --logs.

    It reads files only: the run is not disturbed, and may have ended.
    """
    from bigbrain_fx.bundles import metrics_at, read_status

    found = read_status(run)
    if metrics is not None:
        with metrics_at(metrics, lambda: read_status(run)):
            click.echo(f"http://127.0.0.1:{metrics}/metrics", err=True)
            threading.Event().wait()
        return
    more = {"rows_per_s": found.rows_per_s, "last_commit": found.last_commit}
    facts = {**dataclasses.asdict(found), **more, "state": _state(found)}
    emit(as_json, facts, "\n".join(_lines(found)))


_WORKERS = {"spare": "standby worker"}


def _state(found: Status) -> str:
    return "killed" if found.is_alone else found.state


def _lines(found: Status) -> list[str]:
    wanted = f" of {found.steps}" if found.steps else ""
    ago_s = max(0.0, time.time() - found.updated)  # a clock may be set back
    lines = [f"{found.bundle}: {_state(found)}, {found.steps_done}{wanted} steps done"]
    if found.step_s and found.loss is not None and found.rows_per_s:
        pace = f"{found.step_s:.4f} s a step, {found.rows_per_s:.1f} rows/s"
        lines.append(f"loss {found.loss:.6f}, {pace}; {ago_s:.0f} s ago")
    runs = _state(found) == "running"  # else its numbers are other processes' by now
    for name, pid in found.devices.items() if runs else ():
        lines.append(f"{_WORKERS.get(name, name)}: process {pid}")
    lines.append(f"processes replaced: {found.restarts}")
    if found.commits:
        step = found.last_commit
        newest = "none yet" if step is None else f"step {step}"
        lines.append(f"last checkpoint: {newest}, in {found.commits}")
    lines.append(f"process {found.pid}, logs in {found.logs}" if runs else f"logs in {found.logs}")
    log = Path(found.logs) / LOG
    if found.state == "failed" and log.is_file():
        lines.append(f"see {log}")
    return lines
