"""Rewrites as a user asks for them: their names, what they do not go with, and what was done."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from bigbrain_fx.core import REWRITES, Rewrite, Rewritten
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Options, Plan

_NAMED = 3
_WORDS: dict[Rewrite, tuple[str, str]] = {
    "linears": ("linear layers that read one value", "one product, its weights joined for it"),
    "scales": ("numbers that scale a product", "moved to its smaller operand"),
}


def read_rewrites(text: str) -> tuple[Rewrite | Literal["auto"], ...]:
    """Read "none", "auto" or "linears,scales".

    Raises:
        InputError: there is no such rewrite.
    """
    if text == "none":
        return ()
    if text == "auto":
        return ("auto",)
    found: list[Rewrite] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name = next((known for known in REWRITES if known == word), None)
        if name is None:
            close = difflib.get_close_matches(word, REWRITES, n=1, cutoff=0.5)
            raise InputError(
                f"there is no rewrite '{word}'",
                code="BX1300",
                at="--rewrite",
                help=(f"did you mean {close[0]}? " if close else "")
                + f"choose none, auto, or some of {', '.join(REWRITES)}",
            )
        found.append(name)
    return tuple(dict.fromkeys(found))


def rewrites_of(options: Options) -> tuple[Rewrite, ...]:
    """Return the names that options ask for; all where they say "auto"."""
    if "auto" in options.rewrite:
        return REWRITES
    return tuple(name for name in REWRITES if name in options.rewrite)


def rewritten_text(plan: Plan) -> str:
    """Say which places are computed otherwise, and what running them both ways has shown."""
    return "; ".join(_said(plan.source.rewritten))


def layers_text(layers: Sequence[str]) -> str:
    """Name the layers of one place: `q, k, v of blocks.0.attention`."""
    holders = {layer.rpartition(".")[0] for layer in layers}
    if len(layers) < 2 or len(holders) > 1 or holders == {""}:
        return ", ".join(layers)
    return f"{', '.join(layer.rpartition('.')[2] for layer in layers)} of {holders.pop()}"


def _said(known: Iterable[Rewritten]) -> Iterator[str]:
    known = tuple(known)
    for name, count in Counter(each.rewrite for each in known).items():
        own = [each for each in known if each.rewrite == name]
        layers = [layers_text(each.layers) for each in own[:_NAMED]]
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        what, how = _WORDS[name]
        apart = max(each.apart for each in own)
        shown = (
            "run both ways: the same bits"
            if all(each.same_bits for each in own)
            else f"run both ways: at most {apart:.1e} of the largest number apart"
        )
        places = f"{count} place{'s' * (count != 1)} ({'; '.join(layers)}{more})"
        yield f"rewritten: {name}, {what}, at {places}: {how}; {shown}"


def rewritten_note(plan: Plan) -> tuple[str, ...]:
    """Say that a plan computes what one process computes to rounding only; nothing, if it does."""
    if not plan.source.rewritten:
        return ()
    same = all(each.same_bits for each in plan.source.rewritten)
    what = "is not promised the bits of" if same else "computes to rounding, not bit for bit,"
    so = f"so the bundle {what} what plain PyTorch computes"
    return (f"{rewritten_text(plan)}; {so}",)
