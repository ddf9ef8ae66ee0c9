"""Bundles, and an environment in which nothing of bigbrain-fx can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.bundles import cluster, split_small

LIMIT_S = 120.0
NUMPY = {"NUMPY": "1"}  # for torch.distributed.pipelining, whose stages exchange objects with it
BLOCKER = '''"""Nothing of bigbrain-fx, and nothing that it needs beside torch, can be imported."""
import os
import sys

OURS = {"bigbrain_fx", "partitioners", "estimators", "pydantic", "click", "rich"}


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OURS:
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
if "NUMPY" not in os.environ:
    sys.modules["numpy"] = None  # absent, as find_spec sees it too: torch gets by without
'''


@dataclass(frozen=True)
class Outside:
    """Start Python where bigbrain-fx is not: a user's machine."""

    environment: dict[str, str]

    def start(
        self, folder: Path, words: list[str], more: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `python WORDS` in a folder."""
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**self.environment, **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def results(self, *processes: subprocess.Popen[str]) -> list[str]:
        """Wait for all, or end all; return what each printed."""
        try:
            found = [process.communicate(timeout=LIMIT_S) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        for process, (out, err) in zip(processes, found, strict=True):
            assert process.returncode == 0, out + err
        return [out for out, _ in found]

    def python(self, folder: Path, *words: str) -> str:
        """Run `python WORDS` in a folder; return what it printed."""
        return self.results(self.start(folder, list(words)))[0]


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCHELASTIC"))}
    ours = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return Outside({**kept, **ours})


def typed_in_bash(script: str, folder: Path, limit_s: float = 900.0, **more: str) -> str:
    """Type commands in a folder, where bigbrain-fx is this one; return what they print."""
    (folder / "typed.sh").write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "typed.sh"],  # of -c, a job that has ended is no job to wait for
        cwd=folder,
        env={**os.environ, "PATH": path, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with letters.py and its bundle: a chain of two stages, with dropout and a tie."""
    folder = tmp_path_factory.mktemp("letters")
    split_small(folder)
    return folder


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a chain of three stages."""
    folder = tmp_path_factory.mktemp("three")
    split_small(folder, cluster(3))
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a program; return its path."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write
