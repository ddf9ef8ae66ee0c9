"""Frozen studies: each has a README and starts; nothing outside imports them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted(path.parent.name for path in ROOT.glob("tools/studies/*/__main__.py"))
CHECKED = ("bigbrain_fx", "partitioners", "estimators", "models", "tools", "tests")
IMPORT = re.compile(r"^\s*(?:from|import) tools(?:\.studies| import studies)", re.MULTILINE)
EMULATED = "from tools.studies.emulation import"


def test_each_study_has_a_question_a_command_a_result_and_a_commit() -> None:
    folders = {
        path.name for path in (ROOT / "tools/studies").iterdir() if (path / "README.md").exists()
    }
    assert folders == set(STUDIES)
    for name in STUDIES:
        text = (ROOT / "tools/studies" / name / "README.md").read_text(encoding="utf-8")
        heads = re.findall(r"^- (\w+(?: at)?):", text, re.MULTILINE)
        assert heads == ["Question", "Command", "Result", "Measured at"], name
        assert f"`python -m tools.studies.{name}" in text


def test_nothing_imports_a_study() -> None:
    """Frozen code may break when the product changes; then nothing else may.

    The emulated cluster is what studies measure on, and one benchmark.
    """
    files = (file for folder in CHECKED for file in (ROOT / folder).rglob("*.py"))
    live = (file for file in files if "studies" not in file.relative_to(ROOT).parts)
    texts = {f: f.read_text(encoding="utf-8").replace(EMULATED, "") for f in live}
    assert [f for f, text in texts.items() if IMPORT.search(text)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_starts(name: str) -> None:
    command = [sys.executable, "-m", f"tools.studies.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
