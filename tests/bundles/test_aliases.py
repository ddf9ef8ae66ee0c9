"""The model's weights are as in plain PyTorch where a loop holds, shares or leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import bigbrain_fx as bb
from bigbrain_fx.bundles.callers.aliases import Aliases
from tests.support.command_line import write_cluster

STEPS = 4
WHOLE = bb.Options("naive", micro_batches=1)
Step = Callable[[Mapping[str, Tensor]], float]


class Net(nn.Module):
    def __init__(self, trunk: nn.Linear | None = None) -> None:
        super().__init__()
        self.a, self.b = trunk or nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(torch.tanh(self.a(x)))
        return found


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


def batches() -> Iterator[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, 4, generator=dice)
        yield {"x": x, "y": x.sum(1, keepdim=True)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def plain_step(model: nn.Module) -> Step:
    optimizer = sgd(model)

    def step(batch: Mapping[str, Tensor]) -> float:
        optimizer.zero_grad()
        value = loss(model(batch["x"]), batch)
        value.backward()
        optimizer.step()
        return value.item()

    return step


def clamped_numpy(model: Net, steps: list[Step]) -> list[float]:
    held, found = model.a.weight.detach().numpy(), []
    for batch in batches():
        found.append(steps[0](batch))
        held.clip(-0.2, 0.2, out=held)
    return found


def clamped_data(model: Net, steps: list[Step]) -> list[float]:
    """The memory is held from the second step on."""
    found: list[float] = []
    held: Tensor | None = None
    for batch in batches():
        found.append(steps[0](batch))
        held = model.a.weight.data if held is None else held.clamp_(-0.2, 0.2)
    return found


def averaged_state(model: Net, steps: list[Step]) -> list[float]:
    """As averages do that read one `state_dict` again and again."""
    held, average, found = model.state_dict(), 0.0, []
    for batch in batches():
        found.append(steps[0](batch))
        average = 0.9 * average + float(held["a.weight"].sum())
        found.append(average)
    return found


def averaged_vector(model: Net, steps: list[Step]) -> list[float]:
    """`vector_to_parameters` lets weights be views of the vector."""
    average, found = parameters_to_vector(model.parameters()).detach().clone(), []
    for batch in batches():
        found.append(steps[0](batch))
        average = 0.7 * average + 0.3 * parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(average, model.parameters())
    return found


def in_turn(_: Net, steps: list[Step]) -> list[float]:
    return [steps[number % 2](batch) for number, batch in enumerate(batches())]


def trained(
    loop: Callable[[Net, list[Step]], list[float]], made: Callable[[Net], Step]
) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = Net()
    models = [model, Net(model.a)] if loop is in_turn else [model]
    found = loop(model, [made(each) for each in models])
    return found, [p.detach().clone() for each in models for p in each.parameters()]


@pytest.mark.parametrize(
    "loop", [clamped_numpy, clamped_data, averaged_state, averaged_vector, in_turn]
)
def test_held_memory_is_that_of_plain_pytorch(
    loop: Callable[[Net, list[Step]], list[float]], tmp_path: Path
) -> None:
    machine = bb.machine(write_cluster(tmp_path))
    said = (
        r"opaque.*shares a\.weight.*BX3203"
        if loop is in_turn
        else r"the loop holds memory of [ab]\."
    )
    with ExitStack() as stack:

        def session(model: Net) -> Step:
            about: Any = {"example_batch": next(batches()), "options": WHOLE, "rehearse": False}
            return stack.enter_context(
                machine(model, loss=loss, optimizer=sgd(model), **about)
            ).step

        with pytest.warns(bb.SplitWarning, match=said):
            losses, weights = trained(loop, session)
    want, wanted = trained(loop, plain_step)
    assert losses == want
    assert all(map(torch.equal, weights, wanted))


def test_tensors_that_module_and_optimizer_hold_are_no_aliases() -> None:
    """Tied weights, views of one another, gradients, an optimizer's state, a copy of the module."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[1].bias.data = model[0].bias.data[:]
    optimizer = torch.optim.Adam(model.parameters())
    model[2](model[1](model[0](torch.randn(3, 4))))[0].sum().backward()
    optimizer.step()
    average: Any = torch.optim.swa_utils.AveragedModel(model)
    aliases = Aliases(model)
    assert not aliases.are_there()
    held = average.module[0].weight.data
    assert not aliases.are_there()
    held = model[3].running_mean.detach()
    with pytest.warns(bb.SplitWarning, match=r"memory of 3\.running_mean"):
        assert aliases.are_there()
    del held
    assert aliases.are_there()  # for good: what it has written counts, too


def stopped(step: Step, error: type[BaseException]) -> None:
    for number, batch in enumerate(batches()):
        if number == STEPS - 1:
            raise error("enough")
        step(batch)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_weights_come_home_where_an_exception_ends_the_loop(
    error: type[BaseException], tmp_path: Path
) -> None:
    """Ctrl-C in a notebook, and then `torch.save(model.state_dict())`."""
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    about: Any = {"example_batch": next(batches()), "options": WHOLE, "rehearse": False}
    session = bb.machine(write_cluster(tmp_path))(model, loss=loss, optimizer=sgd(model), **about)
    for step, block in ((session.step, session), (plain_step(plain), nullcontext())):
        with pytest.raises(error, match="enough"), block:
            stopped(step, error)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
