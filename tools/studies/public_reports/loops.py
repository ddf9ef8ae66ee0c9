"""Loops of one's own around a session, beside the same loops in plain PyTorch.

    python -m tools.studies.public_reports.loops [NAME ...]

Two lines a loop: by default, and with two micro-batches. Each loop is written once; what `make`
gives it is a session, or a plain step.
"""

# ruff: noqa: ANN401  # training code as its users write it; a session or a plain step
from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbrain_fx as bb
from tools.conformance.forms.judge import cluster

Outcome = tuple[list[float], dict[str, Tensor]]
LOOPS: list[Callable[[Any], Outcome]] = []


def loop(function: Callable[[Any], Outcome]) -> Callable[[Any], Outcome]:
    """Note a loop."""
    LOOPS.append(function)
    return function


class Plain:
    """A plain step with the calls of a session."""

    def __init__(self, net: nn.Module, loss: Any, optimizer: Any, _example: object) -> None:
        self.net, self.loss, self.optimizer = net, loss, optimizer

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None: ...

    def step(self, batch: Any) -> float:
        """Train on one batch."""
        value = self.loss(self.net.train()(batch["x"]), batch)
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        return value.item()

    @classmethod
    def train(cls, net: nn.Module, loader: Any, on_step: Any = None, **about: Any) -> None:
        """Train on what a loader gives."""
        step = cls(net, about["loss"], about["optimizer"], None).step
        for number, batch in enumerate(loader):
            on_step(number, step(batch))


class MLP(nn.Sequential):
    """Three layers, whose input has a name."""

    def __init__(self, wide: int = 8, out: int = 4) -> None:
        layers = nn.Linear(wide, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, out)
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        return super().forward(x)


def data() -> list[dict[str, Tensor]]:
    """Return six batches of eight rows."""
    dice = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 8, generator=dice), "y": torch.randint(4, (8,), generator=dice)}
        for _ in range(6)
    ]


