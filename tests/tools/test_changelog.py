"""CHANGELOG.md and fragments: released sections never change, and a release joins fragments."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.changelog import RELEASED, faults, fragment_faults, sections

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = "split: a cluster file without links is refused with the line to add."


def test_the_checkout_follows_the_rules() -> None:
    assert faults(ROOT) == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the changelog, of the fragments' folder without fragments, and of the settings."""
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "changes").mkdir()
    for name in ("README.md", "template.md.jinja"):
        shutil.copy(ROOT / "changes" / name, tmp_path / "changes" / name)
    return tmp_path


TWO_LINES = "### Added\n\n- run: an entry that\n  goes on.\n"
RELEASES = "<!-- towncrier: a release goes here -->"


def with_an_edited_line(text: str) -> str:
    line = sections(text)["0.2.0"].splitlines()[4]
    return text.replace(line, f"{line} And more.", 1)


EDITS: dict[str, tuple[Callable[[str], str], int]] = {
    "a released section is edited": (with_an_edited_line, 1),
    "released sections are lost": (lambda text: text[: text.index(RELEASES)], len(RELEASED)),
    "an entry has two lines": (lambda text: text.replace(RELEASES, f"{TWO_LINES}\n{RELEASES}"), 2),
}


@pytest.mark.parametrize(("edit", "count"), EDITS.values(), ids=EDITS)
def test_each_fault_of_the_changelog_is_found(
    checkout: Path, edit: Callable[[str], str], count: int
) -> None:
    path = checkout / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    assert edit(text) != text
    path.write_text(edit(text), encoding="utf-8")
    assert len(faults(checkout)) == count


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no-links.md", SENTENCE),
        ("no-links.repaired.md", SENTENCE),
        ("No Links.fixed.md", SENTENCE),
        ("no-links.fixed.rst", SENTENCE),
        ("no-links.fixed.md", "\n"),
        ("no-links.fixed.md", "split: " + "long " * 40 + "."),
        ("no-links.fixed.md", SENTENCE + " It was accepted."),
        ("no-links.fixed.md", SENTENCE[:-1] + "\nand more."),
        ("no-links.fixed.md", SENTENCE[:-1]),
    ],
)
def test_a_malformed_fragment_is_a_fault(name: str, text: str) -> None:
    assert list(fragment_faults(name, text))


@pytest.mark.parametrize("kind", ["added", "changed", "fixed", "removed"])
def test_a_sentence_is_a_fragment(kind: str) -> None:
    assert not list(fragment_faults(f"no-links.{kind}.md", SENTENCE + "\n"))


def test_a_release_joins_fragments_and_keeps_older_sections(checkout: Path) -> None:
    before = sections((checkout / "CHANGELOG.md").read_text(encoding="utf-8"))
    for kind in ("removed", "fixed", "changed", "added"):
        (checkout / "changes" / f"some-{kind}.{kind}.md").write_text(f"run: {kind} this.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--yes"]
    options = ["--version", "9.9.9", "--date", "2030-01-02", "--dir", str(checkout)]
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=60, cwd=checkout)
    after = sections((checkout / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert after.pop("9.9.9").splitlines() == [
        "## [9.9.9] - 2030-01-02",
        *("", "### Added", "", "- run: added this."),
        *("", "### Changed", "", "- run: changed this."),
        *("", "### Fixed", "", "- run: fixed this."),
        *("", "### Removed", "", "- run: removed this."),
    ]
    assert after == before
    assert {path.name for path in (checkout / "changes").iterdir()} == {
        "README.md",
        "template.md.jinja",
    }
