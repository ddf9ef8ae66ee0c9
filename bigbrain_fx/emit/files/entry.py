"""Common text of the entry points of training and inference: devices, options, data.

This file knows no difference between the two.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from bigbrain_fx.emit.files.model_file import no_triple_blanks
from bigbrain_fx.emit.files.slicing import SourceSlice
from bigbrain_fx.emit.modules.layout import double_quoted, wrapped
from bigbrain_fx.plan import Plan

LACKING = "copy the bundle again, or install torch"


def device_fields(plan: Plan, classes: Sequence[str]) -> list[str]:
    """Return the arguments that name the bundle's folder, its devices and its seed."""
    devices = [plan.cluster.device[name] for name in plan.stages.devices]
    listed = ", ".join(classes) + ("," if len(classes) == 1 else "")
    return [
        "folder=Path(__file__).resolve().parent",
        f"plan={plan.key!r}",
        f"devices=({listed})",
        f"kinds={tuple(d.kind for d in devices)!r}",
        f"threads={tuple(d.threads for d in devices)!r}",
        f"seed={plan.seed}",
    ]


def beginning(statement: str, indent: int = 0) -> list[str]:
    """Write what comes before other imports: that of the runtime, which takes the command line.

    Args:
        statement: the import.
        indent: 4, where it is for the program alone, and the file may be imported from a package.
    """
    return [
        "import sys",
        "from pathlib import Path",
        "",
        'if __name__ == "__main__":  # `python -P` and `-I` leave this folder out',
        "    sys.path.insert(0, str(Path(__file__).resolve().parent))",
        *loading(statement, indent),
        "",
    ]


def loading(statement: str, indent: int = 0) -> list[str]:
    """Write an import of the bundle's own code; where that is gone, a sentence says so."""
    lines = [
        "try:",
        f"    {statement}",
        "except ImportError as error:",
        f'    print(f"error[BX3690]: {{error}}: {LACKING}", file=sys.stderr)',
        "    sys.exit(2)",
    ]
    return [" " * indent + line for line in lines]


def data_fields(module: str, constants: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments that say where the data come from, by name."""
    return {
        "batches": f"batches={module}.batches",
        "inputs": f"inputs={module}.{constants['INPUTS']}",
        "whole": f"whole={module}.{constants['WHOLE']}",
        "specs": f"specs={module}.{constants['SPECS']}",
    }


def call_lines(name: str, kind: str, fields: Sequence[str]) -> list[str]:
    """Write `NAME = Kind(...)`, an argument a line."""
    return [
        f"{name} = {kind}(",
        *(line for entry in fields for line in wrapped(f"{entry},", 4)),
        ")",
    ]


def _after_imports(text: str) -> tuple[str, str]:
    """Part code after the imports at its top."""
    lines, end = text.split("\n"), 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            break
        end = node.end_lineno or node.lineno
    return "\n".join(lines[:end]).strip("\n"), "\n".join(lines[end:]).strip("\n")


def with_users_code(
    head: Sequence[str], imports: Sequence[str], taken: SourceSlice, ours: Sequence[str]
) -> str:
    """Join what was copied from the model file, as it stands, and what we write before and after.

    Our imports, of what stands in the bundle, come after the user's at the top; our own lines get
    double quotes.
    """
    top, rest = _after_imports(taken.text)
    defines = rest.startswith(("def ", "class ", "@", "async "))
    lines = [*head, *top.splitlines(), *(["", *imports] if imports else [])]
    lines += ["", *[""] * defines, rest, ""] if rest else [""]
    quoted = double_quoted("\n".join(ours)).splitlines()
    return "\n".join(no_triple_blanks([*lines, *quoted])) + "\n"
