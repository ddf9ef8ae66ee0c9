"""What a tensor group divides beside the optimum of an integer program over a placement per op.

    python -m tools.placement_ilp [--members 2,4,8] [--blocks llama,gpt,vit,moe] [--write FILE]

On so many equal devices each op of a block computes whole, or its part along one of the axes that
it may be split along; each value and parameter lies whole, in parts, or as parts of a sum. The
program chooses all of it: least bytes sent with no more computing than our plan has, or least of
computing and sending together; both with no more bytes of parameters on a member than our plan
has. Its optimum is below every plan of that kind.

It is solved twice: with the exchanges that members have (all-reduce, all-gather, reduce-scatter),
and also with all-to-all, which they have not. Every member sends to every other, as ours do;
computing is our estimate, divided by the members where an op is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Axis, Cluster, Device, Graph, Link, Op, TensorSpec
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
from bigbrain_fx.plan.tensor.exchange import pieces
from models import gpt, llama, moe
from tools.load_solvers.programs import Program

Form: TypeAlias = str  # "whole", "sum" (parts of one), "copy" (whole, for a part), or an axis
WHOLE, SUM, COPY = "whole", "sum", "copy"
ROWS, LENGTH, DIM, HEADS = 4, 64, 128, 8
LINK = Link(50e-6, 1e9)
NODES = 20_000
GAP = 1e-6
_PER_S = 1e9  # HiGHS takes costs below 1e-7 for nothing: seconds are counted in nanoseconds


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
class Exchanges:
    """What it costs a member, in bytes sent, to have a value in another form."""

    members: int
    all_to_all: bool

    def sent(self, nbytes: int, graded: bool, source: Form, target: Form) -> float:
        """Return the bytes forward and backward; a copy's are beside those of the whole value."""
        all_of, part = self._all(nbytes), (self.members - 1) * nbytes / self.members
        back = part if graded else 0.0
        if source == target:
            return 0.0
        if target == COPY:
            if not graded:
                return 0.0
            return part if source not in (WHOLE, SUM) else all_of
        if target == WHOLE:
            return all_of if source == SUM else part
        if source == WHOLE:
            return back
        if source == SUM:
            return part + back
        return (part + back) / (self.members if self.all_to_all else 1)

    def _all(self, nbytes: int) -> float:
        """Return what each sends to have a sum: all of it to all, or twice a piece of it."""
        others = self.members - 1
        whole = len(pieces(nbytes // 4, self.members)) == 1
        return others * (float(nbytes) if whole else 2 * nbytes / self.members)


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
        """Our plan's computing and sending, as the program counts them."""
        return self.compute_s + self.bytes / LINK.bytes_per_s


@dataclass
class Placements:
    """The integer program of a case: mutable, grows column by column."""

    case: Case
    exchanges: Exchanges
    in_seconds: bool
    program: Program = field(default_factory=Program)
    forms: dict[str, dict[Form, int]] = field(default_factory=dict)  # value -> form -> column
    needs: dict[tuple[str, Form], int] = field(default_factory=dict)
    computing: list[tuple[int, float]] = field(default_factory=list)

    def least(self) -> float:
        """Return the optimum: bytes, or seconds.

        Raises:
            RuntimeError: it was not proven within so many nodes.
        """
        for param in self.case.graph.params:
            if param.name == param.canonical:
                self._param(param.name)
        for entry in self.case.graph.inputs:
            self.forms[entry.name] = {WHOLE: self._one_of([0.0])[0]}
        for op in self.case.graph.ops:
            if op.outputs:
                self._op(op)
        for name in filter(None, (self.case.graph.loss, *self.case.graph.outputs)):
            self.program.row([(self._need(name, WHOLE), 1.0)], 1.0, 1.0)
        self._conversions()
        self._memory()
        if not self.in_seconds:
            shares = [(column, s / self.case.compute_s) for column, s in self.computing]
            self.program.row(shares, most=1 + 1e-9)
        answer = self.program.solved(NODES, GAP)
        if answer.status != "best" or answer.columns is None:
            raise RuntimeError(f"no optimum within {NODES} nodes: {answer.status}")
        cost = float(sum(c * x for c, x in zip(self.program.cost, answer.columns, strict=True)))
        return cost / (_PER_S if self.in_seconds else 1)

    def _one_of(self, costs: Sequence[float]) -> list[int]:
        """Add columns of which one is 1."""
        made = [self.program.column(whole=True, cost=cost) for cost in costs]
        self.program.row([(column, 1.0) for column in made], 1.0, 1.0)
        return made

    def _param(self, name: str) -> None:
        split = [axis.name for axis in self.case.axes if name in {p.name for p in axis.params}]
        forms = [WHOLE, *split]
        columns = self._one_of([0.0] * len(forms))
        self.forms[name] = dict(zip(forms, columns, strict=True))

    def _op(self, op: Op) -> None:
        ways = [(axis, axis.name) for axis in self.case.axes if op.name in axis.along]
        sums = [(axis, SUM) for axis in self.case.axes if op.name in axis.summed]
        taken_s = self.case.seconds[op.name]
        choices: list[tuple[Axis | None, Form]] = [(None, WHOLE), *ways, *sums]
        each = [taken_s / (1 if axis is None else self.case.members) for axis, _ in choices]
        columns = self._one_of([_PER_S * s if self.in_seconds else 0.0 for s in each])
        self.computing += zip(columns, each, strict=True)
        made: dict[Form, int] = {}
        for (axis, form), column in zip(choices, columns, strict=True):
            for name, spec, is_bias in self._read(op):
                target = self._target(axis, form, name, spec, is_bias=is_bias)
                self.program.row([(self._need(name, target), 1.0), (column, -1.0)], least=0.0)
            if form in made:  # several axes give parts of a sum: one form of the value
                joined = self.program.column()
                entries = [(joined, 1.0), (made[form], -1.0), (column, -1.0)]
                self.program.row(entries, 0.0, 0.0)
                made[form] = joined
            else:
                made[form] = column
        self.forms[op.name] = made

    def _read(self, op: Op) -> Iterator[tuple[str, TensorSpec, bool]]:
        param = self.case.graph.param
        bias = 2 if op.target.startswith(("aten.linear", "aten.conv")) else -1
        last = op.args[bias] if 0 <= bias < len(op.args) else None
        for name in dict.fromkeys((*op.refs, *op.params)):
            spec = self._spec(name)
            if spec is not None:
                own = param[name].canonical if name in param else name
                yield own, spec, name == getattr(last, "param", None)

    def _target(
        self, axis: Axis | None, form: Form, name: str, spec: TensorSpec, *, is_bias: bool
    ) -> Form:
        """Return the form in which an op that is split along an axis reads a value."""
        if axis is None or (is_bias and form == SUM):
            return WHOLE
        has = name in {place.name for place in (*axis.params, *axis.values)}
        has = has or (self._is_of_tuple(name) and name in axis.along)
        return axis.name if has else COPY if spec.requires_grad else WHOLE

    def _spec(self, name: str) -> TensorSpec | None:
        graph = self.case.graph
        if name in graph.param:
            return graph.param[name].spec
        if name in graph.input:
            return graph.input[name].spec
        outputs = graph.op[name].outputs
        return outputs[0] if outputs else None

    def _need(self, name: str, form: Form) -> int:
        """Return the column that says that a value is read in a form; a copy needs it whole."""
        if (name, form) not in self.needs:
            self.needs[name, form] = self.program.column()
            if form == COPY:
                whole = self._need(name, WHOLE)
                self.program.row([(whole, 1.0), (self.needs[name, form], -1.0)], least=0.0)
        return self.needs[name, form]

    def _conversions(self) -> None:
        for (name, target), need in self.needs.items():
            spec = self._spec(name)
            assert spec is not None
            for source, column in self.forms[name].items():
                sent = self.exchanges.sent(spec.nbytes, spec.requires_grad, source, target)
                if self._is_of_tuple(name) and source != target:
                    entries = [(need, 1.0), (column, 1.0)]
                    self.program.row(entries, most=1.0)  # its items are as it is
                elif sent:
                    paid = self.program.column(cost=self._price(sent))
                    entries = [(paid, 1.0), (need, -1.0), (column, -1.0)]
                    self.program.row(entries, least=-1.0)

    def _is_of_tuple(self, name: str) -> bool:
        return name in self.case.graph.op and self.case.graph.op[name].is_tuple

    def _price(self, nbytes: float) -> float:
        return _PER_S * nbytes / LINK.bytes_per_s if self.in_seconds else nbytes

    def _memory(self) -> None:
        entries = [
            (column, p.spec.nbytes / (1 if form == WHOLE else self.case.members))
            for p in self.case.graph.params
            if p.name == p.canonical
            for form, column in self.forms[p.name].items()
        ]
        self.program.row(entries, most=self.case.held * (1 + 1e-9))


@dataclass(frozen=True)
class Row:
    """One block on so many devices: our plan's bytes and seconds, and the two optima of each."""

    block: str
    members: int
    sent: float
    step_s: float
    least: tuple[float, float]
    least_s: tuple[float, float]

    def __str__(self) -> str:
        """Show it as a row of Markdown."""
        cells = [self.block, str(self.members), f"{self.sent / 2**20:.2f}"]
        for ours, optima in ((self.sent, self.least), (self.step_s, self.least_s)):
            cells += [f"{ours / least:.3f}" for least in optima]
        return f"| {' | '.join(cells)} |"


def row(block: str, members: int) -> Row:
    """Plan a block and solve its four programs."""
    case = Case.of(block, members)
    ways = [Exchanges(members, all_to_all) for all_to_all in (False, True)]
    least = [[Placements(case, way, seconds).least() for way in ways] for seconds in (False, True)]
    (a, b), (c, d) = least
    return Row(block, members, case.bytes, case.step_s, (a, b), (c, d))


HEAD = (
    "| block | devices | MiB sent | bytes / least, our exchanges | bytes / least, all-to-all too | "
    "step / least, our exchanges | step / least, all-to-all too |\n|---|---|---|---|---|---|---|"
)


FOUND = """Bytes are the least that our exchanges allow, at equal memory and no more computing (of
the MoE but for its router). What is left of the step is work that ours leaves whole: norms,
residual sums and what follows them along the sequence. They are divided, too, where that gains more
than forecasts can tell apart; in blocks as small as these a latency for each exchange, which the
program does not count, takes what it would gain. `--tensor-axes heads,hidden,sequence` asks for
it."""


@click.command()
@click.option("--blocks", default=",".join(BLOCKS), show_default=True)
@click.option("--members", default="2,4,8", show_default=True)
@click.option("--write", type=click.Path(path_type=Path), help="A page for the table.")
def main(blocks: str, members: str, write: Path | None) -> None:
    """Print a row for each block and number of devices."""
    lines = []
    click.echo(HEAD)
    for block in blocks.split(","):
        for count in map(int, members.split(",")):
            lines.append(str(row(block, count)))
            click.echo(lines[-1])
    if write is not None:
        assert __doc__ is not None
        title, _, rest = __doc__.partition("\n\n")
        about = rest.partition("\n\n")[2]
        text = [f"# {title.rstrip('.')}", "", "`python -m tools.placement_ilp --write FILE`", ""]
        write.write_text("\n".join([*text, about.strip(), "", HEAD, *lines, "", FOUND]) + "\n")


if __name__ == "__main__":
    main()
