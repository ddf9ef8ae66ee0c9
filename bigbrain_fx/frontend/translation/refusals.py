"""The row of `trace_refusals` for an error of torch.export, and the line that it came through.

The module knows errors, not tracing.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend.translation import trace_refusals as rows
from bigbrain_fx.frontend.translation.batch import Batch, Entry
from bigbrain_fx.frontend.translation.sources import is_users, makes_text, with_causes

_READS_A_VALUE = (
    "GuardOnDataDependentSymNode",
    "Could not guard on data-dependent",
    "Could not extract",
    "DataDependentOutputException",
    "data-dependent",
    "an op takes a SymBool",
)
# The last four: a branch, a leaf and lines that go by data, and a loss that is no scalar tensor.
_FINAL = (
    "BX0120",
    "BX0160",
    "BX0170",
    "BX0172",
    "BX0101b",
    "BX0140g",
    "BX0141",
    "BX0151",
)
_OF_A_TRACE = (
    *("BX0101", "BX0120", "BX0121", "BX0130", "BX0172", "BX0185", "BX0199"),
    *("BX0201", "BX2176", "BX2178"),  # another graph; arguments of a custom Function
    "BX0141",  # of lines of a forward, of which there are too few
)
_ABOUT_SIZE = ("Constraints violated", "the trace fixed the batch size", "specialized it to be")
_UNKNOWN_SIZE = re.compile(r"data-dependent expression (?!Eq\(u\d+, 1\)).*Size-like symbols: u\d")
_INSIDE = (  # torch's words for its own engine room
    re.compile(r"\s*\(unhinted: [^)]*\)\.?"),
    re.compile(r"\s*\(Size-like symbols: [^)]*\)"),
    re.compile(r"\s*(For more information|For the potential source|Please file an issue).*"),
    re.compile(r"\s*If you're using torch\.compile.*"),
    re.compile(r"\s*[^.:]*TORCH_LOGS.*"),
    re.compile(r"(?<!\S)/\S+\.(cpp|cc|cu|h):\d+: "),
)
_KEPT_FROM_COMPILERS = "Non-recursive torch.compiler.disable"
_CONTROL_FLOW = re.compile(r"_higher_order_ops.(cond|while_loop|scan|associative_scan|map)\.py$")
_READS_A_NUMBER = re.compile(
    r"\.item\(|\.tolist\(|\.numpy\(|\b(int|float|range|len|round)\(|Could not extract"
)


def reads_a_value(error: BaseException) -> bool:
    """Whether an error of torch.export is about Python reading a tensor's value."""
    texts = [f"{type(cause).__name__}: {cause}" for cause in with_causes(error)]
    return any(mark in text for text in texts for mark in _READS_A_VALUE)


def is_final(error: BaseException) -> bool:
    """Whether an error is a refusal that no other batch size or tracer would take back."""
    causes = [cause for cause in with_causes(error) if isinstance(cause, CaptureError)]
    return any(cause.family in _FINAL or cause.code in _FINAL for cause in causes)


def is_about_size(error: BaseException) -> bool:
    """Whether an error is only about a batch size that cannot stay free."""
    return any(mark in str(cause) for cause in with_causes(error) for mark in _ABOUT_SIZE)


def explain(error: BaseException, model: str = "") -> BigBrainError:
    """Turn an error of torch.export into one that names the user's line and the edit.

    Args:
        error: any exception.
        model: class of the model, which cannot be opaque itself.
    """
    at, code = place(error)
    module = owner(error)
    module = None if module == model else module
    for cause in with_causes(error):
        if isinstance(cause, BigBrainError):
            cause.at = cause.at or at
            return cause
    first = _said(error)
    if is_about_size(error):
        return rows.SIZE.error(at, code)
    if rows.PAST_TRACE in first:
        return rows.BY_DATA.error(None)
    if "CustomObjArgument" in first:
        return rows.GENERATOR.error(at)
    if asks_a_compiler(error):
        return rows.CONTROL_FLOW.error(at, code=code)
    if first.startswith("Sparse "):  # one in rows or columns
        return rows.SPARSE.error(at, code=code)
    if any(_KEPT_FROM_COMPILERS in str(cause) for cause in with_causes(error)):
        return rows.KEPT_FROM_COMPILERS.error(None)
    if "copy.py" in _files(error):
        return rows.COPIES.error(at, code)
    if _UNKNOWN_SIZE.search(str(error)):
        return rows.SIZE_READ.error(at, code=code, whole=rows.line_whole(module))
    if reads_a_value(error):
        yes_or_no = re.search(r"Eq\(u\d+, 1\)", first)  # what torch asks of a tensor of type bool
        if not yes_or_no and _READS_A_NUMBER.search(f"{code} {first}"):
            return number_read(at, code, first[:200], module)
        instead = rows.instead_of_branch(at, code)
        return rows.BRANCH.error(at, first[:200], code=code, instead=instead)
    as_text = makes_text(code) and "__format__" in first
    rewrite = "rewrite that line with tensor operations, move it into loss(output, batch), or "
    instead = rows.AS_TEXT if as_text else f"{rewrite}{rows.line_whole(module)}"
    said = f"{type(error).__name__}: {first[:300]}"
    return rows.UNKNOWN.error(at, code, error=said, instead=instead)


