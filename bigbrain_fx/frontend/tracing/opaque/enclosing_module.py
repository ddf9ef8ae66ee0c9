"""The smallest module around what no trace can hold, kept whole of itself: as `--opaque` would.

    refused in blocks.0.experts ─▶ every Experts is a leaf ─▶ still refused: the Block around it
    refused in the model itself ─▶ its modules are traced, the lines of its forward that follow are
                                   one op ─▶ still refused: so are those before each module

A loop over the experts that were hit, a matcher, a number read in Python: a part of a forward that
is otherwise fine. This file knows modules and refusals; it knows no traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import nn

from bigbrain_fx.errors import BigBrainError, CaptureError
from bigbrain_fx.frontend.tracing.hooks import hooked_modules
from bigbrain_fx.frontend.tracing.opaque.forward_lines import KeptLines
from bigbrain_fx.frontend.translation.refusals import may_stay_whole, modules_of

_MOST = 6  # attempts
_MOST_OF, _NEARLY_ALL = 0.5, 0.95  # shares of the parameters
_WHEREVER = ("BX0120", "BX0160", "BX0170")  # dice, state and hooks: kept whole or not
_HOOKED = "BX0172a"  # modules with hooks: each is opaque, and no other one of its class


class _Warned(Protocol):
    """Warnings that can still be given."""

    @property
    def warnings(self) -> tuple[str, ...]: ...


_Found = TypeVar("_Found", bound=_Warned)


@dataclass(frozen=True)
class KeptWhole:
    """Opaque parts of a model.

    Attributes:
        leaves: modules, by path or class.
        lines: path of the module whose own lines are opaque, but for the modules that they call:
            those after the last of these, or `all_lines`.
    """

    leaves: tuple[str, ...]
    lines: str | None = None
    all_lines: bool = False

    def kept_lines(self, model: nn.Module, blank: bool) -> KeptLines | None:
        """Return the lines; they are run, to see what they do.

        Raises:
            CaptureError: the model has no numbers, or cannot be copied.
        """
        if self.lines is None:
            return None
        if blank:
            raise CaptureError("a model without numbers cannot be run", code="BX0140c")
        return KeptLines(self.lines, model.get_submodule(self.lines), self.all_lines)


def enclosing(
    model: nn.Module,
    leaves: Sequence[str],
    attempt: Callable[[KeptWhole], _Found],
    apart: Sequence[tuple[str, str]] = (),
    stateful: Sequence[str] = (),
) -> _Found:
    """Make an attempt; where it is refused for a part of the model, keep that part whole.

    Args:
        model: the user's.
        leaves: what is kept whole in any case.
        attempt: captures with parts kept whole.
        apart: modules that a trace was found to hold otherwise than they are, by path, and how.
        stateful: modules whose calls go by what they have left in attributes.

    Raises:
        BigBrainError: the first refusal, where no part of the model can be kept instead.
    """
    first: BigBrainError | None = None
    whole = KeptWhole((*leaves, *stateful))
    said = "its calls go by what they leave in attributes" if stateful else ""
    for path, how in apart:
        whole = _around(model, whole, path, len(leaves)) or whole
        said = said or f"rehearsed otherwise, {how}"
    for _ in range(_MOST):
        try:
            found = attempt(whole)
        except BigBrainError as error:
            if error.family in _WHEREVER:
                raise
            more = _more(model, whole, error, len(leaves), is_first=first is None)
            first = first or error
            if more is None:
                raise first from None if first is not error else error.__cause__
            whole = more
            said = said or f"no trace can hold {first.at}: {first.what}"
        else:
            return found if not said else _told(found, model, whole, len(leaves), said)
    assert first is not None
    raise first


def _more(
    model: nn.Module, whole: KeptWhole, error: BigBrainError, given: int, *, is_first: bool
) -> KeptWhole | None:
    """Return what to keep whole next: less of the model where that may do; None to give up."""
    if whole.lines is not None:
        return _around(model, whole, whole.lines, given)
    if not may_stay_whole(error):
        if is_first:
            return None
        path = (*whole.leaves[given:], "")[0].rpartition(".")[0]  # the one around it
    else:
        path = _path_of(model, error)
    if error.code == _HOOKED and path:
        return KeptWhole((*whole.leaves, *filter(None, hooked_modules(model))))
    return _around(model, whole, path, given)


def _around(model: nn.Module, whole: KeptWhole, path: str, given: int) -> KeptWhole | None:
    """Return the same with a module or its lines kept whole; with more where these are already."""
    if path == whole.lines:  # its lines alone do not do
        if not whole.all_lines and _is_nearly_all(model, path):
            return replace(whole, all_lines=True)
        return _with_leaf(model, whole, path, given) if path else None
    path = path.rpartition(".")[0] if path in whole.leaves[given:] else path  # it did not do
    if not path or _is_most(model, path):
        return replace(whole, lines=path)
    return _with_leaf(model, whole, path, given)


def _with_leaf(model: nn.Module, whole: KeptWhole, path: str, given: int) -> KeptWhole:
    kept = _kept(whole.leaves[given:], path)
    return KeptWhole((*whole.leaves[:given], *_alike(model, path), *kept))


def _is_most(model: nn.Module, path: str) -> bool:
    """Whether a module holds more than half of the model's numbers: its lines are tried first."""
    return _share(model, (path,)) > _MOST_OF


def _is_nearly_all(model: nn.Module, path: str) -> bool:
    """Whether nothing is split where a module is opaque: the model's own, or one in a wrapper."""
    return not path or _share(model, (path,)) > _NEARLY_ALL


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


def _told(found: _Found, model: nn.Module, whole: KeptWhole, given: int, why: str) -> _Found:
    paths, what = whole.leaves[given:], []
    if paths:
        kinds = dict.fromkeys(type(model.get_submodule(path)).__name__ for path in paths)
        count = f"{len(paths)} modules" if len(paths) > 1 else paths[0]
        what.append(f"{', '.join(kinds)} ({count}, {_share(model, paths):.0%} of the parameters)")
    if whole.lines is not None:
        kind = type(model.get_submodule(whole.lines)).__name__
        what.append(f"the lines of {kind}.forward itself (the modules that it calls are not)")
    text = f"kept whole, on one device: {', '.join(what)}; {why}. --strict refuses instead"
    return replace(found, warnings=(*found.warnings, text))  # type: ignore[type-var]


def _share(model: nn.Module, paths: Sequence[str]) -> float:
    """Return how much of the model's parameters some of its modules have."""
    own = {id(p): p.numel() for path in paths for p in model.get_submodule(path).parameters()}
    return sum(own.values()) / max(1, sum(p.numel() for p in model.parameters()))
