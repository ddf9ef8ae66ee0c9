"""What a training run leaves behind, and whether two runs have left the same, bit by bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bigbrain_fx.verification.module import equal, link


@dataclass(frozen=True)
class Trace:
    """What a training run leaves behind, by names of the model."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    unlike: set[str] = field(default_factory=set)  # held by several devices, with other numbers
    left_out: set[int] = field(default_factory=set)  # steps that a loss scale kept from updating

    def take(self, into: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
        """Take what one device has; note what another has otherwise."""
        for name, tensor in found.items():
            if name in into and not equal(into[name], tensor):
                self.unlike.add(name)
            into[name] = tensor


def same_run(
    name: str, want: Trace, have: Trace, stored: Collection[str]
) -> list[dict[str, object]]:
    """Compare losses, gradients of step 0, and tensors at the end: a check each.

    Args:
        name: of the two runs: "reference = bundle".
        want: what is right.
        have: to compare with it.
        stored: the tensors that must be there at the end.
    """
    steps = len(want.losses)
    losses = [
        f"step {step}: {float(one):.9g} and {float(other):.9g}"
        for step, (one, other) in enumerate(zip(want.losses, have.losses, strict=True))
        if not equal(other, one)
    ]
    gradients = [
        f"gradient of {n}" for n, g in want.gradients.items() if not _has(have.gradients, n, g)
    ]
    ends = {n: t for n, t in want.tensors.items() if n in have.tensors}
    tensors = [
        *(n for n, t in ends.items() if not equal(have.tensors[n], t)),
        *(f"{n} differs between members" for n in sorted(want.unlike)),
        *(f"{n} is missing" for n in sorted({*stored} - {*have.tensors})),
        *(f"{n} differs between the devices that hold it" for n in sorted(have.unlike)),
    ]
    return [
        link(f"{name}, losses", losses, f"{steps} steps bitwise"),
        link(f"{name}, gradients", gradients, f"{len(want.gradients)} tensors of step 0 bitwise"),
        link(f"{name}, weights", tensors, f"{len(ends)} tensors after {steps} steps bitwise"),
    ]


def _has(found: Mapping[str, Tensor], name: str, want: Tensor) -> bool:
    return name in found and equal(found[name], want)
