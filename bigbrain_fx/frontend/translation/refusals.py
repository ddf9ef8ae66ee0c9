"""What capture refuses: the code, whose number is the kind of fault, the line, an edit that helps.

    BX0101 a branch that depends on data      BX0120 random numbers of Python that are baked in
    BX0110 a custom autograd.Function         BX0130 a tensor's number read in Python
    BX0140 a leaf module                      BX0150 a loss that cannot be traced
    BX0121 a torch.Generator of its own       BX0151 a loss that is no scalar tensor
    BX0160 state in a plain attribute         BX0170 a hook on gradients
    BX0199 anything else that torch.export cannot follow
    BX0201 a graph that computes something else   BX0202 ... numbers of another type

This file knows errors; it knows nothing of how a trace is made.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend.translation.batch import Batch, Entry
from bigbrain_fx.frontend.translation.by_library import by_library
from bigbrain_fx.frontend.translation.control_flow import asks_a_compiler, control_flow
from bigbrain_fx.frontend.translation.sources import is_users, makes_text, with_causes

_READS_A_VALUE = (
    "GuardOnDataDependentSymNode",
    "Could not guard on data-dependent",
    "Could not extract",
    "DataDependentOutputException",
    "data-dependent",
    "an op takes a SymBool",
)
_OWN_PART = (
    "those lines into a module of their own (self.part = Part() in __init__), which is kept whole"
)
OWN_GENERATOR = "BX0121"
# The last three: a branch and a leaf that go by data, and a loss that is no scalar tensor.
_FINAL = ("BX0120", "BX0160", "BX0170", "BX0101b", "BX0140g", "BX0151")
_OF_A_TRACE = ("BX0101", "BX0130", "BX0185", "BX0187", "BX0199")
_ABOUT_SIZE = ("Constraints violated", "the trace fixed the batch size", "specialized it to be")
_UNKNOWN_SIZE = re.compile(r"data-dependent expression (?!Eq\(u\d+, 1\)).*Size-like symbols: u\d")
FROM_THE_INPUT = "take sizes from the input: x.shape[0], not a number nor len(x), which is one"
_INSIDE = (  # torch's words for its own engine room
    re.compile(r"\s*\(unhinted: [^)]*\)\.?"),
    re.compile(r"\s*\(Size-like symbols: [^)]*\)"),
    re.compile(r"\s*(For more information|For the potential source|Please file an issue).*"),
    re.compile(r"\s*If you're using torch\.compile.*"),
    re.compile(r"\s*[^.:]*TORCH_LOGS.*"),
    re.compile(r"(?<!\S)/\S+\.(cpp|cc|cu|h):\d+: "),
)
_READS_A_NUMBER = re.compile(
    r"\.item\(|\.tolist\(|\.numpy\(|\b(int|float|range|len|round)\(|Could not extract"
)


def reads_a_value(error: BaseException) -> bool:
    """Whether an error of torch.export says that Python asked for a tensor's value."""
    texts = [f"{type(cause).__name__}: {cause}" for cause in with_causes(error)]
    return any(mark in text for text in texts for mark in _READS_A_VALUE)


def is_final(error: BaseException) -> bool:
    """Whether an error is a refusal that no other batch size or tracer would take back."""
    causes = [cause for cause in with_causes(error) if isinstance(cause, CaptureError)]
    return any(cause.family in _FINAL or cause.code in _FINAL for cause in causes)


def is_broken(error: BaseException) -> bool:
    """Whether an error says that a graph was made, and computes something else."""
    return isinstance(error, CaptureError) and error.family == "BX0201"


def is_about_size(error: BaseException) -> bool:
    """Whether an error says that the batch size cannot stay free, and nothing else."""
    return any(mark in str(cause) for cause in with_causes(error) for mark in _ABOUT_SIZE)


