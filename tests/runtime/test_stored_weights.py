"""Weights in a store: the same bits as in memory, no memory between runs, states that go on."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime import Channel, Device, Stage, StoreError, Training
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.finite import NotFiniteError
from bigbrain_fx.runtime.local import Hub, LocalTransport
from bigbrain_fx.runtime.modules import buffer, parameter
from bigbrain_fx.runtime.offloading import offload_to, open_store
from bigbrain_fx.runtime.recompute import Read
from bigbrain_fx.runtime.state import restore, state_of
from bigbrain_fx.runtime.stored_activations import ActivationStore
from bigbrain_fx.runtime.stores import DiskRoom
from tests.support.states import kept_state

ROWS, DIM, MICRO_BATCHES = 4, 64, 3
SIZES = {"embed": (DIM, DIM), "up": (DIM, DIM), "bias": (DIM,), "fixed": (DIM, DIM)}


class First(Stage):
    returns = ("h",)
    embed: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(embed=SIZES["embed"], seen=buffer(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(x @ self.embed)


class Middle(Stage):
    returns = ("h",)
    up: Tensor
    bias: Tensor
    fixed: Tensor

    def __init__(self) -> None:
        fixed = parameter(*SIZES["fixed"], requires_grad=False)
        super().__init__(up=SIZES["up"], bias=SIZES["bias"], fixed=fixed)

    def forward(self, h: Tensor) -> Tensor:
        with self.seeded("drop"):
            return torch.dropout(h @ self.up + self.bias, 0.25, train=True) @ self.fixed


class Last(Stage):
    returns = ("loss",)
    embed: Tensor

    def __init__(self) -> None:
        super().__init__(embed=SIZES["embed"])

    def forward(self, h: Tensor) -> Tensor:
        return (h @ self.embed.t()).pow(2).mean()


def between(tag: int, kind: str, source: int, target: int) -> Channel:
    return Channel(
        tag,
        kind,
        "h",
        source,
        target,
        "d0",
        "d0",
        (ROWS, DIM),
        torch.float32,
        requires_grad=kind == "activation",
    )


AHEAD = [between(0, "activation", 0, 1), between(1, "activation", 1, 2)]
BACK = [between(2, "gradient", 1, 0), between(3, "gradient", 2, 1)]


class Kept(Device):
    name = "d0"
    names = ("d0",)
    micro_batches = MICRO_BATCHES
    stages: Mapping[int, type[Stage]] = {0: First, 1: Middle, 2: Last}
    recompute = (0, 1, 2)
    loss = (2, "loss")
    channels = (*AHEAD, *BACK)
    tied: Mapping[str, tuple[int, ...]] = {"embed": (0, 2)}

    def step_once(self) -> None:
        micros = range(self.micro_batches)
        for m in micros:
            self.send(AHEAD[0], m, self.forward(0, m, x=self.batch("x", m)))
        for m in micros:
            self.send(AHEAD[1], m, self.forward(1, m, h=self.recv(AHEAD[0], m)))
        for m in micros:
            self.forward(2, m, h=self.recv(AHEAD[1], m))
        for m in micros:
            self.send(BACK[1], m, self.backward(2, m))
        for m in micros:
            self.send(BACK[0], m, self.backward(1, m, h=self.recv(BACK[1], m)))
        for m in micros:
            self.backward(0, m, h=self.recv(BACK[0], m))
        self.optimizer_step()


class Stored(Kept):
    offload = ("activations", "state", "weights")
    saving = (1, 2)


class InTurns(Stored):
    """Comes back to each stage for each micro-batch."""

    def step_once(self) -> None:
        for m in range(self.micro_batches):
            self.send(AHEAD[0], m, self.forward(0, m, x=self.batch("x", m)))
            self.send(AHEAD[1], m, self.forward(1, m, h=self.recv(AHEAD[0], m)))
            self.forward(2, m, h=self.recv(AHEAD[1], m))
            self.send(BACK[1], m, self.backward(2, m))
            self.send(BACK[0], m, self.backward(1, m, h=self.recv(BACK[1], m)))
            self.backward(0, m, h=self.recv(BACK[0], m))
        self.optimizer_step()


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed + step)
        yield {"x": torch.randn(ROWS * MICRO_BATCHES, DIM, generator=dice)}


def numbers() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(7)
    found = {name: torch.randn(size, generator=dice) / 8 for name, size in SIZES.items()}
    return {**found, "seen": torch.zeros(DIM)}


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-2, momentum=0.9, nesterov=True)


def made(cls: type[Device], folder: Path, training: Training | None = None) -> Device:
    where = torch.device("cpu")
    stream = Stream(batches, 0, {"x": ("x",)}, (), MICRO_BATCHES, where)
    device = cls(LocalTransport(Hub()), stream, 0, where)
    device.store = str(folder)
    if device.offload:
        open_store(device, None)
    device.load(numbers(), dict.fromkeys(("embed", "up", "bias"), "d0"))
    device.train_with(training or Training(adamw))
    if device.offload:
        offload_to(device, None)
    return device


def trained(device: Device, first: int, last: int) -> dict[str, Tensor]:
    """Return losses and first gradients of some steps, and all tensors at their end."""
    found: dict[str, Tensor] = {}
    for step in range(first, last):
        loss = device.run_step(step)
        assert loss is not None
        found[f"loss {step}"] = loss
        given = device.first_gradients or {}
        found |= {f"gradient {n}": g.clone() for n, g in given.items()}
    return {**found, **{n: t.clone() for n, t in state_of(device).tensors.items()}}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mapped_bytes() -> int:
    """Return what of nameless files is in this process's memory, as Linux says it."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith("(deleted)") and " rw-s " in line
        elif counts and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.gate("InTurns-0.01-adamw", "Stored-None-adamw")
