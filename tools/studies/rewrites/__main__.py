"""Where a rewrite pays: places of many sizes run both ways, in turns, in processor time.

    python -m tools.studies.rewrites [--seconds 0.5] [--write results.md]

Each place is that of a small module, captured, found by `plan.rewriting` and cut out as for its
proof. Before and after run one after the other, forward and (in training) backward; the middle of
each is compared. Beside it stands what `analytical` says of the same ops, at the rates given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor, nn

from bigbrain_fx.core import (
    Arg,
    Cluster,
    Device,
    Graph,
    Link,
    ParamRef,
    Ref,
    Rewrite,
    RewriteTrial,
)
from bigbrain_fx.frontend import capture, laid_out, prove
from bigbrain_fx.frontend.tracing.executor.graph_executor import resolve
from bigbrain_fx.plan import rewrite_places, rewrite_trial, rewritten_graph
from estimators.analytical import Analytical

LEAST_TURNS = 9
MARKS = "<!-- table -->", "<!-- end -->"


class Heads(nn.Module):
    """q, k and v of grouped heads, or gate and up."""

    def __init__(self, dim: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.into = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, width, bias=False) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number that depends on all."""
        x = self.into(x)
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


class Scores(nn.Module):
    """Attention's scores as a person writes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number that depends on all scores."""
        scores: Tensor = self.q(x) @ self.k(x).transpose(-1, -2) / 8.0
        return scores.softmax(-1).square().sum()


@dataclass(frozen=True)
class Case:
    """One place: what it is, the module that has it, and the shape that it reads."""

    rewrite: Rewrite
    said: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    training: bool = True


@dataclass(frozen=True)
class Row:
    """What was measured of one place."""

    case: Case
    before_s: float
    after_s: float
    forecast: float
    same_bits: bool

    @property
    def text(self) -> str:
        """Return a line of the table."""
        mode = "train" if self.case.training else "eval"
        bits = "same" if self.same_bits else "rounding"
        ratio = self.after_s / self.before_s
        return (
            f"| {self.case.rewrite} | {self.case.said} | {mode} | {self.before_s * 1e6:,.0f} | "
            f"{ratio:.2f} | {self.forecast:.2f} | {bits} |"
        )


