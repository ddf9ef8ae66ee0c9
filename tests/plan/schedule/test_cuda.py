"""What torch takes of a GPU: blocks of 512 bytes, optimizers that update all at once, cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import nn

from bigbrain_fx.cluster.presets import PRESETS
from bigbrain_fx.core import (
    BLAS_BYTES,
    BLAS_BYTES_FROM_HOPPER_ON,
    Cluster,
    Device,
    Ref,
    blas_bytes,
)
from bigbrain_fx.frontend import optimizer_facts
from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from bigbrain_fx.plan.memory_check import PROCESS, data_bytes, for_tensors
from bigbrain_fx.plan.schedule import build, held, rounded
from bigbrain_fx.plan.schedule.stage_part import library_bytes, optimizer_temporary_bytes
from tests.support import samples
from tests.support.pipelines import all_of, chain, even_costs
from tests.support.synthetic import op

CPU = Device("d0", "h", "cpu", 1 << 34, 1e11, 1e10)
GPU = replace(CPU, kind="cuda", half_flops_per_s=312e12)
PRODUCT, OTHER = op("y", "aten.linear.default", Ref("x")), op("z", "aten.relu.default", Ref("y"))


def test_cuda_gives_blocks_of_512_bytes_and_a_cpu_what_was_asked() -> None:
    assert [rounded(n, "cuda") for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert [rounded(n, "cpu") for n in (0, 1, 512, 513)] == [0, 1, 512, 513]


# --------------------------------------------------------------------------- optimizers

Make = Callable[[Sequence[nn.Parameter], bool], torch.optim.Optimizer]
SHAPES = ((64, 64), (128, 32), (1000,), (64,))
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p, each: torch.optim.AdamW(p, foreach=each),
    "AdamW amsgrad": lambda p, each: torch.optim.AdamW(p, foreach=each, amsgrad=True),
    "Adam decaying": lambda p, each: torch.optim.Adam(p, foreach=each, weight_decay=0.1),
    "NAdam": lambda p, each: torch.optim.NAdam(p, foreach=each),
    "RAdam": lambda p, each: torch.optim.RAdam(p, foreach=each),
    "Adamax": lambda p, each: torch.optim.Adamax(p, foreach=each),
    "RMSprop": lambda p, each: torch.optim.RMSprop(p, foreach=each),
    "SGD": lambda p, each: torch.optim.SGD(p, lr=0.1, foreach=each),
    "momentum": lambda p, each: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=each),
    "SGD decaying": lambda p, each: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=each),
}


def temporary_bytes(make: Make, at_once: bool) -> int:
    """Count what the second step of torch's own optimizer makes and lets go of."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer, live = make(params, at_once), LiveBytes()
    for _ in range(2):
        for parameter in params:
            parameter.grad = torch.empty_like(parameter)
        live.ignore(p.grad for p in params if p.grad is not None)
        before = live.reset_peak()
        with live:
            optimizer.step()
    return live.peak - before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_foreach_optimizer_holds_temporary_memory(name: str) -> None:
    """What it holds parameter by parameter was measured; the rule says what it holds on CUDA."""
    sizes = [4 * torch.Size(shape).numel() for shape in SHAPES]
    alone = temporary_bytes(OPTIMIZERS[name], at_once=False) / max(sizes)
    found = optimizer_temporary_bytes(sizes, alone, 0.0, at_once=True)
    assert found == temporary_bytes(OPTIMIZERS[name], at_once=True)
    assert optimizer_temporary_bytes(sizes, 2.0, 0.0, at_once=False) == 2 * max(sizes)


