"""Let autocast be as on a GPU, on a CPU: regions of "cuda" cast, and those of "cpu" do nothing.

    with torch.autocast("cpu")  ─▶ told: what is on stays on     @torch.autocast("cuda") ─▶ told: on

A region is looked at as it is entered: a decorator's was made when its file was imported. Who is
told is `told`'s to say; this file knows torch's autocast and no graphs. No rehearsal on CPUs shows
it. Public code that has it: attention of Stable Diffusion, which takes
`torch.autocast(enabled=False, device_type='cuda')` round its scores.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bigbrain_fx.frontend.translation.sources import is_users

GPU, CPU = "cuda", "cpu"
_OFF = re.compile(r"enabled\s*=\s*False")
_OURS = str(Path(__file__).resolve().parents[2])

Told = Callable[[str, int], bool]
"""Whether the line of the user's, by file and number, is told that this is a GPU; notes it."""


@contextlib.contextmanager
def casts_as_on_a_gpu(told: Told) -> Iterator[None]:
    """Let autocast, and what asks for it, be as on a GPU for the user's lines that are told so."""
    casts, kind = _Casts(told), torch.autocast
    own = kind.__init__, kind.__enter__, kind.__exit__
    asks = {name: getattr(torch, name) for name in _ASKS}
    kind.__init__ = casts.made(own[0])  # type: ignore[method-assign]  # put back, as all below
    kind.__enter__ = casts.entered(own[1])  # type: ignore[method-assign]
    kind.__exit__ = casts.left(own[2])  # type: ignore[method-assign]
    for name, ask in asks.items():
        setattr(torch, name, casts.answered(ask, _ASKS[name]))
    try:
        yield
    finally:
        kind.__init__, kind.__enter__, kind.__exit__ = own  # type: ignore[method-assign]
        for name, ask in asks.items():
            setattr(torch, name, ask)


_ASKS = {  # by the device that each asks for where it is not said
    "is_autocast_enabled": GPU,
    "is_autocast_cpu_enabled": CPU,
    "get_autocast_dtype": "",
    "get_autocast_gpu_dtype": GPU,
}


@dataclass
class _Casts:
    """The regions that are open as others than they were made."""

    told: Told
    asked: dict[int, bool] = field(default_factory=dict)  # whether a region shall cast, by its id
    standing: list[tuple[object, torch.autocast]] = field(default_factory=list)

    def made(self, own: Callable[..., None]) -> Callable[..., None]:
        """Note whether a region shall cast: torch forgets it where no GPU is."""

        def init(
            region: torch.autocast,
            device_type: str,
            dtype: Any = None,  # noqa: ANN401  # as torch's
            enabled: bool = True,
            *args: Any,  # noqa: ANN401
            **named: Any,  # noqa: ANN401
        ) -> None:
            own(region, device_type, dtype, enabled, *args, **named)
            self.asked[id(region)] = enabled

        return init

    def entered(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Open what stands for a region, where its line is told so."""

        def enter(region: torch.autocast) -> object:
            other = self._instead_of(region, sys._getframe(1))
            if other is None:
                return own(region)
            self.standing.append((region, other))
            return own(other)

        return enter

    def left(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Close what was opened."""

        def leave(region: torch.autocast, *error: Any) -> object:  # noqa: ANN401
            stands = self.standing and self.standing[-1][0] is region
            return own(self.standing.pop()[1] if stands else region, *error)

        return leave

    def answered(self, own: Callable[..., Any], default: str) -> Callable[..., Any]:
        """Answer for the other device where the line that asks is told so."""

        def answer(*args: Any) -> object:  # noqa: ANN401
            wanted, frame = args[0] if args else default, sys._getframe(1)
            asks = is_users(frame.f_code.co_filename) or frame.f_code.co_name == "decorate_fwd"
            if wanted not in (GPU, CPU) or not asks or not self._is_told(frame):
                return own(*args)
            if own.__name__.startswith("get"):
                return _dtype_of(CPU)
            return wanted == GPU and _is_on()

        return answer

    def _instead_of(self, region: torch.autocast, frame: Any) -> torch.autocast | None:  # noqa: ANN401
        """Return the region of the CPU that does here what this one does on a GPU."""
        if region.device not in (GPU, CPU) or not self._is_told(frame):
            return None
        if region.device == CPU:  # tensors are on the GPU: what is on there stays
            return torch.autocast(CPU, _dtype_of(CPU), enabled=_is_on())
        shall = self.asked.get(id(region), region._enabled or _is_on_by_text(frame))
        return torch.autocast(CPU, region.fast_dtype, enabled=shall)

    def _is_told(self, frame: Any) -> bool:  # noqa: ANN401  # a frame
        """Whether the user's line that this is done for is told so; none of ours is."""
        while frame is not None:
            code = _decorated(frame) or frame.f_code
            if is_users(code.co_filename):
                line = code.co_firstlineno if code is not frame.f_code else frame.f_lineno
                return self.told(code.co_filename, line)
            if frame.f_code.co_filename.startswith(_OURS):
                return False
            frame = frame.f_back
        return False


_is_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype  # torch's own


def _is_on() -> bool:
    return bool(_is_enabled(CPU))


def _decorated(frame: Any) -> Any:  # noqa: ANN401  # a frame's code
    """Return the code of the function that `@torch.autocast` stands before."""
    if frame.f_code.co_name != "decorate_autocast":
        return None
    return getattr(inspect.unwrap(frame.f_locals["func"]), "__code__", None)


def _is_on_by_text(frame: Any) -> bool:  # noqa: ANN401  # a frame
    """Whether a decorator's region casts, by its text: torch has switched it off without a GPU."""
    while frame is not None and frame.f_code.co_name != "decorate_autocast":
        frame = frame.f_back
    if frame is None:
        return True
    try:
        text = inspect.getsource(frame.f_locals["func"])
    except (OSError, TypeError):
        return True
    return not _OFF.search(text.partition("def ")[0])
