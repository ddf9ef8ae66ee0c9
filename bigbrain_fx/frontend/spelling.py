"""Names of a model file that are nearly those that bigbrain-fx looks for.

A misspelt optional name trains without what it defines: `clip_nrom` does not clip.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

NAMES = (
    *("model", "example_batch", "loss", "batches", "optimizer", "lr_scale", "scheduler"),
    *("loss_weight", "micro", "clip_norm", "autocast", "grad_scaler", "drop_last", "batch_dims"),
    *("pad", "lengths", "leaves"),
)


def misspelt_names(path: Path) -> tuple[str, ...]:
    """Return a remark for each top-level name that nothing reads and that is nearly one of NAMES.

    Args:
        path: a model file; what is no Python text has no such name.
    """
    try:
        statements = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return ()
    bound = {name for each in statements for name in _bound(each)}
    read = {name for each in statements for name in _read(each)}
    missing = [] if "*" in bound else [name for name in NAMES if name not in bound]
    return tuple(
        f"{path.name}:{each.lineno}: nothing reads `{name}`; was `{meant}` meant?"
        for each in statements
        for name in _defined(each)
        if name not in read and name not in NAMES
        if (meant := _nearest(name, missing))
    )


def _defined(statement: ast.stmt) -> Iterator[str]:
    """Yield names of a function or an assignment."""
    if isinstance(statement, ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        yield from (each.id for each in statement.targets if isinstance(each, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield all names that a statement or those within it may bind."""
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _read(statement: ast.stmt) -> Iterator[str]:
    """Yield all names that a statement or those within it read."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id


def _nearest(name: str, missing: list[str]) -> str | None:
    close = difflib.get_close_matches(name.lower(), missing, n=1, cutoff=0.75)
    part = (each for each in missing if _is_part(name.lower(), each))
    return next(iter(close), None) or next(part, None)


def _is_part(name: str, known: str) -> bool:
    """Whether `optim` stands for `optimizer`, or `make_model` and `loss_fn` for `model`, `loss`."""
    words = name.split("_")
    is_longer = len(words) <= 3 and known in ("_".join(words[1:]), "_".join(words[:-1]))
    return is_longer or (len(name) > 3 and known.startswith(name))
