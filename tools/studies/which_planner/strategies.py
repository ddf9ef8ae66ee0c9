"""Walks over replicas x members x placements beside `auto`, with as many plans judged as it judges.

    python -m tools.studies.which_planner.strategies [--models gpt,unet] [--seeds 2] [--json]

What is walked over is what `auto` chooses from: how many replicas, members of a tensor group and
micro-batches, ZeRO 0 or 1, and within a replica the placement, which the partitioner of the same
name finds. `mcmc`: FlexFlow's Metropolis walk (Jia et al., MLSys'19, section 6.2); one number
changes at a time. `differentiable`: chances of every number, moved along the gradient of the
expected step (Williams' REINFORCE, with a mean for a baseline). Both stop when they have had as
many plans cut, scheduled and simulated as `auto` had for the same model and cluster, or after 4,000
draws. It is a comparison, no part of the product.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import exp
from pathlib import Path
from typing import Any

import click

from bigbrain_fx.bundles import source_of
from bigbrain_fx.core import Cluster, Graph
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options, Plan, Source, fastest, make_plan
from bigbrain_fx.plan.judge import PipelineMaker
from bigbrain_fx.plan.tensor import GroupMaker
from tools.studies.which_planner.scenarios import cluster_of

ROOT = Path(__file__).resolve().parents[3]
WALKS = ("mcmc", "differentiable")
CLUSTERS = (("alike", "10 Gbit/s"), ("unlike", "1 Gbit/s"))
_HEAT = (0.1, 0.01)  # of the walk, at first and last, in shares of a step
_RATE = 0.5
_MOST_DRAWN = 4000
"""Draws in all: what was judged before is remembered, and costs nothing."""

State = tuple[int, int, int, int]  # replicas, members, micro-batches, ZeRO


@dataclass(frozen=True)
class Row:
    """One way to search in one scenario."""

    model: str
    cluster: str
    search: str
    seed: int
    step_s: float
    found: str
    judged: int
    seconds: float


@contextmanager
def counting(made: list[int]) -> Iterator[None]:
    """Note every plan that is cut, scheduled and simulated meanwhile."""
    makers: tuple[Any, ...] = (PipelineMaker, GroupMaker)
    before = [maker.placed for maker in makers]

    def counted(of: Callable[..., Plan]) -> Callable[..., Plan]:
        def placed(*args: Any, **more: Any) -> Plan:  # noqa: ANN401  # they are passed on
            made.append(1)
            return of(*args, **more)

        return placed

    for maker, placed in zip(makers, before, strict=True):
        maker.placed = counted(placed)
    try:
        yield
    finally:
        for maker, placed in zip(makers, before, strict=True):
            maker.placed = placed


@dataclass
class Space:
    """The strategies of a model on a cluster; mutable, remembers what it judged."""

    graph: Graph
    cluster: Cluster
    source: Source
    partitioner: str
    seed: int
    budget: int
    made: list[int]
    known: dict[State, float] = field(default_factory=dict)

    def choices(self) -> tuple[Sequence[int], ...]:
        """Return what each number may be."""
        count, batch = len(self.cluster.devices), self.graph.batch
        parts = [n for n in range(1, count + 1) if count % n == 0]
        micros = [n for n in range(1, min(batch, 4 * count) + 1) if batch % n == 0]
        return parts, parts, micros, (0, 1)

    def step_s(self, state: State) -> float:
        """Return a state's forecast; infinity where there is no such plan."""
        if state not in self.known:
            self.known[state] = self._judged(state)
        return self.known[state]

    @property
    def is_over(self) -> bool:
        """Whether as many plans were judged as may be."""
        return len(self.made) >= self.budget

    def _judged(self, state: State) -> float:
        replicas, members, micro, zero = state
        options = Options(
            self.partitioner,
            micro_batches=micro,
            seed=self.seed,
            replicas=replicas,
            tensor=members,
            zero_stage=zero,  # type: ignore[arg-type]  # 0 or 1
        )
        try:
            return make_plan(self.graph, self.cluster, self.source, options).forecast.step_s
        except BigBrainError:
            return float("inf")


