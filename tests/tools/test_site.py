"""The pages of docs/ become a site without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
