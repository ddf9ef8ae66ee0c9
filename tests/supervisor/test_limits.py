"""Limits of the system, and how they are raised."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bigbrain_fx.supervisor.limits import with_remedy

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from pathlib import Path
from bigbrain_fx.supervisor import main
sys.argv = ["launch.py", "--standby", "0", "--logs", "logs"]
main(Path.cwd(), ("d0",), "train.py")
"""


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "ulimit -u"), (errno.ENOMEM, "ulimit -v")],
)
def test_each_limit_has_its_remedy(number: int, said: str) -> None:
    assert said in with_remedy(OSError(number, os.strerror(number)))


def test_errors_of_no_limit_are_reported_as_they_are() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert with_remedy(error) == str(error)


def test_a_run_that_may_open_no_file_says_how_it_could(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-c", RUN),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Too many open files" in done.stderr
    assert "raise the limit of open files (`ulimit -n`)" in done.stderr
    assert "Traceback" not in done.stderr
