"""Where a model is: "path/model.py" or "path/model.py:name". Imports no torch."""

from __future__ import annotations

from pathlib import Path

from bigbrain_fx.errors import InputError


def split_location(location: str | Path) -> tuple[Path, str | None]:
    """Return the file, resolved, and the name behind the colon (None without one).

    Raises:
        InputError: there is no such file, or the name is no Python name.
    """
    text = str(location)
    head, colon, tail = text.rpartition(":")
    path, name = (Path(head), tail) if colon and head.endswith(".py") else (Path(text), None)
    if name is not None and not name.isidentifier():
        raise InputError(
            f"expected a Python name after the colon, found {name!r}",
            at=text,
            help=f"write {path.name}:model",
        )
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        beside = (
            sorted(entry.name for entry in path.parent.glob("*.py"))[:8]
            if path.parent.is_dir()
            else []
        )
        raise InputError(
            f"expected a model file at {path}, found {found}",
            at=str(path),
            notes=(f"Python files there: {', '.join(beside)}",) if beside else (),
            help="give the path of a Python file that defines model() and example_batch()",
        )
    return path.resolve(), name
