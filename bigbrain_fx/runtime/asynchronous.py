"""Steps that begin before the one before them has ended: each pass has a version of the weights.

    2bw    W(t+1) = W(t) - u(g(W(t-1)))     t counts steps; both passes of a batch with W(t-1)
    stash  W(n+1) = W(n) - u(g(W(n-b)))     n counts micro-batches; b later stages follow this one

A pass computes with the version of its number, not with the newest version. A step that runs into
the next batch therefore has the same numbers as one that ends with nothing under way. Steps may end
so whenever a state is wanted.

Copied into bundles of `--asynchronous`.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW), ICML
2021, section 3.1; weight stashing of "PipeDream", SOSP 2019, section 3.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .channel import Channel
from .compared_stream import AgreeingTransport, Subject
from .data import Stream
from .device import Device
from .finite import POLICIES
from .optimizer_state import OLDER, StateError

Tensors = Mapping[str, Tensor]


class VersionError(StateError):
    """Report weights that are not there in the version that a pass computes with, or cannot be."""


class Versions:
    """The weights of a stage after its newest updates, oldest first.

    The stage's parameters show one version at a time; `masters` are the newest, and what the
    optimizer updates.

    Args:
        shown: the stage's parameters, with the first version's numbers.
        most: versions that are held; an update writes over the oldest.
        a_step: updates in one step.
    """

    def __init__(self, shown: Mapping[str, nn.Parameter], most: int, a_step: int) -> None:
        self.shown = shown
        self.most = most
        self.a_step = a_step
        self.newest = 0  # updates that have been made
        # `.data`: a detached one would count its writes as those of what is shown
        self.masters = {name: nn.Parameter(p.data) for name, p in shown.items()}
        self.held: deque[Tensors] = deque([{n: p.detach() for n, p in self.masters.items()}])

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Compute with the weights after so many updates.

        Raises:
            VersionError: they are not held.
        """
        self._show(self.held[self._place(number)])
        try:
            yield
        finally:
            self._show(self.held[-1])

    def _place(self, number: int) -> int:
        place = len(self.held) - 1 - (self.newest - number)
        if not 0 <= place < len(self.held):
            oldest = self.newest - len(self.held) + 1
            raise VersionError(
                f"weights after {number} updates are wanted, those after {oldest} to "
                f"{self.newest} are held: split the model again",
                code="BX5003",
            )
        return place

    def _show(self, version: Tensors) -> None:
        for name, parameter in self.shown.items():
            parameter.data = version[name]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the masters be updated; where older versions are held, in the oldest one's memory."""
        if self.most > 1:
            newest = self.held[-1]
            room = self.held.popleft() if len(self.held) == self.most else _like(newest)
            for name, master in self.masters.items():
                master.data = room[name].copy_(newest[name])
            self.held.append(room)
        yield
        self.newest += 1
        self._show(self.held[-1])

    def older(self) -> dict[str, Tensor]:
        """Return all but the newest, by their names in a state."""
        return {
            f"{OLDER}{back}:{name}": tensor
            for back, version in enumerate(reversed(self.held))
            for name, tensor in (version.items() if back else ())
        }

    def wanted(self, finished: int) -> set[str]:
        """Return what `restore` needs where so many steps are finished."""
        return {f"{OLDER}{back}:{name}" for back in self._backs(finished) for name in self.masters}

    def restore(self, finished: int, older: Tensors) -> None:
        """Be where so many steps were finished; the masters have their numbers already."""
        self.newest = finished * self.a_step
        newest = {name: master.detach() for name, master in self.masters.items()}
        self.held = deque([newest])
        for back in reversed(self._backs(finished)):
            room = _like(newest)
            for name, tensor in room.items():
                tensor.copy_(older[f"{OLDER}{back}:{name}"])
            self.held.insert(len(self.held) - 1, room)
        self._show(newest)

    def _backs(self, finished: int) -> range:
        return range(1, 1 + min(finished * self.a_step, self.most - 1))


