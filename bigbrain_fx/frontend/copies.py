"""Whether what a bundle copies of a model file has, once it is run, the values that the file has.

    the file, seeded as `split` does ─▶ values ─┐
    the copied lines, other dice     ─▶ values ─┴─▶ the same?

A copy has the lines that bind the names it reads. What another line does to them on the side (a
call that sets a number of the file, a registry, dice that were thrown before) shows when both are
run, in forks that nobody else sees. This file knows model files and text; it knows no plan.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import select
import signal
import sys
import time
import tokenize
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.digests import digest
from bigbrain_fx.frontend.users_code import users_folder

LIMIT_S = 30.0  # a top that takes longer is not run again
_UNKNOWN = "whether the parts of it that a bundle copies have its values there is not known"


@dataclass(frozen=True)
class Copies:
    """What was found: how copies would be unlike the file, and what the user should know."""

    unlike: tuple[str, ...] = ()
    note: str | None = None


def try_copies(path: Path, texts: Sequence[str], seed: int) -> Copies:
    """Run a model file and copies of its parts; compare what the copies bind at their tops.

    Args:
        path: the model file.
        texts: the copies.
        seed: what `split` seeds torch with before it runs the file.

    Raises:
        InputError: dice of Python or NumPy, without a seed, decide: every process has others.
    """
    looked_up = [name for text in texts for name in _looked_up(text)]
    if looked_up:
        return Copies(tuple(looked_up))
    if not any(texts) or _is_plain(path):
        return Copies()
    copied = [_run(partial(_of_text, text, None), path, seed + 1, 2) for text in texts if text]
    names = {name for values in copied if values for name in values}
    file = partial(_run, partial(_of_text, _read(path), names), path)
    first = file(seed, 1)
    if first is None or _FAILED in first:
        return Copies(note=f"{path.name} cannot be run a second time: {_UNKNOWN}")
    failed = [values[_FAILED] for values in copied if values and _FAILED in values]
    unlike = [n for values in copied for n, have in (values or {}).items() if first.get(n) != have]
    unlike = [name for name in dict.fromkeys(unlike) if name != _FAILED]
    if not unlike and not failed:
        return Copies()
    other = file(seed, 2) or {}
    moved = [name for name in unlike if other.get(name) != first.get(name)]
    _require_seeded(path, moved, first, (file(seed, 1) or {}) if moved else {})
    kept = [f"would have another {name}" for name in unlike if name not in moved]
    return Copies((*kept, *(f"would end with {error}" for error in failed)))


def _looked_up(text: str) -> Iterator[str]:
    """Yield what finds names of the file that no line says."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in ("globals", "eval", "exec"):
            yield f"would not have what {node.id}() finds in the file"


def _require_seeded(
    path: Path, moved: Sequence[str], first: Mapping[str, str], again: Mapping[str, str]
) -> None:
    """Refuse what dice alone decide; what a clock says is another in any process, and let be."""
    by_dice = [name for name in moved if again.get(name) == first.get(name)]
    if by_dice:
        raise InputError(
            f"the top of {path.name} draws {by_dice[0]} with Python's or NumPy's random numbers, "
            "without a seed: every process of a bundle would have another",
            at=f"{path.name}:{_line(path, by_dice[0])}",
            help="seed them at the top, before they draw: random.seed(0), numpy.random.seed(0); or "
            "draw in batches(seed), by its seed",
        )


def _line(path: Path, name: str) -> int:
    for node in ast.walk(ast.parse(_read(path))):
        if isinstance(node, ast.Name) and node.id == name:
            return node.lineno
    return 1


def _read(path: Path) -> str:
    with tokenize.open(path) as file:
        return file.read()


# --------------------------------------------------------------------------- what is worth a run


def _is_plain(path: Path) -> bool:
    """Whether nothing is called at the top of a file: a copy of its lines has their values."""
    body = ast.parse(_read(path)).body
    return not any(_calls(node, path.parent) for node in body)


def _calls(node: ast.stmt, folder: Path) -> bool:
    match node:
        case ast.FunctionDef(decorator_list=marks) | ast.AsyncFunctionDef(decorator_list=marks):
            return bool(marks)
        case ast.Import(names=names):
            return any(_is_beside(alias.name, folder) for alias in names)
        case ast.ImportFrom(module=module):
            return _is_beside(module or "", folder)
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return False
        case ast.ClassDef(decorator_list=marks, body=body):
            return bool(marks) or any(_calls(inner, folder) for inner in body)
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _is_beside(module: str, folder: Path) -> bool:
    first = module.partition(".")[0]
    return (folder / f"{first}.py").is_file() or (folder / first / "__init__.py").is_file()


# --------------------------------------------------------------------------- one run

_FAILED = "!"  # no name of Python's: what the run raised


def _run(
    read: Callable[[types.ModuleType, Path], Mapping[str, str]],
    path: Path,
    seed: int,
    other_seed: int,
) -> Mapping[str, str] | None:
    """Run code in a fork of this process; return its values, or None where it takes too long."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(there)
        _be_the_fork(partial(_answer, read, path, seed, other_seed), here)
    os.close(here)
    try:
        answer = _received(there)
    finally:
        os.close(there)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with what the file may have started
        os.waitpid(pid, 0)
    return json.loads(answer) if answer else None


def _received(pipe: int) -> bytes:
    """Read to the end; nothing where that takes longer than it may."""
    parts: list[bytes] = []
    end_s = time.monotonic() + LIMIT_S
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end_s - time.monotonic()))
        if not ready:
            return b""
        part = os.read(pipe, 2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _be_the_fork(work: Callable[[], Mapping[str, str]], pipe: int) -> None:
    """Answer, in a group of processes of its own, and end."""
    try:
        os.setpgid(0, 0)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        with os.fdopen(pipe, "w") as answer:
            json.dump(dict(work()), answer)
    finally:
        os._exit(0)


def _answer(
    read: Callable[[types.ModuleType, Path], Mapping[str, str]],
    path: Path,
    seed: int,
    other_seed: int,
) -> Mapping[str, str]:
    """Be a new process, as far as the user's own modules go, and run."""
    folder = path.parent
    for name in [name for name, module in sys.modules.items() if _is_of(module, folder)]:
        del sys.modules[name]
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    torch.manual_seed(seed)
    random.seed(other_seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(other_seed)
    with users_folder(folder):
        return read(module, path)


def _is_of(module: object, folder: Path) -> bool:
    """Whether a module stands in the user's folder, and is neither ours nor installed there."""
    file = str(getattr(module, "__file__", None) or "")
    ours = str(getattr(module, "__name__", "")).partition(".")[0] == "bigbrain_fx"
    return file.startswith(f"{folder}{os.sep}") and "site-packages" not in file and not ours


def _of_text(
    text: str, names: Collection[str] | None, module: types.ModuleType, path: Path
) -> Mapping[str, str]:
    try:
        exec(compile(text, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        return {_FAILED: f"{type(error).__name__}: {error}"}
    return dict(_values(vars(module), names, path.parent))


def _values(
    scope: Mapping[str, object], names: Collection[str] | None, folder: Path
) -> Iterator[tuple[str, str]]:
    is_own = partial(_is_of, folder=folder)
    for name, value in list(scope.items()):
        if not name.startswith("__") and (names is None or name in names):
            yield name, digest(value, is_own)
