"""Values that wait to be folded keep the variables that they read."""

from __future__ import annotations

import ast

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
