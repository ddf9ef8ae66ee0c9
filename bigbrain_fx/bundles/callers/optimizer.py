"""The caller's own optimizer while devices step one like it: options go there, state comes back.

    scheduler.step(validation_loss)  ──▶  group["lr"]  ──▶  an entry of the next batch  ──▶  devices
    optimizer.state_dict(), .state   ◀──  the state of all devices
    optimizer.state[p]["exp_avg"].zero_()  ──▶  a new split, that begins with it

A scheduler of the caller's sets options, or a plain assignment; the optimizer itself makes no step.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

OF_OPTIMIZER = "optimizer."  # as in runtime/feeding.py
_NO_OPTIONS = ("params", "param_names", "initial_lr")
_Options: TypeAlias = list[dict[str, Any]]
Named: TypeAlias = Mapping[str, "Tensor"]
_State: TypeAlias = defaultdict[Any, Any]
_Marks: TypeAlias = dict[tuple[Any, str], tuple[Any, int]]
Unread: TypeAlias = Callable[[], AbstractContextManager[None]]
_LEAVE_OUT = (
    "leave optimizer.step() out: session.step() is forward, backward and the optimizer's step"
)


class CallersOptimizer:
    """Changes that the caller's loop makes in an optimizer's groups.

    Args:
        optimizer: the caller's; the devices have an identical one.
        is_set_there: functions on the devices set its rates.
    """

    def __init__(self, optimizer: Optimizer, *, is_set_there: bool) -> None:
        self.optimizer, self.is_set_there = optimizer, is_set_there
        self._handles: list[RemovableHandle] = []
        vars(optimizer)["_opt_called"] = True  # the devices' own step: a scheduler asks for one
        rates = [
            {"lr": g["initial_lr"]} if "initial_lr" in g else {} for g in optimizer.param_groups
        ]
        pairs = zip(self._now(), rates, strict=True)
        self._first = [{**options, **rate} for options, rate in pairs]  # as the devices have them
        self._fixed = self._parts()  # likewise
        self._state = optimizer.state  # as the caller had it, or got it from the devices
        self._marks: _Marks | None = None  # of that, where the loop has read it
        self._is_within = False  # this class reads or writes it
        self._moved: set[str] = set()  # options that were others at some time
        self._stepped = 0  # batches at the last call of `step`

    def begin_again(self) -> None:
        """Take the options and the state of now for those that the devices begin with."""
        self._first, self._fixed = self._now(), self._parts()
        self._state, self._marks = self.optimizer.state, None

    @property
    def has_state(self) -> bool:
        """Whether it has made steps, before the session or as another one's."""
        return any(self.optimizer.state.values())

    @property
    def is_loaded(self) -> bool:
        """Whether the caller's loop has given it another state: loaded, or written in place."""
        if self.optimizer.state is not self._state:
            return True
        with self._within():
            return self._marks is not None and not _are_alike(self._marks, _marks(self._state))

    @contextmanager
    def gets_state(self) -> Iterator[None]:
        """Let the block set the state, as devices have it; the caller's options stay."""
        groups = self.optimizer.param_groups
        with self._within():
            before, states = [dict(group) for group in groups], dict(self.optimizer.state)
            yield
            self._state = self.optimizer.state
            left_out = {p: own for p, own in states.items() if own and p not in self._state}
            self._state.update(left_out)  # of parameters that the loop has frozen meanwhile
            self._marks = _marks(self._state)
        for group, options in zip(groups, before, strict=True):
            if not self.is_set_there:
                group.clear()
                group.update(options)

    def take(self, states: Callable[[Named], Mapping[str, Any]], parameters: Named) -> None:
        """Get the state of the parameters that it steps; others may be among its own.

        Args:
            states: returns the state of parameters by their names.
            parameters: of the model that devices train.
        """
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        own = {name: p for name, p in parameters.items() if id(p) in stepped}
        found = states(own)
        with self.gets_state():
            self.optimizer.state.clear()
            self.optimizer.state.update({own[name]: state for name, state in found.items()})

    def enter(self, unread: Unread, steps: Callable[[], int], give: Callable[[], None]) -> None:
        """Answer what a loop calls, until `leave`.

        Args:
            unread: a block in which the module's tensors are as they are.
            steps: tells how many batches the devices got.
            give: gives this optimizer the state of the devices.
        """
        made, blocks = self.optimizer, ExitStack()

        def before(*_: object) -> None:
            blocks.enter_context(unread())
            try:
                self._require_idle(steps())
            except BaseException:
                blocks.close()
                raise

        self._handles = [
            made.register_step_pre_hook(before),
            made.register_step_post_hook(lambda *_: blocks.close()),
            made.register_state_dict_pre_hook(lambda _: give()),
        ]
        self._stepped = steps()
        self._swap(lambda state: _WatchedState(state, lambda: self._hear_read(give)))

    def _hear_read(self, give: Callable[[], None]) -> None:
        """Let the loop find the devices' state, and what it writes there be seen."""
        if self._is_within:
            return
        give()
        with self._within():
            self._marks = self._marks or _marks(self._state)

    def leave(self) -> None:
        """Let the optimizer be as the caller made it."""
        for handle in self._handles:
            handle.remove()
        self._swap(lambda state: defaultdict(dict, state))

    def _swap(self, made: Callable[[_State], _State]) -> None:
        """Put another dict in the place of the state's; a state that was loaded stays one."""
        with self._within():
            is_known = self.optimizer.state is self._state
            self.optimizer.state = made(self.optimizer.state)
            self._state = self.optimizer.state if is_known else self._state

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Let reads in the block find the state as it is."""
        before, self._is_within = self._is_within, True
        try:
            yield
        finally:
            self._is_within = before

    def _require_idle(self, steps: int) -> None:
        """Let a step do nothing: the devices have made it.

        Raises:
            InputError: it has gradients of this process, or is one for several batches.
        """
        groups = self.optimizer.param_groups
        if any(p.grad is not None for group in groups for p in group["params"]):
            raise InputError(
                "the optimizer would step by gradients of this process, and devices train the "
                "weights",
                code="BX3194",
                help=f"let the loss have all terms; {_LEAVE_OUT}",
            )
        before, self._stepped = self._stepped, steps
        if steps - before > 1:
            raise InputError(
                f"the optimizer steps once for {steps - before} batches, and devices have stepped "
                "with each of them",
                code="BX3195",
                help=f"give these batches as one, or with options micro_batches; {_LEAVE_OUT}",
            )

    def entries(self) -> dict[str, Tensor]:
        """Return the options that devices set for the next step, by the name of an entry.

        Raises:
            InputError: an option has changed that cannot be sent, or that is set there; or the
                state is another one.
        """
        import torch

        if self.is_loaded:
            raise InputError(
                "the loop has loaded another state into the optimizer, or written into its state, "
                "and devices have the one before",
                code="BX3198",
                help="load it before the session begins",
            )
        now = self._now()
        if self._fixed != self._parts():
            raise _other_groups()
        if now != self._first:
            self._note(now)
        return {
            f"{OF_OPTIMIZER}{name}": torch.tensor([g[name] for g in now], dtype=torch.float64)
            for name in sorted(self._moved)
        }

    def _note(self, now: _Options) -> None:
        if len(now) != len(self._first) or any(
            one.keys() != other.keys() for one, other in zip(now, self._first, strict=True)
        ):
            raise _other_groups()
        pairs = zip(now, self._first, strict=True)
        moved = {name for one, other in pairs for name in one if one[name] != other[name]}
        for name in sorted(moved - self._moved):
            self._require_sendable(name, now)
        self._moved |= moved

    def _require_sendable(self, name: str, now: _Options) -> None:
        if self.is_set_there:
            raise InputError(
                f"the loop has set the optimizer's {name}, and lr_scale or scheduler, given to "
                "machine(...), sets it on the devices",
                code="BX3191",
                help="leave one of them out",
            )
        if not all(name in group and _is_numbers(group[name]) for group in now):
            raise InputError(
                f"the loop has set the optimizer's {name} to {now[0].get(name)!r}, which is no "
                "number: devices hear of numbers alone",
                code="BX3192",
                help="set it before the session begins",
            )

    def _parts(self) -> list[list[int]]:
        """Return what devices made alike once: the parameters of each group, and hooks."""
        made, own = self.optimizer, {handle.id for handle in self._handles}
        hooks = [
            [number for number in held if number not in own]
            for name, held in sorted(vars(made).items())
            if name.startswith("_optimizer_step_") and isinstance(held, dict)
        ]
        return [*([id(p) for p in group["params"]] for group in made.param_groups), *hooks]

    def _now(self) -> _Options:
        return [_options(group) for group in self.optimizer.param_groups]


class _WatchedState(defaultdict[Any, Any]):
    """The state of an optimizer that calls a function before it is read; a copy is plain."""

    def __init__(self, state: Mapping[Any, Any], read: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._read = read

    def __getitem__(self, parameter: object) -> Any:  # noqa: ANN401  # of any optimizer
        self._read()
        return super().__getitem__(parameter)

    def __contains__(self, parameter: object) -> bool:
        self._read()
        return super().__contains__(parameter)

    def __iter__(self) -> Iterator[Any]:
        self._read()
        return super().__iter__()

    def __len__(self) -> int:
        self._read()
        return super().__len__()

    def get(self, parameter: Any, default: Any = None) -> Any:  # noqa: ANN401
        self._read()
        return super().get(parameter, default)

    def keys(self) -> Any:  # noqa: ANN401  # views, as of a dict
        self._read()
        return super().keys()

    def values(self) -> Any:  # noqa: ANN401
        self._read()
        return super().values()

    def items(self) -> Any:  # noqa: ANN401
        self._read()
        return super().items()

    def __reduce__(self) -> Any:  # noqa: ANN401  # as of pickle
        return defaultdict, (dict, {**self})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401
        return copy.deepcopy(defaultdict(dict, {**self}), memo)


def _marks(state: Mapping[Any, Mapping[str, Any]]) -> _Marks:
    """Return the values of a state, each with the number of writes into it."""
    return {
        (parameter, key): (value, getattr(value, "_version", 0))
        for parameter, own in state.items()
        for key, value in own.items()
    }


def _are_alike(one: _Marks, other: _Marks) -> bool:
    pairs = [(one[key], other[key]) for key in one if key in other]
    return len(pairs) == len(one) == len(other) and all(
        a is b and before == after for (a, before), (b, after) in pairs
    )


def _other_groups() -> InputError:
    return InputError(
        "the optimizer has other groups, or hooks, than when the devices made theirs",
        code="BX3190",
        help="give it all its groups before, those that train later with lr=0.0",
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in group.items() if name not in _NO_OPTIONS}
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:  # noqa: ANN401  # of any optimizer
    """Return a value that a later change does not touch: the number of a rate that is a tensor."""
    return value.item() if hasattr(value, "item") else value


def _is_numbers(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
