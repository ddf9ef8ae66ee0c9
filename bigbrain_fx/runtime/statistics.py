"""Running statistics of BatchNorm, equal on all replicas, and bitwise equal to one process.

    forward      F.batch_norm ──▶ mean and variance of the micro-batch, noted; buffers stay
    once a step  notes of all replicas ──▶ buffers, in the order of micro-batches

In training a forward does not read the statistics that it writes, and the update can wait for the
others. The note is exact: a buffer of zeros that is updated with momentum 1. The update then rounds
as torch's CPU kernel does. Copied into bundles with replicas. The module knows no schedule.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .channel import Channel, Transport
from .modules import AGAIN, WeightsError

Pair = tuple[Tensor, Tensor]  # a running mean, and a running variance


@dataclass(frozen=True)
class Group:
    """Tensors that one stage of each replica writes.

    Attributes:
        stage: that writes it here. place: of this replica among those that write it.
        pairs: running means and variances, for each call in a micro-batch.
        counters: whole numbers, and what a micro-batch adds to each.
        away: channels to other replicas. here: place of a replica -> the channel from it.
    """

    stage: int
    place: int
    pairs: tuple[Pair, ...]
    counters: tuple[tuple[Tensor, int], ...]
    away: tuple[Channel, ...]
    here: Mapping[int, Channel]


@dataclass(frozen=True)
class Note:
    """Statistics of one call of F.batch_norm, before the update."""

    running_mean: Tensor
    momentum: float
    reads: torch.dtype
    mean: Tensor
    variance: Tensor


class _Noting(TorchFunctionMode):
    """Let F.batch_norm write its statistics here in place of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # what any function of torch's returns
        call = self._norm if func is F.batch_norm else func
        return call(*args, **(kwargs or {}))

    def _norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or running_mean is None or running_var is None:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        result = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
        self.notes.append(Note(running_mean, momentum, input.dtype, mean, variance))
        return result


class Statistics:
    """Tensors that one device writes in its forwards, and shares with the other replicas.

    Args:
        groups: of this device's stages.
        micros: of each replica, the numbers of its micro-batches.
        transport: to the other devices.

    Attributes:
        began: until the step's update, each buffer's value at its beginning, by the buffer's id.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        micros: Sequence[Sequence[int]],
        transport: Transport,
    ) -> None:
        self.groups, self.micros, self.transport = groups, micros, transport
        self._stages = frozenset(group.stage for group in groups)
        self._notes: dict[tuple[int, int], dict[int, deque[Note]]] = {}
        self._told: list[dict[int, list[Note]]] = []
        self._written = [t for g in groups for pair in (*g.pairs, *g.counters) for t in pair
                         if isinstance(t, Tensor)]  # fmt: skip
        self.began: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Forget the step before; keep what this one may write."""
        self._notes = {}
        self.began = {id(tensor): tensor.clone() for tensor in self._written}

    def take_back(self) -> None:
        """Be as this step began."""
        with torch.no_grad():
            for tensor in self._written:
                tensor.copy_(self.began.get(id(tensor), tensor))

    def end(self) -> None:
        """Note that the step's update is made: what was written counts."""
        self.began = {}

    def has(self, stage: int) -> bool:
        """Whether a stage writes what other replicas write, too."""
        return stage in self._stages

    @contextmanager
    def noting(
        self, stage: int, micro: int, *, again: bool = False, counts: bool = True
    ) -> Iterator[None]:
        """Note what a forward in the block would write; a second run of one has been noted.

        A micro-batch without rows of its own does not count.
        """
        if not self.has(stage):
            yield
            return
        with _Noting() as seen:
            yield
        own = [group for group in self.groups if group.stage == stage and not (counts or again)]
        for counter, added in (pair for group in own for pair in group.counters):
            counter.sub_(added)
        if not again:
            found: dict[int, deque[Note]] = defaultdict(deque)
            for note in seen.notes:
                found[id(note.running_mean)].append(note)
            self._notes[stage, micro] = found

    def tell(self) -> None:
        """Send what was noted to the other replicas."""
        self._told = [self._own(group) for group in self.groups]
        for group, noted in zip(self.groups, self._told, strict=True):
            for channel in group.away:
                self.transport.send(channel, torch.cat([_flat(notes) for notes in noted.values()]))

    def take(self, idle: Collection[int] = ()) -> None:
        """Take what the others have noted; write all but `idle` in the order of micro-batches."""
        for group, noted in zip(self.groups, self._told, strict=True):
            rows = {micro: _flat(notes) for micro, notes in noted.items() if notes}
            for place, channel in group.here.items():
                received = self.transport.recv(channel).chunk(len(self.micros[place]))
                rows.update(zip(self.micros[place], received, strict=True))
            calls = next(iter(noted.values()))
            for micro in sorted(rows.keys() - {*idle}):
                _write(group.pairs, calls, rows[micro])
            self._count(group, idle)

    def _own(self, group: Group) -> dict[int, list[Note]]:
        """Return what this replica's micro-batches have noted, in the order of the pairs."""
        found: dict[int, list[Note]] = {}
        for micro in self.micros[group.place]:
            noted = self._notes[group.stage, micro]
            try:
                found[micro] = [noted[id(mean)].popleft() for mean, _ in group.pairs]
            except IndexError:
                raise WeightsError(
                    f"stage {group.stage} ran a BatchNorm less often than planned, in micro-batch "
                    f"{micro}: {AGAIN}",
                    code="BX5160",
                ) from None
        return found

    def _count(self, group: Group, idle: Collection[int]) -> None:
        """Count the other replicas' micro-batches, too."""
        away = [micros for place, micros in enumerate(self.micros) if place != group.place]
        others = sum(micro not in idle for micros in away for micro in micros)
        for counter, added in group.counters:
            counter.add_(added * others)


