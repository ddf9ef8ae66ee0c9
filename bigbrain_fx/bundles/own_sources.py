"""The user's own modules, which are not installed: they are copied to the devices."""

from __future__ import annotations

import functools
import shutil
import sys
import sysconfig
from pathlib import Path

_OURS = __name__.partition(".")[0]  # installed wherever a session is, also from a checkout
_CACHES = shutil.ignore_patterns("__pycache__")


def _no_python(folder: str, names: list[str]) -> set[str]:
    return {n for n in names if not (n.endswith(".py") or Path(folder, n).is_dir())} | {
        "__pycache__"
    }


def copy_source(source: Path, folder: Path) -> None:
    """Copy a file or package into a folder, unless it is there."""
    to = folder / source.name
    if to.exists():
        return
    if source.is_dir():
        is_package = (source / "__init__.py").is_file()  # else a folder may hold anything
        shutil.copytree(source, to, ignore=_CACHES if is_package else _no_python)
    else:
        shutil.copyfile(source, to)


def own_source(module: str) -> Path | None:
    """Return the file or package of the user's that a module is of; None where it is installed."""
    top = sys.modules.get(module.partition(".")[0])
    file, folders = getattr(top, "__file__", None), list(getattr(top, "__path__", ()))
    source = Path(folders[0]) if folders else Path(file) if file else None
    if source is None or source.name == _OURS or _is_installed(source):
        return None
    return source


def _is_installed(file: Path) -> bool:
    return not _roots(tuple(sys.path)).isdisjoint(file.resolve().parents)


@functools.lru_cache(maxsize=8)
def _roots(searched: tuple[str, ...]) -> frozenset[Path]:
    roots = {Path(p).resolve() for n, p in sysconfig.get_paths().items() if "lib" in n}
    return frozenset(roots | {Path(p).resolve() for p in searched if p.endswith("-packages")})
