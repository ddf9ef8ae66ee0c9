"""Traces of training runs, and their comparison, bitwise or to rounding.

Runs that add in different orders, or compute by compiled code, are compared by the largest entries
of losses and first gradients. Weights drift: Adam turns the sign of a tiny gradient into a whole
step. A tensor's distance is therefore compared with its change so far, in the norm. One whose
gradient is what rounding leaves of a zero is only counted. A replica left out, or counted twice, is
more than that in each of the three. This file knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bigbrain_fx.frontend import allowed, distance, same_numbers

_FLOAT32 = 1.2e-7
_LOSS, _HALF_LOSS = 1e-3, 5e-2  # relative; the latter where 16 bits are in the model
_ZERO = 1e-6  # of the largest entry of all gradients: a gradient below it may be rounding alone
_COMPILED = 1e-4  # of a tensor's largest entry: compiled code rounds in each op, not in sums alone
_SMALL = 1e-2  # of the largest gradient: what is below it may be as far off as a tensor so large
_ROUNDED = 8  # units of the largest entry of all gradients: what rounding leaves of a zero
_SHOWN = 5
_DRIFT, _COMPILED_DRIFT = 0.05, 0.15  # of the way that a tensor has come since it was split


def link(name: str, found: list[str], detail: str) -> dict[str, object]:
    """Return one link of the chain: it holds when nothing was found; else the first few findings.

    A broken bundle differs everywhere: the first few lines say enough.
    """
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    shown = "; ".join([*found[:_SHOWN], *more])
    return {"name": name, "passed": not found, "detail": shown if found else detail}


def left_of_zero(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], unit: float
) -> frozenset[str]:
    """Return whose gradient is in both what rounding leaves of a zero: it has no digit to compare.

    A bias before a BatchNorm has such a one, and whatever moves both sides of a distance.

    Args:
        expected: gradients of all that is trained.
        found: those to compare with them.
        unit: of rounding, of the coarsest type in the model.
    """
    sizes = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in expected.items()}
    noise = _ROUNDED * unit * max(sizes.values(), default=0.0)
    return frozenset(
        name
        for name, size in sizes.items()
        if 0 < size <= noise and name in found and float(found[name].abs().max()) <= noise
    )


def relative_error(found: Tensor | None, want: Tensor) -> float:
    """Return the largest difference as a share of the largest entry; a missing gradient is zero."""
    return distance(found, want) / (distance(want, None) or 1.0)


@dataclass(frozen=True)
class Trace:
    """Losses, gradients and tensors of a training run, by names of the model."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    unlike: set[str] = field(default_factory=set)  # held by several devices, with other numbers
    left_out: set[int] = field(default_factory=set)  # steps that a loss scale kept from updating

    def take(self, into: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
        """Take what one device has; note what another has otherwise."""
        for name, tensor in found.items():
            if name in into and not same_numbers(into[name], tensor):
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
        if not same_numbers(other, one)
    ]
    gradients = [
        f"gradient of {n}" for n, g in want.gradients.items() if not _has(have.gradients, n, g)
    ]
    ends = {n: t for n, t in want.tensors.items() if n in have.tensors}
    tensors = [
        *(n for n, t in ends.items() if not same_numbers(have.tensors[n], t)),
        *(f"{n} differs between TP ranks" for n in sorted(want.unlike)),
        *(f"{n} is missing" for n in sorted({*stored} - {*have.tensors})),
        *(f"{n} differs between the devices that hold it" for n in sorted(have.unlike)),
    ]
    return [
        link(f"{name}, losses", losses, f"{steps} steps bitwise"),
        link(f"{name}, gradients", gradients, f"{len(want.gradients)} tensors of step 0 bitwise"),
        link(f"{name}, weights", tensors, f"{len(ends)} tensors after {steps} steps bitwise"),
    ]


def _has(found: Mapping[str, Tensor], name: str, want: Tensor) -> bool:
    return name in found and same_numbers(found[name], want)


# --------------------------------------------------------------------------- to rounding


def same_to_rounding(
    before: Mapping[str, Tensor],
    expected: Trace,
    actual: Trace,
    unit: float,
    *,
    compiled: bool = False,
) -> list[dict[str, object]]:
    """Compare losses, gradients of step 0 and tensors at the end; three checks.

    Args:
        before: the tensors that both began with.
        expected: of the reference.
        actual: of processes whose sums torch's collectives made, or of compiled stages.
        unit: of rounding, of the coarsest type in the model.
        compiled: the stages of `actual` ran under torch.compile.
    """
    found = (
        _losses(expected, actual, unit),
        _gradients(expected, actual, limit_of(unit, compiled), _SMALL if compiled else _ZERO),
        _weights(before, expected, actual, _COMPILED_DRIFT if compiled else _DRIFT),
    )
    return [{**check, "rounded": True} for check in found]


