"""Numbers and strings of a batch that change from step to step; memory that two tensors share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing.batches.constants import require_steady
from tests.support.captured import assert_same, run


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 2)

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return self.lift(x) / temperature


def batch(**more: object) -> dict[str, Any]:
    return {"x": torch.ones(4, 6), "temperature": 1.0, **more}


def energy(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def asked(example: object, *batches: object) -> None:
    def given() -> Iterable[object]:
        return iter(batches)

    require_steady(Warm(), example, energy, given)


def test_a_number_that_changes_and_counts_is_refused() -> None:
    with pytest.raises(InputError, match=r"batches\(\) changes temperature from 1.0 to 2.0") as why:
        asked(batch(), batch(), batch(temperature=2.0))
    assert why.value.help == "give it as a tensor: torch.tensor(2.0)"


def test_what_nobody_reads_may_change() -> None:
    asked(batch(name="a.png"), batch(name="b.png"), batch(name="c.png"))


def test_batches_that_cannot_be_read_here_are_let_be() -> None:
    def fails() -> Iterator[object]:
        yield batch()
        raise FileNotFoundError("the data are elsewhere")

    require_steady(Warm(), batch(), energy, fails)


def test_an_array_is_to_be_a_tensor() -> None:
    with pytest.raises(InputError) as why:
        asked(batch(), batch(temperature=np.full((4, 1), 2.0)))
    assert "torch.from_numpy" in str(why.value.help)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, _: {"mae": o.abs(), "loss": o.square().mean()},
        lambda o, _: (o.square().mean(), {}),
    ],
)
def test_a_loss_that_returns_more_has_one_that_is_the_loss(loss: Any) -> None:
    assert capture(Warm(), batch(), loss).graph.loss is not None


def test_a_loss_that_names_none_is_told_which_entry_may_be_the_loss() -> None:
    with pytest.raises(CaptureError, match="must return a scalar tensor") as why:
        capture(Warm(), batch(), lambda o, _: {"accuracy": 0.5, "total": o.square().mean()})
    assert "['total'] of what" in str(why.value.help)


# --------------------------------------------------------------------------- memory


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


@pytest.mark.gate("False")
@pytest.mark.parametrize("turned", [False, True])
def test_views_of_one_memory_are_refused(turned: bool) -> None:
    model = Two()
    weight = model.a.weight.data
    model.b.weight = nn.Parameter(weight.t() if turned else weight.view(6, 6))
    with pytest.raises(InputError, match=r"b.weight is a view of the memory of a.weight"):
        capture(model, (torch.randn(4, 6),))
    model.b.weight = model.a.weight  # the remedy
    capture(model, (torch.randn(4, 6),))


def test_parts_of_one_memory_are_no_views_of_each_other() -> None:
    model, flat = Two(), torch.randn(6, 12)
    model.a.weight, model.b.weight = nn.Parameter(flat[:, :6]), nn.Parameter(flat[:, 6:])
    capture(model, (torch.randn(4, 6),))


class Running(Two):
    """A mean that its first half writes and its second one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor
        self.other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(self.a(x).mean(0), 0.5)
        return super().forward(x - getattr(self, "other", self.mean))


@pytest.mark.gate("part1")
@pytest.mark.parametrize("part", [slice(None), slice(2, 3)])
def test_what_is_written_under_one_name_has_no_other(part: slice) -> None:
    model = Running()
    model.register_buffer("other", model.mean if part == slice(None) else model.mean[part])
    with pytest.raises(InputError, match="mean and other share memory, which forward writes into"):
        capture(model, (torch.randn(4, 6),))
    capture(Running(), (torch.randn(4, 6),))  # the remedy


def test_a_norm_has_one_name() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    model.append(model[1])
    with pytest.raises(InputError, match=r"1.running_mean and 3.running_mean share memory"):
        capture(model, (torch.randn(4, 6),), lambda out, _: out.square().mean())


def test_a_constant_is_not_trained() -> None:
    scale = torch.ones(6, requires_grad=True)

    class Scaled(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * scale)

    found = capture(Scaled(), (torch.randn(4, 6),))
    constants = [p for p in found.graph.params if p.kind == "constant"]
    assert [p.spec.requires_grad for p in constants] == [False]


