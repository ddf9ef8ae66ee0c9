"""Choice of the smallest opaque module around code that no trace holds, as `--opaque` would choose.

    refused in blocks.0.experts ─▶ every Experts is opaque ─▶ still refused: the Block around it
    refused in the model itself ─▶ its modules are traced, the lines of its forward that follow are
                                   one op ─▶ still refused: so are the lines before each module

Such code is a loop over the experts that were hit, a matcher, or a number read in Python. The rest
of the forward is traced. This file knows modules and refusals; it knows no traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import nn

from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend.tracing.hooks import hooked_modules
from bigbrain_fx.frontend.tracing.opaque.chosen_lines import (
    last_lines,
    lines_between_calls,
    span_around,
)
from bigbrain_fx.frontend.tracing.opaque.forward_text import Span, span_of
from bigbrain_fx.frontend.tracing.opaque.outlined import NOT_APART
from bigbrain_fx.frontend.tracing.state.module_state import is_within
from bigbrain_fx.frontend.translation.refusals import may_stay_whole, modules_of

_MOST = 16  # attempts
_MOST_OF = 0.5  # share of the parameters
_WHEREVER = ("BX0160", "BX0170")  # state and hooks: opaque or not
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
        leaves: modules, by path or class, and lines of forwards, by the path of their new module.
        tried: how often lines of a forward were opaque that no refusal names.
    """

    leaves: tuple[str, ...]
    tried: int = 0


def enclosing(
    model: nn.Module,
    leaves: Sequence[str],
    attempt: Callable[[KeptWhole], _Found],
    apart: Sequence[tuple[str, str]] = (),
    stateful: Sequence[str] = (),
) -> _Found:
    """Make an attempt; where it is refused for a part of the model, make that part opaque.

    Args:
        model: the user's.
        leaves: modules that are opaque in any case.
        attempt: captures with opaque parts.
        apart: modules whose trace differs from them, by path, with the difference.
        stateful: modules whose calls depend on attributes of earlier calls.

    Raises:
        BigBrainError: the first refusal, where no part of the model can be opaque instead.
    """
    first: BigBrainError | None = None
    whole, tried = KeptWhole((*leaves, *stateful)), list[KeptWhole]()
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
            tried.append(whole)
            if more is None or more in tried:
                raise first from None if first is not error else error.__cause__
            whole = more
            said = said or f"no trace can hold {first.at or 'it'}: {first.what}"
        else:
            return found if not said else _told(found, model, whole, len(leaves), said)
    assert first is not None
    raise first


def _more(
    model: nn.Module, whole: KeptWhole, error: BigBrainError, given: int, *, is_first: bool
) -> KeptWhole | None:
    """Return the next opaque parts: the smallest that may suffice; None to give up."""
    shared = getattr(error, "inside", None) if error.code == NOT_APART else None
    if isinstance(shared, str):  # by these lines and others: both may call it where it is opaque
        return KeptWhole((*whole.leaves, shared), whole.tried)
    if not may_stay_whole(error):
        if is_first:
            return None
        path = (*whole.leaves[given:], "")[0].rpartition(".")[0]  # the one around it
    else:
        path = _path_of(model, error)
    if error.code == _HOOKED and path:
        return KeptWhole((*whole.leaves, *filter(None, hooked_modules(model))))
    return _around(model, whole, path, given, error)


def _around(
    model: nn.Module, whole: KeptWhole, path: str, given: int, error: BigBrainError | None = None
) -> KeptWhole | None:
    """Return the parts with a module or its lines opaque; with more where these are already."""
    outer = [leaf for leaf in whole.leaves[given:] if is_within(path, [leaf])]
    path = min(outer, key=len).rpartition(".")[0] if path and outer else path  # it did not do
    while path and isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]  # nobody calls a list
    if not path or _is_most(model, path):
        kept = whole.leaves[given:]
        more = error if error and error.code != NOT_APART else None
        span = span_around(model, more, kept) if more else None
        if span and span.is_all and span.forward.path:
            return _with_leaf(model, whole, span.forward.path, given)
        if span and not span.is_all:
            return _with_span(whole, span, given)
        return _with_lines(model, whole, path, given)
    return _with_leaf(model, whole, path, given)


def _with_span(whole: KeptWhole, span: Span, given: int) -> KeptWhole:
    """Return the same with statements of a forward, and without the modules that they call."""
    inner = [f"{span.forward.path}.{name}".removeprefix(".") for name in span.uses]
    kept = [path for path in whole.leaves[given:] if not is_within(path, inner)]
    kept = [path for path in kept if not span.covers(path)]
    return KeptWhole((*whole.leaves[:given], *kept, span.path), whole.tried)


def _with_lines(model: nn.Module, whole: KeptWhole, path: str, given: int) -> KeptWhole | None:
    """Return the same with the last lines of a forward, then all but the modules that they call."""
    kept = [path for path in whole.leaves[given:] if span_of(model, path) is None]
    for tried, lines in enumerate((last_lines, lines_between_calls), 1):
        found = lines(model, path) if tried > whole.tried else []
        if found:
            return KeptWhole((*whole.leaves[:given], *kept, *found), tried)
    return _with_leaf(model, replace(whole, tried=2), path, given) if path else None


def _with_leaf(model: nn.Module, whole: KeptWhole, path: str, given: int) -> KeptWhole:
    kept = _kept(whole.leaves[given:], path)
    return KeptWhole((*whole.leaves[:given], *_alike(model, path), *kept), whole.tried)


def _is_most(model: nn.Module, path: str) -> bool:
    """Whether a module holds more than half of the model's numbers: its lines are tried first."""
    return _share(model, (path,)) > _MOST_OF


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
    """Return the path and the paths of the other modules of its class: layers are identical."""
    kind = type(model.get_submodule(path))
    others = (p for p, part in model.named_modules() if type(part) is kind and p)
    return list(dict.fromkeys((path, *others)))


def _kept(whole: Sequence[str], path: str) -> list[str]:
    return [other for other in whole if not other.startswith(f"{path}.")]


def _told(found: _Found, model: nn.Module, whole: KeptWhole, given: int, why: str) -> _Found:
    spans = [span for span in (span_of(model, path) for path in whole.leaves[given:]) if span]
    names = [span.path for span in spans]
    paths, what = [p for p in whole.leaves[given:] if p not in names], [*map(str, spans)]
    if paths:
        kinds = dict.fromkeys(type(model.get_submodule(path)).__name__ for path in paths)
        count = f"{len(paths)} modules" if len(paths) > 1 else paths[0]
        what.append(f"{', '.join(kinds)} ({count}, {_share(model, paths):.0%} of the parameters)")
    text = f"opaque, on one device: {', '.join(what)}; {why}. --strict refuses instead"
    return replace(found, warnings=(*found.warnings, text))  # type: ignore[type-var]


def _share(model: nn.Module, paths: Sequence[str]) -> float:
    """Return how much of the model's parameters some of its modules have."""
    own = {id(p): p.numel() for path in paths for p in model.get_submodule(path).parameters()}
    return sum(own.values()) / max(1, sum(p.numel() for p in model.parameters()))