def _flat(notes: Sequence[Note]) -> Tensor:
    return torch.cat([part.reshape(-1) for note in notes for part in (note.mean, note.variance)])


def _write(pairs: Sequence[Pair], calls: Sequence[Note], row: Tensor) -> None:
    """Write what one micro-batch adds; `calls` say by which momentum."""
    parts = row.split([tensor.numel() for pair in pairs for tensor in pair])
    for number, (pair, call) in enumerate(zip(pairs, calls, strict=True)):
        _update(pair, call, parts[2 * number], parts[2 * number + 1])


def _update(pair: Pair, call: Note, mean: Tensor, variance: Tensor) -> None:
    """Update running statistics, rounding where torch's CPU kernel does.

    There the momentum has the type of the buffers; a variance, but not a mean, has the type that
    sums of the input have.

    Source: torch, aten/src/ATen/native/Normalization.cpp, batch_norm_cpu_update_stats_template.
    """
    running_mean, running_variance = pair
    given = torch.tensor(call.momentum, dtype=running_mean.dtype)
    part, rest = given.item(), (1 - given).item()
    running_mean.mul_(rest).add_(mean.view_as(running_mean) * part)
    wide = torch.float64 if call.reads in (torch.float32, torch.float64) else torch.float32
    added = variance.view_as(running_variance).to(wide) * part
    running_variance.copy_(added + (running_variance * rest).to(wide))


def groups_of(
    listed: Mapping[str, Mapping[str, Any]],
    device: str,
    modules: Mapping[int, nn.Module],
    channels: Sequence[Channel],
) -> Iterator[Group]:
    """Yield what a device's stages write, of what buckets.json lists.

    Raises:
        WeightsError: it names a buffer that the stage does not hold.
    """
    for name, entry in listed.items():
        places = {int(stage): place for place, stage in enumerate(entry["stages"])}
        for stage in [stage for stage in modules if stage in places]:
            held = dict(modules[stage].named_buffers(remove_duplicate=False))
            own = [c for c in channels if c.value == name and stage in (c.source, c.target)]
            try:
                pairs = [held[buffer] for buffer in entry["buffers"]]
                counters = [(held[key], int(added)) for key, added in entry["counters"]]
            except KeyError as error:
                raise WeightsError(
                    f"buckets.json: {name} has {error}, no buffer of stage {stage}: {AGAIN}",
                    code="BX5161",
                ) from None
            yield Group(
                stage,
                places[stage],
                tuple(zip(pairs[::2], pairs[1::2], strict=True)),
                tuple(counters),
                tuple(c for c in own if c.sender == device),
                {places[c.source]: c for c in own if c.receiver == device},
            )
