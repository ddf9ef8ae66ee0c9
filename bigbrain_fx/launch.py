"""Run a bundle on this host, one process per device; or say what to type on every host.

This room knows processes, ports and log files. It knows nothing of graphs, and the processes it
starts know nothing of it: they run the bundle's own train.py, or infer.py. With `spares` given,
`supervisor` starts them and replaces those that die.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.supervisor import (
    Event,
    EventLog,
    FailedError,
    Job,
    Order,
    Rescue,
    Supervisor,
    stopped_by_sigterm,
)

POLL_S = 0.1
GRACE_S = 5.0
TAIL_LINES = 12
DEFAULT_STEPS = 10  # train.py's and infer.py's own
BAD_INPUT = 2  # exit code of a bundle's process whose data cannot be used
PEER_LOST = 75  # and of one that ended because another was gone
NOT_FINITE = 65  # and of one whose loss or gradients are not finite
MIB = 2**20


@dataclass(frozen=True)
class StepLine:
    """What one training step reported: loss is the mean over micro-batches, step_s wall seconds."""

    step: int
    loss: float
    step_s: float


@dataclass(frozen=True)
class BatchLine:
    """What one batch of inference reported: its rows, batch_s wall seconds."""

    batch: int
    rows: int
    batch_s: float


Line = StepLine | BatchLine


@dataclass(frozen=True)
class Run:
    """A finished run: steps of training, or batches of inference.

    `max_rss_bytes` is the largest resident memory of each device's process; `logs` is the folder of
    what each printed. `restarts` counts processes that were replaced; `stopped_at` is the step
    before which SIGTERM stopped the training, None if it finished.
    """

    steps: tuple[StepLine, ...]
    max_rss_bytes: dict[str, int]
    logs: Path
    batches: tuple[BatchLine, ...] = ()
    restarts: int = 0
    stopped_at: int | None = None


@dataclass(frozen=True)
class RunOptions:
    """How to run: see `bigbrain-fx run --help`.

    `steps` None: 10, or for inference all rows of `inputs`. `save` and `first_gradients` are for
    training, `inputs` and `outputs` for inference.

    `spares` not None: processes of a training that die are replaced, by one of so many that are
    kept warm, and the result is the same. `restarts` of them are allowed within ten minutes; a
    process without progress for `hang_s` is ended; `snapshot_every` steps lie between snapshots in
    memory (None: measured). What happens is appended to `events` as JSON lines. `log_mib` of sent
    messages are kept on each device; None: its share of half of the memory that is free.

    `on_nan`: at a loss or gradient that is not finite "stop" (the default), "skip" the update on
    all devices, or "ignore" it.

    `commits` is a folder on a disk to which the state is written every `commit_every` steps, at the
    start and at the end; with `resume` a training goes on from the last commit there.
    """

    steps: int | None = None
    seed: int | None = None
    port: int = 0
    deadline_s: float = 300.0
    save: Path | None = None
    first_gradients: Path | None = None
    threads: int | None = None
    logs: Path | None = None
    inputs: Path | None = None
    outputs: Path | None = None
    spares: int | None = None
    restarts: int = 20
    hang_s: float = 60.0
    snapshot_every: int | None = None
    events: Path | None = None
    commits: Path | None = None
    commit_every: int | None = None
    resume: bool = False
    log_mib: int | None = None
    on_nan: str | None = None


class Process(Protocol):
    """A started process of a device, as `subprocess.Popen` shows it."""

    @property
    def stdout(self) -> IO[str] | None:
        """What it prints, where that is read."""

    @property
    def returncode(self) -> int | None:
        """Its exit code once it has ended, negative for a signal."""

    def poll(self) -> int | None:
        """Look whether it has ended; return its exit code."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Command:
    """What to start for one device: words in a folder, with the whole environment.

    Attributes:
        log: takes what it writes to stderr, and to stdout unless `reports`.
        reports: its stdout is read by us.
    """

    device: str
    words: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    log: Path
    reports: bool


Spawn = Callable[[Command], Process]
"""How a device's process is started: here as a child of ours; tools start it in other places."""


