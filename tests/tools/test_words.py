"""Names and prose use the field's words: test names, docstrings, pages, help of the command line.

Rules and words are those of CONTRIBUTING.md; the glossary has the terms.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bigbrain_fx.cli.group import cli
from tests.tools.test_docs import GENERATED, ROOT

# A test, a module or a class is no question and no pronoun.
QUESTION = re.compile(
    r"(?:what|who|whoever|whose|which|where|when|how|whether|those|these|this|it|its|they|their|"
    r"so|nor|others)(?:_|\b(?!-))",
    re.IGNORECASE,
)
SUBJECT = re.compile(r"(?:What|Who|Whoever|Whose|Which|Where|Those|So|Nor|It|They|How far)\b")
# `tools.studies.unlike` is the name of a study; CONTRIBUTING.md quotes the words that it forbids.
PRIVATE = re.compile(
    r"\b(made again|made twice|dice|tastes?|hears?|heard|in words|(?<!studies\.)unlike|alike|"
    r"(?<!\*what, who, )whoever|told|crowd(?:ed)?|members?|lightening)\b",
    re.IGNORECASE,
)

MOST_WORDS = 25
# Packages whose public docstrings have longer sentences, and how many: numbers may only fall.
LONG_SENTENCES = (("core", 4), ("costs", 4), ("plan", 6), ("runtime", 7))
END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`(\[*_\"'])")
SECTION = re.compile(r"(?:Args|Attributes|Returns|Raises|Yields):")
DRAWING = re.compile(r"\S {2,}\S|[─▶│┌└]|>>>|\.\.\. ")


def files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        top = ROOT / folder
        yield from sorted(top.rglob("*.py")) if top.is_dir() else [top]


def docstrings(path: Path) -> Iterator[str]:
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            found = getattr(node, block, ())
            left += found if isinstance(found, list) else ()  # no definition is in an expression


def public_docstrings(path: Path) -> Iterator[str]:
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
            left += [each for each in node.body if not getattr(each, "name", "").startswith("_")]


def sentences(docstring: str) -> Iterator[str]:
    """Yield the sentences of paragraphs, items and entries, without drawings and tables."""
    parts, is_section = [""], False
    for line in docstring.splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        is_section = bool(SECTION.fullmatch(line)) or (is_section and (indent > 0 or not text))
        is_code = bool(DRAWING.search(line)) or (indent >= 4 and not is_section)
        is_code = is_code and not re.match(r"[*-] ", text)
        if not text or is_code or SECTION.fullmatch(line):
            parts.append("")
        elif (is_section and indent == 4) or re.match(r"[*-] |\d+\. ", text):
            parts.append(text)
        else:
            parts[-1] += f" {text}"
    for part in parts:
        yield from END.split(part.strip())


def is_long(sentence: str) -> bool:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split()) > MOST_WORDS


def test_no_test_is_named_by_a_question_or_a_pronoun() -> None:
    found = []
    for path in files("tests"):
        if path.name.startswith("test_") and "golden" not in path.parts:
            names = re.findall(
                r"^\s*def test_(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
            )
            found += [(path.name, name) for name in names if QUESTION.match(name)]
    assert found == []


def test_no_docstring_begins_with_a_question_or_a_pronoun() -> None:
    checked = [
        path
        for path in files("bigbrain_fx", "estimators", "partitioners", "tools")
        if "studies" not in path.parts
    ]
    assert [(p.name, text) for p in checked for text in docstrings(p) if SUBJECT.match(text)] == []


def test_sentences_of_public_docstrings_are_short() -> None:
    found = Counter[str]()
    for path in files("bigbrain_fx", "estimators", "partitioners"):
        long = [s for d in public_docstrings(path) for s in sentences(d) if is_long(s)]
        package, *inside = path.relative_to(ROOT).with_suffix("").parts
        found[inside[0] if package == "bigbrain_fx" else package] += len(long)
    assert {name: count for name, count in found.items() if count} == dict(LONG_SENTENCES)


def test_entries_and_items_are_sentences_of_their_own() -> None:
    text = """Do a thing.

    x  ──▶  y

A sentence. Another one,
on two lines.

* an item

Args:
    one: a first
        entry.
    two: a second.
"""
    assert [*filter(None, sentences(text))] == [
        "Do a thing.",
        "A sentence.",
        "Another one, on two lines.",
        "* an item",
        "one: a first entry.",
        "two: a second.",
    ]


def test_pages_by_hand_have_no_private_words() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    found = []
    for page in pages:
        if page.stem not in (*GENERATED, "schedules"):
            text = page.read_text(encoding="utf-8")
            found += [(page.name, match[0]) for match in PRIVATE.finditer(text)]
    assert found == []


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_help_has_no_private_words(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    texts = [getattr(each, "help", None) or "" for each in command.params]
    assert [text for text in [command.help or "", *texts] if PRIVATE.search(text)] == []


@pytest.mark.parametrize("text", ["what_is_split", "it_stays", "so_do_others", "Whoever asks"])
def test_a_question_or_a_pronoun_is_found(text: str) -> None:
    assert QUESTION.match(text)


@pytest.mark.parametrize("text", ["item_sizes", "sources_are_read", "whole_stages", "It-based"])
def test_a_noun_is_no_pronoun(text: str) -> None:
    assert not QUESTION.match(text)