# --------------------------------------------------------------------------- forms that were wrong


def test_a_block_that_a_list_holds_three_times() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh())] * 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.mean()

    model = Shared()
    assert_same(model, capture(model, (torch.randn(4, 6),)), model)


def test_inference_mode_stops_gradients_as_no_grad_does() -> None:
    class Scaled(Two):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                top = self.a(x).abs().mean()
            return super().forward(x) / top.clone()

    model = Scaled()
    assert_same(model, capture(model, (torch.randn(4, 6),)), model)
    assert torch.inference_mode.__enter__.__module__.startswith("torch")


def test_what_forward_writes_into_a_frozen_part_is_put_back() -> None:
    class Teacher(Two):
        def __init__(self) -> None:
            super().__init__()
            self.b.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for slow, fast in zip(self.b.parameters(), self.a.parameters(), strict=True):
                    slow.lerp_(fast, 0.5)
            return super().forward(x)

    model = Teacher()
    before = model.b.weight.clone()
    found = capture(model, (torch.randn(4, 6),))
    assert torch.equal(model.b.weight, before)
    run(found, found.inputs())


def test_vmap_in_the_models_own_forward_is_told_of() -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 6, 2))

        def forward(self, x: Tensor) -> Tensor:
            return vmap(lambda w: x @ w)(self.w).mean()

    with pytest.raises(CaptureError, match=r"inside torch\.vmap") as why:
        capture(Ensemble(), (torch.randn(4, 6),))
    assert "module of its own" in (why.value.help or "")
    model = nn.Sequential(Ensemble())  # the remedy
    assert_same(model, capture(model, (torch.randn(4, 6),)), model)


def test_torchscript_and_losses_with_parameters_are_told() -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.script(nn.Linear(6, 2))
    with pytest.raises(InputError, match="TorchScript"):
        capture(scripted, (torch.randn(4, 6),), energy)
    with pytest.raises(InputError, match="a part, 1, that is TorchScript"):
        capture(nn.Sequential(nn.Linear(6, 6), scripted), (torch.randn(4, 6),), energy)
    own = nn.CrossEntropyLoss()
    own.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(InputError, match="the loss has a parameter of its own, weight"):
        capture(nn.Linear(6, 2), (torch.randn(4, 6), torch.zeros(4).long()), own)


class Normalizing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(x.mean(0)))


def test_what_is_written_into_a_batch_is_told() -> None:
    found = capture(Normalizing(6, 2), {"x": torch.randn(4, 6)}, energy)
    assert any("into the batch in place (x)" in text for text in found.warnings)
    assert not any(
        "in place" in text
        for text in capture(nn.Linear(6, 2), (torch.ones(4, 6),), energy).warnings
    )


class Given(torch.autograd.Function):
    """Runs a module in its backward again."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, x: Tensor) -> Tensor:
        ctx.part = part
        return part(x).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0] @ ctx.part.weight


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return Given.apply(self.part, x)  # type: ignore[no-untyped-call]


@pytest.mark.gate("leaves1")
@pytest.mark.parametrize("leaves", [(), ("Giving",)])
def test_a_module_given_to_an_autograd_function_is_refused(leaves: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Giving(), nn.Linear(6, 2))
    with pytest.raises(CaptureError, match="Given is given a Linear") as why:
        capture(model, (torch.randn(4, 6),), energy, leaves=leaves)
    assert (why.value.at or "").startswith("test_values.py:")


def test_wrappers_are_asked_for_what_the_wrapped_one_takes() -> None:
    model = nn.DataParallel(nn.Linear(6, 2))
    found = capture(
        model,
        {"input": torch.randn(4, 6), "y": torch.randn(4, 2)},
        lambda out, given: F.mse_loss(out, given["y"]),
    )
    assert [entry.name for entry in found.graph.inputs] == ["input", "y"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.rnn(x)[0][:, -1]).float()


def test_an_op_of_another_type_than_its_trace_is_refused() -> None:
    """Some processors have no such LSTM; others give bfloat16, and torch's shapes say float32."""
    with pytest.raises(BigBrainError) as caught:
        capture(Recurrent(), (torch.randn(4, 5, 6),), energy, autocast="bfloat16")
    assert caught.value.code in ("BX0202", "BX2105")
