"""The lines of a forward are run without the modules that they call; these answer what is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime import forward_of, lines_until
from bigbrain_fx.runtime.kept import AssumptionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.first.register_forward_hook(
            lambda *_: pytest.fail("a hook runs where its module does")
        )

    def forward(self, x: Tensor, twice: bool = False) -> tuple[Tensor, bool]:
        hidden = self.first(x)
        hidden = self.second(hidden) if not twice else self.first(hidden)
        return (hidden * self.scale)[hidden[:, 0] > 0].sum(), self.training


def rows() -> Tensor:
    return torch.tensor([[1.0, 2.0, 3.0], [-1.0, 5.0, 5.0]], requires_grad=True)


def test_results_of_modules_reach_the_lines() -> None:
    given, own = rows(), torch.full((3,), 2.0, requires_grad=True)
    answers = {"first": [torch.zeros(2, 3)], "second": [given]}
    found = forward_of(Net, "", False, answers, {"scale": own}, torch.zeros(2, 3))
    assert isinstance(found, tuple)
    loss, training = found
    assert loss == 12.0
    assert training is False
    loss.backward()
    assert given.grad is not None
    assert given.grad.tolist() == [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    assert own.grad is not None
    assert own.grad.tolist() == [1.0, 2.0, 3.0]


def test_a_module_that_is_called_twice_answers_in_order() -> None:
    answers = {"first": [rows(), rows() * 3]}
    found = forward_of(Net, "", True, answers, {"scale": torch.ones(3)}, rows(), twice=True)
    assert found == (18.0, True)


def test_lines_before_a_module_give_its_arguments() -> None:
    given = rows()
    args, kwargs = as_pair(lines_until(Net, "", True, {"first": [given]}, {}, "second", rows()))
    assert args == (given,)
    assert kwargs == {}
    twice = lines_until(Net, "", True, {"first": [given]}, {}, "first", rows(), twice=True)
    assert as_pair(twice) == ((given,), {})


def test_lines_that_do_not_come_to_a_module_are_an_error() -> None:
    with pytest.raises(AssumptionError, match="calls first, as it did not"):
        lines_until(Net, "", True, {}, {}, "second", rows())
    answers = {"first": [rows(), rows()]}
    with pytest.raises(AssumptionError, match="did not call second"):
        lines_until(Net, "", True, answers, {"scale": rows()[0]}, "second", rows(), twice=True)


def as_pair(found: object) -> tuple[object, object]:
    assert isinstance(found, tuple)
    args, kwargs = found
    return args, kwargs


def test_other_calls_than_those_of_the_example_are_an_error() -> None:
    answers = {"first": [rows()], "second": [rows()]}
    with pytest.raises(AssumptionError, match="calls first, as it did not"):
        forward_of(Net, "", True, answers, {}, rows(), twice=True)
    more = {"first": [rows(), rows()], "second": [rows()]}
    with pytest.raises(AssumptionError, match="did not call first"):
        forward_of(Net, "", True, more, {}, rows())


def test_parameters_that_are_not_given_take_no_memory() -> None:
    wide = nn.Sequential(nn.Linear(4096, 4096))
    found = forward_of(wide, "", True, {"0": [torch.ones(1)]}, {}, torch.ones(1))
    assert isinstance(found, Tensor)
    assert found.item() == 1.0
