"""Optimizers whose state, groups or steps a bundle's devices cannot carry by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.parted import require_all_stepped, require_parted
from tests.frontend.test_parted import net

Named = Iterable[tuple[str, nn.Parameter]]

HELD = {"d0": ["0.weight", "0.bias"], "d1": ["1.weight", "1.bias", "2.weight", "2.bias"]}


class Counting(torch.optim.SGD):
    """Updates at every second call, and counts in an attribute."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % 2 == 0:
            super().step()


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


class Both(torch.optim.Optimizer):
    """Two optimizers behind one step(); with `shared`, the state of both is its own."""

    def __init__(self, named: Named, shared: bool) -> None:
        params = [p for _, p in named]
        super().__init__(params, {"lr": 0.1})
        kinds = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]]
        self.parts = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in kinds if part]
        for part in self.parts if shared else ():
            part.state = self.state
        if shared:
            self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


def scheduled(named: Named) -> torch.optim.Optimizer:
    made = torch.optim.SGD(named, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    made.register_step_post_hook(lambda *_: scheduler.step())
    return made


@pytest.mark.parametrize(
    "make", [lambda n: Counting(n, lr=0.1), lambda n: Both(list(n), shared=False), scheduled]
)
def test_state_that_no_replacement_would_have_is_refused(make: Any) -> None:
    with pytest.raises(InputError, match="a process that replaces a dead one would lack") as why:
        require_parted(net(), make, HELD)
    assert "part.state = self.state" in (why.value.help or "")


def test_a_wrapper_that_shares_its_state_passes() -> None:
    require_parted(net(), lambda named: Both(list(named), shared=True), HELD)


def test_dice_in_step_are_refused() -> None:
    with pytest.raises(InputError, match="draws random numbers in step"):
        require_parted(net(), lambda named: Noisy(named, lr=0.1), HELD)


class GrowingGroups(torch.optim.SGD):
    """Puts a number into its groups that was not there when it was made."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = 0.1 / group["taken"]
        super().step()


def test_what_steps_put_into_groups_goes_to_a_replacement() -> None:
    require_parted(net(), lambda named: GrowingGroups(named, lr=0.1), HELD)


def test_a_loss_scale_wants_all_trained_parameters_stepped() -> None:
    require_all_stepped(net(), torch.optim.AdamW, HELD)
    with pytest.raises(InputError, match="trained and in no group of the optimizer"):
        require_all_stepped(net(), lambda named: torch.optim.SGD(list(named)[:1], lr=0.1), HELD)


class OfGroup(torch.optim.SGD):
    """Keeps something in its group, and updates each parameter by it."""

    @classmethod
    def of(cls, named: Named) -> Any:
        return cls([p for _, p in named], lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            rate = self.rate(group, given)
            for p in given:
                p.sub_(rate * p.grad)

    def rate(self, group: dict[str, Any], given: list[nn.Parameter]) -> float:
        group["count"] = group.get("count", 0) + 1  # long after the trial's steps, too
        return 0.1 if group["count"] > 12 else 0.01


class ByNorm(OfGroup):
    def rate(self, group: dict[str, Any], given: list[nn.Parameter]) -> float:
        group["norm"] = sum(float(p.grad.norm()) for p in given if p.grad is not None)
        return 0.1


class Together(OfGroup):
    limit = math.inf

    def rate(self, group: dict[str, Any], given: list[nn.Parameter]) -> float:
        norms = [float(p.grad.norm()) for p in given if p.grad is not None]
        return 0.1 * all(norm < self.limit for norm in norms)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if all(self.rate(g, g["params"]) for g in self.param_groups):
            super().step()


class TogetherHuge(Together):
    limit = 1e4


class TogetherMost(Together):
    limit = 0.1  # of what is made up all are larger


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        (ByNorm, "it fails: StateError: the optimizer's step leaves 'norm' of a group"),
        (Together, r"updates [\w.]+ otherwise where gradients of the others are not finite"),
        (TogetherMost, r"updates [\w.]+ otherwise where gradients of the others are huge"),
        (TogetherHuge, r"updates [\w.]+ otherwise where gradients of the others are huge"),
    ],
)
def test_one_that_does_something_once_a_step_is_refused_where_it_is_stepped_by_pieces(
    kind: type[OfGroup], does: str
) -> None:
    held = {"d0": [name for names in HELD.values() for name in names]}
    assert require_parted(net(), kind.of, held) is None
    with pytest.raises(InputError, match=f"once a step for all parameters: .* {does}"):
        require_parted(net(), kind.of, held, by_pieces=True)


@pytest.mark.gate("of")
@pytest.mark.parametrize("make", [OfGroup.of, torch.optim.AdamW])
def test_one_that_counts_in_its_groups_is_stepped_by_pieces(make: Any) -> None:
    assert require_parted(net(), make, HELD, by_pieces=True) is None


class FindsItsRate(torch.optim.SGD):
    """Raises its rate by what all gradients of a group agree on, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            moved = 0.0
            for p in group["params"]:
                state = self.state[p]
                start = state.setdefault("start", p.detach().clone())
                state["sum"] = state.get("sum", 0.0) + p.grad
                agreed = float((p.grad * (start - p)).sum())
                group["agreed"] = group.get("agreed", 0.0) + agreed
                moved += float(state["sum"].abs().sum())
            group["lr"] = max(group["lr"], group["agreed"] / moved)
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


def test_one_that_finds_its_rate_from_all_gradients_is_refused_with_a_remedy_that_works() -> None:
    what = "more than one parameter where gradients of the others turn round at each step"
    with pytest.raises(InputError, match=what) as caught:
        require_parted(net(), lambda named: FindsItsRate([p for _, p in named], lr=1e-3), HELD)
    assert "[{'params': [p]} for _, p in named_params]" in (caught.value.help or "")
    each = lambda named: FindsItsRate([{"params": [p]} for _, p in named], lr=1e-3)  # noqa: E731
    assert require_parted(net(), each, HELD) is None


class Decays(torch.optim.SGD):
    """Decays by gradients, and makes them where there are none."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad = p.detach() if p.grad is None else p.grad + p.detach()
        return super().step(closure)


def test_one_that_moves_what_gets_no_gradient_is_refused() -> None:
    model = net()
    held = {device: [n for n in names if n[0] != "1"] for device, names in HELD.items()}
    with pytest.raises(InputError, match=r"moves 1\.weight, to which no gradient") as caught:
        require_parted(model, lambda named: Decays([p for _, p in named], lr=0.1), held)
    assert "requires_grad_(False)" in (caught.value.help or "")
    model.get_submodule("1").requires_grad_(False)  # as the help says
    require_parted(model, lambda named: Decays([p for _, p in named], lr=0.1), held)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop, torch.optim.Adagrad])
def test_what_gets_no_gradient_may_be_given_to_torchs_own(kind: Any) -> None:
    held = {device: [n for n in names if n[0] != "1"] for device, names in HELD.items()}
    assert require_parted(net(), lambda named: kind([p for _, p in named], lr=0.1), held) is None


def test_one_that_knows_parameters_by_the_objects_they_are_is_refused() -> None:
    """A file that has made its model, and looks for its head's parameters: a bundle has others."""
    model = net()
    head = [*model.get_submodule("2").parameters()]

    def groups(named: Named, *, by_name: bool) -> Any:
        each = [(p, n[0] == "2" if by_name else any(p is h for h in head)) for n, p in named]
        rates = {True: 0.1, False: 0.01}
        return [
            {"params": [p for p, is_head in each if is_head is of], "lr": lr}
            for of, lr in rates.items()
        ]

    with pytest.raises(InputError, match="by the objects that they are") as caught:
        require_parted(model, lambda named: torch.optim.SGD(groups(named, by_name=False)), HELD)
    assert "2.weight (and 1 more) has lr 0.1; of others" in caught.value.what
    assert "if name == '2.weight'" in (caught.value.help or "")
    require_parted(model, lambda named: torch.optim.SGD(groups(named, by_name=True)), HELD)
