"""A step that no trace can hold runs whole on one device, as the user wrote it."""

from __future__ import annotations

import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bigbrain_fx as bb
from bigbrain_fx.bundles import RunOptions, run, verify
from bigbrain_fx.bundles.opaque import with_one_micro_batch, with_opaque_step
from bigbrain_fx.errors import BigBrainError, CaptureError, InputError, NoPlanError
from bigbrain_fx.plan import Options, Plan
from tests.support import warm
from tests.support.bundles import cluster, edit_last

MODEL = '''"""Keeps a count, a state and a generator in attributes; hooks change its gradients."""

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn


def halve(parameter):
    parameter.grad.mul_(0.5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 4), nn.Dropout(0.1)
        self.calls, self.hidden, self.past = 0, None, deque(maxlen=3)
        self.dice = torch.Generator().manual_seed(5)
        self.a.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        self.b.weight.register_post_accumulate_grad_hook(halve)

    def forward(self, x):
        self.calls += 1
        h = torch.tanh(self.a(x)) + (0 if self.hidden is None else 0.1 * self.hidden)
        self.hidden = h.mean(0).detach()
        self.past.append(float(h.mean().detach()))
        y = self.b(self.drop(h)) * min(1.0, self.calls / 12) + sum(self.past)
        return y + 0.01 * torch.randn(4, generator=self.dice) + random.random()


def model():
    return Net()


def batches(seed):
    while True:
        rows = int(torch.randint(3, 9, ()))
        yield {"x": torch.randn(rows, 6), "y": torch.randn(rows, 4)}


def example_batch():
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}


def loss(output, batch):
    return F.mse_loss(output, batch["y"])


def optimizer(named_params):
    return torch.optim.AdamW(named_params, lr=0.1)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
'''
KILL = """import os


def kill_once(device, step):
    mark = Path(__file__).with_name("killed")
    if step == 4 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)


HOOKS.on_step_end.append(kill_once)

if __name__"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("opaque") / "model.py"
    file.write_text(MODEL)
    return file


@pytest.fixture(scope="module")
def made(model: Path) -> bb.Split:
    with pytest.warns(bb.SplitWarning, match="opaque.*BX0160"):
        return bb.split(model, cluster(), model.parent / "bundle")


def train(bundle: Path, steps: int, *more: object) -> dict[str, torch.Tensor]:
    """Train in one process; return all tensors."""
    saved = bundle.parent / f"saved-{steps}-{len(more)}"
    words = ["--in-process", "--steps", str(steps), "--save", str(saved), *map(str, more)]
    command = [sys.executable, str(bundle / "train.py"), *words]
    warm.run(command, check=True, timeout=120, capture_output=True)
    return load_file(saved / "d0.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def test_one_op_on_one_device_trains_as_a_plain_loop_does(made: bb.Split) -> None:
    plan = made.plan
    assert (plan.graph.is_opaque_step, plan.stages.devices, plan.micro_batches) == (
        True,
        ("d0",),
        1,
    )
    assert {param.name for param in plan.graph.params} == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    }
    found = verify(made.bundle, steps=4)
    assert [check.word for check in found.checks] == ["equal"] * 3


@pytest.mark.nightly
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_numbers(made: bb.Split) -> None:
    commits = made.bundle.parent / "commits"
    expected = train(made.bundle, 7)
    train(made.bundle, 4, "--checkpoint-dir", commits, "--checkpoint-every", 2)
    assert same(expected, train(made.bundle, 7, "--checkpoint-dir", commits, "--resume"))


@pytest.mark.nightly
def test_a_killed_process_is_replaced_and_the_run_says_what_began_anew(
    made: bb.Split, tmp_path: Path
) -> None:
    expected = train(made.bundle, 7)
    edit_last(made.bundle / "train.py", "if __name__", KILL)
    heard: list[str] = []
    options = RunOptions(
        steps=7,
        save=tmp_path / "saved",
        threads=1,
        logs=tmp_path / "logs",
        spares=1,
        snapshot_every=2,
    )
    done = run(made.bundle, options, on_event=lambda event: heard.append(str(event)))
    assert done.restarts == 1
    assert same(expected, load_file(tmp_path / "saved" / "d0.safetensors"))
    assert any("'warned'" in event and "begins anew" in event for event in heard)


CRITERION = '''"""Weights of two tasks are the criterion's own, and the optimizer has them."""

import torch
import torch.nn.functional as F
from torch import nn

