"""Blocks on so many equal devices, and our plans of them: what `placement_ilp` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Axis, Cluster, Device, Graph, Link
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    axes,
    costs_of,
    make_plan,
    part_channels,
    priced_axes,
)
from bigbrain_fx.plan.tensor import tensor_costs
from models import gpt, llama, moe

ROWS, LENGTH, DIM, HEADS = 4, 64, 128, 8
LINK = Link(50e-6, 1e9)


class ViTBlock(nn.Module):
    """A vision transformer's encoder block: attention over all patches, then two layers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to the stream."""
        rows, length, dim = x.shape
        split = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, dim // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, dim))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Around(nn.Module):
    """A block whose input wants a gradient, as one in the middle of a model."""

    def __init__(self, block: nn.Module, more: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.block, self.more = block, len(more)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM))
        for number, tensor in enumerate(more):
            self.register_buffer(f"more{number}", tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of what the block makes."""
        given = (self.get_buffer(f"more{number}") for number in range(self.more))
        made = self.block(x + self.position, *given)
        out = made[0] if isinstance(made, tuple) else made
        return torch.as_tensor(out).square().mean()


def _llama() -> nn.Module:
    rotary = llama.Rotary(DIM // HEADS)
    return Around(llama.Block(DIM, HEADS, HEADS, 3 * DIM), rotary(LENGTH))


BLOCKS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "gpt": lambda: Around(gpt.Block(DIM, HEADS, 0.0)),
    "vit": lambda: Around(ViTBlock(DIM, HEADS)),
    "moe": lambda: Around(moe.Block(DIM, HEADS, 2 * DIM, 8, 2)),
}


@dataclass(frozen=True)
class Case:
    """A block on equal devices, and our plan of it."""

    graph: Graph
    members: int
    plan: Plan
    seconds: Mapping[str, float]

    @staticmethod
    def of(block: str, members: int) -> Case:
        """Capture a block, and plan it as `--tensor MEMBERS` does."""
        torch.manual_seed(0)
        found = capture(BLOCKS[block](), {"x": torch.randn(ROWS, LENGTH, DIM)}).graph
        where = Cluster(
            tuple(Device(f"d{i}", "h", "cpu", 2**33, 60e9, 12e9) for i in range(members)), LINK
        )
        options = Options("naive", micro_batches=1)
        plan = make_plan(
            found, where, Source(""), Options("naive", micro_batches=1, tensor=members)
        )
        alone = costs_of(make_plan(found, where, Source(""), options))
        table = {op.name: alone.op_cost(op.name, "d0") for op in found.ops}
        seconds = {name: cost.forward_s + cost.backward_s for name, cost in table.items()}
        return Case(found.at(found.batch), members, plan, seconds)

    @property
    def group(self) -> tuple[str, ...]:
        """The devices."""
        return tuple(device.name for device in self.plan.cluster.devices)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """What may be split over so many members."""
        return tuple(a for a in priced_axes(self.graph, axes(self.graph)) if a.size >= self.members)

    @property
    def bytes(self) -> float:
        """What a member of our plan sends in a step."""
        return float(sum(c.nbytes for c in part_channels(self.plan) if c.sender == "d0"))

    @property
    def held(self) -> float:
        """The bytes of parameters that a member of our plan holds."""
        cut = {shard.param for shard in self.plan.sharded.shards}
        own = (p for p in self.graph.params if p.name == p.canonical)
        return sum(p.spec.nbytes / (self.members if p.name in cut else 1) for p in own)

    @property
    def compute_s(self) -> float:
        """The seconds that a member of our plan computes: of what is divided, its part."""
        tensor = self.plan.placement.tensor
        assert tensor is not None
        cut = {name for axis in tensor.axes for name in (*axis.along, *axis.summed)}
        return sum(s / (self.members if name in cut else 1) for name, s in self.seconds.items())

    @property
    def step_s(self) -> float:
        """What a member of our plan takes for its ops and exchanges, by the planner's own clock."""
        costs = tensor_costs(self.plan)[0].ops["d0"].values()
        return sum(cost.forward_s + cost.backward_s for cost in costs)
