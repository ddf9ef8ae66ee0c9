"""A run that leaves a device behind when its processes keep dying, and goes on with the others.

    run ── the device is given up ──▶ newest snapshot in memory ──▶ commit ──▶ resplit ──▶ run ...

Of several replicas the others go on in their processes, where they can: `supervisor` does that.
This module follows where the last replica loses a device. It decides when and from where; `resplit`
moves the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bigbrain_fx.bundles.going_on import commit_held
from bigbrain_fx.bundles.launch import (
    DeviceLostError,
    Run,
    RunOptions,
    StepLine,
    can_supervise,
    require_not_lean,
    require_not_nccl,
    run,
)
from bigbrain_fx.bundles.resplitting import Resplit, resplit
from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan import Plan, read_plan, require_no_overlap
from bigbrain_fx.runtime import CheckpointStore
from bigbrain_fx.supervisor import Aside, Event, EventLog

OnStep = Callable[[StepLine], None]
OnEvent = Callable[[Event], None]


@dataclass
class _Rescued:
    """Commits what a run held in memory when it ended; `step` is -1 until then."""

    bundle: Path
    plan: Plan
    folder: Path
    step: int = -1
    failure: str = ""

    def take(self, step: int, files: Mapping[str, int]) -> None:
        """Write the snapshots of all devices as one commit.

        A disk that cannot take them is no end: there may be an older commit.

        Args:
            step: of all of them.
            files: device -> file descriptor of its image.
        """
        try:
            commit_held(self.bundle, self.folder, files)
        except OSError as error:
            self.failure = f"{error.strerror or error}: {error.filename or self.folder}"
            self.remove()
        else:
            self.step = step

    def remove(self) -> None:
        """Remove the commit; its numbers are elsewhere, or not to be had."""
        shutil.rmtree(self.folder, ignore_errors=True)


def run_elastic(
    bundle: str | Path,
    options: RunOptions,
    on_step: OnStep | None = None,
    on_event: OnEvent | None = None,
) -> Run:
    """Run a bundle for training; when a device is given up, go on without it.

    The remaining devices recompute all steps since the newest in-memory snapshot, or since the
    newest commit in `options.commits`. Each time a new bundle is written beside the first one:
    BUNDLE-elastic-1 and so on.

    Returns:
        The steps, each once; the rest is of the last run.

    Raises:
        DeviceLostError: nothing is there to go on from, or no device is left.
        InputError, RunError: as `run`.
        NoPlanError: the model does not fit on the devices that are left.
    """
    plan = read_plan(bundle)
    require_not_nccl(plan, options.backend)
    require_no_overlap(plan, "--elastic", "leave it out: a process that dies is replaced")
    require_not_lean(Path(bundle))
    if options.spares is None:
        raise InputError(
            "a run that replaces no process cannot go on without a device",
            code="BX3028",
            help="leave --no-replay out, or --elastic",
        )
    aside = Aside()  # who waits, or is gone, keeps no step from being taken note of
    try:
        return _run_elastic(Path(bundle), options, aside.of(on_step), on_event)
    finally:
        aside.close()


def _run_elastic(
    bundle: Path, options: RunOptions, on_step: OnStep | None, on_event: OnEvent | None
) -> Run:
    at, left, seen = bundle, options, dict[int, StepLine]()

    def hear(line: StepLine) -> None:
        if line.step not in seen or seen[line.step].loss != line.loss:  # it was taken back
            seen[line.step] = line
            if on_step is not None:
                on_step(line)

    restarts = 0
    while True:
        rescued = _Rescued(at, read_plan(at), _free(bundle, "rescued"))
        try:
            done = run(at, left, hear, on_event=on_event, rescue=rescued.take)
        except DeviceLostError as lost:
            moved = _move(at, left, rescued, lost, _free(bundle, "elastic"))
            restarts += 1
            _tell(moved, left, on_event)
            at, left = moved.bundle, _options(left, moved, options)
        else:
            steps = tuple(seen[step] for step in sorted(seen))
            return replace(done, steps=steps, restarts=done.restarts + restarts)


def _move(
    bundle: Path, options: RunOptions, rescued: _Rescued, lost: DeviceLostError, out: Path
) -> Resplit:
    """Write the bundle of those that are left, from the newest state there is."""
    cluster: Cluster | None = rescued.plan.cluster
    for device in (*lost.left_out, lost.device):
        cluster = None if cluster is None else without(cluster, device)
    commits = _newest(options, rescued)
    if cluster is None or commits is None:
        if rescued.failure:
            lost.notes += (f"the in-memory checkpoint could not be saved: {rescued.failure}",)
        raise lost
    try:
        moved = resplit(bundle, cluster, out, commits)
    except NoPlanError:  # it may be what the cluster file names as replicas that is too small now
        if not cluster.replicas:
            raise
        moved = resplit(bundle, replace(cluster, replicas=()), out, commits)
    rescued.remove()  # the new bundle has it all
    return moved


def without(cluster: Cluster, device: str) -> Cluster | None:
    """Return a cluster with one device less; None if it was the only one.

    Replicas that are named stay without it, where there are several: one alone would keep all
    other devices idle.
    """
    devices = tuple(each for each in cluster.devices if each.name != device)
    links = tuple(entry for entry in cluster.links if device not in entry[:2])
    left = {each.host for each in devices}
    hosts = tuple(host for host in cluster.hosts if host.name in left)
    groups = (tuple(name for name in group if name != device) for group in cluster.replicas)
    replicas = tuple(group for group in groups if group)
    replicas = replicas if len(replicas) > 1 else ()
    stores = tuple(store for store in cluster.stores if store.device != device)
    if not devices:
        return None
    kept = replace(cluster, devices=devices, links=links, hosts=hosts, replicas=replicas)
    return replace(kept, stores=stores)


def _newest(options: RunOptions, rescued: _Rescued) -> Path | None:
    """Return the folder of commits that has the later step."""
    on_disk = -1
    if options.commits is not None and options.commits.is_dir():
        on_disk = max((r.step for r in CheckpointStore(options.commits).records()), default=-1)
    if max(on_disk, rescued.step) < 0:
        return None
    return options.commits if on_disk > rescued.step else rescued.folder


def _options(left: RunOptions, moved: Resplit, first: RunOptions) -> RunOptions:
    """Go on from the moved commit; it is written to only if the user wanted commits."""
    logs = None if first.logs is None else first.logs / moved.bundle.name
    every = left.commit_every if first.commits is not None else 0
    can_replace = can_supervise(moved.plan, left.backend)  # only GPUs may be left
    spares = left.spares if can_replace else None
    return replace(
        left, commits=moved.commits, commit_every=every, resume=True, logs=logs, spares=spares
    )


def _tell(moved: Resplit, options: RunOptions, on_event: OnEvent | None) -> None:
    log = EventLog(options.events, on_event)
    devices = ", ".join(moved.plan.stages.devices)
    log.write("moved", 0, step=moved.step, devices=devices, bundle=str(moved.bundle))
    log.close()


def _free(bundle: Path, what: str) -> Path:
    """Return the first name beside the bundle that is free."""
    whole = Path(os.path.abspath(bundle))
    number = 1
    while (found := whole.with_name(f"{whole.name}-{what}-{number}")).exists():
        number += 1
    return found