def explain(error: BaseException, model: str = "") -> BigBrainError:
    """Turn an error of torch.export into one that names the user's line and the edit.

    Args:
        error: whatever was raised.
        model: class of the whole model, which cannot be kept whole itself.
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
        return CaptureError(
            "the model holds a size that only this number of rows fits: a buffer, a constant, a "
            "branch or len(x)",
            code="BX2181",
            at=at,
            notes=(code,) if code else (),
            help=FROM_THE_INPUT,
        )
    if "fake tensor in the exported program constant" in first:
        return written_by_data()
    if "CustomObjArgument" in first:
        return CaptureError(
            "forward or loss draws from a torch.Generator of its own: a bundle seeds each draw by "
            "its step and micro-batch",
            code="BX0121",
            at=at,
            help="leave generator= out; numbers that are to be the same in every call are drawn "
            "once, in __init__, and held: self.register_buffer('noise', torch.randn(8))",
        )
    if asks_a_compiler(error):
        return control_flow(at, code)
    if first.startswith("Sparse "):  # one in rows or columns
        return _sparse(at or "", code)
    special = by_library(error, at, code)
    if special is not None:
        return special
    if _UNKNOWN_SIZE.search(str(error)):
        return size_read(at, code, module)
    if reads_a_value(error):
        yes_or_no = re.search(r"Eq\(u\d+, 1\)", first)  # what torch asks of a tensor of type bool
        reads_number = not yes_or_no and _READS_A_NUMBER.search(f"{code} {first}")
        if reads_number:
            return number_read(at, code, first, module)
        return branch(at, code, first)
    return CaptureError(
        f"torch.export cannot follow the model: {type(error).__name__}: {first[:300]}",
        code="BX0199d",
        at=at,
        notes=(code,) if code else (),
        help=_AS_TEXT
        if makes_text(code) and "__format__" in first
        else "rewrite that line with tensor operations, move it into loss(output, batch), or "
        f"{_whole(module)}",
    )


def _said(error: BaseException) -> str:
    """Return the first line of an error without what is for those who build torch."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line), "")
    for inside in _INSIDE:
        first = inside.sub("", first)
    return first.strip()


def branch(at: str | None, code: str, note: str = "") -> CaptureError:
    """Refuse a branch whose side no plain run could tell."""
    there = at or "model.py:31"
    return CaptureError(
        f"the model reads a tensor's value in Python, so its path depends on data: {code}",
        code="BX0101a",
        at=at,
        notes=(note[:200],) if note else (),
        help=_AS_TEXT
        if makes_text(code)
        else f"decide with torch.where instead of if; or put {_OWN_PART}; or say which way it goes "
        f"with --assume {there}=false (or =true; the bundle checks it)",
    )


def undecided(at: str, code: str, by_dice: bool = False) -> CaptureError:
    """Refuse a branch that goes both ways: from one seed to the next, or one batch to another."""
    if by_dice:
        return CaptureError(
            f"random numbers decide which way the model goes: {code}",
            code="BX0120a",
            at=at,
            help="switch that off (layerdrop=0), or use torch.where; --assume "
            f"{at}=false (or =true) keeps one side, and whoever runs the bundle is told where it "
            "does not hold",
        )
    return CaptureError(
        "the model reads a tensor's value in Python, and its path depends on it: it is true in "
        f"one run and false in another: {code}",
        code="BX0101b",
        at=at,
        help=f"decide with torch.where instead of if, or keep one side with --assume {at}=false "
        f"(or =true): whoever runs the bundle is told where it does not hold; or put {_OWN_PART}; "
        "if random numbers decide there (LayerDrop), switch that off (layerdrop=0)",
    )


def with_loss_remedy(error: BigBrainError, names: Sequence[str]) -> BigBrainError:
    """Say how to take the loss out of forward, when it may be what cannot be traced."""
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

    Libraries of models compute it in the whole model's forward, or in functions named after it.
    """
    frames = [f.f_code for f in _frames(error)]
    named = any("loss" in f"{Path(c.co_filename).name} {c.co_name}".lower() for c in frames)
    return named or owner(error) in (None, model)


def owner(error: BaseException) -> str | None:
    """Return the class of the module whose line an error passed through, the innermost one's.

    A module that a function makes for itself is no part of the model: nobody can keep it whole.
    """
    owners: Iterator[Any] = (frame.f_locals.get("self") for frame in _frames(error))
    modules = [module for module in owners if hasattr(module, "named_parameters")]
    known = {id(part) for module in modules[:1] for part in module.modules()}
    inner = (type(module).__name__ for module in reversed(modules) if id(module) in known)
    return next(inner, None)


def modules_of(error: BaseException) -> tuple[object, ...]:
    """Return the modules whose lines an error passed through, torch's too, innermost first."""
    found = []
    for cause in reversed(list(with_causes(error))):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        owners = (frame.f_locals.get("self") for frame in reversed(frames))
        found += [owner for owner in owners if hasattr(owner, "named_parameters")]
    return tuple(found)


