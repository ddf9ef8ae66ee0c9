"""Profiling on devices: what a stopwatch tells, where tensors land, which device is meant."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigbrain_fx.core import Op
from bigbrain_fx.costs.profiles import ProfileStore
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, capture, without_gc
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.measure.ops.child import fitting
from bigbrain_fx.measure.ops.context import (
    Timed,
    WatchOverheads,
    overheads,
    timed_step,
    whole_step_s,
)
from bigbrain_fx.measure.ops.machine import chosen_device
from bigbrain_fx.measure.ops.rounds import Rounds
from bigbrain_fx.measure.ops.stopwatch import CudaStopwatch
from bigbrain_fx.measure.ops.subject import Subject
from tests.support.command_line import call, write_model
from tests.support.profiled import MACHINE
from tests.support.samples import captured as captured_model

CPU, META = torch.device("cpu"), torch.device("meta")
MODELS = ("digits", "encdec", "gpt", "llama", "moe", "resnet", "unet")


# ------------------------------------------------------------------------------- a virtual device


KERNELS_S = {"addmm": 10.0, "mm": 10.0, "tanh": 3.0, "tanh_backward": 5.0, "add_": 1.0}


@dataclass
class Virtual(TorchDispatchMode):
    """A device whose kernels take known times, and its stopwatch: what a mark is, settling tells.

    Marks are numbers of moments; to ask for seconds of one before `settle` is an error.
    """

    device: torch.device = CPU
    now_s: float = 0.0
    moments_s: list[float] = field(default_factory=list)
    settled: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.now_s += KERNELS_S.get(func.overloadpacket.__name__, 0.0)
        return func(*args, **(kwargs or {}))

    def mark(self) -> int:
        self.moments_s.append(self.now_s)
        return len(self.moments_s) - 1

    def settle(self) -> None:
        self.settled = len(self.moments_s)

    def between_s(self, begin: int, end: int, cost_s: float = 0.0) -> float:
        assert begin <= end < self.settled
        return self.moments_s[end] - self.moments_s[begin] - cost_s


class Two(nn.Module):
    """Two products with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


@pytest.fixture(scope="module")
def two() -> Captured:
    return capture(Two(), {"x": torch.ones(4, 6), "y": torch.zeros(4, 6)}, loss)


def subject_of(captured: Captured, rows: int, device: torch.device = CPU) -> Subject:
    graph = captured.graph.at(rows)
    return Subject(graph, captured.tensors, captured.inputs(rows), captured.functions, device)


def of_ops(subject: Subject, timed: Timed) -> list[tuple[float, float, float]]:
    """Return forward, nodes and sums of the first linear, tanh and the second linear."""
    ids = [id(op) for op in subject.graph.ops[:3]]
    return [(timed.forward_s[i], timed.nodes_s[i], timed.sums_s[i]) for i in ids]


def test_each_op_is_charged_what_its_kernels_take(two: Captured) -> None:
    subject, device = subject_of(two, 4), Virtual()
    with device:
        timed = timed_step(subject, device, WatchOverheads(0.0, 0.0))
    # x wants no gradient: the first product makes one of its weight alone; each sums weight, bias.
    assert of_ops(subject, timed) == [(10.0, 10.0, 2.0), (3.0, 5.0, 0.0), (10.0, 20.0, 2.0)]


def test_without_gradients_of_parameters_those_of_values_are_left(two: Captured) -> None:
    subject, device = subject_of(two, 4), Virtual()
    with device:
        timed = timed_step(subject, device, WatchOverheads(0.0, 0.0), frozen=True)
    assert of_ops(subject, timed) == [(10.0, 0.0, 0.0), (3.0, 5.0, 0.0), (10.0, 10.0, 0.0)]


