"""The user's optimizer over the whole model beside a bundle's own per device: the same updates.

Both get the same gradients, so rounding in them does not count. This file knows optimizers and the
names of parameters; it knows no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend import same_numbers
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.training import Recipe, Stepper, clipped, norm_of

_ALIKE = 1e-9  # of a tensor's largest update, in float64
_SMALL = 1e-4  # of it, in the model's own type: more is no rounding
_UNITS = 8.0  # or units of rounding of its largest number
Tensors = Mapping[str, Tensor]


class Updates:
    """Updates that all devices' optimizers make with the loop's gradients, step by step.

    Args:
        file: with the user's optimizer, `lr_scale` and `clip_norm`.
        held: device -> names of the tensors it holds.
        own: how the bundle says that it is trained: each device updates so.
    """

    def __init__(self, file: Recipe, held: Mapping[str, set[str]], own: Recipe) -> None:
        self.file, self.own = file, own
        self.held = held
        self.lines: list[str] = []
        self._parts: _Parts | None = None
        self._rounded: dict[str, str] = {}
        self._steps: list[Path] = []

    @property
    def said(self) -> str:
        """Text on the largest difference of the weights, where it is allowed."""
        return "to rounding" if self._rounded else "bitwise"

    def take(
        self, step: int, before: Tensors, given: Tensors | None, after: Tensors, folder: Path
    ) -> None:
        """Update the tensors `before`, and compare with those `after` the loop's own update.

        Args:
            step: of training.
            before: all tensors before the step.
            given: the gradients; a parameter without one is left out. None: nothing is updated.
            after: all tensors after it.
            folder: where gradients are kept for another look.
        """
        if self.lines:
            return
        if given is not None:
            laid_tensors.save(given, folder / "given")
        self._steps.append(folder)
        try:
            own = self._parts or _Parts(self.own, self._names(before), before, by_rows=True)
            self._parts = own
            self._parts.step(step, before, given)
        except Exception as error:  # the user's own code
            first = (str(error).splitlines() or [""])[0]
            self.lines.append(f"the optimizer of one device fails: {type(error).__name__}: {first}")
            return
        for name, value in self._parts.numbers():
            if not same_numbers(value, after[name]):
                self._judge(step, name, before[name], value, after[name])

    def _names(self, before: Tensors) -> list[list[str]]:
        """Return the tensors of each device, in the order of the model."""
        return [[name for name in before if name in names] for names in self.held.values()]

    def _judge(self, step: int, name: str, before: Tensor, found: Tensor, want: Tensor) -> None:
        update = float((want.double() - before.double()).abs().max())
        error = float((want.double() - found.double()).abs().max())
        unit = torch.finfo(want.dtype).eps * _UNITS * float(want.abs().max())
        line = f"step {step}: {name} is updated otherwise, by {error / (update or 1.0):.1e}"
        if error <= max(_SMALL * update, unit):
            self._rounded.setdefault(name, line)
        else:
            self.lines.append(f"{line} of its update, by an optimizer per device")

    def differences(self) -> list[str]:
        """Return what differs; where it may be rounding, float64 decides."""
        if self.lines or not self._rounded:
            return self.lines
        start = laid_tensors.read(self._steps[0] / "state")
        wide = {name: tensor.double() for name, tensor in start.items()}
        parts = self._names(wide)
        whole = _Parts(self.file, [list(dict.fromkeys(n for part in parts for n in part))], wide)
        each = _Parts(self.own, parts, wide, by_rows=True)
        for step, folder in enumerate(self._steps):
            file = folder / "given"
            given = (
                {n: g.double() for n, g in laid_tensors.read(file).items()}
                if file.exists()
                else None
            )
            for way in (whole, each):
                way.step(step, None, given)
        want = dict(whole.numbers())
        far = {n for n, have in each.numbers() if _far(have, want[n], wide[n])}
        return [line for name, line in self._rounded.items() if name in far]


def _far(have: Tensor, want: Tensor, start: Tensor) -> bool:
    update = float((want - start).abs().max())
    return not float((have - want).abs().max()) <= _ALIKE * update


class _Parts:
    """One optimizer for each part of a model's parameters.

    With `by_rows` they lie in memory as in a bundle; else as `numbers` do.
    """

    def __init__(
        self,
        file: Recipe,
        parts: Sequence[Sequence[str]],
        numbers: Tensors,
        *,
        by_rows: bool = False,
    ) -> None:
        self.file, self.order = file, list(numbers)
        self.layout = torch.contiguous_format if by_rows else torch.preserve_format
        self.params = [
            {name: nn.Parameter(self._copy(numbers[name].detach())) for name in part}
            for part in parts
        ]
        self.steppers = [Stepper(file, part) for part in self.params if part]

    def step(self, step: int, before: Tensors | None, given: Tensors | None) -> None:
        """Update, from other numbers if they are given; without gradients let the step pass."""
        gradients = {} if given is None else self._clipped(given)
        for part in self.params:
            for name, parameter in part.items():
                if before is not None:
                    parameter.data.copy_(before[name])
                parameter.grad = self._copy(gradients[name]) if name in gradients else None
        for stepper in self.steppers:
            if given is not None:
                stepper.set_rate(step)
                stepper.optimizer.step()
            stepper.end()

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=self.layout)

    def _clipped(self, given: Tensors) -> Tensors:
        """Clip as a bundle does: each parameter's norm, then the norm of the norms."""
        if self.file.clip_norm is None:
            return given
        known = {name for part in self.params for name in part}
        norms = [norm_of(given.get(name)) for name in self.order if name in known]
        return clipped(given, norms, self.file.clip_norm)

    def numbers(self) -> list[tuple[str, Tensor]]:
        """Return every part's parameters with their names; a shared one several times."""
        return [(name, p.detach()) for part in self.params for name, p in part.items()]
