"""Every module of the product that starts processes is known to `tests.support.warm`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.warm import STARTERS

ROOT = Path(__file__).resolve().parents[2]
COLD = {
    "bigbrain_fx.measure.host.far": "ssh",
    "bigbrain_fx.supervisor.outliving": "a Python without torch",
    "bigbrain_fx.verification.device_processes": "a Python with another hash seed",
}


@pytest.mark.nightly
def test_all_that_start_processes_start_them_warm() -> None:
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "bigbrain_fx").rglob("*.py")
        if starts(path.read_text(encoding="utf-8"))
    }
    assert found == {*STARTERS, *COLD}


def starts(text: str) -> bool:
    """Whether a module names `subprocess.run` or `subprocess.Popen` other than as a type."""
    tree = ast.parse(text)
    types = {id(part) for node in ast.walk(tree) for part in _annotation(node)}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("Popen", "run", "call", "check_output")
        and isinstance(node.value, ast.Name)
        and node.value.id == "subprocess"
        and id(node) not in types
        for node in ast.walk(tree)
    )


def _annotation(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.arg(annotation=found) | ast.AnnAssign(annotation=found):
            return list(ast.walk(found)) if found else []
        case ast.FunctionDef(returns=found) if found:
            return list(ast.walk(found))
    return []
