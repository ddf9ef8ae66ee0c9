"""What forwards save in a store: the same bits, a storage once, room that serves again."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.live import LiveBytes
from bigbrain_fx.runtime import HostRoom, StoreError
from bigbrain_fx.runtime.stored_activations import ActivationStore
from bigbrain_fx.runtime.stores import DiskRoom

ROWS, DIM = 64, 64


@pytest.fixture(params=["disk", "host"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationStore]:
    room = DiskRoom(str(tmp_path), "d0", 0) if request.param == "disk" else HostRoom()
    yield ActivationStore(room)
    assert not list(tmp_path.iterdir())


def gradients(store: ActivationStore | None, seed: int, cast: bool = False) -> list[Tensor]:
    """Run what saves results, views, transposed and written values, and draws; several times."""
    torch.manual_seed(seed)
    layers = [nn.Linear(DIM, DIM), nn.ReLU(inplace=True), nn.Linear(DIM, DIM), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.LayerNorm(DIM))
    x = torch.randn(ROWS, DIM, requires_grad=True)
    held = [*model.parameters(), x]
    saving: AbstractContextManager[None] = nullcontext() if store is None else store.saving(held)
    with saving, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        h = x
        for _ in range(3):
            h = h + model(h)
            h = F.relu_(torch.sigmoid(h.t()).t() * 2 - 1).view(DIM, ROWS).t()
            h = h[:, : DIM // 2].repeat(1, 2) * h
        loss = (h.float() @ h.float().t()).tanh().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize("cast", [False, True])
def test_gradients_are_bitwise_those_of_memory(store: ActivationStore, cast: bool) -> None:
    """Storages of the steps before are free by then, and their addresses are given out again."""
    for seed in range(4):
        kept, stored = gradients(None, seed, cast), gradients(store, seed, cast)
        assert all(torch.equal(a, b) for a, b in zip(kept, stored, strict=True))


def test_a_second_step_takes_the_rooms_of_the_first(tmp_path: Path) -> None:
    room = DiskRoom(str(tmp_path), "d0", 0)
    store = ActivationStore(room)
    gradients(store, 0)
    used = room.used
    gradients(store, 1)
    assert room.used == used > 0


def test_a_storage_is_written_once_and_what_others_hold_is_not() -> None:
    x = torch.randn(ROWS, DIM, requires_grad=True)
    layers = [nn.Linear(DIM, DIM, bias=False) for _ in range(3)]
    store = ActivationStore(HostRoom())
    with store.saving([x, *(layer.weight for layer in layers)]):
        h = torch.sin(x)  # x is the caller's
        loss = sum((layer(h) for layer in layers), torch.zeros(())).sum()
    found = torch.autograd.grad(loss, [x, layers[0].weight])
    assert torch.equal(found[1], torch.ones(DIM, ROWS) @ torch.sin(x))
    del loss
    gc.collect()
    assert {size: len(rooms) for size, rooms in store.free.items()} == {4 * ROWS * DIM: 1}


def test_between_forward_and_backward_memory_is_free(tmp_path: Path) -> None:
    x, store = torch.randn(ROWS, DIM, requires_grad=True), None
    store = ActivationStore(DiskRoom(str(tmp_path), "d0", 1 << 20))
    with LiveBytes() as live:
        with store.saving([x]):
            y = torch.sin(torch.exp(torch.sin(x)))
            loss = (y * y).sum()
        del y
        live.reset_peak()
        assert live.peak < 2 * x.nbytes
        torch.autograd.grad(loss, x)


def test_a_value_that_stays_and_is_written_ends_in_words() -> None:
    x = torch.randn(4, requires_grad=True)  # too small to move
    with ActivationStore(HostRoom()).saving([x]):
        h = torch.sin(x)
        loss = (h * h).sum()
    h.detach().add_(1)
    with pytest.raises(RuntimeError, match="written in place after it was read"):
        torch.autograd.grad(loss, x)


def test_a_full_disk_ends_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = ActivationStore(DiskRoom(str(tmp_path), "d0", 0))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"store of d0 in .* No space left"):
        gradients(store, 0)


def test_a_disk_that_fails_ends_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: int, parts: list[memoryview], at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(StoreError, match="fails: Input/output error: give another folder"):
        gradients(ActivationStore(DiskRoom(str(tmp_path), "d0", 0)), 0)
