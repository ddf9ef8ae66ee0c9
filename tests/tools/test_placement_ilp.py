"""The program over placements per op: against every placement of a small graph, and our plans."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Axis, Op
from tools import placement_case
from tools.placement_case import Case
from tools.placement_ilp import Placements
from tools.placement_prices import COPY, SUM, WHOLE, Clock, Exchanges, Prices


@pytest.fixture(scope="module")
def case() -> Case:
    torch.set_num_threads(1)
    return Case.of("vit", 2)


def test_what_a_form_costs_another() -> None:
    """Two members, 8 bytes: all of it to the other member, or half."""
    ours, more = Exchanges(2, all_to_all=False), Exchanges(2, all_to_all=True)
    assert ours.sent(8, True, SUM, WHOLE) == 8  # forward; the gradient is whole
    assert ours.sent(8, True, WHOLE, COPY) == 8  # backward
    assert ours.sent(8, False, WHOLE, COPY) == 0
    assert ours.sent(8, True, "heads", WHOLE) == 4
    assert ours.sent(8, True, WHOLE, "heads") == 4  # gathers the gradient
    assert ours.sent(8, True, SUM, "heads") == 8  # half a sum, and gathers the gradient
    assert ours.sent(8, True, "heads", COPY) == 4  # beside what it costs to have it whole
    assert ours.sent(8, True, "heads", "hidden") == 8
    assert more.sent(8, True, "heads", "hidden") == 4
    for source, target in product((WHOLE, SUM, "heads"), (WHOLE, COPY, "heads", "hidden")):
        assert more.sent(8, True, source, target) <= ours.sent(8, True, source, target)


def test_no_plan_of_ours_is_below_the_optimum(case: Case) -> None:
    """Ours is one of the program's answers, so the optimum is no more; and it is not nothing."""
    ways = Exchanges(2, all_to_all=False), Exchanges(2, all_to_all=True)
    least = [Placements(case, way).least() for way in ways]
    assert 0 < least[1] <= least[0] <= case.bytes * (1 + 1e-6)
    assert 0 < Placements(case, Clock(case, all_to_all=False)).least() <= case.step_s


def test_bytes_are_the_optimum_of_what_members_exchange(case: Case) -> None:
    least = Placements(case, Exchanges(2, all_to_all=False)).least()
    assert case.bytes == pytest.approx(least, rel=1e-6)


class Small(nn.Module):
    """Two layers, and what stands between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.up, self.down = nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x[:, 0, :16] * self.scale).relu()).square().mean()
        return out


@pytest.mark.gate("False-True")
@pytest.mark.parametrize("all_to_all", [False, True])
@pytest.mark.parametrize("in_seconds", [False, True])
def test_the_optimum_is_the_least_of_all_placements(
    monkeypatch: pytest.MonkeyPatch, all_to_all: bool, in_seconds: bool
) -> None:
    monkeypatch.setitem(placement_case.BLOCKS, "small", Small)
    case = Case.of("small", 2)
    prices = Clock(case, all_to_all) if in_seconds else Exchanges(2, all_to_all)
    want = min(every_cost(case, prices))
    assert Placements(case, prices).least() == pytest.approx(want, rel=1e-6)


def every_cost(case: Case, prices: Prices) -> Iterator[float]:
    """Yield what each placement of the graph costs that holds and computes no more than ours."""
    ops = [op for op in case.graph.ops if op.outputs]
    params = [param.name for param in case.graph.params]
    held = [[None, *(a for a in case.axes if lies(a, name))] for name in params]
    ways = [[None, *(a for a in case.axes if op.name in (*a.along, *a.summed))] for op in ops]
    specs = {p.name: p.spec for p in case.graph.params} | {op.name: op.outputs[0] for op in ops}
    sizes = {name: spec.nbytes for name, spec in specs.items()}
    graded = {name for name, spec in specs.items() if spec.requires_grad}
    for homes in product(*held):
        weight = sum(sizes[n] / (1 if a is None else 2) for n, a in zip(params, homes, strict=True))
        if weight > case.held:
            continue
        for chosen in product(*ways):
            pairs = list(zip(ops, chosen, strict=True))
            compute_s = sum(case.seconds[op.name] / (1 if a is None else 2) for op, a in pairs)
            forms = {n: WHOLE if a is None else a.name for n, a in zip(params, homes, strict=True)}
            forms |= {op.name: made(op, axis) for op, axis in pairs}
            needs = {(n, f) for op, axis in pairs for n, f in read(op, axis, forms, graded)}
            needs |= {(n, WHOLE) for n, f in needs if f == COPY} | {(case.graph.loss or "", WHOLE)}
            own = sum(prices.computes(op.name, axis) for op, axis in pairs)
            sent = sum(
                prices.converts(specs[n], forms[n], f, is_param=n in params) for n, f in needs
            )
            if isinstance(prices, Clock) or compute_s <= case.compute_s * (1 + 1e-9):
                yield own + sent


def lies(axis: Axis, name: str) -> bool:
    return name in {place.name for place in (*axis.params, *axis.values)}


def made(op: Op, axis: Axis | None) -> str:
    if axis is None:
        return WHOLE
    return SUM if op.name in axis.summed else axis.name


def read(
    op: Op, axis: Axis | None, forms: dict[str, str], graded: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield the form in which an op reads each value; the batch is whole, and has no gradient."""
    for name in (n for n in (*op.refs, *op.params) if n in forms):
        if axis is None:
            yield name, WHOLE
        elif lies(axis, name):
            yield name, axis.name
        else:
            yield name, COPY if name in graded else WHOLE
