"""A user's scheduler is stepped on its optimizer before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.optimizers.per_device import require_scheduler

S = torch.optim.lr_scheduler
TRAINED = dict(nn.Linear(3, 4).named_parameters())


def failing(optimizer: torch.optim.Optimizer) -> Any:
    return S.LambdaLR(optimizer, [lambda t: 1.0] * 2)


def test_schedulers_of_the_number_of_steps_pass() -> None:
    for make in (lambda o: S.CosineAnnealingLR(o, 5), lambda o: S.OneCycleLR(o, 0.1, 9)):
        require_scheduler(TRAINED, None, make)


@pytest.mark.parametrize(
    ("scheduler", "code"),
    [(S.ReduceLROnPlateau, "BX2148"), (lambda _: None, "BX2147"), (failing, "BX2146")],
)
def test_one_that_cannot_be_stepped_is_refused(scheduler: Callable[..., Any], code: str) -> None:
    with pytest.raises(InputError) as error:
        require_scheduler(TRAINED, torch.optim.SGD, scheduler)
    assert error.value.code == code
    assert error.value.help
