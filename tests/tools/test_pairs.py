"""Pairs of features: some of each kind here, all of them, and what refusals advise, as promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.pairs import Pair, judge, pairs
from tools.pairs.comparing import MICRO_BATCHES, compared
from tools.pairs.judge import STEPS, split
from tools.pairs.table import complete, expected, fault, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pairs.md"
SOME = ("Z2+S", "Z3+N", "R+T", "Z3+S", "T+Ow", "Ab+M", "S+Ow", "G+I")
REFUSED = tuple(name for name, row in expected().items() if row.remedy)


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
    import torch

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


@pytest.mark.promise
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_refusal_advises_splits(name: str, tmp_path: Path) -> None:
    assert split(named(name), tmp_path, expected()[name].remedy.split()) == {}
