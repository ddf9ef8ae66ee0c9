"""The page "Should I rent this?": each of its blocks answers within the processor time it has."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/rent.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## ([^\n]*)\n.*?^```sh\n(.*?)^```", PAGE, re.M | re.S)
PROCESSOR_S = {"LoRA": 60.0}  # 80 layers are traced; of other questions 30 s
LIMIT_S = 900.0


def used_s() -> float:
    """Return the processor seconds of all processes that were started and have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "script"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_question_of_the_page_is_answered(name: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    *files, command = script.rstrip().split("\nbigbrain-fx ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-ec", "\n".join(files)], cwd=tmp_path, env=env, check=True)
    begun_s = used_s()
    done = subprocess.run(
        ["bash", "-ec", f"bigbrain-fx {command}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for word in (" tokens/s", "money: ", " USD a million tokens", "better: "):
        assert word in done.stdout
    assert used_s() - begun_s < PROCESSOR_S.get(name.split()[0], 30.0)


def test_the_page_asks_three_questions() -> None:
    assert len(BLOCKS) == 3