class OneByOne(torch.optim.Optimizer):
    """A loop of one's own: it knows no `foreach`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize(
    ("make", "at_once", "temporaries", "state"),
    [
        (torch.optim.AdamW, True, 2.0, 2.0),
        (partial(torch.optim.AdamW, foreach=True), True, 1.0, 2.0),
        (partial(torch.optim.AdamW, foreach=False), False, 2.0, 2.0),
        (partial(torch.optim.AdamW, fused=True), False, 0.0, 2.0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True), False, 0.0, 1.0),
        (OneByOne, False, 1.0, 0.0),
    ],
)
def test_an_optimizer_updates_on_cuda_as_it_was_made_to(
    make: Any, at_once: bool, temporaries: float, state: float
) -> None:
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    facts = optimizer_facts(net, lambda named: make([p for _, p in named]))
    assert facts.measured
    found = facts.at_once, facts.temporaries, facts.state
    assert found == (at_once, temporaries, state)


def test_updating_all_at_once_is_what_torch_does_on_cuda() -> None:
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    assert "cuda" in _get_foreach_kernels_supported_devices()


def test_adams_step_is_no_tensor_of_the_gpu() -> None:
    parameter = nn.Parameter(torch.empty(8, device="meta"))
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    state = {name: value.device.type for name, value in optimizer.state[parameter].items()}
    assert state == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


# --------------------------------------------------------------------------- cuBLAS


def test_each_thread_that_multiplies_has_a_workspace() -> None:
    assert library_bytes(GPU, [PRODUCT, OTHER], trains=True) == 2 * BLAS_BYTES
    assert library_bytes(GPU, [PRODUCT], trains=False) == BLAS_BYTES == 8_519_680
    assert library_bytes(GPU, [OTHER], trains=True) == 0
    assert library_bytes(CPU, [PRODUCT], trains=True) == 0


def test_a_workspace_is_larger_from_hopper_on() -> None:
    def of(preset: str) -> int:
        device = replace(GPU, half_flops_per_s=PRESETS[preset].half_flops_per_s)
        return library_bytes(device, [PRODUCT], trains=False)

    larger = {name for name in PRESETS if of(name) == BLAS_BYTES_FROM_HOPPER_ON}
    assert {name for name in PRESETS if name.startswith(("h100", "h200", "b200"))} <= larger
    guessed = {name for name, card in PRESETS.items() if card.blas_bytes != of(name)}
    assert guessed == {"l40s", "rtx-6000-ada", "mi300x", "mi325x"}  # as fast: guessed too large
    assert all(of(name) >= PRESETS[name].blas_bytes for name in PRESETS)
    assert library_bytes(replace(GPU, half_flops_per_s=None), [PRODUCT], False) == BLAS_BYTES


def test_a_clusters_workspace_is_taken_before_a_guess() -> None:
    slow = replace(GPU, half_flops_per_s=100e12, blas_bytes=BLAS_BYTES_FROM_HOPPER_ON)
    assert library_bytes(slow, [PRODUCT], trains=True) == 2 * BLAS_BYTES_FROM_HOPPER_ON
    fast = replace(GPU, half_flops_per_s=900e12, blas_bytes=BLAS_BYTES)  # sm 11, say
    assert library_bytes(fast, [PRODUCT], trains=True) == 2 * BLAS_BYTES
    assert library_bytes(replace(fast, kind="cpu"), [PRODUCT], trains=True) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torch_says_the_same_of_its_workspaces() -> None:
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("this torch does not say how large they are")
    found = blas_bytes(torch.cuda.get_device_capability())
    assert torch.backends.cuda.cublas_workspace_size() == found


# --------------------------------------------------------------------------- whole forecasts


def planned(device: Device, devices: int) -> Plan:
    """Plan the encoder-decoder, whose tensors have all sizes, on equal devices."""
    found = samples.sample("encdec")
    named = tuple(replace(device, name=f"d{i}") for i in range(devices))
    cluster = Cluster(named, samples.cluster(1).default_link)
    return make_plan(found.graph, cluster, Source(""), Options("naive", micro_batches=4))


@pytest.mark.gate("2")
@pytest.mark.parametrize("devices", [1, 2])
def test_every_tensor_is_rounded_by_itself(devices: int) -> None:
    plan = planned(GPU, devices)
    graph = plan.graph.at(plan.rows)
    for entry in plan.forecast.devices:
        held = {n for stage in plan.stages.of(entry.device) for n in stage.params}
        params = {graph.param[n].canonical: graph.param[n] for n in held}.values()
        trained = [p for p in params if p.kind == "parameter" and p.spec.requires_grad]
        assert entry.weights_bytes == sum(rounded(p.spec.nbytes, "cuda") for p in params)
        assert entry.optimizer_bytes == 2 * sum(rounded(p.spec.nbytes, "cuda") for p in trained)
        assert entry.weights_bytes > sum(p.spec.nbytes for p in params)
        assert entry.messages_bytes % 512 == entry.activations_bytes % 512 == 0
        assert entry.peak_bytes % 512 == 0


def test_a_planner_hears_what_cublas_takes() -> None:
    """On a CPU the batch alone is taken off, on a GPU its blocks and two workspaces."""
    graph = samples.sample("encdec").graph
    concrete, kinds = graph.at(graph.batch // 4), {"cpu": CPU, "cuda": GPU}
    for kind, device in kinds.items():
        cluster = Cluster((device,), samples.cluster(1).default_link)
        (left,) = for_tensors(cluster, concrete, 4).devices
        process, data = PROCESS[kind], data_bytes(concrete, None, 4, kind)
        whole = int((device.memory_bytes - process.context_bytes) / process.share)
        cublas = 2 * BLAS_BYTES if kind == "cuda" else 0
        assert left.memory_bytes == whole - data - cublas


def test_gradients_and_the_batch_are_rounded_too() -> None:
    plan = planned(GPU, 2)
    graph = plan.graph.at(plan.rows)
    by_cpu = data_bytes(graph, plan.stages, plan.micro_batches, "cpu")
    by_gpu = data_bytes(graph, plan.stages, plan.micro_batches, "cuda")
    assert by_cpu < by_gpu == plan.forecast.devices[0].data_bytes
    assert by_cpu == planned(CPU, 2).forecast.devices[0].data_bytes
    for entry in plan.forecast.devices:
        assert entry.gradients_bytes % 512 == 0
        assert entry.gradients_bytes > planned(CPU, 2).forecast.of(entry.device).gradients_bytes


@pytest.mark.parametrize(("kind", "block"), [("cpu", 100), ("cuda", 512)])
def test_messages_are_rounded_too(kind: Literal["cpu", "cuda"], block: int) -> None:
    """Two stages that pass on 100 bytes and get 100 back."""
    stages, costs = chain(2, nbytes=100), even_costs(2)
    devices = tuple(replace(device, kind=kind) for device in costs.cluster.devices)
    costs = replace(costs, cluster=replace(costs.cluster, devices=devices))
    for program in build("gpipe", stages, 1, costs, all_of(stages)):
        booked = {entry.messages_bytes for entry in held(program, stages, costs)}
        assert booked <= {0, block, 2 * block}
        assert max(booked) == 2 * block


@pytest.mark.parametrize(
    ("other", "booked"), [("cuda", [1, 2, 3, 4, 5, 4]), ("cpu", [3, 4, 4, 4, 5, 4])]
)
def test_no_receive_is_posted_ahead_over_nccl(
    other: Literal["cpu", "cuda"], booked: list[int]
) -> None:
    """A GPU takes four messages and sends four back; nccl is for GPUs only, whoever is unused."""
    stages, costs = chain(2, nbytes=512), even_costs(3)
    kinds: tuple[Literal["cpu", "cuda"], ...] = (other, "cuda", "cpu")
    pairs = zip(costs.cluster.devices, kinds, strict=True)
    devices = tuple(replace(device, kind=kind) for device, kind in pairs)
    costs = replace(costs, cluster=replace(costs.cluster, devices=devices))
    program = build("gpipe", stages, 4, costs, all_of(stages))[1]
    entries = zip(program.instructions, held(program, stages, costs), strict=True)
    found = [(i.do, entry.messages_bytes // 512) for i, entry in entries]
    assert [count for do, count in found if do == "recv"] == booked[:4]
    assert [count for do, count in found if do == "backward"][:2] == booked[4:]


def test_a_gpu_holds_the_workspaces_of_cublas_all_the_time() -> None:
    (entry,) = planned(GPU, 1).forecast.devices
    (without,) = planned(replace(GPU, half_flops_per_s=756e12), 1).forecast.devices
    assert without.peak_bytes - entry.peak_bytes == 2 * (BLAS_BYTES_FROM_HOPPER_ON - BLAS_BYTES)
    assert entry.activations_bytes > 2 * BLAS_BYTES
