"""Lay out emitted text: indentation, and long calls broken one argument a line as a formatter would."""

from __future__ import annotations

import ast
import io
import tokenize

WIDTH = 100
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def statement(node: ast.stmt | ast.expr, indent: int, comment: str = "") -> list[str]:
    """Return the lines of one simple statement, with an optional comment at its end."""
    lines = wrapped(ast.unparse(ast.fix_missing_locations(node)), indent)
    if comment:
        lines[-1] = f"{lines[-1]}  # {comment}"
    return lines


def wrapped(text: str, indent: int) -> list[str]:
    """Break a one-line statement at its first bracket that helps, as formatters do.

    The items inside go on one line of their own if they fit there, else one item a line.
    """
    pad = " " * indent
    if len(pad) + len(text) <= WIDTH:
        return [pad + text]
    for start in _openings(text):
        end = _closing(text, start)
        items = _items(text[start + 1 : end])
        if not items or len(text) - end > WIDTH // 2:
            continue
        inside = ", ".join(items)
        if indent + 4 + len(inside) <= WIDTH:
            comma = "," if len(items) == 1 and text[start - 1 : start] in (" ", "", "=") else ""
            return [pad + text[: start + 1], f"{pad}    {inside}{comma}", pad + text[end:]]
        lines = [line for item in items for line in wrapped(item + ",", indent + 4)]
        return [pad + text[: start + 1], *lines, pad + text[end:]]
    return [pad + text]


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
    return [i for i, depth, char in _scan(text) if char in _CLOSING and depth == 0]


def _closing(text: str, start: int) -> int:
    for i, depth, char in _scan(text):
        if i > start and depth == 1 and char in ")]}":
            return i
    raise AssertionError(f"unbalanced: {text}")


def _items(inside: str) -> list[str]:
    cuts = [i for i, depth, char in _scan(inside) if char == "," and depth == 0]
    if " for " in inside and not cuts:
        return []  # a comprehension stays on its line
    edges = [-1, *cuts, len(inside)]
    items = [inside[a + 1 : b].strip() for a, b in zip(edges, edges[1:], strict=False)]
    return [item for item in items if item]


def _scan(text: str) -> list[tuple[int, int, str]]:
    """List the characters outside string literals with their bracket depth (before an opening one)."""
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
