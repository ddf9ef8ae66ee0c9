"""Values that wait keep the variables that they read; expressions that are made again."""

from __future__ import annotations

import ast

import pytest

from bigbrain_fx.emit.modules.again import made_again


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F.gelu(h)", "again(F.gelu, h)"),
        ("self.norm(x)", "again(self.norm, x)"),
        ("self.blocks[0].norm(x)", "again(self.blocks[0].norm, x)"),
        (
            "F.layer_norm(x, (64,), self.norm.weight, None, 1e-05)",
            "again(F.layer_norm, x, (64,), self.norm.weight, None, 1e-05)",
        ),
        ("gate * up", "again(lambda gate, up: gate * up, gate, up)"),
        ("x * x", "again(lambda x: x * x, x)"),
        ("torch.cat([a, b], 1)", "again(lambda a, b: torch.cat([a, b], 1), a, b)"),
        ("x.pow(2)", "again(lambda x: x.pow(2), x)"),
        ("F.softmax(x, dim=-1)", "again(lambda x: F.softmax(x, dim=-1), x)"),
        # a loop's module is an argument: a later turn would change the name
        ("block.norm(x)", "again(lambda block, x: block.norm(x), block, x)"),
        ("x * block.scale", "again(lambda x, block: x * block.scale, x, block)"),
    ],
)
def test_expressions_are_folded(text: str, expected: str) -> None:
    found = made_again(ast.parse(text, mode="eval").body)
    assert ast.unparse(ast.fix_missing_locations(found)) == expected
