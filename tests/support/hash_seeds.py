"""What a program prints under several hash seeds: one text, if it leans on no order of sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEEDS = ("0", "1", "42", "4711")


def printed_under_hash_seeds(*words: str) -> set[str]:
    """Run `python WORDS` under each seed at once; return what they printed."""
    # What the tests were given comes along: a third party's package may lie there.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    runs = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    found = {process.communicate(timeout=120)[0].strip() for process in runs}
    assert [process.returncode for process in runs] == [0] * len(SEEDS)
    return found
