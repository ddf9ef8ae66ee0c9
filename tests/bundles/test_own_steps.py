"""Sessions of models that no devices can have: their steps run in the caller's process."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

import bigbrain_fx as bb
from bigbrain_fx.bundles.own_steps import OwnSteps
from tests.support.command_line import write_cluster
from tests.support.messages import refused

STEPS, HALF = 6, 0.5
WHOLE = bb.Options("naive", micro_batches=1)
warns_of_it = pytest.mark.filterwarnings("ignore::bigbrain_fx.SplitWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.drop(torch.tanh(self.a(x))))
        return found


class Hooked(Net):
    """A gradient hook: no device would run it."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda gradient: gradient * HALF)


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor


class OfPairs(Net):
    """Its batch is an object of the user's own."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x.x)


class Learned(nn.Module):
    """A loss with a parameter, as of several tasks that are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        error = (output - batch["y"]).square().mean()
        return error * torch.exp(-self.weight) + self.weight


class Teacher(nn.Module):
    """A loss with a norm that trains, and a list: its numbers are those of each batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.BatchNorm1d(1, affine=False), list[Tensor]()

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        error = (output - self.norm(batch["y"])).square().mean()
        self.seen.append(error.detach())
        return error


class Centred(nn.Module):
    """A loss that goes by what it has seen, and replaces its buffer."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        error = (output - self.centre - batch["y"]).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean()
        return error


def loss(output: Tensor, batch: Any) -> Tensor:
    y = batch["y"] if isinstance(batch, dict) else batch.y
    return (output - y).square().mean()


def halved(step: int) -> float:
    return 0.5**step


def stepped(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, 2, 0.5)


def batches(kind: type[Any] = dict) -> list[Any]:
    dice = torch.Generator().manual_seed(1)
    drawn = [torch.randn(8, 4, generator=dice) for _ in range(STEPS)]
    return [kind(x=x, y=x.sum(1, keepdim=True)) for x in drawn]


@dataclasses.dataclass
class Loop:
    """A model, its loss and its optimizer, and what a loop of plain PyTorch does with them."""

    kind: type[nn.Module] = Hooked
    make: Callable[[Any], Optimizer] = lambda parameters: AdamW(parameters, lr=0.05)
    of_loss: Callable[[], Any] = lambda: loss
    batches: Callable[[], list[Any]] = batches
    change: Callable[[nn.Module, int], object] = lambda _model, _step: None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.loss = self.kind(), self.of_loss()
        own = self.loss.parameters() if isinstance(self.loss, nn.Module) else ()
        self.optimizer = self.make([*self.model.parameters(), *own])

    def plain(self, step_rates: Callable[[float], object] = lambda _loss: None) -> list[float]:
        losses = []
        torch.manual_seed(5)
        for step, batch in enumerate(self.batches()):
            value = self.step(batch)
            step_rates(value)
            losses.append(value)
            self.change(self.model, step)
        return losses

    def step(self, batch: Any) -> float:
        def compute() -> Tensor:
            self.optimizer.zero_grad()
            given = batch["x"] if isinstance(batch, dict) else batch
            value: Tensor = self.loss(self.model(given), batch)
            value.backward()
            return value

        if isinstance(self.optimizer, LBFGS):
            return float(self.optimizer.step(compute).detach())
        value = float(compute().detach())
        self.optimizer.step()
        return value

    def in_session(
        self, folder: Path, options: bb.Options = WHOLE, **recipe: Any
    ) -> tuple[list[float], bb.Session]:
        machine = bb.machine(write_cluster(folder))
        about: Any = {"loss": self.loss, "optimizer": self.optimizer, "options": options}
        with machine(self.model, example_batch=self.batches()[0], **about, **recipe) as session:
            losses = []
            torch.manual_seed(5)
            for step, batch in enumerate(self.batches()):
                losses.append(session.step(batch))
                self.change(self.model, step)
        return losses, session

    def numbers(self) -> Iterator[Tensor]:
        yield from self.model.state_dict().values()
        if isinstance(self.loss, nn.Module):
            yield from (*self.loss.state_dict().values(), *getattr(self.loss, "seen", ()))


