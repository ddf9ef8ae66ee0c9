"""An optimizer that needs the whole model, or memory of its own, is refused before writing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.optimizers import trial
from bigbrain_fx.frontend.tracing.optimizers.per_device import require_per_device

Named = Iterable[tuple[str, nn.Parameter]]
HELD = {"d0": ["0.weight", "0.bias"], "d1": ["1.weight", "1.bias", "2.weight", "2.bias"]}
ALONE = {"d0": list(itertools.chain(*HELD.values()))}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)


class Own(torch.optim.SGD):
    """Steps as `rule` says: a factor of all gradients, by what it is given."""

    def __init__(self, params: Any, rule: Callable[[Own, list[Tensor]], float], **how: Any) -> None:
        super().__init__(params, lr=0.1, **how)
        self.rule, self.calls = rule, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        factor = self.rule(self, grads)
        for p in params:
            assert p.grad is not None
            p.grad = p.grad * factor
        return super().step() if factor else None


def own(rule: Callable[[Own, list[Tensor]], float], **how: Any) -> Callable[[Named], Any]:
    return lambda named: Own([p for _, p in named], rule, **how)


def norm(grads: list[Tensor]) -> Tensor:
    return torch.stack([g.norm() for g in grads]).norm()


def in_group(made: Own) -> int:
    for group in made.param_groups:
        group["count"] = group.get("count", 0) + 1
    return int(made.param_groups[0]["count"])


def noisy(made: Own, _: list[Tensor]) -> float:
    return float(torch.rand(()))


def by_name(named: Named) -> Any:
    found = dict(named)
    return torch.optim.SGD([{"params": [found.pop("2.weight")]}, {"params": list(found.values())}])


class RateElsewhere(torch.optim.Optimizer):
    """Has no `lr` in its groups, as a wrapper around other optimizers."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # as torch's
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


def clamping(named: Named) -> Any:
    for _, p in named:
        p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return torch.optim.SGD(named)


def freezing(named: Named) -> Any:
    first, *_ = named
    first[1].requires_grad_(False)
    return torch.optim.SGD(named)


def rescaling(named: Named) -> Any:
    first, *_ = named
    with torch.no_grad():
        first[1].mul_(0.5)
    return torch.optim.SGD(named)


