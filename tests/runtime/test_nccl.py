"""Messages of bundles over nccl, without a GPU: a gloo that behaves as nccl does, and fake streams.

What stays of it on a real one: that receives are asked for one at a time and waited for without a
timeout, that sends are waited for on a stream of their own, and that two ends that both send first
and then both receive go on.
"""

from __future__ import annotations

import os
import shutil
import threading
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bigbrain_fx.bundles.launch import Command, Process, RunOptions, popen, run
from bigbrain_fx.runtime import gpus, rendezvous, worker as workers
from bigbrain_fx.runtime.channel import Channel, Layout
from bigbrain_fx.runtime.control import Control
from bigbrain_fx.runtime.device import Device
from bigbrain_fx.runtime.gloo import AHEAD, ChannelEnd
from bigbrain_fx.runtime.gpus import GpuBackground, NcclTransport, prepare_cuda
from bigbrain_fx.runtime.network import Background
from bigbrain_fx.runtime.snapshots import OwnSnapshots
from tests.support.bundles import cluster, split_small
from tests.support.nccl_like import NCCL_LIKE

STEPS = 3
MICRO_BATCHES = 4  # of `split_small`
CHANNEL = Channel(0, "activation", "x", 0, 1, "a", "b", (2,), torch.float32)

# A receive over nccl is a kernel that runs until its message is there: so none may be asked for
# before the one before it is waited for, and `wait` must not be given a timeout, which would poll.
PROGRAM = f"""{NCCL_LIKE}
import runpy, sys

asked, waited = [], []


class Asked:
    def __init__(self, work):
        self.work = work
        assert not asked, "a receive was posted ahead"
        asked.append(self)

    def wait(self):
        asked.remove(self)
        waited.append(self)
        return self.work.wait()


def alone(backend, **others):
    init_like("nccl", **others)
    receive = dist.irecv
    dist.irecv = lambda *words, **more: Asked(receive(*words, **more))


dist.init_process_group = alone
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
print("receives:", len(waited), file=sys.stderr)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 3])
def test_a_bundle_trains_over_nccl_as_over_gloo(tmp_path: Path, count: int) -> None:
    """1F1B: in its middle two neighbours both send, and then both receive; weights are tied."""
    bundle = split_small(tmp_path, cluster(count))
    shutil.copy(gpus.__file__, bundle / "runtime")  # a bundle for CPUs has none
    (tmp_path / "program.py").write_text(PROGRAM)

    def spawn(command: Command) -> Process:
        python, *words = command.words
        return popen(replace(command, words=(python, str(tmp_path / "program.py"), *words)))

    options = RunOptions(STEPS, deadline_s=30.0)
    over_gloo = run(bundle, options)
    over_nccl = run(bundle, options, spawn=spawn)
    assert [step.loss for step in over_nccl.steps] == [step.loss for step in over_gloo.steps]
    assert len(over_nccl.steps) == STEPS
    waits = [int(log.read_text().split()[-1]) for log in over_nccl.logs.glob("*.log")]
    assert len(waits) == count
    assert min(waits) > STEPS * MICRO_BATCHES


# --------------------------------------------------------------------------- streams


@dataclass
class Gpu:
    """Stands in for torch.cuda: who waits on which stream, and what the host waits for."""

    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.current = threading.local()
        self.waits: list[tuple[str, tuple[object, ...]]] = []
        self.recorded: list[str] = []
        self.reached: list[int] = []
        self.is_waited_for, self.may_leave = threading.Event(), threading.Event()
        gpu = self

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self) -> None:
                self.number = len(gpu.recorded)
                gpu.recorded.append(gpu.stream())

            def synchronize(self) -> None:
                gpu.reached.append(self.number)
                if gpu.stream() != "computes":
                    gpu.is_waited_for.set()
                    assert gpu.may_leave.wait(20)

        def stream(device: torch.device, priority: int) -> str:
            assert priority < 0
            return f"a stream of {device}"

        self.monkeypatch.setattr(torch.cuda, "Event", Event)
        self.monkeypatch.setattr(torch.cuda, "Stream", stream)
        self.monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)

    def stream(self) -> str:
        return getattr(self.current, "name", "computes")

    def set_stream(self, name: str) -> None:
        self.current.name = name

    def work(self) -> Any:  # as dist.Work
        return SimpleNamespace(wait=lambda *words: self.waits.append((self.stream(), words)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def stop(background: Background) -> None:
    """End its threads."""
    for sends in background.queues.values():
        sends.under_way.put(None)


def test_sends_are_waited_for_on_a_stream_of_their_own(gpu: Gpu) -> None:
    """nccl's `wait` makes the current stream wait, the computing one unless another is."""
    background = GpuBackground(timedelta(seconds=20), torch.device("cuda", 1))
    background.keep(gpu.work(), torch.zeros(2), CHANNEL)
    drained = threading.Thread(target=background.drain, daemon=True)
    drained.start()
    assert gpu.is_waited_for.wait(20)
    assert drained.is_alive()  # the stream has not come so far: the payload is held
    gpu.may_leave.set()
    drained.join(20)
    assert not drained.is_alive()
    stop(background)
    assert gpu.waits == [("a stream of cuda:1", ())]
    assert gpu.recorded == ["a stream of cuda:1"]


