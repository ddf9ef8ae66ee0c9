"""Loops whose effect on a session comes late, or by a way that nobody hears of.

Each trained something else in silence when it was written: see the README.
"""

# ruff: noqa: ANN401  # training code as its users write it; a session or a plain step
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tools.studies.public_reports.loops import MLP, Outcome, ce, data, loop


def sgd(net: nn.Module, rate: float = 0.3) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), rate)


def trained(make: Any, net: nn.Module, loader: Any) -> Outcome:
    found: list[float] = []
    about = {"loss": ce, "optimizer": sgd(net), "on_step": lambda _, value: found.append(value)}
    make.train(net, loader, **about)
    return found, net.state_dict()


@loop
def hard_rows(make: Any) -> Outcome:
    net = MLP()

    def loader() -> Iterator[dict[str, Tensor]]:
        for batch in data():
            with torch.no_grad():
                each = F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")
            yield {name: tensor[each.topk(4).indices] for name, tensor in batch.items()}

    return trained(make, net, loader())


@loop
def memory_filled_again(make: Any) -> Outcome:
    def loader() -> Iterator[dict[str, Tensor]]:
        kept = {name: tensor.clone() for name, tensor in data()[0].items()}
        for batch in data():
            for name, tensor in batch.items():
                kept[name].copy_(tensor)
            yield kept

    return trained(make, MLP(), loader())


class Curriculum:
    """Data that become harder."""

    level = 1.0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of now."""
        return ({**batch, "x": self.level * batch["x"]} for batch in data())


@loop
def harder_by_step(make: Any) -> Outcome:
    net, rows, found = MLP(), Curriculum(), list[float]()

    def on_step(step: int, value: float) -> None:
        rows.level = 1 + 0.5 * step
        found.append(value)

    make.train(net, rows, loss=ce, optimizer=sgd(net), on_step=on_step)
    return found, net.state_dict()


@loop
def clamped_through_numpy(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    held = net[0].weight.detach().numpy()
    with make(net, ce, sgd(net), data()[0]) as session:
        for batch in data():
            found.append(session.step(batch))
            held.clip(-0.2, 0.2, out=held)
    return found, net.state_dict()


@loop
def state_dict_of_once(make: Any) -> Outcome:
    net, found, average = MLP(), list[float](), 0.0
    with make(net, ce, sgd(net), data()[0]) as session:
        held = net.state_dict()
        for batch in data():
            found.append(session.step(batch))
            average = 0.9 * average + float(held["0.weight"].sum())
            found.append(average)
    return found, net.state_dict()


@loop
def weights_as_a_vector(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    average = parameters_to_vector(net.parameters()).detach().clone()
    with make(net, ce, sgd(net), data()[0]) as session:
        for batch in data():
            found.append(session.step(batch))
            average = 0.7 * average + 0.3 * parameters_to_vector(net.parameters()).detach()
            vector_to_parameters(average, net.parameters())
    return found, net.state_dict()


@loop
def shared_trunk(make: Any) -> Outcome:
    trunk, found = nn.Linear(8, 24), list[float]()
    nets = [MLP(), MLP()]
    for net in nets:
        net[0] = trunk
    first = data()[0]
    with (
        make(nets[0], ce, sgd(nets[0]), first) as one,
        make(nets[1], ce, sgd(nets[1]), first) as other,
    ):
        found.extend((other if n % 2 else one).step(batch) for n, batch in enumerate(data()))
    return found, {f"{n}.{k}": t for n, net in enumerate(nets) for k, t in net.state_dict().items()}


@loop
def elastic_weights(make: Any) -> Outcome:
    net, found, anchors = MLP(), list[float](), dict[str, Tensor]()

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        pulls = [(p - anchors[n]).square().sum() for n, p in net.named_parameters() if anchors]
        return ce(output, batch) + sum(pulls)

    with make(net, loss, sgd(net), data()[0]) as session:
        for step, batch in enumerate(data()):
            found.append(session.step(batch))
            if step == 2:
                anchors |= {n: p.detach().clone() for n, p in net.named_parameters()}
    return found, net.state_dict()


@loop
def rare_class(make: Any) -> Outcome:
    net, found, shares = MLP(), list[float](), [1.0, 1.0, 1.0, 1.0]

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(output, batch["y"], reduction="none")
        return (each * torch.tensor(shares)[batch["y"]]).mean()

    batches = data()
    for batch in batches[:5]:
        batch["y"].clamp_(max=2)
    batches[5]["y"][:2] = 3
    with make(net, loss, sgd(net), batches[0]) as session:
        for step, batch in enumerate(batches):
            shares[3] = 5.0 if step > 1 else 1.0
            found.append(session.step(batch))
    return found, net.state_dict()


@loop
def threshold_of_the_batch(make: Any) -> Outcome:
    net, found = MLP(), list[float]()

    def loss(output: Tensor, batch: dict[str, Any]) -> Tensor:
        sure, label = output.detach().softmax(-1).max(-1)
        each = F.cross_entropy(output, label, reduction="none")
        return ce(output, batch) + ((sure > batch["tau"]) * each).mean()

    taus = (0.99, 0.97, 0.97, 0.8, 0.5, 0.3)
    batches = [{**batch, "tau": tau} for batch, tau in zip(data(), taus, strict=True)]
    with make(net, loss, sgd(net), batches[0]) as session:
        found.extend(session.step(batch) for batch in batches)
    return found, net.state_dict()


def focal(output: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(output, labels, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


@loop
def criterion_of_two_phases(make: Any) -> Outcome:
    net, found, kind = MLP(), list[float](), F.cross_entropy

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return kind(output, batch["y"])

    with make(net, loss, sgd(net), data()[0]) as session:
        for step, batch in enumerate(data()):
            kind = focal if step > 2 else F.cross_entropy
            found.append(session.step(batch))
    return found, net.state_dict()


@loop
def controller(make: Any) -> Outcome:
    """A weight goes by what the loss leaves: devices do not leave it, and a warning says so."""
    net, found, log = MLP(), list[float](), {"beta": 0.1, "kl": 0.0}

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        term = output.square().mean()
        log["kl"] = term.item()
        return ce(output, batch) + log["beta"] * term

    with make(net, loss, sgd(net), data()[0]) as session:
        for batch in data():
            found.append(session.step(batch))
            log["beta"] *= 1.1 if log["kl"] > 0.005 else 0.9
    return found, net.state_dict()


@loop
def interrupted(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    try:
        with make(net, ce, sgd(net), data()[0]) as session:
            for batch in data():
                found.append(session.step(batch))
                if len(found) == 4:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        return found, net.state_dict()
    raise AssertionError
