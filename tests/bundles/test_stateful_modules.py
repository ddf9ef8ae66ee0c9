"""Opaque modules of a split step whose calls go by what they have left in plain attributes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.bundles import RunOptions, run, verify
from bigbrain_fx.bundles.own_steps import require_no_state
from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.module_state import ModuleStates
from bigbrain_fx.runtime.state import State, StateError
from tests.support import warm
from tests.support.bundles import cluster, edit_last, split_small
from tests.support.messages import refused

MODEL = '''"""A module inside keeps a count, a state, a queue and a generator in attributes."""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.calls, self.hidden, self.past = nn.GRUCell(8, 8), 0, None, deque(maxlen=3)
        self.dice = torch.Generator().manual_seed(5)

    def forward(self, h):
        self.calls += 1
        hidden = torch.zeros(h.shape[0], 8) if self.hidden is None else self.hidden
        new = self.cell(h, hidden) * min(1.0, self.calls / 12)
        self.hidden = new.detach()
        for old in self.past:
            new = new - 0.1 * old
        self.past.append(h.detach().mean(0))
        return new + 0.01 * torch.randn(8, generator=self.dice)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.memory, self.b = nn.Linear(6, 8), Memory(), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(self.memory(torch.tanh(self.a(x))))


def model():
    return Net()


def batches(seed):
    while True:
        yield {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}


def example_batch():
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}


def loss(output, batch):
    return F.mse_loss(output, batch["y"])


def optimizer(named_params):
    return torch.optim.AdamW(named_params, lr=0.1)
'''
KILL = """import os


def kill_once(device, step):
    mark = Path(__file__).with_name("killed")
    if step == 4 and hasattr(device, "stateful") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)


HOOKS.on_step_end.append(kill_once)

