"""A module's children as the lines of its `__init__`: runs of like children are one expression."""

from __future__ import annotations

import ast

import pytest

from bigbrain_fx.emit.modules.tree import Tree, init_lines, put


def made(word: str, first: int = 0) -> str:
    """Return how children are written: one letter a child, numbered from `first`."""
    tree: Tree = {}
    for i, letter in enumerate(word):
        put(tree, f"blocks.{first + i}", ast.parse(f"{letter}()", mode="eval").body)
    _, *lines = init_lines(tree, 0)
    return " ".join(lines).partition(" = ")[2]


@pytest.mark.parametrize("word", ["ABBB", "CABAB", "AAABBB", "ABCABCAB", "AABBAABB", "ABBBCCAAA"])
@pytest.mark.parametrize("first", [0, 3])
def test_every_child_is_made_once_in_its_place(word: str, first: int) -> None:
    names = {letter: (lambda letter=letter: letter) for letter in "ABC"}

    class Nn:
        ModuleList = staticmethod(lambda items: dict(enumerate(items)))

    text = made(word, first)
    found = eval(text, {**names, "nn": Nn, "Tensors": dict})  # text of our own
    assert found == {first + i: letter for i, letter in enumerate(word)}
