"""One device process under a supervisor: it becomes a device, or a spare that becomes one later.

What a spare has done before it is needed (imports, the first step of everything) it need not do
while the others wait.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .agreed import Subject
from .board import Board, SupervisedCommitter, make_up_for
from .bundle import Bundle, make_device, save_first_gradients
from .channel import Channel
from .coded import InputError
from .commit_start import CommitOptions
from .committing import Committer, committer_of
from .control import Control
from .finite import NOT_FINITE, NotFiniteError
from .held_weights import WeightsError
from .limits import code_of
from .mesh import MeshTransport, PassedOn, form_mesh
from .packets import Duty, HeadLostError, StepAgainError
from .peers import BAD_INPUT, NOT_SAVED, TAKEN_OVER
from .records import FencedError
from .rendezvous import own_device, require_gpu, write_report
from .replay import ReplayTransport
from .saving import save_together
from .snapshots import OwnSnapshots
from .state import StateError
from .tensor_file import SaveError

if TYPE_CHECKING:
    from .device import Device  # a plain pipeline has `checked_device` for it
    from .surviving import Survivor
    from .suspicion import TapeRecorder

CODES = {
    NotFiniteError: NOT_FINITE,
    FencedError: TAKEN_OVER,
    SaveError: NOT_SAVED,
    InputError: BAD_INPUT,
}
LISTENING = ("feeding", "hosts", "suspicion")  # files of features with orders of their own
SAID = frozenset(CODES.values())  # errors that are said in a line


def serve(
    bundle: Bundle,
    options: argparse.Namespace,
    commits: CommitOptions | None,
    seed: int,
    control: Control,
) -> None:
    """Be what the supervisor says, to the end; never returns before all devices have finished."""
    _listen(control)
    knows = ["forget", "part", "check", "last_commit"]
    knows += ["peers"] if _has_peers(bundle) else []
    control.say("hello", pid=os.getpid(), plan=bundle.plan, knows=knows, **_about(bundle, commits))
    try:
        duty = control.next_duty()
        if duty == Duty(None):
            warm_up(bundle, seed, control)
            control.say("warm")
            duty = control.next_duty()
        if not isinstance(duty, Duty):
            from .suspicion import check_tapes  # only bundles of --with suspicion have it

            duty = check_tapes(bundle, options, seed, control, duty)
        _train(bundle, options, commits, seed, control, duty)
    except HeadLostError:
        control.say("kept", text="a device had not begun yet")
    except BaseException as error:
        of_limit = code_of(error)
        code = _code_of(error)  # what is known to come again is not tried again
        code = of_limit if of_limit is not None and code not in SAID else code
        if of_limit is not None or code in SAID:
            control.fail(error, code)
        control.say_failed(error, code)
        raise


def _listen(control: Control) -> None:
    """Let features that this bundle has obey orders of their own, before one can come."""
    for name in LISTENING:
        if Path(__file__).with_name(f"{name}.py").exists():
            control.features[name] = import_module(f".{name}", __package__).listen(control)


def _has_peers(bundle: Bundle) -> bool:
    """Whether every tensor of a bundle's devices is on another device, too, and alike there."""
    if not all(cls.micros for cls in bundle.devices):
        return False
    from .peer_states import can_take_from_peers  # only bundles with replicas have it

    return can_take_from_peers(bundle)


def _code_of(error: BaseException) -> int:
    """Return the exit code for an error that is of no limit."""
    for kind, code in CODES.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def _about(bundle: Bundle, commits: CommitOptions | None) -> dict[str, list[list[str]]]:
    """Return what else to say of a bundle: its replicas, where a run can go on without one."""
    if not all(cls.micros for cls in bundle.devices):
        return {}
    from .standing import replicas_of  # only bundles with replicas have it

    with suppress(WeightsError):  # whoever loads weights says it
        found = replicas_of(bundle, commits=commits is not None)
        return {"replicas": found} if found else {}
    return {}


