"""Where an op or an error comes from: the user's line, and the calls of the user's modules.

This file knows frames and module stacks; it knows no ops.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import traceback
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.core import ModuleCall

if TYPE_CHECKING:
    import torch.fx

MODEL = "model"  # the attribute of the wrapper that holds the user's model
_HERE = str(Path(__file__).parents[1])  # its lines say nothing of the user's file
_STDLIB = sysconfig.get_paths()["stdlib"]
_MACHINERY = tuple(f"{_STDLIB}/site-packages/{name}/" for name in ("torch", "sympy", "networkx"))


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a source file is the user's (or a library's of models), not the machinery's."""
    import torch

    if not file.startswith("/"):  # torch writes "torch/fx/..." and "<string>" for its own
        return False
    if file.startswith((_HERE, *_MACHINERY, str(Path(torch.__file__).parent))):
        return False
    return not file.startswith(_STDLIB) or "site-packages" in file


def is_own(file: str) -> bool:
    """Whether a file is the user's own, no installed library's."""
    parts = Path(file).parts
    return is_users(file) and not any(part.endswith("-packages") for part in parts)


def forward_line(module: object) -> str | None:
    """Return where the forward of a module is written, "gpt.py:31"; None of a library's."""
    forward = getattr(type(module), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    if code is None or not is_users(code.co_filename):
        return None
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def line_of(stack_trace: str | None) -> tuple[str, str]:
    """Return the innermost line of the user's in a node's stack trace.

    Returns:
        The place ("gpt.py:31") and the text of that line; both empty when unknown.
    """
    lines = (stack_trace or "").splitlines()
    for index in range(len(lines) - 1, -1, -1):
        file, number = _frame(lines[index])
        if file and is_users(file):
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            return f"{Path(file).name}:{number}", "" if code.startswith('File "') else code
    return "", ""


def _frame(line: str) -> tuple[str, str]:
    r"""Read `File "/a/b.py", line 3, in f`."""
    text = line.strip()
    if not text.startswith('File "'):
        return "", ""
    file, _, rest = text[6:].partition('", line ')
    return file, rest.partition(",")[0]


def where(error: BaseException, folder: Path | None = None) -> str | None:
    """Return "model.py:31", the innermost line of the user's that an error passed through.

    Args:
        error: any exception; what caused it is looked at first.
        folder: only lines of files in this folder, when given.
    """
    for cause in reversed(list(with_causes(error))):
        frames = [
            frame
            for frame in traceback.extract_tb(cause.__traceback__)
            if is_users(frame.filename)
            and (folder is None or Path(frame.filename).is_relative_to(folder))
        ]
        if frames:
            return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return None


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def module_calls(node: torch.fx.Node) -> tuple[ModuleCall, ...]:
    """Return the calls of the user's modules that a node belongs to, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [(key, path, kind) for key, (path, kind) in stack.items() if _in_model(path)]
    return tuple(_call(key, path, _type_name(kind)) for key, path, kind in entries)


def _in_model(path: str) -> bool:
    return path == MODEL or path.startswith(MODEL + ".")


def _type_name(kind: object) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


@lru_cache(maxsize=65536)
def _call(key: str, path: str, kind: str) -> ModuleCall:
    _, later, call = key.rpartition("@")  # the strict tracer's key of a first call is an address
    return ModuleCall(inside(path), kind, int(call) if later and call.isdigit() else 0)


def inside(path: str) -> str:
    """Return a name relative to the user's model: "model.blocks.0" -> "blocks.0"."""
    return path.removeprefix(MODEL).removeprefix(".") if _in_model(path) else path


def makes_text(code: str) -> bool:
    """Whether a line makes text: "%.3f" % x, f"{x}", str(x), "{}".format(x)."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except SyntaxError:
        return False
    named = (node.func for node in nodes if isinstance(node, ast.Call))
    names = {getattr(func, "id", getattr(func, "attr", "")) for func in named}
    sides = [n.left for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
    by_sign = any(isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides)
    filled = any(isinstance(node, ast.FormattedValue) for node in nodes)
    return by_sign or filled or bool(names & {"str", "repr", "format"})
