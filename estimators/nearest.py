"""An op that nobody has measured -> what the most alike measured one took, for as much work.

    measured   linear  24x256, 688x256    600 us, of which 8 us to start
    asked      linear  24x256, 344x256    half the products:  8 us + 592 us / 2

A member of a tensor group has a part of each layer, and other rows a micro-batch make every op
another one; how far a kind of op is from the roofline on this very processor, it keeps. For CPUs
only: on a GPU other sizes run other kernels, which `cuda_clock` knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bigbrain_fx.core import Op
from bigbrain_fx.costs import Machine, OpProfile, Signature

_MOST = 64.0  # times the work, or a part of it: farther away nothing is alike
_Kind = tuple[object, ...]


@dataclass(frozen=True)
class Nearest:
    """Measured ops by what kind of call they are."""

    machine: Machine
    kinds: Mapping[_Kind, tuple[OpProfile, ...]]

    @classmethod
    def of(cls, machine: Machine, profiles: Iterable[OpProfile]) -> Nearest:
        """Sort what was measured on a machine by kinds."""
        kinds: dict[_Kind, list[OpProfile]] = {}
        for profile in profiles:
            kinds.setdefault(_kind(profile.signature), []).append(profile)
        return cls(machine, {kind: tuple(found) for kind, found in kinds.items()})

    def like(self, op: Op, asked: Signature, launches: tuple[float, float]) -> OpProfile | None:
        """Return what an op would have taken on the machine; None: nothing is like it.

        Args:
            op: concrete.
            asked: its signature.
            launches: what starting a forward and a half of a backward takes, in launches.
        """
        own_s = self._work_s(int(op.flops), int(op.reads_bytes) + int(op.writes_bytes))
        known = [(self._profile_s(p), p) for p in self.kinds.get(_kind(asked), ())]
        near = [(abs(math.log(own_s / s)), s, p) for s, p in known if s > 0.0 < own_s]
        far, known_s, profile = min(near, key=lambda each: each[:2], default=(math.inf, 1.0, None))
        if profile is None or far > math.log(_MOST):
            return None
        forward, backward = (count * self.machine.launch_s for count in launches)
        more = own_s / known_s
        return replace(
            profile,
            signature=asked,
            forward_s=_scaled(profile.forward_s, forward, more),
            backward_input_s=_scaled(profile.backward_input_s, backward, more),
            backward_weight_s=_scaled(profile.backward_weight_s, backward, more),
            flops=int(op.flops),
            reads_bytes=int(op.reads_bytes),
            writes_bytes=int(op.writes_bytes),
        )

    def _profile_s(self, profile: OpProfile) -> float:
        return self._work_s(profile.flops, profile.reads_bytes + profile.writes_bytes)

    def _work_s(self, flops: int, moved_bytes: int) -> float:
        """Return the seconds of the machine's roofline."""
        by_memory_s = moved_bytes / self.machine.memory_bytes_per_s
        return max(flops / self.machine.flops_per_s, by_memory_s)


def _scaled(taken_s: float, starting_s: float, more: float) -> float:
    starting_s = min(taken_s, starting_s)
    return starting_s + (taken_s - starting_s) * more


def _kind(signature: Signature) -> _Kind:
    """Return what alike calls share: all but shapes and literals."""
    tensors = ((t.dtype, t.is_parameter, t.wants_grad, len(t.shape)) for t in signature.tensors)
    return signature.target, signature.mode, *tensors
