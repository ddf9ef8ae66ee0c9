"""Pictures, golden code and the site are what the simulator and the emitter say today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.gallery import (
    DOC,
    OVERLAP,
    OVERLAPPING,
    SHELF,
    SHOWN,
    with_code,
    with_pictures,
)
from tools.readme_picture import PICTURE, drawn


@pytest.mark.nightly
def test_the_page_is_as_it_is_drawn() -> None:
    text = DOC.read_text()
    assert all(f"<!-- {schedule} -->" in text for schedule in SHOWN)
    assert with_pictures(text) == text


def test_the_page_of_steps_that_overlap_is_as_it_is_drawn() -> None:
    text = OVERLAP.read_text()
    assert all(f"<!-- {mode} -->" in text for mode in OVERLAPPING)
    assert with_pictures(text) == text


def test_the_gallery_shows_what_is_emitted() -> None:
    text = SHELF.read_text()
    assert text.count("<!-- tests/golden/") >= 7
    assert with_code(text) == text, "python -m tools.gallery"


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo", "sphinx_click"):
        pytest.importorskip(package, reason="pip install '.[docs]'")
    words = ("-W", "--keep-going", "-n", "-q", "-b", "html", ROOT / "docs", tmp_path)
    command = [sys.executable, "-m", "sphinx", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "--micro-batches" in (tmp_path / "reference/cli.html").read_text()
    assert "NextByte" in (tmp_path / "tutorials/first-split.html").read_text()


@pytest.mark.nightly
def test_the_picture_is_that_of_the_plan() -> None:
    assert PICTURE.read_text(encoding="utf-8") == drawn(), "run `python -m tools.readme_picture`"
