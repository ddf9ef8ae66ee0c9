"""The files of a bundle for another plan of the same graph; the user's files stay as they are.

The model file is not read again: it may be gone, or changed since. The user's changes of the old
bundle's training.py and train.py stay; only the lines of train.py about devices are written anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from bigbrain_fx.emit.files.blocks import WRITTEN
from bigbrain_fx.emit.files.code import BLOCKS
from bigbrain_fx.emit.files.entry import device_fields
from bigbrain_fx.emit.files.readme import readme_text, told_files
from bigbrain_fx.emit.files.train_texts import launch_text
from bigbrain_fx.emit.modules.layout import double_quoted, wrapped
from bigbrain_fx.emit.modules.names import by_number, device_names
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan import Plan

KEPT = ("training.py", "functions.py")
OURS = (
    "runtime",
    "weights",
    "supervisor",
    "commits",
    "train.py",
    "launch.py",
    "__init__.py",
    *KEPT,
)


def texts_like(plan: Plan, like: Path, *, bare: bool = False) -> dict[str, str]:
    """Return training.py, functions.py, train.py and README.md, from those of another bundle.

    Raises:
        InputError: a file is missing, or train.py was changed beyond recognition.
    """
    texts = {name: _read(like / name) for name in KEPT if (like / name).is_file()}
    lean = not (like / "launch.py").is_file()
    return {
        **texts,
        **({} if lean else {"launch.py": launch_text(plan)}),
        "train.py": _moved(_read(like / "train.py"), plan, like / "train.py"),
        "README.md": readme_text(plan, told_files(_read(like / "README.md")), lean=lean, bare=bare),
    }


def _is_of_blocks(path: Path) -> bool:
    """Whether a file has the blocks that devices share; one of the user's may be called so."""
    return path.name == f"{BLOCKS}.py" and WRITTEN in _read(path)


def shipped_like(like: Path) -> list[Path]:
    """Return the user's own modules and packages that lie in a bundle beside our files."""
    train = like / "train.py"
    ours = {
        *OURS,
        *(f"{name}.py" for name in _device_modules(_call_of(_read(train), train), train)),
    }
    found = []
    for path in sorted(like.iterdir()):
        if path.name in ours or _is_of_blocks(path) or path.name.startswith((".", "__")):
            continue
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("**/*.py"))):
            found.append(path)
    return found


def _read(path: Path) -> str:
    with os_error_as(
        f"cannot read {path}",
        code="BX3600",
        at=str(path),
        help="put it back: what it says of training goes into the new bundle",
    ):
        return path.read_text(encoding="utf-8")


def _moved(text: str, plan: Plan, where: Path) -> str:
    """Return a train.py that names the devices of `plan`; all else as it was."""
    devices = device_names(plan.stages.devices).values()
    fields = dict(
        field.split("=", 1)
        for field in device_fields(plan, [f"{names.module}.{names.program}" for names in devices])
    )
    call = _call_of(text, where)
    own = {entry.arg: entry.value for entry in call.keywords if entry.arg}
    lost = [name for name in fields if name not in own]
    if lost:
        raise _changed(where, f"Bundle(...) lacks {lost[0]}=", code="BX3601")
    names = ("plan", "devices", "kinds", "threads", "seed")
    edits: list[tuple[int, int, str | None]] = [
        (*_span(text, own[name]), _field(name, fields[name])) for name in names
    ]
    old = _device_modules(call, where)
    imports = [_span(text, node) for node in ast.parse(text).body if _imports_one(node, old)]
    if not imports:
        raise _changed(where, f"it does not import {min(old)}", code="BX3602")
    lines = "\n".join(sorted((f"import {names.module}" for names in devices), key=by_number))
    edits += [(start, end, lines if n == 0 else None) for n, (start, end) in enumerate(imports)]
    for start, end, new in sorted(edits, reverse=True):
        after = end + 1 if new is None else end  # an import goes with its line
        text = text[:start] + (new or "") + text[after:]
    return re.sub(r"(--nproc-per-node )\d+", rf"\g<1>{len(devices)}", text)


def _field(name: str, value: str) -> str:
    """Return a value as the emitter lays it out, without what stands before and after."""
    text = double_quoted("\n".join(wrapped(f"{name}={value},", 4)))
    return text.strip().removeprefix(f"{name}=").removesuffix(",")


def _call_of(text: str, where: Path) -> ast.Call:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise _changed(where, f"line {error.lineno} is no Python", code="BX3603") from error
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Bundle")):
                return node
    raise _changed(where, "it has no Bundle(...)", code="BX3604")


def _device_modules(call: ast.Call, where: Path) -> frozenset[str]:
    """Return the modules of the devices' files: `devices=(device_d0.DeviceD0, ...)` names them."""
    for entry in call.keywords:
        match entry:
            case ast.keyword(arg="devices", value=ast.Tuple(elts=classes)):
                found = {ast.unparse(c.value) for c in classes if isinstance(c, ast.Attribute)}
                if len(found) == len(classes):
                    return frozenset(found)
    raise _changed(
        where, "Bundle(devices=...) is no tuple of classes of the devices' files", code="BX3605"
    )


def _imports_one(node: ast.stmt, modules: frozenset[str]) -> bool:
    return isinstance(node, ast.Import) and all(alias.name in modules for alias in node.names)


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


def _changed(where: Path, why: str, *, code: str) -> InputError:
    return InputError(
        f"{where.name} is not as `split` wrote it: {why}",
        code=code,
        at=str(where),
        help="keep `BUNDLE = Bundle(...)` with plan, devices, kinds, threads and seed by name",
    )
