"""Plain values of the user's objects: as JSON and tensors, and back."""

from __future__ import annotations

import json
import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bigbrain_fx.runtime.plain_values import UnkeptError, Values

WEIGHT = nn.Parameter(torch.ones(2, 3))


def through_json(value: object, before: object = None) -> Any:
    """Return what a value is after it was written to a file and read."""
    values = Values({"w": WEIGHT}, "user:")
    found = json.loads(json.dumps(values.encode(value), sort_keys=True))
    return values.decode(found, before)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        -0.5,
        float("inf"),
        "text",
        [1, [2.5, True]],
        (1, (2, "x")),
        {"a": {1: (2,)}, 3: None},
        OrderedDict(b=1, a=2),
        {1, 2},
        frozenset("a"),  # its text is the id of the case, in every process the same
        deque([1, 2, 3], maxlen=4),
    ],
    ids=str,
)
def test_a_plain_value_comes_back(value: object) -> None:
    found = through_json(value)
    assert found == value
    assert type(found) is type(value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


def test_a_tensor_comes_back_with_its_strides_and_a_parameter_as_itself() -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    found, own = through_json([turned, WEIGHT])
    assert torch.equal(found, turned)
    assert found.stride() == turned.stride()
    assert own is WEIGHT


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(3),
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
    ],
)
def test_a_generator_goes_on_from_where_it_was(make: object) -> None:
    def drawn(dice: object) -> float:
        if isinstance(dice, torch.Generator):
            return float(torch.rand(1, generator=dice))
        return float(dice.random())  # type: ignore[attr-defined]  # of the others

    dice, other = make(), make()  # type: ignore[operator]  # a lambda
    drawn(dice)
    values = Values({}, "user:")
    kept = json.loads(json.dumps(values.encode(dice)))
    expected = drawn(dice)
    assert drawn(values.decode(kept, other)) == expected


@pytest.mark.parametrize(
    "value",
    [
        lambda: 1,
        iter([1]),
        [1, object()],
        torch.ones(2).to_sparse(),
        torch.ones(2, requires_grad=True) * 2,
    ],
)
def test_state_that_is_no_data_is_named(value: object) -> None:
    with pytest.raises(UnkeptError):
        Values({}, "user:").encode(value)
