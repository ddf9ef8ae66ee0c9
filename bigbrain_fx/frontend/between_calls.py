"""What one of batches, lr_scale, optimizer and scheduler leaves outside, and another goes by.

    the file, one function begun       ─▶ rates, batches, clip_norm ─┐
    the file, the same function goes on ─▶ rates, batches, clip_norm ─┴─▶ the same?

An epoch that batches() counts and lr_scale reads, a rate that batches() looks up, a clip_norm that
a warm-up lowers: every process of a bundle calls these functions for itself, draws data some steps
ahead, and has the numbers of the file that `split` has read. Each is tried in a fork of a process
that has run the file and called nothing; what a number that one sets is after many steps, too.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.digests import digest
from bigbrain_fx.frontend.early import Early
from bigbrain_fx.frontend.first_calls import FirstCalls, found
from bigbrain_fx.frontend.forked import FAILED
from bigbrain_fx.frontend.modelfile import ModelFile
from bigbrain_fx.frontend.tracing.budget import budget
from bigbrain_fx.frontend.tracing.reached import codes
from bigbrain_fx.frontend.tracing.side_effects import may_write, reached
from bigbrain_fx.frontend.tracing.trial import numbers_of, place_of, run_trial

_CONSTANTS = ("clip_norm", "autocast", "grad_scaler", "drop_last", "batch_dims", "pad")
_READERS: Mapping[str, tuple[str, ...]] = {  # writer -> who is asked after it
    "batches": ("lr_scale", "scheduler"),
    "lr_scale": ("batches",),
    "optimizer": ("batches", "lr_scale", "scheduler"),
    "scheduler": ("batches",),
}
_BATCHES, _DRAW_S = 64, 0.5  # batches that are drawn, at most, and for how long
_STEPS, _FAR = 4, 1000  # steps of the others; how far a number is moved that one of them sets
_BEGUN, _GONE_ON, _FAR_ON = "begun", "gone on", "far on"


def require_nothing_between(calls: FirstCalls, file: ModelFile, early: Early) -> None:
    """Refuse functions of a model file that go by what another one of them leaves.

    Args:
        calls: of the file.
        file: whose functions they are.
        early: a process that has run the file and called nothing; it answers with `answered`.

    Raises:
        InputError: names both, and the line.
    """
    for who in calls.trains:
        function = getattr(file, who)
        if function is not None and may_write(function):
            _require_alone(calls, file, early, who)


def require_constants_kept(file: ModelFile) -> None:
    """Refuse code that sets, as training goes by, what the file says of training once.

    Raises:
        InputError: names what is set, and the line.
    """
    parts = [file.loss, *{type(part): part for part in file.model.modules()}.values()]
    for value in (*(getattr(file, who) for who in _READERS), *parts):
        for function in reached(value, set()):
            for name, line in _stored(function):
                if name in _CONSTANTS and Path(function.__code__.co_filename) == file.path:
                    raise _changes(function.__qualname__, name, f"{file.path.name}:{line}")


def _require_alone(calls: FirstCalls, file: ModelFile, early: Early, who: str) -> None:
    for reader in _READERS[who]:
        if getattr(file, reader) is not None:
            moved = _moved(calls, early, who, reader)
            if f"{reader}()" in moved:
                raise _goes_by(file, reader, who)
            if moved:
                raise _changes(f"{who}()", moved[0], place_of(getattr(file, who)))


def _moved(calls: FirstCalls, early: Early, who: str, reader: str) -> list[str]:
    """Return what is another thing once a function goes on; each reader is asked alone."""
    alone = replace(calls, trains=("optimizer", reader) if reader == "scheduler" else (reader,))

    def ask(how: str) -> Mapping[str, str]:
        answer = early.ask({**alone.asking(()), "doing": [who, how]}) or {FAILED: ""}
        return {} if FAILED in answer else answer

    begun = ask(_BEGUN)
    for how in (_GONE_ON, _FAR_ON):
        after = ask(how)
        asked = [key for key in (f"{reader}()", *_CONSTANTS) if key in begun and key in after]
        moved = [key for key in asked if after[key] != begun[key]]
        again = ask(_BEGUN) if moved else {}
        moved = [key for key in moved if again.get(key) == begun[key]]  # no clock
        if moved:
            return moved
    return []


def _goes_by(file: ModelFile, reader: str, writer: str) -> InputError:
    step = " steps" if writer in ("optimizer", "scheduler") else ""
    return InputError(
        f"{reader}() goes by what {writer}(){step and ', or a step of it,'} leaves outside it: "
        "every process of a bundle calls both for itself, and draws data some steps ahead",
        code="BX2002",
        at=place_of(getattr(file, reader)),
        help="let rates go by the number of the step (the epoch is step // 100 where one has 100 "
        "steps), and data by what batches(seed) itself counts: a batch is drawn for each step",
    )


def _changes(who: str, name: str, at: str) -> InputError:
    return InputError(
        f"{who} changes {name} of the file as training goes on: a bundle trains with what it was "
        "when the file was read",
        code="BX2003",
        at=at,
        help=_CLIPPED
        if name == "clip_norm"
        else f"set {name} once, at the top of the file; what changes comes with the batch",
    )


_CLIPPED = (
    "let clip_norm be one number, or leave it out and clip each parameter in the optimizer's step, "
    "by a limit that its groups count on: torch.nn.utils.clip_grad_norm_([p], limit / (1 + "
    "group['calls']))"
)


# --------------------------------------------------------------------------- one try


def answered(module: types.ModuleType, question: Mapping[str, Any]) -> Mapping[str, str]:
    """Say what training does once the file was run, and one function was called for some steps."""
    doing = question.get("doing")
    if doing is None:
        return found(module, question)
    calls, scope = FirstCalls.asked(question["about"]), vars(module)
    with contextlib.suppress(Exception):  # others say what is wrong with it
        _DOES[doing[0]](calls, scope, doing[1] != _BEGUN)
    if doing[1] == _FAR_ON:
        _move_far(scope, doing[0])
    constants = {name: digest(scope.get(name)) for name in _CONSTANTS}
    return {**found(module, question), **constants}


def _draw(calls: FirstCalls, scope: Mapping[str, Any], goes_on: bool) -> None:
    is_over = budget(_DRAW_S)
    for _ in itertools.islice(scope["batches"](calls.seed), _BATCHES if goes_on else 1):
        if is_over():
            return


def _ask_rates(_calls: FirstCalls, scope: Mapping[str, Any], goes_on: bool) -> None:
    for step in range(_STEPS if goes_on else 0):
        scope["lr_scale"](step)


def _step(calls: FirstCalls, scope: Mapping[str, Any], goes_on: bool) -> None:
    """Make an optimizer, as all do first; let it step, and its rates be others, as they become."""
    made: list[Any] = []

    def make(named: list[tuple[str, nn.Parameter]]) -> Any:  # noqa: ANN401  # the user's
        made.append(scope["optimizer"](named))
        return made[-1]

    if not goes_on:
        make([(n, nn.Parameter(numbers_of(n, shape))) for n, shape in calls.shapes.items()])
        return
    run_trial(make, calls.shapes, list(calls.shapes))
    for group in made[-1].param_groups:
        group["lr"] = 0.37 * group["lr"]


def _schedule(calls: FirstCalls, scope: Mapping[str, Any], goes_on: bool) -> None:
    named = [(n, nn.Parameter(numbers_of(n, shape))) for n, shape in calls.shapes.items()]
    scheduler = scope["scheduler"](scope.get("optimizer", torch.optim.AdamW)(named))
    with warnings.catch_warnings():  # nothing is updated here
        warnings.simplefilter("ignore")
        for _ in range(_STEPS if goes_on else 0):
            scheduler.step()


_DOES: Mapping[str, Callable[[FirstCalls, Mapping[str, Any], bool], None]] = {
    "batches": _draw,
    "lr_scale": _ask_rates,
    "optimizer": _step,
    "scheduler": _schedule,
}


def _move_far(scope: dict[str, Any], who: str) -> None:
    """Move the numbers of the file that a function sets again and again: epochs end much later."""
    for function in reached(scope[who], set()):
        for name in _counted(function):
            value = scope.get(name)
            if function.__globals__ is scope and isinstance(value, int | float):
                scope[name] = value + _FAR if not isinstance(value, bool) else not value


def _counted(function: types.FunctionType) -> set[str]:
    """Return the names of its file that a function sets in a loop, or by what they were."""
    found = set()
    for code in codes(function.__code__):
        steps = list(dis.Bytecode(code))
        loops = [(each.argval, each.offset) for each in steps if "JUMP_BACKWARD" in each.opname]
        read = {each.argval for each in steps if each.opname == "LOAD_GLOBAL"}
        for each in (each for each in steps if each.opname == "STORE_GLOBAL"):
            if each.argval in read or any(one < each.offset < end for one, end in loops):
                found.add(str(each.argval))
    return found


def _stored(function: types.FunctionType) -> Iterator[tuple[str, int]]:
    """Yield the names of its file that a function's code sets, and the lines."""
    for code in codes(function.__code__):
        for each in dis.Bytecode(code):
            if each.opname == "STORE_GLOBAL":
                at = each.positions
                yield str(each.argval), (at and at.lineno) or code.co_firstlineno
