"""What model() and example_batch() leave outside what they return, and training goes by: refused.

    the file                                   ─▶ optimizer, rates, batches, values ─┐
    the file, then model() and example_batch() ─▶ optimizer, rates, batches, values ─┴─▶ the same?

The processes of a bundle call neither: what they set (a number of the file, a registry, a class's
attribute, the environment, a context of decimal) is for the optimizer, the rates, the data and the
code that a bundle calls as it is what the top of the file has left. Both are tried, in forks of a
process that has run the file and called neither.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import random
import sys
import tokenize
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.digests import digest
from bigbrain_fx.frontend.early import Early
from bigbrain_fx.frontend.forked import FAILED, values
from bigbrain_fx.frontend.modelfile import ModelFile
from bigbrain_fx.frontend.tracing.reached import codes
from bigbrain_fx.frontend.tracing.side_effects import reached
from bigbrain_fx.frontend.tracing.trial import Shape, cut_short, numbers_of, run_trial, shapes_of
from bigbrain_fx.frontend.users_code import users_folder
from bigbrain_fx.runtime import left_alone

_RATES, _BATCHES = 40, 2  # steps whose rates are asked for, and batches that are drawn
_STEPS = (*range(64), *(n * 10**k for k in range(2, 8) for n in (1, 3)))
_LARGE = 2**28  # bytes of weights: a larger model is made of shapes alone
_PLAIN = (bool, int, float, str)
_MAYBE = "?"  # before what may be another thing and decide nothing
_TRAINS = ("optimizer", "lr_scale", "scheduler", "batches")


@dataclass(frozen=True)
class FirstCalls:
    """What is run again, and how.

    Attributes:
        path, name: the file, and what makes the model there.
        seed: of `split`.
        shapes: of trained parameters, by name, cut short.
        weights_bytes: of the whole model.
        kept: names of the file that its code has which is called as it is.
        trains: the functions that a bundle has a copy of.
    """

    path: Path
    name: str
    seed: int
    shapes: Mapping[str, Shape]
    weights_bytes: int
    kept: frozenset[str]
    trains: tuple[str, ...] = _TRAINS

    @classmethod
    def of(cls, file: ModelFile, seed: int, kept: frozenset[str], *, trains: bool) -> FirstCalls:
        """Return what is run again of a model file that was loaded."""
        params = dict(file.model.named_parameters())
        few = cut_short(shapes_of({n: p for n, p in params.items() if p.requires_grad}))
        size = sum(p.nbytes for p in params.values())
        names = _TRAINS if trains else ("batches",)
        return cls(file.path, file.name, seed, few, size, kept, names)

    def asking(self, called: Sequence[str]) -> dict[str, Any]:
        """Return the question what training does once some functions were called, for JSON."""
        shapes = {n: [s.size, str(s.dtype).removeprefix("torch.")] for n, s in self.shapes.items()}
        about = {**vars(self), "path": str(self.path), "shapes": shapes, "kept": sorted(self.kept)}
        return {"called": called, "about": about}

    @classmethod
    def asked(cls, about: Mapping[str, Any]) -> FirstCalls:
        """Return what a question is about."""
        shapes = {
            n: Shape(tuple(s), getattr(torch, kind)) for n, (s, kind) in about["shapes"].items()
        }
        more = {"path": Path(about["path"]), "shapes": shapes, "kept": frozenset(about["kept"])}
        return cls(**{**about, **more})


def require_nothing_left(calls: FirstCalls, early: Early) -> str | None:
    """Refuse a model() or example_batch() that sets what training, or code called as it is, reads.

    Args:
        calls: what is called again, and who may go by it.
        early: a process that has run the file and called neither; it answers with `found`.

    Returns:
        What the user should know.

    Raises:
        InputError: names what was set, its line, and who goes by it.
    """

    def try_after(called: Sequence[str]) -> Mapping[str, str] | None:
        return early.ask(calls.asking(called))

    plain, after = try_after(()), try_after((calls.name, "example_batch"))
    if plain is None or after is None or FAILED in plain or FAILED in after:
        said = "whether what it sets is read by what a bundle copies is not known"
        return f"{calls.name}() of {calls.path.name} cannot be called a second time: {said}"
    moved = [key for key in plain if after.get(key) != plain[key]]
    if not any(map(_decides, moved)):
        return None
    again, alone = try_after(()) or {}, try_after((calls.name,)) or {}
    moved = [key for key in moved if again.get(key) == plain[key]]  # no clock
    own = [key for key in moved if alone.get(key) != plain[key]]
    if any(map(_decides, own)):
        raise _refusal(calls, calls.name, own)
    if any(map(_decides, moved)):
        raise _refusal(calls, "example_batch", moved)
    return None


def _decides(key: str) -> bool:
    """Whether what is another thing is for sure what training goes by."""
    return not key.startswith(_MAYBE)


def _refusal(calls: FirstCalls, who: str, moved: Sequence[str]) -> InputError:
    reader = next(filter(_decides, moved)).partition(" reads ")[0]
    held = (key.removeprefix(_MAYBE).partition(" reads ") for key in moved)
    what = next((name for whose, _, name in held if whose == reader and name), "")
    line = _written_at(calls.path, what.partition(".")[0]) if what else None
    return InputError(
        f"{who}() sets {what or 'something'}, which {reader} goes by, and no process of a bundle "
        f"calls {who}(): there it would be what the top of {calls.path.name} has left",
        code="BX2048",
        at=f"{calls.path.name}:{line or _defined_at(calls.path, who)}",
        help=f"set it at the top of the file, outside {who}(); data that example_batch() draws "
        "come from generators and iterators of its own, or are made in batches(seed)",
    )


def doing_otherwise(calls: FirstCalls, text: str, early: Early, fresh: Early) -> tuple[str, ...]:
    """Say what a copy of lines of the file would do otherwise: its top may set what is no name.

    Args:
        calls: of the file.
        text: the copy.
        early: a process that has run the file; it answers with `found`.
        fresh: one that has not; it answers with `found_in_copy`.
    """
    question = calls.asking(())
    file, copy = early.ask(question), fresh.ask({**question, "text": text})
    if file is None or copy is None or FAILED in file:
        return ()  # others say so
    if FAILED in copy:
        return (f"would end with {copy[FAILED]}",)
    moved = [key for key in copy if key.endswith("()") and file.get(key) != copy[key]]
    again = (early.ask(question) or {}) if moved else {}
    return tuple(f"would have another {key}" for key in moved if again.get(key) == file.get(key))


# --------------------------------------------------------------------------- one try


def found_in_copy(path: Path, seed: int, question: Mapping[str, Any]) -> Mapping[str, str]:
    """Run a copy of lines of a file, under other dice than its, and say what training does then."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    torch.manual_seed(seed + 1)
    with users_folder(path.parent):
        try:
            exec(compile(question["text"], str(path), "exec"), vars(module))
        except (Exception, SystemExit) as error:
            return {FAILED: f"{type(error).__name__}: {error}"}
        return found(module, question)


