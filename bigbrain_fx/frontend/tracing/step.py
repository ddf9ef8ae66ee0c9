"""The user's model as one call: tensors of the batch -> (loss, outputs).

This file knows how a batch reaches a model; it knows nothing of tracing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.scalar_loss import check_loss
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from bigbrain_fx.frontend.tracing.state.read_names import Place, places_of
from bigbrain_fx.frontend.translation.batch import Batch, fill, named_tensors
from bigbrain_fx.frontend.translation.batch_dims import Key
from bigbrain_fx.runtime import loss_in

Loss = Callable[[Any, Any], Any]  # (output, batch), of whatever kinds the user has
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WRAPPED = ("module", "_orig_mod")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Route:
    """Route of a batch into `forward`: as one argument, by keys, or the first `positions`."""

    whole: bool = False
    keys: tuple[str, ...] = ()
    positions: int = 0

    def reaches(self, key: Key) -> bool:
        """Whether the entry at a key of the batch is an argument of forward."""
        if self.whole or not key:
            return True
        return key[0] in self.keys or (isinstance(key[0], int) and key[0] < self.positions)

    def call(self, model: nn.Module, batch: object) -> object:
        """Call the model with its part of the batch."""
        if self.whole:
            return model(batch)
        if isinstance(batch, Mapping):
            return model(**{key: batch[key] for key in self.keys})
        return model(*cast("tuple[object, ...]", batch)[: self.positions])


def route(model: nn.Module, batch: object, has_loss: bool) -> Route:
    """Decide how a batch reaches `model.forward`.

    * A tensor is passed as it is.
    * A batch is passed as one argument when forward has one required parameter only, and that one
      cannot be an entry. It cannot where no key of the dict has its name, or where its name is
      `batch`. For a tuple without a loss function it cannot where entries outnumber parameters.
    * Of a dict, forward gets the entries named like its parameters (all of them with `**kwargs`);
      the loss function gets the whole batch. Without one every entry must find a parameter.
    * Of a tuple, forward gets the first entries, as many as it has positional parameters. With a
      loss function at least one entry is left for the loss unless forward requires it.
      `(x, y)` with `forward(x, mask=None)` passes x. But `forward(idx, targets=None)` gets both
      where the loss function has no loss without (`settle`).

    Raises:
        InputError: entries are missing, or left over and there is no loss function.
    """
    if model in _settled and has_loss and isinstance(batch, tuple | list):
        return _settled[model]
    if not isinstance(batch, Mapping | tuple | list):
        return Route(whole=True)
    parameters = parameters_of(model)
    required = [p.name for p in parameters if p.kind in _POSITIONAL and p.default is p.empty]
    if _takes_all(parameters, required, batch, has_loss):
        return Route(whole=True)
    if isinstance(batch, Mapping):
        return _by_key(model, parameters, required, batch, has_loss)
    return _by_position(model, parameters, required, batch, has_loss)


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    """Return forward's parameters; of a wrapper that passes all on, the wrapped forward's.

    Wrappers are of torch.compile, DataParallel and AveragedModel.
    """
    found = _signature(model)
    inner = next((m for name, m in model.named_children() if name in _WRAPPED), None)
    open_ended = found and all(p.kind in _ANY for p in found)
    return parameters_of(inner) if open_ended and inner is not None else found


def _signature(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of forward; of a traced module, which has no Python, its schema's."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except ValueError:
        schema = getattr(model.forward, "schema", None)
        names = [argument.name for argument in schema.arguments[1:]] if schema else []
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [inspect.Parameter(name, kind) for name in names]


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of it is wrapped by torch.compile."""
    return any("_orig_mod" in part._modules for part in model.modules())


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class; for torch.compile's wrapper, of the wrapped model's."""
    return type(getattr(model, "_orig_mod", model)).__name__


def settle(model: nn.Module, how: Route, batch: object, tries: Callable[[Route], bool]) -> Route:
    """Pass a tuple's last entries to forward, too, where the loss function needs that.

    Args:
        model: with forward's parameters; `route` caches the result for it.
        how: the result of `route`.
        batch: the example.
        tries: returns whether a scalar loss comes out this way.
    """
    if how.whole or not isinstance(batch, tuple | list):
        return how
    parameters = parameters_of(model)
    accepted = sum(p.kind in _POSITIONAL for p in parameters)
    wider = Route(positions=min(accepted, len(batch)))
    if wider.positions <= how.positions or tries(how) or not tries(wider):
        return how
    _settled[model] = wider
    return wider


_settled: WeakKeyDictionary[nn.Module, Route] = WeakKeyDictionary()


def _takes_all(
    parameters: list[inspect.Parameter],
    required: list[str],
    batch: Mapping[str, object] | tuple[object, ...] | list[object],
    has_loss: bool,
) -> bool:
    if len(required) != 1:
        return False
    if isinstance(batch, Mapping):
        return required[0] not in batch
    if required[0] == "batch":
        return True
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return not has_loss and not open_ended and len(batch) > len(positional)


def _by_key(
    model: nn.Module,
    parameters: list[inspect.Parameter],
    required: list[str],
    batch: Mapping[str, object],
    has_loss: bool,
) -> Route:
    names = {p.name for p in parameters}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    keys = tuple(key for key in batch if takes_any or key in names)
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    missing = [name for name in (*required, *keyword_only) if name not in batch]
    left = [key for key in batch if key not in keys]
    if missing or (left and not has_loss):
        raise _mismatch(model, list(batch), [p.name for p in parameters], missing)
    return Route(keys=keys)


def _by_position(
    model: nn.Module,
    parameters: list[inspect.Parameter],
    required: list[str],
    batch: tuple[object, ...] | list[object],
    has_loss: bool,
) -> Route:
    accepted = sum(p.kind in _POSITIONAL for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        accepted = len(batch)
    spare = len(batch) - 1 if has_loss else len(batch)
    count = max(len(required), min(accepted, spare))
    if count > len(batch) or (count < len(batch) and not has_loss):
        entries = [f"entry {i}" for i in range(len(batch))]
        raise _mismatch(model, entries, [p.name for p in parameters], required[len(batch) :])
    return Route(positions=count)


def _mismatch(
    model: nn.Module, have: list[str], parameters: list[str], missing: list[str]
) -> InputError:
    kind = type(model).__name__
    what = f"the example batch does not fit {kind}.forward({', '.join(parameters)})"
    return InputError(
        what,
        code="BX2154",
        notes=(
            f"batch: {', '.join(map(str, have))}",
            f"missing: {', '.join(missing) or 'nothing'}",
        ),
        help="rename the batch's entries like forward's parameters, or define loss(output, batch) "
        "for what only the loss reads",
    )


def input_names(model: nn.Module, batch: object, how: Route) -> dict[Key, str]:
    """Name the entries of a tuple after forward's parameters; entries of a dict have their keys."""
    names = [p.name for p in parameters_of(model) if p.kind in _POSITIONAL]
    if isinstance(batch, Mapping) or not names:
        return {}
    if how.whole:
        return {(): names[0]}
    return {(i,): name for i, name in enumerate(names[: how.positions])}


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Let each module have its own mode again at the end."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Keep torch's fused inference kernel for transformer layers out: it rounds differently.

    `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` take it in eval mode without gradients,
    but not in a trace; `torch.backends.mha.set_fastpath_enabled(False)` is the user's switch.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Seen:
    """Observations of calls of the step; an object of its own, as torch.export undoes attributes.

    `written` are the entries of the batch that a plain run wrote into.
    """

    has_loss = False
    output_names: tuple[str, ...] = ()
    part: Literal["model", "loss", "done"] = "model"
    written: tuple[str, ...] = ()