def ce(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy."""
    return F.cross_entropy(output, batch["y"])


@loop
def critic_in_plain_pytorch(make: Any) -> Outcome:
    net, critic, found = MLP(8, 6), MLP(6, 1), list[float]()
    own = torch.optim.Adam(net.parameters(), 1e-2, betas=(0.5, 0.999))
    other = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.5, 0.999))
    with make(net, lambda output, _: -critic(output).mean(), own, data()[0]) as session:
        for batch in data():
            other.zero_grad()
            real, fake = critic(2 * batch["x"][:, :6]), critic(net(batch["x"]).detach())
            value = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
            value.backward()
            other.step()
            found += [value.item(), session.step(batch)]
    return found, {**net.state_dict(), **{f"critic.{n}": t for n, t in critic.state_dict().items()}}


@loop
def plateau(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    with make(net, ce, optimizer, data()[0]) as session:
        for batch in data():
            found.append(session.step(batch))
            net.eval()
            with torch.no_grad():
                found.append(ce(net(1.1 * data()[0]["x"]), data()[0]).item())
            net.train()
            scheduler.step(found[-1])
    return found, net.state_dict()


@loop
def unfreezing(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with make(net, ce, optimizer, data()[0]) as session:
        for step, batch in enumerate(data()):
            net[0].requires_grad_(step >= 3)
            found.append(session.step(batch))
    return found, net.state_dict()


@loop
def group_added_later(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    with make(net, ce, optimizer, data()[0]) as session:
        for step, batch in enumerate(data()):
            if step == 3:
                net[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.01})
            found.append(session.step(batch))
    return found, net.state_dict()


class Margin(nn.Module):
    """An angular margin, which the loop raises."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = 0.0

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        angle = torch.acos(F.normalize(output, dim=1).clamp(-0.99, 0.99))
        return F.cross_entropy(8 * torch.cos(angle + F.one_hot(y, 4) * self.margin), y)


@loop
def margin(make: Any) -> Outcome:
    net, criterion, found = MLP(), Margin(), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with make(net, lambda output, b: criterion(output, b["y"]), optimizer, data()[0]) as session:
        for step, batch in enumerate(data()):
            criterion.margin = 0.1 * step
            found.append(session.step(batch))
    return found, net.state_dict()


@loop
def slow_weights(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    slow = [p.detach().clone() for p in net.parameters()]
    with make(net, ce, optimizer, data()[0]) as session:
        for step, batch in enumerate(data()):
            found.append(session.step(batch))
            for kept, p in zip(slow, net.parameters(), strict=True) if step % 2 else ():
                with torch.no_grad():
                    kept += 0.5 * (p - kept)
                    p.copy_(kept)
    return found, net.state_dict()


@loop
def class_weights(make: Any) -> Outcome:
    net, criterion, found = MLP(), nn.CrossEntropyLoss(weight=torch.ones(4)), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with make(net, lambda output, b: criterion(output, b["y"]), optimizer, data()[0]) as session:
        for step, batch in enumerate(data()):
            if step:
                criterion.weight = torch.tensor([1.0, 2.0 * step, 0.5, 1.0])
            found.append(session.step(batch))
    return found, net.state_dict()


@loop
def target_network(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    target = copy.deepcopy(net)
    optimizer = torch.optim.RMSprop(net.parameters(), 1e-2)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = batch["x"][:, 0] + 0.9 * target(-batch["x"]).max(1)[0]
        return F.smooth_l1_loss(output.gather(1, batch["y"][:, None]).squeeze(1), wanted)

    with make(net, loss, optimizer, data()[0]) as session:
        for step, batch in enumerate(data()):
            if step % 2 == 0:
                target.load_state_dict(net.state_dict())
            found.append(session.step(batch))
    return found, net.state_dict()


@loop
def decay_schedule(make: Any) -> Outcome:
    net, found = MLP(), list[float]()
    groups = [{"params": [p for p in net.parameters() if p.ndim == n]} for n in (2, 1)]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    with make(net, ce, optimizer, data()[0]) as session:
        for step, batch in enumerate(data()):
            optimizer.param_groups[0]["weight_decay"] = 0.04 + 0.1 * step
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (step + 1) / 6
            found.append(session.step(batch))
    return found, net.state_dict()


@loop
def teacher_outside(make: Any) -> Outcome:
    layers = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)
    teacher, net, found = nn.Sequential(*layers).eval(), MLP(), list[float]()

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            soft = (teacher(batch["x"]) / 4).softmax(1)
        apart = F.kl_div((output / 4).log_softmax(1), soft, reduction="batchmean")
        return 16 * apart + ce(output, batch)

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with make(net, loss, optimizer, data()[0]) as session:
        found.extend(session.step(batch) for batch in data())
    return found, net.state_dict()


@loop
def late_padding(make: Any) -> Outcome:
    net, batches = MLP(), data()
    for batch in batches[2:]:
        batch["y"][5:] = -100
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with make(net, ce, optimizer, batches[0]) as session:
        return [session.step(batch) for batch in batches], net.state_dict()


@loop
def centres_of_their_own(make: Any) -> Outcome:
    net, centres, found = MLP(), nn.Parameter(torch.zeros(4, 4)), list[float]()
    own, other = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD([centres], 0.5)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return ce(output, batch) + (output - centres[batch["y"]]).square().mean()

    with make(net, loss, own, data()[0]) as session:
        for batch in data():
            other.zero_grad()
            found.append(session.step(batch))
            other.step()
    return found, {**net.state_dict(), "centres": centres.detach()}


class Sessions:
    """A session, or a training, of two devices."""

    def __init__(self, options: bb.Options) -> None:
        self.options, self.machine = options, bb.machine(cluster(2))

    def __call__(self, net: nn.Module, loss: Any, optimizer: Any, example: object) -> Any:
        """Begin a session."""
        about = {"loss": loss, "optimizer": optimizer, "options": self.options}
        return self.machine(net, example_batch=example, **about)

    def train(self, net: nn.Module, loader: Any, **about: Any) -> None:
        """Train on what a loader gives."""
        self.machine.train(net, loader, options=self.options, **about)


def tried(function: Callable[[Any], Outcome], count: int | None) -> str:
    """Run a loop both ways; say how far apart they are, and what was said."""

    torch.manual_seed(0)
    losses, tensors = function(Plain)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", bb.SplitWarning)
        try:
            ours, state = function(Sessions(bb.Options(micro_batches=count)))
        except bb.BigBrainError as error:
            return f"refused: {error.code} {error.what}"
    off = max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True))
    most = max(float((state[n] - t).abs().max()) for n, t in tensors.items())
    said = "; ".join(str(w.message) for w in heard if issubclass(w.category, bb.SplitWarning))
    return f"loss {off:.0e}, weights {most:.0e} | {said}"


def main() -> None:
    """Run the loops, or those named."""
    from tools.studies.public_reports import late_loops, loops

    assert late_loops.loop is loops.loop  # it notes its loops there
    torch.set_num_threads(1)
    for each in loops.LOOPS:
        for number in (None, 2) if each.__name__ in (sys.argv[1:] or each.__name__) else ():
            said = loops.tried(each, number)
            print(f"{each.__name__:24} {number or 'default':7} {said}", flush=True)


if __name__ == "__main__":
    main()
