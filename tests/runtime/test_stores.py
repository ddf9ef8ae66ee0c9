"""What an optimizer keeps in a store: the same bits, copies that stay, full disks in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.plan.offloading import STORED_FROM_BYTES
from bigbrain_fx.runtime import StoredState, StoreError, stores
from bigbrain_fx.runtime.checkpoints import begin_together
from bigbrain_fx.runtime.offloading import offload_to
from bigbrain_fx.runtime.state import restore, state_of
from bigbrain_fx.runtime.stores import DiskRoom, HostRoom
from bigbrain_fx.runtime.update_pieces import pieces
from tests.runtime.test_checkpoints import NAMES, committers, train
from tests.runtime.test_state import OPTIMIZERS, Make, One, device, everything, run
from tests.support.commit_disks import steps_in
from tests.support.states import kept_state


def offloading(make: Make, folder: Path) -> One:
    made = device(make)
    made.store, made.offload = str(folder), ("state",)
    offload_to(made, None)
    return made


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STORED_FROM_BYTES", 1)


def lies_in(room: object, tensor: Tensor) -> bool:
    assert isinstance(room, DiskRoom)
    starts = room._maps.items()
    return any(start <= tensor.data_ptr() < start + len(mapped) for start, mapped in starts)


@pytest.mark.gate("adagrad")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_training_and_its_state_are_those_of_memory(tmp_path: Path, name: str) -> None:
    plain, stored = device(OPTIMIZERS[name]), offloading(OPTIMIZERS[name], tmp_path)
    assert run(stored, 0, 5) == run(plain, 0, 5)
    assert everything(stored) == everything(plain)
    assert list(tmp_path.iterdir()) == []  # no name: nothing is left behind


def test_between_two_steps_nothing_of_it_is_in_memory(tmp_path: Path) -> None:
    made = offloading(OPTIMIZERS["adamw"], tmp_path)
    run(made, 0, 2)
    assert made.stored is not None
    assert made.optimizer is not None
    room = made.stored.room
    moments = [t for t in made.optimizer.state[made.parameters["a"]].values() if t.dim()]
    assert len(moments) == 2
    assert all(lies_in(room, t) for t in moments)


def test_a_state_goes_between_stores_and_memory(tmp_path: Path) -> None:
    whole = device(OPTIMIZERS["adamw"])
    run(whole, 0, 3)
    kept = kept_state(state_of(whole))
    stored, back = offloading(OPTIMIZERS["adamw"], tmp_path), device(OPTIMIZERS["adamw"])
    restore(stored, kept)
    run(stored, 3, 5)
    restore(back, kept_state(state_of(stored)))
    run(back, 5, 6)
    run(whole, 3, 6)
    assert everything(back) == everything(whole)


def test_a_copy_does_not_share_what_goes_on_being_written(tmp_path: Path) -> None:
    made = offloading(OPTIMIZERS["adamw"], tmp_path)
    run(made, 0, 2)
    state = state_of(made)
    buffer = made.room_for_state(state.nbytes)
    size = state.copy_into(buffer)
    before = bytes(buffer[:size])
    run(made, 2, 4)
    assert bytes(buffer[:size]) == before
    assert state_of(made).tensors["optimizer:exp_avg:a"].tolist() != []


@pytest.mark.nightly
def test_commits_go_on_where_the_state_is_in_stores(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = {name: offloading(OPTIMIZERS["adamw"], disk) for name in NAMES}
    parts = committers(tmp_path / "commits")
    begin_together(parts, made, resume=False)
    train(made, parts, 0, 5)
    others = {name: offloading(OPTIMIZERS["adamw"], disk) for name in NAMES}
    again = committers(tmp_path / "commits")
    assert begin_together(again, others, resume=True) == 4
    train(others, again, 4, 6)
    whole = device(OPTIMIZERS["adamw"])
    run(whole, 0, 6)
    assert everything(others["d1"]) == everything(whole)


def full(file: int, start: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_ends_in_words_and_the_newest_commit_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {name: offloading(OPTIMIZERS["adamw"], tmp_path) for name in NAMES}
    parts = committers(tmp_path / "commits", every=1)
    begin_together(parts, made, resume=False)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"store of d0 in .* No space left .* free some or give"):
        train(made, parts, 0, 1)
    assert steps_in(tmp_path / "commits") == [0]


def test_a_disk_that_is_too_full_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"needs 5\.0 MiB and cannot have it"):
        DiskRoom(str(tmp_path), "d0", 5 << 20)


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match="no folder here: make it, or give another with --offload-dir"
    ):
        DiskRoom(str(tmp_path / "gone"), "d0", 0)


def test_strides_are_kept_and_views_with_holes_stay(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam([weight])
    stored = StoredState(optimizer, DiskRoom(str(tmp_path), "d0", 0))
    stored.step()
    optimizer.state[weight]["holes"] = torch.zeros(8, 8)[:, ::2]
    stored.step()
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    assert not lies_in(stored.room, optimizer.state[weight]["holes"])


def test_no_piece_is_larger_than_the_largest_parameter() -> None:
    sizes = [3, 100, 60, 30, 20, 99, 1]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = torch.optim.SGD([{"params": params[:4]}, {"params": params[4:]}])
    found = [[p.numel() for p in piece] for piece in pieces(optimizer)]
    assert found == [[3], [100], [60, 30], [20], [99, 1]]
    assert len(list(pieces(torch.optim.SGD(params)))) == 5
    StoredState(optimizer, HostRoom()).step()
    assert [p.numel() for g in optimizer.param_groups for p in g["params"]] == sizes


class Counting(torch.optim.SGD):
    """A warm-up of seven steps, counted in each group; a rate that is a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["rate"] = group.get("rate", torch.ones(())).mul_(0.9)
            for p in group["params"]:
                assert p.grad is not None
                p.sub_(group["rate"] * (0.1 if group["calls"] > 7 else 0.01) * p.grad)


def test_grouped_counts_are_counted_once_a_step() -> None:
    """However many pieces there are: the 8th step is the first with the larger rate."""

    def trained(*, by_pieces: bool) -> tuple[list[Tensor], list[tuple[int, float]]]:
        params = [nn.Parameter(torch.ones(size)) for size in (3, 100, 60, 30, 20)]
        groups: list[dict[str, Any]] = [{"params": params[:2]}]
        made = Counting([*groups, {"params": params[2:], "calls": 2}])
        step = StoredState(made, HostRoom()).step if by_pieces else made.step
        for _ in range(9):
            for p in params:
                p.grad = torch.full_like(p, 0.5)
            step()
        found = [(group["calls"], float(group["rate"])) for group in made.param_groups]
        return [p.detach() for p in params], found

    (one, numbers), (other, same) = trained(by_pieces=False), trained(by_pieces=True)
    assert numbers == same
    assert [calls for calls, _ in same] == [9, 11]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_plan_and_runtime_agree_on_what_is_too_small_to_move() -> None:
    assert STORED_FROM_BYTES == 4096  # stores has it too; the fixture hides that
    text = Path(stores.__file__).read_text()
    assert f"STORED_FROM_BYTES = {STORED_FROM_BYTES} " in text
