"""An optimizer that was made already, or chooses by more than names, reaches devices as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from bigbrain_fx.frontend.contract import training_of
from bigbrain_fx.frontend.tracing.optimizers.as_data import GroupedOptimizer, for_devices
from tests.support.messages import refused

Named: TypeAlias = Iterable[tuple[str, nn.Parameter]]
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def of_the_model(model: nn.Module) -> Callable[[Named], Any]:
    def optimizer(_named: Named) -> Any:
        linear = [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()]
        norm = [p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
        groups = [{"params": linear, "weight_decay": 0.1}, {"params": norm, "lr": 0.5}]
        return torch.optim.AdamW(groups, lr=0.25, betas=(0.8, 0.9))

    return optimizer


def by_place(_model: nn.Module) -> Callable[[Named], Any]:
    def optimizer(named: Named) -> Any:
        groups = [{"params": [p], "lr": 0.5**i} for i, (_, p) in enumerate(named)]
        return torch.optim.Adagrad(groups)

    return optimizer


def by_identity(model: nn.Module) -> Callable[[Named], Any]:
    known = {id(p) for p in model[0].parameters()}  # type: ignore[index]

    def optimizer(named: Named) -> Any:
        named = list(named)
        fast = [p for _, p in named if id(p) in known]
        rest = [p for _, p in named if id(p) not in known]
        groups: list[dict[str, Any]] = [{"params": fast, "lr": 1.0}, {"params": rest}]
        return torch.optim.SGD(groups, lr=0.1)

    return optimizer


def only_weights(_model: nn.Module) -> Callable[[Named], Any]:
    """Return one that fails for a device without a weight."""

    def optimizer(named: Named) -> Any:
        return torch.optim.SGD([p for n, p in named if "weight" in n], lr=0.1)

    return optimizer


@pytest.mark.parametrize("choice", [of_the_model, by_place, by_identity, only_weights])
def test_devices_get_the_groups_that_the_whole_model_got(choice: Any) -> None:
    model = net()
    make = choice(model)
    found = for_devices(make, model)
    assert isinstance(found, GroupedOptimizer)
    whole = options(make(list(model.named_parameters())), dict(model.named_parameters()))
    for part in (NAMES[:3], NAMES[3:]):
        own = {n: nn.Parameter(torch.ones(2)) for n in part}
        assert options(found(own.items()), own) == {n: whole[n] for n in part if n in whole}


def options(made: Any, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    names = {id(p): n for n, p in params.items()}
    return {
        names[id(p)]: {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in made.param_groups
        for p in group["params"]
    }


def test_frozen_parameters_may_be_among_them() -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    found = for_devices(of_the_model(model), model)
    assert isinstance(found, GroupedOptimizer)
    own = {n: nn.Parameter(torch.ones(2)) for n in NAMES[2:]}  # a device has those that are trained
    assert {o["lr"] for o in options(found(own.items()), own).values()} == {0.25, 0.5}


class Wrapper(torch.optim.SGD):
    def __init__(self, params: Any, beside: object) -> None:
        super().__init__(params, lr=0.1)
        self.beside = beside


def freezing(named: Named) -> Any:
    next(iter(named))[1].requires_grad_(False)
    return torch.optim.SGD([p for _, p in list(named)[1:]], lr=0.1)


def decay_by_names(named: Named) -> Any:
    named = list(named)
    rest = {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}
    decayed: dict[str, Any] = {"params": [p for n, p in named if "bias" not in n]}
    return torch.optim.AdamW([decayed, rest])


def wrapping(named: Named) -> Any:
    return Wrapper([p for _, p in list(named)[:2]], object())


def hooked(named: Named) -> Any:
    made = torch.optim.SGD([p for _, p in list(named)[:2]], lr=0.1)
    made.register_step_pre_hook(lambda *_: None)
    return made


@pytest.mark.parametrize("make", [decay_by_names, freezing, wrapping, hooked])
def test_any_other_function_stays_as_it_is(make: Callable[[Named], Any]) -> None:
    model = net()
    assert for_devices(make, model) is make
    assert all(p.requires_grad for p in model.parameters())


class Defined:
    def __init__(self, **named: object) -> None:
        self.__dict__.update(named)


def test_an_optimizer_that_exists_is_made_again() -> None:
    model = net()
    made = torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.5}], lr=0.125)
    said = training_of(Defined(optimizer=made), Path("model.py"), model)
    make: Any = said["optimizer"]
    own = {n: nn.Parameter(torch.ones(2)) for n in NAMES[:2]}
    assert {(o["lr"], o["weight_decay"]) for o in options(make(own.items()), own).values()} == {
        (0.125, 0.5)
    }


def stepped(model: nn.Module) -> Any:
    made = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    made.step()
    return made


def of_another_model(_model: nn.Module) -> Any:
    return torch.optim.Adam(net().parameters())


def with_a_criterion(model: nn.Module) -> Any:
    return torch.optim.Adam([*model.parameters(), nn.Parameter(torch.zeros(2))])


def scheduled(model: nn.Module) -> Any:
    made = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.StepLR(made, 1)
    return made


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (stepped, "BX2033a"),
        (of_another_model, "BX2033a"),
        (scheduled, "BX2033b"),
        (with_a_criterion, "BX2033c"),
    ],
)
def test_an_optimizer_of_this_kind_is_refused(make: Callable[[nn.Module], Any], code: str) -> None:
    model = net()
    with refused(code):
        training_of(Defined(optimizer=make(model)), Path("model.py"), model)


def test_a_scheduler_of_its_own_sets_the_rates_of_one_made_again() -> None:
    model = net()
    made = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.LinearLR(made, start_factor=0.1)
    said = training_of(
        Defined(optimizer=made, scheduler=torch.optim.lr_scheduler.LinearLR), Path("m.py"), model
    )
    make: Any = said["optimizer"]
    assert make(dict(model.named_parameters()).items()).param_groups[0]["lr"] == 0.5
