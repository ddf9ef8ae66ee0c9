"""Numbers and strings of a batch that change from step to step; memory that two tensors share."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.later_batches import LaterBatches, require_steady
from bigbrain_fx.frontend.tracing.lines.advice import OF_CRITERION
from tests.support.captured import assert_same


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


def test_batches_that_cannot_be_read_here_are_let_be() -> None:
    def fails() -> Iterator[object]:
        yield batch()
        raise FileNotFoundError("the data are elsewhere")

    require_steady(Warm(), batch(), energy, fails)


class Stage(enum.Enum):
    """Of training."""

    WARM = 1
    MAIN = 2


class Weight:
    """An object of the user's own."""

    def __init__(self, value: float) -> None:
        self.value = value


def scale_of(given: Any) -> Any:
    """Read all kinds of entries."""
    scale = given["weight"].value * len(given["parts"]) * (1 if given["stage"] is Stage.WARM else 3)
    first = next(iter(given["named"].values()))
    more = given["more"].mean() if "more" in given else 0.0
    return scale * (first + 2) + more + given.get("least", 0.0)


def many(**more: object) -> dict[str, Any]:
    named = {"a": 1.0, "b": 2.0}
    own = {"weight": Weight(1.0), "parts": (1, 2), "stage": Stage.WARM, "named": named}
    return {"x": torch.ones(4, 6), "temperature": 1.0, **own, "least": 0.5, "path": "0", **more}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"temperature": 2.0}, "temperature"),
        ({"weight": Weight(2.0)}, "weight"),
        ({"parts": (1, 2, 3)}, "parts"),
        ({"stage": Stage.MAIN}, "stage"),
        ({"named": {"b": 2.0, "a": 1.0}}, "named"),
        ({"more": torch.ones(4)}, "more"),
        ({"least": None}, "least"),
    ],
)
def test_a_change_of_a_later_batch_counts_however_late_it_comes(
    change: dict[str, Any], name: str
) -> None:
    """Entries that change without an effect, names of files say, come with each batch."""
    later = LaterBatches(
        Warm(), many(), lambda output, given: energy(output, 0) * scale_of(given), None
    )
    for step in range(40):
        later.require(many(path=f"{step}", weight=Weight(1.0)))
    changed = {**many(path="0", **change)}
    given = {key: value for key, value in changed.items() if value is not None}
    for _ in range(2):  # once refused, it is refused again
        with pytest.raises(InputError, match=rf"batches\(\) changes {name} from") as why:
            later.require(given)
        assert why.value.code == "BX2164"
    later.require(many(path="41"))


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


def test_parts_of_one_memory_are_no_views_of_each_other() -> None:
    model, flat = Two(), torch.randn(6, 12)
    model.a.weight, model.b.weight = nn.Parameter(flat[:, :6]), nn.Parameter(flat[:, 6:])
    capture(model, (torch.randn(4, 6),))


def test_a_constant_is_not_trained() -> None:
    scale = torch.ones(6, requires_grad=True)

    class Scaled(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * scale)

    found = capture(Scaled(), (torch.randn(4, 6),))
    constants = [p for p in found.graph.params if p.kind == "constant"]
    assert [p.spec.requires_grad for p in constants] == [False]


# --------------------------------------------------------------------------- forms that were wrong


def test_inference_mode_stops_gradients_as_no_grad_does() -> None:
    class Scaled(Two):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                top = self.a(x).abs().mean()
            return super().forward(x) / top.clone()

    model = Scaled()
    assert_same(model, capture(model, (torch.randn(4, 6),)), model)
    assert torch.inference_mode.__enter__.__module__.startswith("torch")


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


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_criterion_of_torch_is_told_how_a_loss_is_called(criterion: Any) -> None:
    with pytest.raises(InputError) as caught:
        capture(nn.Linear(6, 2), (torch.randn(4, 6), torch.zeros(4).long()), criterion)
    assert (caught.value.code, caught.value.help) == ("BX2105", OF_CRITERION)


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
