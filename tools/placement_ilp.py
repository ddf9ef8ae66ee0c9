"""What a tensor group divides beside the optimum of an integer program over a placement per op.

    python -m tools.placement_ilp [--members 2,4,8] [--blocks llama,gpt,vit,moe] [--write FILE]

On so many equal devices each op of a block computes whole, or its part along one of the axes that
it may be split along; each value and parameter lies whole, in parts, or as parts of a sum. The
program chooses all of it: least bytes sent with no more computing than our plan has, or the least
step; both with no more bytes of parameters on a member than our plan has.

It is solved twice: with the exchanges that members have (all-reduce, all-gather, reduce-scatter),
and also with all-to-all, which they have not. Every member sends to every other, as ours do. Both
steps are by the planner's clock: what an op takes along an axis is what it estimates of that part,
and an exchange takes its rounds of messages with their latencies. Nothing but the choice is
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from bigbrain_fx.core import Axis, Op, TensorSpec
from tools.load_solvers.programs import Program
from tools.placement_case import BLOCKS, Case
from tools.placement_prices import COPY, SUM, WHOLE, Clock, Exchanges, Form, Prices

NODES = 20_000
GAP = 1e-6
_PER_S = 1e9  # HiGHS takes costs below 1e-7 for nothing: seconds are counted in nanoseconds


@dataclass
class Placements:
    """The integer program of a case: mutable, grows column by column."""

    case: Case
    prices: Prices
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
        if not self._in_seconds:
            shares = [(column, s / self.case.compute_s) for column, s in self.computing]
            self.program.row(shares, most=1 + 1e-9)
        answer = self.program.solved(NODES, GAP)
        if answer.status != "best" or answer.columns is None:
            raise RuntimeError(f"no optimum within {NODES} nodes: {answer.status}")
        cost = float(sum(c * x for c, x in zip(self.program.cost, answer.columns, strict=True)))
        return cost / self._unit

    @property
    def _in_seconds(self) -> bool:
        return isinstance(self.prices, Clock)

    @property
    def _unit(self) -> float:
        return _PER_S if self._in_seconds else 1.0

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
        costs = (self.prices.computes(op.name, axis) for axis, _ in choices)
        columns = self._one_of([self._unit * cost for cost in costs])
        self.computing += zip(columns, each, strict=True)
        made: dict[Form, int] = {}
        for (axis, form), column in zip(choices, columns, strict=True):
            for name, spec, is_bias in self._read(op):
                gathers = axis is not None and (op.name, name) in axis.gathered
                target = self._target(axis, form, name, spec, is_bias=is_bias)
                target = COPY if gathers else target
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
                is_param = name in self.case.graph.param
                sent = self.prices.converts(spec, source, target, is_param=is_param)
                if self._is_of_tuple(name) and source != target:
                    entries = [(need, 1.0), (column, 1.0)]
                    self.program.row(entries, most=1.0)  # its items are as it is
                elif sent:
                    paid = self.program.column(cost=self._unit * sent)
                    entries = [(paid, 1.0), (need, -1.0), (column, -1.0)]
                    self.program.row(entries, least=-1.0)

    def _is_of_tuple(self, name: str) -> bool:
        return name in self.case.graph.op and self.case.graph.op[name].is_tuple

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
    a, b = (Placements(case, Exchanges(members, other)).least() for other in (False, True))
    c, d = (Placements(case, Clock(case, other)).least() for other in (False, True))
    return Row(block, members, case.bytes, case.step_s, (a, b), (c, d))


HEAD = (
    "| block | devices | MiB sent | bytes / least, our exchanges | bytes / least, all-to-all too | "
    "step / least, our exchanges | step / least, all-to-all too |\n|---|---|---|---|---|---|---|"
)


FOUND = """Bytes are the least that our exchanges allow but for 2 %, at equal memory and no more
computing: with four devices and more, members divide the sequence too, and add the gradients of
norms and biases. A step is up to 5 % above the least. What is left of it is biases and norms, which
the program divides wherever it likes, and ours only where no other axis is."""


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
