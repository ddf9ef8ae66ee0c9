"""Pairs of features: some of each kind here, all of them, and what refusals advise, as promises."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools.coverage import warm
from tools.pairs import Pair, judge, pairs
from tools.pairs.comparing import MICRO_BATCHES, compared
from tools.pairs.judge import STEPS, split
from tools.pairs.table import complete, expected, fault, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pairs.md"
SOME = ("Z2+S", "R+T", "Z3+S", "T+Ow", "Ab+M", "S+Ow", "G+I", "Z3+Ow")
ADVISED = ("Z3+Ow", "Ab+I")
REFUSED = tuple(name for name, row in expected().items() if row.remedy)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    """Import what each copy of this process needs; one thread, as a device of a bundle has."""
    threads, collects = torch.get_num_threads(), gc.get_threshold()
    warm()
    yield
    torch.set_num_threads(threads)
    gc.set_threshold(*collects)


def named(name: str) -> Pair:
    (found,) = (pair for pair in pairs() if pair.name == name)
    return found


def as_expected(name: str) -> None:
    pair = named(name)
    found = judge(pair)
    assert fault(pair, found.status, found.detail) == ""
    assert found.help or found.status != "refused"


def test_every_pair_is_in_the_table_and_on_the_page() -> None:
    assert complete() == []
    assert {row.status for row in expected().values()} == {"bitwise", "reference", "refused"}
    assert PAGE.read_text() == page(MICRO_BATCHES, STEPS)
    for row in expected().values():
        assert bool(row.says) == (row.status == "refused")


def test_other_numbers_are_no_rounding() -> None:
    pair, wanted = named("R+N"), ([1.0], {"w": torch.ones(3)})
    near, far = torch.tensor([1.0, 1.0, 1.0 + 1e-6]), torch.tensor([1.0, 1.0, 1.001])
    assert compared(pair, wanted, wanted)["status"] == "bitwise"
    assert compared(pair, wanted, ([1.0], {"w": near}))["status"] == "reference"
    assert compared(pair, wanted, ([1.0], {"w": far}))["status"] == "wrong"
    assert compared(pair, wanted, ([1.1], wanted[1]))["status"] == "wrong"
    assert compared(pair, wanted, ([1.0], {}))["status"] == "wrong"


@pytest.mark.parametrize("name", [name for name in SOME if name in expected()])
def test_some_pairs(name: str) -> None:
    as_expected(name)


@pytest.mark.promise
@pytest.mark.parametrize("name", sorted(set(expected()) - set(SOME)))
def test_every_pair(name: str) -> None:
    as_expected(name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.promise] * (n not in ADVISED)) for n in REFUSED],
)
def test_what_a_refusal_advises_splits(name: str, tmp_path: Path) -> None:
    assert split(named(name), tmp_path, expected()[name].remedy.split()) == {}
