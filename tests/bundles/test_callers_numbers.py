"""What a loop changes and the loss reads, number or tensor, reaches the devices with each batch."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import bigbrain_fx as bb
from bigbrain_fx.bundles import device_steps
from tests.support.command_line import write_cluster
from tests.support.messages import refused

Batch = Mapping[str, Tensor]
STEPS = 5
WEIGHT = 0.0
WHOLE = bb.Options("naive", micro_batches=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x) * self.scale))


def batches() -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    drawn = [torch.randn(8, 4, generator=dice) for _ in range(STEPS)]
    return [{"x": x, "y": x.sum(1, keepdim=True)} for x in drawn]


class Loop:
    """A training loop, and what it changes after each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = AdamW(self.model.parameters(), lr=0.05)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def change(self, step: int) -> None:
        raise NotImplementedError

    def plain(self) -> None:
        for step, batch in enumerate(batches()):
            self.optimizer.zero_grad()
            self.loss(self.model(batch["x"]), batch).backward()
            self.optimizer.step()
            self.change(step)

    def split(self, machine: bb.Machine, options: bb.Options = WHOLE) -> Any:
        about: Any = {"loss": self.loss, "optimizer": self.optimizer, "rehearse": False}
        return machine(self.model, example_batch=batches()[0], options=options, **about)


class Annealed(Loop):
    """The weight of a term grows, as of a VAE's divergence."""

    beta = 0.0

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(output, batch["y"]) + self.beta * output.square().mean()

    def change(self, step: int) -> None:
        self.beta = 0.1 * (step + 1)


class OfGlobal(Annealed):
    """The same, of a global."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(output, batch["y"]) + WEIGHT * output.square().mean()

    def change(self, step: int) -> None:
        globals()["WEIGHT"] = 0.1 * (step + 1)


class OfModule(Annealed):
    """The same, of a module of the model."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(output, batch["y"])

    def change(self, step: int) -> None:
        self.model.scale = 1.0 - 0.1 * step


class Unfrozen(Annealed):
    """A part trains from the third step on, and the loss is smoothed later: two new traces."""

    def __init__(self) -> None:
        super().__init__()
        self.model.a.requires_grad_(False)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, (batch["y"] > 0).float(), label_smoothing=self.beta)

    def change(self, step: int) -> None:
        if step == 1:
            self.model.a.requires_grad_(True)
        if step == 3:
            self.beta = 0.1


class Taught(Loop):
    """A teacher is an average of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.teacher.a.weight.data.mul_(2)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch["x"])
        return F.mse_loss(output, batch["y"]) + F.mse_loss(output, wanted)

    def change(self, step: int) -> None:
        with torch.no_grad():
            for mean, weight in zip(
                self.teacher.parameters(), self.model.parameters(), strict=True
            ):
                mean.lerp_(weight, 0.3)


class Normed(Annealed):
    """The momentum of a batch norm falls, as PointNet++ lets it: a buffer alone shows that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.model.add_module("a", nn.Sequential(self.model.a, self.norm))
        self.optimizer = AdamW(self.model.parameters(), lr=0.05)

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.mse_loss(output, batch["y"])

    def change(self, _step: int) -> None:
        self.norm.momentum = 0.05


class Measured(Taught):
    """A weight of a term is set before the module is read, and then written."""

    beta = 0.0

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output, batch) + self.beta * output.square().mean()

    def change(self, step: int) -> None:
        self.beta = 0.1 * (step + 1)
        super().change(step)
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.4, 0.4)


