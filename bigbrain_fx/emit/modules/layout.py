"""Lay out emitted text: indentation, and long calls broken one argument a line as formatters do."""

from __future__ import annotations

import ast
import io
import tokenize
from itertools import pairwise

WIDTH = 100
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def statement(node: ast.stmt | ast.expr, indent: int, comment: str = "") -> list[str]:
    """Return the lines of one simple statement, with an optional comment at its end."""
    lines = wrapped(_text(ast.fix_missing_locations(node)), indent)
    if not comment:
        return lines
    if len(lines[-1]) + len(comment) + 4 > WIDTH:
        return [f"{' ' * indent}# {comment}", *lines]
    return [*lines[:-1], f"{lines[-1]}  # {comment}"]


def _text(node: ast.stmt | ast.expr) -> str:
    """Return a statement's text; `return a, b` has no brackets, as `a, b = c` has none."""
    match node:
        case ast.Return(value=ast.Tuple(elts=[first, second, *others])):
            values = ", ".join(ast.unparse(value) for value in (first, second, *others))
            return f"return {values}" if len(values) < WIDTH // 2 else ast.unparse(node)
    return ast.unparse(node)


def wrapped(text: str, indent: int) -> list[str]:
    """Break a one-line statement at its first bracket that helps, as formatters do.

    The items inside go on one line of their own if they fit there, else one item a line.
    """
    pad = " " * indent
    if len(pad) + len(text) <= WIDTH:
        return [pad + text]
    for start in _openings(text):
        end = _closing(text, start)
        inside = text[start + 1 : end]
        items = _items(inside)
        if not items or len(text) - end > WIDTH // 2:
            continue
        if end < len(text) - 1 and (bracketed := _bracketed(text, indent)):
            return bracketed
        joined = ", ".join(items) + ("," if inside.endswith(",") else "")
        if indent + 4 + len(joined) <= WIDTH:
            return [pad + text[: start + 1], f"{pad}    {joined}", pad + text[end:]]
        last = items[-1] + ("," if _may_end_in_comma(text, start, inside) else "")
        rows = [*(f"{item}," for item in items[:-1]), last]
        lines = [line for row in rows for line in wrapped(row, indent + 4)]
        return [pad + text[: start + 1], *lines, pad + text[end:]]
    return [pad + text]


def _bracketed(text: str, indent: int) -> list[str] | None:
    """Put the right side of an assignment on a line of its own, in brackets, if it fits there."""
    head, sign, value = text.partition(" = ")
    if not sign and text.startswith("return "):
        head, sign, value = "return", " ", text.removeprefix("return ")
    is_plain = bool(sign) and not set(head) & set("([{")
    if not is_plain or indent + 4 + len(value) > WIDTH:
        return None
    pad = " " * indent
    return [f"{pad}{head}{sign}(", f"{pad}    {value}", f"{pad})"]


def double_quoted(text: str) -> str:
    """Write 'strings' as "strings", as formatters do, where nothing has to be escaped for it."""
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        word = token.string
        if token.type == tokenize.STRING and word[0] == "'" and not {'"', "\\"} & set(word):
            row, column = token.start[0] - 1, token.start[1]
            line = lines[row]
            lines[row] = f'{line[:column]}"{word[1:-1]}"{line[column + len(word) :]}'
    return "".join(lines)


def _openings(text: str) -> list[int]:
    """Return where brackets open; those of `x[0]` come last: nobody breaks a line there."""
    found = [i for i, depth, char in _scan(text) if char in _CLOSING and depth == 0]
    return sorted(found, key=lambda i: text[i] == "[" and text[i - 1 : i].isalnum())


def _closing(text: str, start: int) -> int:
    for i, depth, char in _scan(text):
        if i > start and depth == 1 and char in ")]}":
            return i
    raise AssertionError(f"unbalanced: {text}")


def _items(inside: str) -> list[str]:
    """Return what stands between commas; nothing for a comprehension, which keeps its line."""
    found = _scan(inside)
    flat = "".join(char if depth == 0 else "_" for _, depth, char in found)
    if " for " in flat:
        return []
    cuts = [i for i, depth, char in found if char == "," and depth == 0]
    edges = [-1, *cuts, len(inside)]
    items = [inside[a + 1 : b].strip() for a, b in pairwise(edges)]
    return _whole_lambdas([item for item in items if item])


def _whole_lambdas(items: list[str]) -> list[str]:
    """Put `lambda a, b: a * b` together again, which has commas of its own."""
    whole: list[str] = []
    for item in items:
        if whole and whole[-1].startswith("lambda ") and ":" not in whole[-1]:
            whole[-1] = f"{whole[-1]}, {item}"
        else:
            whole.append(item)
    return whole


def _may_end_in_comma(text: str, start: int, inside: str) -> bool:
    """Whether a comma may follow the last item; it would make a tuple of `(a + b)` and `x[i]`."""
    follows_value = start > 0 and (text[start - 1].isalnum() or text[start - 1] in "_)]}'\"")
    is_list = {"(": follows_value, "[": not follows_value, "{": True}[text[start]]
    return is_list or any(char == "," and depth == 0 for _, depth, char in _scan(inside))


def _scan(text: str) -> list[tuple[int, int, str]]:
    """List the characters outside strings with their bracket depth (before an opening one)."""
    found: list[tuple[int, int, str]] = []
    depth, quote, escaped = 0, "", False
    for i, char in enumerate(text):
        if quote:
            if char == quote and not escaped:
                quote = ""
            escaped = char == "\\" and not escaped
            continue
        if char in "'\"":
            quote = char
            continue
        found.append((i, depth, char))
        depth += (char in _CLOSING) - (char in ")]}")
    return found


def quiet(text: str) -> str:
    """Make text safe inside a docstring; a Cluster made in Python may hold any name."""
    return " ".join(text.replace("\\", "/").replace('"', "'").split())
