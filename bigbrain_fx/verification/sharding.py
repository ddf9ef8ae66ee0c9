"""Whether a graph in shards computes what the graph does: the one link that is close, not bitwise.

A wrong rule is not rounding, so rules are tried one by one first (`tried_axes`). Then the whole
sharded graph runs in lockstep beside the graph, forward and backward (`agree`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from bigbrain_fx.core import Axis, Graph, Shard, Sharded
from bigbrain_fx.frontend import (
    Captured,
    in_float64,
    run_graph,
    run_members,
    taken,
    try_rule,
    widened,
)
from bigbrain_fx.plan import sharded, sound_axes, trials
from bigbrain_fx.verification.reference import keyed

_ZERO = 1e-2  # of the largest of all: what is below it may be a zero that rounding left
_KEY = (7, 0, 0)

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class ShardAgreement:
    """Largest differences between ranks of a group and the whole.

    Attributes:
        loss: the largest difference of a rank's loss, of the loss.
        gradients: the largest difference of a gradient, of that gradient's largest number, or of a
            hundredth of the largest of all where that is more.
        buffers: the largest difference of a buffer, likewise.
        compared: how many gradients were compared, of all ranks.
        exchanges: how many ops of each kind a rank has.
        held: numbers of the parameters that each rank holds.
    """

    loss: float
    gradients: float
    buffers: float
    compared: int
    exchanges: Mapping[str, int]
    held: tuple[int, ...]


def tried_axes(
    graph: Graph, axes: Sequence[Axis], shares: Sequence[float]
) -> tuple[tuple[Axis, ...], Mapping[tuple[str, str], str]]:
    """Run every rule that splitting along `axes` would use; leave ops whole where one fails.

    Returns:
        The axes, and for each (axis, op) that is left whole the reason.
    """
    results = [(trial, try_rule(trial)) for trial in trials(graph, axes, shares)]
    failed = [(trial, why) for trial, why in results if why is not None]
    return sound_axes(graph, axes, failed) if failed else (tuple(axes), {})


def agree(
    captured: Captured,
    axes: Sequence[Axis],
    shares: Sequence[float],
    *,
    rows: int | None = None,
    exact: bool = False,
) -> ShardAgreement:
    """Run one training step's forward and backward, whole and in shares."""
    made = sharded(widened(captured.graph) if exact else captured.graph, axes, shares)
    members = [_Numbers(captured, made, m, exact=exact) for m in range(len(shares))]
    whole, values = _run_whole(captured, rows, exact=exact)
    found = _run_members(captured, made, members, rows, exact=exact)
    loss = cast("Tensor", values[captured.graph.loss or ""])
    pairs = zip(found, made.members, strict=True)
    losses = [cast("Tensor", each[member.loss or ""]) for each, member in pairs]
    return _compared(whole, members, loss, losses, made)


def outputs_apart(
    captured: Captured,
    axes: Sequence[Axis],
    shares: Sequence[float],
    *,
    rows: int | None = None,
    exact: bool = False,
) -> float:
    """Return how far ranks' outputs are from the graph's, of each one's largest number."""
    graph = captured.graph
    made = sharded(widened(graph) if exact else graph, axes, shares)
    members = [_Numbers(captured, made, m, exact=exact) for m in range(len(shares))]
    with torch.no_grad():
        _, want = _run_whole(captured, rows, exact=exact)
        found = _run_members(captured, made, members, rows, exact=exact)
    names = made.members[0].outputs
    return max(_outputs_apart(graph.outputs, want, names, each) for each in found)


def outputs_rounding(captured: Captured, rows: int | None = None) -> float:
    """Return how far the whole graph's outputs are from those of float64, as above."""
    names = captured.graph.outputs
    with torch.no_grad():
        _, want = _run_whole(captured, rows, exact=True)
        return _outputs_apart(names, want, names, _run_whole(captured, rows, exact=False)[1])


