"""A training whose processes `supervisor` replaces when they die; this module starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bigbrain_fx.bundles.launch.failures import SHORT, DeviceLostError, RunError, failure
from bigbrain_fx.bundles.launch.gpus import patience_s
from bigbrain_fx.bundles.launch.options import Backend, Run, RunOptions, StepLine
from bigbrain_fx.bundles.launch.process import Spawn, users_environment
from bigbrain_fx.bundles.launch.program import (
    allocated,
    arguments,
    command_of,
    entry,
    peaks,
    reporter,
)
from bigbrain_fx.bundles.launch.warm import Warm
from bigbrain_fx.emit import extras_of
from bigbrain_fx.errors import BigBrainError, InputError, os_error_as
from bigbrain_fx.plan import Plan
from bigbrain_fx.supervisor import (
    Death,
    DeviceProcess,
    Event,
    EventLog,
    FailedError,
    Feed,
    Job,
    Order,
    Rescue,
    Start,
    Supervisor,
    popen,
    stopped_by_sigterm,
)

MIB = 2**20


def can_supervise(plan: Plan, backend: Backend | None = None) -> bool:
    """Whether dead processes of a bundle can be replaced: it trains, on Linux, not over nccl."""
    return plan.mode == "train" and sys.platform == "linux" and not _is_over_nccl(plan, backend)


def is_lean(bundle: Path) -> bool:
    """Return whether a bundle for training cannot replace a process.

    Such a bundle was written by `split --lean`; or torch's collectives sum there, and no log has
    the sums that were finished at a death.
    """
    return (bundle / "train.py").is_file() and not (bundle / "runtime" / "member.py").is_file()


def require_not_lean(bundle: Path) -> None:
    """Refuse to replace processes of a bundle that has nothing for it."""
    if is_lean(bundle):
        raise InputError(
            f"no process of {bundle} can be replaced: it was made by `split --lean`, or with "
            "--all-reduce-order backend, whose sums are no messages",
            code="BX3075",
            help="split again without --lean and --all-reduce-order backend, or leave --standby "
            "and "
            "--elastic out: --checkpoint-dir FOLDER keeps the training's state, and --resume goes "
            "on",
        )


def require_supervised(plan: Plan, spawn: Spawn | None, backend: Backend | None = None) -> None:
    """Refuse a run of which no process could be replaced.

    Raises:
        InputError: it infers, this is not Linux, `spawn` starts the processes elsewhere, or the
            messages go over nccl.
    """
    require_not_nccl(plan, backend)
    if plan.mode != "train" or sys.platform != "linux" or spawn is not None:
        raise InputError(
            "processes are replaced in training only, on Linux, and as plain children",
            code="BX3076",
            help="leave `spares` out",
        )


def require_checkable(bundle: Path, options: RunOptions, *, is_fed: bool) -> None:
    """Refuse to compute steps again where no spare is there to do it."""
    if options.suspect and (not options.spares or is_fed):
        raise InputError(
            "--suspect needs a spare process, in a training that reads its own batches: it "
            "computes steps again",
            code="BX3077",
            help="give --standby 1 or more, without --no-replay; or leave --suspect out",
        )
    if options.suspect:
        require_extra(bundle, "suspicion", "--suspect")


def require_extra(bundle: Path, name: str, flag: str) -> None:
    """Refuse a flag of a run whose files the bundle was not asked to have.

    Raises:
        InputError: names the flag, and how to have them.
    """
    if name not in extras_of(bundle):
        raise InputError(
            f"{flag} needs runtime/{name}.py, and this bundle was split without it",
            code="BX3165",
            at=str(bundle),
            help=f"split it again with `--with {name}`",
        )


def require_not_nccl(plan: Plan, backend: Backend | None = None) -> None:
    """Refuse to replace processes whose messages go over nccl.

    A supervised run connects its devices anew over gloo, through host memory. The plan of GPUs
    alone forecasts another run, so an option must ask for it.
    """
    if _is_over_nccl(plan, backend):
        raise InputError(
            "no process of this plan can be replaced: all its devices are GPUs, and their messages "
            "go over nccl",
            code="BX3078",
            help="add --backend gloo: they go through host memory then, which is slower than was "
            "forecast; or leave --standby and --elastic out: --checkpoint-dir FOLDER keeps the "
            "training's "
            "state, and --resume goes on from there",
        )


def require_backend(plan: Plan, backend: Backend | None) -> None:
    """Refuse nccl for a plan with other devices than GPUs."""
    others = [n for n in plan.stages.devices if plan.cluster.device[n].kind != "cuda"]
    if backend == "nccl" and others:
        raise InputError(
            f"nccl goes between GPUs, and {', '.join(others)} of this plan "
            f"{'is none' if len(others) == 1 else 'are none'}",
            code="BX3079",
            at="--backend",
            help="use --backend gloo, or leave it out",
        )


def _is_over_nccl(plan: Plan, backend: Backend | None) -> bool:
    kinds = {plan.cluster.device[name].kind for name in plan.stages.devices}
    return kinds == {"cuda"} and backend != "gloo"


def run_supervised(
    plan: Plan,
    bundle: Path,
    options: RunOptions,
    logs: Path,
    on_step: Callable[[StepLine], None] | None,
    on_event: Callable[[Event], None] | None,
    rescue: Rescue | None,
    feed: Feed | None = None,
) -> Run:
    """Run a training bundle under a supervisor."""
    reporter(plan)  # it must have a loss
    steps: list[StepLine] = []

    def hear(step: int, loss: float, step_s: float) -> None:
        while steps and steps[-1].step >= step:  # it was taken back: somebody computed wrong
            steps.pop()
        steps.append(StepLine(step, loss, step_s))
        if on_step is not None:
            on_step(steps[-1])

    with event_log(options.events, on_event) as events, _starting(plan) as start:
        try:
            supervisor = Supervisor(
                _job(plan, bundle, options, logs), start, hear, events, rescue, feed
            )
            with stopped_by_sigterm(supervisor):
                outcome = supervisor.run()
        except FailedError as error:
            raise _failed(error, plan) from error
        except OSError as error:
            raise RunError(f"the run has ended: {error}", code="BX3080", help=SHORT) from error
    ends = outcome.restarts, outcome.stopped_at
    return Run(tuple(steps), peaks(plan, logs), logs, (), *ends, allocated(plan, logs))


@contextmanager
def event_log(path: Path | None, tell: Callable[[Event], None] | None) -> Iterator[EventLog]:
    """Keep what happens to a run's processes.

    Raises:
        InputError: the file cannot be opened.
    """
    with os_error_as("no events can be kept", code="BX3081", help="give another --events"):
        log = EventLog(path, tell)
    try:
        yield log
    finally:
        log.close()


def _failed(error: FailedError, plan: Plan) -> BigBrainError:
    death = error.death
    own = death.what, death.code, Path(death.log), entry(plan), error.reason
    word = death.shown if isinstance(death, Death) else death.text
    found = failure(*own, word, is_short=error.is_short)
    if not error.moves or death.device is None:
        return found
    lost = DeviceLostError(
        found.what, code=found.code, at=found.at, notes=found.notes, help=found.help
    )
    lost.device, lost.left_out = death.device, error.left_out
    return lost


def _job(plan: Plan, bundle: Path, options: RunOptions, logs: Path) -> Job:
    assert options.spares is not None
    return Job(
        devices=plan.stages.devices,
        words=(*command_of(plan, options, logs), *arguments(options, logs)),
        folder=bundle,
        environment={
            **users_environment("RANK", "WORLD_SIZE"),
            "OMP_NUM_THREADS": str(max(d.threads for d in plan.cluster.devices)),
            "PYTHONUNBUFFERED": "1",
        },
        logs=logs,
        spares=options.spares,
        restarts=options.restarts,
        hang_s=options.hang_s,
        start_s=patience_s(plan, options.deadline_s),
        every=options.snapshot_every,
        suspect=options.suspect or 0.0,
        grace_s=options.grace_s,
        log_bytes=None if options.log_mib is None else options.log_mib * MIB,
        snapshots=options.snapshots or _disk_of(plan, options),
    )


def _disk_of(plan: Plan, options: RunOptions) -> Path | None:
    """Return a folder where the state of devices lies: memory is short, so snapshots go there."""
    if not {"state", "weights"} & set(plan.stages.offload):
        return None
    stores = (plan.cluster.store.get(name) for name in plan.stages.devices)
    folders = [store.folder for store in stores if store is not None and store.folder]
    return options.store or next(map(Path, folders), None)


@contextmanager
def _starting(plan: Plan) -> Iterator[Start]:
    """Give what starts the processes of a run."""
    if any(plan.cluster.device[name].kind != "cpu" for name in plan.stages.devices):
        yield start_supervised
        return
    with Warm() as start:
        yield start


def start_supervised(order: Order) -> DeviceProcess:
    """Start a supervised process: its line is its stdin."""
    return popen(order, subprocess.Popen)
