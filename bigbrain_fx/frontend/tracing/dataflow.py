"""Calls of a step on fake tensors: ops, constants, and which results they read.

    h = x @ w            ("aten.mm", 0, 1)
    y = h * 0.5          ("aten.mul", 2, 0.5)

Two runs with the same calls compute the same function of the batch. A fake run takes the same
second for a model of any size. Python that reads a tensor's numbers fails in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from bigbrain_fx.frontend.tracing.plain import Plain

_LONG = 4096  # elements: of a larger constant a sample counts
Calls = list[tuple[object, ...]]


def calls_of(
    step: Callable[..., object],
    model: nn.Module,
    loss: object,
    tensors: Mapping[str, Tensor],
    fake: FakeTensorMode | None = None,
) -> Calls:
    """Return the calls of a step on a batch of these shapes.

    Args:
        step: takes the tensors of a batch.
        model: its parameters and buffers have a number each.
        loss: likewise, where it is a module.
        tensors: of the batch, in order; their numbers are not read. They are told apart by name.
        fake: of earlier runs, which may have left tensors in attributes.

    Raises:
        Exception: the step's own; among them that it reads numbers.
    """
    modules = [part for part in (model, loss) if isinstance(part, nn.Module)]
    held = [t for part in modules for t in (*part.parameters(), *part.buffers())]
    with fake or fake_mode() as fake:
        batch = {name: fake.from_tensor(tensor) for name, tensor in tensors.items()}
        recording = _Recording([*held, *(batch[name] for name in sorted(batch))])
        with recording, torch.enable_grad():
            step(*batch.values())
    return recording.calls


def fake_mode() -> FakeTensorMode:
    """Return the mode of a fake run, in which parameters and buffers stand for themselves."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True)
class FakePlain(Plain):
    """Runs of a step without numbers, of a model of any size: what a run gives is its calls.

    Attributes:
        names: of the batch's tensors, in order.
        loss: the user's.
        known: the calls of the first run.
    """

    names: tuple[str, ...] = ()
    loss: object = None
    fake: FakeTensorMode = field(default_factory=fake_mode)
    known: Calls = field(default_factory=list)

    def run(
        self, tensors: Sequence[Tensor], seed: int, python_seed: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run once; there are no results."""
        self.left(tensors, seed)
        return ()

    def left(  # type: ignore[override]  # no numbers
        self, tensors: Sequence[Tensor], seed: int, buffers: object = None
    ) -> Calls:
        """Run once; return the calls: of a later run that reads numbers, to log them say, none new.

        Raises:
            Exception: as `calls_of`; the first run may read no numbers.
        """
        named = dict(zip(self.names, tensors, strict=True))
        try:
            with self.seeded(tensors, seed):
                found = calls_of(self.step, self.model, self.loss, named, self.fake)
        except DataDependentOutputException:
            if not self.known:
                raise
            return self.known
        self.known.extend(() if self.known else found)
        return found


class _Recording(TorchDispatchMode):
    """Record each call; tensors are numbered as they come, and kept, so that no number is reused.

    A constant counts by its numbers: one that the step makes has no name.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has it so
        self.calls: Calls = []
        self._kept: list[Tensor] = []
        self._number: dict[int, int] = {}
        for tensor in known:
            self._note(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = kwargs or {}
        read = [self._said(leaf) for leaf in tree_leaves((args, dict(given)))]
        self.calls.append((str(func), *sorted(given), *read))
        found = func(*args, **given)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return found

    def _note(self, tensor: Tensor) -> None:
        if id(tensor) not in self._number:
            self._number[id(tensor)] = len(self._kept)
            self._kept.append(tensor)

    def _said(self, value: Any) -> object:  # noqa: ANN401  # any argument of an op
        if not isinstance(value, Tensor):
            return repr(value)
        known = self._number.get(id(value))
        if known is not None:
            return known
        self._note(value)
        kind = tuple(value.shape), str(value.dtype)
        if isinstance(value, FakeTensor):
            return kind
        with _disable_current_modes():
            flat = value.detach().flatten()
            return *kind, flat[:: 1 + len(flat) // _LONG].tolist()