class RunError(BigBrainError):
    """Report a device's process that failed: which, how, and the end of its log."""

    exit_code = 1


class DeviceLostError(RunError):
    """Report a run that ended because the processes of one device keep dying; others could go on.

    Attributes:
        device: its name.
    """

    device: str = ""


def run(
    bundle: str | Path,
    options: RunOptions | None = None,
    on_step: Callable[[StepLine], None] | None = None,
    on_batch: Callable[[BatchLine], None] | None = None,
    spawn: Spawn | None = None,
    on_event: Callable[[Event], None] | None = None,
    rescue: Rescue | None = None,
) -> Run:
    """Run a bundle on this host, training or inference, and wait for its end.

    `on_step` hears of each step of training, `on_batch` of each batch of inference, as it is done.
    `spawn` starts the processes in another way than as plain children; then none is replaced.
    `on_event` hears what happens to supervised processes: see `supervisor.EventLog`; `rescue` gets
    the newest snapshots in memory before a DeviceLostError.

    Every process is ended, whatever happens, before this returns.

    Raises:
        InputError: no bundle, the port is taken, a batch is not like the one that was traced, or
            an option is for the other kind of bundle.
        RunError: a process failed, and was not or could not be replaced; the others are stopped.
        DeviceLostError: it only died, so that other devices could go on: see `run_elastic`.
    """
    bundle, options = Path(bundle), options or RunOptions()
    plan = read_plan(bundle)
    if not (bundle / entry(plan)).is_file():
        raise InputError(
            f"{bundle} is not a bundle: it has no {entry(plan)}",
            help="make one with `bigbrain-fx split`",
        )
    _require_fitting(plan, options)
    if options.port:
        require_free(options.port)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="bigbrain-fx-run-"))
    logs.mkdir(parents=True, exist_ok=True)
    if options.spares is not None:
        _require_supervised(plan, spawn)
        return _supervised(plan, bundle, options, logs, on_step, on_event, rescue)
    port = options.port or free_port()
    require_free(port)
    with _processes(plan, bundle, options, port, logs, spawn or popen) as crew:
        lines = list(crew.watch(_listener(on_step, on_batch)))
    peaks = _peaks(plan, logs)
    steps = tuple(line for line in lines if isinstance(line, StepLine))
    batches = tuple(line for line in lines if isinstance(line, BatchLine))
    return Run(steps, peaks, logs, batches)


def _peaks(plan: Plan, logs: Path) -> dict[str, int]:
    return {
        name: json.loads((logs / f"{name}.json").read_text())["max_rss_bytes"]
        for name in plan.stages.devices
    }


def can_supervise(plan: Plan) -> bool:
    """Whether dead processes of a bundle can be replaced: it trains, on Linux, not over nccl."""
    kinds = {plan.cluster.device[name].kind for name in plan.stages.devices}
    return plan.mode == "train" and sys.platform == "linux" and kinds != {"cuda"}


def _require_supervised(plan: Plan, spawn: Spawn | None) -> None:
    if plan.mode != "train" or sys.platform != "linux" or spawn is not None:
        raise InputError(
            "processes are replaced in training only, on Linux, and as plain children",
            help="leave `spares` out",
        )


def _supervised(
    plan: Plan,
    bundle: Path,
    options: RunOptions,
    logs: Path,
    on_step: Callable[[StepLine], None] | None,
    on_event: Callable[[Event], None] | None,
    rescue: Rescue | None,
) -> Run:
    """Run a training bundle under a supervisor."""
    _reporter(plan)  # it must have a loss
    steps: list[StepLine] = []

    def hear(step: int, loss: float, step_s: float) -> None:
        steps.append(StepLine(step, loss, step_s))
        if on_step is not None:
            on_step(steps[-1])

    events = EventLog(options.events, on_event)
    job = _job(plan, bundle, options, logs)
    supervisor = Supervisor(job, start_supervised, hear, events, rescue)
    try:
        with stopped_by_sigterm(supervisor):
            outcome = supervisor.run()
    except FailedError as error:
        raise _failed(error, plan) from error
    finally:
        events.close()
    return Run(tuple(steps), _peaks(plan, logs), logs, (), outcome.restarts, outcome.stopped_at)


