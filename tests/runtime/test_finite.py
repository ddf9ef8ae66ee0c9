"""Losses and gradients that are not finite: the run stops and says where, or all skip it."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from bigbrain_fx.bundles.launch import Run, RunOptions, run
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.runtime.finite import NOT_FINITE, not_finite
from bigbrain_fx.supervisor import Event
from tests.supervisor.test_replay_bundle import python
from tests.support.bundles import copied, edit, edit_last, split_small
from tests.support.killing import kill_once

POISON = """
def poison(device, channel, tensor):
    \"\"\"Spoil the first activation that the second device receives in step 2.\"\"\"
    if device.name == "d1" and device.step == 2 and channel.kind == "activation":
        tensor.detach().fill_(float("nan"))


HOOKS.on_recv.append(poison)

if __name__"""
BIG = 3e38  # the sum of two is not finite


# --------------------------------------------------------------------------- what is looked at


def test_the_micro_batch_of_a_loss_is_named() -> None:
    losses = {0: torch.tensor(1.0), 1: torch.tensor(float("inf"))}
    found = not_finite(7, 2, losses, {})
    assert found == "step 7, stage 2, micro-batch 1: the loss is inf, not a finite number"


def test_the_stage_and_parameter_of_a_gradient_are_named() -> None:
    gradients = {
        ("a", 0): torch.ones(3),
        ("b", 1): torch.tensor([0.0, float("nan")]),
        ("c", 1): torch.ones(2, dtype=torch.bfloat16),
    }
    found = not_finite(0, None, {}, gradients)
    assert found == "step 0, stage 1: the gradient of b is not finite"


def test_numbers_of_unlike_dtypes_are_told_apart() -> None:
    gradients = {
        ("a", 0): torch.ones(3),
        ("b", 0): torch.ones(2, dtype=torch.bfloat16),
        ("c", 0): torch.full((2,), 1e300, dtype=torch.float64),  # beyond float32
        ("d", 0): torch.ones(2, dtype=torch.complex64),
    }
    losses = {0: torch.tensor([1.0]), 1: torch.tensor([2.0])}  # one element, though no scalar
    assert not_finite(0, 0, losses, gradients) is None
    for name in gradients:
        wrong = {key: g / 0.0 if key == name else g for key, g in gradients.items()}
        found = not_finite(3, 0, losses, wrong)
        assert found == f"step 3, stage 0: the gradient of {name[0]} is not finite"
    found = not_finite(3, 0, {**losses, 2: torch.tensor([-float("inf")])}, gradients)
    assert found is not None
    assert "micro-batch 2: the loss is -inf," in found


class Asked(TorchDispatchMode):
    """Counts kernels by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.kernels[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_device_is_asked_once_whether_all_is_well() -> None:
    gradients = {(f"p{i}", 0): torch.ones(2) for i in range(20)}
    with Asked() as asked:
        assert not_finite(0, 0, {micro: torch.tensor(1.0) for micro in range(8)}, gradients) is None
    assert asked.kernels["sum"] == 20
    assert asked.kernels["stack"] == 2  # of losses and of sums; each is then waited for
    assert not asked.kernels.keys() & {"isfinite", "abs", "eq", "ne", "_local_scalar_dense"}


def test_a_sum_that_overflows_is_no_gradient_that_does() -> None:
    large = {("a", 0): torch.tensor([BIG, BIG]), ("b", 0): torch.full((4,), 60000.0).half()}
    assert not torch.isfinite(large["a", 0].sum())
    assert not_finite(0, 0, {0: torch.tensor(1.0)}, large) is None


# --------------------------------------------------------------------------- bundles


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finite")
    made = split_small(folder)
    edit_last(made / "train.py", "if __name__", POISON.lstrip("\n"))
    return made


def in_process(bundle: Path, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    return python(bundle, "train.py", "--in-process", "--json", "--steps", str(steps), *more)


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.stem}:{name}": tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same(one: Path, other: Path) -> None:
    first, second = trained(one), trained(other)
    assert first.keys() == second.keys()
    assert first
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.nightly
def test_a_run_stops_and_says_where(bundle: Path) -> None:
    done = in_process(bundle, 5)
    assert done.returncode == NOT_FINITE
    assert "step 2, stage 1, micro-batch 0: the loss is nan" in done.stderr
    assert "(device d1)" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 2  # steps


def test_a_supervised_run_stops_at_once_and_says_what_to_do(bundle: Path) -> None:
    events: list[Event] = []
    with pytest.raises(BigBrainError, match="same numbers would come again") as caught:
        run(bundle, RunOptions(5, spares=0), on_event=events.append)
    text = str(caught.value)
    assert "step 2, stage 1, micro-batch 0" in text
    assert "--on-nan skip" in text
    assert not [event for event in events if event["event"] == "assigned"]


def skipped(bundle: Path, steps: int, folder: Path, **more: object) -> tuple[Run, list[Event]]:
    events: list[Event] = []
    options = RunOptions(steps, save=folder, on_nan="skip", **more)  # type: ignore[arg-type]
    return run(bundle, options, on_event=events.append), events


@pytest.mark.nightly
def test_all_devices_skip_the_update_however_they_run(bundle: Path, tmp_path: Path) -> None:
    """In one process, as processes, and supervised with one killed right after the vote."""
    plain = in_process(bundle, 5, "--on-nan", "skip", "--save", str(tmp_path / "one"))
    assert plain.returncode == 0, plain.stderr
    losses = [json.loads(line)["loss"] for line in plain.stdout.splitlines()]
    assert [loss != loss for loss in losses] == [False, False, True, False, False]

    done, _ = skipped(bundle, 5, tmp_path / "processes")
    assert [str(line.loss) for line in done.steps] == list(map(str, losses))
    assert_same(tmp_path / "one", tmp_path / "processes")

    killed = copied(bundle, tmp_path)
    kill_once(killed)
    edit(killed / "train.py", "from pathlib", "import os\nfrom pathlib")
    done, events = skipped(killed, 5, tmp_path / "replayed", spares=0, snapshot_every=2)
    assert done.restarts == 1
    found = [(e["step"], e["devices"]) for e in events if e["event"] == "skipped"]
    assert found == [(2, "d0, d1")]
    assert_same(tmp_path / "one", tmp_path / "replayed")


@pytest.mark.nightly
def test_a_skipped_update_changes_nothing(bundle: Path, tmp_path: Path) -> None:
    for steps in (2, 3):
        words = ("--on-nan", "skip", "--save", str(tmp_path / str(steps)))
        assert in_process(bundle, steps, *words).returncode == 0
    assert_same(tmp_path / "2", tmp_path / "3")


@pytest.mark.nightly
def test_non_finite_losses_can_be_ignored(bundle: Path) -> None:
    done = in_process(bundle, 4, "--on-nan", "ignore")
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines()]
    assert [loss != loss for loss in losses] == [False, False, True, True]