def asks_a_compiler(error: BaseException) -> bool:
    """Whether an error passed through control flow of torch, which runs under its compiler only."""
    return any(_CONTROL_FLOW.search(file) for file in _files(error, whole=True))


def _files(error: BaseException, *, whole: bool = False) -> set[str]:
    """Return the files that an error passed through, by name."""
    walked = (traceback.extract_tb(cause.__traceback__) for cause in with_causes(error))
    files = {frame.filename for frames in walked for frame in frames}
    return files if whole else {Path(file).name for file in files}


def _said(error: BaseException) -> str:
    """Return the first line of an error without torch's notes for its own developers."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line), "")
    for inside in _INSIDE:
        first = inside.sub("", first)
    return first.strip()


def number_read(
    at: str | None, code: str, note: str = "", module: str | None = None
) -> CaptureError:
    """Refuse a number of a tensor that would be a constant of the trace."""
    instead = rows.instead_of_number(code, module)
    return rows.NUMBER_READ.error(at, note, code=code, instead=instead)


def undecided(at: str, code: str, *, by_dice: bool = False) -> CaptureError:
    """Refuse a branch that goes both ways: from one seed to the next, or one batch to another."""
    return (rows.BY_DICE if by_dice else rows.UNDECIDED).error(at, code=code, at=at)


def with_loss_remedy(error: BigBrainError, names: Sequence[str]) -> BigBrainError:
    """Add the remedy of a loss outside of forward, when the loss may be at fault."""
    labels = [name for name in names if "label" in name or "target" in name]
    elsewhere = error.family in ("BX0101", "BX0120")  # --assume and a seed help there
    if labels and isinstance(error, CaptureError) and not elsewhere:
        error.help = (
            f"if that line belongs to the loss: call {labels[0]!r} otherwise in example_batch() "
            f'("answers"), so that forward does not get it, and define loss(output, batch) in the '
            f"model file; else: {error.help}"
        )
    return error


def may_be_loss(error: BaseException, model: str) -> bool:
    """Whether the line that an error passed through may compute the loss of a model of this class.

    Libraries of models compute it in the model's forward, or in functions named after it.
    """
    frames = [f.f_code for f in _frames(error)]
    named = any("loss" in f"{Path(c.co_filename).name} {c.co_name}".lower() for c in frames)
    return named or owner(error) in (None, model)


def owner(error: BaseException) -> str | None:
    """Return the class of the innermost module that an error passed through.

    A module that a function makes for itself is no part of the model, and cannot be opaque.
    """
    owners: Iterator[Any] = (frame.f_locals.get("self") for frame in _frames(error))
    modules = [module for module in owners if hasattr(module, "named_parameters")]
    known = {id(part) for module in modules[:1] for part in module.modules()}
    inner = (type(module).__name__ for module in reversed(modules) if id(module) in known)
    return next(inner, None)


def modules_of(error: BaseException) -> tuple[object, ...]:
    """Return the modules that an error passed through, torch's too, innermost first."""
    found = []
    for cause in reversed(list(with_causes(error))):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        owners = (frame.f_locals.get("self") for frame in reversed(frames))
        found += [owner for owner in owners if hasattr(owner, "named_parameters")]
    return tuple(found)


def may_stay_whole(error: BaseException) -> bool:
    """Whether an opaque module around the place of an error would avoid it."""
    return isinstance(error, CaptureError) and error.family in _OF_A_TRACE


def _frames(error: BaseException) -> list[FrameType]:
    """Return the user's frames that an error passed through, outermost first."""
    for cause in reversed(list(with_causes(error))):
        walked = traceback.walk_tb(cause.__traceback__)
        found = [frame for frame, _ in walked if is_users(frame.f_code.co_filename)]
        if found:
            return found
    return []


def last_rows(error: BaseException, batch: Batch, whole: Entry | None) -> InputError:
    """Refuse a model that takes the first half of its example batch, and not the second."""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    at, code = place(error)
    return rows.LAST_ROWS.error(at, said_axis(batch, whole), code, error=said)


def said_axis(batch: Batch, whole: Entry | None) -> str:
    """Return the note on the dimension that was taken for the batch.

    Args:
        batch: the example batch.
        whole: the entry that must not be split for the model to take fewer rows.
    """
    split = [entry.name for entry in batch.entries if entry.batched]
    others = [entry.name for entry in batch.entries if not entry.batched]
    kept = f"; every micro-batch gets all of {', '.join(others)}" if others else ""
    taken = f"dimension 0 of {', '.join(split)} ({batch.rows} rows) is taken for the batch{kept}"
    if whole is None:
        return taken
    name = repr(whole.said_name)
    return f"{taken}; with {name} passed whole the model takes fewer rows: {as_whole(whole)}"


def as_whole(entry: Entry) -> str:
    """Return the line of a model file with which an entry of the batch is not cut."""
    return f"batch_dims = {{{entry.said_name!r}: None}}"


def without_memory(error: NotImplementedError, at: str, code: str) -> CaptureError:
    """Refuse tensors without memory where a trace meets them: sparse ones, torch.vmap's."""
    return (rows.SPARSE if "Sparse" in str(error) else rows.TRANSFORMED).error(at, code=code)


def place(error: BaseException) -> tuple[str | None, str]:
    """Return the innermost line of the user's that an error passed through, and its text."""
    for cause in reversed(list(with_causes(error))):
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if is_users(f.filename)]
        if frames:
            return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}", frames[-1].line or ""
    return None, ""
