"""Detection of changes in a caller's module since devices got their copies."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from bigbrain_fx.frontend.tracing.state.read_names import read_names
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import take_apart

TRIED = 16  # changes of a value that are tried, each by two plain steps


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
        self.read = read_names(model, loss)
        self.tried: Counter[str] = Counter()  # how often each has changed
        self.let_be: dict[str, object] = {}  # the last value of those, which counted nothing
        self.accept()
        self.renew()

    def accept(self) -> None:
        """Accept the module's present state, without weights, as the state that devices have."""
        self.before = self._now()

    def _now(self, *, numbers: bool = True) -> Attributes:
        found = Attributes.of(self.model, self.loss, numbers=numbers)
        for name, place in self.read.items():
            found.look_at(name, place.read(), place.write)
        return found

    def renew(self) -> None:
        """Accept the module's present weights as the weights that devices have."""
        self.weights = {name: _mark(p) for name, p in self.model.named_parameters()}
        self.versions = {name: p._version for name, p in self.model.named_parameters()}

    def require(self) -> None:
        """Refuse to go on where the module has changed: frozen, with another dropout rate.

        Raises:
            InputError: names the change.
        """
        now = self._now(numbers=False)
        moved = [n for n in self.before.moved(now) if n in self.read or _is_within(n, now)]
        new = [name for name in moved if self.let_be.get(name) != now.marks.get(name)]
        self.tried.update(new)
        self.let_be.update((name, now.marks.get(name)) for name in new)
        due = [name for name in new if _is_due(self.tried[name])]
        if due and self._counts(due):
            raise self._refused(due, now)

    def _refused(self, moved: list[str], now: Attributes) -> InputError:
        name = next((n for n in moved if n in self.read), moved[0])
        values = f"it was {self.before.said(name)}, it is {now.said(name)}"
        if name not in self.read:
            return InputError(
                f"the module's {name} has changed since the session began ({values}), and devices "
                "train what it was",
                code="BX2152",
                help="change the module first, and make a session of it then; rates change by "
                "lr_scale, numbers of each step are entries of the batch",
            )
        if isinstance(self.read[name].read(), nn.Parameter):
            remedy = (
                "make it a part of the model: forward writes it under torch.no_grad(), and "
                "returns what the loss needs of it"
            )
        else:
            entry = name.strip("`").rpartition(".")[2]
            remedy = (
                f"let each batch have it, batch[{entry!r}] = torch.tensor(...), and read it there"
            )
        return InputError(
            f"{name}, which the model or the loss reads, has changed since the session began "
            f"({values}), and devices train what it was",
            code="BX2152b",
            help=remedy,
        )

    def require_weights(self, *, is_read: bool = True) -> None:
        """Refuse to go on where the caller writes into weights, as into a momentum encoder's.

        Args:
            is_read: the caller may have written through `.data`, which no version counts.

        Raises:
            InputError: names the weight.
        """
        if (is_read or self._has_new_versions) and self.written:
            raise InputError(
                f"the numbers of {self.written} have changed in this process since the session "
                "began, and devices train weights of their own",
                code="BX2152a",
                help="let forward write it, under torch.no_grad() and where it trains, as its "
                "first lines; or the optimizer's step. To begin with other weights, make a "
                "session of them",
            )

    @property
    def _has_new_versions(self) -> bool:
        return any(self.versions.get(n) != p._version for n, p in self.model.named_parameters())

    @property
    def written(self) -> str:
        """The first parameter with numbers that the owner has changed; empty without one."""
        marks = ((name, _mark(p)) for name, p in self.model.named_parameters())
        return next((name for name, mark in marks if self.weights.get(name, mark) != mark), "")

    def _counts(self, moved: list[str]) -> bool:
        now = self._now()
        if any(n.endswith(".requires_grad") or now.is_part(n) for n in moved):
            return True
        if any(n in self.read and isinstance(self.read[n].read(), Tensor) for n in moved):
            return True  # as a teacher's weights, which nothing puts back
        try:
            found = self.numbers()
            self.before.put_back()
            return not alike(self.numbers(), found)
        except Exception:  # the caller's own code
            return False
        finally:
            now.put_back()


def _is_due(changes: int) -> bool:
    """Whether a change is tried: all of the first, then ever fewer of a counter's."""
    return changes <= TRIED or changes.bit_count() == 1


def _mark(parameter: nn.Parameter) -> int:
    """Return a checksum of a parameter's numbers."""
    if parameter.layout is not torch.strided or parameter.is_meta:
        return parameter._version
    numbers = parameter.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(numbers.view(torch.uint8).numpy().data)


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
