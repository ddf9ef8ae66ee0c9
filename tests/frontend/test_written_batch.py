"""What is written into a batch, keys that no plan writes, and draws from generators."""

from __future__ import annotations

import enum

import pytest
import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.translation.batch import take_apart
from bigbrain_fx.runtime import APART
from bigbrain_fx.runtime.fixed_entries import require_fixed
from bigbrain_fx.runtime.stream import BatchError


class Kind(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("key", [(1, 2), Kind.ONE, 0.5, True, None])
def test_keys_that_no_plan_writes_are_refused(key: object) -> None:
    batch = {"x": torch.randn(4, 4), "y": {key: torch.randn(4, 4)}}
    with pytest.raises(InputError, match=r"the batch has the key") as caught:
        take_apart(batch)
    assert "by a text" in (caught.value.help or "")


def test_texts_and_numbers_are_keys() -> None:
    batch = {"x": torch.randn(4, 4), 0: {"a b": torch.randn(4, 4), 7: torch.randn(4)}}
    assert [entry.key for entry in take_apart(batch).entries] == [("x",), (0, "a b"), (0, 7)]


def test_written_entries_must_have_memory_of_their_own() -> None:
    fixed = [(("x",), APART)]
    whole = torch.ones(4, 6)
    require_fixed(fixed, {"x": whole[:, :3], "y": whole[:, 3:]}, 2)
    for other in (whole, whole[1:2], [whole[:, 2:]]):
        with pytest.raises(BatchError, match=r"step 2.*writes into x.*y.* the same memory"):
            require_fixed(fixed, {"x": whole[:, :3], "y": other}, 2)