def warm_up(bundle: Bundle, seed: int, control: Control) -> None:
    """Run one step of each device of the bundle, one after another, on zeros for messages.

    A spare that is needed meanwhile leaves it at that.
    """
    for rank in range(len(bundle.devices)):
        if control.duties:
            return
        if "weights" in bundle.devices[rank].offload or bundle.devices[rank].is_opaque:
            continue  # its memory does not hold them; a step leaves traces in the user's Python
        torch.set_num_threads(bundle.threads[rank])
        device = make_device(bundle, rank, _Nothing(), seed, torch.device("cpu"), offloads=False)
        device.hooks = type(device.hooks)()
        device.on_nan = "ignore"  # zeros may well have no finite loss
        device.run_step(0)
        del device
        gc.collect()


class _Nothing:
    """A transport without other ends: zeros come, and nothing leaves."""

    def begin_step(self, channels: tuple[tuple[Channel, int], ...]) -> None:
        pass

    def send(self, channel: Channel, tensor: Tensor) -> None:
        pass

    def recv(self, channel: Channel) -> Tensor:
        zeros = torch.zeros(channel.shape, dtype=channel.dtype)
        if not channel.varies:
            return zeros
        from .varying import enclose  # only bundles whose messages vary have it

        return enclose(channel, zeros)

    def agree(self, what: Subject, digest: str, device: str) -> None:
        pass

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        return True

    def finish(self) -> None:
        pass


def _train(
    bundle: Bundle,
    options: argparse.Namespace,
    commits: CommitOptions | None,
    seed: int,
    control: Control,
    duty: Duty,
) -> None:
    """Be a device: from the start or from a snapshot, to the last step, and then for the others."""
    assert duty.device is not None
    if control.suspect:
        from .suspicion import require_repeatable  # only bundles of --with suspicion have it

        require_repeatable(bundle)
    torch.set_num_threads(options.threads or bundle.threads[duty.rank])
    os.environ["LOCAL_RANK"] = str(duty.local_rank)
    require_gpu(bundle.kinds, duty.rank)
    where = own_device(bundle.kinds, duty.rank)
    if control.fed:
        from .feeding import FedBatches  # only bundles of sessions have it

        bundle = replace(bundle, batches=FedBatches(control.features["feeding"]))
    cls = bundle.devices[duty.rank]
    connecting = partial(_connect, options, where, control)
    connect = partial(connecting, bundle, duty.rank)
    transport = ReplayTransport(cls.name, cls.channels, cls.own_micro_batches(), control, connect)
    device = make_device(bundle, duty.rank, transport, seed, where)
    device.on_nan = options.on_nan
    device.of_run = {"steps": options.steps, "seed": seed}
    if device.compiled:
        from .compiled import is_compiling  # only bundles of --compile have it

        control.is_busy = is_compiling
    board = Board(transport, options.deadline)
    committer: Committer | None = None
    survivor = None
    if cls.micros:
        from .surviving import Survivor  # only bundles with replicas have it

        survivor = Survivor(bundle, device, transport, connecting, board, commits)
        committer, bundle = survivor.committer, survivor.begin()
    elif commits is not None:
        committer = committer_of(bundle, device, board, commits, kind=SupervisedCommitter)
    snapshots = OwnSnapshots(transport, control, duty)
    _take_state(bundle, device, snapshots, duty.epoch)
    first = max(duty.epoch, 0)
    if commits is not None and committer is not None:
        first = _committed(device, committer, commits, duty, survivor)
    _tell_restored(device, control, first)
    if duty.again or (duty.epoch < 0 and first):
        control.say("begins", step=first)
    if duty.epoch < 0:
        transport.start(first, {})
    if transport.inner is None:
        transport.form()
    try:
        _run_to_end(device, snapshots, committer, options, first)
    except HeadLostError:
        none = {"text": "no other host has all that the first one had"}
        control.say("kept", **(none if survivor is None else survivor.keep_last()))


def _committed(
    device: Device,
    committer: Committer,
    commits: CommitOptions,
    duty: Duty,
    survivor: Survivor | None,
) -> int:
    """Let the device take part in commits; return its first step, the newest one's on resuming."""
    resume = commits.resume or (duty.again and committer.newest() >= 0)
    if duty.epoch < 0:
        return committer.begin(device, resume=resume)
    committer.enter(resume=resume)
    make_up_for(committer, device, survivor.writes_for() if survivor else [device.name])
    return duty.epoch


