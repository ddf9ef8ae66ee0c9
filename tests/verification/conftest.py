"""Fixtures of rooms' tests that compare bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bigbrain_fx.plan import replica_cut
from tests.support.bundles import MODEL
from tests.support.training import HEADS, bench_of
from tools.conformance.matrix import Bench


@pytest.fixture
def bench() -> Bench:
    """The model of `tests.support.bundles`."""
    return bench_of(MODEL)


@pytest.fixture
def heads() -> Bench:
    """The same with attention."""
    return bench_of(HEADS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums have another order with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model has several buckets, too."""
    monkeypatch.setattr(replica_cut, "LEAST_BUCKET", 2048)