def _failed(error: FailedError, plan: Plan) -> BigBrainError:
    death = error.death
    what = f"the process of device {death.device} {death.how}"
    found = _failure(what, death.code, Path(death.log), entry(plan), error.reason)
    if not error.moves:
        return found
    lost = DeviceLostError(found.what, at=found.at, notes=found.notes, help=found.help)
    lost.device = death.device
    return lost


def _job(plan: Plan, bundle: Path, options: RunOptions, logs: Path) -> Job:
    assert options.spares is not None
    left_out = {"PYTHONPATH", "RANK", "WORLD_SIZE"}
    return Job(
        devices=plan.stages.devices,
        words=(sys.executable, entry(plan), *_arguments(options, logs)),
        folder=bundle,
        environment={
            **{k: v for k, v in os.environ.items() if k not in left_out},
            "OMP_NUM_THREADS": str(max(d.threads for d in plan.cluster.devices)),
            "PYTHONUNBUFFERED": "1",
        },
        logs=logs,
        spares=options.spares,
        restarts=options.restarts,
        hang_s=options.hang_s,
        start_s=options.deadline_s,
        every=options.snapshot_every,
        log_bytes=None if options.log_mib is None else options.log_mib * MIB,
    )


def start_supervised(order: Order) -> subprocess.Popen[bytes]:
    """Start a supervised process: its line is its stdin."""
    with order.log.open("w") as log:
        return subprocess.Popen(
            order.words,
            cwd=order.folder,
            env=dict(order.environment),
            stdin=order.line,
            stdout=log,
            stderr=log,
        )


def _failure(
    what: str, code: int, log: Path, program: str, reason: str | None = None
) -> BigBrainError:
    """Return what to tell of a process that failed: the end of its log, and what to do."""
    tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.is_file() else []
    if code == BAD_INPUT and tail:
        return InputError(
            tail[-1].removeprefix("error: "),
            at=str(log),
            help="every batch must be like example_batch(): mend batches() and split again",
        )
    return RunError(
        what if reason is None else f"{what}: {reason}",
        at=str(log),
        notes=tuple(tail),
        help=_advice(code, program),
    )


def _listener(
    on_step: Callable[[StepLine], None] | None, on_batch: Callable[[BatchLine], None] | None
) -> Callable[[Line], None]:
    def hear(line: Line) -> None:
        if isinstance(line, StepLine):
            if on_step is not None:
                on_step(line)
        elif on_batch is not None:
            on_batch(line)

    return hear


def entry(plan: Plan) -> str:
    """Return the name of a bundle's program."""
    return "train.py" if plan.mode == "train" else "infer.py"


def _require_fitting(plan: Plan, options: RunOptions) -> None:
    """Refuse what this kind of bundle cannot do."""
    training = {
        "--save": options.save,
        "first_gradients": options.first_gradients,
        "--commits": options.commits,
        "--on-nan": options.on_nan,
    }
    inference = {"--inputs": options.inputs, "--outputs": options.outputs}
    wrong = inference if plan.mode == "train" else training
    given = [name for name, value in wrong.items() if value is not None]
    if given:
        what = "trains" if plan.mode == "train" else "is for inference"
        other = "eval" if plan.mode == "train" else "train"
        raise InputError(
            f"{given[0]} cannot be given: this bundle {what}",
            help=f"leave it out, or split the model with --mode {other}",
        )
    if options.inputs is not None and not options.inputs.is_file():
        raise InputError(f"there is no file {options.inputs}", help="give a .safetensors file")


def hosts(plan: Plan) -> tuple[str, ...]:
    """Return the hosts that a plan needs, in order of rank."""
    return tuple(dict.fromkeys(plan.cluster.device[name].host for name in plan.stages.devices))


