"""A branch on a buffer that forward writes is refused where it turns, at once or much later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.lasting import counting


class Counting(nn.Module):
    """Scales until so many calls were counted."""

    calls: Tensor
    mean: Tensor

    def __init__(self, most: int) -> None:
        super().__init__()
        self.lift, self.most = nn.Linear(3, 2), most
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        found = self.lift(x)
        self.calls += 1
        self.mean.lerp_(found.detach().mean(0), 0.1)
        if self.calls < self.most:
            found = found * 0.5
        return found.square().mean()


@pytest.mark.gate("700-1000 calls later")
@pytest.mark.parametrize(("most", "said"), [(3, "2 calls later"), (700, "1000 calls later")])
def test_a_count_that_ends_something_is_refused(most: int, said: str) -> None:
    with pytest.raises(CaptureError, match=said) as caught:
        capture(Counting(most), (torch.ones(4, 3),))
    assert "test_lasting.py" in (caught.value.at or "")
    assert "torch.where" in (caught.value.help or "")


@pytest.mark.nightly
def test_what_no_count_reaches_is_let_be() -> None:
    found = capture(Counting(10**9), (torch.ones(4, 3),))
    assert any("assumed True" in said for said in found.warnings)


def test_of_averages_the_remedy_is_said_and_works() -> None:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(3, 2)
            self.teacher = torch.optim.swa_utils.AveragedModel(self.own)
            self.teacher.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.teacher.update_parameters(self.own)
            found: Tensor = (self.own(x) - self.teacher(x) + 1).square().mean()
            return found

    with pytest.raises(CaptureError, match="1 call later") as caught:
        capture(Taught(), (torch.ones(4, 3),))
    assert "update_parameters once in model()" in (caught.value.help or "")
    model = Taught()
    model.teacher.update_parameters(model.own)
    capture(model, (torch.ones(4, 3),))


def test_only_even_steps_count() -> None:
    looks = [{"calls": 1.0, "mean": 0.1}, {"calls": 3.0, "mean": 0.19}, {"calls": 5.0, "mean": 0.2}]
    assert counting(looks) == {"calls": 2.0}
