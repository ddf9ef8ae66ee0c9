"""Models in memory with parts that no trace holds: devices make them anew, as they were."""

from __future__ import annotations

import copy
import linecache
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bigbrain_fx as bb
from tests.support.bundles import cluster
from tests.support.command_line import write_cluster
from tests.support.messages import refused

FILE = "/tmp/ipykernel_1/1.py"  # as Jupyter calls a cell; there is no such file
CELL = '''
import torch
from torch import nn

GAIN = [0.5]


class Gate(nn.Module):
    """Warms up by its calls, and hears a hook."""

    def __init__(self, width):
        super().__init__()
        self.w, self.calls = nn.Parameter(torch.ones(width)), 2
        self.register_buffer("mask", torch.arange(width) / width, persistent=False)
        self.register_forward_hook(lambda module, given, found: found * GAIN[0])

    def forward(self, x):
        self.calls += 1
        return x * self.w * self.mask * min(1.0, self.calls / 6)


class Net(nn.Module):
    """Keeps its hidden state in its own forward."""

    def __init__(self):
        super().__init__()
        self.a, self.cell, self.gate = nn.Linear(4, 8), nn.GRUCell(8, 8), Gate(8)
        self.b, self.hidden = nn.Linear(8, 1), None
        self.dice, self.act = torch.Generator().manual_seed(3), nn.Tanh()

    @property
    def where(self):
        return next(self.parameters()).device

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if self.hidden is None:
            self.hidden = torch.rand(8, generator=self.dice).expand(x.shape[0], 8)
        self.hidden = self.act(self.cell(h, self.hidden.detach().to(self.where)))
        h = self.hidden + torch.tanh(self.hidden)
        return self.b(self.gate(h))
'''


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


def cell() -> Any:
    """Run the text as a notebook runs a cell; return the model of it."""
    linecache.cache[FILE] = len(CELL), None, CELL.splitlines(keepends=True), FILE
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, FILE, "exec"), names)
    torch.manual_seed(0)
    return names["Net"]()


def batches(count: int) -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    drawn = [torch.randn(8, 4, generator=dice) for _ in range(count)]
    return [{"x": x, "y": x.sum(1, keepdim=True)} for x in drawn]


def plain(steps: int) -> tuple[nn.Module, list[float]]:
    module, losses = cell(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in batches(steps):
        optimizer.zero_grad()
        value = loss(module(batch["x"]), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return module, losses


@pytest.mark.filterwarnings("ignore::bigbrain_fx.SplitWarning")
@pytest.mark.nightly
def test_a_cell_with_state_trains_as_plain_after_a_device_died(tmp_path: Path) -> None:
    want, losses = plain(6)
    module, given = cell(), batches(6)
    options = bb.Options("naive", micro_batches=1)
    made: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    with bb.machine(write_cluster(tmp_path))(
        module, example_batch=given[0], loss=loss, optimizer=made, options=options
    ) as session:
        targets = {op.target for op in session.plan.graph.ops}
        assert {"leaf.gate"} < targets
        assert any(target.startswith("leaf.forward_") for target in targets)
        found = [session.step(batch) for batch in given[:3]]
        pids = {e["device"]: e["pid"] for e in session.events if e["event"] == "started"}
        os.kill(pids["d0"], signal.SIGKILL)
        found += [session.step(batch) for batch in given[3:]]
    assert session.done is not None
    assert session.done.restarts == 1
    assert found == losses
    have = module.state_dict()
    assert [
        name for name, one in want.state_dict().items() if not torch.equal(one, have[name])
    ] == []


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.notes = {"of": (1, 2)}  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.a(x))))


def _split(model: nn.Module, out: Path) -> bb.Split:
    options = bb.Options("naive", micro_batches=1, leaves=("b",))
    recipe = bb.Recipe(optimizer=torch.optim.SGD)
    example = (torch.randn(4, 4), torch.randn(4, 4))
    return bb.split(
        model, cluster(2), out, options, example_batch=example, loss=_mean, recipe=recipe
    )


def _mean(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).square().mean()


@pytest.mark.filterwarnings("ignore::bigbrain_fx.SplitWarning")
def test_only_the_opaque_module_is_made_anew(tmp_path: Path) -> None:
    _split(Plain(), tmp_path / "bundle")
    text = (tmp_path / "bundle" / "functions.py").read_text()
    assert "'notes': {'of': (1, 2)}" in text
    assert text.count("Linear.__new__") == 1


def test_a_lock_is_refused_by_its_kind(tmp_path: Path) -> None:
    model = copy.deepcopy(Plain())
    model.b.lock = threading.Lock()  # type: ignore[assignment]
    with refused("BX3006") as error:
        _split(model, tmp_path / "bundle")
    assert "_thread.lock" in str(error.value)
    assert not (tmp_path / "bundle").exists()
