"""Detection of changes in a caller's module since devices got their copies."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from bigbrain_fx.frontend.tracing.state.number_inputs import (
    ReadInPython,
    as_input,
    is_number,
    standing_in,
)
from bigbrain_fx.frontend.tracing.state.read_names import read_functions, read_names
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import take_apart

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
TRIED = 16  # changes of a value that are tried, and batches with it, each by two plain steps
_NUDGE = 0.01  # of a weight's norm, while that is tried


class Copied:
    """A module that devices have copies of: later changes of the module do not reach the copies.

    Args:
        model: the caller's, as it was copied.
        example: the batch it was captured with.
        loss: likewise.
        autocast: as it was captured.
        held: tensors that the trace read, by their names in the graph.
        inputs: tensors that stood for numbers in the trace, by the names of `read_names`.
    """

    def __init__(
        self,
        model: nn.Module,
        example: object,
        loss: Loss | None,
        autocast: str | None,
        held: Mapping[str, Tensor] = MappingProxyType({}),
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.loss = loss
        self.step, self.numbers = _numbers(model, example, loss, autocast)
        self.read, self.functions = read_names(model, loss), read_functions(model, loss)
        self.sent = self._sent(held, inputs)
        self.tried: Counter[str] = Counter()  # how often each has changed
        self.stayed: Counter[str] = Counter()  # for how many batches since
        self.let_be: dict[str, object] = {}  # the last value of those, which counted nothing
        self.changed: list[str] = []  # what was refused last
        self.weights: dict[str, object] = {}
        self.versions: dict[str, int] = {}
        self.accept()
        self.renew(self.tensors())

    def _sent(
        self, held: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, list[str]]:
        """Return the names in the graph of what is read, where devices can get it anew."""
        names: dict[int, list[str]] = {}  # a tied weight has several
        for name, tensor in held.items():
            if tensor.numel():
                names.setdefault(tensor.data_ptr(), []).append(name)
        values = {name: inputs.get(name, place.read()) for name, place in self.read.items()}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        found = {name: names.get(tensor.data_ptr()) for name, tensor in tensors.items()}
        return {name: own for name, own in found.items() if own is not None}

    def inputs(self) -> dict[str, Tensor]:
        """Return tensors for the numbers that have changed, and for those that had before.

        None where other values have changed, too, or where Python reads one: a branch goes by it.
        """
        names = {*self.changed, *(name for name in self.sent if is_number(self.read[name].read()))}
        values = {n: self.read[n].read() if n in self.read else None for n in sorted(names)}
        if not all(map(is_number, values.values())):
            return {}
        found = {name: as_input(value, self.model) for name, value in values.items()}
        with standing_in(self.read, found), ReadInPython(list(found.values())) as seen:
            self.numbers()
        return {} if seen.found else found

    def accept(self) -> None:
        """Accept the module's present state, without weights, as the state that devices have."""
        trained = {name: p.requires_grad for name, p in self.model.named_parameters()}
        self.accepted = self._now(), self._forms(), trained

    @property
    def before(self) -> Attributes:
        """The attributes that devices have."""
        return self.accepted[0]

    @property
    def forms(self) -> dict[str, object]:
        """Types, shapes and modes that devices have: see `_forms`."""
        return self.accepted[1]

    @property
    def trained(self) -> dict[str, bool]:
        """Whether devices train a parameter, by its name."""
        return self.accepted[2]

    def _forms(self) -> dict[str, object]:
        """Return what a trace has once: types, shapes and hooks of tensors, classes of the parts.

        And their modes, while the module is to train.
        """
        found: dict[str, object] = {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in self.tensors().items()
        }
        for name, parameter in self.model.named_parameters():
            hooks = (getattr(parameter, kind, None) or {} for kind in _HOOKS)
            found[f"{name}.hooks"] = sum(map(len, hooks))
        for path, part in self.model.named_modules():
            found[f"{path}.__class__".lstrip(".")] = type(part)
            if self.model.training:
                found[f"{path}.training".lstrip(".")] = part.training
        return found

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let the module have the modes of training: a validation may be under way."""
        parts = {} if self.model.training else dict(self.model.named_modules())
        modes = {path: self.forms.get(f"{path}.training".lstrip(".")) for path in parts}
        before = {path: part.training for path, part in parts.items()}
        for path, mode in modes.items():
            parts[path].training = before[path] if mode is None else bool(mode)
        try:
            yield
        finally:
            for path, mode in before.items():
                parts[path].training = mode

    @contextmanager
    def freezing(self) -> Iterator[None]:
        """Let the parameters train that devices train, and no others."""
        named = dict(self.model.named_parameters())
        before = {name: p.requires_grad for name, p in named.items()}
        try:
            for name, parameter in named.items():
                parameter.requires_grad_(self.trained.get(name, before[name]))
            yield
        finally:
            for name, parameter in named.items():
                parameter.requires_grad_(before[name])

    def _require_forms(self) -> None:
        now = self._forms()
        for name in self.forms:
            if name in now and self.forms[name] != now[name]:
                raise _changed(name, str(self.forms[name]), str(now[name]))

    def _now(self, *, numbers: bool = True) -> Attributes:
        found = Attributes.of(self.model, self.loss, numbers=numbers)
        for name, place in self.read.items():
            if place.is_container:
                found.marks[name] = {"": place.form()}
            elif name not in self.sent:
                found.look_at(name, place.read(), place.write)
        for name, place in self.functions.items():
            found.look_at(name, place.read(), place.write)
        return found

    def renew(self, names: Collection[str]) -> None:
        """Accept present numbers as those that devices have, of the tensors that were exchanged."""
        found = {name: tensor for name, tensor in self.tensors().items() if name in names}
        self.weights |= {name: _mark(tensor) for name, tensor in found.items()}
        self.versions |= {name: tensor._version for name, tensor in found.items()}

    def written_by_a_call(self) -> list[str]:
        """Return what model or loss reads, or a container of that, and a call of them writes."""
        with self.step.in_turn():
            before = self._now(numbers=False)
            self.numbers()
            return [name for name in before.moved(self._now()) if name in self.read]

    def require_unwritten(self) -> None:
        """Refuse a loss or forward that writes what it reads: a device would write a copy.

        Raises:
            InputError: names it.
        """
        written = self.written_by_a_call()
        if written:
            raise InputError(
                f"a call of the model or the loss writes into {written[0]}, and the device that "
                "runs it as it is would write a copy",
                code="BX2152c",
                help="make it a buffer of the model, which forward writes; a norm of a teacher "
                "counts nothing in eval()",
            )

    def require(self, batch: object = None, refresh: Callable[[], None] = lambda: None) -> None:
        """Refuse to go on where the module has changed: frozen, with another dropout rate.

        What counts nothing on a batch may count on a later one, as the weight of a class does.

        Args:
            batch: the next one, for which a change has to count; None: the example.
            refresh: gives the module the weights of now, with which it is tried.

        Raises:
            InputError: names the change.
        """
        self._require_forms()
        now = self._now(numbers=False)
        lost = [name for name in self.sent if self._value(name) is None]
        if lost:
            raise self._refused(lost, now)
        read = self.read.keys() | self.functions.keys()
        moved = [n for n in self.before.moved(now) if n in read or _is_within(n, now)]
        due = [name for name in moved if self._is_due(name, now.marks.get(name))]
        if not due:
            return
        refresh()
        if self._counts(due, batch):
            self.changed = due
            for name in due:  # it counts until it is undone
                del self.let_be[name]
                self.tried[name] -= 1
            raise self._refused(due, now)

    def _is_due(self, name: str, mark: object) -> bool:
        """Whether another value is tried: few changes of one, and few batches with each."""
        if name in self.let_be and self.let_be[name] == mark:
            self.stayed[name] += 1
            return is_due(self.stayed[name])
        self.tried[name] += 1
        self.stayed[name], self.let_be[name] = 0, mark
        return is_due(self.tried[name])

    def _refused(self, moved: list[str], now: Attributes) -> InputError:
        name = next((n for n in moved if n in self.read), moved[0])
        places = self.read | self.functions
        before, after = self.before.said(name), now.said(name)
        if not name.startswith("`"):
            return _changed(name, before, after)
        if isinstance(places[name].read(), nn.Parameter):
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
            f"(it was {before}, it is {after}), and devices train what it was",
            code="BX2152b",
            help=remedy,
        )

    def written(self, *, is_read: bool = True) -> list[str]:
        """Return the parameters and buffers with numbers that the owner has changed.

        Args:
            is_read: the caller may have written through `.data`, which no version counts.
        """
        found = self.tensors()
        is_still = all(self.versions.get(n) == t._version for n, t in found.items())
        if not is_read and not self.sent and is_still:
            return []
        return [n for n, t in found.items() if n in self.weights and self.weights[n] != _mark(t)]

    def tensors(self) -> dict[str, Tensor]:
        """Return what devices can get anew, by its name in the graph."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        read = {own: self._value(name) for name, names in self.sent.items() for own in names}
        return own | {name: tensor for name, tensor in read.items() if tensor is not None}

    def others(self) -> dict[str, Tensor]:
        """Return the parameters that model or loss reads, and the model does not have."""
        own = {id(parameter) for parameter in self.model.parameters()}
        values = {name: place.read() for name, place in self.read.items()}
        return {
            name: value
            for name, value in values.items()
            if type(value) in (Tensor, nn.Parameter)  # and of no other session
            and value.is_leaf
            and value.requires_grad
            and id(value) not in own
        }

    def _value(self, name: str) -> Tensor | None:
        """Return what is read as a tensor; None if it is none any more."""
        value = self.read[name].read()
        if is_number(value):
            return as_input(value, self.model)
        return value if isinstance(value, Tensor) else None

    def _counts(self, moved: list[str], batch: object) -> bool:
        now = self._now()
        if any(n.endswith(".requires_grad") or now.is_part(n) for n in moved):
            return True
        if any(n in self.read and isinstance(self.read[n].read(), Tensor) for n in moved):
            return True  # as a teacher's weights, which nothing puts back
        try:
            sent = {n: self.read[n].read() for n in self.sent}
            found = self._elsewhere(batch)
            self.before.put_back()
            for name, value in sent.items():  # they may be globals of a file that was put back
                self.read[name].write(value)
            return not alike(self._elsewhere(batch), found)
        except Exception:  # the caller's own code, which fails since
            return True
        finally:
            now.put_back()

    def _elsewhere(self, batch: object) -> Numbers:
        """Compute with other weights: a pull to those of now counts nothing where it begins."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        kept, dice = [p.detach().clone() for p in trained], torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for parameter, own in zip(trained, kept, strict=True):
                    noise = torch.randn(own.shape, generator=dice).to(own)
                    parameter.add_(noise * (_NUDGE * (own.abs().mean() + _NUDGE)))
            return self.numbers(batch)
        finally:
            with torch.no_grad():
                for parameter, own in zip(trained, kept, strict=True):
                    parameter.copy_(own)


def _changed(name: str, before: str, after: str) -> InputError:
    return InputError(
        f"the module's {name} has changed since the session began (it was {before}, it is "
        f"{after}), and devices train what it was",
        code="BX2152",
        help="change the module first, and make a session of it then; rates change by "
        "lr_scale, numbers of each step are entries of the batch",
    )


def is_due(changes: int) -> bool:
    """Whether a change is tried: all of the first, then ever fewer of a counter's."""
    return changes <= TRIED or changes.bit_count() == 1