if __name__"""
WARNED = "its calls go by what they leave in attributes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("stateful") / "model.py"
    file.write_text(MODEL)
    return file


@pytest.fixture(scope="module")
def made(model: Path) -> bb.Split:
    placed = Options("naive", pins=(("a", "d0"), ("memory", "d1"), ("b", "d1")))
    with pytest.warns(bb.SplitWarning, match=WARNED):
        return bb.split(model, cluster(), model.parent / "bundle", placed)


def train(bundle: Path, steps: int, *more: object) -> dict[str, torch.Tensor]:
    """Train in one process; return all tensors of all devices."""
    saved = bundle.parent / f"saved-{steps}-{len(more)}"
    words = ["--in-process", "--steps", str(steps), "--save", str(saved), *map(str, more)]
    command = [sys.executable, str(bundle / "train.py"), *words]
    warm.run(command, check=True, timeout=120, capture_output=True)
    return saved_in(saved)


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def test_the_module_is_opaque_and_the_others_are_split(made: bb.Split) -> None:
    plan = made.plan
    kept = [op for op in plan.graph.ops if op.state]
    assert [op.target for op in kept] == ["leaf.memory"]
    assert set(kept[0].state) == {"calls", "hidden", "past", "dice"}
    assert len(plan.stages.devices) == 2
    assert plan.micro_batches == 1  # more would move the state more often
    found = verify(made.bundle, steps=4)
    assert {check.word for check in found.checks} <= {"equal", "to rounding", "equal to rounding"}


def test_a_session_leaves_state_with_the_loop_that_may_set_it(made: bb.Split) -> None:
    with refused("BX2152d", bb.InputError):
        require_no_state(made.plan, is_open=True)
    with pytest.warns(bb.SplitWarning, match="an attribute .*, which the loop may read and set"):
        require_no_state(made.plan, is_open=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 4)
        self.h: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x, self.h)
        self.h = h.detach()
        found: torch.Tensor = self.out(h)
        return found


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::bigbrain_fx.SplitWarning")
def test_a_hidden_state_that_the_loop_resets_begins_anew() -> None:
    """The devices went on with theirs, in silence."""
    torch.manual_seed(0)
    net, data = Recurrent(), torch.randn(5, 8, 4)
    plain, example = copy.deepcopy(net), {"x": data[0]}
    own, other = (torch.optim.SGD(each.parameters(), 0.5) for each in (plain, net))
    with bb.machine(cluster())(
        net, example_batch=example, loss=error, optimizer=other, rehearse=False
    ) as session:
        for step, x in enumerate(data):
            if step == 3:
                net.h = plain.h = None
            own.zero_grad()
            value = error(plain(x), {"x": x})
            value.backward()
            own.step()
            assert session.step({"x": x}) == value.item()


def error(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (output - batch["x"]).square().mean()


@pytest.mark.nightly
def test_files_are_those_of_the_plan(made: bb.Split, tmp_path: Path) -> None:
    own = {"module_state.py", "plain_values.py", "own_dice.py"}
    plain = split_small(tmp_path)
    assert own <= {file.name for file in (made.bundle / "runtime").iterdir()}
    assert not own & {file.name for file in (plain / "runtime").iterdir()}
    texts = [(made.bundle / f"{name}.py").read_text() for name in ("device_d0", "device_d1")]
    assert sum("stateful = {'memory'" in t or 'stateful = {"memory"' in t for t in texts) == 1


@pytest.mark.nightly
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_numbers(made: bb.Split) -> None:
    commits = made.bundle.parent / "commits"
    expected = train(made.bundle, 7)
    train(made.bundle, 4, "--checkpoint-dir", commits, "--checkpoint-every", 2)
    assert same(expected, train(made.bundle, 7, "--checkpoint-dir", commits, "--resume"))


def test_a_killed_process_is_replaced_with_the_state_of_its_modules(
    made: bb.Split, tmp_path: Path
) -> None:
    expected = train(made.bundle, 7)
    edit_last(made.bundle / "train.py", "if __name__", KILL)
    options = RunOptions(
        steps=7,
        save=tmp_path / "saved",
        threads=1,
        logs=tmp_path / "logs",
        spares=1,
        snapshot_every=2,
    )
    done = run(made.bundle, options)
    assert done.restarts == 1
    assert same(expected, saved_in(tmp_path / "saved"))


def test_a_run_stays_with_its_split(made: bb.Split, tmp_path: Path) -> None:
    with refused("BX3167"):
        bb.resplit(made.bundle, cluster(1), tmp_path / "moved")


def test_state_that_is_no_data_any_more_stops_the_run() -> None:
    """Not at the split: a step that comes late keeps what a gradient flows through."""
    module = nn.Linear(2, 2)
    module.kept = torch.ones(2)
    device = SimpleNamespace(stateful={"m": ("kept",)}, modules={0: nn.ModuleDict({"m": module})})
    states = ModuleStates(device)
    assert set(states.taken()[1]) == {"user:m:0"}
    module.kept = module.weight.sum()
    with refused("BX5123", StateError):
        states.taken()


def test_state_moved_by_a_part_without_rows_is_put_back() -> None:
    module: Any = nn.Linear(2, 2)
    module.calls, module.kept = 3, torch.ones(2)
    held = {0: nn.ModuleDict({"m": module})}
    device = SimpleNamespace(stateful={"m": ("calls",)}, modules=held, device=torch.device("cpu"))
    with ModuleStates(device).aside():
        module.calls, module.late = 4, 1
        module.kept.add_(1)
    assert (module.calls, module.kept.tolist()) == (3, [1.0, 1.0])
    assert not hasattr(module, "late")


def test_a_state_of_another_split_is_refused() -> None:
    device = SimpleNamespace(
        stateful={"m": ("kept",)}, modules={0: nn.ModuleDict({"m": nn.ReLU()})}
    )
    states = ModuleStates(device)
    with refused("BX5121", StateError):
        states.required(State(0, {}, {}))