def may_stay_whole(error: BaseException) -> bool:
    """Whether keeping the module whole that an error is about would take it back."""
    return isinstance(error, CaptureError) and error.family in _OF_A_TRACE


def _frames(error: BaseException) -> list[FrameType]:
    """Return the user's frames that an error passed through, outermost first."""
    for cause in reversed(list(with_causes(error))):
        walked = traceback.walk_tb(cause.__traceback__)
        found = [frame for frame, _ in walked if is_users(frame.f_code.co_filename)]
        if found:
            return found
    return []


def size_read(at: str | None, code: str, module: str | None) -> CaptureError:
    """Refuse a question about the size of a tensor that data decide: rows selected by value."""
    return CaptureError(
        f"data decide how many rows a tensor has, and the model asks for it: {code}",
        code="BX0130c",
        at=at,
        help="use a mask and torch.where instead of selecting rows (x[x > 0], nonzero()); or "
        f"{_whole(module)}",
    )


def _whole(module: str | None) -> str:
    """Say how to keep the module whole that a line belongs to."""
    if module is None:
        return "put it into a module of its own and keep that whole: --leaf with its class"
    return f"keep the module that holds that line whole: --leaf {module}"


def number_read(
    at: str | None, code: str, note: str = "", module: str | None = None
) -> CaptureError:
    """Refuse a number of a tensor that would be a constant of the trace."""
    return CaptureError(
        f"the model reads a tensor's value in Python, and it may be another one for "
        f"every batch: {code}",
        code="BX0130d",
        at=at,
        notes=(note[:200],) if note else (),
        help=_AS_TEXT
        if makes_text(code)
        else "keep the value in a tensor: leave out .item(), int(), float(), .tolist(), and "
        f"compare tensors (`if x.sum() > 0:`); {_AT_A_PLACE}or {_whole(module)}",
    )


_AS_TEXT = (
    "keep the tensor, and make text of it where it is read: self.last = h.std().detach(); a "
    'statement that only prints or logs it, print(f"{h.std():.3f}"), is left out of the bundle'
)
_AT_A_PLACE = (
    "write at a place that a tensor tells with buffer.index_copy_(dim, (self.ptr + "
    "torch.arange(n)) % size, rows); "
)


def baked_dice(at: str) -> CaptureError:
    """Refuse random numbers of Python or NumPy that decide what is computed."""
    return CaptureError(
        f"{at} draws random numbers with Python or NumPy, and a trace would keep one draw: "
        "two runs that differ in that seed alone compute other numbers",
        code="BX0120b",
        at=at,
        help="draw with torch.rand and decide with torch.where, or switch it off for training on "
        "several devices: a probability of 0 (layerdrop=0, mask_time_prob=0)",
    )


def last_rows(error: BaseException, batch: Batch, whole: Entry | None) -> InputError:
    """Refuse a model that takes the first half of its example batch, and not the second."""
    at, code = place(error)
    first = (str(error).splitlines() or [""])[0]
    return InputError(
        "the model takes the first half of the rows of its example batch, and not the second, as "
        f"a micro-batch would have them: {type(error).__name__}: {first[:200]}",
        code="BX2182",
        at=at,
        notes=(said_axis(batch, whole), *((code,) if code else ())),
        help="let every row stand alone: instead of offsets into another entry of the batch give "
        "a row of indices each (rows, items), with padding_idx where they have unlike lengths; a "
        "graph each: nodes (graphs, nodes, features), edges (graphs, 2, edges), and forward adds "
        "nodes * torch.arange(graphs)[:, None, None] to the edges",
    )


def asks_autograd(at: str, module: str | None) -> CaptureError:
    """Refuse a forward that asks autograd for gradients: forces, a gradient penalty."""
    error = CaptureError(
        "forward asks autograd for gradients (torch.autograd.grad), and a trace has none",
        code="BX0185",
        at=at,
        help=_kept_whole("asks, with the modules that it asks about,", module),
    )
    error.inside = module
    return error