def _mark(tensor: Tensor) -> tuple[object, ...]:
    """Return form and checksum of a tensor."""
    about = tensor.shape, tensor.dtype
    if tensor.layout is not torch.strided or tensor.is_meta:
        return *about, tensor._version
    numbers = tensor.detach().cpu().contiguous().reshape(-1)
    return *about, zlib.crc32(numbers.view(torch.uint8).numpy().data)


def _is_within(name: str, now: Attributes) -> bool:
    """Whether an attribute is a module's, of the model, and not a file's or a class's."""
    return name.removesuffix(".requires_grad").rpartition(".")[0] in now.paths


def _numbers(
    model: nn.Module, example: object, loss: Loss | None, autocast: str | None
) -> tuple[Step, Callable[..., Numbers]]:
    """Return a step, and what computes results, gradients and buffers with it.

    Of a batch, where it is like the example; else of the example.
    """
    taken = take_apart(example)
    step = Step(model, loss, taken, route(model, example, loss is not None))
    plain = Plain(step, model, autocast)
    usual, buffers = taken.sized(taken.rows), dict(model.named_buffers()).keys()

    def numbers(batch: object = None) -> Numbers:
        return plain.left(list(_sized(batch, usual).values()), 0, buffers)

    return step, numbers


def _sized(batch: object, usual: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a batch by name; the usual ones where it has others."""
    with suppress(InputError):
        taken = take_apart(batch)
        found = taken.sized(taken.rows)
        if _shapes(found) == _shapes(usual):
            return found
    return usual


def _shapes(tensors: Mapping[str, Tensor]) -> list[object]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
