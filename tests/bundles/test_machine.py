"""A loop of one's own on devices of a cluster: bits as plain PyTorch, whatever happens to them."""

from __future__ import annotations

import copy
import functools
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bigbrain_fx as bb
from bigbrain_fx.bundles.callers.constants import Constants
from bigbrain_fx.bundles.entries import SentEntry, entry_tensor, has_fewer, require_one_number
from bigbrain_fx.bundles.sessions import Session
from tests.support.command_line import write_cluster
from tests.support.messages import refused

Batch = dict[str, Tensor]
OPTIONS = bb.Options("naive", micro_batches=1)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.norm(self.a(x)))
        return found


def data(count: int) -> Iterator[Batch]:
    dice = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, 4, generator=dice)
        yield {"x": x, "y": x.sum(1, keepdim=True)}


def net() -> Net:
    torch.manual_seed(0)
    return Net(8)


def plain(steps: int) -> tuple[Net, list[float]]:
    return plain_on(data(steps))


def plain_on(batches: Iterable[Batch]) -> tuple[Net, list[float]]:
    """Train in this process, as one would without us."""
    module, losses = net(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for batch in batches:
        value = loss(module(batch["x"]), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return module, losses


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bb.Machine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield bb.machine(write_cluster(tmp_path))
    torch.set_num_threads(threads)


class Averages:
    """Averages of a model's weights, by three ways of reading them."""

    def __init__(self, module: Net) -> None:
        self.module, self.averaged = module, torch.optim.swa_utils.AveragedModel(module)
        self.named = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.norms: list[float] = []

    def update(self) -> None:
        self.averaged.update_parameters(self.module)
        self.norms.append(self.module.b.weight.norm().item())
        for name, p in self.module.named_parameters():
            self.named[name].lerp_(p.detach(), 0.1)


def test_averages_of_a_loop_are_of_the_weights_of_the_devices(machine: bb.Machine) -> None:
    batches, module, other = list(data(4)), net(), net()
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    want, have = Averages(other), Averages(module)
    for batch in batches:
        sgd.zero_grad()
        loss(other(batch["x"]), batch).backward()
        sgd.step()
        want.update()
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with machine(
        module, example_batch=batches[0], loss=loss, optimizer=optimizer, options=OPTIONS
    ) as session:
        for batch in batches:
            session.step(batch)
            have.update()
    assert have.norms == want.norms
    assert same(have.named, want.named)
    assert same(have.averaged.module.state_dict(), want.averaged.module.state_dict())
    assert type(module._parameters) is type(copy.deepcopy(module)._parameters) is dict


def test_a_killed_device_does_not_show_in_the_loop(machine: bb.Machine, tmp_path: Path) -> None:
    want, losses = plain(6)
    module, batches = net(), list(data(6))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)  # made here; devices make their own
    with machine(
        module, example_batch=batches[0], loss=loss, optimizer=adamw, options=OPTIONS
    ) as session:
        assert same(session.state_dict(), before)
        found = [session.step(batches[0])]
        average = torch.optim.swa_utils.AveragedModel(module)  # a copy hears nothing of later steps
        assert torch.equal(module(batches[0]["x"]), plain(1)[0](batches[0]["x"]))
        saved = tmp_path / "model.safetensors", tmp_path / "optimizer.safetensors"
        session.save(*saved)  # which the save after the last step replaces
        found += [session.step(batch) for batch in batches[1:3]]
        pids = {e["device"]: e["pid"] for e in session.events if e["event"] == "started"}
        os.kill(pids["d1"], signal.SIGKILL)
        at_three = session.state_dict()  # of the replacement, too
        with refused("BX2164"):
            session.step({"x": torch.zeros(8, 4)})
        found += [session.step(batch) for batch in batches[3:]]
        assert found == losses
        assert same(at_three, plain(3)[0].state_dict())
        assert same(module.state_dict(), want.state_dict())  # whoever looks at it, finds them
        session.save(*saved)
        assert not list(tmp_path.glob(".new*"))
        assert same(session.eval().state_dict(), want.state_dict())
        assert not module.training
        assert repr(session) == "<Session Net: 6 steps, is open, 1 processes replaced>"
        assert session.plan.stages.devices == ("d0", "d1")
    assert same(load_file(tmp_path / "model.safetensors"), want.state_dict())
    assert (tmp_path / "load_optimizer.py").is_file()
    assert session.done is not None
    assert session.done.restarts == 1
    assert average(batches[0]["x"]).shape == (8, 1)
    assert not module._forward_pre_hooks
    with pytest.raises(bb.InputError, match="this session has ended"):
        session.step(batches[0])


def test_a_batch_whose_gradient_the_caller_waits_for_is_refused() -> None:
    entry = SentEntry(("x",), "float32", (8,), 0, is_split=True, fewer=False, pad=False)
    wanted = torch.zeros(8, requires_grad=True)
    assert entry_tensor("x", {"x": wanted}, entry).shape == (8,)
    with refused("BX3030a", bb.InputError):
        entry_tensor("x", {"x": wanted * 2}, entry)


def test_batches_may_be_smaller_where_the_caller_says_so() -> None:
    one = SentEntry(("x",), "float32", (8, 5, 4), 1, is_split=True, fewer=True, pad=True)
    assert entry_tensor("x", {"x": torch.zeros(5, 8, 4)}, one).shape == (8, 5, 4)
    assert entry_tensor("x", {"x": torch.zeros(3, 6, 4)}, one).shape == (6, 3, 4)
    assert has_fewer({"x": torch.zeros(5, 7, 4)}, one)
    for wrong in (torch.zeros(5, 9, 4), torch.zeros(6, 8, 4), torch.zeros(5, 0, 4)):
        with pytest.raises(bb.InputError, match="split for float32"):
            entry_tensor("x", {"x": wrong}, one)
    with pytest.raises(bb.InputError, match="'x' is sparse_coo float32"):
        entry_tensor("x", {"x": torch.zeros(5, 8, 4).to_sparse()}, one)
    with pytest.raises(bb.InputError, match="unequal rows: x 2, y 1"):
        require_one_number({"x": torch.zeros(2), "y": torch.zeros(1)}, {"x": one, "y": one})


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_train_returns_the_model_trained(machine: bb.Machine) -> None:
    """One tensor stands twice in a batch: as `labels` of a language model are its `input_ids`."""
    told: list[tuple[int, float]] = []
    batches = [{"x": batch["x"], "y": batch["x"][:, :1]} for batch in data(3)]
    trained = machine.train(
        net(),
        batches,
        loss=loss,
        epochs=2,
        steps=5,
        on_step=lambda step, value: told.append((step, value)),
        optimizer=ADAMW,
        options=OPTIONS,
        run=bb.RunOptions(spares=0),
    )
    module, losses = plain_on([*batches, *batches][:5])
    assert told == list(enumerate(losses))
    assert same(trained.state_dict(), module.state_dict())


@pytest.mark.nightly
def test_a_loader_has_a_smaller_last_batch_and_rows_of_several_lengths(
    machine: bb.Machine,
) -> None:
    """As most loaders do: nothing is said of either. Micro-batches weigh by their rows."""
    dice = torch.Generator().manual_seed(1)
    x = [torch.randn(length, 4, generator=dice) for length in [5] * 8 + [7] * 8 + [3]]
    loader = DataLoader[Any](cast("Any", x), batch_size=8, collate_fn=padded)
    trained = machine.train(
        net(),
        loader,
        loss=loss,
        epochs=2,
        optimizer=ADAMW,
        options=bb.Options("naive", micro_batches=2),
        run=bb.RunOptions(spares=0),
    )
    want = plain_on([*loader, *loader])[0].state_dict()
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)


