"""Exceptions of the user's code or of a bundle as errors that say what to do.

This file knows exceptions and where they were raised; it knows no checks.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import where
from bigbrain_fx.verification.imported_bundle import OTHER

_OURS = str(Path(__file__).resolve().parents[1])
_LIKE_THE_EXAMPLE = (
    "give every batch the shapes of example_batch(): pad to one length, and leave out a smaller "
    "last batch (DataLoader(..., drop_last=True))"
)

_REMEDIES = (
    ("ended before", "use fewer --steps, or let batches(seed) go on"),
    (
        "batches(seed) fails",
        "make that line run in the bundle's folder, where every process calls batches(seed): name "
        "files of data by their full path, and split again when the model file has changed",
    ),
    (
        "which it goes by",
        "let a tensor of the batch say it, in example_batch() as well: compute both ways, and "
        "choose with torch.where(flag, one, two); or split a model for each value",
    ),
    (
        "which the first batch has not",
        "give every batch the entries of example_batch(), and that all: a mask or a weight of ones "
        "where there is none",
    ),
    (
        "has no entry",
        "give every batch the entries of example_batch(): a mask or a weight of ones where there "
        "is none",
    ),
    (
        "come in the order",
        "give every batch its entries in the order of example_batch(): {name: found[name] for name "
        "in NAMES}, NAMES being a list of the file; or let the model take them by name",
    ),
    ("give it the type", "give every batch the types of example_batch()"),
    (
        OTHER,
        "make in batches() what it changes (a counter, a list, an iterator): what is made outside "
        "is shared by all devices of a process, and moves with each of them",
    ),
)


def _parted(message: str) -> tuple[str, str]:
    """Part what a bundle says of its data from what to do, which mostly stands behind it."""
    for said, remedy in _REMEDIES:
        if said in message:
            return message, remedy
    step, _, rest = message.partition(": ") if message.startswith("step ") else ("", "", message)
    what, _, remedy = rest.partition(": ")
    return f"{step}: {what}" if step else what, remedy or _LIKE_THE_EXAMPLE


def error_of(error: Exception, bundle: Path, model: Path | None) -> InputError | None:
    """Explain an exception; None for one that this product itself has raised."""
    first = (str(error).splitlines() or [""])[0]
    if type(error).__name__ == "BatchError":  # of the bundle's own copy of the runtime
        what, remedy = _parted(first)
        return InputError(
            f"the data do not fit the bundle: {what}",
            code="BX3808",
            at=f"{model.name if model else bundle.name}: batches",
            help=remedy,
        )
    if type(error).__name__ in ("AssumptionError", "WrongAnswerError"):  # of a bundle, or here
        named = re.search(r"[^\s:]+\.py:\d+", first)
        line = named[0] if named else "FILE:LINE"
        return InputError(
            f"the data contradict what the bundle assumes: {first.partition(', for which')[0]}",
            code="BX3809",
            at=line,
            help=f"decide with torch.where instead of if; --assume {line}=true (or =false) when it "
            "is split chooses the other side; or make the module that holds the line opaque: "
            "--opaque",
        )
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.startswith(_OURS):
        return None
    at = (where(error, model.parent) if model else None) or where(error, bundle)
    return InputError(
        f"the bundle cannot be run: {type(error).__name__}: {first}",
        code="BX3810",
        at=at or (model.name if model else str(bundle)),
        help=f"`cd {bundle} && python train.py --in-process --steps 1` shows the whole traceback",
    )