def require_same(one: Loop, other: Loop) -> None:
    pairs = zip(one.numbers(), other.numbers(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@warns_of_it
@pytest.mark.parametrize(
    "about",
    [
        pytest.param({}, id="hook"),
        pytest.param({"kind": OfPairs, "batches": lambda: batches(Pair)}, id="batch"),
        pytest.param({"kind": Net, "of_loss": Learned}, id="loss"),
        pytest.param({"kind": Net, "of_loss": Teacher}, id="teacher"),
        pytest.param({"make": lambda parameters: LBFGS(parameters, max_iter=2)}, id="closure"),
    ],
)
@pytest.mark.gate("teacher")
def test_a_model_that_no_device_can_have_trains_as_in_plain_pytorch(
    about: dict[str, Any], tmp_path: Path
) -> None:
    plain, own = Loop(**about), Loop(**about)
    want = plain.plain()
    losses, session = own.in_session(tmp_path)
    assert losses == want
    assert session.events == []
    require_same(plain, own)


@warns_of_it
def test_a_tensor_that_a_loss_writes_is_named_where_nothing_may_be_whole(tmp_path: Path) -> None:
    options = bb.Options("naive", micro_batches=1, sum_order="micro")
    with refused("BX2152c"):
        Loop(Net, of_loss=Teacher).in_session(tmp_path, options)


@warns_of_it
@pytest.mark.usefixtures("rehearsals")
@pytest.mark.nightly
def test_a_loss_that_goes_by_what_it_has_kept_begins_with_what_it_had(tmp_path: Path) -> None:
    """A trace left torch's own tensor in its buffer, and the next trial a traceback."""
    plain, own = Loop(Net, of_loss=Centred), Loop(Net, of_loss=Centred)
    want = plain.plain()
    assert own.in_session(tmp_path)[0] == want
    require_same(plain, own)


@warns_of_it
@pytest.mark.parametrize("name", ["scheduler", "lr_scale"])
@pytest.mark.gate("scheduler")
def test_rates_of_a_recipe_are_those_of_a_loop(name: str, tmp_path: Path) -> None:
    plain, own = Loop(), Loop()
    steps = iter(range(1, STEPS + 1))
    if name == "scheduler":
        rates = stepped(plain.optimizer)
        plain.plain(lambda _: rates.step())
        own.in_session(tmp_path, scheduler=stepped)
    else:
        group = plain.optimizer.param_groups[0]
        plain.plain(lambda _: group.update(lr=0.05 * halved(next(steps))))
        own.in_session(tmp_path, lr_scale=halved)
    require_same(plain, own)


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@warns_of_it
def test_a_scheduler_may_go_by_the_loss(tmp_path: Path) -> None:
    plain, own = Loop(), Loop()
    rates = plateau(plain.optimizer)
    plain.plain(lambda value: rates.step(value))
    own.in_session(tmp_path, scheduler=plateau)
    require_same(plain, own)
    assert own.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"] < 0.05


def test_a_warning_has_the_reason_and_strict_refuses(tmp_path: Path) -> None:
    with pytest.warns(bb.SplitWarning, match=r"whole in this process.*BX0170d"):
        _, session = Loop().in_session(tmp_path)
    with refused("BX3199", bb.InputError):
        _ = session.plan
    assert "whole, in this process" in str(session)
    with refused("BX3141a", bb.InputError):
        session.step(batches()[0])
    with refused("BX0170d", bb.BigBrainError):
        Loop().in_session(tmp_path, dataclasses.replace(WHOLE, strict=True))
    with refused("BX0170d", bb.BigBrainError):
        Loop().in_session(tmp_path, dataclasses.replace(WHOLE, compiled=True))
    with refused("BX0170d", bb.BigBrainError):
        Loop().in_session(tmp_path, out=tmp_path / "bundle")


@warns_of_it
def test_weights_are_read_saved_and_validated_between_steps(tmp_path: Path) -> None:
    own, file = Loop(), tmp_path / "model.safetensors"
    machine, given = bb.machine(write_cluster(tmp_path)), batches()
    about: Any = {"loss": loss, "optimizer": own.optimizer, "drop_last": True}
    with machine(own.model, example_batch=given[0], **about) as session:
        session.step(given[0])
        assert not session.eval()(given[0]["x"]).isnan().any()
        assert not own.model.training
        before = session.state_dict()
        session.save(file)
        session.step(given[1])
        assert not own.model.training  # as the loop left it
        assert all(torch.equal(before[name], t) for name, t in load_file(file).items())
        assert not torch.equal(before["a.weight"], own.model.state_dict()["a.weight"])
        smaller = {name: entry[:3] for name, entry in given[2].items()}
        assert session.leaves_out(smaller)
        with refused("BX3138", bb.InputError):
            session.step(smaller)
        with refused("BX3200", bb.InputError):
            session.save(tmp_path / "more.safetensors", tmp_path / "optimizer.safetensors")


def test_a_loop_that_plain_pytorch_does_not_run_is_refused_for_the_first_reason(
    tmp_path: Path,
) -> None:
    class Failing(Hooked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0, 0, 0]

    with pytest.raises(bb.BigBrainError, match="nor can the whole step run in this process"):
        Loop(Failing).in_session(tmp_path)
    other = SGD(Net().parameters(), lr=0.1)
    with refused("BX2033a", bb.InputError):
        Loop(Net, lambda _: other).in_session(tmp_path)


def frozen(model: nn.Module, step: int) -> None:
    model.get_submodule("a").requires_grad_(step < 1 or step > 3)


class Plain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)


def without_source(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec("def made(named):\n    return torch.optim.SGD(named, lr=0.1)\n", names)
    loop = Loop(Net)
    loop.optimizer = names["made"]
    loop.in_session(tmp_path)


def test_a_function_without_source_is_refused(tmp_path: Path) -> None:
    with refused("BX3003", bb.InputError):
        without_source(tmp_path)


@pytest.mark.parametrize("name", ["scheduler", "lr_scale"])
@pytest.mark.nightly
def test_a_change_that_no_device_can_have_goes_on_in_this_process(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The state of devices, weights, moments and rates, goes along."""
    plain, own = Loop(Plain, change=frozen), Loop(Plain, change=frozen)
    steps = iter(range(1, STEPS + 1))
    if name == "scheduler":
        rates = stepped(plain.optimizer)
        want = plain.plain(lambda _: rates.step())
        losses, session = own.in_session(tmp_path, scheduler=stepped)
    else:
        group = plain.optimizer.param_groups[0]
        want = plain.plain(lambda _: group.update(lr=0.05 * halved(next(steps))))
        losses, session = own.in_session(tmp_path, lr_scale=halved)
    assert isinstance(session._steps, OwnSteps)
    assert session.plan.stages.devices
    assert losses == pytest.approx(want, abs=1e-6)
    for one, other in zip(plain.numbers(), own.numbers(), strict=True):
        torch.testing.assert_close(one, other)
    assert "whole in this process" in capfd.readouterr().err


class Phase(enum.Enum):
    WARM = 0.1
    MAIN = 1.0


def in_phases() -> list[Any]:
    phases = [Phase.WARM] * 3 + [Phase.MAIN] * 3
    return [{**batch, "phase": phase} for batch, phase in zip(batches(), phases, strict=True)]


def by_phase(output: Tensor, batch: Any) -> Tensor:
    return loss(output, batch) * (0.1 if batch["phase"] is Phase.WARM else 1.0)


@pytest.mark.nightly
def test_a_batch_by_which_another_branch_is_taken_goes_on_in_this_process(tmp_path: Path) -> None:
    about: Any = {"kind": Plain, "of_loss": lambda: by_phase, "batches": in_phases}
    plain, own = Loop(**about), Loop(**about)
    want = plain.plain()
    losses, session = own.in_session(tmp_path)
    assert isinstance(session._steps, OwnSteps)
    assert losses == pytest.approx(want, abs=1e-6)


def hook_of_parameter(loop: Loop) -> None:
    loop.model.get_parameter("a.weight").register_hook(lambda gradient: gradient * 0.1)


def hook_of_gradient(loop: Loop) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    loop.model.get_parameter("a.weight").register_post_accumulate_grad_hook(halve)


def hook_of_optimizer(loop: Loop) -> None:
    def halve(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if parameter.grad is None else parameter.grad * 0.5

    loop.optimizer.register_step_pre_hook(halve)


def new_head(loop: Loop) -> None:
    torch.manual_seed(7)
    loop.model.b = nn.Linear(8, 1)
    loop.optimizer.add_param_group({"params": [*loop.model.b.parameters()]})


def new_weight(loop: Loop) -> None:
    weight = loop.model.get_parameter("b.weight")
    loop.model.get_submodule("b").weight = nn.Parameter(weight.detach().clone() / 2)


def fewer_parameters(loop: Loop) -> None:
    group = loop.optimizer.param_groups[0]
    group["params"] = group["params"][:2]


def pruned(loop: Loop) -> None:
    prune.l1_unstructured(loop.model.get_submodule("a"), "weight", 0.5)


def wrapped(loop: Loop) -> None:
    loop.model.a = nn.Sequential(loop.model.get_submodule("a"))


def another_class(loop: Loop) -> None:
    class Halved(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    loop.model.__class__ = Halved


@pytest.mark.parametrize(
    "change",
    [
        hook_of_parameter,
        hook_of_gradient,
        hook_of_optimizer,
        new_head,
        new_weight,
        fewer_parameters,
        pruned,
        wrapped,
        another_class,
    ],
    ids=lambda change: change.__name__,
)
@pytest.mark.gate("new_head")
def test_a_loop_may_change_hooks_parts_and_parameters(
    change: Callable[[Loop], None], tmp_path: Path
) -> None:
    """The devices' weights and moments go along, by the tensors that they were of."""

    def changing(loop: Loop) -> None:
        loop.change = lambda _model, step: change(loop) if step == 2 else None

    plain, own = Loop(Plain), Loop(Plain)
    changing(plain)
    changing(own)
    want = plain.plain()
    losses, _ = own.in_session(tmp_path)
    assert losses == pytest.approx(want, abs=1e-6)
    for one, other in zip(plain.numbers(), own.numbers(), strict=True):
        torch.testing.assert_close(one, other)


class Counting(Net):
    """Its own forward counts calls in a closure, which nothing puts back."""

    def __init__(self) -> None:
        super().__init__()
        calls = itertools.count(1)
        self.next: Callable[[], int] = lambda: next(calls)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * min(1.0, self.next() / 20)


def test_a_model_that_capture_has_left_otherwise_is_refused(tmp_path: Path) -> None:
    """It would begin with another count than a loop of plain PyTorch."""
    with pytest.raises(bb.BigBrainError) as caught:
        Loop(Counting).in_session(tmp_path)
    assert any("its calls have changed" in note for note in caught.value.notes)
