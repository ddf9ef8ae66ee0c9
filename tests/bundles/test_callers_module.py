"""The caller's own objects in a loop: tensors held from before, gradients, options of the loss."""

from __future__ import annotations

import copy
import io
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import bigbrain_fx as bb
from bigbrain_fx.bundles.callers.constants import Constants
from bigbrain_fx.bundles.callers.module import CallersModule
from bigbrain_fx.bundles.callers.optimizer import CallersOptimizer
from tests.support.command_line import write_cluster
from tests.support.messages import refused

# --------------------------------------------------------------------------- tensors


class Held:
    """A module whose weights "of now" are all `value`."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.weight: nn.Parameter = self.module[0].get_parameter("weight")
        self.reads, self.value = 0, 1.0
        self.caller = CallersModule(self.module, self.refresh).enter()

    def refresh(self) -> None:
        self.reads += 1
        with torch.no_grad():
            self.weight.fill_(self.value)


READS: dict[str, Callable[[Held], Any]] = {
    "held before": lambda held: held.weight.sum(),
    "data of one": lambda held: held.weight.data.sum(),
    "transposed": lambda held: held.weight.T.sum(),
    "by the module": lambda held: dict(held.module.named_parameters())["0.weight"].sum(),
    "a state": lambda held: held.module.state_dict()["0.weight"].sum(),
    "a copy": lambda held: copy.deepcopy(held.module)[0].get_parameter("weight").sum(),
    "in a list": lambda held: torch._foreach_norm([held.weight], 1)[0],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_tensor_that_is_read_has_the_weights_of_now(read: Callable[[Held], Any]) -> None:
    held = Held()
    assert float(read(held).detach()) == 6
    held.value = 2.0
    assert float(read(held).detach()) == 12
    held.caller.leave()
    held.value = 3.0
    assert float(read(held).detach()) == 12


def test_the_form_of_a_tensor_is_read_without_its_numbers() -> None:
    held = Held()
    trained = [p for p in held.module.parameters() if p.requires_grad and p.is_leaf]
    assert trained[0].shape == (3, 2)
    assert not held.reads
    assert isinstance(held.weight, nn.Parameter)


def test_a_copy_is_plain_and_a_saved_module_is_too() -> None:
    held = Held()
    file = io.BytesIO()
    torch.save(held.module, file)
    file.seek(0)
    for made in (copy.deepcopy(held.module), torch.load(file, weights_only=False)):
        kinds = {type(t) for t in (*made.parameters(), *made.buffers())}
        assert kinds == {nn.Parameter, Tensor}
    held.caller.leave()
    assert type(held.weight) is nn.Parameter


CLIPS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "norm": lambda found: nn.utils.clip_grad_norm_(found, 1.0),
    "value": lambda found: nn.utils.clip_grad_value_(found, 1.0),
    "logged": lambda found: [float(p.grad.norm()) for p in found if p.grad is not None],
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS.keys())
def test_a_use_of_gradients_is_refused(clip: Callable[[list[nn.Parameter]], object]) -> None:
    held = Held()
    with refused("BX3193"):
        clip(list(held.module.parameters()))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_set_to_zero(to_none: bool) -> None:
    held = Held()
    SGD(held.module.parameters(), lr=0.1).zero_grad(set_to_none=to_none)
    held.module.zero_grad(set_to_none=to_none)


def test_a_step_of_what_the_loss_alone_has_is_refused() -> None:
    """Its gradient is on no device: an optimizer would skip it without a word."""
    module, centres = nn.Linear(2, 3), nn.Parameter(torch.zeros(3))
    held = CallersModule(module, lambda: None).enter({"centres": centres})
    optimizer = SGD([centres], lr=0.1)
    with refused("BX3193a"):
        optimizer.step()
    centres.grad = torch.ones(3)  # of a backward of the loop's own, as of a critic
    optimizer.step()
    assert torch.equal(centres.detach(), torch.full((3,), -0.1))
    centres.grad = None
    held.leave()
    optimizer.step()


def test_parameters_that_the_loss_alone_has_are_found() -> None:
    module, centres, frozen = nn.Linear(2, 3), nn.Parameter(torch.zeros(3)), torch.ones(3)

    def loss(output: Tensor, _: Tensor) -> Tensor:
        return ((output - centres) * frozen).square().mean() + module.weight.square().sum()

    example = torch.randn(4, 2), torch.zeros(4)
    held = {"centres": centres.detach(), "frozen": frozen}
    found = Constants(module, example, loss, None, held).module.others()
    assert [id(tensor) for tensor in found.values()] == [id(centres)]


# --------------------------------------------------------------------------- the optimizer


def stepped(held: Held) -> tuple[Optimizer, list[int], list[str]]:
    made, steps, given = SGD(held.module.parameters(), lr=0.1), [0], list[str]()
    callers = CallersOptimizer(made, is_set_there=False)
    callers.enter(held.caller.unread, lambda: steps[0], lambda: given.append("state"))
    return made, steps, given


def test_a_step_of_the_callers_optimizer_does_nothing_once_a_batch() -> None:
    made, steps, given = stepped(held := Held())
    for _ in range(3):
        steps[0] += 1
        made.step()
    made.state_dict()
    assert {*given} == {"state"}
    assert not held.reads


def test_a_step_of_several_batches_is_refused() -> None:
    made, steps, _ = stepped(Held())
    steps[0] = 4
    with refused("BX3195"):
        made.step()


def test_a_step_by_gradients_of_this_process_is_refused() -> None:
    held = Held()
    made, steps, _ = stepped(held)
    held.weight.square().sum().backward()
    steps[0] = 1
    with refused("BX3194"):
        made.step()
    assert float(held.weight.detach().sum()) == 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.teacher = nn.Linear(4, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.norm(self.a(x)))) + self.teacher(x).mean(1, keepdim=True)


def error(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


@pytest.mark.gate
def test_a_session_leaves_weights_average_and_optimizer_as_plain_pytorch(tmp_path: Path) -> None:
    """Afterwards both go on in this process with the same numbers."""
    batches = batches_of(4)
    found = []
    for machine in (None, bb.machine(write_cluster(tmp_path))):
        torch.manual_seed(0)
        model = Net()
        model.norm.eval()  # its statistics are frozen
        held, made = list(model.parameters()), AdamW(model.parameters(), lr=0.05)
        means = [p.detach().clone() for p in held]
        session: Any = machine and machine(
            model, example_batch=batches[0], loss=error, optimizer=made, rehearse=False
        )
        for batch in batches[:3]:
            plain_step(model, made, batch) if session is None else session.step(batch)
            for mean, weight in zip(means, held, strict=True):
                mean.lerp_(weight.detach(), 0.5)
        between = made.state_dict()["state"][0]["exp_avg"].clone()
        if session is not None:
            session.close()
        plain_step(model, made, batches[3])
        found.append([between, *means, *model.state_dict().values()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", [partial(AdamW, lr=0.05), partial(SGD, lr=0.1, momentum=0.9)])
@pytest.mark.nightly
def test_an_optimizer_that_has_made_steps_goes_on_in_a_session(
    kind: Callable[..., Optimizer], tmp_path: Path
) -> None:
    """Two steps in plain PyTorch, a checkpoint, two in a session, two in another one."""
    batches = batches_of(6)
    torch.manual_seed(0)
    model = Net()
    made = kind(model.parameters())
    plain, again = copy.deepcopy((model, made)), Net()
    for batch in batches:
        plain_step(*plain, batch)
    for batch in batches[:2]:
        plain_step(model, made, batch)
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(made.state_dict())
    again.load_state_dict(saved)
    made = kind(again.parameters())
    made.load_state_dict(state)
    machine = bb.machine(write_cluster(tmp_path))
    for part in (batches[2:4], batches[4:]):
        about: Any = {"loss": error, "optimizer": made, "rehearse": False}
        with machine(again, example_batch=part[0], **about) as session:
            for batch in part:
                session.step(batch)
    weights = zip(plain[0].state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    one, other = (each.state_dict() for each in (plain[1], made))
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, kept in one["state"].items():
        assert all(torch.equal(kept[key], other["state"][number][key]) for key in kept)


def clamp(model: Net, _n: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def average(model: Net, _n: int) -> None:
    with torch.no_grad():
        model.teacher.weight.lerp_(model.a.weight, 0.1)


def reset(model: Net, n: int) -> None:
    if n == 1:
        model.b.load_state_dict({"weight": torch.ones(1, 8), "bias": torch.ones(1)})


def scale(model: Net, _n: int) -> None:
    model.norm.get_buffer("running_var").mul_(0.9)


def batches_of(steps: int) -> list[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 4, generator=dice), "y": torch.randn(8, 1, generator=dice)}
        for _ in range(steps)
    ]


@pytest.mark.gate("clamp")
@pytest.mark.parametrize("write", [clamp, average, reset, scale], ids=lambda f: f.__name__)
def test_writes_of_the_loop_into_its_module_reach_the_devices(
    write: Callable[[Net, int], None], tmp_path: Path
) -> None:
    """As a WGAN's clamp, a teacher's average, a reset of a layer; with a device that is killed."""
    found = []
    for machine in (None, bb.machine(write_cluster(tmp_path))):
        torch.manual_seed(0)
        model = Net()
        made = SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
        about: Any = {"loss": error, "optimizer": made, "rehearse": False}
        about["options"] = bb.Options("naive", micro_batches=1)
        session: Any = machine and machine(model, example_batch=batches_of(1)[0], **about)
        for n, batch in enumerate(batches_of(5)):
            plain_step(model, made, batch) if session is None else session.step(batch)
            write(model, n)
            if session is not None and n == 2:
                kill_one(session)
        if session is not None:
            session.close()
            assert any(event["event"] == "died" for event in session.events)
        found.append(list(model.state_dict().values()))
    assert all(map(torch.equal, *found))


def kill_one(session: Any) -> None:
    pids = {e["device"]: e["pid"] for e in session.events if e["event"] == "started"}
    os.kill(pids["d1"], signal.SIGKILL)


@pytest.mark.nightly
def test_weights_of_an_earlier_step_take_no_writes(tmp_path: Path) -> None:
    machine = bb.machine(write_cluster(tmp_path))
    model = Net()
    pins = (("a", "d0"), ("b", "d1"))
    options = bb.Options("naive", micro_batches=2, asynchronous="2bw", pins=pins)
    about: Any = {"loss": error, "rehearse": False, "options": options}
    with machine(model, example_batch=batches_of(1)[0], **about) as session:
        session.step(batches_of(1)[0])
        clamp(model, 0)
        with refused("BX2152a", bb.InputError):
            session.step(batches_of(1)[0])


def test_a_write_that_no_device_has_is_not_saved(tmp_path: Path) -> None:
    machine = bb.machine(write_cluster(tmp_path))
    model = Net()
    about: Any = {"loss": error, "rehearse": False}
    with machine(model, example_batch=batches_of(1)[0], **about) as session:
        session.step(batches_of(1)[0])
        session.save(tmp_path / "first.safetensors")  # nothing has read the model since
        clamp(model, 0)
        with refused("BX3197", bb.InputError):
            session.save(tmp_path / "model.safetensors")
        assert float(session.eval().get_parameter("a.weight").detach().max()) <= 0.31


def plain_step(model: Net, optimizer: Optimizer, batch: dict[str, Tensor]) -> None:
    optimizer.zero_grad()
    error(model(batch["x"]), batch).backward()
    optimizer.step()


# --------------------------------------------------------------------------- what the loss reads

SCALE = 1.0
TABLE = {"scale": 1.0}


class Scaled:
    """A loss with an option, as an object, and as a method of what else has one."""

    def __init__(self) -> None:
        self.scale, self.calls = 1.0, 0

    def __call__(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.scale * output.square().mean()

    def compute(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.times(output.square().mean())

    def times(self, value: Tensor) -> Tensor:
        return value * self.scale


class ScaledModule(nn.Module):
    """The same, as torch's own losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self.scale * output.square().mean()


