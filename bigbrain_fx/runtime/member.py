"""One device process under a supervisor: it becomes a device, or a spare that becomes one later.

A spare has done imports and the first step of everything before it is needed, and the others need
not wait for these.
"""

from __future__ import annotations

import argparse
import gc
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .bundle import Bundle, make_device
from .channel import Channel
from .checkpoint_format import FencedError
from .checkpoint_options import CheckpointOptions
from .coded import InputError
from .compared_stream import Subject
from .control import Control
from .finite import NOT_FINITE, NotFiniteError
from .limits import code_of
from .packets import Duty, HeadLostError
from .peers import BAD_INPUT, NOT_SAVED, TAKEN_OVER
from .tensor_file import SaveError
from .worker import KNOWS, Worker

if TYPE_CHECKING:
    pass

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
    commits: CheckpointOptions | None,
    seed: int,
    control: Control,
) -> None:
    """Be what the supervisor says, to the end; never returns before all devices have finished."""
    _listen(control)
    kind, about = Worker, {"knows": KNOWS}
    if all(cls.micros for cls in bundle.devices):
        from .surviving import ReplicatedWorker  # only bundles with replicas have it

        kind, about = ReplicatedWorker, ReplicatedWorker.about(bundle, commits)
    control.say("hello", pid=os.getpid(), plan=bundle.plan, **about)
    try:
        duty = control.next_duty()
        if duty == Duty(None):
            warm_up(bundle, seed, control)
            control.say("warm")
            duty = control.next_duty()
        if not isinstance(duty, Duty):
            from .suspicion import check_tapes  # only bundles of --with suspicion have it

            duty = check_tapes(bundle, options, seed, control, duty)
        kind(bundle, options, commits, seed, control, duty).run()
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


def _code_of(error: BaseException) -> int:
    """Return the exit code for an error that is of no limit."""
    for kind, code in CODES.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def warm_up(bundle: Bundle, seed: int, control: Control) -> None:
    """Run one step of each device of the bundle, one after another, on zeros for messages.

    A spare that is needed meanwhile leaves it at that.
    """
    for rank, cls in enumerate(bundle.devices):
        if control.duties:
            return
        if "weights" in cls.offload or cls.is_opaque or hasattr(cls, "stateful"):
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
