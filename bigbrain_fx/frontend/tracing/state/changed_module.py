"""Detection of changes in a caller's module since devices got their copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import take_apart


class Copied:
    """A module that devices have copies of: later changes of the module do not reach the copies.

    Args:
        model: the caller's, as it was copied.
        example: the batch it was captured with.
        loss: likewise.
        autocast: as it was captured.
    """

    def __init__(
        self, model: nn.Module, example: object, loss: Loss | None, autocast: str | None
    ) -> None:
        self.model = model
        self.loss = loss
        self.numbers = _numbers(model, example, loss, autocast)
        self.let_be: set[str] = set()  # what moved, and counts nothing
        self.accept()
        self.renew()

    def accept(self) -> None:
        """Accept the module's present state, without weights, as the state that devices have."""
        self.before = Attributes.of(self.model, self.loss)

    def renew(self) -> None:
        """Accept the module's present weights as the weights that devices have."""
        self.weights = {name: _mark(p) for name, p in self.model.named_parameters()}

    def require(self) -> None:
        """Refuse to go on where the module has changed: frozen, with another dropout rate.

        Raises:
            InputError: names the change.
        """
        self._require_weights()
        now = Attributes.of(self.model, self.loss, numbers=False)
        moved = [n for n in self.before.moved(now) if _is_within(n, now) and n not in self.let_be]
        if moved and self._counts(moved):
            name = moved[0]
            raise InputError(
                f"the module's {name} has changed since the session began (it was "
                f"{self.before.said(name)}, it is {now.said(name)}), and devices train what it was",
                code="BX2152",
                help="change the module first, and make a session of it then; rates change by "
                "lr_scale, numbers of each step are entries of the batch",
            )
        self.let_be.update(moved)

    def _require_weights(self) -> None:
        """Refuse to go on where the caller writes into weights, as into a momentum encoder's."""
        if self.written:
            raise InputError(
                f"the numbers of {self.written} have changed in this process since the session "
                "began, and devices train weights of their own",
                code="BX2152a",
                help="let forward write it, under torch.no_grad() and where it trains, as its "
                "first lines; or the optimizer's step. To begin with other weights, make a "
                "session of them",
            )

    @property
    def written(self) -> str:
        """The first parameter with numbers that the owner has changed; empty without one."""
        marks = ((name, _mark(p)) for name, p in self.model.named_parameters())
        return next((name for name, mark in marks if self.weights.get(name, mark) != mark), "")

    def _counts(self, moved: list[str]) -> bool:
        now = Attributes.of(self.model, self.loss)
        if any(n.endswith(".requires_grad") or now.is_part(n) for n in moved):
            return True
        try:
            found = self.numbers()
            self.before.put_back()
            return not alike(self.numbers(), found)
        except Exception:  # the caller's own code
            return False
        finally:
            now.put_back()


def _mark(parameter: nn.Parameter) -> tuple[int, int, float]:
    """Return a cheap mark of numbers: it counts writes, except through `.data`."""
    if not parameter.numel() or parameter.layout is not torch.strided:
        return parameter._version, 0, 0.0
    middle = parameter.detach().flatten()[parameter.numel() // 2]
    return parameter._version, parameter.data_ptr(), float(middle.real)


def _is_within(name: str, now: Attributes) -> bool:
    """Whether an attribute is a module's, of the model, and not a file's or a class's."""
    return name.removesuffix(".requires_grad").rpartition(".")[0] in now.paths


def _numbers(
    model: nn.Module, example: object, loss: Loss | None, autocast: str | None
) -> Callable[[], Numbers]:
    """Return a function that computes the example's results and gradients."""
    taken = take_apart(example)
    step = Step(model, loss, taken, route(model, example, loss is not None))
    plain = Plain(step, model, autocast)
    return lambda: plain.gradients(list(taken.sized(taken.rows).values()), 0)
