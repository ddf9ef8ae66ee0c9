"""Random numbers of a plain PyTorch module, drawn under the keys that a bundle draws by.

A bundle seeds each draw by (seed, step, micro-batch, place): the path of the module that draws, and
how many draws of that module came before. Here the user's module runs as it is, and what it calls
is watched: a draw is a call of torch that moves the default generator. This file knows modules and
torch's calls; it knows no graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bigbrain_fx.verification.draws import Key, reseed

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)  # no draws of its own


class KeyedDice(TorchFunctionMode):
    """Seed every draw of a module by its place, inside `with`.

    What a graph keeps as one op is one draw, however often it draws inside: a `no_grad` block, a
    region of autocast, a custom autograd function, a module that is kept whole. A region
    of autocast is several where gradients are switched off or on within it.

    Attributes:
        places: where draws of the last micro-batch were made in forward, in order.
        ambient: the autocast that the whole forward is under, which is no region of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[int, list[str]] = {}
        self.whole: frozenset[str] = frozenset()
        self.places: list[str] = []
        self._kept: dict[bytes, tuple[Counter[str], list[str], list[bool] | None]] = {}
        self._restarted = 0
        self._on = self._again = self._is_other = False
        self.ambient: object = None
        self._casts: list[object] = []
        self._start((0, 0, 0))

    def know(self, model: nn.Module, whole: Collection[str] = ()) -> None:
        """Learn the paths of a model's modules, and which of them are kept whole."""
        self.paths = {}
        for path, part in model.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(part), []).append(path)
        self.whole = frozenset(whole)

    def _start(self, key: Key) -> None:
        self.key = key
        self.counts: Counter[str] = Counter()
        self.stack: list[str] = [""]
        self.places.clear()
        self._kept.clear()
        self._unit = self._sealed = False
        self._casts.clear()
        self._region = 0  # how many modes were on when the outermost `no_grad` block began
        self.modes = [True]  # gradients enabled or not, outermost first
        self._state: bytes | None = None  # of the generator, once it is seeded for the next draw

    # ------------------------------------------------------------------ what is watched

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # torch's own signature
        """Run a call of torch, the generator seeded for it."""
        if func is torch._C._set_grad_enabled:
            return self._grad_mode(bool(args[0]))
        if self._unit or func in _BACKWARD:
            return func(*args, **(kwargs or {}))
        self._seed()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._count()

    def _grad_mode(self, enabled: bool) -> None:
        """Follow `no_grad` blocks: the outermost one is one draw, and parts one of autocast."""
        before = torch.is_grad_enabled()
        if self._casts and not self._sealed and enabled != before:
            self._count()
            torch._C._set_grad_enabled(enabled)
            self._now(enabled)
            self._seed()
            return
        self._now(before)  # torch's own code disables gradients, too: of a custom function, say
        ends = len(self.modes) > 1 and self.modes[-2] == enabled != before
        if before and not enabled and not ends and not self._unit:
            self._seed()
            self._unit, self._region = True, len(self.modes)
        torch._C._set_grad_enabled(enabled)
        self._now(enabled)
        if ends and self._region == len(self.modes):
            self._unit, self._region = False, 0
            self._count()

    def _now(self, enabled: bool) -> None:
        if len(self.modes) > 1 and self.modes[-2] == enabled != self.modes[-1]:
            self.modes.pop()
        elif self.modes[-1] != enabled:
            self.modes.append(enabled)

    def _seed(self) -> None:
        """Seed the generator for the next draw at this place, unless it is."""
        if self._state is None:
            reseed(self.key, self._place())
            self._state = _bytes_of(torch.default_generator.get_state())

    def _count(self) -> None:
        """Take note of a draw, if there was one."""
        if self._state is None:  # it was put back to another place meanwhile
            return
        if _bytes_of(torch.default_generator.get_state()) != self._state:
            self.places += [] if self._again else [self._place()]
            self.counts[self.stack[-1]] += 1
            self._state = None

    def _place(self) -> str:
        path = self.stack[-1]
        count = self.counts[path]
        return f"{path}#{count}" if count else path

    @contextlib.contextmanager
    def one_draw(self) -> Iterator[None]:
        """Take all draws inside as one."""
        before = self._unit, self._sealed
        if not self._unit:
            self._seed()
        self._unit = self._sealed = True
        try:
            yield
        finally:
            self._unit, self._sealed = before
            if not self._unit:
                self._count()

    def cast_begins(self, cast: torch.autocast, is_checkpoints: bool) -> None:
        """Take the draws of the outermost region of autocast as one, where it changes anything."""
        changes = cast._enabled or torch.is_autocast_enabled("cpu")
        if not self._on or self._unit or cast is self.ambient or not changes:
            return
        if is_checkpoints and not self._is_other:
            return  # its second forward is under what the first was, and that was no region
        if not is_checkpoints:
            self._seed()
        self._unit = True
        self._casts.append(cast)

    def cast_ends(self, cast: torch.autocast) -> None:
        """End the region that was begun with it, if one was."""
        if self._casts and self._casts[-1] is cast:
            self._casts.pop()
            self._unit = False
            self._count()

    def _path_of(self, module: nn.Module) -> str:
        """Return a module's path; of several, the one in what calls it, as in a trace."""
        caller = self.stack[-1]
        found = self.paths.get(id(module), [caller])
        here = [path for path in found if path.rpartition(".")[0] == caller]
        below = [path for path in found if path.startswith(f"{caller}.")]
        return (here or below or found)[0]

    @contextlib.contextmanager
    def _within(self, module: nn.Module) -> Iterator[None]:
        """Be inside the call of a module; one that is not the model's has its caller's place."""
        path = self._path_of(module)
        self.stack.append(path)
        self._state = None if path != self.stack[-2] and not self._unit else self._state
        try:
            with self.one_draw() if path in self.whole else contextlib.nullcontext():
                yield
        finally:
            left = self.stack.pop() if len(self.stack) > 1 else ""
            self._state = None if left != self.stack[-1] and not self._unit else self._state

    # ------------------------------------------------------------------ what is put in its place

    def install(self) -> None:
        """Listen to calls of modules and of custom functions, and to who keeps the dice's state.

        For good, in this process, and before the model file is run: it may keep `Function.apply`.
        """
        _listen_to_modules(self)
        _listen_to_functions(self)
        _listen_to_states(self)
        _listen_to_backward(self)
        _listen_to_autocast(self)

    @contextlib.contextmanager
    def rolling(self, key: Key) -> Iterator[None]:
        """Seed all draws inside, those of a micro-batch."""
        self._start(key)
        self._on = True
        try:
            with self:
                yield
        finally:
            self._on = False

    def call_of(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Be inside a call of a module."""
        return self._within(module) if self._on else contextlib.nullcontext()

    @contextlib.contextmanager
    def second_forward(self) -> Iterator[None]:
        """Watch what a backward pass calls: a checkpoint runs forward again."""
        if not self._on:
            yield
            return
        kept, self.modes = self.modes, [False]
        again, self._again = self._again, True
        try:
            with self:
                yield
        finally:
            self.modes, self._again = kept, again

    def function_of(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Be inside a custom autograd function of a Python module; torch's own are plain calls."""
        own = name.partition(".")[0] == "torch"
        return self.one_draw() if self._on and not own else contextlib.nullcontext()

    def snapshot(self) -> Tensor:
        """Return a state that nobody else has, and remember the place that it stands for.

        `torch.utils.checkpoint` keeps the state, and sets it again to run forward a second time.
        """
        if self._on and not self._unit:
            self._restarted += 1
            torch.default_generator.manual_seed(self._restarted)
            state = torch.default_generator.get_state()
            modes = list(self.modes) if self._again else None
            self._kept[_bytes_of(state)] = self.counts.copy(), list(self.stack), modes
            self._state = None
            return state
        return torch.default_generator.get_state()

    def go_back(self, state: Tensor) -> None:
        """Be at the place again that a state stands for."""
        torch.default_generator.set_state(state)
        found = self._kept.get(_bytes_of(state))
        self._is_other = found is None
        if found is not None:
            self.counts, self.stack = found[0].copy(), list(found[1])
            self.modes = list(found[2] or [torch.is_grad_enabled()])
        self._state = self._state if self._unit else None


def _bytes_of(state: Tensor) -> bytes:
    with torch._C.DisableTorchFunction():  # it is no call of the user's
        return state.numpy().tobytes()


def _listen_to_modules(dice: KeyedDice) -> None:
    call = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with dice.call_of(module):
            return call(module, *args, **kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]


def _listen_to_functions(dice: KeyedDice) -> None:
    apply = vars(torch.autograd.Function)["apply"].__func__

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with dice.function_of(cls.__module__):
            return apply(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment,method-assign]


def _listen_to_states(dice: KeyedDice) -> None:
    for home in (torch, torch.random):
        home.get_rng_state = dice.snapshot  # type: ignore[attr-defined]
        home.set_rng_state = dice.go_back  # type: ignore[attr-defined]


def _listen_to_backward(dice: KeyedDice) -> None:
    """Go on watching in a backward pass, which is one call of torch to who watches its calls."""
    run = vars(torch.autograd)["_engine_run_backward"]

    def running(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with dice.second_forward():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = running  # type: ignore[attr-defined]


def _listen_to_autocast(dice: KeyedDice) -> None:
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entered(cast: torch.autocast) -> Any:  # noqa: ANN401  # torch's own
        caller = sys._getframe(1).f_code.co_filename
        dice.cast_begins(cast, is_checkpoints=caller == torch.utils.checkpoint.__file__)
        return enter(cast)  # type: ignore[no-untyped-call]

    def left(cast: torch.autocast, *args: Any) -> Any:  # noqa: ANN401  # torch's own
        try:
            return leave(cast, *args)
        finally:
            dice.cast_ends(cast)

    torch.autocast.__enter__ = entered  # type: ignore[method-assign]
    torch.autocast.__exit__ = left  # type: ignore[method-assign]
