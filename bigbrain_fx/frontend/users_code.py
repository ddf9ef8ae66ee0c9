"""The user's own code, run as the user would run it: its folder, its module, and its errors.

An exception of the code becomes an InputError that names the line. The module knows no contract.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import inspect
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import cast

import torch

from bigbrain_fx.core import module_of, run_module
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.device_dependence import help_without_gpu
from bigbrain_fx.frontend.translation.sources import where


class _DataFolders(importlib.abc.MetaPathFinder):
    """Keep Python from taking a folder of data beside the model file for a package.

    torch looks for optional modules (triton, z3, optree). To Python any folder is a package, even
    one without Python files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Raise for a folder without Python that is no package elsewhere either; else, pass."""
        there = self.folder / name
        if path is not None or not there.is_dir() or any(map(_is_python, there.rglob("*"))):
            return
        found = PathFinder.find_spec(name)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _is_python(file: Path) -> bool:
    return file.suffix in (".py", ".pyc", ".so")


@contextlib.contextmanager
def users_folder(folder: Path) -> Iterator[None]:
    """Put the user's folder on sys.path, as `python model.py` would."""
    entry = str(folder)
    if not any(isinstance(f, _DataFolders) and f.folder == folder for f in sys.meta_path):
        sys.meta_path.insert(0, _DataFolders(folder))
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def run_file(path: Path, seed: int) -> ModuleType:
    """Run the file as a module named like it, so that a bundle can import it by the same name."""
    name = path.stem
    loaded = sys.modules.get(name)
    ours = getattr(loaded, "__bigbrain_fx__", False)
    if name in sys.stdlib_module_names or (loaded is not None and not ours):
        name = f"{name}_model"
    module = module_of(path, name)
    module.__dict__["__bigbrain_fx__"] = True
    sys.modules[name] = module
    torch.manual_seed(seed)
    try:
        with errors_of(path, f"{path.name} cannot be run"):
            run_module(module)
    except InputError:
        sys.modules.pop(name, None)
        raise
    return module


@contextlib.contextmanager
def errors_of(path: Path, what: str, remedy: str | None = None) -> Iterator[None]:
    """Turn any exception of the user's code into an InputError that names the line.

    Args:
        path: of the model file.
        what: failed, as a sentence's subject.
        remedy: for exceptions without a more specific one.
    """
    try:
        yield
    except InputError:
        raise
    except SyntaxError as error:
        at = f"{Path(error.filename or path).name}:{error.lineno}"
        raise InputError(
            f"{what}: syntax error: {error.msg}", code="BX2186", at=at, help="mend that line"
        ) from error
    except SystemExit as error:
        raise InputError(
            f"{what}: it called sys.exit({error.code!r})",
            code="BX2187",
            at=_line(error, path),
            help='put the part that runs the program under `if __name__ == "__main__":`',
        ) from error
    except ImportError as error:
        raise InputError(
            f"{what}: {error}", code="BX2188", at=_line(error, path), help=_import_help(error, path)
        ) from error
    except Exception as error:
        help_ = remedy or f"make `python {path.name}` run without an error first"
        raise InputError(
            f"{what}: {_said(error)}",
            code="BX2189",
            at=_line(error, path),
            help=help_without_gpu(error) or help_,
        ) from error


def _said(error: Exception) -> str:
    """Return type and first line; of an error of a loader's worker process, its own last line."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"


def _import_help(error: ImportError, path: Path) -> str:
    if "relative import" not in str(error):
        return "install the module into this Python, or put it beside the model file"
    return (
        f"a model file is run as `python {path.name}` would run it: write `from name import ...` "
        f"for a module beside it, or move it out of its package and import that by its name"
    )


def _line(error: BaseException, path: Path) -> str:
    return where(error, path.parent) or where(error) or path.name


def definition(value: object, path: Path) -> str:
    """Return the place of a function's or class's definition; the file without a known line."""
    try:
        return f"{path.name}:{inspect.getsourcelines(cast('type', value))[1]}"
    except (OSError, TypeError):
        return path.name