def _outputs_apart(
    names: Sequence[str],
    want: Mapping[str, object],
    own_names: Sequence[str],
    have: Mapping[str, object],
) -> float:
    pairs = ((want[a], have[b]) for a, b in zip(names, own_names, strict=True))
    tensors = ((a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
    return max((_distance(a, b, a, 0.0) for a, b in tensors), default=0.0)


def _run_whole(
    captured: Captured, rows: int | None, *, exact: bool
) -> tuple[_Numbers, Mapping[str, object]]:
    """Run the graph that is not divided; return its tensors, and its loss and outputs."""
    graph = widened(captured.graph) if exact else captured.graph
    whole = _Numbers(captured, exact=exact)
    inputs = {name: whole.cast(t) for name, t in captured.inputs(rows).items()}
    with in_float64(exact):
        about = graph, whole.tensors, inputs
        return whole, run_graph(*about, key=keyed(graph, _KEY), functions=captured.functions)


def _run_members(
    captured: Captured,
    made: Sharded,
    members: Sequence[_Numbers],
    rows: int | None,
    *,
    exact: bool,
) -> list[dict[str, object]]:
    """Run all ranks in lockstep; return their losses and outputs."""
    inputs = {name: members[0].cast(t) for name, t in captured.inputs(rows).items()}
    with in_float64(exact):
        return run_members(
            made.members,
            [member.tensors for member in members],
            [inputs for _ in members],
            key=keyed(made.members[0], _KEY),
            functions=captured.functions,
        )


def own_rounding(captured: Captured, rows: int | None = None) -> float:
    """Return how far the whole graph's loss and gradients are from those of float64, as above."""
    runs = [_whole(captured, rows, exact=exact) for exact in (True, False)]
    (exact_loss, exact), (loss, found) = runs
    most = max((float(g.abs().max()) for g in exact.values()), default=0.0)
    apart = (_distance(g, found[name], g, most) for name, g in exact.items())
    return max((abs(loss - exact_loss) / abs(exact_loss or 1.0), *apart))


def _whole(captured: Captured, rows: int | None, *, exact: bool) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of the graph that is not divided."""
    whole, values = _run_whole(captured, rows, exact=exact)
    loss, leaves = cast("Tensor", values[captured.graph.loss or ""]), whole.graded()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), gradients, strict=True)
    return float(loss.detach()), {name: _or_zero(g, leaf) for (name, leaf), g in pairs}


class _Numbers:
    """Tensors of the model as one rank has them; tied names share one."""

    def __init__(
        self, captured: Captured, made: Sharded | None = None, member: int = 0, *, exact: bool
    ) -> None:
        self.exact = exact
        shards = made.shards if made else ()
        self.shard: dict[str, Shard] = {s.param: s for s in shards if s.member == member}
        self.leaves: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.name_of: dict[str, str] = {}
        for param in captured.graph.params:
            if param.canonical not in self.leaves:
                own = self.part(param.name, self.cast(captured.tensors[param.name]))
                self.leaves[param.canonical] = own.clone().requires_grad_(param.spec.requires_grad)
                self.name_of[param.canonical] = param.name
            self.tensors[param.name] = self.leaves[param.canonical]

    def cast(self, tensor: Tensor) -> Tensor:
        """Return a copy in the type of the run."""
        wide = self.exact and tensor.is_floating_point()
        return tensor.detach().to(torch.float64 if wide else tensor.dtype, copy=True)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return what this rank has of a whole tensor."""
        return taken(tensor, self.shard[name]) if name in self.shard else tensor

    def graded(self) -> dict[str, Tensor]:
        """Return the trained parameters, each once."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}


def _compared(
    whole: _Numbers, members: Sequence[_Numbers], loss: Tensor, losses: list[Tensor], made: Sharded
) -> ShardAgreement:
    wanted = list(whole.graded().values())
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
    want = dict(zip(whole.graded(), gradients, strict=True))
    flat = [leaf for member in members for leaf in member.graded().values()]
    of_all: Sequence[Tensor | None] = torch.autograd.grad(losses, flat, allow_unused=True)
    found = iter(of_all)
    loss, losses = loss.detach(), [own.detach() for own in losses]
    most = max((float(g.abs().max()) for g in want.values() if g is not None), default=0.0)
    apart = [
        _distance(member.part(member.name_of[name], _or_zero(g, whole.leaves[name])), own, g, most)
        for member in members
        for name, g in want.items()
        for own in [_or_zero(next(found), member.leaves[name])]
    ]
    return ShardAgreement(
        loss=max(float((own - loss).abs() / loss.abs()) for own in losses),
        gradients=max(apart, default=0.0),
        buffers=_buffers(whole, members),
        compared=len(apart),
        exchanges=Counter(
            op.target.removeprefix("shard.")
            for op in made.members[0].ops
            if op.target.startswith("shard.")
        ),
        held=tuple(sum(t.numel() for t in member.graded().values()) for member in members),
    )


def _buffers(whole: _Numbers, members: Sequence[_Numbers]) -> float:
    held = {name: t for name, t in whole.leaves.items() if not t.requires_grad}
    real = [t for t in held.values() if t.is_floating_point() and t.numel()]
    most = max((float(t.double().abs().max()) for t in real), default=0.0)
    return max(
        (
            _distance(want, member.leaves[name], want, most)
            for member in members
            for name, tensor in held.items()
            for want in [member.part(member.name_of[name], tensor)]
        ),
        default=0.0,
    )


def _or_zero(gradient: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if gradient is None else gradient


def _distance(want: Tensor, have: Tensor, whole: Tensor | None, most: float) -> float:
    if not want.numel():
        return 0.0
    scale = 0.0 if whole is None else float(whole.detach().double().abs().max())  # or a mask's
    apart = float((want.detach().double() - have.detach().double()).abs().max())
    return apart / max(scale, _ZERO * most) if apart else 0.0