def in_threads(at: str, module: str | None) -> CaptureError:
    """Refuse a forward that computes in threads: a trace follows one."""
    error = CaptureError(
        "forward computes in threads of its own, and a trace follows one",
        code="BX0199e",
        at=at,
        help="call the parts one after another: torch's ops use the cores by themselves; or "
        f"{_whole(module)}",
    )
    error.inside = module
    return error


def other_ways(at: str, module: str | None) -> CaptureError:
    """Refuse lines under sdpa_kernel, mkldnn.flags, a dispatch mode: no op says that."""
    error = CaptureError(
        "forward changes how torch computes for some of its lines (sdpa_kernel, flags of "
        "torch.backends, a mode of torch), and a graph of ops has none of that",
        code="BX0187",
        at=at,
        help=_kept_whole("computes so", module),
    )
    error.inside = module
    return error


def _kept_whole(what: str, module: str | None) -> str:
    if module:
        return (
            f"keep the module that {what.partition(',')[0]} whole: --leaf {module} (or leaves = "
            f'["{module}"] in the model file, or @bigbrain_fx.leaf on the class)'
        )
    return (
        f"put what {what} into a module of its own and keep that whole: --leaf with its class (or "
        'leaves = ["Class"] in the model file)'
    )


def said_axis(batch: Batch, whole: Entry | None) -> str:
    """Say what was taken for the batch's dimension.

    Args:
        batch: the example batch.
        whole: the entry with which the model takes fewer rows when it is not split.
    """
    split = [entry.name for entry in batch.entries if entry.batched]
    others = [entry.name for entry in batch.entries if not entry.batched]
    kept = f"; {', '.join(others)} goes to every micro-batch whole" if others else ""
    taken = f"dimension 0 of {', '.join(split)} ({batch.rows} rows) is taken for the batch{kept}"
    if whole is None:
        return taken
    name = repr(whole.said_name)
    return f"{taken}; with {name} passed whole the model takes fewer rows: {as_whole(whole)}"


def as_whole(entry: Entry) -> str:
    """Return the line of a model file that passes an entry of the batch whole."""
    return f"batch_dims = {{{entry.said_name!r}: None}}"


def transformed(at: str, code: str) -> CaptureError:
    """Refuse torch.vmap and the gradients of torch.func where a trace meets them."""
    if "sparse" in code:
        return _sparse(at, code)
    return CaptureError(
        f"forward computes inside torch.vmap or torch.func, whose tensors no graph holds: {code}",
        code="BX0199f",
        at=at or None,
        help="put that call, with the parameters that it uses, into a module of its own "
        "(self.part = Part() in __init__): a module inside the model is kept whole",
    )


def _sparse(at: str, code: str) -> CaptureError:
    return CaptureError(
        f"forward has a sparse tensor, and a graph's are dense: {code}",
        code="BX0199g",
        at=at or None,
        help="multiply by its entries: torch.zeros_like(h).index_add(1, index[0], h[:, index[1]] * "
        "value), where index and value are buffers: coo.indices().clone() and "
        "coo.values().clone() of coo = adj.to_sparse_coo().coalesce()",
    )


def without_code(name: str, at: str, code: str) -> CaptureError:
    """Refuse an operator of torch.library: what a bundle calls is torch's, or the user's Python."""
    return CaptureError(
        f"forward calls the custom operator {name}, which a bundle does not know: {code}",
        code="BX0199h",
        at=at or None,
        help="call it in a module of its own (self.part = Part() in __init__): a module inside the "
        "model is kept whole, with the code that registers the operator",
    )


def written_by_data(at: str | None = None) -> CaptureError:
    """Refuse `.data` where a trace does not see it, or where nothing tells whether it is the same.

    Args:
        at: the line, where it is known.
    """
    return CaptureError(
        "forward reads or writes through .data of a tensor, and a trace does not see that",
        code="BX0181b",
        at=at,
        help="read .detach() for .data; write in place under torch.no_grad(), to buffers and "
        "frozen parameters: b.mul_(0.9).add_(a, alpha=0.1) for b.data = b.data * 0.9 + a.data * "
        "0.1; what is trained: after the step, in the optimizer (a class whose step() calls "
        "super().step() and then writes)",
    )


def place(error: BaseException) -> tuple[str | None, str]:
    """Return the innermost line of the user's that an error passed through, and its text."""
    for cause in reversed(list(with_causes(error))):
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if is_users(f.filename)]
        if frames:
            return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}", frames[-1].line or ""
    return None, ""
