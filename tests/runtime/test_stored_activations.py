"""What forwards save in a store: the same bits, a storage once, room that serves again."""

from __future__ import annotations

import errno
import gc
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.runtime import HostRoom, StoreError
from bigbrain_fx.runtime.stored_activations import TRIMS_EVERY, ActivationStore
from bigbrain_fx.runtime.stores import DiskRoom
from bigbrain_fx.supervisor.processes import STORES_ACTIVATIONS, TUNABLES, UNCACHED, uncached

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


@pytest.mark.nightly
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


GROWS = """
import sys
import torch
from torch import nn
from bigbrain_fx.runtime import keep_freed_memory
from bigbrain_fx.runtime.stored_activations import ActivationStore
from bigbrain_fx.runtime.stores import DiskRoom

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.set_num_threads(1)
keep_freed_memory()
layers = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
model, store = nn.Sequential(*layers), ActivationStore(DiskRoom(sys.argv[1], "d0", 0))
xs = [torch.randn(256, 256, requires_grad=True) for _ in range(24)]

def forward(x):
    with store.saving([x, *model.parameters()]):
        return model(x).sum()

warm = forward(xs[0])
found, store.trims_every = store.trims_every, 1 << 30
before = resident()
kept = [forward(x) for x in xs]
print(found, resident() - before)
"""


def grown(folder: Path, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return how often memory goes back, and what 24 forwards leave here if it never does."""
    words = [sys.executable, "-c", GROWS, str(folder)]
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    every, growth = map(int, done.stdout.split())
    return every, growth


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc that is told")
def test_small_memory_need_not_go_back_where_malloc_keeps_none(tmp_path: Path) -> None:
    """48 MiB of activations: what has gone to the store leaves room that serves the next."""
    (tmp_path / STORES_ACTIVATIONS).parent.mkdir()
    (tmp_path / STORES_ACTIVATIONS).touch()
    kept = {name: text for name, text in os.environ.items() if name != TUNABLES}
    told_every, told = grown(tmp_path, uncached(tmp_path, kept))
    kept_every, cached = grown(tmp_path, kept)
    assert (told_every, kept_every) == (TRIMS_EVERY, 1)
    assert told < cached / 2


def test_malloc_settings_of_the_user_stay(tmp_path: Path) -> None:
    assert uncached(tmp_path, {"A": "1"}) == {"A": "1"}  # nothing goes to a store there
    (tmp_path / STORES_ACTIVATIONS).parent.mkdir()
    (tmp_path / STORES_ACTIVATIONS).touch()
    own = {TUNABLES: "glibc.malloc.tcache_count=3"}
    assert uncached(tmp_path, own) == own
    assert uncached(tmp_path, {TUNABLES: "glibc.cpu.x=1"}) == {
        TUNABLES: f"glibc.cpu.x=1:{UNCACHED}"
    }
    assert uncached(tmp_path, {})[TUNABLES] == UNCACHED
