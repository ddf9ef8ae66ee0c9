"""Pairs of features: some of each kind here, all of them, and what refusals advise, as promises."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.command_line import call
from tools.conformance.coverage import warm
from tools.conformance.pairs import Pair, judge, pairs
from tools.conformance.pairs.comparing import MICRO_BATCHES, compared, write_cluster
from tools.conformance.pairs.judge import STEPS, split
from tools.conformance.pairs.running import trained
from tools.conformance.pairs.table import complete, expected, fault, page

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/pairs.md"
SOME = ("Z2+S", "Z3+S", "T+Ow", "Ab+M", "S+Ow", "G+I", "Z3+Ow")
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


@pytest.mark.gate("Z3+S", "T+Ow", "S+Ow", "G+I", "Z3+Ow")
@pytest.mark.parametrize("name", SOME)
def test_some_pairs(name: str) -> None:
    as_expected(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(expected()) - set(SOME)))
def test_every_pair(name: str) -> None:
    as_expected(name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n not in ADVISED)) for n in REFUSED],
)
def test_a_refusals_remedy_splits(name: str, tmp_path: Path) -> None:
    assert split(named(name), tmp_path, expected()[name].remedy.split()) == {}


@pytest.mark.nightly
def test_a_remedy_of_resplit_for_an_asynchronous_bundle(tmp_path: Path) -> None:
    """Its weights go along: from a commit by `--resume --save`, `export` and `split --weights`."""
    pair, joined = named("Ab+Q"), tmp_path / "model.safetensors"
    assert split(pair, tmp_path, pair.words) == {}
    bundle, saved = tmp_path / "bundle", tmp_path / "saved"
    assert trained(bundle, "--checkpoint-every", "0", "--steps", "2") == ""
    one = write_cluster(tmp_path, 1)
    refused = call("resplit", bundle, "--devices", one, "--out", tmp_path / "moved")
    assert refused.code == 2
    assert all(word in refused.err for word in ("--resume --save", "export", "split --weights"))
    assert not (tmp_path / "moved").exists()
    assert trained(bundle, "--resume", "--steps", "2", "--save", str(saved)) == ""
    assert call("export", bundle, "--weights", saved, "--to", joined).code == 0
    words = ("--devices", one, "--out", tmp_path / "anew", "--weights", joined)
    assert call("split", tmp_path / "letters.py", *words, "--micro-batches", "8").code == 0
