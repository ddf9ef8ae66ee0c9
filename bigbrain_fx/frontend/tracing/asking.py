"""Would forward or loss compute anything else on a GPU? They are run once and told that it is one.

    run ─▶ x.is_cuda, x.device.type, cuda.is_available(), autocast("cuda") as there ─▶ run: alike?

A model is traced on a CPU, and a trace keeps what the device decided there. Only the user's lines
are told so; tensors stay where they are. This file knows torch's own names; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.frontend.elsewhere import Elsewhere
from bigbrain_fx.frontend.tracing.asked_casts import casts_as_on_a_gpu
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike
from bigbrain_fx.frontend.translation.sources import is_users

ASKING = re.compile(r"\b(is_cuda|is_cpu|cuda)\b|autocast|\.device\.type\b|\.device\s*[=!]=")
AT_IMPORT = re.compile(r"\bcuda\.(is_available|device_count)\(")
_GPU = "cuda"
_FEW = 8  # lines that are told so one by one, to know which of them matter


def asked_of_device(plain: Plain, example: Sequence[Tensor]) -> Elsewhere | None:
    """Return what a step asks of the device on an example; None where it asks nothing."""
    try:
        return _asked(partial(plain.left, example, 0))
    except Exception:  # `trace` says what is wrong with the example
        return None


def _asked(run: Callable[[], Numbers]) -> Elsewhere | None:
    first = run()
    differs, lines = _told(run, first)
    if differs is not False and len(lines) <= _FEW:  # None: of a line that can be run as well
        matter = tuple(line for line in lines if _told(run, first, line)[0])
        differs, lines = (True, matter) if matter else (differs, lines)
    return Elsewhere(lines, differs) if lines else None


def _told(
    run: Callable[[], Numbers], first: Numbers, only: str | None = None
) -> tuple[bool | None, tuple[str, ...]]:
    """Return whether a run with these lines told otherwise gives other numbers, and who asked."""
    with on_a_gpu(only) as lines:
        try:
            differs: bool | None = not alike(first, run())
        except Exception:  # the user's: a kernel of a GPU has no CPU to run on
            differs = None
    return differs, tuple(dict.fromkeys(lines))


@contextlib.contextmanager
def on_a_gpu(only: str | None = None) -> Iterator[list[str]]:
    """Let the user's lines, or one of them, believe that tensors are on a GPU; yield who asks."""
    lines: list[str] = []
    seen = _Asking(lines, only)
    own: dict[str, Any] = {name: getattr(torch._C.TensorBase, name) for name in _PROPERTIES}
    calls = {name: getattr(torch.cuda, name) for name in ("is_available", *_WITHOUT_NUMBERS)}
    available = torch.cuda.is_available
    for name, get in own.items():
        setattr(Tensor, name, property(seen.property_of(name, get)))
    torch.cuda.is_available = lambda: seen.noted(sys._getframe(1)) or available()
    for name in _WITHOUT_NUMBERS:
        setattr(torch.cuda, name, seen.left_out(calls[name]))
    try:
        with casts_as_on_a_gpu(seen.told):
            yield lines
    finally:
        for name in own:
            delattr(Tensor, name)
        for name, call in calls.items():
            setattr(torch.cuda, name, call)


_PROPERTIES = ("is_cuda", "is_cpu", "device")
_WITHOUT_NUMBERS = ("synchronize", "empty_cache", "reset_peak_memory_stats")  # of a GPU


class _There(str):
    """A device that is a CPU to torch, and a GPU to whoever looks at it."""

    seen: _Asking
    index = 0  # type: ignore[assignment]  # a device's, not a string's

    @property
    def type(self) -> str:
        """Say that it is a GPU."""
        return _GPU if self.seen.noted(sys._getframe(1)) else str.__str__(self)

    def __eq__(self, other: object) -> bool:
        return self.is_like(other, sys._getframe(1))

    def __ne__(self, other: object) -> bool:
        return not self.is_like(other, sys._getframe(1))

    def __hash__(self) -> int:
        return hash(_GPU)

    def __str__(self) -> str:
        return f"{_GPU}:0" if self.seen.noted(sys._getframe(1)) else str.__str__(self)

    def is_like(self, other: object, frame: Any) -> bool:  # noqa: ANN401  # a frame
        """Whether another device is a GPU, as this one."""
        if isinstance(other, _There):
            return True
        return str(other).partition(":")[0] == (_GPU if self.seen.noted(frame) else "cpu")


@dataclass
class _Asking:
    """Answers the user's lines, or the one line `only`, and notes them."""

    lines: list[str]
    only: str | None

    def noted(self, frame: Any) -> bool:  # noqa: ANN401  # a frame
        """Note a line, if it is the user's; return whether it is told that this is a GPU."""
        file = frame.f_code.co_filename
        return is_users(file) and self.told(file, frame.f_lineno)

    def told(self, file: str, number: int) -> bool:
        """Note a line of the user's; return whether it is told that this is a GPU."""
        line = f"{Path(file).name}:{number}"
        self.lines.append(line)
        return self.only in (None, line)

    def property_of(self, name: str, own: Any) -> Callable[[Tensor], object]:  # noqa: ANN401
        """Return what answers a tensor's property."""

        def answer(tensor: Tensor) -> object:
            frame = sys._getframe(1)
            if not is_users(frame.f_code.co_filename):
                return own.__get__(tensor)
            if name == "device":
                there = _There(own.__get__(tensor))
                there.seen = self
                return there
            return self.noted(frame) == (name == "is_cuda")

        return answer

    def left_out(self, own: Callable[..., object]) -> Callable[..., object]:
        """Return what does nothing where the line that calls it is told that a GPU is there."""

        def call(*args: object, **named: object) -> object:
            return None if self.noted(sys._getframe(1)) else own(*args, **named)

        return call