@dataclass
class Listeners:
    """Companions of calls of a step: listeners, and the substitute of the loss.

    With `keeps` plain attributes stay as a call has set them; else each call begins with the
    user's.
    """

    listening: Callable[[], AbstractContextManager[object]] = nullcontext
    loss: Loss | None = None
    tracing: bool = False
    keeps: bool = False


class Step(nn.Module):
    """Call the model on tensors of the batch; return the loss (when there is one) and the outputs.

    `seen` has after a call whether there was a loss, and the outputs' names. Without `training`
    there is no loss. A loss that the model returns itself is dropped, with the labels that only it
    reads, unless it is the only output.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, batch: Batch, how: Route, training: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self._itself = (model,)  # in a trace `self.model` is a proxy, and its parts new ones
        self.seen = Seen()
        self.watch = Listeners()
        self._trains = training
        self._given = (loss,)  # no part of ours: its buffers are numbers that a trace reads
        self._names = [entry.name for entry in batch.entries]
        self._template = batch.template
        self._how = how
        self.casts_itself = False  # forward is under an autocast of its own, which is the graph's

    @property
    def whole_batch_note(self) -> str | None:
        """Say that forward gets a batch of several entries as one argument; None where not."""
        names = ", ".join(p.name for p in parameters_of(self.model))
        given = f"forward({names}) got the whole batch as its one argument"
        if not self._how.whole or not isinstance(self._template, Mapping | tuple | list):
            return None
        if isinstance(self._template, Mapping):
            keys = ", ".join(map(str, self._template))
            return f"{given}: no parameter is named like an entry ({keys})"
        return f"{given}; with loss(output, batch) in the model file it gets the first entries"

    @property
    def own_loss(self) -> Loss | None:
        """The user's loss function."""
        return self._given[0] if self._trains else None

    @property
    def trains(self) -> bool:
        """Whether it is a step of training."""
        return self._trains

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return (loss, *outputs), or the outputs alone."""
        if self.watch.keeps:
            return self._call(*tensors)
        before = self._kept(numbers=not self.watch.tracing)
        try:
            return self._call(*tensors)
        finally:
            before.put_back()

    @cached_property
    def _reads(self) -> list[Place]:
        return places_of(*self._itself, *self._given)

    def _kept(self, *, numbers: bool = True) -> Attributes:
        found = Attributes.of(*self._itself, *self._given, numbers=numbers)
        for place in self._reads:
            found.keep(place.read(), place.write)
        return found

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let a call find plain attributes as the one before has left them; put back at the end."""
        before = self._kept()
        self.watch.keeps = True
        try:
            yield
        finally:
            self.watch.keeps = False
            before.put_back()

    def _call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.seen.part = "model"
        versions = [] if self.watch.tracing else [tensor._version for tensor in tensors]
        buffers = _buffers(self.model) if self.watch.tracing else []
        with self.watch.listening():
            found = self._run(*tensors)
        _write_back(buffers)
        if versions:
            self._note_written([tensor._version for tensor in tensors], versions)
        self.seen.part = "done"
        return found

    def _note_written(self, now: list[int], before: list[int]) -> None:
        pairs = zip(self._names, now, before, strict=False)
        found = [name for name, new, old in pairs if new != old]
        self.seen.written = tuple(dict.fromkeys((*self.seen.written, *found)))

    def _run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        batch = fill(self._template, dict(zip(self._names, tensors, strict=True)))
        output = self._how.call(self.model, batch)
        found = named_tensors(output)
        if not self._trains:
            return self._outputs(found, _named_loss(output) if len(found) > 1 else None)
        self.seen.part = "loss"
        compute = self.watch.loss or self._given[0]
        loss = self._given_loss(compute(output, batch)) if compute else own_loss(output)
        self.seen.has_loss = loss is not None
        outputs = self._outputs(found, loss)
        return outputs if loss is None else (loss, *outputs)

    def _given_loss(self, found: object) -> Tensor:
        """Return the loss in the result of the user's loss function."""
        loss = loss_in(found)
        check_loss(found if loss is None else loss)
        assert loss is not None
        return loss

    def _outputs(self, found: list[tuple[str, Tensor]], loss: Tensor | None) -> tuple[Tensor, ...]:
        """Return the model's outputs beside the loss; record the names."""
        kept = [(name, tensor) for name, tensor in found if tensor is not loss]
        self.seen.output_names = tuple(name for name, _ in kept)
        return tuple(tensor for _, tensor in kept)


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """List every buffer with its owner and its name there."""
    return [
        (part, name, tensor)
        for part in model.modules()
        for name, tensor in part._buffers.items()
        if tensor is not None
    ]


def _write_back(buffers: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Write a value that forward assigned to a buffer into it: torch.export loses it."""
    for part, name, tensor in buffers:
        now = part._buffers.get(name)
        if now is not None and now is not tensor:
            tensor.copy_(now.detach())
            part._buffers[name] = tensor


def _named_loss(output: object) -> Tensor | None:
    """Return the loss that inference drops: a number in a plain tuple is a result."""
    is_plain = isinstance(output, tuple | list) and not hasattr(output, "loss")
    return None if is_plain else own_loss(output)


def own_loss(output: object) -> Tensor | None:
    """Find the loss that a model returns itself: a scalar output, or the one in its output."""
    found = loss_in(output)
    return found if found is not None and not found.dim() and found.is_floating_point() else None
