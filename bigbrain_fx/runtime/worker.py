"""A device under a supervisor: its steps, what is kept of them, and what it does for the others."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .board import Board, make_up_for
from .bundle import Bundle, make_device, save_first_gradients
from .checkpoint_options import CheckpointOptions
from .checkpoints import Checkpoints, checkpoints_of
from .control import Control
from .mesh import MeshTransport, PassedOn, form_mesh
from .packets import Duty, HeadLostError
from .rendezvous import own_device, require_gpu, write_report
from .replay import ReplayTransport
from .saving import save_together
from .snapshots import OwnSnapshots

if TYPE_CHECKING:
    from .suspicion import TapeRecorder

KNOWS = ["forget", "part", "check", "last_commit"]  # orders that older bundles do not know


class Worker:
    """A process that is a device: from the start or from a snapshot, to the end of all devices.

    Args:
        bundle: what it trains.
        options: of the command line.
        commits: that were asked for.
        seed: of the run.
        control: the line to the supervisor.
        duty: which device it is, and from where it goes on.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: argparse.Namespace,
        commits: CheckpointOptions | None,
        seed: int,
        control: Control,
        duty: Duty,
    ) -> None:
        self.bundle, self.options, self.commits = bundle, options, commits
        self.control, self.duty = control, duty
        self._prepare()
        torch.set_num_threads(options.threads or bundle.threads[duty.rank])
        os.environ["LOCAL_RANK"] = str(duty.local_rank)
        require_gpu(bundle.kinds, duty.rank)
        where = own_device(bundle.kinds, duty.rank)
        cls = bundle.devices[duty.rank]
        self.connecting = partial(_connect, options, where, control)
        about = cls.name, cls.channels, cls.own_micro_batches(), control
        connect = partial(self.connecting, self.bundle, duty.rank)
        self.transport = ReplayTransport(*about, connect)
        self.device = make_device(self.bundle, duty.rank, self.transport, seed, where)
        self.device.on_nan = options.on_nan
        self.device.of_run = {"steps": options.steps, "seed": seed}
        self._take_rates()
        if self.device.compiled:
            from .compiled import is_compiling  # only bundles of --compile have it

            control.is_busy = is_compiling
        self.board = Board(self.transport, options.deadline)
        self.checkpoints = self._checkpoints()
        self.snapshots = OwnSnapshots(self.transport, control, duty)
        self.recorder: TapeRecorder | None = None

    def _prepare(self) -> None:
        """Take batches from the caller, or be ready for steps that are computed again."""
        if self.control.suspect:
            from .suspicion import require_repeatable  # only bundles of --with suspicion have it

            require_repeatable(self.bundle)
        if self.control.fed:
            from .feeding import FedBatches  # only bundles of sessions have it

            self.fed = FedBatches(self.control.features["feeding"])
            self.bundle = replace(self.bundle, batches=self.fed)

    def _take_rates(self) -> None:
        """Let the caller's optimizer set the rates, where no function of the bundle does."""
        training = self.bundle.training
        if self.control.fed:
            self.fed.device = self.device
        if self.control.fed and training.lr_scale is None and training.scheduler is None:
            from .feeding import FedRates

            self.device.rates = FedRates(self.device.optimizer, self.fed)

    def _checkpoints(self) -> Checkpoints | None:
        if self.commits is None:
            return None
        return checkpoints_of(Checkpoints, self.bundle, self.device, self.board, self.commits)

    def run(self) -> None:
        """Begin where all others do, run the steps, and be there for the others."""
        self._take_state()
        first = self._committed() if self.commits is not None else max(self.duty.epoch, 0)
        self._tell_restored(first)
        if self.duty.again or (self.duty.epoch < 0 and first):
            self.control.say("begins", step=first)
        if self.duty.epoch < 0:
            self.transport.start(first, {})
        if self.transport.inner is None:
            self.transport.form()
        try:
            self._run_to_end(first)
        except HeadLostError:
            self.control.say("kept", **self._kept())

    def _take_state(self) -> None:
        """Put a device that takes over where all begin, by its snapshot."""
        if self.duty.epoch >= 0:
            self.snapshots.restore(self.device, self.duty.epoch)

    def _committed(self) -> int:
        """Take part in commits; return the first step, the newest commit's on resuming."""
        assert self.commits is not None
        assert self.checkpoints is not None
        again = self.duty.again and self.checkpoints.newest() >= 0
        resume = self.commits.resume or again
        if self.duty.epoch < 0:
            return self.checkpoints.begin(self.device, resume=resume)
        self.checkpoints.enter(resume=resume)
        make_up_for(self.checkpoints, self.device, self._writes_for())
        return self.duty.epoch

    def _writes_for(self) -> list[str]:
        """Return the devices whose parts of commits this one writes."""
        return [self.device.name]

    def _tell_restored(self, first: int) -> None:
        """Say what the user's own objects have kept, and what no state holds."""
        if first and self.device.objects is not None and self.device.objects.restored:
            note = json.dumps({"text": self.device.objects.restored})
            self.control.post(f"event/{first}/{self.device.name}-warned", note)

    def _kept(self) -> dict[str, Any]:
        """Keep what is here when the supervisor that decides is lost; return what to say of it."""
        return {"text": "no other host has all that the first one had"}

    def _run_to_end(self, first: int) -> None:
        """Run the steps from `first`, keep what comes out, and be there for the others."""
        if self.control.suspect:
            from .suspicion import TapeRecorder  # only bundles of --with suspicion have it

            line = self.control.features["suspicion"]
            self.recorder = TapeRecorder(self.transport, line, self.control.suspect)
        has_ended = self._run(first)
        if self.checkpoints is not None:  # before the files of --save: their disk may be full
            self.checkpoints.close(self.device)
        if has_ended and self.options.save:
            save_together(self.device, Path(self.options.save), Board(self.transport))
        if self.options.report:
            write_report(self.device.name, Path(self.options.report))
        self.transport.linger()

    def _run(self, first: int) -> bool:
        """Run the steps; return whether all of them were run: it may be told to stop."""
        control, device, steps = self.control, self.device, self.options.steps
        if not control.fed:  # the caller sends a batch when the one before it was trained on
            device.goes_on_after = partial(_goes_on, device.empties_every, steps, self.checkpoints)
        for step in range(first, steps):
            if control.fed:
                from .feeding import rest

                rest(control.features["feeding"], device, step, self.snapshots)
            if not control.begin(step, has_begun=not device.begins_empty):
                return False
            if self.recorder is not None:
                self.recorder.begin(device, step)
            start = time.perf_counter()
            loss = self._run_step(step)
            value = None if loss is None else float(loss)  # of a GPU, it comes after all its work
            step_s = time.perf_counter() - start
            if self.recorder is not None:
                self.recorder.end(step)
            if self.options.first_gradients:
                save_first_gradients(Path(self.options.first_gradients), device, step)
            control.say("step", step=step, loss=value, step_s=round(step_s, 6))
            self._snapshot(step, step_s)
            if self.checkpoints is not None:
                self.checkpoints.after_step(device, step)
        return True

    def _run_step(self, step: int) -> Tensor | None:
        return self.device.run_step(step)

    def _snapshot(self, step: int, step_s: float) -> None:
        """Take a snapshot, if it is time for one."""
        self.snapshots.after_step(self.device, step, step_s)


def _goes_on(empties_every: int, steps: int, checkpoints: Checkpoints | None, step: int) -> bool:
    """Whether a step may run into the next; it depends on nothing that a replacement cannot know.

    One of two neighbours that did and one that did not would wait for each other.
    """
    is_last = step + 1 == steps or (step + 1) % empties_every == 0
    return not is_last and not (checkpoints is not None and checkpoints.is_due(step))


def _connect(
    options: argparse.Namespace,
    where: torch.device,
    control: Control,
    bundle: Bundle,
    rank: int,
    generation: int,
) -> MeshTransport:
    ranks = {cls.name: number for number, cls in enumerate(bundle.devices)}
    store = PassedOn(control, generation)
    mesh = form_mesh(store, rank, len(ranks))
    return MeshTransport(ranks, where, options.deadline, store, mesh=mesh)
