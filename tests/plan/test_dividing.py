"""Who gets which devices: against brute force over every division, device by device."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from bigbrain_fx.core import Cluster, Host, Link
from bigbrain_fx.plan.dividing import Names, Price, _climbed, divide
from bigbrain_fx.planning import interchangeable
from tests.support.synthetic import cluster_of, device

SPEEDS = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 1.0, "e": 1.0}
CLUSTER = cluster_of(*(device(name, speed, host=name) for name, speed in SPEEDS.items()))


def prices(seed: int, jobs: int = 2) -> Price:
    """Make jobs that gain less and less from devices, and may need several for their memory."""
    dice = random.Random(seed)
    work = [dice.choice((1.0, 3.0, 10.0)) for _ in range(jobs)]
    wait = [dice.choice((0.0, 0.1, 1.0)) for _ in range(jobs)]
    least = [dice.choice((1, 1, 2, 3)) for _ in range(jobs)]

    def price(job: int, own: Names, others: tuple[Names, ...]) -> float:
        if len(own) < least[job]:
            return math.inf
        return work[job] / sum(SPEEDS[name] for name in own) + wait[job] * len(own)

    return price


def brute_force(cluster: Cluster, jobs: int, price: Price) -> float:
    """Return when the last job ends in the best of all divisions; infinity: none fits."""
    best = math.inf
    names = [d.name for d in cluster.devices]
    for owner in product(range(jobs + 1), repeat=len(names)):
        given = [
            tuple(n for n, job in zip(names, owner, strict=True) if job == j) for j in range(jobs)
        ]
        if all(given):
            best = min(best, max(price(j, own, ()) for j, own in enumerate(given)))
    return best


@pytest.mark.gate("2")
@pytest.mark.parametrize("jobs", [2, 3])
def test_the_best_of_all_divisions(jobs: int) -> None:
    for seed in range(25):
        price = prices(seed, jobs)
        found = divide(CLUSTER, jobs, price, 1000)
        best = brute_force(CLUSTER, jobs, price)
        assert found.is_exact
        assert found.fits == (best < math.inf)
        if found.fits:
            assert max(found.ends_s) == pytest.approx(best)
            assert len({name for own in found.given for name in own}) == sum(map(len, found.given))


def test_a_step_at_a_time_is_near_and_says_that_it_is_not_all() -> None:
    kinds, behind = interchangeable(CLUSTER), []
    for seed in range(40):
        price = prices(seed)
        found, best = _climbed(kinds, 2, price, 1000), brute_force(CLUSTER, 2, price)
        assert not found.is_exact
        assert found.fits == (best < math.inf), seed
        if found.fits:
            behind.append(max(found.ends_s) / best)
    assert min(behind) >= 1 - 1e-9
    assert sorted(behind)[len(behind) // 2] == pytest.approx(1.0)
    assert sorted(behind)[len(behind) * 9 // 10] < 1.2
    assert not divide(CLUSTER, 2, prices(0), most_prices=5).is_exact


def test_devices_are_alike_where_they_could_change_places() -> None:
    assert interchangeable(CLUSTER) == (("a",), ("b",), ("c", "d", "e"))
    near = replace(CLUSTER, links=(("a", "c", Link(0.0, 1e9)),))
    assert interchangeable(near) == (("a",), ("b",), ("c",), ("d", "e"))
    both = cluster_of(device("a", host="x"), device("b", host="x"), device("c", host="y"))
    assert interchangeable(both) == (("a", "b"), ("c",))
    own = cluster_of(device("a", host="x"), device("b", host="y"))
    limited = replace(own, hosts=(Host("x", cores=1),))
    assert set(interchangeable(limited)) == {("a",), ("b",)}
