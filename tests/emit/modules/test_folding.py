"""Values that wait keep the variables that they read; expressions that are made again."""

from __future__ import annotations

import ast

import pytest

from bigbrain_fx.emit.modules.again import made_again
from bigbrain_fx.emit.modules.folding import Folding, Piece


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def test_values_are_written_one_by_one_and_the_rest_keep_their_variables() -> None:
    folding = Folding()
    folding.push("select", Piece(expression("kv[0]"), "a.py:1"))
    folding.push("query", Piece(expression("attention.view(4)"), "a.py:1"))
    first = folding.take_first()
    assert first is not None
    assert first.value == "select"
    assert folding.names() == {"attention"}  # `select` must not be written to `attention`
    assert folding.take_first() is not None
    assert folding.take_first() is None
    assert folding.names() == set()


def test_an_expression_at_hand_keeps_its_variables_while_others_are_written() -> None:
    folding = Folding()
    folding.push("query", Piece(expression("linear(x)"), "a.py:1"))
    folding.push("keys", Piece(expression("linear(memory)"), "a.py:1"))
    folded = folding.fold(Piece(ast.Call(ast.Name("unflatten"), [ast.Name("<keys>")], [])))
    assert folded is not None
    folding.hold(folded.expression)
    assert "memory" in folding.names()
    folding.hold(None)
    assert "memory" not in folding.names()


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
def test_what_an_expression_becomes(text: str, expected: str) -> None:
    found = made_again(ast.parse(text, mode="eval").body)
    assert ast.unparse(ast.fix_missing_locations(found)) == expected


def test_a_value_without_a_name_yet_gets_a_letter() -> None:
    product = ast.BinOp(ast.Name("<silu>"), ast.Mult(), ast.Name("a"))
    found = made_again(product)
    assert ast.unparse(ast.fix_missing_locations(found)) == "again(lambda b, a: b * a, <silu>, a)"
