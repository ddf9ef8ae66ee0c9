"""An optimizer that needs the whole model is refused when it is split, with a remedy that works."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing import trial
from bigbrain_fx.frontend.tracing.parted import require_parted
from tests.support.bundles import MODEL, cluster

Named = Iterable[tuple[str, nn.Parameter]]
HELD = {"d0": ["0.weight", "0.bias"], "d1": ["1.weight", "1.bias", "2.weight", "2.bias"]}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)


class ByGlobalNorm(torch.optim.SGD):
    """Divides by the norm of all gradients, as LAMB's usual form does first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        for p in params:
            assert p.grad is not None
            p.sub_(0.1 * p.grad / norm)


class Asking(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it needs a closure"
        return super().step(closure)


class WithoutRate(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            del group["lr"]


def by_name(named: Named) -> Any:
    found = dict(named)
    return torch.optim.SGD([{"params": [found.pop("2.weight")]}, {"params": list(found.values())}])


def head_only(named: Named) -> Any:
    return torch.optim.SGD([p for n, p in named if n.startswith("2.")])


def of_others(named: Named) -> Any:
    return torch.optim.SGD(net().parameters())


def refusal(make: Any, model: nn.Module | None = None) -> InputError:
    with pytest.raises(InputError) as error:
        require_parted(model or net(), make, HELD)
    assert error.value.help
    return error.value


def test_one_that_looks_at_all_gradients_is_refused() -> None:
    found = refusal(lambda named: ByGlobalNorm([p for _, p in named]))
    assert "device d0, which has 2 of the 6 parameters" in found.what
    assert "it updates 0." in found.what
    assert str(found.at).startswith("test_parted.py:")


class Skipping(torch.optim.SGD):
    """Leaves a step out where any gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        finite = all(bool(g.isfinite().all()) for g in grads if g is not None)
        return super().step(closure) if finite else None


class Warm(torch.optim.SGD):
    """Its warm-up ends after twenty steps, counted in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 if self.steps > 20 else 0.01
        return super().step(closure)


class WarmByGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["lr"] = 0.1 if group["calls"] > 20 else 0.01
        return super().step(closure)


def test_one_that_looks_at_all_gradients_where_one_is_not_finite_is_refused() -> None:
    found = refusal(lambda named: Skipping([p for _, p in named], lr=0.1))
    assert "gradients of the others are not finite" in found.what


def test_one_that_counts_in_an_attribute_is_refused_however_late_it_decides() -> None:
    found = refusal(lambda named: Warm([p for _, p in named], lr=0.01))
    assert "goes by Warm.steps" in found.what
    assert require_parted(net(), lambda n: WarmByGroup([p for _, p in n], lr=0.01), HELD) is None


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


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (clamping, "sets a gradient hook on 0.weight"),
        (freezing, "freezes 0.weight"),
        (rescaling, "writes into 0.weight"),
        (by_name, "fails on device d0, which has 2 of the 6 parameters: KeyError: '2.weight'"),
        (head_only, "fails on device d0, .* empty parameter list"),
        (of_others, "holds none of the parameters it was given"),
        (lambda n: torch.optim.LBFGS([p for _, p in n]), r"LBFGS.step\(closure\) cannot be called"),
        (lambda n: Asking([p for _, p in n]), "AssertionError: it needs a closure"),
        (lambda n: WithoutRate([p for _, p in n]), "WithoutRate have no 'lr'"),
    ],
)
def test_one_that_fails_is_refused(make: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        require_parted(net(), make, HELD)


def of_two_classes(named: Named) -> Any:
    params = [p for _, p in named]
    return [torch.optim.SGD(params), torch.optim.Adam(params)]


@pytest.mark.parametrize(
    ("make", "help_"),
    [
        (of_two_classes, "one.state = self.state"),
        (lambda n: {"a": torch.optim.SGD(n), "b": torch.optim.SGD(n)}, "return one with a group"),
        (lambda n: (torch.optim.SGD(n), object()), "scheduler"),
    ],
)
def test_several_optimizers_are_told_how_to_be_one(make: Any, help_: str) -> None:
    with pytest.raises(InputError, match="must return an optimizer, found") as why:
        require_parted(net(), lambda named: make(list(named)), HELD)
    assert help_ in str(why.value.help)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.optim.AdamW(n, lr=1e-2),
        lambda n: torch.optim.SGD([p for _, p in n], momentum=0.9, nesterov=True),
        lambda n: torch.optim.SGD([p for _, p in n], lr=float("inf")),
    ],
)
def test_one_that_goes_by_each_parameter_passes(make: Any, dtype: torch.dtype) -> None:
    """NaN is NaN, alone or together."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 4)).to(dtype)
    held = {"d0": ["0.weight", "0.bias"], "d1": ["2.weight", "2.bias"]}
    assert require_parted(model, make, held) is None


def test_what_rounding_makes_of_it_is_no_difference() -> None:
    """The learning rate is a sum over all groups: in float32 its order counts."""
    rates = [0.1, 0.2, 0.3, 0.4, 0.7, 0.9]

    class Summing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            params = [p for group in self.param_groups for p in group["params"]]
            for p in params:
                assert p.grad is not None
                order = rates if len(params) == 6 else rates[::-1]
                p.sub_(sum(p.grad * rate for rate in order))

    assert require_parted(net(), lambda n: Summing([p for _, p in n]), HELD) is None


def test_one_device_has_nothing_to_compare() -> None:
    everything = {"d0": list(itertools.chain(*HELD.values()))}
    assert require_parted(net(), lambda n: ByGlobalNorm([p for _, p in n]), everything) is None
    with pytest.raises(InputError, match="closure"):
        require_parted(net(), lambda n: torch.optim.LBFGS([p for _, p in n]), everything)


def test_one_for_other_devices_is_told_of() -> None:
    """It may need a GPU, and this host has none."""

    def fused(named: Named) -> Any:
        raise RuntimeError("no CUDA here")

    note = require_parted(net(), fused, HELD, here=False)
    assert note is not None
    assert "could not be tried on this host's CPU" in note


def test_a_large_model_is_tried_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def make(named: Named) -> Any:
        named = list(named)
        seen.append([p.numel() for _, p in named])
        return torch.optim.SGD([p for _, p in named])

    with torch.device("meta"):
        model = net()
    monkeypatch.setattr(trial, "MOST_NUMBERS", 40)
    require_parted(model, make, HELD)
    assert sum(seen[0]) <= 40
    assert len(seen[0]) == 6


# --------------------------------------------------------------------------- from a model file

HEAD = 'n == "blocks.3.up.weight"'
PICKED = """
def optimizer(named):
    found = dict(named)
    head = found.pop("blocks.3.up.weight")
    return torch.optim.SGD([{"params": [head], "lr": 0.1}, {"params": found.values()}], lr=0.01)
"""
CHOSEN = f"""
def optimizer(named):
    named = list(named)
    head, rest = [p for n, p in named if {HEAD}], [p for n, p in named if not {HEAD}]
    return torch.optim.SGD([{{"params": head, "lr": 0.1}}, {{"params": rest}}], lr=0.01)
"""


@pytest.mark.nightly
def test_the_remedy_of_a_refusal_works(tmp_path: Path) -> None:
    """A parameter picked by its name: refused, with the line, before anything is written."""
    file, out = tmp_path / "letters.py", tmp_path / "bundle"
    options = bb.Options("naive", micro_batches=2)
    file.write_text(MODEL + PICKED)
    with pytest.raises(InputError, match=r"KeyError: 'blocks\.3\.up\.weight'") as error:
        bb.split(file, cluster(), out, options)
    assert str(error.value.at).startswith("letters.py:")
    assert not out.exists()
    assert bb.split(file, cluster(1), out, options).bundle == out
    file.write_text(MODEL + CHOSEN)
    bb.split(file, cluster(), out, options, force=True)
    bb.verify(out, steps=2).require_passed()
