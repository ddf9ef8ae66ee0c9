"""The reference of a plan with tensor groups: all members in one process, op by op, in lockstep.

    captured graph ≈ members' graphs = reference = bundle      the first link alone is not bitwise

Sums over members are one autograd function, added in the members' order, as their messages are;
sums over replicas are the plan's, of each member by itself.
Each member has an optimizer of its own, for the parts that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Op, Placement, Stage, Stages
from bigbrain_fx.frontend import Captured, draw_places, place_name, run_members, taken
from bigbrain_fx.plan import Plan, live_ops
from bigbrain_fx.runtime import OwnWeights, joined, laid_out, mean_loss, reseed, share_of
from bigbrain_fx.verification.module import link
from bigbrain_fx.verification.reference import (
    Gradients,
    Key,
    Leaf,
    ReplicaOrder,
    ascending,
    by_place,
    summed,
    weights_of,
    with_known_sizes,
)
from bigbrain_fx.verification.sharding import (
    agree,
    outputs_apart,
    outputs_rounding,
    own_rounding,
)
from bigbrain_fx.weights import part_name

_AS_NEAR = 3.0  # times the graph's own distance from float64
CLOSE = ((False, 1e-5), (True, 1e-12))
"""Whether in float64, and how far a gradient may be from the graph's, of its largest number."""


def whole_plan(plan: Plan) -> Plan:
    """Return a plan of the graph that is not divided, as one stage: what plain PyTorch runs."""
    device = plan.stages.devices[0]
    live = live_ops(plan.graph)
    ops = tuple(op.name for op in plan.graph.ops if op.name in live)
    params = dict.fromkeys(name for op in ops for name in plan.graph.op[op].params)
    stage = Stage(0, device, ops, params=tuple(params))
    return replace(plan, placement=Placement({}), stages=Stages((stage,), ()))


def joined_weights(folder: Path, plan: Plan) -> dict[str, Tensor]:
    """Read the weights of all members; parts are put together.

    Raises:
        WeightsError: a file cannot be read.
    """
    of = {(shard.param, shard.member): shard for shard in plan.sharded.shards}
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for device in plan.stages.devices:
        member = plan.stages.of(device)[0].member
        for name, tensor in OwnWeights(folder, device).items():
            if (name, member) in of:
                parts.setdefault(name, {})[member] = tensor
            else:
                found[name] = tensor
    for name, own in parts.items():
        shards = [of[name, member] for member in sorted(own)]
        lengths = [shard.stop - shard.start for shard in shards]
        tensors = [own[member] for member in sorted(own)]
        found[name] = joined(tensors, shards[0].dim, shards[0].inner, lengths)
    return found


