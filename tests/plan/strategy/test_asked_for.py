"""`auto` with all left open is by forecast never slower than what is asked for piece by piece."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.fastest import counted_s
from bigbrain_fx.plan.replicas import numbers
from tests.support.synthetic import GIB, device

SOURCE = Source("model.py")
PARTITIONERS = ("naive", "analytical", "chain-dp", "m-etf")
SCHEDULES = ("1f1b", "gpipe", "list", "zb-h1")


class Mixed(nn.Module):
    """A block with a way around it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.second(F.gelu(self.first(x)))).pow(2).mean()


@cache
def graph() -> Graph:
    return capture(Mixed(), {"x": torch.randn(8, 32)}).graph


def drawn(seed: int) -> tuple[Graph, Cluster]:
    """Draw what ops cost, and two to four devices, equal or not, over fast and slow links."""
    dice = random.Random(seed)
    ops = tuple(replace(op, flops=dice.choice((0, 10**6, 10**7, 4 * 10**7))) for op in graph().ops)
    count = dice.choice((2, 3, 4, 4))
    speeds = [dice.choice((1, 2, 4)) for _ in range(count)] if seed % 2 else [1] * count
    link = Link(dice.choice((1e-6, 1e-4)), dice.choice((1e6, 1e8, 1e10)))
    devices = tuple(device(f"d{i}", s, GIB) for i, s in enumerate(speeds))
    return replace(graph(), ops=ops), Cluster(devices, link)


def asked(where: Cluster) -> Iterator[dict[str, Any]]:
    """Yield what a user could ask for, one thing after the other."""
    for name in PARTITIONERS:
        yield {"partitioner": name}
        for schedule in SCHEDULES:
            yield {"partitioner": name, "schedule": schedule}
    for schedule in SCHEDULES:
        yield {"schedule": schedule}
    for count in numbers(where)[1:]:
        yield {"replicas": count}
        yield {"replicas": count, "zero_stage": 1}
        for name in PARTITIONERS:
            yield {"replicas": count, "partitioner": name}
        yield {"replicas": count, "tensor": 2}
    for members in range(2, len(where.devices) + 1):
        yield {"tensor": members}
        yield {"tensor": members, "partitioner": "naive"}


def step_s(found: Graph, where: Cluster, given: dict[str, Any]) -> float | None:
    try:
        return counted_s(planned(found, where, **{"tensor": 1, **given}))
    except (InputError, NoPlanError):
        return None


def planned(found: Graph, where: Cluster, **choices: Any) -> Plan:
    given = {"partitioner": "auto", "effort": "normal", **choices}
    return make_plan(found, where, SOURCE, Options(**given))


def faster_than_auto(seed: int, effort: str, every: int) -> dict[str, float]:
    """Return what was asked for and is faster, and by how much; each so many-th is tried."""
    found, where = drawn(seed)
    best = counted_s(planned(found, where, tensor=0, replicas=0, effort=effort))
    faster = {}
    for given in list(asked(where))[::every]:
        other_s = step_s(found, where, {"effort": effort, **given})
        if other_s is not None and other_s < best * (1 - 1e-9):
            faster[str(given)] = best / other_s
    return faster


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_is_asked_for_is_faster(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbrain_fx.plan.fastest.CPU", 0.0)
    assert not faster_than_auto(seed, "normal", every=1)


@pytest.mark.nightly
@pytest.mark.parametrize("every", [pytest.param(9, marks=pytest.mark.nightly), 18])
def test_some_choices_are_not_searched_in_a_hurry(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigbrain_fx.plan.fastest.CPU", 0.0)
    assert not faster_than_auto(10, "fast", every=every)
