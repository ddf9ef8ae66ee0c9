"""Whether two sets of gradients are the same but for rounding.

Backward passes that add in another order give other last digits. A gradient is the same when it is
within a few units of its element type. It is also the same when it is as near to the exact one (of
the module in float64) as the module's own. Where numbers cancel, both are far from the exact one.
This file knows gradients; it knows no graphs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.export import quiet
from bigbrain_fx.frontend.tracing.plain import state_kept

Gradients: TypeAlias = Mapping[str, Tensor | None]

_SINGLE = 1e-6  # of a gradient's largest entry, for float32: eight units of rounding
_UNITS = 8.0
_SURE = 1.3  # for 16 bits, where eight units are six per cent: beyond it the exact one decides
_NOISE = 1e-7  # of the largest entry of all gradients: what rounding leaves of a zero
_AS_NEAR = 3.0  # times the module's own distance from the exact gradient
_ALIKE = 0.1  # distance of all gradients from the exact ones: beyond it that run drew other numbers
_FLOAT32 = torch.finfo(torch.float32).eps


def coarsest(dtypes: Iterable[torch.dtype]) -> float:
    """Return the rounding unit of the coarsest floating type: 1.2e-7 for float32."""
    return max((torch.finfo(t).eps for t in dtypes if t.is_floating_point), default=_FLOAT32)


def allowed(unit: float) -> float:
    """Return the allowed difference of a gradient, relative to its largest entry."""
    return _UNITS * unit if unit > _FLOAT32 else _SINGLE


def _sure(unit: float) -> float:
    """Return by how much a gradient may differ without a look at the exact one."""
    return max(_SINGLE, _SURE * unit)


def differences(
    expected: Gradients,
    found: Gradients,
    unit: float,
    exact: Callable[[], Gradients | None] = lambda: None,
    found_exactly: Callable[[], Gradients | None] = lambda: None,
) -> Iterator[str]:
    """Yield a sentence for each gradient that differs by more than rounding.

    Args:
        expected: the module's own; None stands for zero.
        found: to compare with it.
        unit: of rounding, `coarsest`.
        exact: computes the exact gradients, None when it cannot; called once, when needed.
        found_exactly: computes `found` in float64, likewise. Of two that are equal there, one may
            be rounded well by chance.
    """
    largest = cache(lambda: max((size(g) for g in expected.values()), default=0.0))
    right = cache(lambda: _alike(expected, exact(), unit))
    again = cache(found_exactly)
    for name, want in expected.items():
        have = found.get(name)
        error = distance(want, have)
        if not error:
            continue  # most are equal bit by bit: what follows is for the others
        scale, limit = max(size(want), size(have)), allowed(unit)
        if error <= max(_sure(unit) * scale, _NOISE * largest()):
            continue
        if _as_near(want, have, right(), name, limit * scale):
            continue
        if right() is not None and _are_alike(right(), again(), name):
            continue
        if want is None:
            yield f"the module gives {name} no gradient, and the trace gives it one"
            continue
        share = error / (scale or 1.0)
        yield f"gradient of {name} differs by {share:.1e} of its largest (allowed {limit:g})"


def _as_near(
    want: Tensor | None, have: Tensor | None, exact: Gradients | None, name: str, limit: float
) -> bool:
    if exact is None:
        return distance(want, have) <= limit
    right = exact.get(name)
    return distance(have, right) <= _AS_NEAR * distance(want, right)


def _are_alike(one: Gradients | None, other: Gradients | None, name: str) -> bool:
    if one is None or other is None:
        return False
    first, second = one.get(name), other.get(name)
    return distance(first, second) <= _SINGLE * max(size(first), size(second))


def _alike(expected: Gradients, exact: Gradients | None, unit: float) -> Gradients | None:
    """Return the exact gradients, unless they are too far off to be of the same computation."""
    if exact is None:
        return None
    off = math.hypot(*(_norm(want, exact.get(name)) for name, want in expected.items()))
    whole = math.hypot(*(_norm(gradient, None) for gradient in exact.values()))
    return exact if off <= min(_ALIKE, 1e3 * unit) * whole else None


def relative(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference relative to the largest entry of both."""
    return distance(one, other) / (max(size(one), size(other)) or 1.0)


def distance(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference of two gradients; a missing one is zero."""
    if _same_bits(one, other):
        return 0.0
    apart = _apart(one, other)
    if apart is None or not apart.numel():
        return 0.0
    found = float(apart.abs().max())
    return math.inf if math.isnan(found) else found


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are plainly equal; most are, and this is a tenth of the work."""
    if one is None or other is None or one.dtype != other.dtype:
        return one is None and other is None
    return one.layout == other.layout == torch.strided and torch.equal(one, other)


def _norm(one: Tensor | None, other: Tensor | None) -> float:
    apart = _apart(one, other)
    return 0.0 if apart is None else float(apart.norm())


def _apart(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the difference in float64; NaN and infinity equal themselves."""
    if one is None or other is None:
        found = other if one is None else one
        return None if found is None else _wide(found)
    a, b = _wide(one), _wide(other)
    return torch.where((a == b) | ((a != a) & (b != b)), torch.zeros_like(a), a - b)


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def size(gradient: Tensor | None) -> float:
    """Return the largest entry of a gradient; of a missing one zero."""
    return distance(gradient, None)


def exact_gradients(
    step: nn.Module, model: nn.Module, tensors: Sequence[Tensor], names: Sequence[str], seed: int
) -> Gradients | None:
    """Return the gradients of a step's first result in float64, None when that cannot run.

    Args:
        step: returns (loss, ...); it is copied.
        model: the part of the step with the named parameters.
        tensors: of the batch.
        names: of parameters.
        seed: of torch.
    """
    try:
        twin, part = copy.deepcopy((step, model))
        twin.double()
        wide = [t.double() if t.is_floating_point() else t.clone() for t in tensors]
        known = dict(part.named_parameters(remove_duplicate=False))
        wanted = [known[name] for name in names]
        with state_kept(part), quiet(), torch.enable_grad():
            torch.default_generator.manual_seed(seed)
            loss = twin(*wide)[0]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, MemoryError):
        return None  # a module that insists on its own type, say
    return dict(zip(names, found, strict=True))
