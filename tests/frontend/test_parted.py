"""An optimizer that needs the whole model is refused when it is split, with a remedy that works."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing import trial
from bigbrain_fx.frontend.tracing.parted import require_all_stepped, require_parted
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


# --------------------------------------------------------------------------- after a death


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
