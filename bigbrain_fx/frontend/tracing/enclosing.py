"""The smallest module around what no trace can hold, kept whole of itself: as `--leaf` would.

    refused in blocks.0.experts ─▶ every Experts is a leaf ─▶ still refused: the Block around it

A loop over the experts that were hit, a matcher, a number read in Python: a part of a forward that
is otherwise fine. This file knows modules and refusals; it knows no traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import nn

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.translation.refusals import may_stay_whole, modules_of

_MOST = 6  # attempts
_WHEREVER = ("BX0120", "BX0160", "BX0170")  # dice, state and hooks: kept whole or not


class _Warned(Protocol):
    """What can be told more."""

    @property
    def warnings(self) -> tuple[str, ...]: ...


_Found = TypeVar("_Found", bound=_Warned)


def enclosing(
    model: nn.Module, leaves: Sequence[str], attempt: Callable[[Sequence[str]], _Found]
) -> _Found:
    """Make an attempt; where it is refused for a part of the model, keep that part whole.

    Args:
        model: the user's.
        leaves: what is kept whole anyway.
        attempt: captures with the modules of these paths or classes kept whole.

    Raises:
        BigBrainError: the first refusal, where no part inside the model can be kept instead.
    """
    first: BigBrainError | None = None
    whole, said = tuple(leaves), ""
    for _ in range(_MOST):
        try:
            found = attempt(whole)
        except BigBrainError as error:
            if error.what.startswith(_WHEREVER):
                raise
            first = first or error
            if first is not error and not may_stay_whole(error):
                path = (*whole[len(leaves) :], "")[0].rpartition(".")[0]  # the one around it
            else:
                path = _path_of(model, error) if may_stay_whole(error) else ""
            if not path:
                raise first from None if first is not error else error.__cause__
            whole = (*leaves, *_alike(model, path), *_kept(whole[len(leaves) :], path))
            said = said or f"{first.at}: {first.what.partition(': ')[2]}"
        else:
            return found if not said else _told(found, model, whole[len(leaves) :], said)
    assert first is not None
    raise first


def _path_of(model: nn.Module, error: BigBrainError) -> str:
    """Return the path of the innermost module that an error is about; none for the model itself."""
    about = getattr(error, "inside", None) or modules_of(error)
    parts = dict(model.named_modules())
    if isinstance(about, str):
        named = (p for p, part in parts.items() if about in (p, type(part).__name__))
        return next(named, "")
    paths = {id(vars(part)): path for path, part in reversed(parts.items())}
    found = (paths.get(id(getattr(each, "__dict__", None))) for each in about)
    return next((path for path in found if path is not None), "")


def _alike(model: nn.Module, path: str) -> list[str]:
    """Return the path and those of the other modules of its class: layers are alike."""
    kind = type(model.get_submodule(path))
    others = (p for p, part in model.named_modules() if type(part) is kind and p)
    return list(dict.fromkeys((path, *others)))


def _kept(whole: Sequence[str], path: str) -> list[str]:
    return [other for other in whole if not other.startswith(f"{path}.")]


def _told(found: _Found, model: nn.Module, whole: Sequence[str], why: str) -> _Found:
    kinds = dict.fromkeys(type(model.get_submodule(path)).__name__ for path in whole)
    count = f"{len(whole)} modules" if len(whole) > 1 else whole[0]
    text = f"kept whole, on one device: {', '.join(kinds)} ({count}); no trace can hold {why}"
    return replace(found, warnings=(*found.warnings, text))  # type: ignore[type-var]
