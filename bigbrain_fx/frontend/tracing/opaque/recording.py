"""Effects of opaque modules in runs of a model, and their stand-ins while it is traced.

    plain runs at two batch sizes ─▶ Facts of each call ─▶ sizes as arithmetic over the batch

Without weights nothing can be run: the opaque module then runs on shapes. This file knows opaque
modules and traces, not graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Arg
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.opaque.call_facts import Facts, fitted, with_views_of
from bigbrain_fx.frontend.tracing.opaque.rules import (
    asks_within,
    left_by,
    plain_attributes,
    require_found,
    require_tensors,
    require_unread,
    set_attributes,
    twice,
    unsteady,
)
from bigbrain_fx.frontend.tracing.opaque.tensor_access import TensorReads
from bigbrain_fx.frontend.tracing.state.attributes import FORWARD_HOOKS, Attributes
from bigbrain_fx.frontend.tracing.state.module_state import (
    Marks,
    aside,
    is_within,
    marks,
    moved,
)
from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept, rolls, untraced
from bigbrain_fx.frontend.translation.kept import LEAF, Keeper, KeptCall, place, placed
from bigbrain_fx.frontend.translation.leaf import attribute_of, call_leaf, own_tensors
from bigbrain_fx.frontend.translation.nests import decode
from bigbrain_fx.frontend.translation.opaque import Dice
from bigbrain_fx.runtime import ForwardLines


@dataclass
class Leaves:
    """The opaque modules of one capture, by path, and the facts of their calls.

    `known` has for each number of rows the facts of every call, by path. `stateful` are the modules
    with calls that depend on attributes of earlier calls, by path; None: not known.
    """

    modules: Mapping[str, nn.Module]
    known: dict[int, dict[str, list[Facts]]] = field(default_factory=dict)
    seen: dict[str, list[Facts]] = field(default_factory=dict)
    stateful: tuple[str, ...] | None = ()
    within: bool = False  # a leaf runs: what it calls is not the trace's

    def __bool__(self) -> bool:
        """Whether the capture has an opaque module."""
        return bool(self.modules)

    @contextmanager
    def observed(self, rows: int) -> Iterator[None]:
        """Record every call of an opaque module in a plain run of so many rows."""
        self.seen = {path: [] for path in self.modules}
        with ExitStack() as stack:
            for path, module in self.modules.items():
                goes_by_state = self._goes_by_state(path, module)
                observer = partial(
                    _Observer, leaves=self, facts=self.seen[path], goes_by_state=goes_by_state
                )
                stack.enter_context(_in_place(module, observer))
            yield
        for path, calls in self.seen.items():
            if len(calls) > 1 and any(facts.state for facts in calls):
                raise twice(path)
        before = self.known.get(rows, self.seen)
        now = {path: with_views_of(calls, before[path]) for path, calls in self.seen.items()}
        if now != {path: with_views_of(calls, now[path]) for path, calls in before.items()}:
            raise unsteady(before, now)
        self.known[rows] = now

    def _goes_by_state(self, path: str, module: nn.Module) -> bool | None:
        """Return whether an opaque module's calls depend on its attributes; None: not known."""
        if isinstance(module, ForwardLines) and module.keeps:
            return True
        if self.stateful is None:
            return None
        uses = module.uses if isinstance(module, ForwardLines) else ()
        parts = (path, *(f"{module.owner}.{name}".removeprefix(".") for name in uses))
        return any(_has(part, self.stateful or ()) for part in parts)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Let calls of opaque modules draw random numbers without an effect outside."""
        with ExitStack() as stack:
            for module in self.modules.values():
                stack.enter_context(_in_place(module, _Unheard))
            yield

    @contextmanager
    def stood_in(self, keeper: Keeper, sizes: Sequence[int]) -> Iterator[None]:
        """Make one node of every call of an opaque module in a trace.

        `sizes` are the batch sizes of the facts that hold for the trace.
        """
        with ExitStack() as stack:
            for path, module in self.modules.items():
                facts = [self.known[rows][path] for rows in sizes]
                stand_in = partial(_StandIn, path=path, keeper=keeper, facts=facts)
                stack.enter_context(_in_place(module, stand_in))
            yield


def _has(path: str, stateful: Sequence[str]) -> bool:
    """Whether a module has state, or is within or around a module with state."""
    return is_within(path, stateful) or any(is_within(other, (path,)) for other in stateful)


@dataclass
class _Own:
    """An opaque module as the user made it: its own forward and hooks come back for a call."""

    module: nn.Module
    forward: Callable[..., object]
    hooks: Mapping[str, object]

    def call(
        self, tensors: Mapping[str, Tensor], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Call it with these tensors in the place of its own."""
        now = {name: self.module.__dict__[name] for name in ("forward", *FORWARD_HOOKS)}
        del self.module.__dict__["forward"]
        self.module.__dict__.update(self.hooks)
        try:
            return call_leaf(self.module, tensors, args, kwargs)
        finally:
            self.module.__dict__.update(now)

    def facts_of_call(
        self, tensors: Mapping[str, Tensor], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[object, Facts]:
        """Run such a call and record its effects, and the attributes that it sets."""

        def run() -> tuple[object, dict[str, object]]:
            before, reads = plain_attributes(self.module), TensorReads()
            with reads:
                found = self.call(tensors, args, kwargs)
            return found, left_by(self.module, before, reads.seen)

        found, facts = facts_of(run, (args, kwargs), list(tensors.values()))
        result, left = cast("tuple[object, dict[str, object]]", found)
        encoded = facts.result if left else cast("_Pair", facts.result)[1][0]
        return result, replace(facts, result=encoded, left=(*left,))


_Pair = tuple[str, tuple[Arg, Arg]]


@contextmanager
def _in_place(
    module: nn.Module, stand_in: Callable[[_Own], Callable[..., object]]
) -> Iterator[None]:
    """Put something in the place of a module's forward; its hooks rest meanwhile."""
    hooks = {name: module.__dict__[name] for name in FORWARD_HOOKS}
    had = module.__dict__.get("forward")
    own = _Own(module, module.forward, hooks if had is None else {**hooks, "forward": had})
    module.__dict__.update({name: OrderedDict() for name in FORWARD_HOOKS})
    module.__dict__["forward"] = stand_in(own)
    try:
        yield
    finally:
        del module.__dict__["forward"]
        module.__dict__.update(own.hooks)


@dataclass
class _Unheard:
    """Runs an opaque module, then restores the generators of Python and NumPy."""

    own: _Own

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the opaque module as it is."""
        with random_state_kept(), untraced():
            return self.own.call({}, args, kwargs)


@dataclass
class _Observer:
    """Runs an opaque module and records the facts."""

    own: _Own
    leaves: Leaves
    facts: list[Facts]
    goes_by_state: bool | None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the opaque module as it is."""
        if self.leaves.within:
            return self.own.call({}, args, kwargs)
        self.leaves.within = True
        try:
            return self._noted(args, kwargs)
        finally:
            self.leaves.within = False

    def _noted(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        module, tensors = self.own.module, own_tensors(self.own.module)
        versions = {name: tensor._version for name, tensor in tensors.items()}
        is_asked = self.goes_by_state is not False
        before = marks(module) if is_asked else {}
        result, facts = self.own.facts_of_call(tensors, args, kwargs)
        if is_asked:
            again = partial(self.own.call, tensors, args, kwargs)
            facts = replace(facts, state=self._state(before, facts.left, again))
        self.facts.append(facts)
        require_tensors(module, facts.result, facts.state)
        require_found(module, tensors, facts.left)
        written = [name for name, tensor in tensors.items() if tensor._version != versions[name]]
        left = [attribute_of(module, name) for name in facts.left]
        require_unread(module, {name: tensors[name] for name in written}, (result, left))
        return result

    def _state(
        self, before: Marks, left: Sequence[str], again: Callable[[], object]
    ) -> tuple[str, ...]:
        """Return the attributes that the call has moved, and that its next one may go by.

        A single count is known to matter for small models only. For others, all attributes count
        that others do not read, and that move once more when the module is called `again`: a cache
        does not.
        """
        module, first = self.own.module, marks(self.own.module)
        keys = moved(before, first)
        names = [f"{path}.{name}".removeprefix(".") for path, name in keys]
        if self.goes_by_state or not names:
            return tuple(names)
        attributes = Attributes.of(module)
        with aside(module):
            again()
        keys = [key for key in moved(first, marks(module)) if key in keys]
        attributes.put_back()
        names = [f"{path}.{name}".removeprefix(".") for path, name in keys]
        return tuple(name for name in names if name not in left)


def facts_of(
    run: Callable[[], object], nest: object, own: Sequence[Tensor]
) -> tuple[object, Facts]:
    """Run an opaque module and record its effects on its arguments."""
    given: list[Tensor] = []
    place(nest, given)
    tensors = [*given, *own]
    versions = [tensor._version for tensor in tensors]
    before = [_numbers(tensor) for tensor in tensors]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    with Dice() as dice, rolls() as rolled, asks_within(given, "an opaque module"):
        result = run()
    found: list[Tensor] = []
    encoded = place(result, found)
    written = [
        i
        for i, tensor in enumerate(tensors)
        if tensor._version != versions[i] or _differ(before[i], _numbers(tensor))
    ]
    shared = [tensor.untyped_storage()._cdata for tensor in found]
    facts = Facts(
        tuple(tuple(tensor.shape) for tensor in given),
        encoded,
        tuple((tuple(t.shape), tuple(t.stride()), t.dtype) for t in found),
        dice.thrown or bool(rolled),
        tuple(written),
        tuple(storages.index(s) if s in storages else None for s in shared),
        frozenset(i for i, tensor in enumerate(found) if not tensor.requires_grad),
    )
    return result, facts


def _differ(before: Tensor | None, now: Tensor | None) -> bool:
    return before is not None and now is not None and not torch.equal(before, now)


def _numbers(tensor: Tensor) -> Tensor | None:
    """Return a copy of a buffer's bytes; None for a tensor with a gradient, or without numbers.

    torch does not note in a tensor's version that F.batch_norm writes its running statistics.
    """
    if tensor.requires_grad or tensor.is_meta or type(tensor) is not Tensor:
        return None
    return tensor.detach().reshape(-1).view(torch.uint8).clone()


@dataclass
class _StandIn:
    """Makes one node of each call of an opaque module; `facts` has calls by batch size."""

    own: _Own
    path: str
    keeper: Keeper
    facts: Sequence[Sequence[Facts]]
    calls: int = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Make the node."""
        given, sizes = list[Tensor](), list[torch.SymInt]()
        nest = place((args, kwargs), given, sizes)
        own = own_tensors(self.own.module)
        number, self.calls = self.calls, self.calls + 1

        def shapes(call: KeptCall, tensors: list[Tensor]) -> list[Tensor]:
            those = tensors[: len(given)], tensors[len(given) :]
            facts = self._learn(call, *those, sizes, number)
            return applied(call, facts, tensors, len(given))

        last = self.path.rpartition(".")[2]
        name = last if last.isidentifier() else type(self.own.module).__name__.lower()
        call = KeptCall(f"{LEAF}{self.path}", name, nest, self._names(own), shapes)
        call.text = getattr(type(self.own.module), "text", "")
        found = self.keeper.call(call, [*given, *own.values()], sizes)
        if not call.left:
            return found
        result, left = cast("tuple[object, Mapping[str, object]]", found)
        set_attributes(self.own.module, left)
        return result

    def _names(self, own: Iterable[str]) -> tuple[str, ...]:
        """Return the names of its tensors in the model; lines have their owner's tensors."""
        module = self.own.module
        path = module.owner if isinstance(module, ForwardLines) else self.path
        return tuple(f"{path}.{key}".removeprefix(".") for key in own)

    def _learn(
        self,
        call: KeptCall,
        given: list[Tensor],
        own: list[Tensor],
        sizes: list[torch.SymInt],
        number: int,
    ) -> Facts:
        if not self.facts:
            return self._on_shapes(call, given, own, sizes)
        if any(len(calls) <= number for calls in self.facts):
            raise CaptureError(
                f"the opaque module {self.path} is called in the trace only", code="BX0140h"
            )
        shapes = [tuple(tensor.shape) for tensor in given]
        return fitted([calls[number] for calls in self.facts], shapes, self.path)

    def _on_shapes(
        self, call: KeptCall, given: list[Tensor], own: list[Tensor], sizes: list[torch.SymInt]
    ) -> Facts:
        names = dict(zip(own_tensors(self.own.module), own, strict=True))
        nest = decode(call.args, lambda arg: placed(arg, given, sizes))
        args, kwargs = cast("tuple[tuple[object, ...], Mapping[str, object]]", nest)
        try:
            with torch.no_grad():
                _, facts = self.own.facts_of_call(names, args, kwargs)
        except Exception as error:
            raise CaptureError(
                f"the opaque module {self.path} cannot run on shapes alone: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}",
                code="BX0140i",
                help="capture the model with its weights (split), not without (estimate)",
            ) from error
        return replace(facts, fixed=frozenset())  # nothing carries a gradient here


def applied(call: KeptCall, facts: Facts, tensors: Sequence[Tensor], given: int) -> list[Tensor]:
    """Record the facts in the call; return its results as tensors without numbers."""
    inputs = [i for i in facts.written if i < given]
    if inputs:
        raise CaptureError(
            f"the opaque module {call.target.removeprefix(LEAF)} writes into what it is given",
            code="BX0140j",
            help="let it write into a copy: x = x.clone()",
        )
    call.result, call.outputs = facts.result, len(facts.tensors)
    call.random, call.left, call.state = facts.random, facts.left, facts.state
    call.mutates = tuple(call.params[i - given] for i in facts.written)
    call.views = tuple(i if i is not None and i < given else None for i in facts.views)
    call.fixed = facts.fixed
    device = tensors[0].device if tensors else None
    return [torch.empty_strided(*sizes, dtype=dt, device=device) for *sizes, dt in facts.tensors]


# --------------------------------------------------------------------------- sizes over the batch
