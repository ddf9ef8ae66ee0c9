"""The tutorial, typed by the letter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/first-split.md"


def commands() -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S))


@pytest.mark.nightly
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "typed.sh").write_text(f"set -ex\n{commands()}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "typed.sh"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("reference = bundle, weights: 31 tensors after 5 steps bitwise",
                 "d1 was killed by signal 9", "<All keys matched successfully>"):  # fmt: skip
        assert line in done.stdout + done.stderr
    written = [len(path.read_text().splitlines()) for path in device_files(tmp_path / "bundle")]
    assert f"{written[0]} and {written[1]} lines" in PAGE.read_text()


def device_files(bundle: Path) -> list[Path]:
    return sorted(bundle.glob("device_*.py"))


def test_the_tutorial_has_commands() -> None:
    assert commands().count("bigbrain-fx ") >= 9
