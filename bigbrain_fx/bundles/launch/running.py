"""The verb `run`: check what was asked, start the processes one way or the other, sum it up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.bundles.launch.crew import processes
from bigbrain_fx.bundles.launch.gpus import require_compilers, require_gpus
from bigbrain_fx.bundles.launch.options import (
    DEFAULT_STEPS,
    BatchLine,
    Line,
    Run,
    RunOptions,
    StepLine,
)
from bigbrain_fx.bundles.launch.ports import free_port, require_free
from bigbrain_fx.bundles.launch.process import Spawn, popen
from bigbrain_fx.bundles.launch.program import allocated, peaks, require_program
from bigbrain_fx.bundles.launch.run_folders import run_folder
from bigbrain_fx.bundles.launch.status import Status, StatusKeeper, metrics_at
from bigbrain_fx.bundles.launch.step_files import StepFiles, step_files
from bigbrain_fx.bundles.launch.supervised import (
    event_log,
    require_backend,
    require_checkable,
    require_not_lean,
    require_supervised,
    run_supervised,
)
from bigbrain_fx.bundles.launch.tracing import RunTrace, traced
from bigbrain_fx.bundles.typed import of_its_types
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.supervisor import Aside, Event, Feed, Rescue

ENDLESS = 10**9  # steps of a run that is fed: it is stopped


def run(
    bundle: str | Path,
    options: RunOptions | None = None,
    on_step: Callable[[StepLine], None] | None = None,
    on_batch: Callable[[BatchLine], None] | None = None,
    spawn: Spawn | None = None,
    on_event: Callable[[Event], None] | None = None,
    rescue: Rescue | None = None,
    feed: Feed | None = None,
) -> Run:
    """Run a bundle on this host, training or inference, and wait for its end.

    `on_step` receives each step of training, `on_batch` each batch of inference, as it is done.
    `spawn` starts the processes in another way than as plain children; then none is replaced.
    `on_event` receives the events of processes: see `supervisor.EventLog`; `rescue` gets
    the newest snapshots in memory before a DeviceLostError. With `feed` the caller sends the
    batches of a supervised run, which goes on until `feed.stop`. All but `rescue` are called
    aside, in a thread: one that waits does not hold up the run. One that raises OSError, as a print
    to a closed pipe does, is not called again; any other error ends the run.

    Every process is ended, whatever happens, before this returns.

    Raises:
        InputError: no bundle, the port is taken, a batch differs from the traced one, or an option
            is for the other kind of bundle.
        RunError: a process failed, and was not or could not be replaced; the others are stopped.
        DeviceLostError: it only died, so that other devices could go on: see `run_elastic`.
    """
    bundle, options = Path(bundle), of_its_types(options or RunOptions())
    plan = read_plan(bundle)
    require_program(bundle, plan)
    _require_fitting(plan, options)
    _require_folders(options)
    if spawn is None:
        require_gpus(plan.cluster.device[name] for name in plan.stages.devices)
        require_compilers(plan)
    if options.port:
        require_free(options.port)
    logs = _logs(bundle, options)
    keeper = _keeper(plan, bundle, options, logs, is_fed=feed is not None)
    with (
        traced(plan, bundle, options.trace, logs) as trace,
        step_files(options.log_to, plan.graph.batch) as files,
        metrics_at(options.metrics, lambda: keeper.status),
        _kept(keeper),
    ):
        told = Told(keeper, files if options.log_to else None, trace, on_step, on_batch, on_event)
        try:
            done = _run(plan, bundle, options, logs, spawn, told, rescue, feed)
        finally:
            told.close()
        keeper.end("finished" if done.stopped_at is None else "stopped")
        return done


def _keeper(
    plan: Plan, bundle: Path, options: RunOptions, logs: Path, *, is_fed: bool
) -> StatusKeeper:
    keeper = StatusKeeper(
        Status(
            str(bundle.resolve()),
            os.getpid(),
            str(logs.resolve()),
            plan.graph.batch,
            options.steps or (None if options.inputs or is_fed else DEFAULT_STEPS),
            str(options.commits.resolve()) if options.commits else None,
        )
    )
    if options.resume:  # until the first step is done
        keeper.begin(keeper.status.last_commit or 0)
    return keeper


def _run(
    plan: Plan,
    bundle: Path,
    options: RunOptions,
    logs: Path,
    spawn: Spawn | None,
    told: Told,
    rescue: Rescue | None,
    feed: Feed | None,
) -> Run:
    require_checkable(bundle, options, is_fed=feed is not None)
    if options.spares is None:
        return _run_plain(plan, bundle, options, logs, spawn, told)
    require_supervised(plan, spawn, options.backend)
    require_not_lean(bundle)
    options = replace(options, steps=ENDLESS) if feed else options
    return run_supervised(plan, bundle, options, logs, told.step, told.event, rescue, feed)


@contextmanager
def _kept(keeper: StatusKeeper) -> Iterator[None]:
    """Say of a run that ends otherwise that it failed."""
    try:
        yield
    except BaseException:
        keeper.end("failed")
        raise


class Told:
    """Receivers of a run's events: status, files, and, in a thread of its own, each listener.

    The caller's listeners may wait or fail without the others'.
    """

    def __init__(
        self,
        keeper: StatusKeeper,
        files: StepFiles | None,
        trace: RunTrace | None,
        on_step: Callable[[StepLine], None] | None,
        on_batch: Callable[[BatchLine], None] | None,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.callers, self.ours = Aside(), Aside()
        self.on_step = self.callers.of(on_step)
        self.on_batch = self.callers.of(on_batch)
        self.on_event = self.callers.of(on_event)
        self.keep_step = self.ours.of(keeper.hear_step)
        self.keep_event = self.ours.of(keeper.hear_event)
        self.trace_event = self.ours.of(trace.hear_event if trace else None)
        self.write_step = self.ours.of(files.step if files else None)

    def step(self, line: StepLine) -> None:
        """A step is done."""
        for tell in (self.on_step, self.keep_step, self.write_step):
            if tell is not None:
                tell(line)

    def batch(self, line: BatchLine) -> None:
        """A batch is done."""
        if self.on_batch is not None:
            self.on_batch(line)

    def line(self, line: Line) -> None:
        """A step or a batch is done."""
        if isinstance(line, StepLine):
            self.step(line)
        else:
            self.batch(line)

    def event(self, event: Event) -> None:
        """Something happened to a process."""
        for tell in (self.on_event, self.keep_event, self.trace_event):
            if tell is not None:
                tell(event)

    def close(self) -> None:
        """Wait until all have received it."""
        self.ours.close()
        self.callers.close()


def _logs(bundle: Path, options: RunOptions) -> Path:
    remedy = "give another --logs; or let TMPDIR name a folder that files can be written in"
    with os_error_as("no logs can be kept", code="BX3060", help=remedy):
        logs = options.logs or run_folder(bundle)
        logs.mkdir(parents=True, exist_ok=True)
    return logs


def _run_plain(
    plan: Plan, bundle: Path, options: RunOptions, logs: Path, spawn: Spawn | None, told: Told
) -> Run:
    """Run a bundle of which no process is replaced."""
    port = options.port or free_port()
    require_free(port)
    with (
        event_log(options.events, told.event) as events,
        processes(plan, bundle, options, port, logs, spawn or popen, events) as crew,
    ):
        lines = list(crew.watch(told.line))
    steps = tuple(line for line in lines if isinstance(line, StepLine))
    batches = tuple(line for line in lines if isinstance(line, BatchLine))
    held = allocated(plan, logs)
    return Run(steps, peaks(plan, logs), logs, batches, max_allocated_bytes=held)


def _require_fitting(plan: Plan, options: RunOptions) -> None:
    """Refuse what this kind of bundle cannot do."""
    training = {
        "--save": options.save,
        "first_gradients": options.first_gradients,
        "--checkpoint-dir": options.commits,
        "--on-nan": options.on_nan,
        "--backend": options.backend,
        "--offload-dir": options.store,
        "--memory-checkpoint-dir": options.snapshots,
        "--log-to": options.log_to or None,
    }
    inference = {"--inputs": options.inputs, "--outputs": options.outputs}
    wrong = inference if plan.mode == "train" else training
    given = [name for name, value in wrong.items() if value is not None]
    if given:
        what = "trains" if plan.mode == "train" else "is for inference"
        other = "eval" if plan.mode == "train" else "train"
        raise InputError(
            f"{given[0]} cannot be given: this bundle {what}",
            code="BX3061",
            help=f"leave it out, or split the model with --mode {other}",
        )
    if options.on_nan == "skip" and plan.stages.asynchronous:
        raise InputError(
            "--on-nan skip asks all devices before each update, and this bundle's are in unlike "
            "steps",
            code="BX3062",
            at="--on-nan",
            help="use --on-nan stop, or split the model without --asynchronous",
        )
    require_backend(plan, options.backend)
    if options.store is not None and not plan.stages.offload:
        raise InputError(
            "--offload-dir cannot be given: this bundle offloads nothing",
            code="BX3063",
            help="leave it out, or split the model with --offload state",
        )
    for flag, folder in (
        ("--offload-dir", options.store),
        ("--memory-checkpoint-dir", options.snapshots),
    ):
        if folder is not None and not folder.is_dir():
            raise InputError(
                f"{folder} is no folder", code="BX3064", at=flag, help="make it, or another"
            )
    if options.store is None and plan.stages.offload:
        require_stores(plan)
    if options.inputs is not None and not options.inputs.is_file():
        raise InputError(
            f"there is no file {options.inputs}", code="BX3065", help="give a .safetensors file"
        )


def require_stores(plan: Plan) -> None:
    """Refuse folders of the cluster file that are not there, before anything is started."""
    found = (plan.cluster.store.get(name) for name in plan.stages.devices)
    for store in filter(None, found):
        if store.folder and Path(store.folder).is_absolute() and not Path(store.folder).is_dir():
            raise InputError(
                f"the offload target {store.name!r} is in {store.folder}, which is no folder here",
                code="BX3064a",
                help=f"`mkdir -p {store.folder}`, or name another with --offload-dir FOLDER",
            )


def _require_folders(options: RunOptions) -> None:
    """Refuse before any process is started what each of them would only find out by itself."""
    named = {
        "--save": options.save,
        "--checkpoint-dir": options.commits,
        "--outputs": options.outputs,
    }
    for flag, path in named.items():
        if path is not None and path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file", code="BX3066", at=flag, help="give a folder")
    if options.resume and options.commits is not None and not options.commits.exists():
        raise InputError(
            f"{options.commits} is not there, so there is nothing to resume",
            code="BX3067",
            at="--checkpoint-dir",
            help="give the folder that --checkpoint-dir had; to begin one, leave --resume out",
        )
