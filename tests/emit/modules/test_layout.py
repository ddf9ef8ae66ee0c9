"""Emitted text is laid out as a formatter would, and means what it meant on one line."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings, strategies as st

from bigbrain_fx.emit.modules.layout import WIDTH, double_quoted, statement, wrapped
from tests.support.examples import examples

names = st.sampled_from(["x", "hidden", "attention_output", "self", "a_rather_long_variable_name"])
words = st.text(st.sampled_from("ab'\"\\\n (),[]{}=é"), max_size=12)
constants = st.one_of(st.integers(-9, 99), st.booleans(), st.none(), words, st.floats(0, 1))


def _children(inner: st.SearchStrategy[ast.expr]) -> st.SearchStrategy[ast.expr]:
    several = st.lists(inner, max_size=5)
    keywords = st.lists(st.builds(ast.keyword, st.just("dim"), inner), max_size=1)
    operators = st.sampled_from([ast.Add(), ast.Mult(), ast.Pow(), ast.MatMult()])
    return st.one_of(
        st.builds(lambda f, a, k: ast.Call(f, a, k), inner, several, keywords),
        several.map(lambda items: ast.Tuple(items, ast.Load())),
        several.map(lambda items: ast.List(items, ast.Load())),
        several.map(lambda items: ast.Dict(list(items), list(items))),
        st.builds(lambda a, o, b: ast.BinOp(a, o, b), inner, operators, inner),
        st.builds(lambda a: ast.UnaryOp(ast.USub(), a), inner),
        st.builds(lambda a, b: ast.Subscript(a, b, ast.Load()), inner, inner),
        st.builds(lambda a, b: ast.Subscript(a, ast.Slice(b, None), ast.Load()), inner, inner),
        st.builds(lambda a: ast.Attribute(a, "weight", ast.Load()), inner),
        st.builds(_comprehension, inner, inner),
        st.builds(_generator, inner),
    )


def _comprehension(key: ast.expr, over: ast.expr) -> ast.expr:
    loop = ast.comprehension(ast.Name("i", ast.Store()), over, [], 0)
    return ast.DictComp(key, key, [loop])


def _generator(over: ast.expr) -> ast.expr:
    pair = ast.Tuple([ast.Name("a", ast.Store()), ast.Name("b", ast.Store())], ast.Store())
    loop = ast.comprehension(pair, over, [], 0)
    return ast.Call(ast.Name("sum"), [ast.GeneratorExp(ast.Name("a"), [loop])], [])


expressions = st.recursive(
    st.one_of(names.map(ast.Name), constants.map(ast.Constant)), _children, max_leaves=25
)
statements = st.one_of(
    st.builds(lambda v: ast.Assign([ast.Name("y", ast.Store())], v, lineno=0), expressions),
    st.builds(lambda v: ast.Return(v), expressions),
    st.builds(lambda v: ast.Expr(v), expressions),
)


def meaning(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.nightly
@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(statements, st.sampled_from([0, 8, 60]))
def test_wrapped_text_means_the_same(node: ast.stmt, indent: int) -> None:
    text = ast.unparse(ast.fix_missing_locations(node))
    lines = statement(node, indent)
    assert all(line.startswith(" " * indent) for line in lines)
    body = "\n".join(lines)
    inside = f"if 1:\n{body}" if indent else body
    expected = "\n".join(" " * indent + line for line in text.splitlines())
    assert meaning(inside) == meaning(f"if 1:\n{expected}" if indent else text)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.lists(st.tuples(names, st.lists(names, min_size=1, max_size=6)), min_size=1, max_size=8))
def test_calls_of_names_keep_the_width(calls: list[tuple[str, list[str]]]) -> None:
    inner = [f"{function}({', '.join(items)})" for function, items in calls]
    lines = wrapped(f"y = F.layer({', '.join(inner)})", 8)
    assert all(len(line) <= WIDTH for line in lines)
    assert meaning("if 1:\n" + "\n".join(lines)) == meaning(
        f"if 1:\n        y = F.layer({', '.join(inner)})"
    )


@pytest.mark.parametrize(
    "text",
    [
        f"x = ({'a' * 60} + {'b' * 60}) * c",
        f"x = f(({'a' * 60} + {'b' * 60}) * c, d)",
        f"x = self.blocks[{'a' * 60} + {'b' * 60}]",
        f"x = y[{'a' * 60}:{'b' * 60}]",
        f"x = ({'a' * 120},)",
        f"x = [{'a' * 120}]",
        f"x = f(({'a' * 120},))",
        f"x = sum(({'a' * 60} for a, b in {'b' * 60}))",
        f"super().__init__({{i: Block({'a' * 60}, 3) for i in range({'b' * 60})}})",
        f"x = {{{'a' * 60!r}: 1, 'b, c': ({'b' * 60},)}}",
        f"return {'a' * 120}",
        f"x = {'(),[]' * 30!r}",
    ],
)
def test_brackets_that_are_no_list_of_items(text: str) -> None:
    """A comma after the only item of a bracket can turn it into a tuple."""
    assert meaning("\n".join(wrapped(text, 0))) == meaning(text)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(words, max_size=6))
def test_double_quotes_change_no_string(found: list[str]) -> None:
    text = f"x = {found!r}\ny = {tuple(found)!r}\n"
    assert meaning(double_quoted(text)) == meaning(text)
