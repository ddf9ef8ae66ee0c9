"""Questions to data that a trace gets past: the code around is opaque, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.frontend.tracing.lines.untraced_queries import Asked, both
from bigbrain_fx.frontend.translation.oracle import Oracle
from tests.support.messages import refused

Guard = Callable[[Tensor], Tensor]


def swallowed(h: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        if float(h.abs().max()) > 60:
            h = h / 2
    return h


def divided(h: Tensor) -> Tensor:
    try:
        return h * min(1.0, 60.0 / h.detach().abs().max().item())
    except Exception:
        return h


def by_numpy(h: Tensor) -> Tensor:
    try:
        return h if h.detach().numpy().max() < 60 else h / 2
    except RuntimeError:
        return h


def told(h: Tensor) -> Tensor:
    return h / 2 if not is_compiling() and h.abs().max() > 60 else h


def by_type(h: Tensor) -> Tensor:
    return h / 2 if type(h) is Tensor and h.abs().max() > 60 else h


def by_size(h: Tensor) -> Tensor:
    rows: object = h.shape[0]
    return h / 2 if isinstance(rows, int) and h.abs().max() > 60 else h


UNSEEN = (swallowed, divided, by_numpy, told, by_type, by_size)


class Model(nn.Module):
    """A question in the middle of the model's own forward, or in a part of it."""

    def __init__(self, guard: Guard, part: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.part = Part(guard) if part else None
        self.guard = guard

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.guard(h) if self.part is None else self.part(h)
        return self.second(h)


class Part(nn.Module):
    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def forward(self, h: Tensor) -> Tensor:
        return self.guard(h)


def plain_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


def asking_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return swallowed(plain_loss(output, batch))


def of(model: nn.Module, loss: object = plain_loss, *, strict: bool = False) -> Captured:
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 2)}
    return capture(model, batch, loss, strict=strict)  # type: ignore[arg-type]


@pytest.mark.gate("divided")
@pytest.mark.parametrize("guard", UNSEEN, ids=lambda guard: guard.__name__)
def test_in_the_middle_of_the_models_own_forward_it_is_refused(guard: Guard) -> None:
    with refused("BX0130a", CaptureError) as caught:
        of(Model(guard), strict=True)
    assert (caught.value.at or "").startswith("test_unseen.py:")


def test_in_the_loss_it_is_refused() -> None:
    with refused("BX0130a", CaptureError):
        of(Model(lambda h: h), asking_loss)


def test_traced_effects_are_assumed() -> None:
    def seen(h: Tensor) -> Tensor:
        return h / 2 if h.abs().max() > 60 else h

    assert any(op.target == "assume.false" for op in of(Model(seen)).graph.ops)


def test_values_that_are_only_shown_are_no_question() -> None:
    def shown(h: Tensor) -> Tensor:
        print(f"{h.abs().max()}")
        return h

    assert not any("a trace gets past" in said for said in of(Model(shown)).warnings)


def test_the_reader_behind_a_listener_is_known() -> None:
    """An assertion of torch's own is assumed to hold; a model of transformers was refused."""
    oracle = Oracle()
    with both(oracle.recording(0), Asked()):
        torch._check_tensor_all(torch.ones(2) < 3)
    assert [question.asserted for question in oracle.recorded] == [True]
