"""`python launch.py` of a bundle: run all its devices on this host and keep them going."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import parser_of, require_parts
from .console import AnyConsole, console_of, hold_streams
from .events import Event, EventLog, status
from .host import Supervisor
from .job import FailedError, Job, OnStep
from .judging import BAD_INPUT, Death, Failure
from .limits import THREADS, headline, of_abort, require_limit, with_remedy
from .policies import HAS_MORE
from .processes import CALLED_IN, popen
from .stopping import stopped_by_sigterm

if TYPE_CHECKING:
    from .multi_host import Head

INTERRUPTED = 130  # exit code; as a shell's
TAIL_LINES, TAIL_BYTES = 12, 1 << 16


def main(
    folder: Path,
    devices: Sequence[str],
    program: str,
    hosts: Sequence[str] = (),
    *,
    replicas: bool = False,
) -> None:
    """Run a bundle; end with exit code 0 when it has finished or was asked to stop (SIGTERM).

    With several hosts, the first one's supervisor decides (`--listen`), and the others join it.

    Args:
        folder: of the bundle.
        devices: their names, by rank.
        program: what each process runs, in the folder; it gets all words that are not ours.
        hosts: of each device, where there are several.
        replicas: the plan has several.
    """
    hold_streams()
    parser = parser_of(program)
    if HAS_MORE:
        from .more_arguments import add_more, head_of, more_of, require_more  # some bundles have it

        add_more(parser)
    options, words = parser.parse_known_args()
    _require(parser, words)
    if HAS_MORE:
        require_more(parser, options, hosts)
    logs = _logs(parser, options)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", CALLED_IN: _called_in()}
    head: Head | None = None
    more: dict[str, Any] = {}
    if HAS_MORE:
        where = list(zip(devices, hosts, strict=False))
        head, more = head_of(parser, options, environment, logs, folder, where), more_of(options)
    job = Job(
        devices=tuple(devices),
        words=(sys.executable, program, *words),
        folder=folder,
        environment=environment | (head.environment() if head else {}),
        logs=logs,
        spares=options.spares,
        restarts=options.restarts,
        every=options.snapshot_every,
        hosts=tuple(hosts) if head else (),
        elastic=options.elastic,
        replicas=replicas,
        snapshots=options.snapshots,
        **more,
    )
    events = Path(options.events) if options.events else None
    code = _run(job, head, events, options.json)
    if head is not None:
        head.close(code)
    sys.exit(code)


def _logs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Path:
    """Return the folder of logs, which is there then."""
    try:
        logs = Path(options.logs or tempfile.mkdtemp(prefix="logs-")).resolve()
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.exit(BAD_INPUT, f"error[BX6903]: no logs can be kept: {with_remedy(error)}\n")
    return logs


def _called_in() -> str:
    """Return the folder of the call; processes work in the bundle's."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # removed meanwhile; full paths are what they are
        return ""


def _require(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse other systems, and words that are options of bundles that have more."""
    if sys.platform != "linux":
        parser.exit(
            BAD_INPUT, "error[BX6901]: this needs Linux; elsewhere start it with torchrun\n"
        )
    require_parts(parser, {word.partition("=")[0] for word in words})


def _run(job: Job, head: Head | None, events: Path | None, as_json: bool) -> int:
    """Run a job and tell of it; nobody who reads that, or does not, changes the run."""
    try:
        out, err = console_of(sys.stdout), console_of(sys.stderr)
    except RuntimeError as error:  # each has a thread
        sys.stderr.write(f"error[BX6905]: {error}: {THREADS}\n")
        return 1
    try:
        return _run_telling(job, head, events, as_json, out, err)
    finally:
        unread = out.close()
        if unread:
            err.say(f"{unread} lines of steps were not written: nobody read them")
        err.close()


def _run_telling(
    job: Job,
    head: Head | None,
    events: Path | None,
    as_json: bool,
    out: AnyConsole,
    err: AnyConsole,
) -> int:
    def tell(entry: Event) -> None:
        line = status(entry)
        if line is not None:
            err.say(line)

    log: EventLog | None = None
    try:
        log = EventLog(events, tell)
        start = popen if head is None else head.start()
        supervisor = Supervisor(job, start, _printer(as_json, out), log)
        if head is not None:
            head.pass_on_stop(supervisor.ask_to_stop)
        with stopped_by_sigterm(supervisor):
            outcome = supervisor.run()
    except FailedError as error:
        said = tail(error.death) or tuple(filter(None, (error.death.text,)))
        help_ = of_abort(error.death.code, said)
        more = () if help_ is None else (f"help: {help_}",)
        err.say("\n  ".join((headline(error), f"log: {error.death.log}", *said, *more)))
        return BAD_INPUT if error.death.code == BAD_INPUT else 1
    except KeyboardInterrupt:
        err.say("interrupted; all processes are ended")
        return INTERRUPTED
    except (OSError, RuntimeError) as error:
        require_limit(error)
        err.say(f"error[BX6906]: {with_remedy(error)}")
        return BAD_INPUT if log is None else 1
    finally:
        if log is not None:
            log.close()
    if outcome.stopped_at is not None:
        err.say(f"stopped before step {outcome.stopped_at}, as asked")
    return 0


def tail(death: Death | Failure) -> tuple[str, ...]:
    """Return the last lines that a dead process wrote."""
    return last_lines(Path(death.log))


def last_lines(log: Path) -> tuple[str, ...]:
    """Return the last lines of a log, which may be of any length, or gone."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    except OSError:
        return ()


def _printer(as_json: bool, out: AnyConsole) -> OnStep:
    def show(step: int, loss: float, step_s: float) -> None:
        line = json.dumps({"step": step, "loss": loss, "step_s": step_s})
        out.say(line if as_json else f"step {step:5d}   loss {loss:.6f}   {step_s:.3f} s")

    return show
