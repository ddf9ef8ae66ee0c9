"""Buckets of one device, what buckets.json may say, and weights that others hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime.buckets import bucket_channels, buckets_of, read_buckets
from bigbrain_fx.runtime.channel import Channel
from bigbrain_fx.runtime.modules import WeightsError
from bigbrain_fx.runtime.released import is_released, release
from bigbrain_fx.runtime.replicas import Replicas
from bigbrain_fx.runtime.unsharded import Unsharded

LISTED: dict[str, dict[str, Any]] = {
    "bucket0": {
        "stages": [0, 1],
        "dtype": "float32",
        "pieces": [2, 3],
        "marks": 0,
        "params": ["b", "a"],
        "channels": [
            [0, "reduce", [0, 1], ["d0", "d1"], 3, 1],
            [1, "reduce", [1, 0], ["d1", "d0"], 2, 1],
            [2, "gather", [0, 1], ["d0", "d1"], 2, 1],
            [3, "gather", [1, 0], ["d1", "d0"], 3, 1],
        ],
    }
}


class Wire:
    """A transport that keeps what is sent, and hands out what it was given."""

    def __init__(self, *received: Tensor) -> None:
        self.sent: list[tuple[int, list[float]]] = []
        self.received = list(received)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        self.sent.append((channel.tag, tensor.tolist()))

    def recv(self, channel: Channel) -> Tensor:
        return self.received.pop(0)


def replicas(
    folder: Path, wire: Wire, order: str = "replica", waits: tuple[int, ...] = ()
) -> Replicas:
    listed = {name: {**entry, "waits": waits} for name, entry in LISTED.items()}
    (folder / "buckets.json").write_text(json.dumps(listed))
    channels = bucket_channels(str(folder / "device_d0.py"), "d0")
    buckets = [*buckets_of(read_buckets(folder), "d0", (0,), channels)]
    parameters = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2))}
    found = Replicas(buckets, order, ((0, 1), (2, 3)), parameters, wire, order == "micro")  # type: ignore[arg-type]  # as much of a Transport as is used
    found.begin()
    return found


def test_a_bucket_leaves_with_the_last_gradient_of_the_last_micro_batch(tmp_path: Path) -> None:
    wire = Wire(torch.tensor([10.0, 20.0]), torch.tensor([7.0, 8.0, 9.0]))
    found = replicas(tmp_path, wire)
    for micro in (0, 1):
        assert found.add("b", 0, micro, torch.tensor([1.0, 2.0]))
        assert wire.sent == []
        found.add("a", 0, micro, torch.tensor([3.0, 4.0, 5.0]))
        if micro == 1:  # before the backward has ended
            assert wire.sent == [(0, [6.0, 8.0, 10.0])]
        found.after(0, micro)
    assert len(wire.sent) == 1
    found.sum()
    found.send_sums()
    assert wire.sent[1] == (2, [12.0, 24.0])
    found.recv_sums()
    made = {name: gradient.tolist() for (name, _), gradient in found.gradients(zero=False)}
    assert made == {"b": [12.0, 24.0], "a": [7.0, 8.0, 9.0]}


def test_a_bucket_that_lacks_a_gradient_leaves_after_the_backward(tmp_path: Path) -> None:
    wire = Wire()
    found = replicas(tmp_path, wire, "micro")
    found.add("b", 0, 0, torch.tensor([1.0, 2.0]))
    assert wire.sent == []
    found.after(0, 0)
    assert wire.sent == [(0, [0.0, 0.0, 0.0])]  # the other replica waits for it


def test_a_bucket_that_waits_leaves_after_backward_weight(tmp_path: Path) -> None:
    wire = Wire()
    found = replicas(tmp_path, wire, "micro", waits=(0,))
    found.after(0, 0)  # its backward: the gradients come later
    assert wire.sent == []
    found.add("b", 0, 0, torch.tensor([1.0, 2.0]))
    found.after(0, 0, waited=True)
    assert wire.sent == [(0, [0.0, 0.0, 0.0])]


def test_a_backward_holds_a_bucket_and_the_own_pieces_of_two(tmp_path: Path) -> None:
    """Of a micro-batch that is summed by itself: not all buckets of the stage until its end."""
    count, elements = 8, 100
    entry = LISTED["bucket0"]
    listed = {
        f"bucket{i}": {
            **entry,
            "pieces": [elements // 2, elements // 2],
            "params": [f"p{i}"],
            "waits": (),
            "channels": [[4 * i + tag, *about] for tag, *about in entry["channels"]],
        }
        for i in range(count)
    }
    (tmp_path / "buckets.json").write_text(json.dumps(listed))
    channels = bucket_channels(str(tmp_path / "device_d1.py"), "d1")
    buckets = [*buckets_of(read_buckets(tmp_path), "d1", (1,), channels)]
    parameters = {f"p{i}": nn.Parameter(torch.zeros(elements)) for i in range(count)}
    wire = Wire(*(torch.full((elements // 2,), 10.0) for _ in range(2 * count)))
    found = Replicas(buckets, "micro", ((0, 2), (1, 3)), parameters, wire, each=True)  # type: ignore[arg-type]  # as above
    found.begin()
    for micro, rows in ((1, elements // 2), (3, elements // 2)):
        for i in range(count):
            found.add(f"p{i}", 1, micro, torch.ones(elements))
            held = [*_held(found)]
            assert sum(held) <= count * rows + 2 * rows + elements
            assert max(held) <= elements
        found.after(1, micro)
        assert sum(_held(found)) == count * rows
    assert len(wire.sent) == 2 * count
    assert not wire.received  # of the micro-batches 0 and 2
    found.sum()
    found.send_sums()
    assert wire.sent[-1][1] == [10.0 + 1 + 10 + 1] * (elements // 2)


def _held(found: Replicas) -> list[int]:
    """Return the elements of each memory that the buckets hold."""
    running = found._now.values()
    parts = [part for each in running for _, _, part in (*each.total.parts, *each.own.parts)]
    tensors = [*parts, *(t for each in running for t in (each.flat, each.piece) if t is not None)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return [storage.nbytes() // 4 for storage in storages.values()]


def test_a_gradient_in_no_bucket_is_not_taken(tmp_path: Path) -> None:
    assert not replicas(tmp_path, Wire()).add("c", 0, 0, torch.zeros(1))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"bucket0": {}}', '{"bucket0": 3}', "[" * 100_000, ""]
)
def test_a_broken_list_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "buckets.json").write_text(text)
    with pytest.raises(WeightsError, match=r"buckets\.json cannot be read"):
        read_buckets(tmp_path)


def test_a_missing_list_is_refused(tmp_path: Path) -> None:
    """Without it every replica would train alone."""
    with pytest.raises(WeightsError, match=r"buckets\.json cannot be read"):
        bucket_channels(str(tmp_path / "device_d0.py"), "d0")


def test_a_list_of_other_parameters_is_refused(tmp_path: Path) -> None:
    replicas(tmp_path, Wire())
    [bucket] = buckets_of(read_buckets(tmp_path), "d0", (0,), ())
    with pytest.raises(WeightsError, match="bucket0 has 'b', not held here"):
        Replicas([bucket], "replica", ((0,), (1,)), {}, Wire(), False)  # type: ignore[arg-type]  # as above
    wrong = {"a": nn.Parameter(torch.zeros(4)), "b": nn.Parameter(torch.zeros(2))}
    with pytest.raises(WeightsError, match="the pieces of bucket0 are not all of it"):
        Replicas([bucket], "replica", ((0,), (1,)), wrong, Wire(), False)  # type: ignore[arg-type]  # as above


# --------------------------------------------------------------------------- weights of others


GATHERS = [
    [2, "gather", [0, 1], ["d0", "d1"], 2, 4],
    [3, "gather", [1, 0], ["d1", "d0"], 3, 4],
]


def unsharded(folder: Path, wire: Wire, sends: object) -> tuple[Unsharded, Replicas]:
    """Return a device that keeps "b"; another keeps "a"."""
    entry = {**LISTED["bucket0"], "waits": (), "sends": sends}
    entry["channels"] = [*LISTED["bucket0"]["channels"][:2], *GATHERS]
    (folder / "buckets.json").write_text(json.dumps({"bucket0": entry}))
    channels = bucket_channels(str(folder / "device_d0.py"), "d0")
    listed = read_buckets(folder)
    parameters = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.tensor([1.0, 2.0]))}
    buckets = [*buckets_of(listed, "d0", (0,), channels)]
    replicas = Replicas(buckets, "micro", ((0, 2), (1, 3)), parameters, wire, True)  # type: ignore[arg-type]  # as much of a Transport as is used
    release([parameters["a"]])
    return Unsharded(replicas, listed), replicas


def test_a_weight_is_there_in_forward_and_backward_only(tmp_path: Path) -> None:
    wire = Wire(torch.tensor([2.0, 3.0, 4.0]), torch.tensor([2.0, 3.0, 4.0]))
    found, replicas = unsharded(tmp_path, wire, {"2": [0, 1, 2, 2]})
    weight, x = replicas.parameters["a"], torch.ones(3, requires_grad=True)
    found.begin()
    assert wire.sent == [(2, [1.0, 2.0])]
    with found.whole(0):
        y = (x * weight).sum()
    assert is_released(weight)
    assert len(wire.sent) == 2
    with found.whole(0):
        given, made = torch.autograd.grad(y, (x, weight))
    assert is_released(weight)
    assert len(wire.sent) == 4
    assert (given.tolist(), made.tolist()) == ([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])


def test_views_of_a_weight_are_copied_before_it_goes(tmp_path: Path) -> None:
    wire = Wire(torch.tensor([2.0, 3.0, 4.0]))
    found, replicas = unsharded(tmp_path, wire, {"2": [1, 1, 1, 1]})
    with found.whole(0):
        kept = found.apart((replicas.parameters["a"].detach()[1:], torch.zeros(1)))
    assert kept[0].tolist() == [3.0, 4.0]


def test_a_file_without_sends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="lacks sends"):
        unsharded(tmp_path, Wire(), {"2": [0]})
