"""An opaque loss: the last device calls the user's function, which no trace can hold.

A plain run shows which tensors of the output and of the batch the loss reads. The op gets these
alone, unless values of tensors decide which the loss reads. Gradients through it are ordinary
autograd. This file knows losses; it knows no graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from bigbrain_fx.core import Arg, Graph
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.opaque.rules import asks_within
from bigbrain_fx.frontend.tracing.opaque.tensor_access import TensorReads
from bigbrain_fx.frontend.tracing.state.python_rng import rolls
from bigbrain_fx.frontend.tracing.step import Loss, Route
from bigbrain_fx.frontend.translation.batch_dims import Key
from bigbrain_fx.frontend.translation.kept import LOSS, Keeper, KeptCall, place, placed
from bigbrain_fx.frontend.translation.nests import TensorSlot, decode, replaced
from bigbrain_fx.frontend.translation.opaque import Dice
from bigbrain_fx.runtime import walk

VARIES = None, "what only it reads has another shape in each batch"
"""Why a loss is opaque that could be traced: its place, which is none, and the sentence."""
SAID_OF_VARYING = (
    "the loss is opaque, since what only it reads has another shape in each batch: the device that "
    "has the output calls loss(output, batch) of the model file, for one micro-batch"
)


def of_loss_alone(batch: object, how: Route) -> tuple[Key, ...]:
    """Return the keys of the tensors of a batch that do not reach forward."""
    return tuple(
        key for key, value in walk(batch) if isinstance(value, Tensor) and not how.reaches(key)
    )


def with_varying(graph: Graph, keys: Collection[Key]) -> Graph:
    """Return a graph in which the inputs with these keys have any shape."""
    inputs = (replace(entry, varies=entry.key in keys) for entry in graph.inputs)
    return replace(graph, inputs=tuple(inputs)) if keys else graph


@dataclass
class KeptLoss:
    """The user's loss, and its facts from plain runs.

    Attributes:
        reads: indices of the tensors in (output, batch) that it reads; None when nothing was run,
            or when data decide.
        dtype: of the loss. random: whether it draws random numbers.
    """

    loss: Loss
    reads: set[int] | None = None
    dtype: torch.dtype = torch.float32
    random: bool = False

    def observed(self, output: object, batch: object) -> Tensor:
        """Compute the loss and record its reads; takes the place of the loss in a plain run.

        It runs on the inputs of a bundle: with an output that is no nest of tensors, such as a
        distribution, it fails here.
        """
        given: list[Tensor] = []
        nest = place((output, batch), given, lenient=True)
        own = cast("tuple[object, object]", decode(nest, lambda arg: placed(arg, given)))
        with (
            asks_within(given, "the loss"),
            TensorReads() as touched,
            Dice() as dice,
            rolls() as rolled,
        ):
            found = self.loss(*own)
        self.reads = (self.reads or set()) | touched.numbers(given)
        self.random |= dice.thrown or bool(rolled)
        if not isinstance(found, Tensor):
            raise TypeError("an opaque loss returns a tensor alone")
        self.dtype = found.dtype
        return found

    def traced(self, keeper: Keeper) -> Loss:
        """Return the substitute of the loss in a trace: one node."""

        def stand_in(output: object, batch: object) -> Tensor:
            given: list[Tensor] = []
            nest = place((output, batch), given, lenient=True)
            kept = [t for i, t in enumerate(given) if self.reads is None or i in self.reads]
            if not kept:
                raise CaptureError(
                    "the loss reads no tensor", code="BX0150", help="let it read the output"
                )
            numbers = [i for i in range(len(given)) if self.reads is None or i in self.reads]
            call = KeptCall(LOSS, "loss", fewer(nest, numbers), (), self._shapes)
            found = keeper.call(call, kept)
            assert isinstance(found, Tensor)
            return found

        return stand_in

    def _shapes(self, call: KeptCall, tensors: list[Tensor]) -> list[Tensor]:
        call.result, call.outputs, call.random = cast("Arg", TensorSlot(0)), 1, self.random
        call.views = (None,)
        return [torch.empty((), dtype=self.dtype, device=tensors[0].device)]


def fewer(nest: Arg, numbers: Sequence[int]) -> Arg:
    """Return a call's arguments with these tensors alone, None in place of all others."""
    places = {old: TensorSlot(new) for new, old in enumerate(numbers)}
    return replaced(nest, lambda leaf: _moved(leaf, places))


def _moved(leaf: object, places: Mapping[int, TensorSlot]) -> object:
    """Give a tensor its index among the read ones; a tensor that is not read becomes None."""
    return places.get(leaf.index) if isinstance(leaf, TensorSlot) else leaf
