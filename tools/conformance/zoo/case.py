"""One case of the coverage table: how to build a small model, its batch and its loss.

This file knows torch's types only; the cases stand in the families' files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Batch = Mapping[str, object] | tuple[object, ...]
Loss = Callable[[Any, Any], Tensor]
DEPTH = 4  # layers of a case: two for each of two devices


@dataclass(frozen=True)
class Case:
    """A small model as a user would bring it.

    Attributes:
        name: unique in the zoo.
        build: makes the model with so many layers.
        example_batch: makes a mini-batch; dimension 0 is the batch.
        loss: of the model's output and the batch; None where the output holds it.
        autocast: as in a model file.
        depth: number of layers; 0 where there is no such knob.
        refused: the case shows something that cannot be captured: it must be refused, not wrong.
        remedy: the case that does what the refusal of this one advises.
        leaves: modules to keep whole, as in a model file.
        family: the file it stands in; filled in by the zoo.
    """

    name: str
    build: Callable[[int], nn.Module]
    example_batch: Callable[[], Batch]
    loss: Loss | None = None
    autocast: str | None = None
    depth: int = DEPTH
    refused: bool = False
    remedy: str = ""
    leaves: tuple[str, ...] = ()
    family: str = ""

    def model(self, times: int = 1) -> nn.Module:
        """Build the model, with so many times its layers."""
        return self.build(self.depth * times)