def padded(rows: list[Tensor]) -> Batch:
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"x": x, "y": x.sum(2, keepdim=True)}


@pytest.mark.nightly
def test_a_loader_shuffles_as_it_does_in_a_loop_of_plain_pytorch(machine: bb.Machine) -> None:
    """What it draws from, a generator or torch's own dice, is drawn from as often as there."""
    rows = [{name: part[0] for name, part in batch.items()} for batch in data(24)]

    def loader(dice: torch.Generator | None) -> DataLoader[Batch]:
        return DataLoader(rows, batch_size=8, shuffle=True, generator=dice)  # type: ignore[arg-type]

    for own in (True, False):
        torch.manual_seed(3)
        dice = torch.Generator().manual_seed(5) if own else None
        want = [batch["x"] for _ in range(2) for batch in loader(dice)]
        sent, model = list[Tensor](), net()
        torch.manual_seed(3)
        given = loader(torch.Generator().manual_seed(5) if own else None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "send", _keeping(sent))
            machine.train(model, given, loss=loss, epochs=2, optimizer=ADAMW, options=OPTIONS)
        assert torch.equal(torch.cat(sent), torch.cat(want))


def _keeping(sent: list[Tensor]) -> Callable[[Session, Batch], int]:
    real = Session.send

    def send(session: Session, batch: Batch) -> int:
        sent.append(batch["x"])
        return real(session, batch)

    return send


