"""Trials whether an opaque step may run in micro-batches, or on replicas.

    nothing stays     a call leaves nothing that the next one, or a later step, reads
    gradients add up  half a loss twice has its gradient: no hook bounds it, no optimizer steps
    one model         every process builds the same: nothing draws without a seed

Everything runs in forks of this process.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bigbrain_fx.frontend.forked import FAILED, run_apart, values, values_of_text
from bigbrain_fx.frontend.micro_batches.causes import NOT_GROWING
from bigbrain_fx.frontend.modelfile import ModelFile
from bigbrain_fx.frontend.opaque_step.trial import answer_of, asked, made_optimizer
from bigbrain_fx.frontend.opaque_step.user_step import UserStep
from bigbrain_fx.frontend.tracing.plain import seed_python
from bigbrain_fx.runtime import mapped, others_of

_SCALES = ((0.5, 2), (2.0**20, 1), (2.0**-20, 1))
"""Of a loss, and how often it is run: powers of two, so that plain gradients scale bit by bit."""
_ROUNDING = 1e-4  # share of a gradient's norm: kernels may add in another order
_MOVED = 1.01  # weights times this: an average of weights that begins as their copy has to move


@dataclass(frozen=True)
class PartsTrial:
    """A user's step, the micro-batches of its example, and the model file that has both."""

    step: UserStep
    parts: Sequence[object]
    file: ModelFile
    module: types.ModuleType
    seed: int

    def fault(self) -> str:
        """Return why micro-batches train something else; empty where no run shows it."""
        in_turn, alone = self._last_losses()
        if in_turn is None or alone is None:
            return "a micro-batch cannot be run by itself"
        if in_turn != alone:
            return "a micro-batch reads what one before left"
        found = asked(self._add_up)
        if "fault" not in found:
            return "whether micro-batches add up could not be tried"
        return str(found["fault"]) or self._other_parameters() or self._drawn()

    def _other_parameters(self) -> str:
        """Say that the optimizer steps what no sum over replicas has: a criterion's weights."""

        def count() -> Mapping[str, str]:
            made, _ = made_optimizer(self.file)
            return answer_of({"found": len(others_of(self.file.model, made))})

        some = asked(count).get("found")
        return "the optimizer steps a parameter that the model does not have" if some else ""

    # ------------------------------------------------------------------ nothing stays

    def _last_losses(self) -> tuple[object, object]:
        """Return the last micro-batch's loss after the earlier ones, and alone; None: it fails."""
        runs = [partial(self._last_loss, each) for each in (self.parts, self.parts[-1:])]
        in_turn, alone = (asked(each).get("loss") for each in runs)
        return in_turn, alone

    def _last_loss(self, parts: Sequence[object]) -> Mapping[str, str]:
        self.step.model.train()
        before = len(self.parts) - len(parts)
        losses = [self._run(part, micro, 1.0) for micro, part in enumerate(parts, before)]
        return answer_of({"loss": losses[-1]})

    def _run(self, part: object, micro: int, scale: float) -> float:
        """Run forward and backward once; return the loss."""
        torch.manual_seed(self.seed + micro)
        seed_python(self.seed + micro)
        loss = self.step.loss_of(mapped(part, lambda tensor, _: tensor.clone()))
        (loss * scale).backward()
        return float(loss.detach())

    # ------------------------------------------------------------------ gradients add up

    def _add_up(self) -> Mapping[str, str]:
        """Run one micro-batch again and again, its loss scaled."""
        model = self.step.model.train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(_MOVED)
        loss, gradients = self._scaled(1.0, 1)
        left = dict(self._left())
        for scale, times in _SCALES:
            other_loss, other = self._scaled(scale, times)
            now = dict(self._left())
            changed = [name for name in {**left, **now} if left.get(name) != now.get(name)]
            if changed:
                return answer_of({"fault": f"each micro-batch changes {changed[0]}"})
            if loss != other_loss:
                return answer_of({"fault": "a second call on the same rows has another loss"})
            unlike = _unlike(gradients, other)
            if unlike:
                return answer_of({"fault": NOT_GROWING.format(unlike)})
        return answer_of({"fault": ""})

    def _scaled(self, scale: float, times: int) -> tuple[float, dict[str, Tensor]]:
        """Add up the gradients of a scaled loss; return the loss, and them as of the plain one."""
        model = self.step.model
        model.zero_grad(set_to_none=True)
        losses = [self._run(self.parts[0], 0, scale) for _ in range(times)]
        named = ((n, p.grad) for n, p in model.named_parameters())
        found = {n: g.to_dense().clone() / (scale * times) for n, g in named if g is not None}
        return losses[-1], found

    def _left(self) -> Iterator[tuple[str, str]]:
        """Yield a name and a digest of all that a call may write: of modules, and of the file."""
        folder = self.file.path.parent
        yield from values(vars(self.module), folder)
        yield from values(dict(_parts_of(self.step.model)), folder)

    # ------------------------------------------------------------------ one model

    def _drawn(self) -> str:
        """Return which value of the file, or of its model, is another in every process."""
        file = self.file
        read = partial(_built, file.name, self.seed)
        first, other, again = (run_apart(read, file.path, self.seed, dice) for dice in (1, 2, 1))
        if not first or not other or not again or FAILED in first:
            return "model() cannot be built a second time in one process, to compare both"
        drawn = [n for n in first if first[n] == again.get(n) != other.get(n)]
        return f"{drawn[0]} is drawn without a seed, another in each process" if drawn else ""


def _parts_of(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield each module's own attributes under its path."""
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if name != "_modules":
                yield f"{path}.{name}".removeprefix("."), value


def _built(name: str, seed: int, module: types.ModuleType, path: Path) -> Mapping[str, str]:
    """Run the file and build its model; return a digest of each of its values."""
    found = values_of_text(path.read_text(encoding="utf-8"), module, path)
    if FAILED in found:
        return found
    made = vars(module)[name]
    torch.manual_seed(seed)
    model = made if isinstance(made, nn.Module) else made()
    return {**found, **dict(values(dict(_parts_of(model)), path.parent))}


def _unlike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Return the name of a gradient that differs by more than rounding."""
    if one.keys() != other.keys():
        return min(one.keys() ^ other.keys())
    for name, gradient in one.items():
        room = _ROUNDING * float(gradient.norm())
        if not float((gradient - other[name]).norm()) <= room:  # NaN, too, is unlike
            return name
    return ""