@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("limit", [None, 0.01])
@pytest.mark.parametrize("cls", [Stored, InTurns])
def test_the_bits_are_those_of_memory(
    tmp_path: Path, make: object, limit: float | None, cls: type[Device]
) -> None:
    training = Training(make, clip_norm=limit)  # type: ignore[arg-type]
    kept = trained(made(Kept, tmp_path, training), 0, 3)
    assert equal(trained(made(cls, tmp_path, training), 0, 3), kept)
    assert len([name for name in kept if name.startswith("gradient")]) == 3
    assert list(tmp_path.iterdir()) == []  # no name: nothing is left behind


@pytest.mark.nightly
def test_between_two_steps_no_weight_is_in_memory_and_all_can_be_read(tmp_path: Path) -> None:
    gc.collect()  # devices of other tests
    before = mapped_bytes()
    device = made(Stored, tmp_path)
    device.run_step(0)
    device.run_step(1)
    assert mapped_bytes() == before
    state = {name: t.sum() for name, t in device.state().items()}
    assert set(state) == {*SIZES, "seen"}
    assert mapped_bytes() - before >= 3 * 4 * DIM * DIM
    device.run_step(2)
    assert mapped_bytes() == before


@pytest.mark.nightly
def test_while_a_stage_runs_no_other_ones_weights_are_in_memory(tmp_path: Path) -> None:
    device = made(Stored, tmp_path)
    device.run_step(0)
    before, found = mapped_bytes(), list[int]()
    device.modules[1].register_forward_hook(lambda *_: found.append(mapped_bytes()))
    device.run_step(1)
    assert len(found) == 2 * MICRO_BATCHES
    pages = 2 * 4 * DIM * DIM + 4096
    assert {taken - before for taken in found} == {pages}


def test_a_state_goes_between_stores_and_memory(tmp_path: Path) -> None:
    whole = trained(made(Kept, tmp_path), 0, 4)
    first = made(Stored, tmp_path)
    trained(first, 0, 2)
    second = made(Kept, tmp_path)
    restore(second, kept_state(state_of(first)))
    trained(second, 2, 3)
    third = made(Stored, tmp_path)
    restore(third, kept_state(state_of(second)))
    found = trained(third, 3, 4)
    assert all(torch.equal(found[name], whole[name]) for name in found)


def test_non_finite_offloaded_values_are_named_as_in_memory(tmp_path: Path) -> None:
    said = []
    for cls in (Kept, Stored):
        device = made(cls, tmp_path)
        device.modules[1].register_full_backward_hook(lambda *_: None)
        with torch.no_grad():
            device.parameters["up"].fill_(3e38)
        with pytest.raises(NotFiniteError) as caught:
            device.run_step(0)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_full_disk_is_told_before_a_weight_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StoreError, match=r"store of d0 in .* No space left .* free some or give"):
        made(Stored, tmp_path)


def test_received_values_are_offloaded_but_not_the_batch(tmp_path: Path) -> None:
    store = ActivationStore(DiskRoom(str(tmp_path), "d0", 0))
    x, h, small = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True), torch.randn(3)
    before = h.detach().clone()
    put = store.put(Read({"x": x, "h": h, "small": small}, {}), [x])
    with torch.no_grad():
        h.zero_()  # its memory serves something else
    back = put.back().values
    assert back["x"].data_ptr() == x.data_ptr()
    assert torch.equal(back["h"], before)
    assert back["h"].requires_grad
    assert back["h"].is_leaf
    assert not back["small"].requires_grad