def test_a_number_that_counts_may_not_change() -> None:
    def scaled(output: Tensor, batch: dict[str, Any]) -> Tensor:
        return output.square().mean() * batch["scale"]

    first: dict[str, object] = {"x": torch.ones(8, 4), "scale": 0.5, "name": "a"}
    constants = Constants(net(), first, scaled, None)
    constants.required({**first, "name": "b"})
    with pytest.raises(bb.InputError, match=r"scale.*0\.5.*0\.7"):
        constants.required({**first, "scale": 0.7})


def test_the_module_may_not_change_while_devices_train_a_copy() -> None:
    linear, drop = nn.Linear(4, 4), nn.Dropout(0.5)
    module = nn.Sequential(linear, drop)
    first: dict[str, object] = {"input": torch.ones(8, 4)}
    constants = Constants(module, first, lambda output, _: output.square().mean(), None)
    module.register_buffer("seen", torch.zeros(()), persistent=False)
    module.eval().train()  # to compute with it, and back
    constants.required(first)
    drop.p = 0.25
    with pytest.raises(bb.InputError, match=r"1\.p has changed .* \(it was 0\.5, it is 0\.25\)"):
        constants.required(first)
    drop.p = 0.5
    constants.required(first)
    linear.weight.requires_grad_(False)
    with pytest.raises(bb.InputError, match=r"0\.weight\.requires_grad has changed"):
        constants.required(first)
    assert not linear.weight.requires_grad  # as the caller left it


def test_an_untrainable_model_starts_no_process(machine: bb.Machine, tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__", "torch": torch}
    exec("def made(named):\n    return torch.optim.SGD(named, lr=0.1)\n", names)
    out = tmp_path / "bundle"
    with pytest.raises(bb.InputError, match="`optimizer` has no source: function `made`"):
        machine(net(), example_batch=next(data(1)), loss=loss, optimizer=names["made"], out=out)
    assert not out.exists()
    with pytest.raises(bb.InputError, match="there is no option 'lr'"):
        machine(net(), example_batch=next(data(1)), loss=loss, lr=3)
    with pytest.raises(bb.InputError, match="there is no batch to train on"):
        machine.train(net(), [], loss=loss)


def test_a_later_batch_that_micro_batches_train_otherwise_is_warned_of(machine: bb.Machine) -> None:
    """The example has no row without a target; the third batch has, and all after it."""

    def valid(output: Tensor, batch: Batch) -> Tensor:
        mask = (batch["y"] > -100).float()
        return ((output - batch["y"]) * mask).square().sum() / mask.sum()

    batches = list(data(4))
    for batch in batches[2:]:
        batch["y"][5:] = -100
    how = {"example_batch": batches[0], "loss": valid, "options": bb.Options(micro_batches=2)}
    with machine(net(), **how) as session:  # type: ignore[arg-type]  # of these names
        session.step(batches[0])
        session.step(batches[1])
        with pytest.warns(bb.SplitWarning, match="2 micro-batches train something else"):
            session.step(batches[2])
        with warnings.catch_warnings():
            warnings.simplefilter("error", bb.SplitWarning)
            session.step(batches[3])


def test_later_batches_are_compared_with_parts_in_eval_mode(machine: bb.Machine) -> None:
    model = Normed()
    model.norm.eval()
    batches, options = list(data(2)), bb.Options(micro_batches=2)
    with machine(model, example_batch=batches[0], loss=loss, options=options) as session:
        session.step(batches[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error", bb.SplitWarning)
            session.step(batches[1])


def test_calls_of_a_plain_pytorch_loop_are_answered(machine: bb.Machine) -> None:
    first = next(data(1))
    made = torch.optim.SGD(net().parameters(), lr=0.1)
    with refused("BX2033a", bb.InputError):
        machine(net(), example_batch=first, loss=loss, optimizer=made)
    pair = first["x"], first["y"]
    with pytest.raises(bb.InputError, match="the loss fails on its example batch") as found:
        machine(net(), example_batch=pair, loss=nn.MSELoss())
    assert "criterion(output, batch[1])" in str(found.value)
    with pytest.raises(bb.InputError, match="read once, and epochs is 2"):
        machine.train(net(), data(3), loss=loss, epochs=2)
    session: Any = Session.__new__(Session)
    with pytest.raises(AttributeError, match="lr_scale"):
        session.lr = 0.1
    with pytest.raises(AttributeError, match="the devices have it"):
        _ = session.optimizer.param_groups
    assert not hasattr(session, "zero_grad")
    with pytest.raises(bb.InputError, match=r"session\.step\(batch\) is forward"):
        session(first["x"])
