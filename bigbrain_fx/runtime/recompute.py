"""A forward that saves nothing for its backward, and its second run, which does.

    forward    x ──▶ stage ──▶ y      of all that a backward needs, only x is saved
    backward   x ──▶ stage ──▶ y ──▶ gradients

Both runs give the same bits. The first one records gradients as the second does, because some
kernels round differently where none are wanted. It frees all that at its end; the backward holds as
much, so that costs no memory. Random draws are keyed, so they come out again (see `Region.seeded`).
Tensors that the forward writes (running statistics, counters) are written once: the second run
reads them as the first found them. The same holds for tensors that a micro-batch
without rows writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .coded import MisuseError
from .feature import Compute, Feature
from .modules import owner_of


@dataclass(frozen=True)
class Read:
    """Inputs of one forward: its arguments, and copies of the tensors that it then wrote."""

    values: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]


class Twice:
    """Run a module forward without keeping anything, and again when its backward is due."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._writes: frozenset[str] | None = None  # known from the first run on

    def first(self, values: Mapping[str, Tensor]) -> tuple[Any, Read]:
        """Run forward; return the result, without its autograd graph, and what to run again with.

        Raises:
            MisuseError: the forward writes what it did not write when it first ran.
        """
        copies: dict[str, Tensor] = {}
        with self.copying(copies):
            result = self.module(**values)
        return _detached(result), Read(values, copies)

    def second(self, read: Read) -> Any:  # noqa: ANN401  # a tensor, or a tuple of them
        """Run forward again, and keep what the backward needs."""
        with self.with_copies(read.copies):
            return self.module(**read.values)

    @contextmanager
    def copying(self, copies: dict[str, Tensor]) -> Iterator[None]:
        """Fill a dict with the tensors that a forward in the block writes, as they were before it.

        The first run of the forward shows which tensors these are; until then all are copied.
        """
        before = {name: place.tensor for name, place in self._places.items()}
        names = before if self._writes is None else self._writes
        copies.update((name, before[name].detach().clone()) for name in names)
        versions = {name: tensor._version for name, tensor in before.items()}
        yield
        after = {name: place.tensor for name, place in self._places.items()}
        writes = {n for n, was in before.items() if was is not after[n]}
        writes |= {n for n, was in before.items() if was._version != versions[n]}
        if self._writes is None:
            writes |= {n for n, copy in copies.items() if not torch.equal(copy, after[n])}  # .data
            self._writes = frozenset(writes)
        _require_known(writes, self._writes)
        for name in copies.keys() - self._writes:
            del copies[name]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the module write into copies meanwhile, which are dropped."""
        before = {name: place.tensor.detach().clone() for name, place in self._places.items()}
        with self.with_copies(before):
            yield

    @contextmanager
    def with_copies(self, copies: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module read and write these meanwhile; two names of one tensor stay one."""
        now = {name: self._places[name].tensor for name in copies}
        one = {id(now[name]): copy for name, copy in copies.items()}
        for name in copies:
            self._places[name].put(one[id(now[name])])
        try:
            yield
        finally:
            for name, tensor in now.items():
                self._places[name].put(tensor)

    @cached_property
    def _places(self) -> Mapping[str, _Place]:
        """Return the places of buffers and frozen parameters, under all their names: found once."""
        buffers = [name for name, _ in self.module.named_buffers(remove_duplicate=False)]
        parameters = self.module.named_parameters(remove_duplicate=False)
        frozen = [name for name, parameter in parameters if not parameter.requires_grad]
        return {name: _Place(*owner_of(self.module, name)) for name in (*buffers, *frozen)}


@dataclass(frozen=True)
class _Place:
    """An attribute of a module that holds a buffer or a frozen parameter."""

    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """Return the tensor that is there now."""
        found = self.owner._buffers.get(self.attribute, None)
        found = self.owner._parameters[self.attribute] if found is None else found
        assert found is not None, f"{self.attribute} was there before the forward ran"
        return found

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there."""
        if self.attribute in self.owner._buffers:
            self.owner._buffers[self.attribute] = tensor
        elif isinstance(tensor, nn.Parameter):
            self.owner._parameters[self.attribute] = tensor
        else:
            self.owner._parameters[self.attribute] = nn.Parameter(tensor, requires_grad=False)


def _require_known(writes: set[str], known: frozenset[str]) -> None:
    if not writes <= known:
        raise MisuseError(
            f"{', '.join(sorted(writes - known))}: written now, but not when this stage first ran, "
            "so it cannot run again: leave the stage out of `recompute`",
            code="BX5119",
        )


def _detached(result: Any) -> Any:  # noqa: ANN401  # as it came: a tensor, or a tuple of them
    if isinstance(result, tuple | list):  # a kept module or an op of the user's may give a list
        return tuple(tensor.detach() for tensor in result)
    return result.detach()


class RecomputedStages(Feature):
    """Run the stages of `recompute` forward a second time before each backward."""

    def setup(self, device: Any) -> None:  # noqa: ANN401  # a Device, which knows this file
        """Prepare for a device."""
        self.device = device
        self.twice = {number: Twice(device.modules[number]) for number in device.recompute}

    def compute(self, run: Compute, stage: int, micro: int, values: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        """Run a stage forward, and keep only what it received."""
        if stage not in self.twice:
            return run(stage, micro, values)
        result, self.device._saved[stage, micro] = self.twice[stage].first(values)
        return result

    def restore(self, stage: int, micro: int, kept: Any) -> Any:  # noqa: ANN401  # a Read, or what is
        """Run a stage forward from what it received, with the same draws as the first time."""
        if not isinstance(kept, Read):
            return kept
        with self.device._running(stage, micro, "again"), self.device._drawing(micro):
            result = self.twice[stage].second(kept)
        return self.device._starting(stage, kept.values, result)


class UnevenRows(Feature):
    """Drop what the forward of a micro-batch without rows writes: running statistics, counters."""

    def running(self, stage: int, micro: int, phase: str) -> AbstractContextManager[None]:
        """Let a stage write into copies where its micro-batch counts nothing."""
        if phase != "forward" or self._counts(micro) or self._is_summed(stage):
            return nullcontext()
        return self._aside(stage)

    @contextmanager
    def _aside(self, stage: int) -> Iterator[None]:
        """Let a stage write into copies, and its opaque modules keep their attributes."""
        objects = self.device.objects
        kept = nullcontext() if objects is None else objects.aside()
        with Twice(self.device.modules[stage]).aside(), kept:
            yield

    def _counts(self, micro: int) -> bool:
        sizes = self.device.stream.sizes
        return not sizes or sizes[micro] > 0

    def _is_summed(self, stage: int) -> bool:
        """Whether replicas write the stage's statistics together, which leave such parts out."""
        statistics = self.device.statistics
        return statistics is not None and statistics.has(stage)
