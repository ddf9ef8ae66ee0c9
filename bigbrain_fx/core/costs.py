"""Costs of each op on each device, and of moving bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bigbrain_fx.core.cluster import Cluster


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one op on one device, for one micro-batch.

    `backward_s` is the whole backward, `backward_input_s` the part that the previous stage waits
    for. `saved_bytes` stay from forward to backward; `workspace_bytes` are gone when the op is.
    `host_forward_s` and `host_backward_s` are the time of the process to start it on a GPU, while
    the GPU runs earlier ops. On a CPU the other two fields include that time.
    """

    forward_s: float
    backward_s: float = 0.0
    backward_input_s: float = 0.0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Costs of every op on every device, and of moving bytes.

    `ops[device][op]`. The optimizer's step takes `optimizer_s_per_tensor[device]` for each trained
    tensor (0 where it is left out) and `optimizer_s_per_byte[device]` for each byte of them.
    `measured[device]` are the ops whose times were measured; an estimator that measures nothing
    leaves it out. `scaled[device]` names the machine of these times, where that is another machine
    than the device. `optimizer_states`: by parameter, where they are not
    `optimizer_state_per_byte`.
    `recompute`: every stage will run its forward again before each backward, which
    the ops' costs do not count. Where devices of a host slow each other, these costs are of all
    devices computing at once; `alone` has those of each by itself.
    """

    ops: Mapping[str, Mapping[str, OpCost]]
    cluster: Cluster
    optimizer_s_per_byte: Mapping[str, float]
    optimizer_state_per_byte: float = 2.0  # Adam keeps two moments
    optimizer_temporaries: float = 2.0  # Adam's: a root, and a quotient
    optimizer_leftover: float = 0.0  # of the parameter before: Python's loop still names it
    optimizer_states: Mapping[str, float] = field(default_factory=dict)
    optimizer_at_once: bool = True  # all parameters together on a GPU, as torch's `foreach` does
    measured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scaled: Mapping[str, str] = field(default_factory=dict)
    optimizer_s_per_tensor: Mapping[str, float] = field(default_factory=dict)
    recompute: bool = False
    alone: Costs | None = None

    def op_cost(self, op: str, device: str) -> OpCost:
        """Return the cost of the op named `op` on the device named `device`."""
        return self.ops[device][op]

    def optimizer_s(self, device: str, tensors: int, nbytes: int) -> float:
        """Seconds of an optimizer's step over so many trained tensors of `nbytes` bytes together.

        A tied parameter is one tensor on each device. What a step costs beside them is in
        `Overheads.step_s`.
        """
        per_tensor_s = self.optimizer_s_per_tensor.get(device, 0.0)
        return tensors * per_tensor_s + nbytes * self.optimizer_s_per_byte[device]

    def transfer_s(self, nbytes: int, a: str, b: str) -> float:
        """Seconds to move `nbytes` bytes from device `a` to device `b`."""
        return self.cluster.wire(a, b).transfer_s(nbytes)