def found(module: types.ModuleType, question: Mapping[str, Any]) -> Mapping[str, str]:
    """Call what is to be called of a file that was run, and say what training does then."""
    calls, scope = FirstCalls.asked(question["about"]), vars(module)
    try:
        for name in question["called"]:
            _call(calls, scope.get(name), is_model=name == calls.name)
    except (Exception, SystemExit) as error:
        return {FAILED: f"{type(error).__name__}: {error}"}
    return dict(_found(calls, scope))


def _call(calls: FirstCalls, function: object, *, is_model: bool) -> None:
    if not callable(function) or isinstance(function, nn.Module):
        return
    large = is_model and calls.weights_bytes > _LARGE
    torch.manual_seed(calls.seed)
    place = torch.device("meta") if large else contextlib.nullcontext()
    drawn = contextlib.nullcontext() if is_model else left_alone(function)
    with place, drawn:
        function()


def _found(calls: FirstCalls, scope: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values(scope, calls.kept, calls.path.parent):
        yield f"code that is called as it is reads {name}", value
    trains = {name: scope[name] for name in calls.trains if callable(scope.get(name))}
    for name, function in trains.items():
        inner = [code for f in reached(function, set()) for code in codes(f.__code__)]
        named = {word for code in inner for word in code.co_names}
        for what, number in _numbers_read(named, scope):
            yield f"{name}() reads {what}", number
        for what, value in values(scope, named, calls.path.parent):
            yield f"{_MAYBE}{name}() reads {what}", value
        if named & {"environ", "getenv"}:
            yield f"{_MAYBE}{name}() reads os.environ", digest(dict(os.environ))
    for name in trains:
        _seed(calls.seed)
        try:
            found = digest(list(_DOES[name](calls, trains)))
        except Exception as error:
            found = type(error).__name__
        yield f"{name}()", found


def _seed(seed: int) -> None:
    """Seed all dice, as a bundle does before it reads its data."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)


def _numbers_read(named: set[str], scope: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers and texts of the file that are named, and those of its objects."""
    for name in sorted(named & scope.keys()):
        value = scope[name]
        if isinstance(value, _PLAIN):
            yield name, repr(value)
        elif not isinstance(value, types.ModuleType | types.FunctionType):
            held = getattr(value, "__dict__", {})
            for key in sorted(named & set(held)):
                if isinstance(held[key], _PLAIN):
                    yield f"{name}.{key}", repr(held[key])


def _made(calls: FirstCalls, make: Callable[..., Any]) -> Any:  # noqa: ANN401  # the user's
    named = [(n, nn.Parameter(numbers_of(n, shape))) for n, shape in calls.shapes.items()]
    return make(named)


def _of_optimizer(calls: FirstCalls, trains: Mapping[str, Any]) -> Iterator[object]:
    make = trains["optimizer"]
    for group in _made(calls, make).param_groups:
        yield [len(group["params"]), {k: v for k, v in group.items() if k != "params"}]
    yield run_trial(make, calls.shapes, list(calls.shapes))


def _of_lr_scale(_calls: FirstCalls, trains: Mapping[str, Any]) -> Iterator[object]:
    yield from (float(trains["lr_scale"](step)) for step in _STEPS)


def _of_scheduler(calls: FirstCalls, trains: Mapping[str, Any]) -> Iterator[object]:
    optimizer = _made(calls, trains.get("optimizer", torch.optim.AdamW))
    scheduler = trains["scheduler"](optimizer)
    for _ in range(_RATES):
        yield [float(group["lr"]) for group in optimizer.param_groups]
        with warnings.catch_warnings():  # nothing is updated here
            warnings.simplefilter("ignore")
            scheduler.step()


def _of_batches(calls: FirstCalls, trains: Mapping[str, Any]) -> Iterator[object]:
    yield from itertools.islice(trains["batches"](calls.seed), _BATCHES)


_DOES: Mapping[str, Callable[[FirstCalls, Mapping[str, Any]], Iterator[object]]] = {
    "optimizer": _of_optimizer,
    "lr_scale": _of_lr_scale,
    "scheduler": _of_scheduler,
    "batches": _of_batches,
}


# --------------------------------------------------------------------------- lines


def _text(path: Path) -> str:
    with tokenize.open(path) as file:
        return file.read()


def _written_at(path: Path, name: str) -> int | None:
    """Return the first line within a function that sets a name, or what it holds."""
    for function in ast.walk(ast.parse(_text(path))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            lines: list[int] = [n.lineno for n in ast.walk(function) if _sets(n, name)]  # type: ignore[attr-defined]  # what sets has a line
            if lines:
                return min(lines)
    return None


def _sets(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=found, ctx=ast.Store()):
            return found == name
        case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
            return _root(node) == name
        case ast.Expr(value=ast.Call(func=ast.Attribute() as called)):
            return _root(called) == name
    return False


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _defined_at(path: Path, name: str) -> int:
    body = ast.parse(_text(path)).body
    made = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    return made[-1].lineno if made else 1