def walked(space: Space, dice: random.Random) -> None:
    """Walk from one pipeline on; what is met is in `space.known`."""
    choices = space.choices()
    at: State = (1, 1, choices[2][len(choices[2]) // 2], 0)
    hot, cold = _HEAT
    for step in range(_MOST_DRAWN):
        if space.is_over:
            return
        place = dice.randrange(len(at))
        other = (*at[:place], dice.choice(choices[place]), *at[place + 1 :])
        worse = space.step_s(other) / space.step_s(at) - 1  # type: ignore[arg-type]  # four numbers
        heat = hot * (cold / hot) ** (step / _MOST_DRAWN)
        if worse <= 0 or dice.random() < exp(-worse / heat):
            at = other  # type: ignore[assignment]


def descended(space: Space, dice: random.Random) -> None:
    """Draw by chances that go along the gradient; what is met is in `space.known`."""
    choices = space.choices()
    weights = [[0.0] * len(each) for each in choices]
    mean = None
    for _ in range(_MOST_DRAWN):
        if space.is_over:
            return
        chances = [_softmax(each) for each in weights]
        drawn = [dice.choices(range(len(c)), c)[0] for c in chances]
        state = tuple(each[i] for each, i in zip(choices, drawn, strict=True))
        found_s = space.step_s(state)  # type: ignore[arg-type]  # four numbers
        if mean is None:
            mean = found_s if found_s < float("inf") else None
        if mean is None:
            continue
        gain = 1 - min(found_s / mean, 2.0)
        for each, chance, i in zip(weights, chances, drawn, strict=True):
            for j in range(len(each)):
                each[j] += _RATE * gain * ((j == i) - chance[j])
        mean = 0.9 * mean + 0.1 * min(found_s, 2 * mean)


def _softmax(weights: Sequence[float]) -> list[float]:
    each = [exp(w - max(weights)) for w in weights]
    return [e / sum(each) for e in each]


def rows_of(
    model: str, graph: Graph, source: Source, names: Sequence[str], seeds: int
) -> Iterator[Row]:
    """Yield what `auto` finds, and what each walk does with as many plans."""
    where = cluster_of(names[0], names[1])
    named = ", ".join(names)
    made: list[int] = []
    start_s = time.process_time()
    with counting(made):
        plan = make_plan(graph, where, source, Options("auto", tensor=0, replicas=0))
    stages = plan.stages
    found = (stages.replicas, stages.members, plan.micro_batches, stages.zero_stage)
    taken_s = time.process_time() - start_s
    yield Row(model, named, "auto", 0, plan.forecast.step_s, _said(found), len(made), taken_s)
    for walk, seed in ((walk, seed) for walk in WALKS for seed in range(seeds)):
        judged: list[int] = []
        start_s = time.process_time()
        space = Space(graph, where, source, walk, seed, len(made), judged)
        with counting(judged):
            {"mcmc": walked, "differentiable": descended}[walk](space, random.Random(seed))
        best = min(space.known, key=lambda state: space.known[state])
        taken_s = time.process_time() - start_s
        yield Row(model, named, walk, seed, space.known[best], _said(best), len(judged), taken_s)


def _said(state: State) -> str:
    replicas, members, micro, zero = state
    return f"{replicas} x {members}, {micro} micro-batches" + f", ZeRO {zero}" * (zero > 0)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table, ratios over `auto`."""
    yield "| model | devices | search | seed | ms | to `auto` | replicas x members | judged | s |"
    yield "|---" * 9 + "|"
    for row in rows:
        first = next(r for r in rows if (r.model, r.cluster) == (row.model, row.cluster))
        ratio = row.step_s / first.step_s
        yield (
            f"| {row.model} | {row.cluster} | `{row.search}` | {row.seed} | {1e3 * row.step_s:.2f} "
            f"| {ratio:.2f} | {row.found} | {row.judged} | {row.seconds:.1f} |"
        )


@click.command()
@click.option("--models", default="gpt,unet", show_default=True, help="Of models/.")
@click.option("--seeds", default=2, show_default=True, help="Of each walk.")
@click.option("--json", "as_json", is_flag=True)
def main(models: str, seeds: int, as_json: bool) -> None:
    """Compare walks with `auto`."""
    fastest.CPU = 0.0  # of plans that are about as fast `auto` takes the simpler one: not here
    rows = []
    for model in models.split(","):
        with capture_file(ROOT / "models" / f"{model}.py") as session:
            graph, source = session.graph, source_of(session.facts)
            for names in CLUSTERS:
                for row in rows_of(model, graph, source, names, seeds):
                    rows.append(row)
                    click.echo(json.dumps(asdict(row)) if as_json else str(row), err=not as_json)
    if not as_json:
        click.echo("\n".join(table(rows)))


if __name__ == "__main__":
    main()