class MembersReference:
    """The members of all groups in one process.

    Args:
        plan: with tensor groups.
        tensors: of the model, whole, by name.
        functions: as in `run_graph`.
        leaves_per_stage: off, every parameter has one leaf on each member.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        functions: Mapping[str, object],
        *,
        leaves_per_stage: bool = True,
    ) -> None:
        self.plan, self.graphs = plan, plan.sharded.members
        self.functions, self.leaves_per_stage = functions, leaves_per_stage
        self.places = draw_places(self.graphs[0])
        self.runs = [with_known_sizes(graph) for graph in self.graphs]
        self.shards = {(s.param, s.member): s for s in plan.sharded.shards}
        own = replace(plan.stages, stages=plan.stages.of_member(0))
        self.replicas = [ReplicaOrder.of(own, number) for number in range(own.replicas)]
        members = range(len(self.graphs))
        held = [{n: self._part(n, m, t) for n, t in tensors.items()} for m in members]
        self.parameters = [self._parameters(m, held[m]) for m in members]
        self.buffers = [self._buffers(m, held[m]) for m in members]

    def _part(self, name: str, member: int, tensor: Tensor) -> Tensor:
        shard = self.shards.get((name, member))
        own = tensor if shard is None else taken(tensor, shard)
        return own.detach().clone(memory_format=torch.contiguous_format)

    def _parameters(self, member: int, held: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        graph = self.graphs[member]
        used = {
            graph.param[n].canonical
            for stage in self.plan.stages.of_member(member)
            for n in stage.params
        }
        wants = {p.canonical for p in graph.params if p.spec.requires_grad} & used
        return {p.name: nn.Parameter(held[p.name]) for p in graph.params if p.name in wants}

    def _buffers(self, member: int, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = self.parameters[member]
        return {p.name: held[p.name] for p in self.graphs[member].params if p.canonical not in own}

    def stored(self, name: str, member: int) -> str:
        """Return the name under which a member's tensor is kept."""
        return part_name(name, member) if (name, member) in self.shards else name

    def gradients(
        self, batches: Sequence[Mapping[str, Tensor]], seed: int, step: int, scale: float = 1.0
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Return the mean loss of a step's micro-batches, and each member's gradients.

        Gradients are those of the loss times `scale`. See `weights_of` for the mean.
        """
        losses: dict[int, Tensor] = {}
        weights = weights_of(self.graphs[0], batches)

        def made(micro: int) -> Gradients:
            key, share = (seed, step, micro), partial(share_of, weights=weights, micro=micro)
            losses[micro], found = self._micro_batch(batches[micro], key, share, scale)
            return {
                (part_name(name, member), place): gradient
                for member, own in enumerate(found)
                for (name, place), gradient in by_place(own).items()
            }

        sum_all = partial(summed, self.plan.stages) if self.leaves_per_stage else ascending
        sums = sum_all(len(batches), made)
        loss = mean_loss([losses[micro] for micro in sorted(losses)], weights)
        return loss, [self._totals(member, sums) for member in range(len(self.graphs))]

    def _totals(self, member: int, sums: Gradients) -> dict[str, Tensor]:
        """Add the leaves of each of a member's parameters, the last stage's first."""
        totals: dict[str, Tensor] = {}
        for name, place in sorted(sums, key=lambda leaf: -leaf[1]):
            part = sums[name, place]
            totals[name] = totals[name] + part if name in totals else part
        own = self.parameters[member]
        named = {name: part_name(name, member) for name in own}
        known = {n: (p, totals[named[n]]) for n, p in own.items() if named[n] in totals}
        return {name: laid_out(total.clone(), p) for name, (p, total) in known.items()}

    def _micro_batch(
        self,
        inputs: Mapping[str, Tensor],
        key: Key,
        share: Callable[[Tensor], Tensor],
        scale: float,
    ) -> tuple[Tensor, list[Gradients]]:
        leaves: list[dict[Leaf, Tensor]] = [{} for _ in self.graphs]
        own = next((each for each in self.replicas if key[2] in each.micros), self.replicas[0])
        given = [partial(self._leaf, leaves[m], m, own) for m in range(len(self.graphs))]
        loss_name = self.graphs[0].loss
        assert loss_name is not None
        values = run_members(
            self.runs,
            self.buffers,
            [inputs for _ in self.graphs],
            key=lambda op: self._keyed(op, key),
            values=[loss_name],
            functions=self.functions,
            order=own.order,
            leaves=given,
        )
        losses = [cast("Tensor", value[loss_name]) for value in values]
        flat = [leaf for own in leaves for leaf in own.values()]
        seeds = [share(torch.full_like(loss, scale)) for loss in losses]
        made = torch.autograd.grad(losses, flat, seeds, allow_unused=True)
        found: Iterator[Tensor | None] = iter(made)
        each = [{leaf: g for leaf in part if (g := next(found)) is not None} for part in leaves]
        return losses[0].detach(), each

    def _leaf(
        self, leaves: dict[Leaf, Tensor], member: int, own: ReplicaOrder, param: str, op: str
    ) -> Tensor:
        canonical = self.graphs[member].param[param].canonical
        if canonical not in self.parameters[member]:
            return self.buffers[member][param]
        place = canonical, own.stage_of.get(op, 0) if self.leaves_per_stage else 0
        if place not in leaves:
            leaves[place] = self.parameters[member][canonical].detach().requires_grad_()
        return leaves[place]

    @contextmanager
    def _keyed(self, op: Op, key: Key) -> Iterator[None]:
        reseed(key, place_name(*self.places[op.name]), torch.device("cpu"))
        yield


def same_graph(captured: Captured, plan: Plan, few: int | None = None) -> dict[str, object]:
    """Compare the graph with the members' graphs: a step's gradients, as they are and in float64.

    Where micro-batches have `few` rows, too, with so many.

    Where the graph's own rounding is larger than what is allowed (16 bits, a norm over two rows), a
    few times that is: whether a rule is wrong, float64 says.
    """
    tensor = plan.placement.tensor
    assert tensor is not None
    rows = captured.graph.static_batch or few or plan.rows
    lines, said = [], []
    for exact, close in CLOSE:
        limit = close
        found = agree(captured, tensor.axes, tensor.shares, rows=rows, exact=exact)
        kind = "float64" if exact else "its own types"
        most = max(found.loss, found.gradients, found.buffers)
        if not exact and limit < most < math.inf:
            limit = max(limit, _AS_NEAR * own_rounding(captured, rows))
        said.append(f"{most:.0e} in {kind} (allowed {limit:g})")
        if not most <= limit:
            lines.append(f"a loss, gradient or buffer differs by {most:.1e} in {kind}")
    what = f"{found.compared} gradients, buffers and losses of {len(tensor.shares)} members: "
    of_few = f", micro-batches of {few} rows" if few else ""
    return link(f"captured graph ≈ members' graphs{of_few}", lines, what + ", ".join(said))


def same_outputs(captured: Captured, plan: Plan) -> dict[str, object]:
    """Compare the outputs of the graph with those of the members' graphs, as `same_graph` does."""
    tensor = plan.placement.tensor
    assert tensor is not None
    rows = captured.graph.static_batch or plan.rows
    lines, said = [], []
    for exact, limit in CLOSE:
        most = outputs_apart(captured, tensor.axes, tensor.shares, rows=rows, exact=exact)
        if not exact and most > limit:
            limit = max(limit, _AS_NEAR * outputs_rounding(captured, rows))
        kind = "float64" if exact else "its own types"
        said.append(f"{most:.0e} in {kind} (allowed {limit:g})")
        if not most <= limit:
            lines.append(f"an output differs by {most:.1e} in {kind}")
    what = f"outputs of {len(tensor.shares)} members: {', '.join(said)}"
    return link("captured graph ≈ members' graphs, outputs", lines, what)


def same_leaves(
    plan: Plan,
    weights: Mapping[str, Tensor],
    functions: Mapping[str, object],
    batch: Sequence[Mapping[str, Tensor]],
    limit: float,
) -> dict[str, object]:
    """Compare the reference with one whose parameters have one leaf each: rounding is all."""
    one = MembersReference(plan, weights, functions, leaves_per_stage=False)
    many = MembersReference(plan, weights, functions)
    _, want = one.gradients(batch, plan.seed, 0)
    _, have = many.gradients(batch, plan.seed, 0)
    errors = {
        reference_name: _relative(have[member].get(name), gradient)
        for member, own in enumerate(want)
        for name, gradient in own.items()
        for reference_name in [one.stored(name, member)]
    }
    lines = [f"gradient of {n} differs by {e:.1e}" for n, e in errors.items() if e > limit]
    worst = f"largest difference {max(errors.values(), default=0.0):.1e} of a tensor's maximum"
    what = f"{len(errors)} gradients of step 0, {worst} (allowed {limit:g})"
    return link("members' graphs = reference", lines, what)


def _relative(have: Tensor | None, want: Tensor) -> float:
    if have is None:
        return float("inf")
    scale = float(want.abs().max()) or 1.0
    return float((have - want).abs().max()) / scale
