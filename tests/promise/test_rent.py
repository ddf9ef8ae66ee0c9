"""The page "Should I rent this?": each of its blocks answers within the processor time it has."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from tests.promise.conftest import typed_in_bash

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/rent.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## ([^\n]*)\n.*?^```sh\n(.*?)^```", PAGE, re.M | re.S)
PROCESSOR_S = {"LoRA": 60.0}  # 80 layers are traced; of other questions 30 s


def used_s() -> float:
    """Return the processor seconds of all processes that were started and have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "script"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_question_of_the_page_is_answered(name: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    *files, command = script.rstrip().split("\nbigbrain-fx ")
    typed_in_bash("\n".join(files), tmp_path, OMP_NUM_THREADS="1")
    begun_s = used_s()
    said = typed_in_bash(f"bigbrain-fx {command}", tmp_path, OMP_NUM_THREADS="1")
    for word in (" tokens/s", "money: ", " USD a million tokens", "better: "):
        assert word in said
    assert used_s() - begun_s < PROCESSOR_S.get(name.split()[0], 30.0)


def test_the_page_asks_three_questions() -> None:
    assert len(BLOCKS) == 3