weights = nn.Parameter(torch.ones(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def model():
    return Net()


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        yield {"x": torch.randn(8, 6, generator=dice), "y": torch.randn(8, 4, generator=dice)}


def loss(output, batch):
    terms = torch.stack([F.mse_loss(output, batch["y"]), output.abs().mean()])
    return (terms / weights.square()).sum() + weights.square().log1p().sum()


def optimizer(named_params):
    groups = [{"params": [p for _, p in named_params]}, {"params": [weights], "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.1)
'''


def plainly(path: Path, steps: int) -> dict[str, torch.Tensor]:
    """Train in a loop that zeroes what the optimizer steps."""
    file: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(path.read_text(), file)
    torch.manual_seed(0)
    net, data = file["model"](), file["batches"](0)
    optimizer = file["optimizer"](list(net.named_parameters()))
    for batch in islice(data, steps):
        optimizer.zero_grad()
        file["loss"](net(batch["x"]), batch).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


def test_parameters_of_a_criterion_are_zeroed_kept_and_restored(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CRITERION)
    with pytest.warns(bb.SplitWarning, match="opaque.*BX2137"):
        made = bb.split(tmp_path / "model.py", cluster(), tmp_path / "bundle")
    expected = plainly(tmp_path / "model.py", 6)
    assert same(expected, train(made.bundle, 6))
    commits = tmp_path / "commits"
    train(made.bundle, 4, "--checkpoint-dir", commits, "--checkpoint-every", 2)
    assert same(expected, train(made.bundle, 6, "--checkpoint-dir", commits, "--resume"))


def test_no_replicas_of_a_criterion_with_parameters(tmp_path: Path) -> None:
    """Each would train its own."""
    (tmp_path / "model.py").write_text(CRITERION)
    with pytest.raises(BigBrainError) as caught:
        bb.split(tmp_path / "model.py", cluster(), tmp_path / "bundle", Options(replicas=2))
    assert "a parameter that the model does not have" in str(caught.value)


def test_strict_refuses_as_a_trace_does(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as caught:
        bb.split(model, cluster(), tmp_path / "out", Options(strict=True))
    assert caught.value.family == "BX0160"
    assert caught.value.help
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- which refusals


def refused(error: BigBrainError, *, of_code: bool = True) -> BigBrainError:
    error.of_code = of_code
    return error


@pytest.mark.parametrize(
    ("error", "options", "may_run"),
    [
        (refused(CaptureError("hooks", code="BX0170")), Options(), True),
        (refused(InputError("what nobody traces", code="BX2000")), Options(), True),
        (refused(InputError("no such file", code="BX2000"), of_code=False), Options(), False),
        (refused(InputError("without a seed", code="BX2046")), Options(), False),
        (refused(CaptureError("hooks", code="BX0170")), Options(strict=True), False),
        (refused(CaptureError("hooks", code="BX0170")), Options(mode="eval"), False),
        (refused(CaptureError("hooks", code="BX0170")), Options(zero_stage=1), False),
        (refused(CaptureError("hooks", code="BX0170")), Options(compiled=True), False),
    ],
)
def test_code_that_runs_is_not_turned_away(
    error: BigBrainError, options: Options, may_run: bool
) -> None:
    def make(refusal: BigBrainError | None) -> str:
        if refusal is None:
            raise error
        return refusal.what

    if may_run:
        assert with_opaque_step(options, make) == error.what
    else:
        with pytest.raises(type(error), match=error.what):
            with_opaque_step(options, make)


@pytest.mark.parametrize(("options", "tries"), [(Options(), 1), (Options(micro_batches=2), 2)])
def test_one_micro_batch_is_split_before_a_step_is_opaque(options: Options, tries: int) -> None:
    asked = list[int | None]()

    def make(options: Options, refusal: BigBrainError | None) -> str:
        asked.append(options.micro_batches)
        if options.micro_batches != 1:
            raise refused(InputError("fails on 2 of 4 rows", code="BX2104"))
        return "split"

    one = partial(with_one_micro_batch, options, make, lambda made, note: f"{made}; {note}", None)
    if tries == 1:
        with pytest.raises(InputError):
            one(is_open=True)
    else:
        assert one(is_open=True).endswith("2 cannot be run: fails on 2 of 4 rows")
    assert asked == [None] if tries == 1 else [2, 1]


def test_a_refusal_says_why_no_device_can_run_a_step() -> None:
    def make(refusal: BigBrainError | None) -> Plan:
        if refusal is None:
            raise refused(CaptureError("hooks", code="BX0170", help="take them out"))
        raise NoPlanError("too little memory", code="BX1300", notes=("d0 lacks 1 GiB",))

    with pytest.raises(CaptureError) as caught:
        with_opaque_step(Options(), make)
    assert caught.value.code == "BX0170"
    assert "too little memory" in caught.value.notes[0]
    assert caught.value.notes[1:] == ("d0 lacks 1 GiB",)
    assert caught.value.help == "take them out"


# ------------------------------------------------------------------ sparse tensors

GRAPH = '''"""Kipf and Welling's graph convolution, whose adjacency is a sparse tensor."""

import torch
import torch.nn.functional as F
from torch import nn

_edges = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
ADJACENCY = torch.sparse_coo_tensor(_edges, torch.ones(6), (6, 6)).coalesce()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)
        HELD

    def forward(self, x, adjacency=ADJACENCY):
        adjacency = getattr(self, "adjacency", adjacency)
        return torch.spmm(adjacency, self.b(torch.relu(torch.spmm(adjacency, self.a(x)))))


def model():
    return Net()


def batches(seed):
    while True:
        yield {"x": torch.randn(6, 3), "y": torch.randn(6, 4)ENTRY}


def example_batch():
    return next(batches(0))


def loss(output, batch):
    return F.mse_loss(output, batch["y"])


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=0.1)
'''


@pytest.mark.gate("buffer")
@pytest.mark.parametrize(
    ("held", "entry", "code"),
    [
        ('self.register_buffer("adjacency", ADJACENCY)', "", "BX2117"),
        ("pass", ', "adjacency": ADJACENCY', "BX2169"),
        ("pass", "", "BX0199g"),
    ],
    ids=["buffer", "entry", "constant"],
)
def test_a_sparse_adjacency_trains_as_in_a_plain_loop(
    tmp_path: Path, held: str, entry: str, code: str
) -> None:
    file = tmp_path / "gcn.py"
    file.write_text(GRAPH.replace("HELD", held).replace("ENTRY", entry))
    made = bb.split(file, cluster(2), tmp_path / "b", Options("naive"))
    assert made.plan.graph.is_opaque_step  # one statement has it, and all modules
    assert code in made.warnings[0]
    found = verify(made.bundle, steps=3)
    assert found.passed, str(found)