def test_the_ops_of_a_step_are_the_step(two: Captured) -> None:
    subject, device = subject_of(two, 4), Virtual()
    rounds = Rounds(subject, device)
    with device:
        rounds.again()
        assert overheads(device) == WatchOverheads(0.0, 0.0)
        assert whole_step_s(subject, device) == rounds.step_s == 62.0
    assert rounds.ops_s == rounds.step_s
    linear = rounds.profiles()[0]
    assert (linear.forward_s, linear.backward_input_s, linear.backward_weight_s) == (10, 0, 12)


# ------------------------------------------------------------------------------- CUDA's stopwatch


class Gpu:
    """A stream as the host sees it: launching takes the host's time, kernels the device's."""

    LAUNCH_S, RECORD_S = 5e-6, 1e-6
    EVENT_S = 1.5e-6  # what an event takes the device
    CYCLES_PER_S = 2e9

    def __init__(self) -> None:
        self.host_s = self.done_s = 0.0

    def sleep(self, cycles: int) -> None:
        self.run(cycles / self.CYCLES_PER_S)

    def run(self, kernel_s: float) -> None:
        self.host_s += self.LAUNCH_S
        self.done_s = max(self.done_s, self.host_s) + kernel_s

    def synchronize(self, _: torch.device) -> None:
        self.host_s = max(self.host_s, self.done_s)


