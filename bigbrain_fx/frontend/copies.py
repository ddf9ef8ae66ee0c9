"""Whether what a bundle copies of a model file has, once it is run, the values that the file has.

    the file, seeded as `split` does ─▶ values ─┐
    the copied lines, other dice     ─▶ values ─┴─▶ the same?

A copy has the lines that bind the names it reads. What another line does to them on the side (a
call that sets a number of the file, a registry, dice that were thrown before) shows when both are
run, in forks that nobody else sees. This file knows model files and text; it knows no plan.
"""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.forked import FAILED, is_setting, run_apart, values_of_text
from bigbrain_fx.frontend.settings import Settings

_UNKNOWN = "whether the parts of it that a bundle copies have its values there is not known"


@dataclass(frozen=True)
class Copies:
    """What was found: how copies would be unlike the file, and what the user should know."""

    unlike: tuple[str, ...] = ()
    note: str | None = None


def try_copies(
    path: Path, texts: Sequence[str], seed: int, before: Settings | None = None
) -> Copies:
    """Run a model file and copies of its parts; compare what the copies bind and set at their tops.

    Args:
        path: the model file.
        texts: the copies; every process runs the first.
        seed: what `split` seeds torch with before it runs the file.
        before: settings of torch, before the file was run.

    Raises:
        InputError: dice of Python or NumPy, without a seed, decide: every process has others; or
            nothing is copied that sets how torch computes.
    """
    before = before or Settings.now()
    looked_up = [name for text in texts for name in _looked_up(text)]
    if looked_up:
        return Copies(tuple(looked_up))
    if is_plain(path):
        return Copies()
    of_text = [partial(values_of_text, text, None) for text in texts if text]
    copied = [run_apart(read, path, seed + 1, 2, before) for read in of_text]
    names = {name for values in copied if values for name in values}
    read_file = partial(values_of_text, _read(path), names)

    def file(seed: int, other_seed: int) -> Mapping[str, str] | None:
        return run_apart(read_file, path, seed, other_seed, before)

    first = file(seed, 1)
    if first is None or FAILED in first:
        return Copies(note=f"{path.name} cannot be run a second time: {_UNKNOWN}")
    sets = [name for name in first if is_setting(name) and _matters(name, texts)]
    if not copied:
        _require_copied(path, [name for name in sets if name.startswith(_NUMBERS)])
        return Copies()
    failed = [values[FAILED] for values in copied if values and FAILED in values]
    unlike = [n for values in copied for n, have in (values or {}).items() if first.get(n) != have]
    unset = [n for n in sets if copied[0] is not None and copied[0].get(n) != first[n]]
    unlike = [name for name in dict.fromkeys((*unlike, *unset)) if name != FAILED]
    if not unlike and not failed:
        return Copies()
    other = file(seed, 2) or {}
    moved = [name for name in unlike if other.get(name) != first.get(name)]
    _require_seeded(path, moved, first, (file(seed, 1) or {}) if moved else {})
    kept = [_said(name) for name in unlike if name not in moved]
    return Copies((*kept, *(f"would end with {error}" for error in failed)))


_NUMBERS = ("torch.set_", "torch.backends.")


def _said(name: str) -> str:
    return f"would not set {name}" if is_setting(name) else f"would have another {name}"


def _matters(setting: str, texts: Sequence[str]) -> bool:
    """Whether a setting may change what the copies, or torch's optimizers, do."""
    if setting.startswith((*_NUMBERS, "torch.optim.")):
        return True
    if setting.startswith("os.environ["):
        return any(word in text for text in texts for word in ("environ", "getenv"))
    last = setting.partition(" ")[0].rpartition(".")[2]
    return last.startswith("__") or any(last in text for text in texts)


def _require_copied(path: Path, sets: Sequence[str]) -> None:
    """Refuse a setting that no line of a bundle would make: nothing of the file is copied.

    Raises:
        InputError: there is one.
    """
    if sets:
        setting = sets[0].partition("(")[0].partition(" ")[0]
        raise InputError(
            f"a call at the top of {path.name} sets {setting}, and a bundle has a copy of lines of "
            "the top that set it themselves",
            code="BX2045",
            at=path.name,
            help=f"set it in a line of its own at the top of the file: {sets[0]}",
        )


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
            code="BX2046",
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


def is_plain(path: Path) -> bool:
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
    return any(isinstance(n, ast.Call) or _is_set(n) for n in ast.walk(node))


def _is_set(node: ast.AST) -> bool:
    """Whether it writes into what something else holds: a class of torch's, say."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _is_beside(module: str, folder: Path) -> bool:
    first = module.partition(".")[0]
    return (folder / f"{first}.py").is_file() or (folder / first / "__init__.py").is_file()