def _losses(expected: Trace, actual: Trace, unit: float) -> dict[str, object]:
    limit = _HALF_LOSS if unit > _FLOAT32 else _LOSS
    pairs = zip(expected.losses, actual.losses, strict=True)
    apart = [float((a - b).abs() / max(a.abs(), b.abs(), a.new_tensor(1e-30))) for a, b in pairs]
    found = [f"step {n}: {share:.1e} apart" for n, share in enumerate(apart) if not share <= limit]
    said = f"{len(apart)} steps to rounding, at most {max(apart, default=0.0):.1e} apart"
    return link("reference = bundle, losses", found, f"{said} (allowed {limit:g})")


def limit_of(unit: float, compiled: bool) -> float:
    """Return by how much of its largest entry a tensor may differ."""
    return max(allowed(unit), _COMPILED) if compiled else allowed(unit)


def _gradients(expected: Trace, actual: Trace, limit: float, small: float) -> dict[str, object]:
    largest = max(map(_size, expected.gradients.values()), default=0.0)
    worst, found = 0.0, []
    for name, want in expected.gradients.items():
        if name not in actual.gradients:
            found.append(f"gradient of {name} is missing")
            continue
        distance = _size(actual.gradients[name].double() - want.double())
        scale = max(_size(want), small * largest) or 1.0
        worst = max(worst, distance / scale)
        if not distance <= limit * scale:
            found.append(f"gradient of {name} differs by {distance / scale:.1e} of its largest")
    said = f"{len(expected.gradients)} tensors of step 0 to rounding, at most {worst:.1e} apart"
    return link("reference = bundle, gradients", found, f"{said} (allowed {limit:g})")


def _weights(
    before: Mapping[str, Tensor], expected: Trace, actual: Trace, limit: float
) -> dict[str, object]:
    found = [f"{name} differs between the devices that hold it" for name in sorted(actual.unlike)]
    noise = _ZERO * max(map(_size, expected.gradients.values()), default=0.0)
    worst, left_out = 0.0, 0
    for name, want in expected.tensors.items():
        if name not in actual.tensors:
            found.append(f"{name} is missing")
        elif not want.is_floating_point():
            found += [] if want.equal(actual.tensors[name]) else [f"{name} differs"]
        elif name in expected.gradients and _size(expected.gradients[name]) <= noise:
            left_out += 1
        else:
            share = _drift(before[name], want, actual.tensors[name])
            worst = max(worst, share)
            found += [] if share <= limit else [f"{name} is {share:.0%} of its way apart"]
    said = f"to rounding: {len(expected.tensors) - left_out} tensors at most {worst:.1e} of their "
    said += f"way apart (allowed {limit:g})"
    said += f", {left_out} whose gradient may be rounding alone not compared" if left_out else ""
    return link("reference = bundle, weights", found, said)


def outputs_to_rounding(
    title: str,
    expected: Sequence[Mapping[str, Tensor]],
    actual: Sequence[Mapping[str, Tensor]],
    unit: float,
) -> dict[str, object]:
    """Compare the outputs of batches that compiled stages made; whole numbers bit for bit."""
    worst, found, limit = 0.0, [], limit_of(unit, compiled=True)
    for batch, (outputs, made) in enumerate(zip(expected, actual, strict=True)):
        for name, want in outputs.items():
            apart = _apart(want, made.get(name))
            worst = max(worst, apart)
            found += [] if apart <= limit else [f"batch {batch}: {name} differs by {apart:.1e}"]
    said = f"{len(expected)} batches to rounding, at most {worst:.1e} of an output's largest apart"
    return {**link(title, found, f"{said} (allowed {limit:g})"), "rounded": True}


def _apart(want: Tensor, found: Tensor | None) -> float:
    """Return the largest difference as a share of the largest entry; infinite for another shape."""
    if found is None or found.shape != want.shape or found.dtype != want.dtype:
        return math.inf
    if not want.is_floating_point():
        return 0.0 if found.equal(want) else math.inf
    unlike = ~((found == want) | (found.isnan() & want.isnan()))
    if not unlike.any():
        return 0.0
    distance = _size((found.double() - want.double())[unlike])
    finite = want[want.isfinite()]
    return distance / (_size(finite) or 1.0) if math.isfinite(distance) else math.inf


def _drift(before: Tensor, want: Tensor, have: Tensor) -> float:
    """Return the distance of two tensors as a share of the way that one has come."""
    way = float((want.double() - before.double()).norm())
    distance = float((have.double() - want.double()).norm())
    return distance / way if way else float(distance > 0)


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