def commands(plan: Plan, options: RunOptions) -> list[tuple[str, str]]:
    """Return (host, command): what to type on each host, for a bundle that is copied to all.

    Where processes are to be replaced, one command a host; else one for every device. The first
    host answers at the port, 29500 unless the options name one.
    """
    if options.spares is not None:
        return _launches(plan, options)
    names = [plan.cluster.device[name].host for name in plan.stages.devices]
    given = {
        "--steps": options.steps or (None if options.inputs else DEFAULT_STEPS),
        "--seed": options.seed,
        "--deadline": options.deadline_s,
        "--save": options.save,
        "--inputs": options.inputs,
        "--outputs": options.outputs,
    }
    words = [f"{k} {shlex.quote(str(v))}" for k, v in given.items() if v is not None]
    common = (
        f"WORLD_SIZE={len(names)} MASTER_ADDR={shlex.quote(names[0])} "
        f"MASTER_PORT={options.port or 29500} python {entry(plan)} {' '.join(words)}"
    )
    return [
        (host, f"RANK={rank} LOCAL_RANK={names[:rank].count(host)} {common}")
        for rank, host in enumerate(names)
    ]


SECRET = "secret"  # the file that all hosts have, in the bundle


def _launches(plan: Plan, options: RunOptions) -> list[tuple[str, str]]:
    """Return a supervisor's command for the first host, and an agent's for each other."""
    first, *others = hosts(plan)
    address = shlex.quote(f"{first}:{options.port or 29500}")
    common = f"--secret {SECRET} --spares {options.spares}"
    given = {
        "--restarts": options.restarts,
        "--hang": options.hang_s,
        "--snapshot-every": options.snapshot_every,
        "--log-mib": options.log_mib,
        "--events": options.events,
        "--steps": options.steps or DEFAULT_STEPS,
        "--seed": options.seed,
        "--deadline": options.deadline_s,
        "--on-nan": options.on_nan,
        "--save": options.save,
        "--commits": options.commits,
        "--commit-every": options.commit_every,
    }
    words = [f"{k} {shlex.quote(str(v))}" for k, v in given.items() if v is not None]
    words += ["--resume"] if options.resume else []
    head = f"python launch.py --listen {address} {common} {' '.join(words)}"
    return [(first, head)] + [
        (host, f"python launch.py --join {address} --host {shlex.quote(host)} {common}")
        for host in others
    ]


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raise when a port is taken; name its holder where the system shows it.

    Raises:
        InputError: with the process id, if visible.
    """
    if not 0 < port < 65536:
        raise InputError(
            f"port {port} is not between 1 and 65535",
            help="give another --port, or 0 for any free one",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            holder = _holder(port)
            by = f" by process {holder}" if holder else ""
            raise InputError(
                f"port {port} is in use{by}", help="give another --port, or 0 for any free one"
            ) from error


def _holder(port: int) -> int | None:
    """Find who listens on a port, from /proc; None where that is not shown."""
    inode = _listening_inode(port)
    if inode is None:
        return None
    for folder in sorted(Path("/proc").glob("[0-9]*")):
        try:
            if any(os.readlink(fd) == f"socket:[{inode}]" for fd in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:  # gone, or not ours to look at
            continue
    return None


def _listening_inode(port: int) -> str | None:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port:
                return row[9]
    return None


# --------------------------------------------------------------------------- processes


@dataclass
class _Crew:
    """The processes of one run, by device."""

    processes: dict[str, Process]
    logs: Path
    reporter: str
    program: str
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    def watch(self, on_line: Callable[[Line], None]) -> Iterator[Line]:
        """Yield steps or batches as they are reported, until all processes have ended well."""
        stdout = self.processes[self.reporter].stdout
        assert stdout is not None
        threading.Thread(target=self._read, args=(stdout,), daemon=True).start()
        at_end = False
        while not at_end or any(p.poll() is None for p in self.processes.values()):
            self._require_alive()
            try:
                line = self.lines.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if line is None:
                at_end = True
                continue
            found = _line(line)
            if found is None:  # the user's batches() or optimizer() printed it
                sys.stderr.write(line)
                continue
            on_line(found)
            yield found
        self._require_alive()

    def stop(self) -> None:
        """End every process that still runs, by its id: first politely."""
        running = [p for p in self.processes.values() if p.poll() is None]
        for process in running:
            process.terminate()
        until = time.monotonic() + GRACE_S
        for process in running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self.lines.put(line)
        self.lines.put(None)

    def _require_alive(self) -> None:
        failed = self._failed()
        if not failed:
            return
        name, code = self._cause(failed)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        what = f"the process of device {name} {how}"
        raise _failure(what, code, self.logs / f"{name}.log", self.program)

    def _failed(self) -> dict[str, int]:
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code}

    def _cause(self, failed: dict[str, int]) -> tuple[str, int]:
        """Return who failed first: a process may hear of a peer's end before that has ended."""
        until = time.monotonic() + GRACE_S
        while set(failed.values()) == {PEER_LOST} and time.monotonic() < until:
            running = [p for p in self.processes.values() if p.poll() is None]
            if not running:
                break
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(POLL_S)
            failed = self._failed()
        rank = {BAD_INPUT: 0, PEER_LOST: 2}
        return min(failed.items(), key=lambda entry: rank.get(entry[1], 1))