def test_a_receive_is_waited_for_by_the_stream_that_computes(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This thread does not wait for it, but for the one that is AHEAD before it."""
    wires: list[torch.device] = []

    def empty(length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        wires.append(device)
        return torch.zeros(length, dtype=dtype)

    transport = NcclTransport({"a": 0, "b": 1}, torch.device("cuda", 1), 20.0)
    monkeypatch.setattr(torch, "empty", empty)
    line = ChannelEnd(CHANNEL, 0, layout=Layout((2,), (1,)))
    transport.lines[CHANNEL.tag] = line
    transport.device = torch.device("cpu")
    posted: list[int] = []

    def receive(payload: Tensor, peer: int, **_: object) -> Any:  # as dist.Work
        posted.append(payload.numel())
        return gpu.work()

    monkeypatch.setattr(dist, "irecv", receive)
    transport.begin_step(((CHANNEL, AHEAD + 2),))
    assert posted == []
    for count in range(1, AHEAD + 3):
        assert transport.recv(CHANNEL).shape == (2,)
        assert posted == [8] * count
        assert gpu.reached == list(range(max(0, count - AHEAD)))
    assert gpu.waits == [("computes", ())] * (AHEAD + 2)
    assert set(wires) == {torch.device("cuda", 1)}
    stop(transport.background)


# --------------------------------------------------------------------------- before CUDA starts

NAMES = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    monkeypatch.setattr(os, "environ", found)
    return found


def said(environment: dict[str, str]) -> list[str | None]:
    return [environment.get(name) for name in NAMES]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["cuda", "cuda"], ["EAGER", "32"]),
        (["cuda"], [None, None]),
        (["cuda", "cpu"], [None, None]),
    ],
)
def test_kernels_may_run_beside_messages(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    kinds: Sequence[str],
    expected: list[str | None],
) -> None:
    seen: list[list[str | None]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: seen.append(said(environment)))
    assert rendezvous.own_device(kinds, 0) == torch.device("cuda", 0)
    assert seen == [expected]


def test_cuda_settings_of_the_user_stay(environment: dict[str, str]) -> None:
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "16"
    prepare_cuda(["cuda", "cuda"])
    assert said(environment) == ["EAGER", "16"]


def test_nccl_starts_in_that_environment(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, seen = dist.HashStore(), list[object]()  # type: ignore[attr-defined]  # torch has it
    store = dist.PrefixStore("bigbrain/0", base)  # type: ignore[attr-defined]  # as above
    for key, value in (("plan/1", "p"), ("read/1", "1")):
        store.set(key, value)
    monkeypatch.setattr(rendezvous, "_tcp_store", lambda *_: base)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **_: seen.extend([backend, said(environment)])
    )
    rendezvous.join("p", ["cuda", "cuda"], 0, 5.0)
    assert seen == ["nccl", ["EAGER", "32"]]


# --------------------------------------------------------------------------- a step's time


def test_a_step_has_taken_what_its_loss_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `run_step` returns while its kernels are still to run; the loss waits for them."""
    clock, told = [0.0], list[dict[str, Any]]()

    class Loss:
        def __float__(self) -> float:
            clock[0] += 5.0
            return 2.5

    def run_step(_: int) -> Loss:
        clock[0] += 1.0
        return Loss()

    worker = workers.Worker.__new__(workers.Worker)
    about = {"begin": lambda *_, **__: True, "say": lambda _, **facts: told.append(facts)}
    worker.control = cast(Control, SimpleNamespace(**about, fed=False))
    worker.snapshots = cast(OwnSnapshots, SimpleNamespace(after_step=lambda *_: None))
    device = SimpleNamespace(run_step=run_step, empties_every=1, begins_empty=True)
    worker.device, worker.checkpoints, worker.recorder = cast(Device, device), None, None
    worker.options = cast(Namespace, SimpleNamespace(steps=1, first_gradients=None))
    monkeypatch.setattr(workers, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert worker._run(0)
    assert told == [{"step": 0, "loss": 2.5, "step_s": 6.0}]
