"""Tutorials, typed by the letter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.cli.templates import CLUSTER

TUTORIALS = Path(__file__).resolve().parents[2] / "docs/tutorials"
PAGE = TUTORIALS / "first-split.md"
OWN = TUTORIALS / "your-own-training-script.md"


def commands(page: Path = PAGE) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S))


def typed(page: Path, folder: Path) -> str:
    """Type the commands of a page in a folder; return what they print."""
    (folder / "typed.sh").write_text(f"set -ex\n{commands(page)}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "typed.sh"],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.nightly
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    printed = typed(PAGE, tmp_path)
    for line in ("reference = bundle, weights: 31 tensors after 5 steps bitwise",
                 "d1 was killed by signal 9", "<All keys matched successfully>"):  # fmt: skip
        assert line in printed
    written = [len(path.read_text().splitlines()) for path in device_files(tmp_path / "bundle")]
    assert f"{written[0]} and {written[1]} lines" in PAGE.read_text()


@pytest.mark.nightly
def test_a_training_script_becomes_a_model_file(tmp_path: Path) -> None:
    files = re.findall(r"^```python\n(.*?)^```$", OWN.read_text(), re.M | re.S)
    for name, text in zip(("classify.py", "model.py", "check.py"), files, strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "cluster.json").write_text(CLUSTER)
    printed = typed(OWN, tmp_path)
    for line in ("step   319   loss 0.002108", "validation at step 320: accuracy 0.861328"):
        assert line in printed


def device_files(bundle: Path) -> list[Path]:
    return sorted(bundle.glob("device_*.py"))


def test_the_tutorial_has_commands() -> None:
    assert commands().count("bigbrain-fx ") >= 9
