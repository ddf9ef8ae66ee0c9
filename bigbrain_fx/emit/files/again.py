"""The files of a bundle for another plan of the same graph: what is the user's stays as it is.

The model file is not read again: it may be gone, or changed since. What the user changed in the old
bundle's training.py and train.py is kept; only what train.py says of devices is written anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from bigbrain_fx.emit.files.entry import device_fields
from bigbrain_fx.emit.files.readme import readme_text
from bigbrain_fx.emit.files.train_texts import launch_text
from bigbrain_fx.emit.modules.layout import double_quoted, wrapped
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan

KEPT = ("training.py", "functions.py")
OURS = ("runtime", "weights", "supervisor", "commits")
DEVICE = re.compile(r"device_\d+")


def texts_like(plan: Plan, like: Path) -> dict[str, str]:
    """Return training.py, functions.py, train.py and README.md, from those of another bundle.

    Args:
        plan: of the graph that `like` was written for.
        like: a bundle for training.

    Raises:
        InputError: a file is missing, or train.py was changed beyond recognition.
    """
    texts = {name: _read(like / name) for name in KEPT if (like / name).is_file()}
    listed = [line for line in _read(like / "README.md").splitlines() if line.startswith("- `")]
    return {
        **texts,
        "launch.py": launch_text(plan),
        "train.py": _moved(_read(like / "train.py"), plan, like / "train.py"),
        "README.md": readme_text(plan, listed),
    }


def shipped_like(like: Path, texts: Mapping[str, str]) -> list[Path]:
    """Return the user's own modules and packages that lie in a bundle beside our files."""
    found = []
    for path in sorted(like.iterdir()):
        ours = path.name in (*texts, *OURS, "__init__.py")
        if ours or DEVICE.fullmatch(path.stem) or path.name.startswith((".", "__")):
            continue
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("**/*.py"))):
            found.append(path)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}",
            at=str(path),
            help="put it back: what it says of training goes into the new bundle",
        ) from error


def _moved(text: str, plan: Plan, where: Path) -> str:
    """Return a train.py that names the devices of `plan`; all else as it was."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise _changed(where, f"line {error.lineno} is no Python") from error
    count = len(plan.stages.devices)
    fields = dict(
        field.split("=", 1)
        for field in device_fields(plan, [f"device_{i}.Device{i}" for i in range(count)])
    )
    call = _bundle_call(tree, where)
    own = {entry.arg: entry.value for entry in call.keywords if entry.arg}
    lost = [name for name in fields if name not in own]
    if lost:
        raise _changed(where, f"Bundle(...) lacks {lost[0]}=")
    names = ("plan", "devices", "kinds", "threads", "seed")
    edits: list[tuple[int, int, str | None]] = [
        (*_span(text, own[name]), _field(name, fields[name])) for name in names
    ]
    imports = [_span(text, node) for node in tree.body if _is_device_import(node)]
    if not imports:
        raise _changed(where, "it imports no device_0")
    lines = "\n".join(f"import device_{i}" for i in range(count))
    edits += [(start, end, lines if n == 0 else None) for n, (start, end) in enumerate(imports)]
    for start, end, new in sorted(edits, reverse=True):
        after = end + 1 if new is None else end  # an import goes with its line
        text = text[:start] + (new or "") + text[after:]
    return re.sub(r"(--nproc-per-node )\d+", rf"\g<1>{count}", text)


def _field(name: str, value: str) -> str:
    """Return a value as the emitter lays it out, without what stands before and after."""
    text = double_quoted("\n".join(wrapped(f"{name}={value},", 4)))
    return text.strip().removeprefix(f"{name}=").removesuffix(",")


def _bundle_call(tree: ast.Module, where: Path) -> ast.Call:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Bundle")):
                return node
    raise _changed(where, "it has no Bundle(...)")


def _is_device_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and all(DEVICE.fullmatch(a.name) for a in node.names)


def _span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return where a node starts and ends, in characters; ast counts UTF-8 bytes in a line."""
    lines = text.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        before = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(before)

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = place(node.lineno, node.col_offset)
    return start, place(node.end_lineno, node.end_col_offset)


def _changed(where: Path, why: str) -> InputError:
    return InputError(
        f"{where.name} is not as `split` wrote it: {why}",
        at=str(where),
        help="keep `BUNDLE = Bundle(...)` with plan, devices, kinds, threads and seed by name",
    )