def cases() -> Iterator[Case]:
    """Yield the places, from small to large."""
    for dim in (64, 256, 512):
        for rows, length in ((1, 32), (4, 64), (8, 128)):
            widths: dict[str, tuple[int, ...]] = {
                "q, k, v": (dim, dim, dim),
                "q, k, v of 4:1:1": (dim, dim // 4, dim // 4),
            }
            widths["gate, up"] = (5 * dim // 2,) * 2
            for name, own in widths.items():
                said = f"{name}, width {dim}, {rows} x {length}"
                make = _maker(Heads, dim, own)
                yield Case("linears", said, make, (rows, length, dim))
                if dim == 256:
                    yield Case("linears", said, make, (rows, length, dim), training=False)
    for width, length in ((16, 32), (16, 128), (64, 128), (64, 512)):
        said = f"heads of {width}, 8 x {length}"
        yield Case("scales", said, _maker(Scores, width), (8, length, width))


def _maker(kind: Callable[..., nn.Module], *args: object) -> Callable[[], nn.Module]:
    return lambda: kind(*args)


def judged(case: Case, cluster: Cluster, seconds: float) -> Row:
    """Run one place both ways, in turns."""
    torch.manual_seed(0)
    model = case.make().train(case.training)
    loss = (lambda output, _batch: output) if case.training else None
    found = capture(model, {"x": torch.randn(case.shape)}, loss, training=case.training)
    (place,) = rewrite_places(found.graph, [case.rewrite])
    graph = laid_out(rewritten_graph(found.graph, [place]), [op.name for op in place.made])
    forecast = _forecast_s(graph, cluster) - _forecast_s(found.graph, cluster)
    trial = rewrite_trial(found.graph, place, case.shape[0])
    own_s = sum(_op_s(found.graph, cluster)[name] for name in place.ops)
    before_s, after_s = _turns(trial, seconds)
    return Row(case, before_s, after_s, (own_s + forecast) / own_s, prove(trial).same_bits)


def _op_s(graph: Graph, cluster: Cluster) -> dict[str, float]:
    costs = Analytical().estimate(graph.at(graph.batch), cluster).ops["d0"]
    return {name: cost.forward_s + cost.backward_s for name, cost in costs.items()}


def _forecast_s(graph: Graph, cluster: Cluster) -> float:
    return sum(_op_s(graph, cluster).values())


def _turns(trial: RewriteTrial, seconds: float) -> tuple[float, float]:
    """Return the middle of each way's processor time."""
    ways = [_runner(graph) for graph in (trial.before, trial.after)]
    for run in ways:
        run()
    taken: list[list[float]] = [[], []]
    end = time.monotonic() + seconds
    while len(taken[0]) < LEAST_TURNS or time.monotonic() < end:
        for run, own in zip(ways, taken, strict=True):
            begun = time.thread_time()
            run()
            own.append(time.thread_time() - begun)
    return median(taken[0]), median(taken[1])


def _runner(graph: Graph) -> Callable[[], None]:
    """Return what runs a place once: forward, and backward where it trains."""
    trains = graph.training
    inputs = {e.name: _tensor(e.spec.shape, trains and e.spec.requires_grad) for e in graph.inputs}
    tensors = {p.name: _tensor(p.spec.shape, p.spec.requires_grad) for p in graph.params}
    leaves = [t for t in (*inputs.values(), *tensors.values()) if t.requires_grad]
    calls = [(op.name, resolve(op.target), op.args) for op in graph.ops]
    seeds: list[Tensor] = []

    def given(arg: Arg, env: dict[str, Any]) -> Any:  # noqa: ANN401  # what ops take
        match arg:
            case Ref(name):
                return env[name]
            case ParamRef(name):
                return tensors[name]
            case tuple():
                return [given(each, env) for each in arg]
        return arg

    def run() -> None:
        env: dict[str, Any] = dict(inputs)
        with torch.set_grad_enabled(trains):
            for name, function, args in calls:
                env[name] = function(*(given(arg, env) for arg in args))
        ends = [env[name] for name in graph.outputs]
        if trains:
            seeds[:] = seeds or [torch.randn_like(t) for t in ends]
            torch.autograd.grad(ends, leaves, seeds)

    return run


def _tensor(shape: tuple[int | str, ...], wants: bool) -> Tensor:
    return torch.rand([int(size) for size in shape]).add_(0.5).requires_grad_(wants)


@click.command(help=__doc__)
@click.option("--seconds", default=0.5, help="For each place, at least.")
@click.option("--flops", default=60e9, help="Of this processor, for the forecast.")
@click.option("--bandwidth", default=12e9, help="Of its memory, likewise.")
@click.option("--write", type=click.Path(path_type=Path), help="A page with a place for the table.")
def main(seconds: float, flops: float, bandwidth: float, write: Path | None) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    device = Device("d0", "h", "cpu", 2**33, flops, bandwidth, 4e-6)
    cluster = Cluster((device,), Link(50e-6, 1e9))
    head = "| rewrite | place | mode | before us | after / before | forecast | bits |"
    lines = [head, "|---|---|---|---:|---:|---:|---|"]
    click.echo("\n".join(lines))
    for case in cases():
        lines.append(judged(case, cluster, seconds).text)
        click.echo(lines[-1])
    if write:
        first, rest = write.read_text().split(MARKS[0])
        last = rest.split(MARKS[1])[1]
        write.write_text("\n".join((first + MARKS[0], "", *lines, "", MARKS[1] + last)))


if __name__ == "__main__":
    main()