def scheduled(named: Named) -> torch.optim.Optimizer:
    made = torch.optim.SGD(named, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    made.register_step_post_hook(lambda *_: scheduler.step())
    return made


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


class Summing(torch.optim.SGD):
    """Its rate is a sum in an order that the number of parameters decides: rounding."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rates = [0.1, 0.2, 0.3, 0.4, 0.7, 0.9]
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            assert p.grad is not None
            p.sub_(sum(p.grad * rate for rate in (rates if len(params) == 6 else rates[::-1])))


REFUSED: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "divides by the norm of all gradients": ("BX2139", own(lambda _, g: 1 / float(norm(g)))),
    "skips where one is not finite": (
        "BX2140",
        own(lambda _, g: float(all(bool(t.isfinite().all()) for t in g))),
    ),
    "finds its rate": ("BX2140", lambda n: FindsItsRate([p for _, p in n], lr=1e-3)),
    "warms up by an attribute": ("BX2124", own(lambda made, _: 1.0 if made.calls > 20 else 0.1)),
    "warms up by an attribute for long": (
        "BX2124",
        own(lambda made, _: 1.0 if made.calls > 20_000 else 0.1),
    ),
    "every second call": ("BX2137", own(lambda made, _: float(made.calls % 2 == 0))),
    "a scheduler inside": ("BX2137", scheduled),
    "draws": ("BX2136", own(noisy)),
    "hooks": ("BX2155", clamping),
    "freezes": ("BX2155", freezing),
    "rescales": ("BX2155", rescaling),
    "picks by name": ("BX2142", by_name),
    "has nothing on a device": (
        "BX2142",
        lambda n: torch.optim.SGD([p for name, p in n if name.startswith("2.")]),
    ),
    "of other parameters": ("BX2158", lambda _: torch.optim.SGD(net().parameters())),
    "wants a closure": ("BX2157", lambda n: torch.optim.LBFGS([p for _, p in n])),
    "fails": ("BX2141", own(lambda _, g: 1 / 0)),
    "a list of two": (
        "BX2156",
        lambda n: [torch.optim.SGD([p for _, p in n]), torch.optim.Adam([nn.Parameter()])],
    ),
}
TAKEN: dict[str, Callable[[Named], Any]] = {
    "AdamW": lambda n: torch.optim.AdamW(n, lr=1e-2),
    "rates elsewhere": RateElsewhere,
    "momentum": lambda n: torch.optim.SGD([p for _, p in n], momentum=0.9, nesterov=True),
    "not finite": lambda n: torch.optim.SGD([p for _, p in n], lr=float("inf")),
    "two with one state": lambda n: Both(list(n), shared=True),
    "warms up by its groups": own(lambda made, _: 1.0 if in_group(made) > 20 else 0.1),
    "finds the rate of each": lambda n: FindsItsRate([{"params": [p]} for _, p in n], lr=1e-3),
    "rounding": lambda n: Summing([p for _, p in n]),
}


@pytest.mark.parametrize(("code", "make"), REFUSED.values(), ids=REFUSED)
def test_one_that_no_device_can_have_is_refused(code: str, make: Any) -> None:
    with pytest.raises(InputError) as found:
        require_per_device(net(), make, HELD)
    assert found.value.code == code
    assert found.value.help
    assert found.value.at


@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_one_that_goes_by_each_parameter_passes(make: Any) -> None:
    assert require_per_device(net(), make, HELD) is None


def test_a_refusal_names_the_device_and_the_line() -> None:
    with pytest.raises(InputError) as found:
        require_per_device(net(), own(lambda _, g: 1 / float(norm(g))), HELD)
    assert "device d0, which has 2 of the 6 parameters" in found.value.what
    assert str(found.value.at).startswith("test_per_device_optimizer.py:")


@pytest.mark.parametrize(
    ("make", "help_"),
    [
        (lambda p: [torch.optim.SGD(p), torch.optim.Adam(p)], "one.state = self.state"),
        (lambda p: {"a": torch.optim.SGD(p), "b": torch.optim.SGD(p)}, "return one with a group"),
        (lambda p: (torch.optim.SGD(p), object()), "scheduler"),
    ],
)
def test_several_optimizers_are_told_how_to_be_one(make: Any, help_: str) -> None:
    with pytest.raises(InputError) as why:
        require_per_device(net(), lambda named: make([p for _, p in named]), HELD)
    assert (why.value.code, help_ in str(why.value.help)) == ("BX2156", True)


def test_one_device_has_nothing_to_compare() -> None:
    together = REFUSED["divides by the norm of all gradients"][1]
    assert require_per_device(net(torch.bfloat16), together, ALONE) is None


def test_one_for_other_devices_is_told_of() -> None:
    """It may need a GPU, and this host has none."""

    def fused(named: Named) -> Any:
        raise RuntimeError("no CUDA here")

    note = require_per_device(net(), fused, HELD, here=False)
    assert note is not None
    assert "could not be tried on this host's CPU" in note


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop, torch.optim.Adagrad])
def test_parameters_without_a_gradient_may_go_to_torchs_optimizer(kind: Any) -> None:
    held = {device: [n for n in names if n[0] != "1"] for device, names in HELD.items()}
    assert require_per_device(net(), lambda n: kind([p for _, p in n], lr=0.1), held) is None


def test_a_large_model_is_tried_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def make(named: Named) -> Any:
        named = list(named)
        seen.append([p.numel() for _, p in named])
        return torch.optim.SGD([p for _, p in named])

    with torch.device("meta"):
        model = net()
    monkeypatch.setattr(trial, "MOST_NUMBERS", 40)
    require_per_device(model, make, HELD)
    assert sum(seen[0]) <= 40
    assert len(seen[0]) == 6
    assert math.prod(seen[0])


HEAD = 'n == "blocks.3.up.weight"'
