"""Commands in the pages exist, with their options; so do tools and linked pages."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bigbrain_fx.cli.group import cli
from tools.conformance.forms import forms

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/**/*.md")),
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
GENERATED = (
    *("api", "bundle-files", "cluster-file", "compatibility", "coverage", "errors", "figures"),
    "pairs",
)
MOST_WORDS = 30_000


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command line of ours that a page shows; `...` stands for anything."""
    for language, block in FENCE.findall(text):
        lines = block.splitlines() if language in ("", "sh") else []
        for line in lines:
            found = re.search(r"(?:^|\()\s*(?:bigbrain-fx|.*python -m bigbrain_fx) (.*)", line)
            if found:
                yield shlex.split(found[1].rstrip(" &"), comments=True)


def of_ours(words: list[str]) -> None:
    """Let click read a command line, without running it or looking for its files."""
    name, *rest = words
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, f"no command {name!r}"
    rest = rest[: rest.index("--")] if "--" in rest else rest
    command.make_parser(click.Context(command, info_name=name)).parse_args(list(rest))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = []
    for words in commands(text):
        try:
            of_ours(words)
        except (click.UsageError, AssertionError) as error:
            wrong.append(f"{' '.join(words)}: {error}")
    assert not wrong


def test_a_command_that_is_none_is_found() -> None:
    shown = "```\nbigbrain-fx split model.py --device c.json\nbigbrain-fx splt model.py\n```"
    for words, error in zip(commands(shown), (click.UsageError, AssertionError), strict=True):
        with pytest.raises(error):
            of_ours(words)


def all_pages() -> tuple[Path, ...]:
    found = (ROOT.glob(pattern) for pattern in ("*.md", "docs/**/*.md", "tools/studies/**/*.md"))
    return tuple(page for pages in found for page in pages if page.name != "CHANGELOG.md")


def test_linked_pages_exist() -> None:
    for page in all_pages():
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([\w./-]+\.[a-z]+)(?:#[^)]*)?\)", text):
            assert (page.parent / link).exists(), (page, link)


def test_tools_that_a_page_names_exist() -> None:
    for page in (ROOT / "Makefile", *all_pages()):
        text = page.read_text(encoding="utf-8")
        for way, name in re.findall(r"(-m\s|`)(tools\.[\w.]*\w)", text):
            place = ROOT.joinpath(*name.split("."))
            runs = (place / "__main__.py").exists() if way != "`" else place.is_dir()
            assert place.with_suffix(".py").exists() or runs, (page.name, name)


def words_by_hand() -> dict[str, int]:
    """Return the words of each page of docs that people write, without generated blocks."""
    found = {}
    for page in sorted(ROOT.glob("docs/**/*.md")):
        text = re.sub(r"<!-- .*? -->.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        if page.stem not in GENERATED:
            found[page.relative_to(ROOT).as_posix()] = len(text.split())
    return found


def test_the_pages_can_be_read() -> None:
    """They had 121,600 words, and nobody found anything."""
    assert sum(words_by_hand().values()) <= MOST_WORDS


def test_pages_count_the_forms_of_training_code_as_the_files_do() -> None:
    """README counted 692, the table 696."""
    table = (ROOT / "docs/reference/coverage.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\w-]+) \| .+ \| (right|warned|opaque|refused|stopped|unseen) \| ",
        table,
        re.MULTILINE,
    )
    assert dict(rows) == {form.name: form.expected for form in forms()}
    counts = Counter(outcome for _, outcome in rows)
    for page in ("README.md", "docs/reference/figures.md", "docs/reference/coverage.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"{len(rows)} forms" in text, page
        for outcome, count in counts.items():
            assert f"{count} {outcome}" in text, page
