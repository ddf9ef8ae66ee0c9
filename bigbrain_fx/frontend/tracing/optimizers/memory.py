"""Memory of the user's optimizer: two steps on parameters without numbers, tensors counted.

The module knows the model file's contract for `optimizer`, not graphs and devices. Whether the
optimizer can be made once per device: see `parted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes

_Kind: TypeAlias = tuple[int, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Memory of an optimizer.

    Attributes:
        state: bytes kept from step to step, per byte of parameters; Adam's two moments are 2.
        temporaries: the most held for a moment within a step, in parameters of its size.
        leftover: memory of the previous parameter, in parameters of its size: a loop's variables
            hold tensors until the next round.
        states: by parameter, bytes of state per byte; empty where all have the same.
        measured: whether a measurement was possible; else all numbers are AdamW's.
        narrow: the 16-bit types of state, such as "bfloat16".
        at_once: whether a step on a GPU updates all parameters together, as torch's optimizers do
            by default (`foreach`).
    """

    state: float = 2.0
    temporaries: float = 2.0
    leftover: float = 1.0
    states: dict[str, float] = field(default_factory=dict)
    measured: bool = True
    narrow: tuple[str, ...] = ()
    at_once: bool = True

    @property
    def note(self) -> str | None:
        """Return a surprising property of the optimizer: moments have the type of their weights."""
        if not self.narrow:
            return None
        kind = self.narrow[0]
        return (
            f"weights are {kind}, and so is what the optimizer keeps of them (moments), as in "
            "plain PyTorch: small updates are rounded away. For float32 weights and moments that "
            f'compute in {kind}, make the model in float32 and set autocast = "{kind}"'
        )


def optimizer_facts(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> OptimizerFacts:
    """Measure an optimizer on the shapes of a model's parameters.

    Args:
        model: with the parameters; only their shapes count.
        optimizer: as in a model file; None for AdamW as it comes.

    Returns:
        AdamW's memory where no measurement is possible: the optimizer reads numbers, or needs real
            tensors.
    """
    named = [(n, _blank(p)) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        return OptimizerFacts(0.0, 0.0, 0.0)
    try:
        made = torch.optim.AdamW(named) if optimizer is None else optimizer(list(named))
        groups = made.param_groups
        at_once = any(g.get("foreach", False) is not False and not g.get("fused") for g in groups)
        is_fused = all(group.get("fused") for group in groups)
        for group in (each for each in groups if each.get("fused")):
            group["fused"] = False  # not for tensors without numbers; its state is the same
        found = replace(_measured(made, named), at_once=at_once)
        return replace(found, temporaries=0.0, leftover=0.0) if is_fused else found
    except Exception:  # the user's own code, on tensors without numbers
        return OptimizerFacts(measured=False, narrow=_narrow(p for _, p in named))


def _blank(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"))


def _measured(
    made: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> OptimizerFacts:
    """Step over one parameter of each kind, for the state; over one and two of the largest after.

    A loop's leftover of a previous parameter shows only with two identical ones.
    """
    kinds = _kinds(made)
    kept = {kind: _state_share(made, kind, like) for kind, like in set(kinds.values())}
    states = {n: kept[kinds[id(p)][0]] if id(p) in kinds else 0.0 for n, p in named}
    nbytes = {name: p.nbytes for name, p in named}
    held = sum(share * nbytes[name] for name, share in states.items())
    largest = max((p for _, p in named if id(p) in kinds), key=lambda p: p.nbytes)
    alone = _stepped_over(made, largest, 1)
    leftover = max(0.0, _stepped_over(made, largest, 2) - alone)
    alike = len(set(states.values())) == 1
    share, kept_apart = held / sum(nbytes.values()), {} if alike else dict(states)
    return OptimizerFacts(share, alone, leftover, kept_apart, narrow=_narrow(_all_state(made)))


def _narrow(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """Return the types of sixteen bits among tensors, by name."""
    kinds = {t.dtype for t in tensors if t.dtype.is_floating_point and t.dtype.itemsize == 2}
    return tuple(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _all_state(made: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the state of an optimizer for the parameters that it has stepped over."""
    for parameter in list(made.state):
        yield from (tensor for tensor in _tensors(made, parameter) if tensor.dim())


def _kinds(made: torch.optim.Optimizer) -> dict[int, tuple[_Kind, nn.Parameter]]:
    """Map each parameter, by its id, to its group, shape and type, and to the first of these."""
    found: dict[int, tuple[_Kind, nn.Parameter]] = {}
    first: dict[_Kind, nn.Parameter] = {}
    for number, group in enumerate(made.param_groups):
        for p in group["params"]:
            kind = (number, tuple(p.shape), p.dtype)
            found[id(p)] = kind, first.setdefault(kind, p)
    return found


def _state_share(made: torch.optim.Optimizer, kind: _Kind, like: nn.Parameter) -> float:
    """Return the bytes of state of a parameter of a kind, per byte of it."""
    with _only(made, kind[0], [like]):
        _step(made, [like])
    kept = sum(t.nbytes for t in _tensors(made, like) if t.dim())
    return kept / max(1, like.nbytes)


@contextmanager
def _only(
    made: torch.optim.Optimizer, number: int, params: Sequence[nn.Parameter]
) -> Iterator[None]:
    """Give one group these parameters, and other groups none, for a while."""
    before = [group["params"] for group in made.param_groups]
    for place, group in enumerate(made.param_groups):
        group["params"] = list(params) if place == number else []
    try:
        yield
    finally:
        for group, own in zip(made.param_groups, before, strict=True):
            group["params"] = own


def _stepped_over(made: torch.optim.Optimizer, like: nn.Parameter, count: int) -> float:
    """Return the peak memory of a step over so many identical parameters, in their size."""
    number = next(
        place
        for place, group in enumerate(made.param_groups)
        if any(p is like for p in group["params"])
    )
    params = [like, *(_blank(like) for _ in range(count - 1))]
    with _only(made, number, params):
        _step(made, params)  # makes the state of those that are new
        return _peak(made, params) / max(1, like.nbytes)


def _step(made: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    for parameter in params:
        parameter.grad = torch.empty_like(parameter)
    made.step()
    for parameter in params:
        parameter.grad = None


def _peak(made: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> int:
    """Return the bytes that a step holds for a moment, when it has made its state."""
    live = LiveBytes()
    live.ignore(params)
    live.ignore(tensor for p in params for tensor in _tensors(made, p))
    for parameter in params:
        parameter.grad = torch.empty_like(parameter)
    live.ignore(p.grad for p in params if p.grad is not None)
    with live:
        made.step()
    return live.peak


def _tensors(made: torch.optim.Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    entry = made.state.get(parameter, {})
    yield from (value for value in entry.values() if isinstance(value, Tensor))
