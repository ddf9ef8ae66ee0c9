"""The certificate and key that supervisors of several hosts share, made as the product says."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from bigbrain_fx.supervisor.secured import Pair, how_to_make


def make(path: Path) -> Path:
    """Make a file of a certificate and its key; without openssl the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here, and makes the certificate")
    words = ["sh", "-c", how_to_make(str(path))]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    return path


def pair(name: str = "ours") -> Pair:
    """Return the pair of a name: the same one in all tests of a process."""
    return _made(name)


@cache
def _made(name: str) -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        return Pair(make(Path(folder) / name))