def _like(version: Tensors) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor) for name, tensor in version.items()}


class AsynchronousDevice(Device):
    """A device with one stage of a pipeline that does not run empty between two steps.

    In a step it runs forward `ahead` micro-batches of the next batch; their numbers go on from this
    batch's last.

    Attributes:
        asynchronous: "2bw" or "stash".
        ahead: how many later devices' backwards this one's first backward waits for.
        begins_empty: nothing of this step's batch was run by the step before.
        goes_on: this step runs into the next batch.
    """

    asynchronous = "2bw"
    ahead = 0
    empties_every = 8

    def __init__(
        self, transport: AgreeingTransport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self.begins_empty = True
        self.goes_on = False
        self._agreed = -1  # the last step whose batch was compared
        self._batches_on = 0  # of the pass that runs now: 1, where it is of the next batch

    # ------------------------------------------------------------------ set-up

    def _masters(self) -> dict[str, nn.Parameter]:
        most, a_step = (2, 1) if self._is_2bw else (self.ahead + 1, self.micro_batches)
        self.versions = Versions(self.parameters, most, a_step)
        return self.versions.masters

    @property
    def _is_2bw(self) -> bool:
        return self.asynchronous == "2bw"

    # ------------------------------------------------------------------ a step

    def run_step(self, step: int) -> Tensor | None:
        """Run one training step, and forwards of the next where it goes on."""
        if self.on_nan == POLICIES[1]:
            raise VersionError(
                "--on-nan skip asks all devices before each update, and asynchronous ones are in "
                "unlike steps: use --on-nan stop, or split without --asynchronous",
                code="BX5004",
            )
        self.goes_on = self.goes_on_after(step)
        loss = super().run_step(step)
        self.begins_empty = not self.goes_on
        return loss

    def _messages(self, channel: Channel) -> int:
        """Return how many come in this step: activations of the next batch, too."""
        if channel.kind != "activation":
            return super()._messages(channel)
        came = 0 if self.begins_empty else self.ahead
        return super()._messages(channel) - came + (self.ahead if self.goes_on else 0)

    def batch(self, name: str, micro: int) -> Tensor:
        """Return one model input of one micro-batch, of this batch or of the next."""
        on, micro = divmod(micro, self.micro_batches)
        step = self.step + on
        self.stream.advance(step)
        if step > self._agreed:
            self.transport.agree(Subject(step), self.stream.digest(), self.name)
            self._agreed = step
        return self.stream.get(name, micro)

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401
        """Run the stage forward with the version that this micro-batch has."""
        self._batches_on, micro = divmod(micro, self.micro_batches)
        try:
            with self._of().at(self._version(self.step + self._batches_on, micro)):
                return super().forward(stage, micro, **values)
        finally:
            self._batches_on = 0

    def backward(self, stage: int, micro: int, /, **sent: Tensor | None) -> Any:  # noqa: ANN401
        """Run the stage backward with the version of its forward."""
        with self._of().at(self._version(self.step, micro)):
            return super().backward(stage, micro, **sent)

    def _version(self, step: int, micro: int) -> int:
        """Return how many updates the weights of a micro-batch have seen."""
        if self._is_2bw:
            return max(0, step - 1)
        return max(0, step * self.micro_batches + micro - self.ahead)

    def _key(self, micro: int) -> tuple[int, int, int]:
        return self.seed, self.step + self._batches_on, micro

    def _seed(self, loss: Tensor, micro: int) -> Tensor:
        """Under stash a micro-batch is all that its update is of."""
        return super()._seed(loss, micro) if self._is_2bw else torch.ones_like(loss)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the newest version: once a step, under stash after each micro-batch."""
        with self._of().updating():
            super()._update(optimizer)

    def _advance_rates(self) -> None:
        """A scheduler counts steps, however many updates are in one."""
        if self._of().newest % self._of().a_step == 0:
            super()._advance_rates()

    def _of(self) -> Versions:
        assert self.versions is not None, "train_with makes them"
        return self.versions