def of_global(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return SCALE * output.square().mean()


def of_table(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return TABLE["scale"] * output.square().mean()


def through(output: Tensor, batch: dict[str, Tensor], named: str) -> Tensor:
    return of_table(output, batch) if named else output.mean()


def of_closure() -> tuple[Callable[..., Tensor], Callable[[float], None]]:
    scale = 1.0

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return scale * output.square().mean()

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return loss, put


def losses() -> dict[str, tuple[Any, Callable[[float], None]]]:
    made, module = Scaled(), ScaledModule()

    def put_table(value: float) -> None:
        TABLE["scale"] = value

    return {
        "a global": (of_global, lambda value: globals().update(SCALE=value)),
        "a closure": of_closure(),
        "a table": (of_table, put_table),
        "a function that it calls": (partial(through, named="y"), put_table),
        "an object": (made, partial(setattr, made, "scale")),
        "a method": (made.compute, partial(setattr, made, "scale")),
        "a module": (module, partial(setattr, module, "scale")),
    }


@pytest.mark.parametrize("name", losses())
def test_an_option_of_the_loss_that_the_loop_changes_is_refused(name: str) -> None:
    """As the weight of a term that grows over epochs: a trace has that of the beginning."""
    loss, put = losses()[name]
    put(1.0)
    batch: dict[str, object] = {"input": torch.ones(8, 4)}
    constants = Constants(nn.Linear(4, 4), batch, loss, None)
    constants.required(batch)
    put(0.5)
    with refused("BX2152b", bb.InputError):
        constants.required(batch)
    put(1.0)
    constants.required(batch)


@pytest.mark.parametrize("through", ["in place", "data"])
def test_a_teacher_of_the_loss_that_the_loop_updates_is_refused(through: str) -> None:
    """As in BYOL, DINO and mean teachers: devices would keep the teacher of the beginning."""
    teacher = nn.Linear(4, 4).requires_grad_(False)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, teacher(batch["input"]))

    batch: dict[str, object] = {"input": torch.ones(8, 4)}
    constants = Constants(nn.Linear(4, 4), batch, loss, None)
    constants.required(batch)
    weight = teacher.weight.data if through == "data" else teacher.weight
    weight.lerp_(torch.ones(4, 4), 0.1)
    with refused("BX2152b", bb.InputError):
        constants.required(batch)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "type": lambda module: module.half(),
    "mode": lambda module: module.get_submodule("1").eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_type_or_mode_is_refused(change: Callable[[nn.Module], object]) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch: dict[str, object] = {"input": torch.ones(8, 4)}
    constants = Constants(module, batch, Scaled(), None)
    constants.required(batch)
    module.eval()  # a validation: devices train all the same
    constants.required(batch)
    module.train()
    change(module)
    with refused("BX2152", bb.InputError):
        constants.required(batch)


def test_a_name_that_counts_nothing_may_change() -> None:
    made = Scaled()
    batch: dict[str, object] = {"input": torch.ones(8, 4)}
    constants = Constants(nn.Linear(4, 4), batch, made, None)
    for made.calls in range(40):
        constants.required(batch)


def test_a_step_under_autocast_is_refused_unless_the_devices_have_it() -> None:
    batch: dict[str, object] = {"input": torch.ones(8, 4)}
    with torch.autocast("cpu", torch.bfloat16):
        with refused("BX3196"):
            Constants(nn.Linear(4, 4), batch, Scaled(), None).require_autocast()
        Constants(nn.Linear(4, 4), batch, Scaled(), "bfloat16").require_autocast()
