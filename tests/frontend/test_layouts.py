"""How a batch's tensors lie in memory stays as in the example, where the model goes by it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.export import quiet
from bigbrain_fx.frontend.tracing.fixed import fixed_entries
from bigbrain_fx.runtime import APART, laid
from bigbrain_fx.runtime.fixed_entries import require_fixed
from bigbrain_fx.runtime.stream import BatchError


class Asks(nn.Module):
    """Goes by how `x` and `picture` lie, whether `z` wants a gradient; of `y` by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor, z: Tensor, picture: Tensor) -> Tensor:
        found = self.lift(x if x.is_contiguous() else 2 * x).mean() + y.contiguous().mean()
        if z.requires_grad:
            found = 3 * found
        if picture.is_contiguous(memory_format=torch.channels_last):
            found = 5 * found
        return found


class Plain(nn.Module):
    """Asks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lift(x).mean()


def batch() -> dict[str, Tensor]:
    return {n: torch.ones(4, 3) for n in "xyz"} | {"picture": torch.rand(4, 3, 5, 5)}


def test_what_the_model_goes_by_of_a_layout_is_found() -> None:
    found = dict(fixed_entries(Asks(), batch(), None, None))
    assert {key for (key,) in found} == {"x", "z", "picture"}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("x", torch.ones(3, 4).t()),
        ("z", torch.ones(4, 3, requires_grad=True)),
        ("picture", torch.rand(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)),
    ],
)
def test_another_layout_stops_a_run_and_says_what_to_do(name: str, other: Tensor) -> None:
    fixed = fixed_entries(Asks(), batch(), None, None)
    require_fixed(fixed, batch(), 1)
    with pytest.raises(BatchError, match=r"step 7.*x\.detach\(\)\.contiguous\(\)"):
        require_fixed(fixed, {**batch(), name: other}, 7)
    require_fixed(fixed, {**batch(), name: other.detach().contiguous()}, 7)
    require_fixed(fixed, {**batch(), "y": torch.ones(3, 4).t()}, 7)  # it goes by no layout of y


def test_fewer_rows_are_no_other_layout() -> None:
    whole = torch.rand(4, 3, 5, 5)
    assert laid(whole) == laid(whole[:1].clone()) == laid(whole[:3])
    assert laid(whole) == laid(whole[..., :1].clone())  # what `pad` fills up
    assert laid(whole) != laid(whole[..., ::2])


class Quiet(logging.Handler):
    """Counts."""

    calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        type(self).calls += 1


def test_handlers_of_the_users_hear_what_others_do_not_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("tests.of.layouts")
    log.setLevel(logging.INFO)
    log.handlers, log.propagate = [Quiet(), logging.StreamHandler()], False
    before = Quiet.calls
    with quiet():
        assert log.isEnabledFor(logging.INFO)
        log.info("said once")
    assert Quiet.calls == before + 1
    assert "said once" not in capsys.readouterr().err


def test_what_is_written_must_lie_in_memory_of_its_own() -> None:
    fixed = [(("x",), APART)]
    whole = torch.ones(4, 6)
    require_fixed(fixed, {"x": whole[:, :3], "y": whole[:, 3:]}, 2)
    for other in (whole, whole[1:2], [whole[:, 2:]]):
        with pytest.raises(BatchError, match=r"step 2.*writes into x.*y.* the same memory"):
            require_fixed(fixed, {"x": whole[:, :3], "y": other}, 2)
