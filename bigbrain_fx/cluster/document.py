"""Text -> a JSON value that knows the line of each of its parts, and strict about what JSON is.

This module knows JSON; it does not know what the file describes.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.cluster.quantity import nearest, quoted
from bigbrain_fx.errors import InputError, os_error_as

MAX_BYTES = 1_000_000
_MAX_DEPTH = 64  # our files are five deep; a thousand would exhaust the stack of any reader

JsonPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A JSON value, where it came from, and the line (from 1) of each of its parts."""

    source: str
    value: object
    lines: Mapping[JsonPath, int]

    def at(self, path: JsonPath) -> str:
        """Name a place for an error: `cluster.json:7: devices[2].memory`."""
        place = f"{self.source}:{self.lines[self.known(path)]}"
        return f"{place}: {path_text(path)}" if path else place

    def known(self, path: JsonPath) -> JsonPath:
        """Return the part of `path` that is in the file: a missing field's is its object."""
        return next(path[:n] for n in range(len(path), -1, -1) if path[:n] in self.lines)

    def error(
        self, path: JsonPath, what: str, help: str, notes: tuple[str, ...] = (), *, code: str
    ) -> InputError:
        """Build the error for a fault at `path`; the field's path opens the sentence."""
        return InputError(
            f"{path_text(path)}: {what}" if path else what,
            code=code,
            at=self.at(path),
            notes=notes,
            help=help,
        )

    def require_known(
        self, path: JsonPath, name: str, known: list[str], what: str = "device"
    ) -> None:
        """Refuse a name that the file has not introduced."""
        if name not in known:
            near = nearest(name, known)
            hint = f'did you mean "{near[0]}"? ' if near else ""
            raise self.error(
                path,
                f"no {what} {quoted(name)} in this cluster",
                f"{hint}known: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}",
                code="BX1000",
            )


def path_text(path: JsonPath) -> str:
    """Write a path as people do: ("devices", 2, "memory") -> `devices[2].memory`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_$][A-Za-z0-9_$]*", part):
            text += f".{part}" if text else part
        else:
            text += f"[{quoted(part)}]"
    return text


def read_text(path: str | Path) -> str:
    """Read a small text file (UTF-8, at most a megabyte).

    Raises:
        InputError: missing, a folder, not readable, too large, or not UTF-8.
    """
    with (
        os_error_as(
            "cannot read the cluster file",
            code="BX1001",
            at=str(path),
            help="`bigbrain-fx doctor --write cluster.json` makes one for this host",
        ),
        Path(path).open("rb") as file,
    ):
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InputError(
            f"the file is larger than {MAX_BYTES:,} bytes; a cluster file is a few kilobytes",
            code="BX1002",
            at=str(path),
            help="check that --devices names the cluster file and not, say, a checkpoint",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"the file is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}",
            code="BX1003",
            at=f"{path}:{line}",
            help="save it as UTF-8",
        ) from error


def read_document(text: str, source: str) -> Document:
    """Parse strict JSON: no NaN, no duplicate keys, no comments, no trailing commas.

    Raises:
        InputError: with line and column of the first fault.
    """
    if len(text) > MAX_BYTES:
        raise InputError(
            f"the text is longer than {MAX_BYTES:,} characters",
            code="BX1004",
            at=source,
            help="a cluster file is a few kilobytes; list each device once",
        )
    value = _parse(text, source)
    newlines = [match.start() for match in re.finditer("\n", text)]
    lines: dict[JsonPath, int] = {}
    for path, offset, token in _parts(text):
        line = bisect.bisect_left(newlines, offset) + 1
        if path in lines:
            raise Document(source, value, {**lines, path: line}).error(
                path,
                f"the key {quoted(path[-1])} is here twice; it is also on line {lines[path]}",
                "keep one of the two",
                code="BX1005",
            )
        lines[path] = line
        if token in _CONSTANTS:
            raise Document(source, value, lines).error(
                path,
                f"{token} is not JSON",
                'write a finite value with its unit, like "1GB/s"',
                code="BX1006",
            )
    return Document(source, value, lines)


def _parse(text: str, source: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _syntax_error(text, source, error) from error
    except RecursionError as error:
        raise InputError(
            "the file is nested too deeply",
            code="BX1007",
            at=source,
            help="a cluster file is five levels deep; see `bigbrain-fx schema`",
        ) from error
    except ValueError as error:  # Python refuses numbers of more than 4300 digits
        raise InputError(
            "a number in the file has too many digits",
            code="BX1008",
            at=source,
            help="shorten the number",
        ) from error


def _syntax_error(text: str, source: str, error: json.JSONDecodeError) -> InputError:
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    at = f"{source}:{error.lineno}:{error.colno}"
    if not text.strip():
        return InputError(
            "the file is empty", code="BX1009", at=at, help="start from `bigbrain-fx init`"
        )
    if rest[:1] in ("]", "}") and before.endswith(","):
        comma = len(before) - 1
        line, column = text.count("\n", 0, comma) + 1, comma - text.rfind("\n", 0, comma)
        return InputError(
            f"not JSON: a comma before the closing {rest[0]}",
            code="BX1010",
            at=f"{source}:{line}:{column}",
            help="delete the comma",
        )
    if rest.startswith(("//", "/*", "#")):
        return InputError(
            "not JSON: JSON has no comments",
            code="BX1011",
            at=at,
            help='delete the comment, or write it as "$comment": "..."',
        )
    if rest.startswith("'"):
        return InputError(
            "not JSON: a single quote", code="BX1012", at=at, help='write "double quotes"'
        )
    return InputError(
        f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
        code="BX1013",
        at=at,
        help="mend the text there; `bigbrain-fx schema` prints what the file may hold",
    )


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
_CONSTANTS = frozenset(
    {"NaN", "Infinity", "-Infinity"}
)  # not JSON, but Python's reader lets them through


def _parts(text: str) -> Iterator[tuple[JsonPath, int, str]]:
    """Yield (path, offset, first token) of every part of valid JSON text, in file order.

    A member's offset is its key's. The json module does not tell where things are.
    """
    stack: list[str | int] = []  # the path of the value that comes next
    offset, at_key = 0, False
    containers: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in "}]":
            containers.pop()
            stack = stack[: len(containers)]
        elif token == ",":
            at_key = containers[-1] == "{"
            stack[-1] = stack[-1] + 1 if isinstance(stack[-1], int) else stack[-1]
        elif token == ":":
            continue
        elif at_key:
            stack[-1], offset, at_key = json.loads(token), match.start(), False
        else:
            in_object = bool(containers) and containers[-1] == "{"
            yield tuple(stack), offset if in_object else match.start(), token
            if token in "{[":
                containers.append(token)
                stack.append("" if token == "{" else 0)
                at_key = token == "{"
