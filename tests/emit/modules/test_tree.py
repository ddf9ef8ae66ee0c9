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


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("A", "nn.ModuleList([A()])"),
        ("AAAA", "nn.ModuleList(A() for _ in range(4))"),
        ("ABAB", "nn.ModuleList(A() if i % 2 == 0 else B() for i in range(4))"),
        ("ABBB", "nn.ModuleList([A(), *(B() for _ in range(3))])"),
        ("ABB", "nn.ModuleList([A(), B(), B()])"),
        ("AAAAB", "nn.ModuleList([*(A() for _ in range(4)), B()])"),
        ("CABAB", "nn.ModuleList([C(), *(B() if i % 2 == 0 else A() for i in range(1, 5))])"),
        ("AAABBB", "nn.ModuleList([*(A() for _ in range(3)), *(B() for _ in range(3))])"),
    ],
)
def test_runs_in_a_list(word: str, text: str) -> None:
    assert made(word) == text


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("AAAA", "Tensors({i: A() for i in range(2, 6)})"),
        ("ABBB", "Tensors({2: A(), **{i: B() for i in range(3, 6)}})"),
        ("AB", "Tensors({2: A(), 3: B()})"),
    ],
)
def test_runs_of_numbered_children(word: str, text: str) -> None:
    assert made(word, 2) == text


@pytest.mark.parametrize("word", ["ABBB", "CABAB", "AAABBB", "ABCABCAB", "AABBAABB", "ABBBCCAAA"])
@pytest.mark.parametrize("first", [0, 3])
def test_every_child_is_made_once_in_its_place(word: str, first: int) -> None:
    names = {letter: (lambda letter=letter: letter) for letter in "ABC"}

    class Nn:
        ModuleList = staticmethod(lambda items: dict(enumerate(items)))

    text = made(word, first)
    found = eval(text, {**names, "nn": Nn, "Tensors": dict})  # text of our own
    assert found == {first + i: letter for i, letter in enumerate(word)}


def test_numbers_with_a_gap_are_no_run() -> None:
    tree: Tree = {}
    for i in (1, 2, 4, 5):
        put(tree, f"blocks.{i}", ast.parse("A()", mode="eval").body)
    _, line = init_lines(tree, 0)
    assert line == "self.blocks = Tensors({1: A(), 2: A(), 4: A(), 5: A()})"