class Branched(Annealed):
    """Python asks for the number: each value has a trace of its own."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        found = F.mse_loss(output, batch["y"])
        return found * 2 if self.beta > 0.2 else found

    def change(self, step: int) -> None:
        self.beta = step % 2


@pytest.mark.gate("Measured")
@pytest.mark.parametrize("kind", [Annealed, OfGlobal, OfModule, Taught, Unfrozen, Normed, Measured])
def test_changes_of_values_that_the_loss_reads_reach_the_devices(
    kind: Callable[[], Loop], tmp_path: Path
) -> None:
    plain, loop = kind(), None
    globals()["WEIGHT"] = 0.0
    plain.plain()
    globals()["WEIGHT"] = 0.0
    loop = kind()
    with loop.split(bb.machine(write_cluster(tmp_path))) as session:
        for step, batch in enumerate(batches()):
            session.step(batch)
            loop.change(step)
            if step == 2:
                pids = {e["device"]: e["pid"] for e in session.events if e["event"] == "started"}
                os.kill(pids["d1"], signal.SIGKILL)
    assert session.done.restarts == 1
    want, have = plain.model.state_dict(), loop.model.state_dict()
    assert [name for name, tensor in want.items() if not torch.equal(tensor, have[name])] == []


@pytest.mark.nightly
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_changes_reach_weights_that_replicas_have_or_divide(
    zero_stage: Any, tmp_path: Path
) -> None:
    """The replicas' sum of gradients is rounded otherwise than the whole batch's."""
    plain, loop = Measured(), Measured()
    plain.plain()
    options = bb.Options("naive", replicas=2, zero_stage=zero_stage, sum_order="micro")
    with loop.split(bb.machine(write_cluster(tmp_path)), options) as session:
        for step, batch in enumerate(batches()):
            session.step(batch)
            loop.change(step)
            if step == 2:
                pids = {e["device"]: e["pid"] for e in session.events if e["event"] == "started"}
                os.kill(pids["d1"], signal.SIGKILL)
    assert session.done.restarts == 1
    pairs = zip(plain.model.parameters(), loop.model.parameters(), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs)


@pytest.mark.nightly
def test_a_training_with_a_callback_is_the_loop_with_it(tmp_path: Path) -> None:
    plain, trained = Taught(), Taught()
    plain.plain()
    about: Any = {"loss": trained.loss, "optimizer": trained.optimizer, "rehearse": False}
    machine = bb.machine(write_cluster(tmp_path))
    about["on_step"] = lambda step, _loss: trained.change(step)
    machine.train(trained.model, batches(), options=bb.Options("naive", micro_batches=1), **about)
    pairs = [(plain.model, trained.model), (plain.teacher, trained.teacher)]
    for one, other in pairs:
        tensors = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.nightly
def test_a_module_is_not_split_again_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_steps, "MOST", 1)
    loop = Branched()
    strict = replace(WHOLE, strict=True)
    with loop.split(bb.machine(write_cluster(tmp_path)), strict) as session:
        loop.beta = 1
        session.step(batches()[0])
        loop.beta = 0
        with refused("BX2152b", bb.InputError):
            session.step(batches()[1])
        with refused("BX2152b", bb.InputError):  # it counts until it is undone
            session.step(batches()[1])
        loop.beta = 1
        session.step(batches()[1])


def test_numbers_that_a_call_leaves_for_the_loop_are_warned_of(tmp_path: Path) -> None:
    """A trace has no line that only keeps a number for a log, and the loop may go by it."""
    log, values, model = {"beta": 0.1, "kl": 0.0}, list[float](), Net()

    def loss(output: Tensor, batch: Batch) -> Tensor:
        log["kl"] = output.square().mean().item()
        values.append(log["kl"])
        return F.mse_loss(output, batch["y"]) + log["beta"] * output.square().mean()

    about: Any = {"example_batch": batches()[0], "options": WHOLE, "rehearse": False}
    said = r"writes `log\['kl'\]`, `values`, and devices do not bring that back"
    with (
        pytest.warns(bb.SplitWarning, match=said),
        bb.machine(write_cluster(tmp_path))(model, loss=loss, **about) as session,
    ):
        session.step(batches()[1])
    assert (log, values) == ({"beta": 0.1, "kl": 0.0}, [])
