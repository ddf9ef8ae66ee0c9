"""Whether the user's optimizer may be made once a device, and made again where a device died.

    with all parameters = with those of each device = a new one that has the state of the old

A rehearsal steps the real one on the real bundle for three steps. Tried here, on made-up numbers
and before anything is written, is what three steps do not show: gradients that are not as usual, a
replaced process, what counts on. This file knows the contract for `optimizer`; it knows no graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.counters import Counter, look, moves, moving
from bigbrain_fx.frontend.tracing.optimizer_refusals import (
    CLIP_OR_SCALE,
    COUNTS,
    DRAWS,
    FAILS,
    FAILS_ON_PART,
    GROUP_FOR_EACH,
    KEEPS,
    ONCE_A_STEP,
    TOGETHER,
    TOGETHER_WHERE,
)
from bigbrain_fx.frontend.tracing.optimizer_trial import (
    ALIKE,
    ODD,
    USUAL,
    Gradients,
    Make,
    Numbers,
    Shape,
    Trial,
    cut_short,
    dice_kept,
    in_float64,
    numbers_of,
    place_of,
    relative_error,
    run_trial,
    shapes_of,
    unlike,
)
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.runtime import StateError

Shapes = Mapping[str, Shape]
_OF_CODE = (NameError, AttributeError, TypeError, LookupError, ValueError)


def require_per_device(
    model: nn.Module,
    make: Make,
    held: Mapping[str, Sequence[str]],
    *,
    here: bool = True,
    by_pieces: bool = False,
) -> str | None:
    """Try an optimizer with all parameters of a model, and with those of each device.

    Args:
        model: whose parameters it is for; of them only names, shapes and types are looked at.
        make: `optimizer` of the model file.
        held: device -> the names of its trained parameters.
        here: whether the devices are of this host's kind; one that fails here may need the others.
        by_pieces: whether it is stepped over a few parameters at a time: see `runtime.stores`.

    Returns:
        Why it could not be tried, if so.

    Raises:
        InputError: it needs a closure, fails, or updates a parameter otherwise.
    """
    everything = {name for names in held.values() for name in names}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and n in everything}
    shapes = shapes_of(trained)
    parts = {device: [n for n in shapes if n in set(names)] for device, names in held.items()}
    parts = {device: names for device, names in parts.items() if names}
    if not parts:
        return None
    with dice_kept():
        try:
            whole = _tried(make, shapes)
        except InputError as error:
            if here:
                raise
            return f"the optimizer could not be tried on this host's CPU: {error.what}"
        _require_renewable(make, cut_short(shapes))
        _require_counts_kept(make, cut_short(shapes))
        if by_pieces:
            _require_pieces(make, shapes, whole)
        for device, names in parts.items() if len(parts) > 1 else ():
            share = f"device {device}, which has {len(names)} of the {len(shapes)} parameters"
            _require_alike(make, shapes, whole, names, share)
    return None


def require_runnable(model: nn.Module, make: Make) -> None:
    """Refuse an optimizer whose code fails anywhere, on a few numbers of each parameter.

    A missing package or a kernel that a CPU lacks may be there where the model trains.

    Raises:
        InputError: it raises what its own code is to blame for, or is none.
    """
    shapes = cut_short(shapes_of({n: p for n, p in model.named_parameters() if p.requires_grad}))
    with dice_kept():
        try:
            _tried(make, shapes)
        except InputError as error:
            if error.__cause__ is None or isinstance(error.__cause__, _OF_CODE):
                raise


def _tried(make: Make, shapes: Shapes) -> Numbers:
    """Run a trial of all parameters; say what the user's code raises there."""
    try:
        return run_trial(make, shapes, list(shapes))
    except InputError:
        raise
    except Exception as error:  # the user's own code
        raise FAILS.error(where(error) or place_of(make), error=_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# --------------------------------------------------------------------------- a replaced process


def _require_renewable(make: Make, few: Shapes) -> None:
    """Refuse one whose steps need more than its state: random numbers, or what it keeps elsewhere.

    Raises:
        InputError: another seed, or a new optimizer with the state of the old, updates otherwise.
    """
    at, names = place_of(make), list(few)
    try:
        first, second, thrown = (run_trial(make, few, names, seed=seed) for seed in (0, 0, 1))
        renewed = run_trial(make, few, names, renewed_at=1)
    except StateError as error:
        raise KEEPS.error(at, what=error) from error
    except Exception:
        return  # it wants the shapes that it is made for, and has run with those
    if unlike(first, second):
        raise KEEPS.error(at, what="the second one that is made here updates otherwise")
    if unlike(first, thrown):
        raise DRAWS.error(at)
    if unlike(first, renewed):
        raise KEEPS.error(at, what="a new one that is given its state goes on otherwise")


def _require_counts_kept(make: Make, few: Shapes) -> None:
    """Refuse one that updates otherwise when it has made more steps than its state says.

    Lookahead counts to its k in an attribute, a warm-up ends after a thousand steps.

    Raises:
        InputError: names what it counts.
    """
    found = None
    with suppress(Exception):  # it wants the shapes that it is made for
        found = _counted(Trial(make, few, list(few)), Trial(make, few, list(few)))
    if found is not None:
        raise COUNTS.error(place_of(make), name=found[0].place.name, runs=found[1])


def _counted(one: Trial, other: Trial) -> tuple[Counter, int] | None:
    """Return what only one of two has counted on, and how many steps later it decides."""
    kept = [getattr(other.made, name, None) for name in ("state", "param_groups")]
    looks = []
    for _ in range(3):  # what begins to count is there after the first
        one.step()
        other.step()
        looks.append(look((other.made,), kept))
    counters = moving(*looks)
    for runs, change, times in moves() if counters else ():
        for counter in counters:
            change(counter)
        for _ in range(times):
            one.step()
            other.step()
            if unlike(one.numbers, other.numbers):
                return counters[0], runs
    return None


# --------------------------------------------------------------------------- parts of parameters


def _require_pieces(make: Make, shapes: Shapes, whole: Numbers) -> None:
    """Refuse one that does something once a step, such as to divide by the norm of all gradients.

    Raises:
        InputError: stepped over a piece of them at a time, it updates otherwise, or it fails.
    """
    few = cut_short(shapes)
    largest = max(few, key=lambda name: math.prod(few[name].size))  # a piece of its own
    ours = {name for name in few if name != largest}
    for sizes, given, want in ((shapes, USUAL, whole), *((few, odd, None) for odd in ODD)):
        if want is None:
            with suppress(Exception):  # it wants the shapes that it is made for
                want = run_trial(make, sizes, list(sizes), given, ours)
        for does in _done_once(make, sizes, given, ours, want) if want else ():
            raise ONCE_A_STEP.error(place_of(make), does=does)


def _done_once(
    make: Make, shapes: Shapes, given: Gradients, ours: set[str], want: Numbers
) -> Iterator[str]:
    """Yield what steps by pieces do otherwise."""
    try:
        found = run_trial(make, shapes, list(shapes), given, ours, by_pieces=True)
    except Exception as error:  # the user's own code, or groups that depend on the piece
        yield f"fails: {_first_line(error)}"
        return
    when = f" where gradients {given.when}" if given.when else ""
    yield from (f"updates {name} otherwise{when}" for name in unlike(found, want))


def _require_alike(
    make: Make, shapes: Shapes, whole: Numbers, names: Sequence[str], share: str
) -> None:
    """Refuse one that a device's parameters are not enough for.

    Raises:
        InputError: with gradients as usual, or odd ones, it fails or updates otherwise there.
    """
    try:
        found = _worst(make, shapes, names, USUAL, whole)
    except InputError:
        raise
    except Exception as error:  # the user's own code
        at = where(error) or place_of(make)
        raise FAILS_ON_PART.error(at, share=share, error=_first_line(error)) from error
    if found:
        name, by, count = found
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise TOGETHER.error(place_of(make), share=share, name=name, more=more, error=by)
    for odd in ODD:
        with suppress(Exception):  # it wants the shapes that it is made for
            found = _worst(make, cut_short(shapes), names, odd)
        if found:
            instead = GROUP_FOR_EACH if odd.steady else CLIP_OR_SCALE
            about = {"share": share, "name": found[0], "instead": instead}
            raise TOGETHER_WHERE.error(place_of(make), when=odd.when, **about)


def _worst(
    make: Make,
    shapes: Shapes,
    names: Sequence[str],
    given: Gradients,
    whole: Numbers | None = None,
) -> tuple[str, float, int] | None:
    """Return what a part's optimizer updates otherwise, by how much, and how many do so.

    Where it may be rounding, float64 decides.
    """

    def tried(sizes: Shapes, some: Sequence[str]) -> Numbers:
        return run_trial(make, sizes, some, given, names)

    names_apart = unlike(tried(shapes, names), whole or tried(shapes, list(shapes)))
    if not names_apart:
        return None
    wide = in_float64(shapes)
    found, want = tried(wide, names), tried(wide, list(wide))
    errors = {
        name: relative_error(found[name], want[name], numbers_of(name, wide[name]))
        for name in names_apart
    }
    name = max(errors, key=lambda each: errors[each])
    return (name, errors[name], len(errors)) if errors[name] > ALIKE else None