class Event:
    """Come to pass when the stream gets to it."""

    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "the stream"
        self.gpu.host_s += self.gpu.RECORD_S
        self.when_s = self.gpu.done_s = max(self.gpu.done_s, self.gpu.host_s) + self.gpu.EVENT_S

    def query(self) -> bool:
        return self.when_s <= self.gpu.host_s

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "not settled"
        return 1e3 * (end.when_s - self.when_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    Event.gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "synchronize", Event.gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", Event.gpu.sleep)
    return Event.gpu


@pytest.mark.parametrize(
    ("kernel_s", "taken_s"),
    [
        (1e-7, Gpu.LAUNCH_S),  # the device waits for the host: recording delayed the end
        (1e-4, 1e-4),  # the host waits for the device: recording was hidden, the event was not
    ],
)
def test_the_cost_of_recording_is_subtracted(gpu: Gpu, kernel_s: float, taken_s: float) -> None:
    watch = CudaStopwatch(torch.device("cuda", 0))
    marks = [watch.mark()]
    for _ in range(5):
        gpu.run(kernel_s)
        marks.append(watch.mark())
    watch.settle()
    found = [watch.between_s(*pair, Gpu.RECORD_S) for pair in pairwise(marks)]
    assert found[1:] == pytest.approx([taken_s] * 4)


def test_between_events_without_a_kernel_nothing_passes(gpu: Gpu) -> None:
    watch = CudaStopwatch(torch.device("cuda", 0))
    gpu.run(1.0)
    marks = [watch.mark() for _ in range(9)]
    watch.settle()
    found = [watch.between_s(*pair, Gpu.RECORD_S) for pair in pairwise(marks)]
    assert found == pytest.approx([0.0] * 8, abs=1e-9)
    assert min(found) >= 0.0


@pytest.mark.parametrize("has_sleep", [False, True])
def test_the_time_of_an_event_may_be_unknown(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, has_sleep: bool
) -> None:
    """Where torch cannot keep the device busy, or a host is so slow that it is not kept."""
    if has_sleep:
        gpu.CYCLES_PER_S, gpu.RECORD_S = 1e12, 2 * Gpu.EVENT_S  # it wakes up too early
    else:
        monkeypatch.delattr(torch.cuda, "_sleep")
    watch = CudaStopwatch(torch.device("cuda", 0))
    gpu.run(1.0)
    begin, end = watch.mark(), watch.mark()
    watch.settle()
    assert watch.between_s(begin, end) == pytest.approx(Gpu.EVENT_S)


# ------------------------------------------------------------------------------- what is let go of


def test_a_subject_is_let_go_of_without_a_collector(two: Captured) -> None:
    with without_gc():
        subject = subject_of(two, 4)
        timed_step(subject, Virtual(), WatchOverheads(0.0, 0.0))
        leaf, there = weakref.ref(subject.trained[0]), weakref.ref(subject)
        subject.forget()
        del subject
        assert (leaf(), there()) == (None, None)


# ------------------------------------------------------------------------------- where values land


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_every_value_is_on_the_device(name: str) -> None:
    captured = captured_model(name)
    rows = captured.graph.static_batch or 2
    subject, elsewhere = subject_of(captured, rows, META), list[str]()

    def watch(op: Op, value: object) -> None:
        found = {leaf.device for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
        elsewhere.extend(f"{op.name} on {device}" for device in found - {META})

    found = subject.forward(watch)
    assert found is not None
    subject.backward(found, subject.trained)
    held = [*subject.trained, *subject.inputs.values(), *subject._sums.values()]
    assert not elsewhere
    assert {tensor.device for tensor in held} == {META}


# ------------------------------------------------------------------------------- which device


def hosts_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_gpus(monkeypatch, 0)
    assert [chosen_device(text) for text in ("auto", "cpu")] == [CPU, CPU]
    hosts_gpus(monkeypatch, 2)
    words = ("auto", "cpu", "cuda", "cuda:1")
    assert [str(chosen_device(text)) for text in words] == ["cuda:0", "cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("text", "gpus", "what"),
    [
        ("cuda", 0, "this host has no CUDA device for 'cuda'"),
        ("cuda:0", 0, "this host has no CUDA device for 'cuda:0'"),
        ("cuda:1", 1, "this host has no CUDA device 'cuda:1', it has cuda:0"),
        ("cuda:7", 2, "this host has no CUDA device 'cuda:7', it has cuda:0 to cuda:1"),
        *((text, 2, f"expected auto, .* found '{text}'") for text in ("gpu", "cuda:", "cuda:-1")),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, gpus: int, what: str
) -> None:
    hosts_gpus(monkeypatch, gpus)
    with pytest.raises(InputError, match=what) as caught:
        chosen_device(text)
    assert caught.value.at == "--device"
    assert "--device" in str(caught.value.help)


def test_the_command_refuses_it_before_the_model_runs(tmp_path: Path) -> None:
    model = write_model(tmp_path, "raise SystemExit('this must not run')")
    ran = call("profile", model, "--db", tmp_path / "p.sqlite", "--device", "cuda:99")
    assert ran.code == 2
    assert "this host has no CUDA device" in ran.err
    assert "at: --device" in ran.err


def test_a_gpus_key_does_not_name_the_hosts_threads() -> None:
    gpu = replace(MACHINE, kind="cuda", processor="NVIDIA H200", torch_version="2.9.0", threads=4)
    assert gpu.key == replace(gpu, threads=1).key == "cuda: NVIDIA H200, torch 2.9.0"
    assert MACHINE.key != replace(MACHINE, threads=4).key


def test_a_step_that_does_not_fit_is_an_input_error() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ..."
    with (
        pytest.raises(InputError, match="a step of Net does not fit") as caught,
        fitting("Net", CPU),
    ):
        raise torch.cuda.OutOfMemoryError(said)
    assert caught.value.notes == ("CUDA out of memory. Tried to allocate 2.00 GiB.",)
    assert "--rows" in str(caught.value.help)


# ------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_is_profiled_on_a_gpu(tmp_path: Path) -> None:
    store = tmp_path / "p.sqlite"
    options = ProfileOptions(rows=(8,), rounds=10, time_limit_s=300.0, device="cuda")
    (measured,) = profile(write_model(tmp_path), store, options).measured
    assert measured.agreement is not None
    assert 0.5 < measured.agreement < 2.0
    (session,) = ProfileStore(store, read_only=True).sessions()
    assert session.machine.kind == "cuda"
    assert session.machine.processor == torch.cuda.get_device_name(0)
    assert session.machine.knows_optimizer
