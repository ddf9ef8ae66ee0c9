"""Deferred weight gradients: a backward makes those of inputs, and those of weights on request.

    forward            x ──▶ layer ──▶ y        x and the place of y in autograd's graph are noted
    backward           gradient of y ──▶ gradient of x         the first is noted, too
    backward_weight    (x, gradient of y) ──▶ gradients of weight and bias, later

A layer runs with an alias of its weight (`deferred_layers`); later gradients come from the same
products, and are bitwise equal (`deferred_layers`).

Copied into bundles of which a stage defers. The module knows no schedule.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2: B and W.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .coded import MisuseError
from .compared_stream import AgreeingTransport
from .data import Stream
from .deferred_layers import Tap, WaitingTap, made, tapping, tensors_of, waiting_tap
from .device import Device
from .finite import NotFiniteError
from .gradients import gradients
from .pipeline_device import Hook, Saved

if TYPE_CHECKING:
    pass


class DeferringDevice(Device):
    """A device of which some stages make the gradients of weights by `backward_weight`.

    Attributes:
        deferring: their numbers.
    """

    deferring: tuple[int, ...] = ()

    def __init__(
        self, transport: AgreeingTransport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self._taps: dict[tuple[int, int], list[Tap]] = {}
        self._waiting: dict[tuple[int, int], list[WaitingTap]] = {}
        self._tapped: frozenset[int] = frozenset()

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401
        """Run a stage forward; of one that runs again, the second run is noted."""
        if stage not in self.deferring or stage in self.recompute:
            return super().forward(stage, micro, **values)
        with tapping() as taps:
            result = super().forward(stage, micro, **values)
        if (stage, micro) in self._saved:
            self._taps[stage, micro] = taps
        return result

    def _start_of(self, stage: int, micro: int) -> Saved:
        if stage not in self.deferring or stage not in self.recompute:
            return super()._start_of(stage, micro)
        with tapping() as taps:  # of the second run
            saved = super()._start_of(stage, micro)
        self._taps[stage, micro] = taps
        return saved

    def _gradients(
        self, stage: int, micro: int, roots: list[Tensor], inputs: list[Tensor], seeds: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Make the gradients of inputs, and those that layers' weights are to be made of."""
        if stage not in self.deferring:
            return super()._gradients(stage, micro, roots, inputs, seeds)
        taps = self._taps.pop((stage, micro))
        self._tapped = frozenset(id(p) for tap in taps for p in tensors_of(tap))
        try:
            edges = [tap.edge for tap in taps]
            found = gradients(roots, [*inputs, *edges], seeds)
        finally:
            self._tapped = frozenset()
        noted = found[len(inputs) :]
        self._waiting[stage, micro] = [*map(waiting_tap, taps, noted)]
        return found[: len(inputs)]

    def _adder(self, name: str, parameter: nn.Parameter) -> Hook:
        """Refuse a gradient of a parameter that also waits: the sum would have another order."""
        add = super()._adder(name, parameter)

        def checked(gradient: Tensor | None) -> Tensor | None:
            if gradient is not None and id(parameter) in self._tapped:
                raise MisuseError(
                    f"stage {self._backward_of}: a layer's gradient of {name} waits, but something "
                    "else of the stage uses it too: leave the stage out of "
                    "--delay-weight-gradients",
                    code="BX5031",
                )
            return add(gradient)

        return checked

    def backward_weight(self, stage: int, micro: int) -> None:
        """Make the gradients of weights that a stage's backward has left out; add them up.

        Raises:
            MisuseError: none wait: its backward has not run, or they are made already.
            NotFiniteError: one is not finite, and the policy is to stop.
        """
        waiting = self._waiting.pop((stage, micro), None)
        if waiting is None:
            raise MisuseError(
                f"stage {stage}, micro-batch {micro}: no gradients of weights wait", code="BX5032"
            )
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        looks = self._looks_at_once()
        with torch.no_grad():
            for parameter, gradient in made(waiting):
                name = names[id(parameter)]
                if looks and _is_spoiled(gradient):
                    raise NotFiniteError(
                        f"step {self.step}, stage {stage}, micro-batch {micro}: the gradient of "
                        f"{name} is not finite (device {self.name})",
                        code="BX5033",
                    )
                self._add(name, stage, micro, gradient)

    def give_up_step(self) -> None:
        """Be as this step began."""
        super().give_up_step()
        self._taps.clear()
        self._waiting.clear()

    def optimizer_step(self) -> None:
        """Update the parameters.

        Raises:
            MisuseError: a gradient still waits; nothing is updated.
        """
        if self._waiting:
            stage, micro = min(self._waiting)
            raise MisuseError(
                f"stage {stage}, micro-batch {micro}: gradients of weights still wait at the "
                f"optimizer's step: step_once lacks weights_{stage}",
                code="BX5034",
            )
        super().optimizer_step()


def _is_spoiled(gradient: Tensor) -> bool:
    """Whether a number that is not finite has come into a gradient through what made it.

    Of a product g.t() @ x one column sees all of g, and one row all of x. A sum may be infinite
    though no number is: then all are looked at.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    seen = [gradient[0], gradient[:, 0]] if gradient.dim() == 2 else [gradient]
    if all(math.isfinite(float(part.sum(dtype=wide))) for part in seen):
        return False
    return not bool(torch.isfinite(gradient).all())