def _advice(code: int, program: str) -> str:
    if code == NOT_FINITE:
        return "lower the learning rate, or run with --on-nan skip to leave such updates out"
    if code == -signal.SIGKILL:
        return (
            "Linux ends a process so when memory runs out (`dmesg` tells): give its device less "
            '"memory" in cluster.json and split again; run it again if someone else ended it'
        )
    return f"run `python {program} --in-process` in the bundle to see it in one process"


def _line(text: str) -> Line | None:
    for kind in (StepLine, BatchLine):
        try:
            return kind(**json.loads(text))
        except (TypeError, ValueError):
            continue
    return None


@contextmanager
def _processes(
    plan: Plan, bundle: Path, options: RunOptions, port: int, logs: Path, spawn: Spawn
) -> Iterator[_Crew]:
    reporter = _reporter(plan)
    crew = _Crew({}, logs, reporter, entry(plan))
    words = (sys.executable, entry(plan), "--json", *_arguments(options, logs))
    try:
        for rank, name in enumerate(plan.stages.devices):
            environment, log = _environment(plan, rank, port), logs / f"{name}.log"
            command = Command(name, words, bundle, environment, log, name == reporter)
            crew.processes[name] = spawn(command)
        yield crew
    finally:
        crew.stop()


def popen(command: Command) -> Process:
    """Start a process as a child of this one."""
    with command.log.open("w") as log:
        return subprocess.Popen(
            command.words,
            cwd=command.folder,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if command.reports else log,
            stderr=log,
            text=True,
        )


def _reporter(plan: Plan) -> str:
    """Return the device that reports: it makes the loss, or collects the outputs."""
    if plan.mode == "eval":
        return plan.stages.stages[-1].device
    for stage in plan.stages.stages:
        if plan.graph.loss in stage.ops:
            return stage.device
    raise InputError(
        f"{plan.graph.name} has no loss to train on",
        help="add `loss(output, batch)` to the model file, or split it with --mode eval",
    )


def _arguments(options: RunOptions, logs: Path) -> Sequence[str]:
    given = {
        "--steps": options.steps,
        "--seed": options.seed,
        "--deadline": options.deadline_s,
        "--threads": options.threads,
        "--save": options.save.resolve() if options.save else None,
        "--first-gradients": options.first_gradients.resolve() if options.first_gradients else None,
        "--inputs": options.inputs.resolve() if options.inputs else None,
        "--outputs": options.outputs.resolve() if options.outputs else None,
        "--commits": options.commits.resolve() if options.commits else None,
        "--commit-every": options.commit_every,
        "--on-nan": options.on_nan,
        "--report": logs.resolve(),
    }
    words = [
        text for flag, value in given.items() if value is not None for text in (flag, str(value))
    ]
    return [*words, *(["--resume"] if options.resume else [])]


def _environment(plan: Plan, rank: int, port: int) -> dict[str, str]:
    device = plan.cluster.device[plan.stages.devices[rank]]
    ours = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(plan.stages.devices)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(device.threads),
        "PYTHONUNBUFFERED": "1",
    }
    left_out = {"PYTHONPATH", "TORCHELASTIC_USE_AGENT_STORE"}
    return {**{k: v for k, v in os.environ.items() if k not in left_out}, **ours}
