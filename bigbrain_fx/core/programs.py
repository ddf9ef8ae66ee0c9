"""Programs of all devices in a step, and their forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from bigbrain_fx.core.showing import Shown
from bigbrain_fx.core.stages import Edge


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward pass of a stage on one micro-batch."""

    stage: int
    micro: int
    do: Literal["forward"] = "forward"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's backward pass on one micro-batch: gradients of its inputs and parameters.

    Those of the stage's deferred parameters are left to a BackwardWeight.
    """

    stage: int
    micro: int
    do: Literal["backward"] = "backward"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Make the gradients of a stage's deferred parameters for one micro-batch, after its Backward.

    It has no message: no device waits for it, as gradients of inputs are sent before.
    """

    stage: int
    micro: int
    do: Literal["backward_weight"] = "backward_weight"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending one message; `micro` is None for messages that go once a step."""

    edge: Edge
    micro: int | None
    do: Literal["send"] = "send"


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for one message; `micro` is None for messages that go once a step."""

    edge: Edge
    micro: int | None
    do: Literal["recv"] = "recv"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Sum tied gradients, clip, and update the device's parameters."""

    do: Literal["optimizer_step"] = "optimizer_step"


Compute: TypeAlias = Forward | Backward | BackwardWeight
"""What a stage computes for one micro-batch."""

Instruction: TypeAlias = Compute | Send | Recv | OptimizerStep


@dataclass(frozen=True)
class Program:
    """Instructions of one device in one step; simulator and runtime execute the same list.

    Around each Forward stand the Recv of its activations and the Send of its results, around each
    Backward those of gradients. Local edges (both ends on this device) have no instruction.
    """

    device: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """One bar of a timeline: `what` ran on `device` (or on a link "a->b") from start_s to end_s."""

    device: str
    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """Forecast of one device's work and memory in one step.

    `peak_bytes` is the sum of the parts; `data_bytes` are the batch's. `stored_bytes` are the most
    that lies in its store, and no part of it; `moved_s` is what moving it takes of a step.

    `held` is kept with the timeline: when each instruction begins, and what it holds while it runs.
    """

    device: str
    busy_s: float
    idle_s: float
    peak_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    messages_bytes: int
    data_bytes: int = 0
    stored_bytes: int = 0
    moved_s: float = 0.0
    held: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, repr=False)
class Forecast(Shown):
    """Forecast of one step: seconds, and for each device time and memory."""

    step_s: float
    devices: tuple[DeviceForecast, ...]
    timeline: tuple[Slice, ...] = ()

    def of(self, device: str) -> DeviceForecast:
        """Return one device's forecast."""
        return next(entry for entry in self.devices if entry.device == device)

    def __str__(self) -> str:
        """Show the step and a line per device."""
        lines = [f"{self.step_s:.4f} s a step on {len(self.devices)} devices"]
        for entry in self.devices:
            peak = f"peak {entry.peak_bytes / 2**20:.0f} MiB"
            busy = f"busy {entry.busy_s:.4f} s, idle {entry.idle_s:.4f} s"
            lines.append(f"  {entry.device}: {busy}, {peak}")
        return "\n".join(lines)
