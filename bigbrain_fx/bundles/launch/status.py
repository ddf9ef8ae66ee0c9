"""Progress of a run: status.json in its logs folder, as text, and for Prometheus.

The run writes the status; any process may read it, now or later. The module does not know the
processes' insides.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from bigbrain_fx.bundles.launch.options import StepLine
from bigbrain_fx.bundles.launch.ports import require_free
from bigbrain_fx.errors import InputError
from bigbrain_fx.supervisor import Event

FILE = "status.json"
RUNS = "runs"  # a folder of a bundle, with one folder of logs for each of its last runs
TEMPORARY = "bigbrain-fx-run-"  # how the names of others begin, among temporary files
FORMAT = 1
EVERY_S = 0.5  # between two writes while nothing but steps happens
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Attributes:
        bundle, pid, host: what runs, and the process that watches over it.
        state: running, finished, stopped or failed.
        steps_done, steps: the number of finished steps, and how many were asked for (None: all).
        loss, step_s, rows_per_s: of the last step.
        devices: the process of each, by name.
        restarts: processes that died.
        commits: the folder that they go to, if there is one.
        started, updated: seconds since 1970.
    """

    bundle: str
    pid: int
    logs: str
    rows: int
    steps: int | None = None
    commits: str | None = None
    state: str = "running"
    steps_done: int = 0
    loss: float | None = None
    step_s: float | None = None
    devices: dict[str, int | None] = field(default_factory=dict)
    restarts: int = 0
    started: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    host: str = field(default_factory=platform.node)
    format: int = FORMAT

    @property
    def rows_per_s(self) -> float | None:
        """Rows a second in the last step."""
        return self.rows / self.step_s if self.step_s else None

    @property
    def is_alone(self) -> bool:
        """Whether it says that it runs, and its process is gone: killed, or the host was."""
        return self.state == "running" and not _is_there(self.pid)

    @property
    def has_ended(self) -> bool:
        """Whether it says so, or its process on this host is gone; another host's may go on."""
        return self.state != "running" or (self.is_alone and self.host == platform.node())

    @property
    def last_commit(self) -> int | None:
        """The step of the newest commit that can be seen from here."""
        from bigbrain_fx.runtime import CheckpointStore, CommitError

        if self.commits is None:
            return None
        with suppress(OSError, CommitError):
            records = CheckpointStore(Path(self.commits)).records()
            return records[0].step if records else None
        return None


class StatusKeeper:
    """Write the status of a run to its logs folder; a full disk ends nothing."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.written_s = 0.0
        self._write()

    def begin(self, step: int) -> None:
        """The run goes on from a commit."""
        self._change(steps_done=step)
        self._write()

    def hear_step(self, line: StepLine) -> None:
        """A step is done."""
        done = {"steps_done": line.step + 1, "loss": line.loss, "step_s": line.step_s}
        self._change(**done)
        if time.monotonic() - self.written_s > EVERY_S:
            self._write()

    def hear_event(self, event: Event) -> None:
        """Something has happened to a process."""
        name, what = str(event.get("device", "")), event["event"]
        if what in ("started", "assigned"):
            self._change(devices={**self.status.devices, name: event.get("pid")})
        elif what == "died":
            self._change(restarts=self.status.restarts + 1)
        self._write()

    def end(self, state: str) -> None:
        """The run has ended."""
        self._change(state=state)
        self._write()

    def _change(self, **facts: Any) -> None:  # noqa: ANN401  # fields of Status
        self.status = replace(self.status, updated=time.time(), **facts)

    def _write(self) -> None:
        self.written_s = time.monotonic()
        file = Path(self.status.logs) / FILE
        beside = file.with_name(f".{FILE}.{os.getpid()}")
        text = json.dumps(asdict(self.status)) + "\n"
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            with suppress(OSError), file.open("r+", encoding="utf-8") as old:
                old.write(text)  # a disk that is full takes what is no longer
                old.truncate()


def read_status(run: str | Path) -> Status:
    """Read the status of a run: of its logs folder, or a bundle's newest run without --logs.

    Raises:
        InputError: there is none.
    """
    folder = Path(run)
    if (folder / "plan.json").is_file():
        return _newest(folder)
    if not folder.exists():
        raise InputError(
            f"there is no file or folder {run}",
            code="BX3070",
            help="give the folder that `run` names at its end (or --logs), or the bundle",
        )
    return _read(folder / FILE if folder.is_dir() else folder)


def _read(file: Path) -> Status:
    from pydantic import TypeAdapter, ValidationError

    try:
        text = file.read_bytes()
        Status(**json.loads(text))  # it has no other fields
        return TypeAdapter(Status).validate_json(text, strict=True)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else error
        raise InputError(
            f"there is no status of a run in {file.parent}: {why}",
            code="BX3071",
            help="give the folder that `run` names at its end (or --logs), or the bundle",
        ) from error


def _newest(bundle: Path) -> Status:
    """Return the newest run of a bundle among the logs that are where logs are by default."""
    found = []
    files = Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*/{FILE}")
    for file in (*(bundle / RUNS).glob(f"*/{FILE}"), *files):
        with suppress(InputError):
            status = _read(file)
            if Path(status.bundle) == bundle.resolve():
                found.append(status)
    if not found:
        raise InputError(
            f"no run of {bundle} without --logs has left logs in {bundle / RUNS}",
            code="BX3072",
            help="give the folder that --logs had",
        )
    return max(found, key=lambda status: status.started)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


# --------------------------------------------------------------------------- Prometheus


def prometheus(status: Status) -> str:
    """Return a status in Prometheus' text format, version 0.0.4."""
    running = status.state == "running" and not status.is_alone
    numbers: dict[str, tuple[str, str, float | int | None]] = {
        "steps_total": ("counter", "finished training steps", status.steps_done),
        "steps_wanted": ("gauge", "steps that were asked for", status.steps),
        "loss": ("gauge", "loss of the last step", status.loss),
        "step_seconds": ("gauge", "seconds of the last step", status.step_s),
        "rows_per_second": ("gauge", "rows a second in the last step", status.rows_per_s),
        "deaths_total": ("counter", "processes of devices that died", status.restarts),
        "last_commit_step": ("gauge", "step of the newest checkpoint", status.last_commit),
        "running": ("gauge", "1 while the run goes on", int(running)),
        "updated_seconds": ("gauge", "when this was last true", status.updated),
    }
    lines = []
    for name, (kind, what, value) in numbers.items():
        if value is not None:
            full = f"bigbrain_fx_{name}"
            lines += [f"# HELP {full} {what}", f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"


@contextmanager
def metrics_at(port: int | None, status: Callable[[], Status]) -> Iterator[None]:
    """Answer Prometheus on a port of the loopback interface, as long as the context is open.

    Raises:
        InputError: the port is taken.
    """
    if port is None:
        yield
        return
    require_free(port)
    server = ThreadingHTTPServer((LOOPBACK, port), _handler(status))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True, name="metrics")
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(status: Callable[[], Status]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0  # who connects and says nothing holds a thread for so long

        def do_GET(self) -> None:  # http.server's name
            try:
                text = prometheus(status()).encode()
            except InputError as error:
                self.send_error(503, f"{error.what} [{error.code}]")
                return
            self.send_response(200 if self.path in ("/", "/metrics") else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Say nothing of who asked."""

    return Handler
