"""Gradients that replicas sum together: what buckets.json says of them, and their channels.

A bucket is what one stage of each replica makes gradients of. buckets.json names its parameters,
their order, and the ends of its pieces. This file adds nothing up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .channel import Channel
from .disk import read_regular
from .json_once import once
from .modules import AGAIN, WeightsError

Ways = Mapping[int, Channel]  # place of a replica among the bucket's -> the channel to or from it


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together.

    Attributes:
        stage: that makes them here. place: of this replica among the bucket's.
        params: whose they are, by their names in the model, in the order of the flat tensor.
        pieces: elements that each replica sums; of several shard groups those of each.
        marks: elements after each piece: 1 for a parameter that got a gradient. 0: all do.
        waits: whether its gradients are made by `backward_weight` here, and not by the backward.
        parts, pieces_in: channels of "reduce" to and from the others.
        sums, sums_in: channels of "gather" to and from the others.
        filled: whether all pieces lie in as much room, as collectives want it.
    """

    name: str
    stage: int
    place: int
    params: tuple[str, ...]
    pieces: tuple[int, ...]
    marks: int
    waits: bool
    parts: Ways
    parts_in: Ways
    sums: Ways
    sums_in: Ways
    filled: bool = False

    def piece(self, flat: Tensor, place: int) -> Tensor:
        """Return the piece that a replica sums, and its marks."""
        start = self.start(place)
        return flat[start : start + self.size(place) + self.marks]

    def size(self, place: int) -> int:
        """Return how many elements a replica's piece has."""
        return self.pieces[place % len(self.pieces)]

    def start(self, place: int) -> int:
        """Return where a replica's piece begins."""
        shard = place % len(self.pieces)
        before = shard * max(self.pieces) if self.filled else sum(self.pieces[:shard])
        return before + shard * self.marks

    @property
    def room(self) -> int:
        """How many elements the largest piece has, with its marks."""
        return max(self.pieces) + self.marks

    @property
    def elements(self) -> int:
        """How many a flat tensor has."""
        last = len(self.pieces) - 1
        return self.start(last) + (self.room if self.filled else self.pieces[last] + self.marks)


Listed = Mapping[str, Mapping[str, Any]]  # buckets.json: what it says of each bucket, by name
_SAID = {"stages", "dtype", "channels"}
_SUMS = {"params", "pieces", "marks", "waits"}
_STATISTICS = {"buffers", "counters"}


def read_buckets(folder: Path) -> Listed:
    """Read buckets.json of a bundle with replicas.

    Raises:
        WeightsError: it cannot be read.
    """
    path = folder / "buckets.json"
    try:
        found: Listed = json.loads(read_regular(path), object_pairs_hook=once)
        for name, entry in found.items():
            more = _STATISTICS if "buffers" in entry else _SUMS
            if (_SAID | more) - set(entry):
                raise ValueError(f"{name} needs {', '.join(sorted(_SAID | more))}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read ({error}): {AGAIN}", code="BX5006") from error
    return found


def bucket_channels(device_file: str, device: str) -> tuple[Channel, ...]:
    """Return the channels of a device's buckets, from buckets.json beside its file.

    Raises:
        WeightsError: it cannot be read.
    """
    return channels_of(read_buckets(Path(device_file).resolve().parent), device)


def channels_of(listed: Listed, device: str) -> tuple[Channel, ...]:
    """Return the channels of a device's buckets."""
    found = [(name, entry["dtype"], "sends" in entry, entry) for name, entry in listed.items()]
    made = [_channel(*about, *each) for *about, entry in found for each in entry["channels"]]
    return tuple(channel for channel in made if device in (channel.sender, channel.receiver))


def _channel(
    name: str,
    dtype: str,
    on_demand: bool,
    tag: int,
    kind: str,
    ends: Sequence[int],
    devices: Sequence[str],
    elements: int,
    per_step: int,
) -> Channel:
    (source, target), (sender, receiver) = ends, devices
    shape, kind_of = (elements,), getattr(torch, dtype)
    about = tag, kind, name, source, target, sender, receiver, shape, kind_of
    return Channel(*about, per_step=per_step, on_demand=on_demand)


def buckets_of(
    listed: Listed, device: str, stages: Sequence[int], channels: Sequence[Channel]
) -> Iterator[Bucket]:
    """Yield the buckets of a device's stages, with their channels."""
    for name, entry in listed.items():
        places = {int(stage): place for place, stage in enumerate(entry["stages"])}
        for stage in [stage for stage in stages if stage in places]:
            own = [c for c in channels if c.value == name and stage in (c.source, c.target)]
            away = {(c.kind, places[c.target]): c for c in own if c.sender == device}
            here = {(c.kind, places[c.source]): c for c in own if c.receiver == device}
            yield Bucket(
                name,
                stage,
                places[stage],
                tuple(entry["params"]),
                tuple(entry["pieces"]),
                int(entry["marks"]),
                stage in entry["waits"],
                _of_kind("reduce", away),
                _of_kind("reduce", here),
                _of_kind("gather", away),
                _of_kind("gather", here),
            )


def _of_kind(kind: str, channels: Mapping[tuple[str, int], Channel]) -> Ways:
    return {place: channel for (found, place), channel in channels.items() if found == kind}
