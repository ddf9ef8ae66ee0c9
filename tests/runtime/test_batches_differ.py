"""`batches` that gives other data in one process than in another ends the run, and says where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbrain_fx.bundles.launch import RunOptions, run
from bigbrain_fx.errors import InputError
from bigbrain_fx.runtime import Device
from bigbrain_fx.runtime.compared_stream import Subject
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.local import Hub, LocalTransport
from bigbrain_fx.runtime.stream import BatchError
from bigbrain_fx.supervisor import FailedError
from tests.support.bundles import copied, edit
from tests.support.replayed import Fault, supervised

NAMES = ("d0", "d1")
REMEDY = "every process must get the same from batches(seed)"


def differing(bundle: Path, folder: Path, change: str) -> Path:
    """Return a bundle whose `rows` are changed before they are given out."""
    copy = copied(bundle, folder)
    edit(copy / "training.py", "        yield {", f"        {change}\n        yield {{")
    edit(copy / "training.py", "import itertools", "import itertools\nimport os")
    return copy


OF_PROCESS = "rows = rows if step < 2 else (rows + os.getpid()) % 27"


def test_in_processes_without_a_supervisor(trained_bundle: Path, tmp_path: Path) -> None:
    copy = differing(trained_bundle, tmp_path, OF_PROCESS)
    with pytest.raises(
        InputError, match="the batch of step 2 differs between devices: d"
    ) as failed:
        run(copy, RunOptions(4, deadline_s=60.0, logs=tmp_path / "logs"))
    assert REMEDY in str(failed.value)


@pytest.mark.nightly
def test_under_a_supervisor(trained_bundle: Path, tmp_path: Path) -> None:
    copy = differing(trained_bundle, tmp_path, OF_PROCESS)
    assert "the batch of step 2 differs between devices" in refusal(copy, tmp_path, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("device", NAMES)
def test_in_a_replacement_only(trained_bundle: Path, tmp_path: Path, device: str) -> None:
    """Those who live have read what it now reads otherwise, in steps that are long over."""
    first = "'faults/struck-0'"  # is there once the first process has died
    change = f"rows = rows if step != 3 or not os.path.exists({first}) else (rows + 1) % 27"
    copy = differing(trained_bundle, tmp_path, change)
    text = refusal(copy, tmp_path, 8, [Fault(device, 5, 0)], every=100)
    assert "the batch of step 3 differs" in text
    assert REMEDY in text


def refusal(
    bundle: Path, folder: Path, steps: int, faults: Sequence[Fault] = (), **options: Any
) -> str:
    """Return what a device says of a run that is not worth another try."""
    with pytest.raises(FailedError, match="its input cannot be used") as failed:
        supervised(bundle, folder / "run", NAMES, steps, faults, **options)
    assert failed.value.death.code == 2
    return str(failed.value.death.text)


def test_one_device_is_compared_with_the_process_before_it(tmp_path: Path) -> None:
    hub = Hub()
    before, after = LocalTransport(hub), LocalTransport(hub)
    before.agree(Subject(7), "1234", "d0")
    with pytest.raises(BatchError, match="differs before d0 was replaced: d0 has 1234, d0 has 56"):
        after.agree(Subject(7), "56", "d0")


class Reader(Device):
    """Reads the batch, or does not."""

    names = ("d0",)
    reads = True

    def step_once(self) -> None:
        for _ in range(3 if self.reads else 0):
            self.batch("x", 0)


def reader(reads: bool, said: list[Subject], fill: Callable[[int], float]) -> Reader:
    class Listening(LocalTransport):
        def agree(self, what: Subject, digest: str, device: str) -> None:
            said.append(what)
            super().agree(what, digest, device)

    stream = Stream(
        lambda _: ({"x": torch.full((2,), fill(step))} for step in range(9)),
        0, {"x": ("x",)}, (), 1, torch.device("cpu"),
    )  # fmt: skip
    device = Reader(Listening(Hub()), stream, 0, torch.device("cpu"))
    device.reads = reads
    return device


def test_readers_of_a_batch_report_once_a_step() -> None:
    said: list[Subject] = []
    for reads in (True, False):
        device = reader(reads, said, float)
        device.run_step(0)
        device.run_step(1)
    assert said == [Subject(step) for step in (0, 1)]


def test_old_comparisons_are_forgotten() -> None:
    transport = LocalTransport(Hub())
    for step in range(1000):
        transport.agree(Subject(step), str(step), "d0")
    assert len(transport.hub.digests) < 100