def _tell_restored(device: Device, control: Control, first: int) -> None:
    """Say what the user's own objects have kept, and what no state holds."""
    if first and device.objects is not None:
        note = json.dumps({"text": device.objects.restored})
        control.post(f"event/{first}/{device.name}-warned", note)


def _run_to_end(
    device: Device,
    snapshots: OwnSnapshots,
    committer: Committer | None,
    options: argparse.Namespace,
    first: int,
) -> None:
    """Run the steps from `first`, keep what comes out, and be there for the others."""
    transport, control = snapshots.transport, snapshots.control
    recorder: TapeRecorder | None = None
    if control.suspect:
        from .suspicion import TapeRecorder  # only bundles of --with suspicion have it

        recorder = TapeRecorder(transport, control.features["suspicion"], control.suspect)
    has_ended = _run(device, snapshots, committer, options, first, recorder)
    if committer is not None:  # before the files of --save: their disk may be full
        committer.close(device)
    if has_ended and options.save:
        save_together(device, Path(options.save), Board(transport))
    if options.report:
        write_report(device.name, Path(options.report))
    transport.linger()


def _take_state(bundle: Bundle, device: Device, snapshots: OwnSnapshots, epoch: int) -> None:
    """Put a device that takes over where all begin `epoch`: by a snapshot, or by its peers."""
    transport, control = snapshots.transport, snapshots.control
    by_peers = epoch >= 0 and control.peers
    has_peers = _has_peers(bundle)
    if control.peers and not has_peers:
        raise StateError(
            "the other processes take states from peers, and this one has functions in "
            "`on_step_begin`: give all of them the same hooks, or --memory-checkpoint-every N",
            code="BX5069",
        )
    if has_peers:
        from .peer_states import PeerStates  # only bundles with replicas have it

        transport.peers = PeerStates(bundle, device, control, epoch if by_peers else None)
    if by_peers:
        transport.start(epoch, {})
        transport.form()
    elif epoch >= 0:
        snapshots.restore(device, epoch)


def _run(
    device: Device,
    snapshots: OwnSnapshots,
    committer: Committer | None,
    options: argparse.Namespace,
    first: int,
    recorder: TapeRecorder | None = None,
) -> bool:
    """Run the steps from `first`; return whether all of them were run: it may be told to stop."""
    control = snapshots.control
    if not control.fed:  # the caller sends a batch when the one before it was trained on
        device.goes_on_after = partial(_goes_on, device.empties_every, options.steps, committer)
    for step in range(first, options.steps):
        if control.fed:
            from .feeding import rest

            rest(control.features["feeding"], device, step, snapshots)
        if not control.begin(step, has_begun=not device.begins_empty):
            return False
        if recorder is not None:
            recorder.begin(device, step)
        start = time.perf_counter()
        if snapshots.transport.peers is not None:
            snapshots.transport.peers.began = start
        loss = _run_step(device, step, snapshots)
        value = None if loss is None else float(loss)  # of a GPU, it comes after all its work
        step_s = time.perf_counter() - start
        if recorder is not None:
            recorder.end(step)
        if options.first_gradients:
            save_first_gradients(Path(options.first_gradients), device, step)
        control.say("step", step=step, loss=value, step_s=round(step_s, 6))
        if not control.peers:
            snapshots.after_step(device, step, step_s)
        if committer is not None:
            committer.after_step(device, step)
    return True


def _run_step(device: Device, step: int, snapshots: OwnSnapshots) -> Tensor | None:
    """Run a step, and again where fewer devices are to do it."""
    control = snapshots.control
    while True:
        device.updates_together = control.peers
        if control.lost and not control.peers and max(snapshots.slots) < 0:
            snapshots.take_now(device, step)  # the last replica's, which had peers until now
        with suppress(StepAgainError):
            return device.run_step(step)


def _goes_on(empties_every: int, steps: int, committer: Committer | None, step: int) -> bool:
    """Whether a step may run into the next; it depends on nothing that a replacement cannot know.

    One of two neighbours that did and one that did not would wait for each other.
    """
    is_last = step + 1 == steps or (step + 1) % empties_every == 0
    return not is_last and not (committer is not None and committer.is_due(step))


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
