"""Origin of an op or an error: the user's line, and the calls of the user's modules.

    gpt.py:93 (GPT.forward) ─▶ gpt.py:62 (Block.forward) ─▶ gpt.py:45 (Attention.forward)

The emitter names values after the variables that these lines assign. The module knows frames and
module stacks, not ops.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bigbrain_fx.core import ModuleCall

if TYPE_CHECKING:
    import torch.fx

MODEL = "model"  # the attribute of the wrapper that holds the user's model
_HERE = str(Path(__file__).parents[2])  # its lines say nothing of the user's file
_STDLIB = sysconfig.get_paths()["stdlib"]
_MACHINERY = tuple(f"{_STDLIB}/site-packages/{name}/" for name in ("torch", "sympy", "networkx"))


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a source file is the user's (or a library's of models), not the machinery's."""
    import torch

    if not file.startswith(("/", "<ipython-input")):  # torch writes "torch/fx/...", "<string>"
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
        error: any exception; its causes come first.
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
    """Yield an error and its causes."""
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
    _, later, call = key.rpartition("@")
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


# --------------------------------------------------------------------------- the lines of all calls

Lines: TypeAlias = tuple[tuple[str, ...], ...]
"""Frames ("gpt.py:93", outermost first), one list for each module call and one before them all."""

_MARK = "calls "
_MODULE = ("torch/nn/modules/module.py", "_call_impl")
_LONGEST = 400  # characters of a statement; what is longer assigns a table, not a value

_text_of: dict[str, str] = {}
"""Place ("gpt.py:93") -> the statement there, of every place handed out."""


class Trail(traceback.StackSummary):
    """The user's innermost frame, and before it one line that lists the frames of all calls."""

    trail = ""

    def format(self, **_: object) -> list[str]:
        """Return the text that torch keeps with a node."""
        return [self.trail, *super().format()]


def trail(stack: Sequence[traceback.FrameSummary]) -> traceback.StackSummary:
    """Return the part of a stack that `lines_of` and `sources.line_of` read; else nothing."""
    calls: list[list[traceback.FrameSummary]] = [[]]
    for frame in stack:
        if frame.name == _MODULE[1] and frame.filename.endswith(_MODULE[0]):
            calls.append([])
        elif is_users(frame.filename):
            calls[-1].append(frame)
    kept = Trail([frame for call in calls for frame in call][-1:])
    listed = ("\t".join(f"{f.filename}:{f.lineno}" for f in _own(call)) for call in calls)
    kept.trail = _MARK + "\t|\t".join(listed) + "\n"
    return kept


def _own(call: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Leave out the decorators around a module's `forward`."""
    names = [frame.name for frame in call]
    return call[names.index("forward") :] if "forward" in names else call


def lines_of(stack_trace: str | None) -> Lines:
    """Read the frames of a node's stack trace; nothing when torch made the node by itself."""
    first = (stack_trace or "").partition("\n")[0]
    if not first.startswith(_MARK.strip()):
        return ()
    calls = first.removeprefix(_MARK.strip()).split("|")
    return tuple(
        tuple(_place(frame) for frame in call.split("\t") if frame.strip()) for call in calls
    )


def statements(places: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the statement at each place that has one, on one line."""
    found = ((place, _text_of.get(place, "")) for place in dict.fromkeys(places))
    return tuple((place, text) for place, text in found if text)


@lru_cache(maxsize=65536)
def _place(frame: str) -> str:
    """Return where the statement starts that a frame is in."""
    file, _, line = frame.strip().rpartition(":")
    start, text = _statement(file, int(line))
    place = f"{Path(file).name}:{start}"
    _text_of.setdefault(place, text)
    return place


def _statement(file: str, line: int) -> tuple[int, str]:
    """Return where the simple statement at a line of a file starts, and its text; "" for none."""
    for node in reversed(_statements(file).get(line, [])):
        text = ast.unparse(node)  # of the few that are asked for: a whole file takes long
        if len(text) <= _LONGEST:
            return node.lineno, text
    return line, ""


@lru_cache(maxsize=256)
def _statements(file: str) -> dict[int, list[ast.stmt]]:
    """Return the simple statements at each line of a file, outer ones first.

    A file that does not parse has none.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[ast.stmt]] = {}
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
    for node in (node for node in ast.walk(tree) if isinstance(node, kinds)):
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            found.setdefault(line, []).append(node)
    return found
